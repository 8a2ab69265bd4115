"""The front door: each request gets its own answer, and a slot is free again only when nobody can touch it any more."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from models.images import ImageError
from service.frontdoor import Answer, ClientGone, FrontDoor, Pixels
from service.schemas import ApiError
from service.slots import STOP, Failure, Layout, Memory, ProcessState, SlotState, WakePipe


class Hall:
    """A front door with two slots, the second of two, on the running event loop. The test is the worker."""

    def __init__(self, *, slots: int = 2, decode_threads: int = 4) -> None:
        self.memory = Memory(Layout(slots=2 * slots, crop=2, classes=3, workers=1, doors=2))
        self.memory.workers[0]["state"], self.memory.workers[0]["generation"] = ProcessState.READY, 7
        self.worker_pipe, self.pipe = WakePipe(), WakePipe()
        self.door = FrontDoor(self.memory, 1, [self.worker_pipe], self.pipe, decode_threads)
        self.stopped = asyncio.Event()
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.handed_over: asyncio.Queue[int] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(self.worker_pipe.reader, self._read)
        self.door.start(self.stopped.set)

    def _read(self) -> None:
        for number in self.worker_pipe.receive():
            self.handed_over.put_nowait(number)

    def request(
        self, value: int = 1, *, timeout: float = 30, fill: Callable[[Pixels], None] | None = None, gone: Any = None
    ) -> asyncio.Task[Answer]:
        """A request whose pixels are all `value`, running."""
        fill = fill or (lambda pixels: pixels.fill(value))
        return asyncio.ensure_future(self.door.classify(fill, time.monotonic() + timeout, gone or self.gone))

    async def next(self) -> int:
        return await asyncio.wait_for(self.handed_over.get(), 10)

    def answer(self, slot: int, state: SlotState = SlotState.DONE, failure: Failure = Failure.NONE) -> None:
        """Answer as a worker does: logits and probabilities that the pixels of this slot decide."""
        memory = self.memory
        assert memory.state[slot] == SlotState.WAITING
        memory.results[slot, :3] = memory.pixels[slot, 0, 0, 0] / 100
        memory.logits[slot, :3] = -1.0 * memory.pixels[slot, 0, 0, 0]
        memory.taken_at[slot], memory.done_at[slot], memory.failure[slot] = time.monotonic(), time.monotonic() + 0.25, failure
        memory.state[slot] = state
        self.pipe.send([slot])

    async def free(self, count: int = 2) -> None:
        """Wait until as many slots are free, and see that their rows say so."""
        async with asyncio.timeout(10):
            while len(self.door.free) < count:
                await asyncio.sleep(0.001)
        assert all(self.memory.state[slot] == SlotState.FREE for slot in self.door.free)
        assert len(set(self.door.free)) == count


def on_a_loop(test: Callable[[Hall], Awaitable[None]], **options: int) -> None:
    forgotten: list[dict[str, Any]] = []  # exceptions that nobody looked at, and errors in callbacks

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: forgotten.append(context))
        hall = Hall(**options)
        try:
            await asyncio.wait_for(test(hall), 30)
        finally:
            asyncio.get_running_loop().remove_reader(hall.worker_pipe.reader)
            hall.door.close()
            for pipe in (hall.worker_pipe, hall.pipe):
                os.close(pipe.reader)
                os.close(pipe.writer)

    asyncio.run(main())
    gc.collect()
    assert not forgotten


async def code_of(task: asyncio.Task[Answer]) -> str:
    with pytest.raises(ApiError) as caught:
        await task
    return caught.value.code


class SlowDecode:
    """A fill that returns when it is told to."""

    def __init__(self) -> None:
        self.begun, self.may_return = threading.Event(), threading.Event()

    def __call__(self, pixels: Pixels) -> None:
        self.begun.set()
        assert self.may_return.wait(10)
        pixels.fill(9)

    async def has_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, 10)


def test_each_request_gets_the_answer_of_its_own_image() -> None:
    async def test(hall: Hall) -> None:
        requests = [hall.request(value) for value in (10, 20)]
        slots = [await hall.next(), await hall.next()]
        assert sorted(slots) == list(hall.memory.layout.slots_of(1))
        assert not hall.door.free
        for slot in sorted(slots, reverse=True):
            hall.answer(slot)
        for request, value in zip(requests, (10, 20), strict=True):
            answer = await request
            np.testing.assert_allclose(answer.probabilities, [value / 100] * 3)
            np.testing.assert_array_equal(answer.logits, [-value] * 3)
            assert answer.logits.dtype == answer.probabilities.dtype == np.float32
            assert answer.decode_s >= 0
            assert answer.queue_s >= 0
            assert answer.forward_s == pytest.approx(0.25, abs=0.1)
        await hall.free()

    on_a_loop(test)


def test_an_answer_is_a_copy_that_the_next_request_does_not_change() -> None:
    async def test(hall: Hall) -> None:
        first = hall.request(10)
        hall.answer(await hall.next())
        kept = await first
        second = hall.request(20)
        hall.answer(await hall.next())
        later = await second
        assert (later.logits[0], later.probabilities[0]) == (-20, np.float32(0.2))
        assert (kept.logits[0], kept.probabilities[0]) == (-10, np.float32(0.1))

    on_a_loop(test, slots=1)


def test_the_row_names_the_worker_its_generation_and_the_deadline() -> None:
    async def test(hall: Hall) -> None:
        begun = time.monotonic()
        request = hall.request(timeout=20)
        slot = await hall.next()
        memory = hall.memory
        assert (memory.state[slot], memory.worker[slot], memory.generation[slot], memory.attempt[slot]) == (SlotState.WAITING, 0, 7, 1)
        assert memory.deadline[slot] == pytest.approx(begun + 20, abs=1)
        assert begun <= memory.waiting_since[slot] <= time.monotonic()
        hall.answer(slot)
        await request

    on_a_loop(test)


def test_what_fill_raises_reaches_the_request_and_the_slot_is_free() -> None:
    async def test(hall: Hall) -> None:
        def fill(_: Pixels) -> None:
            raise LookupError("no image in here")

        with pytest.raises(LookupError, match="no image in here"):
            await hall.request(fill=fill)
        await hall.free()
        assert hall.handed_over.empty()

    on_a_loop(test)


@pytest.mark.parametrize("how", ["deadline", "gone", "cancelled"])
def test_giving_up_while_decoding_frees_the_slot_when_the_thread_has_returned(how: str) -> None:
    async def test(hall: Hall) -> None:
        decode = SlowDecode()
        gone = asyncio.get_running_loop().create_future()
        request = hall.request(fill=decode, timeout=0.05 if how == "deadline" else 30, gone=gone)
        await decode.has_begun()
        await _give_up(how, request, gone)
        assert len(hall.door.free) == 1
        assert SlotState.FILLING in hall.memory.state
        decode.may_return.set()
        await hall.free()
        assert hall.handed_over.empty()  # nobody waits for it: no worker need see it

    on_a_loop(test)


@pytest.mark.parametrize("how", ["deadline", "gone", "cancelled"])
@pytest.mark.parametrize("outcome", [SlotState.DONE, SlotState.FAILED])
def test_giving_up_while_waiting_frees_the_slot_when_the_worker_has_answered(how: str, outcome: SlotState) -> None:
    async def test(hall: Hall) -> None:
        gone = asyncio.get_running_loop().create_future()
        request = hall.request(timeout=0.2 if how == "deadline" else 30, gone=gone)
        slot = await hall.next()
        await _give_up(how, request, gone)
        assert slot not in hall.door.free
        assert hall.memory.state[slot] == SlotState.WAITING
        assert hall.memory.deadline[slot] == 0  # the worker need not compute it
        hall.answer(slot, outcome, Failure.EXPIRED)
        await hall.free()

    on_a_loop(test)


async def _give_up(how: str, request: asyncio.Task[Answer], gone: asyncio.Future[None]) -> None:
    if how == "deadline":
        assert await code_of(request) == "deadline_exceeded"
    elif how == "gone":
        gone.set_result(None)
        with pytest.raises(ClientGone):
            await request
    else:
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request


def test_an_image_whose_request_gave_up_before_a_thread_was_free_is_not_decoded() -> None:
    async def test(hall: Hall) -> None:
        decode, second = SlowDecode(), SlowDecode()
        first = hall.request(fill=decode)
        await decode.has_begun()
        assert await code_of(hall.request(fill=second, timeout=0.02)) == "deadline_exceeded"
        decode.may_return.set()
        hall.answer(await hall.next())
        await first
        await hall.free()
        assert not second.begun.is_set()

    on_a_loop(test, decode_threads=1)


def test_no_slot_in_time_is_overload_and_changes_nothing() -> None:
    async def test(hall: Hall) -> None:
        first = hall.request(10)
        slot = await hall.next()
        assert await code_of(hall.request(20, timeout=0.02)) == "overloaded"
        gone = asyncio.get_running_loop().create_future()
        waiting = hall.request(30, gone=gone)
        await asyncio.sleep(0)
        gone.set_result(None)
        with pytest.raises(ClientGone):
            await waiting
        hall.answer(slot)
        assert (await first).probabilities[0] == np.float32(0.1)
        await hall.free(1)
        assert hall.handed_over.empty()

    on_a_loop(test, slots=1)


def test_waiters_are_served_first_come_first_served_past_those_who_gave_up() -> None:
    async def test(hall: Hall) -> None:
        gone = asyncio.get_running_loop().create_future()
        requests = [hall.request(10), hall.request(20), hall.request(30, gone=gone), hall.request(40), hall.request(50), hall.request(60)]
        slot = await hall.next()
        gone.set_result(None)
        requests[4].cancel()
        served = []
        for _ in range(4):
            served.append(int(hall.memory.pixels[slot, 0, 0, 0]))
            hall.answer(slot)
            if len(served) < 4:
                slot = await hall.next()
        assert served == [10, 20, 40, 60]
        outcomes = await asyncio.gather(*requests, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Answer, Answer, ClientGone, Answer, asyncio.CancelledError, Answer]
        await hall.free(1)

    on_a_loop(test, slots=1)


@pytest.mark.parametrize("how", ["gone", "cancelled"])
def test_a_slot_that_comes_at_the_very_moment_of_giving_up_is_not_lost(how: str) -> None:
    async def test(hall: Hall) -> None:
        gone = asyncio.get_running_loop().create_future()
        slot = hall.door.free.popleft()  # busy, with whatever
        waiting, behind = hall.request(10, gone=gone), hall.request(20)
        await asyncio.sleep(0)
        hall.door._release(slot)  # the slot is `waiting`'s now, which has not run yet
        assert not hall.door.free
        if how == "gone":
            gone.set_result(None)
        else:
            waiting.cancel()
        hall.answer(await hall.next())
        assert (await behind).probabilities[0] == np.float32(0.2)
        with pytest.raises((ClientGone, asyncio.CancelledError)):
            await waiting
        await hall.free(1)

    on_a_loop(test, slots=1)


@pytest.mark.parametrize(
    ("failure", "code"),
    [(Failure.INTERNAL, "internal"), (Failure.EXPIRED, "deadline_exceeded"), (Failure.WORKER_DIED, "worker_failed")],
)
def test_a_failed_slot_is_the_error_that_its_row_says(failure: Failure, code: str) -> None:
    async def test(hall: Hall) -> None:
        request = hall.request()
        hall.answer(await hall.next(), SlotState.FAILED, failure)
        assert await code_of(request) == code
        await hall.free()

    on_a_loop(test)


def test_without_a_ready_worker_a_request_fails_at_once_and_frees_its_slot() -> None:
    async def test(hall: Hall) -> None:
        hall.memory.workers[0]["state"] = ProcessState.DEAD
        assert await code_of(hall.request()) == "worker_failed"
        await hall.free()

    on_a_loop(test)


def test_a_worker_that_stopped_reading_fails_the_request_and_frees_its_slot() -> None:
    async def test(hall: Hall) -> None:
        asyncio.get_running_loop().remove_reader(hall.worker_pipe.reader)
        while hall.worker_pipe.send([1]):
            pass
        assert await code_of(hall.request()) == "worker_failed"
        await hall.free()

    on_a_loop(test)


def test_a_number_that_nobody_waits_for_and_one_before_its_time_change_nothing() -> None:
    async def test(hall: Hall) -> None:
        hall.pipe.send([3, 2, 3, 1000])
        request = hall.request(10)
        slot = await hall.next()
        hall.pipe.send([slot])  # pipes only wake: the row does not say done
        hall.pipe.send([STOP])
        await hall.stopped.wait()  # so it has been read
        await asyncio.sleep(0)
        assert not request.done()
        hall.answer(slot)
        hall.pipe.send([slot, slot])
        assert (await request).probabilities[0] == np.float32(0.1)
        await hall.free()

    on_a_loop(test)


def test_the_word_to_stop_calls_back_and_requests_in_flight_go_on() -> None:
    async def test(hall: Hall) -> None:
        request = hall.request(10)
        slot = await hall.next()
        hall.pipe.send([STOP])
        await hall.stopped.wait()
        hall.answer(slot)
        assert (await request).probabilities[0] == np.float32(0.1)

    on_a_loop(test)


def test_many_requests_on_few_slots_all_get_their_own_answer() -> None:
    async def test(hall: Hall) -> None:
        async def work() -> None:
            held: deque[int] = deque()
            while True:
                held.append(await hall.next())
                if len(held) == 2 or hall.handed_over.empty():
                    while held:
                        hall.answer(held.pop())

        worker = asyncio.ensure_future(work())
        answers = await asyncio.gather(*(hall.request(value) for value in range(200)))
        assert [round(float(answer.probabilities[2]) * 100) for answer in answers] == list(range(200))
        worker.cancel()
        await hall.free(3)

    on_a_loop(test, slots=3)


def test_not_ready_names_the_first_reason() -> None:
    async def test(hall: Hall) -> None:
        row, door = hall.memory.workers[0], hall.door
        row["device"], row["beat"] = b"cuda:1", time.monotonic()
        assert door.not_ready(5) is None
        row["beat"] = time.monotonic() - 8
        assert door.not_ready(10) is None
        assert door.not_ready(5) == ("worker_failed", "worker 0 on cuda:1 has been silent for 8 s")
        row["state"] = ProcessState.DEAD
        assert door.not_ready(5) == ("worker_failed", "worker 0 on cuda:1 is dead")
        row["state"] = ProcessState.STARTING
        assert door.not_ready(5) == ("worker_failed", "worker 0 on cuda:1 is starting")
        hall.memory.server["draining"][0] = 1
        assert door.not_ready(5) == ("draining", "the server is stopping")

    on_a_loop(test)


def test_a_request_that_gives_up_before_its_decoding_lets_go_of_its_body() -> None:
    async def run() -> None:
        memory = Memory(Layout(slots=4, crop=32, classes=10, workers=1, doors=1))
        door = FrontDoor(memory, 0, [WakePipe()], WakePipe(), decode_threads=1)
        door.start(lambda: None)
        begun, go_on = threading.Event(), threading.Event()

        def slow(pixels: Pixels) -> None:
            begun.set()
            go_on.wait(30)

        class Body:
            def __call__(self, pixels: Pixels) -> None: ...

        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        first = asyncio.ensure_future(door.classify(slow, time.monotonic() + 60, gone))
        await asyncio.to_thread(begun.wait, 30)
        body = Body()
        seen = weakref.ref(body)
        with pytest.raises(ApiError, match="deadline"):
            await door.classify(body, time.monotonic() + 0.05, gone)
        del body
        gc.collect()
        assert seen() is None  # though its job still waits for the one decode thread
        go_on.set()
        gone.set_result(None)
        with pytest.raises(ClientGone):
            await first
        door.close()

    asyncio.run(run())


def filling(value: int) -> Callable[[Pixels], None]:
    return lambda pixels: pixels.fill(value)


def test_several_requests_of_many_images_hold_a_quarter_of_the_slots_together_and_take_turns() -> None:
    async def test(hall: Hall) -> None:
        def many(first: int) -> asyncio.Task[Any]:
            fills = [filling(value) for value in range(first, first + 40)]
            return asyncio.ensure_future(
                hall.door.classify_many(fills, time.monotonic() + 30, hall.gone, lambda answer: round(float(answer.probabilities[0]) * 100))
            )

        requests, order = [many(0), many(100)], []
        for _ in range(80):
            slot = await hall.next()
            order.append(int(hall.memory.pixels[slot, 0, 0, 0]))
            assert len(hall.door.free) >= 6  # of 8
            hall.answer(slot)
        assert await requests[0] == list(range(40))
        assert await requests[1] == list(range(100, 140))
        assert any(value >= 100 for value in order[:10])  # the second has not waited for the first
        single = hall.request(7)
        hall.answer(await hall.next())
        assert (await single).probabilities[0] == np.float32(0.07)
        await hall.free(8)

    on_a_loop(test, slots=8)


def test_among_many_images_each_refusal_stands_in_its_place() -> None:
    async def test(hall: Hall) -> None:
        def broken(pixels: Pixels) -> None:
            raise ImageError("image_corrupt", "broken")

        fills: list[Any] = [filling(1), broken, ApiError("bad_request", "no base64"), filling(2), filling(3)]
        request = asyncio.ensure_future(
            hall.door.classify_many(fills, time.monotonic() + 30, hall.gone, lambda answer: float(answer.probabilities[0]))
        )
        hall.answer(await hall.next())
        hall.answer(await hall.next(), SlotState.FAILED, Failure.INTERNAL)
        hall.answer(await hall.next())
        found = await request
        assert [getattr(one, "code", one) for one in found] == [
            pytest.approx(0.01),
            "image_corrupt",
            "bad_request",
            "internal",
            pytest.approx(0.03),
        ]
        await hall.free()

    on_a_loop(test)


def test_when_time_ends_among_many_images_what_was_answered_stays() -> None:
    async def test(hall: Hall) -> None:
        fills = [filling(value) for value in range(1, 5)]
        request = asyncio.ensure_future(
            hall.door.classify_many(fills, time.monotonic() + 0.3, hall.gone, lambda answer: float(answer.probabilities[0]))
        )
        hall.answer(await hall.next())
        late = await hall.next()  # which no worker answers in time
        found = await request
        assert found[0] == pytest.approx(0.01)
        assert [getattr(one, "code", one) for one in found[1:]] == ["deadline_exceeded"] * 3
        hall.answer(late)
        await hall.free()

    on_a_loop(test)


def test_a_client_that_leaves_among_many_images_ends_them_all() -> None:
    async def test(hall: Hall) -> None:
        fills = [filling(value) for value in range(1, 50)]
        request = asyncio.ensure_future(hall.door.classify_many(fills, time.monotonic() + 30, hall.gone, lambda answer: answer))
        slot = await hall.next()
        hall.gone.set_result(None)
        with pytest.raises(ClientGone):
            await request
        hall.answer(slot)
        await hall.free()
        assert hall.handed_over.empty()
        with pytest.raises(ClientGone):
            await hall.door.run(lambda: None, time.monotonic() + 30, hall.gone)

    on_a_loop(test)


def test_what_runs_beside_the_loop_leaves_decode_threads_alone_and_does_not_begin_too_late() -> None:
    async def test(hall: Hall) -> None:
        may_return = threading.Event()
        reading = asyncio.ensure_future(hall.door.run(lambda: may_return.wait(10), time.monotonic() + 30, hall.gone))
        single = hall.request(5)
        hall.answer(await hall.next())  # decoded meanwhile, by the only decode thread
        await single
        may_return.set()
        assert await reading is True
        with pytest.raises(ApiError) as caught:
            await hall.door.run(lambda: None, time.monotonic() - 1, hall.gone)
        assert caught.value.code == "deadline_exceeded"

    on_a_loop(test, decode_threads=1)


def test_what_waits_for_its_turn_beside_the_loop_gives_up_in_time_and_is_never_begun() -> None:
    async def test(hall: Hall) -> None:
        may_return, begun = threading.Event(), list[int]()
        first = asyncio.ensure_future(hall.door.run(lambda: may_return.wait(10), time.monotonic() + 30, hall.gone))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            await hall.door.run(lambda: begun.append(1), time.monotonic() + 0.05, hall.gone)
        assert caught.value.code == "deadline_exceeded"
        left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        leaving = asyncio.ensure_future(hall.door.run(lambda: begun.append(2), time.monotonic() + 30, left))
        await asyncio.sleep(0)
        left.set_result(None)
        with pytest.raises(ClientGone):
            await leaving
        may_return.set()
        assert await first is True
        assert begun == []

    on_a_loop(test)


def test_many_images_whose_time_is_over_do_not_wait_for_other_requests() -> None:
    async def test(hall: Hall) -> None:
        def many(timeout: float) -> asyncio.Task[Any]:
            fills = [filling(value) for value in range(1, 9)]
            return asyncio.ensure_future(hall.door.classify_many(fills, time.monotonic() + timeout, hall.gone, lambda answer: answer))

        patient, hasty = many(30), many(0.1)
        slot = await hall.next()
        assert [getattr(one, "code", "answered") for one in await hasty] == ["deadline_exceeded"] * 8  # while nobody is answered
        hall.answer(slot)
        for _ in range(7):
            hall.answer(await hall.next())
        assert all(isinstance(one, Answer) for one in await patient)
        await hall.free()

    on_a_loop(test)
