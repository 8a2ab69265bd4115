"""The worker: LitServe's LitAPI and LitLoop around slots -> batches -> Engine -> results."""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import litserve
from litserve.callbacks import CallbackRunner
from litserve.loops import LitLoop, inference_worker
from litserve.transport.base import MessageTransport
from litserve.utils import WorkerSetupStatus

from models.checkpoint import Header
from service.settings import configure_logging
from service.slots import STOP, Failure, Memory, ProcessState, SlotState, WakePipe

if TYPE_CHECKING:  # the parent imports this module, and never torch
    from service.engine import Engine

log = logging.getLogger(__name__)

BEAT_S = 1.0  # an idle worker shows this often that it lives


def follow_parent(parent: int) -> None:
    """Make this child ignore the signals meant for its parent, end at once when the parent ends, and unblock what it blocked."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})


@dataclass(kw_only=True)
class WorkerOptions:
    """All that a worker is told. Travels to the spawned process by pickle."""

    memory: Memory
    pipes: list[WakePipe]  # of the workers, in order
    door_pipes: list[WakePipe]  # of the front doors, in order
    parent_pipe: WakePipe
    parent: int
    checkpoint: Path
    header: Header  # as the parent read it: what the front doors answer by
    precision: str
    max_batch_size: int
    batch_wait_s: float
    threads: int  # intra-op
    log_format: str
    log_level: str


class Worker:
    """One inference worker: takes slots from its pipe, answers into the result rows."""

    def __init__(self, options: WorkerOptions, index: int, engine: Engine) -> None:
        import torch

        self.index, self.engine, self.memory = index, engine, options.memory
        self.pipe, self.door_pipes = options.pipes[index], options.door_pipes
        self.row = self.memory.workers[index]
        self.generation = int(self.row["generation"])
        self.max_batch_size, self.batch_wait_s = options.max_batch_size, options.batch_wait_s
        # Both views start at the same bytes as numpy's, so nothing is copied.
        self.pixels = torch.frombuffer(self.memory.buffer, dtype=torch.uint8, count=self.memory.pixels.size).view(self.memory.pixels.shape)
        self.results = torch.from_numpy(self.memory.results)[:, : self.memory.layout.classes]
        engine.pin(self.pixels)
        self.row["transfer"] = engine.transfer.encode()
        self.waiting: deque[int] = deque()
        self.stopping = False
        self.cold = True
        self.poll = select.poll()
        self.poll.register(self.pipe.reader, select.POLLIN)

    def step(self) -> None:
        """One turn: fetch what was handed over and classify one batch; with nothing to do, warm a size, or else wait."""
        self._fetch(0)
        if not self.waiting:
            if self.stopping:
                raise SystemExit(0)
            if self.cold:
                self.cold = self.engine.warm_next()
            else:
                self._fetch(BEAT_S)
        if self.waiting:
            self._wait_for_more()
            self._classify()
            if self.cold:  # under steady load the sizes get warm between batches, one at a time
                self.cold = self.engine.warm_next()
        self.row["beat"] = time.monotonic()

    def _wait_for_more(self) -> None:
        """Let a batch that is not full wait. The wait is the first image's: it began when that was handed over, not now."""
        due = float(self.memory.waiting_since[self.waiting[0]]) + self.batch_wait_s
        while len(self.waiting) < self.max_batch_size and not self.stopping and (rest := due - time.monotonic()) > 0:
            self._fetch(rest)

    def _fetch(self, timeout: float) -> None:
        """Move numbers from the pipe to the queue, waiting up to `timeout` seconds for the first."""
        if timeout:
            self.poll.poll(timeout * 1000)
        for number in self.pipe.receive():
            if number == STOP:
                self.stopping = True
            else:
                self.waiting.append(number)

    def _classify(self) -> None:
        now, memory = time.monotonic(), self.memory
        mine = [
            slot
            for slot in self.waiting
            if memory.state[slot] == SlotState.WAITING and memory.worker[slot] == self.index and memory.generation[slot] == self.generation
        ]
        late = [slot for slot in mine if memory.deadline[slot] <= now]
        self._answer(late, SlotState.FAILED, Failure.EXPIRED)
        self.waiting = deque(slot for slot in mine if memory.deadline[slot] > now)
        if not self.waiting:
            return
        batch = [self.waiting.popleft() for _ in range(self.engine.take(min(len(self.waiting), self.max_batch_size)))]
        memory.state[batch] = SlotState.TAKEN
        memory.taken_at[batch] = now
        try:
            self.results[batch] = self.engine.predict(self.pixels, batch)
        except Exception:
            log.exception("a batch of %d failed", len(batch))
            self._answer(batch, SlotState.FAILED, Failure.INTERNAL)
            self._must_still_work()
        else:
            self.row["batches"] += 1
            self.row["images"] += len(batch)
            self._answer(batch, SlotState.DONE, Failure.NONE)

    def _answer(self, slots: list[int], state: SlotState, failure: Failure) -> None:
        """Write the outcome, then wake the front doors: each gets the numbers of all its slots in one write."""
        if not slots:
            return
        self.memory.failure[slots] = failure
        self.memory.done_at[slots] = time.monotonic()
        self.memory.state[slots] = state
        by_door: dict[int, list[int]] = {}
        for slot in slots:
            by_door.setdefault(self.memory.layout.owner(slot), []).append(slot)
        for door, numbers in by_door.items():
            self.door_pipes[door].send(numbers)

    def _must_still_work(self) -> None:
        """After a failed batch: a device that can no longer do its golden samples (a broken CUDA context, say) ends the worker."""
        try:
            good, figures = self.engine.golden_check()
        except Exception as error:
            good, figures = False, str(error)
        if not good:
            log.error("worker %d no longer reproduces its golden samples, it ends: %s", self.index, figures)
            raise SystemExit(1)


class ClassifierAPI(litserve.LitAPI):  # type: ignore[misc]  # LitServe carries no types
    """What LitServe runs in each worker process."""

    def __init__(self, options: WorkerOptions) -> None:
        super().__init__(max_batch_size=options.max_batch_size, loop=_SlotLoop())
        self.options = options
        self.index = -1

    def setup(self, device: str) -> None:
        """Load the checkpoint onto `device`, or write the reason why not into the worker's row and end."""
        row = self.options.memory.workers[self.index]
        row["device"] = device.encode()
        try:
            import torch

            from models import checkpoint
            from service.engine import Engine

            torch.set_num_threads(self.options.threads)
            try:
                loaded = checkpoint.load(self.options.checkpoint)
                served = self.options.header
                if (loaded.header.version, loaded.header.name) != (served.version, served.name):
                    raise checkpoint.CheckpointError(self.options.checkpoint, "file", "replaced while the server started; start again")
                engine = Engine(loaded, device, precision=self.options.precision, max_batch_size=self.options.max_batch_size)
            except (checkpoint.CheckpointError, checkpoint.FidelityError) as error:
                row["reason"] = str(error).encode()[:1000]
                raise SystemExit(1) from None
            row["precision"], row["why"] = engine.precision.encode(), engine.why.encode()[:400]
            self.worker = Worker(self.options, self.index, engine)
        except Exception as error:
            log.exception("worker %d could not start", self.index)
            row["reason"] = f"{type(error).__name__}: {error}".encode()[:1000]
            raise SystemExit(1) from None
        row["beat"] = time.monotonic()


class _SlotLoop(LitLoop):  # type: ignore[misc]  # likewise
    """One turn of the worker; LitServe calls it for ever."""

    def run(self, lit_api: ClassifierAPI, *_unused: Any) -> None:
        lit_api.worker.step()


class _Status:
    """LitServe writes here what becomes of a worker; it lands in the worker's row, and the parent wakes."""

    def __init__(self, options: WorkerOptions, index: int) -> None:
        self.options, self.index = options, index

    def __setitem__(self, name: str, status: str) -> None:
        state = ProcessState.READY if status == WorkerSetupStatus.READY else ProcessState.DEAD
        self.options.memory.workers["state"][self.index] = state
        self.options.parent_pipe.send([self.index])


class _IdleTransport(MessageTransport):  # type: ignore[misc]  # likewise
    """LitServe wants a way to send answers; ours are the slots and pipes."""

    def send(self, item: Any, consumer_id: int) -> None:
        raise NotImplementedError

    async def areceive(self, timeout: int | None = None, consumer_id: int | None = None) -> dict[str, Any]:
        raise NotImplementedError


def run_worker(api: ClassifierAPI, index: int, device: str) -> None:
    """The whole life of a spawned worker process."""
    options = api.options
    follow_parent(options.parent)
    configure_logging(options.log_format, options.log_level)
    options.memory.workers["pid"][index] = os.getpid()
    api.index = index
    code = 1
    try:
        inference_worker(api, device, index, None, _IdleTransport(), _Status(options, index), CallbackRunner(), False)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        log.exception("worker %d ends", index)
    os._exit(code)  # at once: taking torch apart can last seconds, and there is nothing left to save
