"""The worker: slots -> batches -> Engine -> results, with a thread for each of the engine's lanes."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.checkpoint import Header
from service.engine import Engine, Lane, Scores, joined
from service.slots import DONE, FAILED, FILLING, STOP, TAKEN, WAITING, Failure, Memory, WakePipe

log = logging.getLogger(__name__)

BEAT_S = 1.0  # an idle worker shows this often that it lives


@dataclass(kw_only=True)
class WorkerOptions:
    """All that a worker is told."""

    memory: Memory
    pipes: list[WakePipe]  # of the workers, in order
    door_pipes: list[WakePipe]  # of the front doors, in order
    parent_pipe: WakePipe
    parent: int
    checkpoint: Path
    header: Header  # as the parent read it: what the front doors answer by
    engine: str
    precision: str
    compiled: bool
    cache_dir: Path
    max_batch_size: int
    batch_wait_s: float
    threads: int  # that the model may use
    log_format: str
    log_level: str


class Worker:
    """One inference worker: takes slots from its pipe, answers into the result rows.

    Each of the engine's lanes has a thread. They take turns at gathering: one waits for images, puts them into its lane, and
    leaves the turn to the next when it runs. So a batch is closed no sooner than the device has room for it, and nobody polls.
    """

    def __init__(self, options: WorkerOptions, index: int, engine: Engine) -> None:
        self.index, self.engine, self.memory = index, engine, options.memory
        self.pipe, self.door_pipes = options.pipes[index], options.door_pipes
        self.row = self.memory.workers[index]
        self.generation = int(self.row["generation"])
        self.max_batch_size, self.batch_wait_s = options.max_batch_size, options.batch_wait_s
        self.most = max(1, self.memory.layout.slots // self.memory.layout.workers)  # images that can come before one is answered
        self.logits, self.results = (rows[:, : self.memory.layout.classes] for rows in (self.memory.logits, self.memory.results))
        engine.pin(self.memory.pixels)
        for name in ("name", "precision", "why", "transfer"):
            self.row[{"name": "engine"}.get(name, name)] = getattr(engine, name).encode()[:400]
        self.row["largest_batch"] = engine.largest
        self.waiting: deque[int] = deque()
        self.stopping = False
        self.cold = True
        self.warming_due = False  # a batch has gone since the last size was warmed
        self.preparing, self.prepared = 0, False  # the size that is being prepared, and whether it is
        self.doubtful = False  # a batch has failed
        self.turn = threading.Lock()  # of gathering, and of all that stands above
        self.running = 0  # lanes that compute, or wait behind one that does
        self.books = threading.Lock()  # of `running` and of the counts in our row
        self.idle = threading.Condition(self.books)
        self.freed = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # a lane has done with the device
        self.poll = select.poll()
        self.poll.register(self.pipe.reader, select.POLLIN)
        self.poll.register(self.freed, select.POLLIN)

    def run(self) -> None:
        """Work until the parent says stop, with a thread for each lane."""
        helpers = [threading.Thread(target=self._work_or_end, args=(lane,), daemon=True) for lane in self.engine.lanes[1:]]
        for helper in helpers:
            helper.start()
        self._work_or_end(self.engine.lanes[0])
        for helper in helpers:
            helper.join()

    def _work_or_end(self, lane: Lane) -> None:
        try:
            self.engine.enter_thread()
            while self.step(lane):
                pass
        except BaseException:
            log.exception("worker %d ends", self.index)
            os._exit(1)  # of all its threads

    def step(self, lane: Lane) -> bool:
        """Gather one batch into a lane and classify it. False when there is nothing left to do and the parent said stop."""
        with self.turn:
            batch = self._gather(lane)
            if not batch:
                return False
            with self.books:
                alone = self.running == 0 and len(batch) == 1 and not self.waiting
                self.running += 1
        self._classify(lane, batch, alone)
        return True

    def _gather(self, lane: Lane) -> list[int]:
        """Slots whose pixels are in the lane, to be run now. None at all: stop."""
        batch: list[int] = []
        self._fetch(0)
        while True:
            if not batch and self.doubtful:
                self._must_still_work()
            if not batch and self.cold and not self.stopping and self._warm_a_size():
                self._fetch(0)
                continue
            self._fill(lane, batch)
            if not batch:
                if self.stopping:
                    return batch
                self._fetch(BEAT_S)
                continue
            room = self.running < self.engine.at_once
            # The wait is the first image's: it began when that was handed over, not now.
            rest = float(self.memory.waiting_since[batch[0]]) + max(self.batch_wait_s, self._worth(len(batch))) - time.monotonic()
            if len(batch) >= min(self.engine.largest, self.most) or (room and (rest <= 0 or self.stopping)):
                self.warming_due = self.cold
                return batch
            self._fetch(rest if room else BEAT_S)

    def _worth(self, count: int) -> float:
        """Seconds that are worth waiting for a full batch: while another lane computes, and images that are being decoded will fill it.

        The cores have enough to do until then. No longer than two such batches take, since decoding may be slower than it looks.
        """
        if not self.running:
            return 0.0
        decoding = int(np.count_nonzero(self.memory.state == FILLING)) // self.memory.layout.workers
        return 2 * self.engine.warm[self.engine.largest] if count + len(self.waiting) + decoding >= self.engine.largest else 0.0

    def _fetch(self, timeout: float) -> None:
        """Move numbers from the pipe to the queue, waiting up to `timeout` seconds for the first, or for the device to be free."""
        if timeout > 0:
            self.poll.poll(timeout * 1000)
            self._note_freed()
        memory = self.memory
        for number in self.pipe.receive():
            if number == STOP:
                self.stopping = True
            elif memory.state[number] == WAITING and memory.worker[number] == self.index and memory.generation[number] == self.generation:
                self.waiting.append(number)
        if not self.running:
            self.row["beat"] = time.monotonic()

    def _note_freed(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.freed)

    def _fill(self, lane: Lane, batch: list[int]) -> None:
        """Move images from the queue into the lane, as many as the engine wants in one batch; refuse those that nobody waits for."""
        memory = self.memory
        # Lanes that are idle too get their share, unless waiting for larger batches is what is wanted.
        free = 1 if self.batch_wait_s else max(1, self.engine.at_once - self.running)
        wanted = self.engine.take(min(len(batch) + len(self.waiting), self.max_batch_size), free) if self.waiting else 0
        while self.waiting and len(batch) < wanted:
            slot = self.waiting.popleft()
            if memory.deadline[slot] <= time.monotonic():
                self._answer([slot], FAILED, Failure.EXPIRED)
                continue
            memory.state[slot] = TAKEN
            lane.put(len(batch), memory.pixels[slot])
            batch.append(slot)

    def _warm_a_size(self) -> bool:
        """One step towards the next batch size: first what can be done beside forwards; then, while idle or between batches, the rest."""
        size = self.engine.cold_size
        if size and self.preparing != size:
            self.preparing, self.prepared = size, False
            threading.Thread(target=self._prepare, args=(size,), name="prepare", daemon=True).start()
        if (size and not self.prepared) or (self.waiting and not self.warming_due):
            return False
        self._wait_until_idle()
        self.cold, self.warming_due = self.engine.warm_next(), False
        self.row["largest_batch"] = self.engine.largest
        self.row["beat"] = time.monotonic()
        return True

    def _prepare(self, size: int) -> None:
        try:
            self.engine.prepare(size)
        except Exception:  # it will fail again where it is needed, and be dealt with there
            log.debug("preparing for batches of %d failed", size, exc_info=True)
        self.prepared = True
        os.eventfd_write(self.freed, 1)

    def _wait_until_idle(self) -> None:
        """Nobody else gathers meanwhile, so the lanes run empty one after the other."""
        with self.idle:
            self.idle.wait_for(lambda: self.running == 0)

    def _classify(self, lane: Lane, batch: list[int], alone: bool) -> None:
        self.memory.taken_at[batch] = time.monotonic()
        error: Exception | None = None
        try:
            # Out of the lane, before anybody may use that again.
            self.logits[batch], self.results[batch] = self._run(lane, len(batch), alone)
        except Exception as caught:
            error, self.doubtful = caught, True
        finally:
            with self.idle:
                self.running -= 1
                self.idle.notify_all()
            if len(self.engine.lanes) > 1:
                os.eventfd_write(self.freed, 1)
        if error is None:
            with self.books:
                self.row["batches"] += 1
                self.row["images"] += len(batch)
            self._answer(batch, DONE, Failure.NONE)
            self.row["beat"] = time.monotonic()
        else:
            log.error("a batch of %d failed", len(batch), exc_info=error)
            self._answer(batch, FAILED, Failure.INTERNAL)

    def _run(self, lane: Lane, count: int, alone: bool) -> Scores:
        """Run a lane's images; where they do not fit into the device's memory at once, in parts."""
        found: list[Scores] = []
        start = 0
        while start < count:
            size = min(count - start, self.engine.largest)
            try:
                part = lane.run(start, size, alone=alone)
            except Exception as error:
                if size == 1 or not self.engine.out_of_memory(error):
                    raise
                self._lower(size, error)
                continue
            if size == count:
                return part
            found.append(part.copy())
            start += size
        return joined(found)

    def _lower(self, size: int, error: Exception) -> None:
        with self.books:
            left = self.engine.lower(size)
            self.row["largest_batch"] = left
            self.row["splits"] += 1
        reason = " ".join(str(error).split())[:200]
        log.warning(
            "a batch of %d did not fit into the device's memory: it is split, and from now on none is over %d: %s", size, left, reason
        )

    def _answer(self, slots: list[int], state: int, failure: Failure) -> None:
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
        self._wait_until_idle()
        self.doubtful = False
        try:
            good, figures = self.engine.golden_check()
        except Exception as error:
            good, figures = False, str(error)
        if not good:
            log.error("worker %d no longer reproduces its golden samples: %s", self.index, figures)
            raise SystemExit(1)
