"""The worker: what is handed over is answered, once, by the right worker, whatever happens to the forward."""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import checkpoint
from models.checkpoint import Golden
from service.engine import Engine, Lane, Pixels, Scores
from service.slots import STOP, Failure, Layout, Memory, SlotState, WakePipe
from service.torch_engine import TorchEngine
from service.worker import Worker, WorkerOptions

DEADLINE = 1e12


def options_for(tiny: Path, memory: Memory, pipes: list[WakePipe], doors: list[WakePipe], **changes: Any) -> WorkerOptions:
    options: dict[str, Any] = {
        "memory": memory,
        "pipes": pipes,
        "door_pipes": doors,
        "parent_pipe": doors[0],
        "parent": os.getpid(),
        "checkpoint": tiny,
        "header": checkpoint.read_header(tiny),
        "engine": "auto",
        "precision": "fp32",
        "compiled": False,
        "cache_dir": Path("/none"),
        "max_batch_size": 8,
        "batch_wait_s": 0.0,
        "threads": 1,
        "log_format": "text",
        "log_level": "info",
    }
    return WorkerOptions(**options | changes)


class Room:
    """An engine room with one worker in this process; the test is the two front doors. Slots 0 to 15 are one's, 16 to 31 the other's."""

    def __init__(self, tiny: Path, *, batch_wait_s: float = 0.0, max_batch_size: int = 8, engine: Engine | None = None) -> None:
        loaded = checkpoint.load(tiny)
        self.golden = loaded.golden
        self.memory = Memory(Layout(slots=32, crop=32, classes=10, workers=2, doors=2))
        self.memory.workers["generation"] = 3
        self.pipes, self.doors = [WakePipe(), WakePipe()], [WakePipe(), WakePipe()]
        if engine is None:
            engine = TorchEngine(
                loaded, "cpu", precision="fp32", max_batch_size=max_batch_size, compiled=False, cache_dir=Path("/none"), threads=1
            )
            while engine.warm_next():
                pass
        options = options_for(tiny, self.memory, self.pipes, self.doors, max_batch_size=max_batch_size, batch_wait_s=batch_wait_s)
        self.worker = Worker(options, 1, engine)
        self.worker.cold = False
        self.lane = engine.lanes[0]

    def step(self) -> bool:
        return self.worker.step(self.lane)

    def write(self, slot: int, **changes: Any) -> None:
        """Write a slot's row and pixels, golden sample `slot % 16`, as a front door does."""
        memory = self.memory
        memory.pixels[slot] = self.golden.pixels[slot % 16]
        row = {"state": SlotState.WAITING, "worker": 1, "generation": 3, "deadline": DEADLINE, "waiting_since": time.monotonic()}
        for name, value in (row | changes).items():
            getattr(memory, name)[slot] = value

    def hand_over(self, *slots: int, **changes: Any) -> None:
        for slot in slots:
            if slot != STOP:
                self.write(slot, **changes)
        self.pipes[1].send(slots)

    def outcome(self, slot: int) -> tuple[SlotState, Failure]:
        return SlotState(int(self.memory.state[slot])), Failure(int(self.memory.failure[slot]))

    def assert_right(self, slot: int) -> None:
        assert self.outcome(slot) == (SlotState.DONE, Failure.NONE)
        np.testing.assert_allclose(self.memory.results[slot, :10], self.golden.probabilities[slot % 16], rtol=0, atol=1e-5)
        np.testing.assert_allclose(self.memory.logits[slot, :10], self.golden.logits[slot % 16], rtol=0, atol=1e-4)

    def close(self) -> None:
        for thread in threading.enumerate():
            if thread.name == "prepare":  # it still writes to what is closed here
                thread.join(30)
        os.close(self.worker.freed)
        for pipe in (*self.pipes, *self.doors):
            os.close(pipe.reader)
            os.close(pipe.writer)


@pytest.fixture
def make_room(tiny: Path) -> Iterator[Callable[..., Room]]:
    rooms: list[Room] = []

    def make(**options: Any) -> Room:
        rooms.append(Room(tiny, **options))
        return rooms[-1]

    yield make
    for room in rooms:
        room.close()


MakeRoom = Callable[..., Room]


def test_a_slot_handed_over_is_answered_with_its_logits_and_probabilities(make_room: MakeRoom) -> None:
    room, begun = make_room(), time.monotonic()
    room.hand_over(5)
    room.step()
    room.assert_right(5)
    assert room.doors[0].receive() == [5]
    assert room.doors[1].receive() == []
    assert begun <= room.memory.waiting_since[5] <= room.memory.taken_at[5] <= room.memory.done_at[5] <= time.monotonic()
    row = room.memory.workers[1]
    assert (row["batches"], row["images"], row["transfer"]) == (1, 1, b"shared memory")
    assert row["beat"] >= room.memory.done_at[5]


def test_a_batch_is_answered_slot_by_slot_and_door_by_door(make_room: MakeRoom) -> None:
    room = make_room()
    room.hand_over(20, 3, 31, 0, 7, 16, 11, 2)
    room.step()
    for slot in (20, 3, 31, 0, 7, 16, 11, 2):
        room.assert_right(slot)
    assert room.doors[0].receive() == [3, 0, 7, 11, 2]
    assert room.doors[1].receive() == [20, 31, 16]
    assert room.memory.workers[1]["batches"] == 1


def test_more_than_a_batch_goes_in_several_first_come_first_served(make_room: MakeRoom) -> None:
    room = make_room()
    room.hand_over(*range(11))
    answered = []
    for _ in range(3):
        room.step()
        answered.append(room.doors[0].receive())
    assert answered == [list(range(8)), [8, 9], [10]]
    for slot in range(11):
        room.assert_right(slot)


@pytest.mark.parametrize(
    "changes",
    [
        {"generation": 2},
        {"generation": 4},
        {"worker": 0},
        *({"state": state} for state in SlotState if state != SlotState.WAITING),
    ],
)
def test_a_number_whose_row_does_not_mean_this_worker_is_ignored(make_room: MakeRoom, changes: dict[str, int]) -> None:
    room = make_room()
    room.write(4, **changes)
    room.write(6)
    room.pipes[1].send([4, 6])
    room.step()
    assert room.memory.state[4] == changes.get("state", SlotState.WAITING)
    assert not room.memory.results[4].any()
    assert not room.memory.logits[4].any()
    assert room.doors[0].receive() == [6]
    room.assert_right(6)


@pytest.mark.parametrize("deadline", [0.0, 1.0])
def test_a_slot_past_its_deadline_is_failed_without_being_computed(
    make_room: MakeRoom, monkeypatch: pytest.MonkeyPatch, deadline: float
) -> None:
    room = make_room()
    room.hand_over(9, deadline=deadline)  # 0: the request gave up
    room.hand_over(8)
    run = Once(None, room.lane.run)
    monkeypatch.setattr(room.lane, "run", run)
    room.step()
    assert room.outcome(9) == (SlotState.FAILED, Failure.EXPIRED)
    assert run.calls == [1]
    room.assert_right(8)
    assert sorted(room.doors[0].receive()) == [8, 9]


def test_a_forward_that_raises_fails_its_batch_and_the_worker_lives(make_room: MakeRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    room = make_room()
    run = room.lane.run
    monkeypatch.setattr(room.lane, "run", Once(ValueError("no such kernel"), run))
    room.hand_over(12, 17)
    room.step()
    assert room.outcome(12) == room.outcome(17) == (SlotState.FAILED, Failure.INTERNAL)
    assert (room.doors[0].receive(), room.doors[1].receive()) == ([12], [17])
    room.hand_over(17)
    room.step()
    room.assert_right(17)


class Once:
    """Remembers its calls, and raises the error, if any, at the first."""

    def __init__(self, error: Exception | None, then: Callable[..., Scores]) -> None:
        self.error, self.then, self.calls = error, then, list[int]()

    def __call__(self, first: int, count: int, *, alone: bool = False) -> Scores:
        self.calls.append(count)
        if len(self.calls) == 1 and self.error:
            raise self.error
        return self.then(first, count, alone=alone)


@pytest.mark.parametrize("how", ["raises", "differs"])
def test_a_worker_that_cannot_do_its_golden_samples_any_more_ends(make_room: MakeRoom, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    room = make_room()

    def broken(first: int, count: int, *, alone: bool = False) -> Scores:
        if how == "raises":
            raise RuntimeError("an illegal memory access was encountered")
        return Scores(np.zeros((count, 10), np.float32), np.full((count, 10), 0.1, np.float32))

    monkeypatch.setattr(room.lane, "run", Once(RuntimeError("an illegal memory access was encountered"), broken))
    room.hand_over(1)
    assert room.step()
    assert room.outcome(1) == (SlotState.FAILED, Failure.INTERNAL)
    assert room.doors[0].receive() == [1]
    with pytest.raises(SystemExit) as caught:
        room.step()
    assert caught.value.code == 1


def test_the_word_to_stop_is_obeyed_once_all_in_hand_is_answered(make_room: MakeRoom) -> None:
    room = make_room()
    room.hand_over(*range(9))
    room.pipes[1].send([STOP])
    assert [room.step() for _ in range(3)] == [True, True, False]
    for slot in range(9):
        room.assert_right(slot)


def test_an_idle_worker_wakes_for_a_number_and_shows_that_it_lives(make_room: MakeRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    room = make_room()
    begun = time.monotonic()
    beats: list[float] = []

    def look() -> None:
        beats.append(float(room.memory.workers[1]["beat"]))

    monkeypatch.setattr(room.worker, "poll", poll := Poll(look, look, lambda: room.hand_over(2)))
    room.step()
    room.assert_right(2)
    assert poll.waits == [1000, 1000, 1000]
    assert begun <= beats[0] < beats[1] < room.memory.workers[1]["beat"]


def test_a_worker_warms_its_sizes_while_idle_and_between_batches_one_at_a_time(
    make_room: MakeRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AtOnce:
        def __init__(self, target: Callable[[int], None], args: tuple[int], daemon: bool, name: str) -> None:
            self.target, self.args = target, args

        def start(self) -> None:
            self.target(*self.args)

    monkeypatch.setattr("service.worker.threading.Thread", AtOnce)
    room = make_room()
    engine = room.worker.engine
    engine.warm, room.worker.cold = {1: 0.0}, True
    sizes: list[int] = []

    def look() -> None:
        sizes.append(engine.largest)
        room.hand_over(2)

    monkeypatch.setattr(room.worker, "poll", Poll(look))
    room.step()
    assert sizes == [8]  # all of them before the first wait
    assert not room.worker.cold

    engine.warm, room.worker.cold, room.worker.warming_due, room.worker.preparing = {1: 0.0}, True, False, 0
    for _ in range(5):
        room.hand_over(*range(10))
        room.step()
        sizes.append(engine.largest)
    assert sizes[1:] == [1, 2, 4, 8, 8]
    assert room.memory.workers[1]["largest_batch"] == 8


def test_an_image_does_not_wait_for_a_size_that_is_being_prepared(make_room: MakeRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    room = make_room()
    engine, may_end = room.worker.engine, threading.Event()
    engine.warm, room.worker.cold = {1: 0.0}, True
    monkeypatch.setattr(engine, "prepare", lambda size: may_end.wait(30))
    for slot in range(3):
        room.hand_over(slot)
        room.step()
        room.assert_right(slot)
    assert engine.largest == 1
    may_end.set()
    while engine.largest < 2:
        room.hand_over(4)
        room.step()


class Poll:
    """In place of the worker's poll: does something where the worker would wait, and remembers for how long that would have been."""

    def __init__(self, *actions: Callable[[], None]) -> None:
        self.actions, self.waits = list(actions), list[float]()

    def poll(self, milliseconds: float) -> None:
        self.waits.append(milliseconds)
        self.actions.pop(0)()


def test_a_batch_that_is_not_full_waits_from_its_first_image_on(make_room: MakeRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    room = make_room(batch_wait_s=100.0)
    room.hand_over(0, waiting_since=time.monotonic() - 40)
    room.hand_over(1)
    late = time.monotonic() - 100

    def time_is_up() -> None:
        room.memory.waiting_since[0] = late  # must not matter any more: the time was set by the first look
        monkeypatch.setattr(time, "monotonic", lambda: late + 200)

    poll = Poll(lambda: room.hand_over(2), lambda: room.hand_over(3), time_is_up)
    monkeypatch.setattr(room.worker, "poll", poll)
    room.step()
    assert [round(wait / 1000) for wait in poll.waits] == [60, 60, 60]
    for slot in range(4):
        room.assert_right(slot)
    assert room.memory.workers[1]["batches"] == 1


def test_a_batch_does_not_wait_once_it_is_full_or_the_server_stops_or_the_time_is_over(
    make_room: MakeRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = make_room(batch_wait_s=100.0, max_batch_size=2)
    monkeypatch.setattr(room.worker, "poll", Poll(lambda: room.hand_over(1)))
    room.hand_over(0)
    room.step()  # a second wait would find no action left
    monkeypatch.setattr(room.worker, "poll", Poll())
    room.hand_over(2, 3)
    room.step()
    room.hand_over(4, waiting_since=time.monotonic() - 101)
    room.step()
    monkeypatch.setattr(room.worker, "poll", Poll(lambda: room.hand_over(STOP)))
    room.hand_over(5)
    room.step()
    for slot in range(6):
        room.assert_right(slot)


def test_a_batch_does_not_wait_for_more_images_than_there_are_slots(make_room: MakeRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    room = make_room(batch_wait_s=100.0, max_batch_size=32)  # 32 slots for two workers
    monkeypatch.setattr(room.worker, "poll", Poll())
    room.hand_over(*range(16))
    room.step()
    assert room.memory.workers[1]["batches"] == 1


def test_the_first_image_after_idleness_waits_for_others_too(make_room: MakeRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    room = make_room(batch_wait_s=100.0, max_batch_size=4)
    monkeypatch.setattr(room.worker, "poll", Poll(lambda: room.hand_over(0), lambda: room.hand_over(1, 2), lambda: room.hand_over(3)))
    room.step()
    for slot in range(4):
        room.assert_right(slot)
    assert room.memory.workers[1]["batches"] == 1


class StubLane(Lane):
    def __init__(self, engine: StubEngine) -> None:
        self.engine, self.images = engine, np.zeros((engine.room, 32, 32, 3), np.uint8)

    def put(self, place: int, pixels: Pixels) -> None:
        self.images[place] = pixels
        self.engine.events.put(("put", place))

    def run(self, first: int, count: int, *, alone: bool = False) -> Scores:
        """The first value of each image is its probabilities, and one less its logits, when the test lets it."""
        self.engine.events.put(("run", count))
        if count > self.engine.memory:
            raise MemoryError(f"no room for {count}")
        assert self.engine.go_on.acquire(timeout=30)
        found = np.stack([self.images[first + place, 0, 0, :1].repeat(10) for place in range(count)]).astype(np.float32)
        return Scores(found - 1, found)


class StubEngine(Engine):
    """Two lanes, one computes at once, as on a GPU. The test sees every step and says when a forward ends."""

    name, precision, why, transfer = "stub", "fp32", "a test", "none"

    def __init__(self, golden: Golden, memory: int = 8, at_once: int = 1) -> None:
        super().__init__(golden, (1, 2, 4, 8))
        self.warm = dict.fromkeys(self.sizes, 0.0)
        self.memory, self.events, self.go_on = memory, queue.Queue[tuple[str, int]](), threading.Semaphore(0)
        self.lanes, self.at_once = [StubLane(self), StubLane(self)], at_once

    def take(self, waiting: int, free: int) -> int:
        return min(waiting, self.largest)

    def pin(self, slots: Pixels) -> None: ...

    def _prepare(self, size: int) -> float | None:
        raise NotImplementedError

    def out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, MemoryError)

    def next(self, count: int = 1) -> list[tuple[str, int]]:
        return [self.events.get(timeout=30) for _ in range(count)]


@contextmanager
def at_work(make_room: MakeRoom, tiny: Path, **options: int) -> Iterator[tuple[Room, StubEngine]]:
    """A worker with all its threads, ended at the end."""
    engine = StubEngine(checkpoint.read_golden(tiny), **options)
    room = make_room(engine=engine)
    thread = threading.Thread(target=room.worker.run)
    thread.start()
    try:
        yield room, engine
    finally:
        room.pipes[1].send([STOP])
        engine.go_on.release(100)
        thread.join(30)
        assert not thread.is_alive()


def values(room: Room, *slots: int) -> None:
    for slot in slots:
        assert room.outcome(slot) == (SlotState.DONE, Failure.NONE)
        assert (room.memory.results[slot, :10] == room.memory.pixels[slot, 0, 0, 0]).all()
        assert (room.memory.logits[slot, :10] + 1 == room.memory.pixels[slot, 0, 0, 0]).all()


def wait_for_answers(door: WakePipe, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        assert select.select([door.reader], [], [], 30)[0]
        found += door.receive()
    return found


def test_what_arrives_while_the_device_computes_becomes_one_forward_with_its_pixels_already_there(make_room: MakeRoom, tiny: Path) -> None:
    with at_work(make_room, tiny) as (room, engine):
        room.hand_over(0)
        assert engine.next(2) == [("put", 0), ("run", 1)]  # an idle worker's first image waits for nobody
        for slot in range(1, 8):
            room.hand_over(slot)
        assert engine.next(7) == [("put", place) for place in range(7)]  # into the other lane, as they arrive
        assert engine.events.empty()  # but the device is busy
        engine.go_on.release()
        assert engine.next() == [("run", 7)]
        engine.go_on.release()
        assert sorted(wait_for_answers(room.doors[0], 8)) == list(range(8))
        values(room, *range(8))
        assert room.memory.workers[1]["batches"] == 2


def test_a_lane_waits_for_images_that_are_being_decoded_but_only_beside_another_and_not_for_long(make_room: MakeRoom, tiny: Path) -> None:
    with at_work(make_room, tiny, at_once=2) as (room, engine):
        engine.warm[8] = 10.0
        room.memory.state[16:24] = SlotState.FILLING  # eight, of which half may be another worker's
        room.hand_over(0)
        assert engine.next(2) == [("put", 0), ("run", 1)]  # the device is idle: it goes at once
        room.hand_over(1, 2, 3, 4)
        assert engine.next(4) == [("put", place) for place in range(4)]
        assert engine.events.empty()  # four more may come
        room.hand_over(5, 6, 7, 8)
        assert engine.next(5)[-1] == ("run", 8)
        engine.go_on.release(2)
        wait_for_answers(room.doors[0], 9)
        engine.warm[8] = 0.05
        room.hand_over(9)
        assert engine.next(2) == [("put", 0), ("run", 1)]
        room.hand_over(1, 2, 3, 4)
        assert engine.next(5)[-1] == ("run", 4)  # whoever is decoded never came
        engine.go_on.release(2)
        assert sorted(wait_for_answers(room.doors[0], 5)) == [1, 2, 3, 4, 9]


def test_a_full_batch_is_launched_before_the_device_is_free(make_room: MakeRoom, tiny: Path) -> None:
    with at_work(make_room, tiny) as (room, engine):
        room.hand_over(0)
        engine.next(2)
        room.hand_over(*range(1, 9))
        assert engine.next(9)[-1] == ("run", 8)
        room.hand_over(9)  # both lanes are taken: it waits
        assert engine.events.empty()
        engine.go_on.release(2)
        assert engine.next(2) == [("put", 0), ("run", 1)]
        engine.go_on.release()
        assert sorted(wait_for_answers(room.doors[0], 10)) == list(range(10))
        values(room, *range(10))


def test_a_batch_that_does_not_fit_is_split_and_none_is_that_large_again(make_room: MakeRoom, tiny: Path) -> None:
    with at_work(make_room, tiny, memory=3) as (room, engine):
        engine.go_on.release(100)
        room.hand_over(*range(7))
        assert sorted(wait_for_answers(room.doors[0], 7)) == list(range(7))
        values(room, *range(7))
        # 7 and 4 do not fit
        runs = [count for kind, count in engine.next(engine.events.qsize()) if kind == "run"]
        assert runs == [7, 4, 2, 2, 2, 1]
        row = room.memory.workers[1]
        assert row["largest_batch"] == engine.largest == 2
        assert row["splits"] >= 2
        assert room.memory.workers[1]["images"] == 7
        room.hand_over(*range(8, 15))
        assert sorted(wait_for_answers(room.doors[0], 7)) == list(range(8, 15))
        assert max(count for kind, count in engine.next(engine.events.qsize()) if kind == "run") == 2


def test_one_image_that_does_not_fit_fails(make_room: MakeRoom, tiny: Path) -> None:
    with at_work(make_room, tiny, memory=0) as (room, _):
        room.worker.engine.golden_check = lambda: (True, "")  # type: ignore[method-assign]
        room.hand_over(3)
        assert wait_for_answers(room.doors[0], 1) == [3]
        assert room.outcome(3) == (SlotState.FAILED, Failure.INTERNAL)
