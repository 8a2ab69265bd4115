"""The engine for CPUs: OpenVINO, on a model that was converted from the checkpoint. Imports no torch."""

from __future__ import annotations

import logging
import re
import tempfile
import time
from functools import cache
from pathlib import Path

import numpy as np

from models.checkpoint import choose_precision, read_golden
from service import conversion
from service.engine import Engine, Lane, Pixels, Probabilities

conversion.refuse_telemetry()
import openvino  # noqa: E402

log = logging.getLogger(__name__)

MOST_LANES = 16  # one Python process feeds no more than that well; more cores make each lane wider
_MOST_TOGETHER = 16  # threads for an image alone: its layers are too small for more
_AROUND_S = 0.0004  # what each batch costs the worker and OpenVINO besides its forward
# A larger batch is worth its latency and memory where an image in it costs at most this share of one in the next smaller.
_GAIN = 0.97
_MEASURE_S = 0.1  # for finding that out, while requests may be waiting
_HINTS = {"fp16": "f16", "bf16": "bf16", "fp32": "f32"}


class OpenVinoEngine(Engine):
    """As many lanes as cores, of one thread each: no team of threads ever waits for its slowest. An image alone gets all cores.

    Raises ConversionError where OpenVINO can't take the model.
    """

    name = "openvino"

    def __init__(self, checkpoint: Path, *, precision: str, max_batch_size: int, threads: int, cache_dir: Path) -> None:
        super().__init__(read_golden(checkpoint), max_batch_size)
        self.threads, self.transfer = threads, "shared memory"
        self.at_once = min(threads, MOST_LANES)
        self._model = _read_model(checkpoint, cache_dir)
        first = precision if precision != "auto" else "bf16" if _computes("bf16") else "fp32"
        self.precision, self.why = choose_precision(self.golden, "OpenVINO on the CPU", first, self._classify_golden)
        self.why = f"OpenVINO, {self.at_once} x {threads // self.at_once} threads: {self.why}"
        del self._model

    def _classify_golden(self, precision: str) -> Probabilities:
        if precision != "fp32" and not _computes(precision):
            raise RuntimeError("this CPU has no instructions for it")
        self._many = many = _compile(self._model, precision, threads=self.threads // self.at_once * self.at_once, streams=self.at_once)
        together = _compile(self._model, precision, threads=min(self.threads, _MOST_TOGETHER), streams=1) if self.threads > 1 else many
        self._together = together.create_infer_request()
        self.lanes = self._lanes = [_OpenVinoLane(self, many.create_infer_request()) for _ in range(self.at_once)]
        self.warm = {1: 0.0}
        self._run_all(1)
        return self.classify(self.golden.pixels)

    def take(self, waiting: int, free: int) -> int:
        # Lanes that would stay idle take their share. Then whatever is cheapest: a padded image costs as much as a real one.
        share = -(-waiting // free)
        return min(self._plan(share), waiting)

    def _plan(self, count: int) -> int:
        """The first size of the cheapest way to compute `count` images."""
        costs: list[tuple[float, int]] = [(0.0, 0)]
        for images in range(1, count + 1):
            costs.append(min((cost + costs[max(0, images - size)][0], -size) for size, cost in self.warm.items()))
        return -costs[count][1]

    def pin(self, slots: Pixels) -> None:
        pass

    def out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, MemoryError) or re.search("bad.alloc|to allocate|t allocate", str(error)) is not None

    def _run_all(self, size: int) -> None:
        """A batch of `size` in every lane at the same time, so that each of OpenVINO's streams has seen the shape."""
        for lane in self._lanes:
            self.fill(lane, size)
            lane.start(size)
        for lane in self._lanes:
            lane.request.wait()

    def _prepare(self, size: int) -> float | None:
        self._run_all(size)
        smaller = max(other for other in self.warm if other < size)
        costs = self._costs(smaller, size)
        self.warm[smaller] = costs[smaller]
        each = {other: 1e3 * cost / other for other, cost in costs.items()}
        log.debug("an image in a batch of %d takes %.2f ms of one core, in one of %d %.2f", size, each[size], smaller, each[smaller])
        if each[size] <= _GAIN * each[smaller]:
            return costs[size]
        self._many.release_memory()  # the most that a batch ever took, which from now on is less
        return None

    def _costs(self, *sizes: int) -> dict[int, float]:
        """Size -> seconds of CPU time of a batch in one lane; on a busy machine they stay alike, since the sizes take turns."""
        costs = dict.fromkeys(sizes, float("inf"))
        end = time.monotonic() + _MEASURE_S
        for turn in range(5):
            for size in sizes:
                begun = time.process_time()
                self._lanes[0].run(0, size)
                costs[size] = min(costs[size], time.process_time() - begun + _AROUND_S)
            if turn and time.monotonic() > end:
                break
        return costs


class _OpenVinoLane(Lane):
    def __init__(self, engine: OpenVinoEngine, request: openvino.InferRequest) -> None:
        crop = engine.header.preprocessing.crop
        self.engine, self.request = engine, request
        self._pixels: Pixels = np.empty((engine.room, crop, crop, 3), np.uint8)
        self._tensors: dict[tuple[int, int], openvino.Tensor] = {}

    def put(self, place: int, pixels: Pixels) -> None:
        self._pixels[place] = pixels

    def _tensor(self, first: int, size: int) -> openvino.Tensor:
        if (first, size) not in self._tensors:
            self._tensors[first, size] = openvino.Tensor(self._pixels[first : first + size], shared_memory=True)
        return self._tensors[first, size]

    def start(self, size: int) -> None:
        self.request.set_input_tensor(self._tensor(0, size))
        self.request.start_async()

    def run(self, first: int, count: int, *, alone: bool = False) -> Probabilities:
        request = self.engine._together if alone and count == 1 else self.request
        request.set_input_tensor(self._tensor(first, self.engine.padded(count)))
        request.start_async()  # infer() would copy the results
        request.wait()
        found: Probabilities = request.get_output_tensor().data[:count]
        return found


@cache
def _core() -> openvino.Core:
    """One for the whole life of the process: with the last goes the stack on which signals are handled, while a thread still uses it."""
    return openvino.Core()


def _read_model(checkpoint: Path, cache_dir: Path) -> openvino.Model:
    """The converted model, out of the cache folder where that can be had. Raises ConversionError."""
    core = _core()
    try:
        file = conversion.ensure(checkpoint, cache_dir)
        try:
            return core.read_model(file)
        except RuntimeError as error:
            log.warning("%s can't be read and is made anew: %s", file, " ".join(str(error).split()))
            return core.read_model(conversion.ensure(checkpoint, cache_dir, afresh=True))
    except OSError as error:
        log.warning("the model is converted again at every start, for the cache folder can't be written (cache_dir): %s", error)
        with tempfile.TemporaryDirectory() as folder:
            return core.read_model(conversion.ensure(checkpoint, Path(folder)))


def _compile(model: openvino.Model, precision: str, *, threads: int, streams: int) -> openvino.CompiledModel:
    options = {"INFERENCE_PRECISION_HINT": _HINTS[precision], "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": streams}
    # Not pinned to cores: decoding, and other processes, want them too.
    return _core().compile_model(model, "CPU", options | {"ENABLE_CPU_PINNING": False})


def _computes(precision: str) -> bool:
    """Whether this CPU has instructions for a precision."""
    capabilities = _core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return {"fp16": "FP16", "bf16": "BF16", "fp32": "FP32"}[precision] in capabilities
