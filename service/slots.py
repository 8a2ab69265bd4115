"""Memory shared by all processes of the server: slots, results, the tables that say who owns what, and the pipes that wake.

The tables are the truth; pipes only wake. A slot belongs to one front door for life. Its state goes round:

    front door:  FREE -> FILLING -> WAITING             -> FREE
    worker:                         WAITING -> TAKEN -> DONE or FAILED
"""

from __future__ import annotations

import array
import enum
import mmap
import os
import select
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

STOP = 0xFFFF_FFFF  # in a pipe: end, once what is in hand is done


class SlotState(enum.IntEnum):
    FREE = 0
    FILLING = 1  # a decode thread writes its pixels
    WAITING = 2  # handed to a worker
    TAKEN = 3  # in that worker's batch
    DONE = 4  # the rows of results and logits are whole
    FAILED = 5  # no result; `failure` says why


# For the busiest lines: a member of an enum costs microseconds where it meets numpy.
FREE, FILLING, WAITING, TAKEN, DONE, FAILED = map(int, SlotState)


class Failure(enum.IntEnum):
    NONE = 0
    INTERNAL = 1  # the forward raised
    EXPIRED = 2  # the deadline passed, or the request gave up, before the worker took it
    WORKER_DIED = 3


class ProcessState(enum.IntEnum):
    STARTING = 0
    READY = 1
    DEAD = 2


_READY = int(ProcessState.READY)

_SLOT_ROW = np.dtype(
    [
        ("state", "u4"),
        ("worker", "u4"),
        ("generation", "u4"),  # of the worker that is meant, so that its replacement can't mistake the row for its own
        ("attempt", "u4"),  # times this image was handed over
        ("failure", "u4"),
        ("model", "u4"),  # count of model swaps when it was classified
        ("waiting_since", "f8"),  # all times: CLOCK_MONOTONIC, seconds, the same in every process
        ("taken_at", "f8"),
        ("done_at", "f8"),
        ("deadline", "f8"),  # 0 once the request gave up
    ],
    align=True,
)
_WORKER_ROW = np.dtype(
    [
        ("pid", "i8"),
        ("state", "u4"),
        ("generation", "u4"),  # times this place was filled
        ("beat", "f8"),
        ("batches", "u8"),
        ("images", "u8"),
        ("splits", "u8"),  # batches that did not fit into the device's memory
        ("largest_batch", "u4"),  # that runs now
        ("device", "S32"),
        ("engine", "S16"),
        ("precision", "S8"),
        ("why", "S400"),  # of engine and precision
        ("transfer", "S64"),
        ("reason", "S1000"),  # of a death before it was ready
    ],
    align=True,
)
_DOOR_ROW = np.dtype([("pid", "i8"), ("state", "u4")], align=True)
_SERVER_ROW = np.dtype([("draining", "u4")], align=True)

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many of everything the memory holds."""

    slots: int
    crop: int
    classes: int
    workers: int
    doors: int

    def __post_init__(self) -> None:
        assert self.slots % self.doors == 0

    def slots_of(self, door: int) -> range:
        share = self.slots // self.doors
        return range(door * share, (door + 1) * share)

    def owner(self, slot: int) -> int:
        return slot // (self.slots // self.doors)


class Memory:
    """One anonymous mapping that the parent makes and every process it forks, at any time, has too."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        parts: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
            "pixels": (np.dtype("u1"), (layout.slots, layout.crop, layout.crop, 3)),
            "results": (np.dtype("f4"), (layout.slots, max(layout.classes, 1024))),
            "logits": (np.dtype("f4"), (layout.slots, max(layout.classes, 1024))),
            "slot_table": (_SLOT_ROW, (layout.slots,)),
            "worker_table": (_WORKER_ROW, (layout.workers,)),
            "door_table": (_DOOR_ROW, (layout.doors,)),
            "server": (_SERVER_ROW, (1,)),
        }
        offsets, size = {}, 0
        for name, (dtype, shape) in parts.items():
            offsets[name] = size
            size += -(-dtype.itemsize * int(np.prod(shape)) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.buffer = mmap.mmap(-1, size)

        def view(name: str) -> Array:
            dtype, shape = parts[name]
            return np.ndarray(shape, dtype, buffer=self.buffer, offset=offsets[name])

        self.pixels: npt.NDArray[np.uint8] = view("pixels")  # [slots, crop, crop, 3]; at the start of the buffer
        self.results: npt.NDArray[np.float32] = view("results")  # [slots, max(C, 1024)]: probabilities
        self.logits: npt.NDArray[np.float32] = view("logits")  # [slots, max(C, 1024)]: what those are made of
        slots, self.workers, self.doors, self.server = (view(name) for name in ("slot_table", "worker_table", "door_table", "server"))
        # A column each: reading one field of one row through the record would be several times slower.
        self.state, self.worker, self.generation = slots["state"], slots["worker"], slots["generation"]
        self.attempt, self.failure, self.model = slots["attempt"], slots["failure"], slots["model"]
        self.waiting_since, self.taken_at, self.done_at = slots["waiting_since"], slots["taken_at"], slots["done_at"]
        self.deadline = slots["deadline"]

    def least_busy_worker(self) -> int | None:
        """The ready worker with the least work in hand; of equals, the one that has classified least. None: none is ready."""
        if self.layout.workers == 1:
            return 0 if int(self.workers["state"][0]) == _READY else None
        ready = np.flatnonzero(self.workers["state"] == _READY)
        if len(ready) < 2:
            return int(ready[0]) if len(ready) else None
        handed_over = (self.state == WAITING) | (self.state == TAKEN)
        in_hand = np.bincount(self.worker[handed_over], minlength=self.layout.workers)
        images = self.workers["images"]
        return int(min(ready, key=lambda worker: (in_hand[worker], images[worker])))


class WakePipe:
    """Carries numbers of 4 bytes, many per read, from many processes to one. Neither end ever blocks."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self.writer, False)

    def send(self, numbers: Iterable[int]) -> bool:
        """False when the pipe is full: its reader has long stopped reading. No write is over PIPE_BUF: writers never interleave."""
        data = array.array("I", numbers).tobytes()
        try:
            for start in range(0, len(data), select.PIPE_BUF):
                os.write(self.writer, data[start : start + select.PIPE_BUF])
        except BlockingIOError:
            return False
        return True

    def receive(self) -> list[int]:
        """All numbers that are there, which may be none."""
        try:
            return array.array("I", os.read(self.reader, 1 << 16)).tolist()
        except BlockingIOError:
            return []
