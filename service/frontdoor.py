"""The front door's half of the hand-over: a slot for each request, decoding into it, the worker's answer out of it.

    event loop: a slot, a job -> decode thread: pixels into the slot, its number to a worker -> worker -> event loop: the answer

A job owns its slot from the first moment to the last and always runs to its end, so the slot is freed by the last who can
touch it: after the decode thread has returned and the worker has answered. A request that gives up (deadline, client gone)
only stops waiting for its job.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from models.images import ImageError
from service.schemas import ApiError
from service.slots import DONE, FAILED, FILLING, FREE, STOP, WAITING, Failure, Memory, ProcessState, WakePipe

Pixels = npt.NDArray[np.uint8]
Fill = Callable[[Pixels], None]  # writes an image's pixels, uint8 [crop, crop, 3]
Refusal = ApiError | ImageError  # what became of an image instead of an answer
T = TypeVar("T")

_FAILURES = {
    Failure.INTERNAL: ("internal", "the model failed on this batch; the server's log says why"),
    Failure.EXPIRED: ("deadline_exceeded", "the deadline passed before a worker was free"),
    Failure.WORKER_DIED: ("worker_failed", "the worker that had this image died; try again"),
}


_LATE = partial(ApiError, "deadline_exceeded", "the deadline passed; allow more time or send fewer requests at once")


@dataclass(frozen=True)
class Answer:
    """What became of one image."""

    logits: npt.NDArray[np.float32]  # [C]
    probabilities: npt.NDArray[np.float32]  # [C]
    decode_s: float
    queue_s: float
    forward_s: float


class ClientGone(Exception):
    """The client closed the connection: there is nobody to answer."""


_GivenUp = Callable[[], Exception]  # makes the error: the error itself would hold the request's whole stack until the job has ended


def _forget(late: asyncio.Future[Any]) -> None:
    """Nobody may be left to ask what became of it."""
    if not late.cancelled():
        late.exception()


class _Job:
    def __init__(self, slot: int, fill: Fill, outcome: asyncio.Future[Answer | _GivenUp]) -> None:
        self.slot, self.outcome = slot, outcome  # the outcome is there before the end when the request gave up
        self.fill: Fill | None = fill
        self.begun = time.monotonic()
        self.decode_s = 0.0


class FrontDoor:
    """Slots of one HTTP process. Lives on that process's event loop; decoding and handing over run in decode threads."""

    def __init__(self, memory: Memory, index: int, worker_pipes: list[WakePipe], pipe: WakePipe, decode_threads: int) -> None:
        self.memory, self.index, self.worker_pipes, self.pipe = memory, index, worker_pipes, pipe
        self.free = deque(memory.layout.slots_of(index))
        self._waiters: deque[asyncio.Future[int]] = deque()
        self._jobs: dict[int, _Job] = {}  # by slot
        self._decoders = ThreadPoolExecutor(decode_threads, thread_name_prefix="decode")
        # Requests of many images never hold more than a quarter of the slots, all together: a single image finds one free, and few
        # before it.
        self._window = max(1, len(self.free) // 4)
        self._many = asyncio.Semaphore(self._window)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read")  # of large bodies, which must not keep decode threads

    def start(self, on_stop: Callable[[], None]) -> None:
        """Begin to listen to workers, and to the parent, whose word to stop calls `on_stop`."""
        self._loop, self._on_stop = asyncio.get_running_loop(), on_stop
        self._loop.add_reader(self.pipe.reader, self._wake)

    def close(self) -> None:
        self._loop.remove_reader(self.pipe.reader)
        for pool in (self._decoders, self._reader):
            pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[[], T], deadline: float, gone: asyncio.Future[Any]) -> T:
        """`work` in a thread beside those that decode, unless it is too late for it.

        Raises what it raises, ApiError deadline_exceeded and ClientGone.
        """

        def in_time() -> T:
            if gone.done():
                raise ClientGone
            if time.monotonic() >= deadline:
                raise _LATE()
            return work()

        running = self._loop.run_in_executor(self._reader, in_time)
        await asyncio.wait((running, gone), timeout=deadline - time.monotonic(), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        running.add_done_callback(_forget)
        running.cancel()  # where it has not begun
        if gone.done():
            raise ClientGone
        raise _LATE()

    async def classify_many(
        self, fills: Sequence[Fill | Refusal], deadline: float, gone: asyncio.Future[Any], then: Callable[[Answer], T]
    ) -> list[T | Refusal]:
        """Classify images piecewise: `then` of each answer, or why there is none, in their order. Raises ClientGone."""
        found: dict[int, T | Refusal] = {}
        remaining = iter(enumerate(fills))

        async def work() -> None:
            for number, fill in remaining:
                try:
                    if isinstance(fill, Exception):
                        raise fill
                    if time.monotonic() >= deadline:
                        raise _LATE()
                    async with self._many:
                        found[number] = then(await self.classify(fill, deadline, gone))
                except (ApiError, ImageError) as refusal:
                    found[number] = refusal

        tasks = [asyncio.ensure_future(work()) for _ in range(min(self._window, len(fills)))]
        everything = asyncio.gather(*tasks)
        everything.add_done_callback(_forget)
        try:
            await asyncio.wait((everything, gone), timeout=deadline - time.monotonic(), return_when=asyncio.FIRST_COMPLETED)
            if everything.done():
                everything.result()
            elif gone.done():
                raise ClientGone
        finally:
            everything.cancel()
        return [found[number] if number in found else _LATE() for number in range(len(fills))]

    async def classify(self, fill: Fill, deadline: float, gone: asyncio.Future[Any]) -> Answer:
        """Decode an image with `fill`, which writes uint8 `[crop, crop, 3]`, and classify it.

        Gives up at `deadline` (monotonic seconds) or when `gone` is done. Raises what `fill` raises, ClientGone, and ApiError:
        overloaded when no slot frees in time, deadline_exceeded, worker_failed, internal.
        """
        if deadline <= time.monotonic():
            raise _LATE()
        # The last that was freed: the fewest are ever touched, and its pixels may still lie in a cache.
        slot = self.free.pop() if self.free else await self._wait_for_a_slot(deadline, gone)
        job = self._jobs[slot] = _Job(slot, fill, self._loop.create_future())
        self.memory.state[slot] = FILLING
        self.memory.deadline[slot] = deadline
        self._decoders.submit(self._decode, job)

        def client_gone(_: asyncio.Future[Any]) -> None:
            self._give_up(job, ClientGone)

        timer = self._loop.call_later(deadline - time.monotonic(), self._give_up, job, _LATE)
        gone.add_done_callback(client_gone)
        try:
            outcome = await job.outcome
        except asyncio.CancelledError:
            self._give_up(job, None)
            raise
        finally:
            timer.cancel()
            gone.remove_done_callback(client_gone)
        if isinstance(outcome, Answer):
            return outcome
        raise outcome()

    def _give_up(self, job: _Job, why: _GivenUp | None) -> None:
        """The request stops waiting, which `why` tells it, unless it has been cancelled."""
        if why is not None and not job.outcome.done():
            job.outcome.set_result(why)
        if self._jobs.get(job.slot) is job:
            job.fill = None  # with the body that it holds
            self.memory.deadline[job.slot] = 0  # a worker that has not taken it need not

    async def _wait_for_a_slot(self, deadline: float, gone: asyncio.Future[Any]) -> int:
        waiter: asyncio.Future[int] = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            await asyncio.wait((waiter, gone), timeout=deadline - time.monotonic(), return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientGone
            if not waiter.done():
                raise ApiError("overloaded", "every slot stayed busy until the deadline; try again later or slower")
            return waiter.result()
        except BaseException:
            if not waiter.cancel():
                self._release(waiter.result())  # a slot came at the very moment of giving up
            raise

    def _release(self, slot: int) -> None:
        self.memory.state[slot] = FREE
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(slot)
                return
        self.free.append(slot)

    def _decode(self, job: _Job) -> None:
        """In a decode thread: to the worker without a detour over the event loop, which hears of it only when there is an answer."""
        try:
            fill, job.fill = job.fill, None
            if fill is not None:
                begun = time.monotonic()
                fill(self.memory.pixels[job.slot])
                job.decode_s = time.monotonic() - begun
                if not job.outcome.done():
                    self._hand_over(job.slot)
                    return
            error: BaseException = ApiError("deadline_exceeded", "given up while decoding")
        except BaseException as caught:
            error = caught
        self._loop.call_soon_threadsafe(self._end, job, error)

    def _hand_over(self, slot: int) -> None:
        memory = self.memory
        worker = memory.least_busy_worker()
        if worker is None:
            raise ApiError("worker_failed", "no worker is ready; try again")
        memory.worker[slot] = worker
        memory.generation[slot] = memory.workers["generation"][worker]
        memory.attempt[slot] = 1
        memory.waiting_since[slot] = time.monotonic()
        memory.state[slot] = WAITING
        if not self.worker_pipes[worker].send([slot]):
            raise ApiError("worker_failed", "the worker has stopped reading; try again")

    def _wake(self) -> None:
        for number in self.pipe.receive():
            if number == STOP:
                self._on_stop()
            elif job := self._jobs.get(number):
                state = int(self.memory.state[number])  # the row is the truth, a number only wakes
                if state == DONE:
                    self._end(job, None)
                elif state == FAILED:
                    self._end(job, ApiError(*_FAILURES[Failure(int(self.memory.failure[number]))]))

    def _end(self, job: _Job, error: BaseException | None) -> None:
        """Nobody touches the slot any more: the request, if it still waits, gets its answer."""
        memory, slot = self.memory, job.slot
        del self._jobs[slot]
        if job.outcome.done():
            pass
        elif error is not None:
            job.outcome.set_exception(error)
        else:
            taken_at, done_at = float(memory.taken_at[slot]), float(memory.done_at[slot])
            job.outcome.set_result(
                Answer(
                    logits=memory.logits[slot, : memory.layout.classes].copy(),
                    probabilities=memory.results[slot, : memory.layout.classes].copy(),
                    decode_s=job.decode_s,
                    queue_s=taken_at - job.begun - job.decode_s,
                    forward_s=done_at - taken_at,
                )
            )
        self._release(slot)

    def not_ready(self, silence_s: float) -> tuple[str, str] | None:
        """Why this server should get no requests now, as an error code and a message; None when it should."""
        if self.memory.server["draining"][0]:
            return "draining", "the server is stopping"
        now = time.monotonic()
        for index, row in enumerate(self.memory.workers):
            if row["state"] != ProcessState.READY:
                return "worker_failed", f"worker {index} on {row['device'].decode()} is {ProcessState(int(row['state'])).name.lower()}"
            if now - row["beat"] > silence_s:
                return "worker_failed", f"worker {index} on {row['device'].decode()} has been silent for {now - row['beat']:.0f} s"
        return None
