"""Measures what bodies that are too large or too slow do to Spyglass: to their senders, to its memory, to the others whom it serves.

Each way of sending posts `--gigabytes` against the default limit of 20 MB and must read a 413, while small requests beside it are
timed and the front doors' memory is watched. Then many connections send a byte a second, and must read a 504 after their deadline.
All of it in the clear and over TLS. Exits 1 when something does not hold.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import requests

from benchmarks import load
from benchmarks.load import ROOT, SELF_SIGNED, Live, Server, say

BLOCK = bytes(262_144)
GROWTH_MB = 50  # of the front doors at their worst: the 20 MB that are allowed, and what it takes to receive them
KEPT_MB = 30  # of that after an answer
P99_MS = {"/livez": 250, "/predict": 1000}  # of small requests beside it, on two cores that senders and server share
SLOW_DEADLINE_S = 10
OURS = Server(
    "spyglass",
    "{python} -m service --checkpoint {checkpoint} --port {port} --host 127.0.0.1",
    "/readyz",
    "/predict",
    environment={"SPYGLASS_CACHE_DIR": "{folder}/cache"},
    info="/info",
)
Send = Callable[[str, Path], int]


def connect(base: str, timeout: float = load.PATIENCE_S) -> http.client.HTTPConnection:
    """A connection to the server, of either scheme."""
    address = urlsplit(base)
    if address.scheme == "https":
        return http.client.HTTPSConnection(address.hostname or "", address.port, timeout=timeout, context=SELF_SIGNED)
    return http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout)


def blocks(size: int) -> Iterator[bytes]:
    """`size` zero bytes, rounded up to whole blocks."""
    for _ in range(-(-size // len(BLOCK))):
        yield BLOCK


def by_http_client(base: str, file: Path, *, announced: bool) -> int:
    """The status that http.client reads, which sends everything first."""
    size = -(-file.stat().st_size // len(BLOCK)) * len(BLOCK)
    client = connect(base)
    client.request("POST", "/predict", blocks(size), {"content-length": str(size)} if announced else {})
    answer = client.getresponse()
    answer.read()
    if answer.status == 413:  # and it may go on
        client.request("GET", "/livez")
        assert client.getresponse().status == 200
    return answer.status


def by_requests(base: str, file: Path, *, announced: bool) -> int:
    """The status that requests reads."""
    with file.open("rb") as body, requests.Session() as session:
        session.trust_env = False
        data = body if announced else blocks(file.stat().st_size)
        return session.post(f"{base}/predict", data=data, verify=False, timeout=load.PATIENCE_S).status_code


def by_curl(base: str, file: Path, *options: str) -> int:
    """The status that curl reads; `-T FILE` announces the length, `-T -` does not."""
    command = ["curl", "-sk", "--noproxy", "*", "-o", os.devnull, "-w", "%{http_code}", "-X", "POST", *options, f"{base}/predict"]
    with file.open("rb") as body:
        done = subprocess.run([str(file) if word == "FILE" else word for word in command], stdin=body, capture_output=True, text=True)
    return int(done.stdout or 0)


def http_announced(base: str, file: Path) -> int:
    return by_http_client(base, file, announced=True)


def http_chunked(base: str, file: Path) -> int:
    return by_http_client(base, file, announced=False)


def requests_announced(base: str, file: Path) -> int:
    return by_requests(base, file, announced=True)


def requests_chunked(base: str, file: Path) -> int:
    return by_requests(base, file, announced=False)


def curl_announced(base: str, file: Path) -> int:
    return by_curl(base, file, "-H", "Expect:", "-T", "FILE")


def curl_expecting(base: str, file: Path) -> int:
    return by_curl(base, file, "-T", "FILE")


def curl_chunked(base: str, file: Path) -> int:
    return by_curl(base, file, "-H", "Expect:", "-T", "-")


WAYS: list[Send] = [http_announced, http_chunked, requests_announced, requests_chunked, curl_announced, curl_expecting, curl_chunked]


class Watch:
    """The front doors' memory, and small requests beside whatever else is going on."""

    def __init__(self, live: Live, photo: bytes) -> None:
        self.base, self.photo = live.base, photo
        self.doors = load.family(live.pid).keys() - {live.pid} - {int(worker["pid"]) for worker in live.workers()}
        for pid in self.doors:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
        self.before = self.memory("VmRSS")
        self.times: dict[str, list[float]] = {"/livez": [], "/predict": []}

    def memory(self, field: str) -> float:
        """Megabytes of all front doors."""
        return sum(int(Path(f"/proc/{pid}/status").read_text().partition(f"{field}:")[2].split()[0]) for pid in self.doors) / 1000

    def until(self, done: Callable[[], bool]) -> None:
        """Ask in turn for a probe and for a photo, on one connection, until it is done."""
        client = connect(self.base)
        while not done():
            for path, times in self.times.items():
                begun = time.monotonic()
                client.request("POST" if path == "/predict" else "GET", path, self.photo if path == "/predict" else None)
                answer = client.getresponse()
                answer.read()
                assert answer.status == 200, f"{path}: {answer.status}"
                times.append(1000 * (time.monotonic() - begun))
            time.sleep(0.02)
        client.close()

    def row(self, what: str, expected: str, found: str, seconds: float) -> bool:
        """Print the row of a measurement; whether all holds."""
        peak, after = self.memory("VmHWM"), self.memory("VmRSS")
        cells = [f"{what:28}", f"{found:10}", f"{seconds:6.1f}", f"{self.before:6.0f} {peak:6.0f} {after:6.0f}"]
        good = found == expected and peak - self.before < GROWTH_MB and after - self.before < KEPT_MB
        for path, times in self.times.items():
            centiles = statistics.quantiles(times, n=100) if len(times) > 1 else [0.0] * 99
            cells.append(f"{len(times):5} {centiles[49]:7.1f} {centiles[98]:7.1f}")
            good = good and centiles[98] < P99_MS[path]
        print("  ".join([*cells, "ok" if good else "NO"]), flush=True)
        return good


def rest(live: Live, photo: bytes, seconds: float) -> Watch:
    """Small requests and nothing beside them."""
    watch, end = Watch(live, photo), time.monotonic() + seconds
    watch.until(lambda: time.monotonic() > end)
    return watch


def send_too_much(live: Live, photo: bytes, file: Path, way: Send, pool: ProcessPoolExecutor) -> bool:
    """One way of sending far too much."""
    watch, begun = Watch(live, photo), time.monotonic()
    sent: Future[int] = pool.submit(way, live.base, file)
    watch.until(sent.done)
    error = sent.exception()
    return watch.row(
        f"{live.server.scheme} {way.__name__}", "413", type(error).__name__ if error else str(sent.result()), time.monotonic() - begun
    )


def send_slowly(live: Live, photo: bytes, count: int, seconds: float) -> bool:
    """Many connections that send a byte a second."""
    watch, begun = Watch(live, photo), time.monotonic()
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\nX-Timeout-Ms: {SLOW_DEADLINE_S * 1000}\r\n\r\n".encode()
    address = urlsplit(live.base)
    answers: list[bytes] = []

    def drip() -> None:
        with ExitStack() as stack:
            slow: list[socket.socket] = []
            for _ in range(count):
                one = stack.enter_context(socket.create_connection((address.hostname, address.port), timeout=load.PATIENCE_S))
                if address.scheme == "https":
                    one = stack.enter_context(SELF_SIGNED.wrap_socket(one))
                one.sendall(head)
                slow.append(one)
            while time.monotonic() < begun + seconds:
                time.sleep(1)
                for one in slow:
                    one.sendall(b"x")
            answers.extend(one.recv(65536).split(b" ")[1] for one in slow)

    thread = threading.Thread(target=drip)
    thread.start()
    watch.until(lambda: not thread.is_alive())
    thread.join()
    found = f"{answers.count(b'504')} x 504"
    return watch.row(f"{live.server.scheme} {count} slow", f"{count} x 504", found, time.monotonic() - begun)


def main() -> None:
    """Reads the command line, measures, prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bodies", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "checkpoints/efficientnet_lite0.safetensors")
    parser.add_argument("--gigabytes", type=float, default=2)
    parser.add_argument("--slow", type=int, default=200, help="connections that send a byte a second")
    parser.add_argument("--seconds", type=float, default=15, help="how long they do")
    options = parser.parse_args()
    if options.seconds <= SLOW_DEADLINE_S:
        parser.error(f"--seconds: they are answered after {SLOW_DEADLINE_S} s")
    ways = [way for way in WAYS if shutil.which("curl") or "curl" not in way.__name__]
    photo = (ROOT / "examples/coffee.jpg").read_bytes()
    good = True
    print(json.dumps(load.machine()))
    print(f"{'':28}  {'answer':10}  {'s':>6}  {'MB before, peak, after':20}  {'livez: n p50 p99 ms':21}  predict: n p50 p99 ms")
    with tempfile.TemporaryDirectory(prefix="bodies-") as temporary:
        folder = Path(temporary)
        (file := folder / "body").touch()
        os.truncate(file, int(options.gigabytes * 1e9))
        make = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -keyout key.pem -out cert.pem"
        subprocess.run(make.split(), cwd=folder, check=True, capture_output=True)
        files = {"SPYGLASS_SSL_CERTFILE": "{folder}/cert.pem", "SPYGLASS_SSL_KEYFILE": "{folder}/key.pem"}
        safe = Server(**{**vars(OURS), "environment": {**OURS.environment, **files}, "scheme": "https"})
        with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
            for server in (OURS, safe):
                with load.running(server, options.checkpoint, folder) as live:
                    say(f"{server.scheme}: ready after {live.ready_s:.1f} s")
                    rest(live, photo, 5)  # larger batches are made ready
                    rest(live, photo, 5).row(f"{server.scheme} nothing else", "", "", 5)
                    for way in ways:
                        good = send_too_much(live, photo, file, way, pool) and good
                    good = send_slowly(live, photo, options.slow, options.seconds) and good
    sys.exit(not good)


if __name__ == "__main__":
    main()
