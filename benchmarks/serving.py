"""Measures Spyglass against other servers of the same model: same photos, same load tool, in turn.

Every round starts each server afresh, warms it, drives it with `wrk` and stops it, and the next round goes the other
way round. Only one server lives at a time: LitServe's loop spins while idle and would cost its neighbour a core, and
freezing it (SIGSTOP) is no way out: a server that watches its workers' heartbeats takes them for dead when it thaws.
A restart costs seconds, treats all servers alike, shares no memory or device, and makes the rounds independent.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TYPES = {".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".png": "image/png", ".webp": "image/webp"}
BOUNDARY = "----photo-7d93b1c0a54e4f6f"
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE_S = 60  # for one answer; three times as long for a start
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
AGREEMENT = 0.9  # of top-1: preprocessing and precision may tip a rare close call, a wrong model or label list far more
HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy between two processes of one machine
Body = tuple[str, bytes]  # content type and bytes of a request
Figures = dict[str, float]  # what one round says about one server, by the keys of COLUMNS
COLUMNS = {
    **{"images_per_s": "images/s", "p50_ms": "p50 ms", "p99_ms": "p99 ms", "alone_p50_ms": "alone p50 ms", "alone_p99_ms": "alone p99 ms"},
    **{"cpu_ms_per_image": "CPU ms/image", "memory_mb": "PSS MB", "ready_s": "ready s", "non_2xx": "non-2xx", "errors": "errors"},
    "others_percent": "others %",  # of the machine, used by other processes: a round with more than a few is worth little
}


@dataclass(frozen=True)
class Server:
    """How to start one server and talk to it. `{python}`, `{checkpoint}` and `{port}` in the command are filled in."""

    name: str
    command: str
    ready: str  # path that answers 200 once images can be classified
    predict: str
    body: str = "multipart"  # with the field `content`; or "raw"
    top1: Callable[[Any], str] = lambda answer: str(answer["predictions"][0]["label"])  # the best label in its JSON answer


# All get the identical multipart bytes, the form that LitServe documents for files: so the figures differ by the servers and
# not by what they were sent. `--ours-raw` shows what the plain body that Spyglass also takes is worth.
SERVERS = {
    "spyglass": Server("spyglass", "{python} -m service --checkpoint {checkpoint} --port {port} --host 127.0.0.1", "/readyz", "/predict"),
    "quickstart": Server("quickstart", "{python} -m benchmarks.quickstart --checkpoint {checkpoint} --port {port}", "/health", "/predict"),
}


def family(leader: int) -> dict[int, float]:
    """Pid -> CPU seconds of every living process of the leader's session, and of its descendants elsewhere."""
    rows: dict[int, tuple[int, int, float]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ended meanwhile
            # The command's name comes in brackets and may hold anything; behind the last bracket all is numbers.
            fields = stat.read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX":  # a zombie that nobody waits for has ended too
                # User and system time, its own and that of children waited for: nothing is lost when a worker is replaced.
                rows[int(stat.parent.name)] = (int(fields[1]), int(fields[3]), sum(map(int, fields[11:15])) / TICKS_PER_S)
    found = {pid for pid, (_, session, _) in rows.items() if session == leader}
    while more := {pid for pid, (parent, _, _) in rows.items() if parent in found} - found:
        found |= more
    return {pid: rows[pid][2] for pid in found}


def memory_mb(pids: Iterable[int]) -> float:
    """Sum of the proportional set sizes: a page that several processes share counts once."""
    kilobytes = 0
    for pid in pids:
        with suppress(OSError):
            kilobytes += int(Path(f"/proc/{pid}/smaps_rollup").read_text().partition("\nPss:")[2].split()[0])
    return kilobytes / 1024


def cpu_seconds(leader: int) -> tuple[float, float]:
    """CPU time of a server, and of all on this machine that is neither it nor a child of ours, such as wrk."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split()[1:9]]  # 3 and 4: idle; the last: stolen by the host
    server, mine = sum(family(leader).values()), os.times()
    return server, (sum(ticks) - ticks[3] - ticks[4]) / TICKS_PER_S - server - mine.children_user - mine.children_system


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a server and all that it started: politely first, then not. A second Ctrl-C can't cut this short."""
    kept = [(number, signal.signal(number, signal.SIG_IGN)) for number in STOPPING]
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=25)
    # LitServe's parent dies of SIGTERM and leaves its children: they get two seconds to notice, no more.
    kill_at = time.monotonic() + 2
    while (left := family(process.pid)) and time.monotonic() < kill_at + 8:
        for pid in left if time.monotonic() > kill_at else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
        process.poll()  # a leader that had to be killed is waited for
    for number, handler in kept:
        signal.signal(number, handler)
    assert not left, f"processes {sorted(left)} would not end"


def request_body(photo: Path, kind: str) -> Body:
    """The request for one photo."""
    image, image_type = photo.read_bytes(), TYPES[photo.suffix.lower()]
    if kind == "raw":
        return image_type, image
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="content"; filename="photo"\r\nContent-Type: {image_type}\r\n\r\n'
    return f"multipart/form-data; boundary={BOUNDARY}", head.encode() + image + f"\r\n--{BOUNDARY}--\r\n".encode()


@dataclass(frozen=True)
class Live:
    """A server that is ready."""

    server: Server
    pid: int
    base: str
    ready_s: float

    def classify(self, body: Body) -> str:
        """The best label for one photo."""
        request = urllib.request.Request(self.base + self.server.predict, data=body[1], headers={"Content-Type": body[0]})
        try:
            with HTTP.open(request, timeout=PATIENCE_S) as answer:
                return self.server.top1(json.load(answer))
        except urllib.error.HTTPError as error:
            sys.exit(f"error: {self.server.name} answered {error.code}: {error.read(500).decode(errors='replace')}")


@contextmanager
def running(server: Server, checkpoint: Path, folder: Path) -> Iterator[Live]:
    """Starts a server in a session of its own, waits until it is ready, and ends all its processes in the end."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [word.format(python=sys.executable, checkpoint=checkpoint.resolve(), port=port) for word in server.command.split()]
    base, log, started = f"http://127.0.0.1:{port}", folder / "server.log", time.monotonic()
    with log.open("wb") as sink:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True)
    try:
        while process.poll() is None and time.monotonic() < started + 3 * PATIENCE_S:
            with suppress(OSError), HTTP.open(base + server.ready, timeout=5):  # refused, reset, or not a 200 yet
                break
            time.sleep(0.05)
        else:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            sys.exit(f"error: {server.name} did not become ready (exit code {process.poll()}). Its last lines:\n{tail}")
        yield Live(server, process.pid, base, time.monotonic() - started)
    finally:
        stop(process)


# Requests are put together once, so that wrk costs the servers as little of the machine as can be.
LUA = """
local turn = 0
function init()
  for i, photo in ipairs(photos) do
    photos[i] = wrk.format("POST", nil, {["Content-Type"] = photo[1]}, assert(io.open(photo[2], "rb")):read("*a"))
  end
end
function request() turn = turn % #photos + 1; return photos[turn] end
function done(summary, latency, _)
  local e = summary.errors
  io.write(string.format('RESULT {"requests": %d, "seconds": %.6f, "p50_ms": %.3f, "p99_ms": %.3f, "non_2xx": %d, "errors": %d}\\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3, e.status,
    e.connect + e.read + e.write + e.timeout))
end
"""


def write_script(bodies: Sequence[Body], folder: Path) -> Path:
    """The wrk script that posts these bodies in turn, with its files beside it."""
    photos = ""
    for number, (content_type, body) in enumerate(bodies):
        (file := folder / f"body{number}").write_bytes(body)
        photos += f"{{{json.dumps(content_type)}, {json.dumps(str(file))}}}, "
    (script := folder / "load.lua").write_text(f"local photos = {{{photos}}}\n{LUA}")
    return script


def drive(live: Live, script: Path, concurrency: int, seconds: int) -> Figures:
    """One run of wrk: requests, seconds, p50_ms, p99_ms, non_2xx, errors."""
    threads = min(concurrency, max(1, (os.cpu_count() or 1) // 8))
    command = f"wrk -t{threads} -c{concurrency} -d{seconds}s --timeout {PATIENCE_S}s {live.base}{live.server.predict} -s".split()
    done = subprocess.run([*command, str(script)], capture_output=True, text=True)
    found = done.stdout.partition("RESULT ")[2] or sys.exit(f"error: wrk failed ({done.returncode}): {done.stderr}")
    return dict(json.loads(found))


def measure(live: Live, script: Path, body: Body, concurrency: int, seconds: int) -> Figures:
    """Warms the server, then one run at `concurrency` and one of half its length with one request at a time."""
    drive(live, script, concurrency, max(2, seconds // 3))
    live.classify(body)  # waits behind what the warm-up left in the queue
    before = cpu_seconds(live.pid)
    load = drive(live, script, concurrency, seconds)
    cpu, others = (after - start for start, after in zip(before, cpu_seconds(live.pid), strict=True))
    memory = memory_mb(family(live.pid))
    live.classify(body)
    alone = drive(live, script, 1, max(1, seconds // 2))
    answered = load["requests"] - load["non_2xx"]
    return {
        "images_per_s": answered / load["seconds"],
        **{key: load[key] for key in ("p50_ms", "p99_ms")},
        **{f"alone_{key}": alone[key] for key in ("p50_ms", "p99_ms")},
        "cpu_ms_per_image": 1000 * cpu / max(answered, 1),
        "memory_mb": memory,
        "ready_s": live.ready_s,
        **{key: load[key] + alone[key] for key in ("non_2xx", "errors")},
        "others_percent": 100 * others / load["seconds"] / (os.cpu_count() or 1),
    }


def ratios(ours: Sequence[Figures], peer: Sequence[Figures]) -> Figures:
    """Ours over the peer's, round by round, then the median: what slows the machine for a round slows both."""
    keys = [key for key in COLUMNS if key != "others_percent" and all(figures[key] for figures in peer)]
    return {key: statistics.median(a[key] / b[key] for a, b in zip(ours, peer, strict=True)) for key in keys}


def table(results: dict[str, list[Figures]]) -> str:
    """A Markdown table: median (least-most) over the rounds, a line per server, and a line per peer with the ratios."""
    rows = [["server", *COLUMNS.values()]]
    for name, rounds in results.items():
        values = [[figures[key] for figures in rounds] for key in COLUMNS]
        rows.append([name, *(f"{statistics.median(v):.1f} ({min(v):.1f}-{max(v):.1f})" if any(v) else "0" for v in values)])
    ours, *peers = results
    for peer in peers:
        found = ratios(results[ours], results[peer])
        rows.append([f"{ours} / {peer}", *(f"{found[key]:.2f}" if key in found else "" for key in COLUMNS)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows)


def compare(servers: dict[str, Server], options: argparse.Namespace, folder: Path) -> dict[str, list[Figures]]:
    """All the rounds. Each start of a server also has it name every photo, and all servers must agree."""
    photos = sorted(path for path in options.photos.iterdir() if path.suffix.lower() in TYPES) or sys.exit("error: no photos")
    results: dict[str, list[Figures]] = {name: [] for name in servers}
    expected: list[str] = []
    for number in range(options.rounds):
        for name in reversed(servers) if number % 2 else servers:
            bodies = [request_body(photo, servers[name].body) for photo in photos]
            with running(servers[name], options.checkpoint, folder) as live:
                labels = [live.classify(body) for body in bodies]
                expected = expected or labels
                same = sum(a == b for a, b in zip(labels, expected, strict=True))
                if same < AGREEMENT * len(photos):
                    sys.exit(f"error: {name} names only {same} of {len(photos)} photos alike: {labels}, not {expected}")
                figures = measure(live, write_script(bodies, folder), bodies[0], options.concurrency, options.seconds)
            results[name].append(figures)
            line = ", ".join(f"{title} {figures[key]:.1f}" for key, title in COLUMNS.items())
            print(f"round {number + 1} {name}: {line}, same top-1 on {same}/{len(photos)}", file=sys.stderr, flush=True)
    return results


def main() -> None:
    """Reads the command line, measures, prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "checkpoints/efficientnet_lite0.safetensors")
    parser.add_argument("--photos", type=Path, default=ROOT / "examples", help="folder of JPEG, PNG or WebP files")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS), help="ours first; one twice shows the noise")
    for name, default in (("--concurrency", 16), ("--seconds", 10), ("--rounds", 5)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--ours-raw", action="store_true", help="post plain image bytes to Spyglass, multipart to the others")
    parser.add_argument("--json", type=Path, help="also write every round's figures to this file")
    options = parser.parse_args()
    if shutil.which("wrk") is None:
        parser.error("wrk, which makes the load, is missing: apt install wrk")
    if not options.checkpoint.is_file():
        parser.error(f"no checkpoint at {options.checkpoint}")
    servers: dict[str, Server] = {}
    for name in options.servers:
        server = replace(SERVERS[name], body="raw") if options.ours_raw and name == "spyglass" else SERVERS[name]
        servers[f"{name} ({len(servers) + 1})" if name in servers else name] = server
    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, lambda got, _: sys.exit(128 + got))  # an exception, so that every `finally` runs
    with tempfile.TemporaryDirectory(prefix="serving-") as folder:
        results = compare(servers, options, Path(folder))
    print(table(results))
    if options.json:
        report = {"cores": os.cpu_count(), "settings": vars(options), "rounds": results}  # of a path the name: reports are shared
        options.json.write_text(json.dumps(report, indent=1, default=lambda path: path.name))


if __name__ == "__main__":
    main()
