"""Engine: a checkpoint on one device. What differs between OpenVINO and torch, a CPU and a GPU, hides behind this.

An engine has lanes, each a place for one batch on its way. A worker's thread puts pixels into a lane, image by image, then runs it
and blocks until its scores are there. How many lanes the device computes at once, and which batches it likes, the engine says.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from models.checkpoint import BOUNDS, Golden, fidelity

log = logging.getLogger(__name__)

Pixels = npt.NDArray[np.uint8]
Logits = npt.NDArray[np.float32]
Probabilities = npt.NDArray[np.float32]


class Scores(NamedTuple):
    """What comes out for N images, each float32 `[N, C]`."""

    logits: Logits  # as the model gives them, before the temperature
    probabilities: Probabilities

    def copy(self) -> Scores:
        """The same in memory of its own."""
        return Scores(self.logits.copy(), self.probabilities.copy())


def joined(parts: Sequence[Scores]) -> Scores:
    """The scores of all parts in one, in order."""
    return Scores(np.concatenate([part.logits for part in parts]), np.concatenate([part.probabilities for part in parts]))


def batch_sizes(largest: int, factor: int = 2) -> tuple[int, ...]:
    """1, 2, 4, 8, ... up to `largest`, itself included: the only sizes that an engine ever computes. Or by another factor."""
    sizes = {largest}
    size = 1
    while size < largest:
        sizes.add(size)
        size *= factor
    return tuple(sorted(sizes))


class Lane(ABC):
    """A place for one batch. Used by one thread at a time."""

    @abstractmethod
    def put(self, place: int, pixels: Pixels) -> None:
        """Take uint8 `[crop, crop, 3]` as image number `place`; on a GPU the copy has only begun, so `pixels` must stay."""

    @abstractmethod
    def run(self, first: int, count: int, *, alone: bool = False) -> Scores:
        """Classify the images `first` to `first + count`. The scores are good until this lane's next run.

        Padded up to a warm size, of which there must be one. `alone`: no other lane runs now, nor is any likely to soon.
        """


class Engine(ABC):
    """A checkpoint on one device, in the fastest precision that reproduces its golden samples. Raises FidelityError where none does."""

    name: str
    precision: str
    why: str  # this engine and this precision
    transfer: str  # how pixels reach the device
    lanes: Sequence[Lane]
    at_once: int  # lanes that the device computes at the same time; the others wait with their pixels already there

    def __init__(self, golden: Golden, sizes: Sequence[int]) -> None:
        self.golden, self.header = golden, golden.header
        self.sizes = list(sizes)  # from 1 up
        self.warm: dict[int, float] = {1: 0.0}  # size -> what a batch of it costs; zero where that doesn't matter

    @property
    def room(self) -> int:
        """Images that a lane needs room for: of a batch that is run in parts, each padded up, the last may reach beyond the largest."""
        return 2 * self.sizes[-1]

    @property
    def largest(self) -> int:
        """The largest batch that runs now."""
        return max(self.warm)

    def padded(self, count: int) -> int:
        """The warm size that a batch of `count` is run as; itself when another lane has just given up those that are large enough."""
        return min((size for size in self.warm if size >= count), default=count)

    @property
    def cold_size(self) -> int | None:
        """The batch size to be warmed next."""
        return next((size for size in self.sizes if size not in self.warm), None)

    def prepare(self, size: int) -> None:  # noqa: B027  # most have nothing to do here
        """What of warming a size can be done while lanes run, in a thread of its own."""

    def enter_thread(self) -> None:  # noqa: B027  # likewise
        """Called first by each thread that will use a lane."""

    def _all_warm(self) -> None:  # noqa: B027  # likewise
        """Let go of what only warming needs."""

    def _drop(self, size: int) -> None:  # noqa: B027  # likewise
        """Let go of what was made for a batch size that is given up."""

    @abstractmethod
    def take(self, waiting: int, free: int) -> int:
        """How many of `waiting` images (at least one) the next lane should take, when `free` lanes (with it) would compute at once."""

    @abstractmethod
    def pin(self, slots: Pixels) -> None:
        """Let the device copy straight from `slots`, uint8 `[S, crop, crop, 3]`, which rows of `put` will be from."""

    @abstractmethod
    def _prepare(self, size: int) -> float | None:
        """Get ready for a batch size, with all lanes idle. Returns what a batch costs, or None when the size is not worth having."""

    @abstractmethod
    def out_of_memory(self, error: Exception) -> bool:
        """Whether `error` says that a batch was too large for the device."""

    def warm_next(self) -> bool:
        """Warm the next cold size, with all lanes idle. False when it was the last, or not worth having."""
        size = self.cold_size
        if size is None:
            self._all_warm()
            return False
        self.warm[size] = 0.0  # lanes are idle, so nobody takes it for warm yet
        try:
            cost = self._prepare(size)
            good = cost is not None and self._reproduces(size)
        except Exception as error:  # smaller ones are being served: a device that is broken will show it there
            fits = "can't be computed" if not self.out_of_memory(error) else "do not fit into the memory of this device"
            log.warning("batches of %d %s: %s", size, fits, " ".join(str(error).split())[:200])
            good = False
        if good and cost is not None:
            self.warm[size] = cost
            return True
        del self.warm[size]
        self._drop(size)
        self.sizes = [other for other in self.sizes if other < size]
        self._all_warm()
        return False

    def lower(self, count: int) -> int:
        """After a batch of `count` ran out of memory: give up its size and larger ones. Returns the largest size that is left."""
        size = self.padded(count)
        self.sizes = [other for other in self.sizes if other < size] or [1]
        for other in [other for other in self.warm if other >= max(size, 2)]:
            self._drop(other)
        self.warm = {other: cost for other, cost in self.warm.items() if other < size} or {1: 0.0}
        return self.largest

    def classify(self, pixels: Pixels) -> Scores:
        """The scores of uint8 `[N, crop, crop, 3]`, through all lanes in turn; none may be in use."""
        found: list[Scores] = []
        start = 0
        while start < len(pixels):
            lane = self.lanes[len(found) % len(self.lanes)]
            count = min(self.largest, len(pixels) - start)
            for place in range(count):
                lane.put(place, pixels[start + place])
            # Either way that a batch of one may go.
            found.append(lane.run(0, count, alone=len(found) % 2 == 0).copy())
            start += count
        return joined(found)

    def golden_check(self) -> tuple[bool, str]:
        """Run the golden samples through this very engine. Returns whether they are within bounds, and the figures in words."""
        return fidelity(self.classify(self.golden.pixels).probabilities, self.golden.probabilities, BOUNDS[self.precision])

    def _reproduces(self, size: int) -> bool:
        """Whether a batch of this size, which may compute in its own way, gives the golden samples' probabilities."""
        rows = np.arange(size) % len(self.golden.pixels)
        self.fill(self.lanes[0], size)
        good, figures = fidelity(self.lanes[0].run(0, size).probabilities, self.golden.probabilities[rows], BOUNDS[self.precision])
        if not good:
            log.warning("batches of %d are not used, they miss the golden samples: %s", size, figures)
        return good

    def fill(self, lane: Lane, size: int) -> None:
        """Put golden samples into a lane, over and over."""
        for place in range(size):
            lane.put(place, self.golden.pixels[place % len(self.golden.pixels)])
