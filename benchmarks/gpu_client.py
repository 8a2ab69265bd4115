"""For benchmarks/gpu.py: load on a server, from `wrk` or, where that is missing, from the standard library."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import shutil
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import load

PER_PROCESS = 32  # connections; Python answers to a few thousand requests a second in each
Share = tuple[list[float], int, int]  # latencies in seconds, answers that are not 200, connections that broke


def whole_request(url: str, body: load.Body) -> bytes:
    """The bytes of one POST."""
    parts = urlsplit(url)
    head = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: {body[0]}\r\nContent-Length: {len(body[1])}\r\n\r\n"
    return head.encode() + body[1]


async def _answer(reader: asyncio.StreamReader) -> int:
    """Reads one answer; its status."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
    size = next((int(line.partition(":")[2]) for line in head if line.startswith("content-length:")), 0)
    await reader.readexactly(size)
    return int(head[0].split()[1])


async def connect_and_ask(url: str, requests: Sequence[bytes], connections: int, seconds: float) -> Share:
    """Each connection sends a request, waits for its answer, and sends the next, until the time is over."""
    parts = urlsplit(url)
    times: list[float] = []
    turn, bad, broken, end = itertools.cycle(requests), 0, 0, time.monotonic() + seconds

    async def one() -> None:
        nonlocal bad, broken
        while time.monotonic() < end:
            try:
                reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
                while (begun := time.monotonic()) < end:
                    writer.write(next(turn))
                    status = await asyncio.wait_for(_answer(reader), load.PATIENCE_S)
                    bad += status != 200
                    times.append(time.monotonic() - begun)
                writer.close()
            except (OSError, EOFError, TimeoutError, ValueError):
                broken += 1
                await asyncio.sleep(0.05)

    await asyncio.gather(*(one() for _ in range(connections)))
    return times, bad, broken


def _share(url: str, bodies: Sequence[load.Body], connections: int, seconds: float) -> Share:
    return asyncio.run(connect_and_ask(url, [whole_request(url, body) for body in bodies], connections, seconds))


def ask(url: str, bodies: Sequence[load.Body], concurrency: int, seconds: float) -> load.Figures:
    """The same figures as from wrk, from a few processes, which share the connections."""
    count = min(-(-concurrency // PER_PROCESS), max(1, load.cores() // 4))
    shares = [len(range(number, concurrency, count)) for number in range(count)]
    # Spawned: this process may have a CUDA context.
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(_share, [url] * count, [list(bodies)] * count, shares, [seconds] * count))
    times = sorted(itertools.chain(*(share[0] for share in found)))
    cuts = statistics.quantiles(times, n=100) if len(times) > 1 else [0.0] * 99
    return {
        "requests": len(times),
        "seconds": seconds,
        "p50_ms": 1000 * cuts[49],
        "p99_ms": 1000 * cuts[98],
        "non_2xx": sum(share[1] for share in found),
        "errors": sum(share[2] for share in found),
    }


def drive(live: load.Live, bodies: Sequence[load.Body], folder: Path, concurrency: int, seconds: int) -> dict[str, Any]:
    """Requests, seconds, p50_ms, p99_ms, non_2xx, errors, and `by`: what made the load."""
    if shutil.which("wrk"):
        with suppress(SystemExit):
            return load.drive(live, load.write_script(bodies, folder / "load"), concurrency, seconds) | {"by": "wrk"}
    return ask(live.base + live.server.predict, bodies, concurrency, seconds) | {"by": "asyncio"}
