"""The engine for GPUs, and for models that OpenVINO can't take: torch.

On CUDA two lanes take turns: while the device computes for one, the other's pixels are copied, on a second stream and into a buffer
of its own, as they arrive; its forward can follow at once. Results come back by a copy that nobody waits for but the lane's own thread.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import threading
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import torch

from models import architectures
from models.checkpoint import Checkpoint, choose_precision
from service.engine import Engine, Lane, Pixels, Probabilities, Scores, batch_sizes

log = logging.getLogger(__name__)

_HEAVY_S = 0.5  # a batch that takes a CPU longer is not worth having: images wait long enough behind smaller ones


class TorchEngine(Engine):
    """A checkpoint in torch. `compiled` has torch.compile make a program for each batch size, which it keeps in `cache_dir`."""

    name = "torch"

    def __init__(
        self, checkpoint: Checkpoint, device: str, *, precision: str, max_batch_size: int, compiled: bool, cache_dir: Path, threads: int = 1
    ) -> None:
        super().__init__(checkpoint.golden, batch_sizes(max_batch_size))
        self.device = torch.device(device)
        self.on_cuda = self.device.type == "cuda"
        self.at_once = 1
        self._pinned = False
        self._compiled = compiled
        self._graphs: dict[int, _Graph] = {}
        self._takes_graphs = self.on_cuda
        self.launching = threading.Lock()  # lanes share a graph's input and output: one launches all of its forward before another
        if self.on_cuda:
            torch.cuda.set_device(self.device)
            torch.backends.cudnn.benchmark = True  # sizes are fixed: each is worth choosing the fastest kernels for
            self.compute, self.copying = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
            self.enter_thread()
        else:
            torch.set_num_threads(threads)
            architectures.keep_memory()
        if compiled:
            _keep_programs(cache_dir / "torch")
            torch._dynamo.config.recompile_limit = 64  # a program for each size is what we want
        self.transfer = "own pinned buffer" if self.on_cuda else "shared memory"
        self.lanes = [_TorchLane(self) for _ in range(2 if self.on_cuda else 1)]
        first = architectures.fastest_precision(self.device) if precision == "auto" else precision
        # A copy: a precision that misses must not leave its rounding in the weights of the next.
        self.precision, why = choose_precision(
            self.golden, f"torch on {device}", first, lambda name: self._classify_golden(copy.deepcopy(checkpoint.model), name)
        )
        self.why = f"torch{', compiled' if compiled else ''}: {why}"

    def _classify_golden(self, model: torch.nn.Module, precision: str) -> Probabilities:
        self.dtype = architectures.DTYPES[precision]
        with self.computing():  # weights must be there before a forward, which no other stream would wait for
            self.model = architectures.place(model, self.device, self.dtype)
        self._forward = torch.compile(self.model, dynamic=False) if self._compiled else self.model
        self._graphs.clear()
        self.graph_memory = torch.cuda.graph_pool_handle() if self.on_cuda else None
        self.warm = {1: 0.0}
        self._prepare(1)
        return self.classify(self.golden.pixels).probabilities

    def computing(self) -> AbstractContextManager[object]:
        """Makes the stream of forwards this thread's current one."""
        return torch.cuda.stream(self.compute) if self.on_cuda else nullcontext()

    def enter_thread(self) -> None:
        if self.on_cuda:  # both hold for one thread only
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(self.copying)

    def take(self, waiting: int, free: int) -> int:
        # A GPU pads a batch up to the next size, nearly for free; on a CPU a padded image costs as much as a real one.
        return min(waiting, self.largest) if self.on_cuda else max(size for size in self.warm if size <= waiting)

    def pin(self, slots: Pixels) -> None:
        if not self.on_cuda:
            return
        code = torch.cuda.cudart().cudaHostRegister(slots.ctypes.data, slots.nbytes, 0)
        if int(code) == 0:
            self._pinned, self.transfer = True, "pinned slots"
        else:
            log.warning("cudaHostRegister answered %s: copies go through a pinned buffer of this worker", code)
            with suppress(RuntimeError):  # the error stays until somebody has heard it, which must not be the first forward
                torch.zeros(1, device=self.device)

    def out_of_memory(self, error: Exception) -> bool:
        # torch's own error, and in words those of CUDA, of cuBLAS and cuDNN, and of torch on a CPU.
        said = re.search("out of memory|ALLOC_FAILED|not enough memory", str(error))
        return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or said is not None

    @torch.inference_mode()
    def _prepare(self, size: int) -> float | None:
        crop = self.header.preprocessing.crop
        with self.computing():
            pixels = torch.zeros((size, crop, crop, 3), dtype=torch.uint8, device=self.device)
            for _ in range(2):  # kernels are chosen, and compiled, before a graph is taken of them
                begun = time.monotonic()
                self.scores(pixels)
            if not self.on_cuda and size > 1 and time.monotonic() - begun > _HEAVY_S:
                return None
            if self._takes_graphs:
                self.compute.synchronize()
                try:
                    self._graphs[size] = _Graph(self, pixels)
                except RuntimeError as error:  # a model that asks the host while it computes
                    if self.out_of_memory(error):
                        raise
                    self._takes_graphs = False  # a failed recording leaves the graphs' memory unusable for others
                    log.warning("this model runs without CUDA graphs: %s", str(error).splitlines()[0])
        return 0.0

    def _drop(self, size: int) -> None:
        self._graphs.pop(size, None)

    def scores(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 `[N, crop, crop, 3]` on the device -> logits and probabilities, each float32 `[N, C]` on the device."""
        logits = self._forward(self.header.preprocessing.normalize(pixels, self.dtype)).float()
        return logits, (logits / self.header.temperature).softmax(1)

    def replay(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for one of the warm sizes, in one launch where there is a graph of it. The next call overwrites what it returns."""
        graph = self._graphs.get(len(pixels))
        return graph(pixels) if graph else self.scores(pixels)


def _keep_programs(folder: Path) -> None:
    """Have torch.compile keep what it makes, which takes minutes, in a folder that lasts."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("the model is compiled again at every start, for the cache folder can't be written (cache_dir): %s", error)
    else:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


class _Graph:
    """A forward of one size recorded once: replayed in a single launch, where a light model's own take longer than its work."""

    def __init__(self, engine: TorchEngine, pixels: torch.Tensor) -> None:
        self._pixels, self._graph = pixels, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=engine.graph_memory, stream=engine.compute, capture_error_mode="thread_local"):
            self._scores = engine.scores(pixels)

    def __call__(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._pixels.copy_(pixels)
        self._graph.replay()
        return self._scores


class _TorchLane(Lane):
    def __init__(self, engine: TorchEngine) -> None:
        crop, room = engine.header.preprocessing.crop, engine.room
        self.engine = engine
        self._host = torch.zeros((room, crop, crop, 3), dtype=torch.uint8, pin_memory=engine.on_cuda)
        self._pixels: Pixels = self._host.numpy()
        self._device = torch.zeros_like(self._host, device=engine.device) if engine.on_cuda else self._host
        self._places = list(self._device)
        if engine.on_cuda:
            self._found = torch.empty((2, room, len(engine.header.labels)), pin_memory=True)  # logits, probabilities
            self._copied, self._done = torch.cuda.Event(), torch.cuda.Event(blocking=True)  # blocking: its waiter sleeps
            torch.cuda.synchronize(engine.device)  # the zeros are there before another stream writes over them

    def put(self, place: int, pixels: Pixels) -> None:
        engine = self.engine
        if not engine.on_cuda:
            self._pixels[place] = pixels
            return
        source = torch.from_numpy(pixels)
        if not engine._pinned:
            source = self._host[place].copy_(source)
        self._places[place].copy_(source, non_blocking=True)  # on this thread's own stream, that of copies

    @torch.inference_mode()
    def run(self, first: int, count: int, *, alone: bool = False) -> Scores:
        engine = self.engine
        pixels = self._device[first : first + engine.padded(count)]
        if not engine.on_cuda:
            return Scores(*(found[:count].numpy() for found in engine.scores(pixels)))
        with engine.launching, engine.computing():
            self._copied.record(engine.copying)
            engine.compute.wait_event(self._copied)
            for host, found in zip(self._found, engine.replay(pixels), strict=True):
                host[:count].copy_(found[:count], non_blocking=True)
            self._done.record(engine.compute)
        self._done.synchronize()
        return Scores(*(host[:count].numpy() for host in self._found))
