"""Feeds the decoder, and then the server, mutated image files, and exits 1 where either does what it must not.

    photos -> subjects: every format, coding and mode that matters -> mutated(seed, number): cut, flipped, spliced, lengths and counts
    that lie -> Preprocessing.read in several threads of a process of its own -> pixels or an ImageError of a known code
             -> POST /predict as raw, multipart and JSON bodies -> 200 or a 4xx

A file is known by its number: `--make SEED:NUMBER` writes it to the standard output, so that what was slow or crashed can be made again.
"""

import argparse
import base64
import ctypes
import faulthandler
import gc
import itertools
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import load
from benchmarks.load import ROOT, say
from benchmarks.mutations import mutated, subjects
from benchmarks.serving import OURS, SERVERS
from models.checkpoint import read_header
from models.images import ImageError
from service.machine import give_large_back, share_heap

CODES = {"not_an_image", "unsupported_format", "image_too_large", "image_corrupt"}
LIMIT_S = 10.0  # CPU time that one file may take: as long as a request may
GROWTH_PERCENT = 3.0
READINGS = 50  # of memory, spread over all files after the warm-up, which is as many again: by then a small process has settled
THREADS = 4

# In process


@dataclass
class Found:
    """What became of the files of one run."""

    answers: Counter[str] = field(default_factory=Counter)  # by code or HTTP status
    wrong: list[str] = field(default_factory=list)
    slowest: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, number, bytes; the longest first
    memory_mb: list[float] = field(default_factory=list)  # READINGS of them
    peak_mb: float = 0.0  # of the decoding process

    @property
    def floors_mb(self) -> tuple[float, float]:
        """The least memory in the first fifth of the readings, and in the last one.

        The least, since the heap keeps some of what the last pictures took until others need it: that comes and goes, and what leaks
        stays.
        """
        fifth = READINGS // 5
        return min(self.memory_mb[:fifth]), min(self.memory_mb[-fifth:])

    @property
    def growth_percent(self) -> float:
        before, after = self.floors_mb
        return 100 * (after / before - 1)

    def add(self, answer: str, seconds: float, number: int, size: int) -> None:
        self.answers[answer] += 1
        self.slowest = sorted([*self.slowest, (seconds, number, size)], reverse=True)[:5]


def _parted(count: int) -> list[range]:
    """The numbers of the warm-up, and then 0 to `count` in READINGS parts."""
    ends = [count * part // READINGS for part in range(READINGS + 1)]
    return [range(count, 2 * count), *itertools.starmap(range, itertools.pairwise(ends))]


def in_process(read: Callable[[bytes], Any], files: Sequence[bytes], seed: int, count: int, nows: Sequence[Any]) -> Found:
    """Reads `count` mutated files in as many threads as there are `nows`, which tell whoever outlives a crash what number each is at."""
    found, lock = Found(), threading.Lock()

    def read_all(numbers: Iterator[int], now: Any) -> None:
        for number in numbers:
            now.value = number
            data, begun = mutated(files, seed, number), time.thread_time()
            try:
                read(data)
                answer = "decoded"
            except ImageError as error:
                answer = error.code
            except BaseException as error:  # whatever it is, it must not come out
                answer = repr(error)
            seconds = time.thread_time() - begun
            with lock:
                found.add(answer, seconds, number, len(data))
                if answer not in {"decoded"} | CODES:
                    found.wrong.append(f"{seed}:{number}: {answer}")
                if seconds > LIMIT_S:
                    found.wrong.append(f"{seed}:{number}: {seconds:.1f} s of CPU time")

    with ThreadPoolExecutor(len(nows)) as pool:
        for part in _parted(count):
            list(pool.map(read_all, itertools.repeat(iter(part)), nows))  # each thread takes the next number
            gc.collect()  # so that what is read is in use
            ctypes.CDLL(None).malloc_trim(0)
            found.memory_mb.append(load.memory_mb([os.getpid()]))
    del found.memory_mb[0]
    found.peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def _child(read: Callable[[bytes], Any], files: Sequence[bytes], seed: int, count: int, nows: Sequence[Any], out: Any) -> None:
    faulthandler.enable()
    share_heap()  # these two as a front door does
    give_large_back()
    out.send(in_process(read, files, seed, count, nows))


def in_a_child(read: Callable[[bytes], Any], files: Sequence[bytes], seed: int, count: int) -> Found:
    """`in_process` in a process of its own, whose crash is told with the files that it was at."""
    context = multiprocessing.get_context("spawn")
    nows = [context.Value("q", -1, lock=False) for _ in range(THREADS)]
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(read, files, seed, count, nows, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        found: Found = ours.recv()
    except EOFError:
        process.join()
        found = Found(wrong=[f"the process died (exit code {process.exitcode}) at one of {[f'{seed}:{now.value}' for now in nows]}"])
    process.join()
    return found


# Over HTTP


def request(data: bytes, number: int) -> load.Body:
    """A raw, multipart or JSON body in turn; what the raw one says of its type is mostly wrong."""
    if number % 3 == 0:
        return ("image/png", "application/octet-stream", "text/plain")[number // 3 % 3], data
    if number % 3 == 1:
        return load.request_body(load.Photo("photo", data), "multipart")
    return "application/json", json.dumps({"image": base64.b64encode(data).decode()}).encode()


def over_http(predict: str, leader: int, files: Sequence[bytes], seed: int, count: int) -> Found:
    """Posts `count` mutated files to the server whose first process is `leader`: its processes must stay and its memory, too."""
    found, lock, before = Found(), threading.Lock(), set(load.family(leader))

    def post(number: int) -> None:
        content_type, body = request(mutated(files, seed, number), number)
        message, begun = "", time.monotonic()
        try:
            asked = urllib.request.Request(predict, data=body, headers={"Content-Type": content_type})
            with load.HTTP.open(asked, timeout=load.PATIENCE_S) as answer:
                status = str(answer.status)
        except urllib.error.HTTPError as error:
            status, message = str(error.code), error.read(500).decode(errors="replace")
        except OSError as error:
            status = repr(error)
        with lock:
            found.add(status, time.monotonic() - begun, number, len(body))
            if status not in {"200", "400", "413", "415", "422"}:
                found.wrong.append(f"{seed}:{number}: {status} {message.strip()}")

    with ThreadPoolExecutor(2 * THREADS) as pool:
        for numbers in _parted(count):
            list(pool.map(post, numbers))
            found.memory_mb.append(load.memory_mb(load.family(leader)))
    del found.memory_mb[0]
    if (after := set(load.family(leader))) != before:
        found.wrong.append(f"processes {sorted(before - after)} are gone, {sorted(after - before)} have come")
    return found


# Report


def report(name: str, found: Found, seed: int) -> bool:
    """Prints what became of one run's files, and whether that is as it must be."""
    print(f"{name}, seed {seed}: {sum(found.answers.values())} files")
    for answer, count in found.answers.most_common():
        print(f"  {answer:20} {count:7}")
    if found.memory_mb:
        before, after = found.floors_mb
        peak = f", at most {found.peak_mb:.0f}" if found.peak_mb else ""
        growth = f"growth {found.growth_percent:.2f} % (less than {GROWTH_PERCENT:g})"
        print(f"  MB after the warm-up {before:.1f}, in the end {after:.1f}, readings up to {max(found.memory_mb):.1f}{peak}; {growth}")
    print("  slowest: " + ", ".join(f"{seed}:{number} {1000 * seconds:.0f} ms, {size} bytes" for seconds, number, size in found.slowest))
    for line in found.wrong[:20]:
        print(f"  WRONG {line}")
    return not found.wrong and (not found.memory_mb or found.growth_percent < GROWTH_PERCENT)


def photos(folder: Path) -> list[bytes]:
    """The examples, which are small in number and in bytes, and the photos of a folder."""
    return [photo.data for photo in (*load.gather(ROOT / "examples"), *(load.gather(folder) if folder != ROOT / "examples" else ()))]


def main() -> None:
    """Reads the command line, drives the decoder and the server, prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "checkpoints/efficientnet_lite0.safetensors")
    parser.add_argument("--photos", type=Path, default=ROOT / "examples", help="folder of JPEG, PNG or WebP files, besides examples/")
    for name, default in (("--count", 50_000), ("--http", 2_000), ("--seed", 0)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--make", metavar="SEED:NUMBER", help="write this file to the standard output and do nothing else")
    options = parser.parse_args()
    files = subjects(photos(options.photos))
    if options.make:
        sys.stdout.buffer.write(mutated(files, *map(int, options.make.split(":"))))
        return
    say(f"{len(files)} whole files, of {min(map(len, files))} to {max(map(len, files))} bytes")
    good = True
    if options.count:
        read = read_header(options.checkpoint).preprocessing.read
        good = report("in process", in_a_child(read, files, options.seed, options.count), options.seed)
    if options.http:
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            with load.running(SERVERS[OURS], options.checkpoint, Path(folder)) as live:
                found = over_http(live.base + live.server.predict, live.pid, files, options.seed, options.http)
            good &= report("over HTTP", found, options.seed)
    sys.exit(not good)


if __name__ == "__main__":
    main()
