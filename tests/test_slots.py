"""One memory for all processes, and pipes that wake."""

from __future__ import annotations

import collections
import fcntl
import itertools
import multiprocessing
import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from service.slots import STOP, Layout, Memory, ProcessState, SlotState, WakePipe

LAYOUT = Layout(slots=6, crop=40, classes=1500, workers=2, doors=3)


@contextmanager
def closing(*things: Memory | WakePipe) -> Iterator[None]:
    yield
    for thing in things:
        for descriptor in () if isinstance(thing, Memory) else (thing.reader, thing.writer):
            os.close(descriptor)


def change(memory: Memory, pipe: WakePipe) -> None:
    """What another process does to the memory."""
    memory.pixels[5, 2, 2, 2] = 200
    memory.results[5, 1499] = 0.25
    memory.logits[5, 1499] = -7
    memory.state[5] = SlotState.DONE
    memory.done_at[5] = 1e9
    memory.workers[1]["reason"] = b"because"
    memory.doors[2]["pid"] = os.getpid()
    memory.server["draining"][0] = 1
    pipe.send([int(memory.pixels[0, 0, 0, 0]), STOP])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_another_process_has_the_same_memory() -> None:
    memory, pipe = Memory(LAYOUT), WakePipe()
    with closing(memory, pipe):
        memory.pixels[0] = 77
        process = multiprocessing.get_context("fork").Process(target=change, args=(memory, pipe))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        assert pipe.receive() == [77, STOP]
        assert memory.pixels[5, 2, 2, 2] == 200
        assert (memory.results[5, 1499], memory.logits[5, 1499]) == (0.25, -7)
        assert (memory.state[5], memory.done_at[5]) == (SlotState.DONE, 1e9)
        assert memory.workers[1]["reason"] == b"because"
        assert (memory.doors[2]["pid"], memory.server["draining"][0]) == (process.pid, 1)


def test_no_part_overlaps_another() -> None:
    memory = Memory(LAYOUT)
    with closing(memory):
        columns = ("state", "worker", "generation", "attempt", "failure", "model", "waiting_since", "taken_at", "done_at", "deadline")
        parts = [getattr(memory, name) for name in ("pixels", "results", "logits", *columns)]
        parts += [table[field] for table in (memory.workers, memory.doors, memory.server) for field in table.dtype.fields or ()]
        for value, part in enumerate(parts, 1):
            part[...] = str(value) if part.dtype.kind == "S" else value
        for value, part in enumerate(parts, 1):  # each still holds its own
            assert (part == np.array(value).astype(part.dtype)).all()


def test_the_parts_have_the_sizes_of_the_layout() -> None:
    memory = Memory(LAYOUT)
    with closing(memory):
        assert memory.pixels.shape == (6, 40, 40, 3)
        assert memory.results.shape == memory.logits.shape == (6, 1500)
        assert (len(memory.state), len(memory.workers), len(memory.doors)) == (6, 2, 3)
        assert (memory.state == SlotState.FREE).all()  # and new memory is all zero
    few = Memory(Layout(slots=1, crop=1, classes=2, workers=1, doors=1))
    with closing(few):
        assert few.results.shape == few.logits.shape == (1, 1024)  # room for a model with more classes, swapped in later


def test_slots_are_shared_out_and_owned_alike() -> None:
    shares = [list(LAYOUT.slots_of(door)) for door in range(3)]
    assert shares == [[0, 1], [2, 3], [4, 5]]
    assert [LAYOUT.owner(slot) for slot in range(6)] == [0, 0, 1, 1, 2, 2]
    with pytest.raises(AssertionError):
        Layout(slots=7, crop=3, classes=2, workers=1, doors=3)


def test_the_least_busy_worker_is_ready_and_has_least_in_hand() -> None:
    memory = Memory(Layout(slots=8, crop=1, classes=2, workers=3, doors=1))
    with closing(memory):
        assert memory.least_busy_worker() is None
        memory.workers["state"][1] = ProcessState.READY
        assert memory.least_busy_worker() == 1
        memory.workers["state"][[0, 2]] = ProcessState.DEAD, ProcessState.STARTING
        assert memory.least_busy_worker() == 1
        memory.workers["state"] = ProcessState.READY
        memory.workers["images"] = [1, 9, 1]
        memory.worker[:5] = [0, 0, 1, 2, 2]
        memory.state[:5] = [SlotState.WAITING, SlotState.TAKEN, SlotState.TAKEN, SlotState.WAITING, SlotState.WAITING]
        assert memory.least_busy_worker() == 1
        memory.state[:2] = [SlotState.DONE, SlotState.FILLING]  # no longer, or not yet, in a worker's hand
        assert memory.least_busy_worker() == 0
        memory.state[:] = SlotState.FREE
        memory.workers["images"] = [5, 4, 3]
        assert memory.least_busy_worker() == 2


def test_a_pipe_carries_many_numbers_in_order_and_never_blocks() -> None:
    pipe = WakePipe()
    with closing(pipe):
        assert pipe.receive() == []
        assert pipe.send([])
        numbers = [*range(5000), STOP]
        assert pipe.send(iter(numbers))
        assert pipe.send([7])
        assert pipe.receive() == [*numbers, 7]
        assert pipe.receive() == []


def test_a_full_pipe_says_so_and_loses_nothing_that_it_took() -> None:
    pipe = WakePipe()
    with closing(pipe):
        sent = next(number for number in range(1_000_000) if not pipe.send([number]))
        assert sent > 1000
        assert not pipe.send([1])
        assert pipe.receive() == list(range(sent))
        assert pipe.send([1])


def test_numbers_of_which_only_some_fit_are_not_said_to_be_sent() -> None:
    pipe = WakePipe()
    with closing(pipe):
        assert pipe.send(range(fcntl.fcntl(pipe.writer, fcntl.F_GETPIPE_SZ) // 4 - 2048))
        assert not pipe.send(range(3000))


def test_writers_at_once_do_not_mix_their_numbers() -> None:
    pipe, each = WakePipe(), 100_000
    with closing(pipe):

        def write(writer: int) -> None:
            numbers = iter(range(writer << 24, (writer << 24) + each))
            while chunk := list(itertools.islice(numbers, 1 + writer * 337)):
                while not pipe.send(chunk):
                    select.select([], [pipe.writer], [])

        threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
        for thread in threads:
            thread.start()
        found: dict[int, list[int]] = collections.defaultdict(list)
        while received := pipe.receive() or any(thread.is_alive() for thread in threads) or pipe.receive():
            for number in received if isinstance(received, list) else ():
                found[number >> 24].append(number & 0xFF_FFFF)
        assert found == {writer: list(range(each)) for writer in range(4)}
