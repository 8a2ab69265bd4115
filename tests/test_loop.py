"""The worker: what is handed over is answered, once, by the right worker, whatever happens to the forward."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models import checkpoint
from models.export import logits
from service.engine import Engine
from service.loop import Worker, WorkerOptions
from service.slots import STOP, Failure, Layout, Memory, SlotState, WakePipe

DEADLINE = 1e12


class Room:
    """An engine room with one worker in this process; the test is the two front doors. Slots 0 to 15 are one's, 16 to 31 the other's."""

    def __init__(self, tiny: Path, *, batch_wait_s: float = 0.0, max_batch_size: int = 8) -> None:
        self.checkpoint = checkpoint.load(tiny)
        self.memory = Memory(Layout(slots=32, crop=32, classes=10, workers=2, doors=2))
        self.memory.workers["generation"] = 3
        self.pipes, self.doors = [WakePipe(), WakePipe()], [WakePipe(), WakePipe()]
        self.parent_pipe = WakePipe()
        engine = Engine(self.checkpoint, "cpu", precision="fp32", max_batch_size=max_batch_size)
        while engine.warm_next():
            pass
        options = WorkerOptions(
            memory=self.memory,
            pipes=self.pipes,
            door_pipes=self.doors,
            parent_pipe=self.parent_pipe,
            parent=os.getpid(),
            checkpoint=tiny,
            header=self.checkpoint.header,
            precision="fp32",
            max_batch_size=max_batch_size,
            batch_wait_s=batch_wait_s,
            threads=1,
            log_format="text",
            log_level="info",
        )
        self.worker = Worker(options, 1, engine)
        self.worker.cold = False
        found = self.checkpoint
        self.expected = logits(found.model, found.header.preprocessing, found.golden_pixels).softmax(1).numpy()

    def write(self, slot: int, **changes: Any) -> None:
        """Write a slot's row and pixels, golden sample `slot % 16`, as a front door does."""
        memory = self.memory
        memory.pixels[slot] = self.checkpoint.golden_pixels[slot % 16].numpy()
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
        np.testing.assert_allclose(self.memory.results[slot, :10], self.expected[slot % 16], rtol=0, atol=1e-5)

    def close(self) -> None:
        for pipe in (*self.pipes, *self.doors, self.parent_pipe):
            os.close(pipe.reader)
            os.close(pipe.writer)
        os.close(self.memory.descriptor)


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


def test_a_slot_handed_over_is_answered_with_its_probabilities(make_room: MakeRoom) -> None:
    room, begun = make_room(), time.monotonic()
    room.hand_over(5)
    room.worker.step()
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
    room.worker.step()
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
        room.worker.step()
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
    room.worker.step()
    assert room.memory.state[4] == changes.get("state", SlotState.WAITING)
    assert not room.memory.results[4].any()
    assert room.doors[0].receive() == [6]
    room.assert_right(6)


@pytest.mark.parametrize("deadline", [0.0, 1.0])
def test_a_slot_past_its_deadline_is_failed_without_being_computed(
    make_room: MakeRoom, monkeypatch: pytest.MonkeyPatch, deadline: float
) -> None:
    room = make_room()
    room.hand_over(9, deadline=deadline)  # 0: the request gave up
    room.hand_over(8)
    computed: list[list[int]] = []
    predict = room.worker.engine.predict

    def noted(pixels: torch.Tensor, rows: list[int]) -> torch.Tensor:
        computed.append(rows)
        return predict(pixels, rows)

    monkeypatch.setattr(room.worker.engine, "predict", noted)
    room.worker.step()
    assert room.outcome(9) == (SlotState.FAILED, Failure.EXPIRED)
    assert computed == [[8]]
    room.assert_right(8)
    assert sorted(room.doors[0].receive()) == [8, 9]


def test_a_forward_that_raises_fails_its_batch_and_the_worker_lives(make_room: MakeRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    room = make_room()
    predict = room.worker.engine.predict

    def fail(pixels: torch.Tensor, rows: list[int] | None = None) -> torch.Tensor:
        if rows is not None and 12 in rows:
            raise RuntimeError("out of memory")
        return predict(pixels, rows)

    monkeypatch.setattr(room.worker.engine, "predict", fail)
    room.hand_over(12, 17)
    room.worker.step()
    assert room.outcome(12) == room.outcome(17) == (SlotState.FAILED, Failure.INTERNAL)
    assert (room.doors[0].receive(), room.doors[1].receive()) == ([12], [17])
    room.hand_over(17)
    room.worker.step()
    room.assert_right(17)


@pytest.mark.parametrize("how", ["raises", "differs"])
def test_a_worker_that_cannot_do_its_golden_samples_any_more_ends(make_room: MakeRoom, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    room = make_room()

    def broken(pixels: torch.Tensor, rows: list[int] | None = None) -> torch.Tensor:
        if how == "raises" or rows is not None:
            raise RuntimeError("an illegal memory access was encountered")
        return torch.full((len(pixels), 10), 0.1)

    monkeypatch.setattr(room.worker.engine, "predict", broken)
    room.hand_over(1)
    with pytest.raises(SystemExit) as caught:
        room.worker.step()
    assert caught.value.code == 1
    assert room.outcome(1) == (SlotState.FAILED, Failure.INTERNAL)
    assert room.doors[0].receive() == [1]


def test_the_word_to_stop_is_obeyed_once_all_in_hand_is_answered(make_room: MakeRoom) -> None:
    room = make_room()
    room.hand_over(*range(9))
    room.pipes[1].send([STOP])
    room.worker.step()
    room.worker.step()
    with pytest.raises(SystemExit) as caught:
        room.worker.step()
    assert caught.value.code == 0
    for slot in range(9):
        room.assert_right(slot)


def test_an_idle_worker_wakes_for_a_number_and_shows_that_it_lives(make_room: MakeRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    room = make_room()
    monkeypatch.setattr("service.loop.BEAT_S", 0.05)
    begun = time.monotonic()
    room.worker.step()
    assert time.monotonic() - begun > 0.04
    assert room.memory.workers[1]["beat"] > begun
    monkeypatch.setattr("service.loop.BEAT_S", 60.0)
    monkeypatch.setattr(room.worker, "poll", Poll(lambda: room.hand_over(2)))
    room.worker.step()
    room.assert_right(2)


def test_an_idle_worker_warms_its_sizes_one_a_turn(make_room: MakeRoom) -> None:
    room = make_room()
    room.worker.engine.warm, room.worker.cold = {1}, True
    sizes = []
    for _ in range(4):
        room.worker.step()
        sizes.append(max(room.worker.engine.warm))
    assert sizes == [2, 4, 8, 8]
    assert not room.worker.cold


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
    room.worker.step()
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
    room.worker.step()  # a second wait would find no action left
    monkeypatch.setattr(room.worker, "poll", Poll())
    room.hand_over(2, 3)
    room.worker.step()
    room.hand_over(4, waiting_since=time.monotonic() - 101)
    room.worker.step()
    monkeypatch.setattr(room.worker, "poll", Poll(lambda: room.hand_over(STOP)))
    room.hand_over(5)
    room.worker.step()
    for slot in range(6):
        room.assert_right(slot)


def test_the_first_image_after_idleness_waits_for_others_too(make_room: MakeRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    room = make_room(batch_wait_s=100.0, max_batch_size=4)
    monkeypatch.setattr(room.worker, "poll", Poll(lambda: room.hand_over(0), lambda: room.hand_over(1, 2), lambda: room.hand_over(3)))
    room.worker.step()
    for slot in range(4):
        room.assert_right(slot)
    assert room.memory.workers[1]["batches"] == 1
