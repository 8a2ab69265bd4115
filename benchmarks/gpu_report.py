"""For benchmarks/gpu.py: time limits, the arithmetic of its samples, tables, and what falls short."""

from __future__ import annotations

import json
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.load import say
from benchmarks.report import lay_out

REQUIRED = 0.95  # of the forward's images/s, which the pipeline reaches
Row = dict[str, Any]


class Skipped(Exception):
    """A part that can't be measured here, and why."""


class TimeUp(BaseException):
    """A part's time is over. No Exception, or a library would take it for its own."""


# Time


class Budget:
    """The seconds of the whole run: each part gets its weight's share of what is left."""

    def __init__(self, total_s: float, weights: Sequence[float], clock: Callable[[], float] = time.monotonic) -> None:
        self.end, self.weights, self.clock = clock() + total_s, list(weights), clock

    def next_limit(self) -> float:
        """Seconds for the next part."""
        weight, rest = self.weights[0], sum(self.weights)
        del self.weights[0]
        return max(0.0, self.end - self.clock()) * weight / rest


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TimeUp in the main thread once the time is over."""

    def up(*_: object) -> None:
        raise TimeUp

    if seconds <= 0:
        raise TimeUp
    before = signal.signal(signal.SIGALRM, up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# Arithmetic

Interval = tuple[float, float]


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """The same points, in order, each in one interval only."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def length(intervals: Sequence[Interval]) -> float:
    return sum(end - start for start, end in union(intervals))


def common(some: Sequence[Interval], others: Sequence[Interval]) -> float:
    """How long both are."""
    return length(some) + length(others) - length([*some, *others])


def alternate(first: Callable[[], float], second: Callable[[], float], rounds: int) -> tuple[list[float], list[float]]:
    """Samples of two things in turn, A B A B: what slows the machine for a while slows both."""
    pairs = [(first(), second()) for _ in range(rounds)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def throughput_row(size: int, forwards: Sequence[float], pipelines: Sequence[float], required: bool, more: Row) -> Row:
    """One batch size's medians, their ratio (pair by pair, then the median), and every sample."""
    ratio = statistics.median(pipeline / forward for forward, pipeline in zip(forwards, pipelines, strict=True))
    row: Row = {"batch": size, "forward images/s": statistics.median(forwards), "pipeline images/s": statistics.median(pipelines)}
    row |= {"ratio": ratio, "required": f">= {REQUIRED}" if required else "", **more}
    row["ok"] = not (more["wrong"] or more["failed"]) and (ratio >= REQUIRED or not required)
    return row | {"forward samples": list(forwards), "pipeline samples": list(pipelines)}


def overlap_row(size: int, copied: Sequence[Interval], forwards: Sequence[Interval]) -> Row:
    """Milliseconds on the device's own clock. The first copies have no forward to lie under."""
    first, last = min(start for start, _ in forwards), max(end for _, end in forwards)
    copied = [(max(start, first), end) for start, end in copied if end > first]
    row: Row = {"batch": size, "batches": len(forwards), "copies ms": length(copied), "forwards ms": length(forwards)}
    row["copies under a forward"] = common(copied, forwards) / max(length(copied), 1e-9)
    return row | {"device computes": length(forwards) / (last - first)}


# Report


def cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.0f}"
    return " ".join(map(cell, value)) if isinstance(value, list) else str(value)


def table(rows: Sequence[Row]) -> str:
    """Rows as Markdown; a row may lack columns of others."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return lay_out([columns, *([cell(row.get(key, "")) for key in columns] for row in rows)])


@dataclass
class Report:
    """All that was measured, written to a file after each part: nothing is lost when the host goes away."""

    path: Path | None
    facts: dict[str, Any]
    parts: list[dict[str, Any]] = field(default_factory=list)

    def run(self, part: str, model: str, limit_s: float, work: Callable[[list[Row]], None]) -> None:
        """One part of one model, within its time, whatever becomes of it."""
        say(f"{part} of {model}: at most {limit_s:.0f} s")
        rows: list[Row] = []
        note, begun = "", time.monotonic()
        try:
            with limited(limit_s):
                work(rows)
        except Skipped as reason:
            note = f"skipped: {reason}"
        except TimeUp:
            note = f"cut short: its {limit_s:.0f} s were over"
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            note = f"failed: {type(error).__name__}: {error}"
        seconds = time.monotonic() - begun
        self.parts.append({"part": part, "model": model, "seconds": seconds, "note": note, "rows": rows})
        print(
            f"\n## {part}, {model}: {seconds:.1f} s\n" + (f"\n{note}\n" if note else "") + (f"\n{table(rows)}" if rows else ""), flush=True
        )
        if self.path:
            self.path.write_text(json.dumps({**self.facts, "parts": self.parts, "shortfalls": self.shortfalls()}, indent=1))

    def shortfalls(self) -> list[str]:
        """What is not as it must be. A part that was skipped is none: it says so itself."""
        found = []
        for one in self.parts:
            name = f"{one['part']} of {one['model']}"
            if one["note"] and not one["note"].startswith("skipped"):
                found.append(f"{name}: {one['note']}")
            found += [f"{name}: {table([row])}" for row in one["rows"] if not row.get("ok", True)]
        return found
