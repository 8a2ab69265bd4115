"""For benchmarks/gpu.py: an engine's lanes kept busy as the server does it, with answers that are checked.

The real Worker does it, fed by a process that stands in for a front door; two plain threads do where it can't be imported.
"""

from __future__ import annotations

import itertools
import mmap
import multiprocessing
import os
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from models.checkpoint import Golden

if TYPE_CHECKING:
    from service.engine import Lane
    from service.torch_engine import TorchEngine
    from service.worker import Worker

WARM_S = 0.15  # of each sample, before anything is counted
AHEAD = 4  # batches in flight: one computed, one in the other lane, two on their way back or waiting
NEARER = 0.01  # an answer is another image's where it is nearer to that one's by more than this
Found = dict[str, float]  # images_per_s, mean batch, wrong, failed


class Answers:
    """What must come out for each slot. Neighbours differ, so that answers that went to the wrong one show."""

    def __init__(self, golden: Golden, slots: int) -> None:
        self.kinds = np.random.default_rng(0).integers(0, len(golden.pixels), slots)
        self.tops = np.unique(golden.probabilities.argmax(1))
        self.expect(golden.probabilities)

    def expect(self, probabilities: npt.NDArray[np.float32]) -> None:
        """What the engine itself gives for the golden samples: its rounding is none of this one's business."""
        self.reference = probabilities[:, self.tops]

    def wrong(self, slots: Sequence[int], found: npt.NDArray[np.float32]) -> int:
        """How many of the probabilities `[N, C]` are those of another slot's image."""
        distances = np.abs(found[:, None, self.tops] - self.reference[None]).max(2)
        mine = distances[np.arange(len(found)), self.kinds[slots]]
        return int((~(mine <= distances.min(1) + NEARER)).sum())  # NaN is wrong


def rate(times: Sequence[float], sizes: Sequence[int], since: float) -> float:
    """Images a second from the first answer after `since` to the last: what was on its way before and after doesn't count."""
    counted = [(moment, size) for moment, size in zip(times, sizes, strict=True) if moment >= since]
    if len(counted) < 2:
        return 0.0
    return sum(size for _, size in counted[1:]) / (counted[-1][0] - counted[0][0])


def over(times: Sequence[float], now: float, since: float, seconds: float) -> bool:
    """Whether a sample is: its time is, and some answers came in it even of a slow model."""
    return now >= since + seconds and len(times) >= 4 and times[-4] >= since


class Pipeline(ABC):
    """Made before CUDA is touched: a process that has a CUDA context had better not fork."""

    pixels: npt.NDArray[np.uint8]  # of the slots

    def __init__(self, golden: Golden, largest: int) -> None:
        self.golden, self.slots = golden, AHEAD * largest
        self.answers = Answers(golden, self.slots)

    @abstractmethod
    def attach(self, engine: TorchEngine) -> None: ...

    @abstractmethod
    def sample(self, size: int, seconds: float) -> Found:
        """Batches of `size` through the attached engine."""

    @abstractmethod
    def detach(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


def _settle(engine: TorchEngine) -> None:
    """A registration that failed leaves an error behind, which the next kernel would be blamed for."""
    import torch

    if engine.on_cuda and not engine._pinned:
        with suppress(RuntimeError):
            torch.zeros(1, device=engine.device)


def _unpin(engine: TorchEngine, pixels: npt.NDArray[np.uint8]) -> None:
    """The next engine registers its slots anew."""
    import torch

    if engine._pinned:
        torch.cuda.synchronize(engine.device)
        torch.cuda.cudart().cudaHostUnregister(pixels.ctypes.data)
        engine._pinned = False


class Threads(Pipeline):
    """A thread for each lane; they take turns at putting images in, and run at the same time, as the Worker's do."""

    name = "threads"

    def __init__(self, golden: Golden, largest: int) -> None:
        super().__init__(golden, largest)
        shape = (self.slots, *golden.pixels.shape[1:])
        self.pixels = np.ndarray(shape, np.uint8, mmap.mmap(-1, int(np.prod(shape))))  # whole pages, shared: what the server registers
        self.pixels[:] = golden.pixels[self.answers.kinds]
        self._engine: TorchEngine | None = None

    def attach(self, engine: TorchEngine) -> None:
        self.answers.expect(engine.classify(self.golden.pixels).probabilities)
        engine.pin(self.pixels)
        _settle(engine)
        self._engine = engine

    def detach(self) -> None:
        if self._engine is not None:
            _unpin(self._engine, self.pixels)
            self._engine = None

    def close(self) -> None:
        self.detach()

    def sample(self, size: int, seconds: float) -> Found:
        engine = self._engine
        assert engine is not None
        turn, stop, starts = threading.Lock(), threading.Event(), itertools.count(0, size + 1)
        times: list[float] = []
        wrong: list[int] = []
        errors: list[BaseException] = []
        since = time.perf_counter() + WARM_S

        def work(lane: Lane) -> None:
            try:
                engine.enter_thread()
                while not (over(times, time.perf_counter(), since, seconds) or errors or stop.is_set()):
                    with turn:
                        first = next(starts)
                        slots = [(first + place) % self.slots for place in range(size)]
                        for place, slot in enumerate(slots):
                            lane.put(place, self.pixels[slot])
                    found = lane.run(0, size).probabilities
                    wrong.append(self.answers.wrong(slots[-2:], found[-2:]))  # lanes mixed up would show in each image
                    times.append(time.perf_counter())
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(lane,), daemon=True) for lane in engine.lanes]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:  # where our own time is up, theirs is too
            stop.set()
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        times.sort()
        images = rate(times, [size] * len(times), since)
        return {"images_per_s": images, "mean batch": float(size), "wrong": sum(wrong), "failed": 0}


class WithWorker(Pipeline):
    """The server's own Worker."""

    name = "the Worker"

    def __init__(self, golden: Golden, largest: int) -> None:
        from service.slots import Layout, Memory, WakePipe

        super().__init__(golden, largest)
        crop, classes = golden.header.preprocessing.crop, len(golden.header.labels)
        self.memory = Memory(Layout(slots=self.slots, crop=crop, classes=classes, workers=1, doors=1))
        self.memory.pixels[:] = golden.pixels[self.answers.kinds]
        self.memory.workers["generation"], self.memory.generation[:] = 1, 1
        self.memory.deadline[:] = np.inf
        self.pixels, self.classes = self.memory.pixels, classes
        self.pipe, self.door_pipe, self.parent_pipe = WakePipe(), WakePipe(), WakePipe()
        context = multiprocessing.get_context("fork")
        self._orders, theirs = context.Pipe()
        self._door = context.Process(target=self._front_door, args=(theirs,), daemon=True)
        self._door.start()
        self._worker: Worker | None = None
        self._numbers = itertools.count()

    def attach(self, engine: TorchEngine) -> None:
        from service.worker import Worker, WorkerOptions

        options = WorkerOptions(
            memory=self.memory,
            pipes=[self.pipe],
            door_pipes=[self.door_pipe],
            parent_pipe=self.parent_pipe,
            parent=os.getpid(),
            checkpoint=Path(),
            header=self.golden.header,
            engine="torch",
            precision=engine.precision,
            compiled=False,
            cache_dir=Path(),
            max_batch_size=engine.largest,
            batch_wait_s=0.0,
            threads=1,
            log_format="text",
            log_level="info",
        )
        self.answers.expect(engine.classify(self.golden.pixels).probabilities)
        self._worker, self._engine = Worker(options, 0, engine), engine
        _settle(engine)
        self._thread = threading.Thread(target=self._worker.run, daemon=True)
        self._thread.start()

    def detach(self) -> None:
        from service.slots import STOP

        if self._worker is not None:
            self.pipe.send([STOP])
            self._thread.join()
            _unpin(self._engine, self.pixels)
            del self._worker, self._engine
            self._worker = None

    def close(self) -> None:
        self.detach()
        self._door.kill()
        self._door.join()

    def sample(self, size: int, seconds: float) -> Found:
        assert self._worker is not None
        self._worker.max_batch_size = size  # it is idle now
        row = self.memory.workers[0]
        before = int(row["batches"]), int(row["images"])
        order = next(self._numbers)
        self._orders.send((order, AHEAD * size, seconds, self.answers.reference))
        found: Found = {}
        answered = -1
        while answered != order:  # an older one's answer is still to come where time ran out
            if not self._orders.poll(seconds + 60):
                raise RuntimeError("no answers from the worker within a minute")
            answered, found = self._orders.recv()
        batches, images = int(row["batches"]) - before[0], int(row["images"]) - before[1]
        return found | {"mean batch": images / max(1, batches)}

    def _front_door(self, orders: Any) -> None:
        """In a process of its own, as a front door is: it must not hold this interpreter's lock."""
        self._orders.close()  # so that ours is the last end when the parent dies
        with suppress(EOFError, KeyboardInterrupt):
            while True:
                number, count, seconds, self.answers.reference = orders.recv()
                orders.send((number, self._keep_busy(count, seconds)))

    def _hand_over(self, slots: Sequence[int]) -> None:
        from service.slots import SlotState

        self.memory.waiting_since[slots] = time.monotonic()
        self.memory.state[slots] = SlotState.WAITING
        self.pipe.send(slots)

    def _keep_busy(self, count: int, seconds: float) -> Found:
        """Hand over `count` slots, each again as soon as it is answered."""
        from service.slots import SlotState

        times: list[float] = []
        sizes: list[int] = []
        wrong = failed = 0
        since, out, inside = time.monotonic() + WARM_S, count, 0
        self._hand_over(range(count))
        while out:
            if not select.select([self.door_pipe.reader], [], [], 30)[0]:
                failed += out
                break
            slots = self.door_pipe.receive()
            times.append(time.monotonic())
            sizes.append(len(slots))
            failed += int((self.memory.state[slots] != SlotState.DONE).sum())
            wrong += self.answers.wrong(slots, self.memory.results[slots, : self.classes])
            inside = inside or len(times) * over(times, times[-1], since, seconds)
            if inside:
                out -= len(slots)
            else:
                self._hand_over(slots)
        return {"images_per_s": rate(times[:inside], sizes[:inside], since), "wrong": wrong, "failed": failed}


def make(golden: Golden, largest: int) -> Threads | WithWorker:
    """The Worker where it can be imported."""
    try:
        import service.worker  # noqa: F401  # only to see whether it can be
    except ImportError:
        return Threads(golden, largest)
    return WithWorker(golden, largest)
