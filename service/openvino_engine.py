"""The engine for CPUs: OpenVINO, on a model that was converted from the checkpoint. Imports no torch."""

from __future__ import annotations

import ctypes
import logging
import re
import tempfile
import time
from functools import cache
from pathlib import Path

import numpy as np

from models.checkpoint import FidelityError, choose_precision, read_golden
from service import conversion
from service.engine import Engine, Lane, Pixels, Probabilities, Scores, batch_sizes
from service.machine import share_heap

conversion.refuse_telemetry()
import openvino  # noqa: E402  # not before telemetry is refused

log = logging.getLogger(__name__)


MOST_LANES = 16  # one Python process feeds no more than that well; more cores make each lane wider
_MOST_TOGETHER = 16  # threads for an image alone: its layers are too small for more
_AROUND_S = 0.0004  # what each batch costs the worker and OpenVINO besides its forward
# A larger batch is worth its latency and memory where an image in it costs at most this share of one in the next smaller.
_GAIN = 0.98
_MEASURE_S = 0.1  # for finding that out, while requests may be waiting
_LONG_S = 0.3  # a batch that would take longer is not tried: that alone would hold up requests, and hardly ever gains anything
_HINTS = {"fp16": "f16", "bf16": "bf16", "fp32": "f32"}


class OpenVinoEngine(Engine):
    """As many lanes as cores, of one thread each: no team of threads ever waits for its slowest. An image alone gets all cores.

    The model is compiled for each batch size, which takes a fraction of a second: one compiled for any size is a tenth slower.

    Raises ConversionError where OpenVINO can't take the model.
    """

    name = "openvino"

    def __init__(self, checkpoint: Path, *, precision: str, max_batch_size: int, threads: int, cache_dir: Path) -> None:
        # Few sizes, since each has its own copy of the weights.
        super().__init__(read_golden(checkpoint), batch_sizes(max_batch_size, factor=4))
        self.threads, self.transfer = threads, "shared memory"
        self.at_once = min(threads, MOST_LANES)
        self._ready: dict[int, openvino.CompiledModel] = {}  # compiled, and not in any lane yet
        share_heap()  # of threads by the dozen
        self._model: openvino.Model | None = _read_model(checkpoint, cache_dir)
        first = precision if precision != "auto" else "bf16" if _computes("bf16") else "fp32"
        try:
            self.precision, self.why = choose_precision(self.golden, "OpenVINO on the CPU", first, self._classify_golden)
        except FidelityError as error:  # of the model, or of what became of its file
            log.warning("the model is converted anew: %s", error)
            self._model = _read_model(checkpoint, cache_dir, afresh=True)
            self.precision, self.why = choose_precision(self.golden, "OpenVINO on the CPU", first, self._classify_golden)
        self.sizes = [size for size in self.sizes if size == 1 or size * self.warm[1] <= _LONG_S]
        lanes = (
            f"{self.at_once} lane{'s' if self.at_once > 1 else ''} of {(wide := threads // self.at_once)} thread{'s' if wide > 1 else ''}"
        )
        self.why = f"OpenVINO, {lanes}: {self.why}"

    def _classify_golden(self, precision: str) -> Probabilities:
        if precision != "fp32" and not _computes(precision):
            raise RuntimeError("this CPU has no instructions for it")
        self._together = self._compile(1, precision, streams=1, threads=min(self.threads, _MOST_TOGETHER)).create_infer_request()
        self.lanes = self._lanes = [_OpenVinoLane(self) for _ in range(self.at_once)]
        self._add(1, precision)
        self.warm = self._costs(1)
        return self.classify(self.golden.pixels).probabilities

    def _compile(self, size: int, precision: str, *, streams: int, threads: int) -> openvino.CompiledModel:
        assert self._model is not None
        model = self._model.clone()
        model.reshape([size, *model.input(0).partial_shape[1:]])
        options = {"INFERENCE_PRECISION_HINT": _HINTS[precision], "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": streams}
        # Not pinned to cores: decoding, and other processes, want them too.
        return _core().compile_model(model, "CPU", options | {"ENABLE_CPU_PINNING": False})

    def prepare(self, size: int) -> None:
        self._ready = {size: self._compile_lanes(size, self.precision)}

    def _compile_lanes(self, size: int, precision: str) -> openvino.CompiledModel:
        return self._compile(size, precision, streams=self.at_once, threads=self.threads // self.at_once * self.at_once)

    def _add(self, size: int, precision: str) -> None:
        """Give every lane a batch size, and run it once in all at the same time: the first run takes longer."""
        many = self._ready.pop(size, None) or self._compile_lanes(size, precision)
        for lane in self._lanes:
            lane.requests[size] = many.create_infer_request()
            self.fill(lane, size)
            lane.start(size)
        for lane in self._lanes:
            lane.requests[size].wait()

    def take(self, waiting: int, free: int) -> int:
        # Lanes that would stay idle take their share. Then whatever is cheapest: a padded image costs as much as a real one.
        share = -(-waiting // free)
        return self.largest if share >= self.largest else min(self._plan(share), waiting)

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

    def _prepare(self, size: int) -> float | None:
        self._add(size, self.precision)
        smaller = max(other for other in self.warm if other < size)
        costs = self._costs(smaller, size)
        self.warm[smaller] = costs[smaller]
        each = {other: 1e3 * cost / other for other, cost in costs.items()}
        log.debug("an image in a batch of %d takes %.2f ms of one core, in one of %d %.2f", size, each[size], smaller, each[smaller])
        if each[size] <= _GAIN * each[smaller]:
            return costs[size]
        return None

    def _drop(self, size: int) -> None:
        for lane in self._lanes:
            lane.requests.pop(size, None)

    def _all_warm(self) -> None:
        self._model = None
        ctypes.CDLL(None).malloc_trim(0)  # what sizes took that are not used goes back to the system

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
    def __init__(self, engine: OpenVinoEngine) -> None:
        crop = engine.header.preprocessing.crop
        self.engine = engine
        self.requests: dict[int, openvino.InferRequest] = {}  # by batch size
        self._pixels: Pixels = np.empty((engine.room, crop, crop, 3), np.uint8)
        self._tensors: dict[tuple[int, int], openvino.Tensor] = {}

    def put(self, place: int, pixels: Pixels) -> None:
        self._pixels[place] = pixels

    def _tensor(self, first: int, size: int) -> openvino.Tensor:
        if (first, size) not in self._tensors:
            self._tensors[first, size] = openvino.Tensor(self._pixels[first : first + size], shared_memory=True)
        return self._tensors[first, size]

    def start(self, size: int) -> None:
        self.requests[size].set_input_tensor(self._tensor(0, size))
        self.requests[size].start_async()

    def run(self, first: int, count: int, *, alone: bool = False) -> Scores:
        size = min((size for size in list(self.requests) if size >= count), default=0)
        request = self.engine._together if alone and size == 1 else self.requests.get(size)
        if request is None:
            raise MemoryError(f"another lane has just given up batches of {count}")
        request.set_input_tensor(self._tensor(first, size))
        request.start_async()  # infer() would copy the results
        request.wait()
        return Scores(request.get_output_tensor(0).data[:count], request.get_output_tensor(1).data[:count])


@cache
def _core() -> openvino.Core:
    """One for the whole life of the process: with the last goes the stack on which signals are handled, while a thread still uses it."""
    return openvino.Core()


def _read_model(checkpoint: Path, cache_dir: Path, *, afresh: bool = False) -> openvino.Model:
    """The converted model, out of the cache folder where that can be had. Raises ConversionError."""
    try:
        file = conversion.ensure(checkpoint, cache_dir)
        broken = file.stat().st_ino
        try:
            if not afresh:
                return _core().read_model(file)
        except RuntimeError as error:
            log.warning("%s can't be read and is made anew: %s", file, " ".join(str(error).split()))
        return _core().read_model(conversion.ensure(checkpoint, cache_dir, broken=broken))
    except (OSError, RuntimeError) as error:
        if isinstance(error, conversion.ConversionError):
            raise
        log.warning("the model is converted again at every start, for the cache folder can't be used (cache_dir): %s", error)
        with tempfile.TemporaryDirectory() as folder:
            return _core().read_model(conversion.ensure(checkpoint, Path(folder)))


def _computes(precision: str) -> bool:
    """Whether this CPU has instructions for a precision."""
    capabilities = _core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return {"fp16": "FP16", "bf16": "BF16", "fp32": "FP32"}[precision] in capabilities
