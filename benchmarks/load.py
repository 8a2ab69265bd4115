"""What the measurements share: photos, servers that are started and ended, load from `wrk`, processes counted, the machine."""

import io
import json
import math
import os
import platform
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}
MOST_PHOTOS = 64  # each server names them all at each of its starts
MOST_BIG = 8
BIG_PIXELS = 12_000_000
BOUNDARY = "----photo-7d93b1c0a54e4f6f"
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE_S = 60  # for one answer; three times as long for a start
SCRIPT = "load.lua"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LIBRARIES = ("torch", "torchvision", "openvino", "onnxruntime", "litserve", "fastapi", "uvicorn", "pillow", "numpy")
SELF_SIGNED = ssl._create_unverified_context()
# No proxy between two processes of one machine, and no authority that would know its certificate.
HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=SELF_SIGNED))
Body = tuple[str, bytes]  # content type and bytes of a request
Figures = dict[str, float]  # what one measurement says, by name


def say(text: str) -> None:
    """A line for whoever watches: the tables alone go to the standard output."""
    print(text, file=sys.stderr, flush=True)


def cores() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
    """The CPU, and the versions of what does the work."""
    fields = dict(line.partition(":")[::2] for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    known = {key.strip(): value.strip() for key, value in fields.items()}
    flags = set(known.get("flags", known.get("Features", "")).split())
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    bf16 = sorted(flags & {"avx512_bf16", "amx_bf16", "bf16"})
    return {"cores": cores(), "cpu": known.get("model name", platform.machine()), "bf16": bf16, "versions": versions}


# Photos


@dataclass(frozen=True)
class Photo:
    """The bytes of an image file."""

    name: str
    data: bytes
    type: str = "image/jpeg"
    upright: bool = True  # False: the camera was turned, which Spyglass honours and most servers don't


def gather(folder: Path) -> list[Photo]:
    """JPEG, PNG and WebP files of a folder and of those inside it; of very many, some from all over. What Pillow can't read is named."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    photos = []
    for path in _some(files, MOST_PHOTOS):
        try:
            with Image.open(path) as image:
                image.load()
                upright = image.getexif().get(0x0112, 1) == 1
                photos.append(Photo(path.name, path.read_bytes(), Image.MIME.get(image.format or "", "image/jpeg"), upright))
        except Exception as error:
            say(f"left out, it is no image that Pillow can read: {path.name}: {error}")
    return photos or sys.exit(f"error: no JPEG, PNG or WebP files in {folder}")


def _some(things: Sequence[Any], most: int) -> list[Any]:
    return [things[len(things) * index // most] for index in range(most)] if len(things) > most else list(things)


def big(photos: Sequence[Photo]) -> list[Photo]:
    """A few of them in the size of a phone's: 12 megapixels, JPEG of quality 90. Those that are that large stay as they are."""
    found = []
    for photo in _some(photos, MOST_BIG):
        with Image.open(io.BytesIO(photo.data)) as image:
            scale = (BIG_PIXELS / (image.width * image.height)) ** 0.5
            if scale > 1:
                size = (round(image.width * scale), round(image.height * scale))
                image.convert("RGB").resize(size, Image.Resampling.BICUBIC).save(file := io.BytesIO(), "JPEG", quality=90)
                photo = Photo(photo.name, file.getvalue(), upright=photo.upright)
        found.append(photo)
    return found


def request_body(photo: Photo, kind: str) -> Body:
    """The request for one photo: `multipart` with the field `content`, or `raw`."""
    if kind == "raw":
        return photo.type, photo.data
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="content"; filename="photo"\r\nContent-Type: {photo.type}\r\n\r\n'
    return f"multipart/form-data; boundary={BOUNDARY}", head.encode() + photo.data + f"\r\n--{BOUNDARY}--\r\n".encode()


# Processes


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


def busy_seconds() -> float:
    """CPU time of the whole machine since it started, with what its host took."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split()[1:9]]  # 3 and 4: idle; the last: stolen by the host
    return (sum(ticks) - ticks[3] - ticks[4]) / TICKS_PER_S


def cpu_seconds(leader: int) -> tuple[float, float]:
    """CPU time of a server, and of all on this machine that is neither it nor a child of ours, such as wrk."""
    server, mine = sum(family(leader).values()), os.times()
    return server, busy_seconds() - server - mine.children_user - mine.children_system


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


# Servers


def _best(answer: Any) -> tuple[str, float]:
    best = answer["predictions"][0]
    return str(best["label"]), float(best["probability"])


@dataclass(frozen=True)
class Server:
    """How to start one server and talk to it. In the command and the environment these are filled in: `{python}`, `{checkpoint}`,
    `{port}`, `{folder}` (a temporary one, the same for the whole run), `{workers}` and `{threads}`."""

    name: str
    command: str
    ready: str  # path that answers 200 once images can be classified
    predict: str
    environment: Mapping[str, str] = field(default_factory=dict)
    info: str = ""  # path that says how many images and batches the workers have done, if there is one
    body: str = "multipart"  # with the field `content`; or "raw"
    best: Callable[[Any], tuple[str, float]] = _best  # the best label in its JSON answer, and its probability
    tuned: bool = False  # the best numbers of workers and threads are searched for
    workers: int = 1
    threads: int = 1
    scheme: str = "http"


@dataclass(frozen=True)
class Live:
    """A server that is ready."""

    server: Server
    pid: int
    base: str
    ready_s: float

    def classify(self, body: Body, name: str = "a photo") -> tuple[str, float]:
        """The best label for one photo, and its probability."""
        request = urllib.request.Request(self.base + self.server.predict, data=body[1], headers={"Content-Type": body[0]})
        try:
            with HTTP.open(request, timeout=PATIENCE_S) as answer:
                return self.server.best(json.load(answer))
        except urllib.error.HTTPError as error:
            sys.exit(f"error: {self.server.name} answered {error.code} to {name}: {error.read(500).decode(errors='replace')}")

    def workers(self) -> list[dict[str, Any]]:
        """What the server says of its workers; nothing where it doesn't."""
        if not self.server.info:
            return []
        with HTTP.open(self.base + self.server.info, timeout=PATIENCE_S) as answer:
            return list(json.load(answer)["workers"])


@contextmanager
def running(server: Server, checkpoint: Path, folder: Path) -> Iterator[Live]:
    """Starts a server in a session of its own, waits until it is ready, and ends all its processes in the end."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    facts = {"python": sys.executable, "checkpoint": checkpoint.resolve(), "port": port, "folder": folder}
    facts |= {"workers": server.workers, "threads": server.threads}
    command = [word.format(**facts) for word in server.command.split()]
    environment = os.environ | {name: value.format(**facts) for name, value in server.environment.items()}
    base, log, started = f"{server.scheme}://127.0.0.1:{port}", folder / "server.log", time.monotonic()
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
        )
    try:
        while process.poll() is None and time.monotonic() < started + 3 * PATIENCE_S:
            with suppress(OSError), HTTP.open(base + server.ready, timeout=5):  # refused, reset, or not a 200 yet
                break
            time.sleep(0.02)
        else:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            sys.exit(f"error: {server.name} did not become ready (exit code {process.poll()}). Its last lines:\n{tail}")
        yield Live(server, process.pid, base, time.monotonic() - started)
    finally:
        stop(process)


# Load

# Requests are put together once, so that wrk costs the servers as little of the machine as can be.
LUA = """
local turn = 0
function init()
  for i, photo in ipairs(photos) do
    local file = assert(io.open(photo[2], "rb"))
    photos[i] = wrk.format("POST", nil, {["Content-Type"] = photo[1]}, file:read("*a"))
    file:close()  -- wrk takes a socket only where its number is low
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
    folder.mkdir(exist_ok=True)
    photos = ""
    for number, (content_type, body) in enumerate(bodies):
        (file := folder / f"body{number}").write_bytes(body)
        photos += f"{{{json.dumps(content_type)}, {json.dumps(str(file))}}}, "
    (script := folder / SCRIPT).write_text(f"local photos = {{{photos}}}\n{LUA}")
    return script


def drive(live: Live, script: Path, concurrency: int, seconds: int) -> Figures:
    """One run of wrk: requests, seconds, p50_ms, p99_ms, non_2xx, errors."""
    threads = min(concurrency, max(1, (os.cpu_count() or 1) // 8))
    command = f"wrk -t{threads} -c{concurrency} -d{seconds}s --timeout {PATIENCE_S}s {live.base}{live.server.predict} -s".split()
    done = subprocess.run([*command, str(script)], capture_output=True, text=True)
    found = done.stdout.partition("RESULT ")[2] or sys.exit(f"error: wrk failed ({done.returncode}): {done.stderr}")
    run: Figures = json.loads(found)
    if run["requests"] == 0:  # wrk says 0 ms then
        run |= {"p50_ms": math.nan, "p99_ms": math.nan}
    return run
