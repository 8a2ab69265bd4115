"""Engine: a checkpoint on one device. Precision, transfer, forward, and the golden check that judges all three."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from models import architectures
from models.checkpoint import Checkpoint

log = logging.getLogger(__name__)

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_FALLBACK = {"fp16": "bf16", "bf16": "fp32"}


class EngineError(RuntimeError):
    """A checkpoint that this device must not serve. The message says what was measured."""


@dataclass(frozen=True)
class Bounds:
    """How far the probabilities of the golden samples may lie from those at export."""

    top_mean: float  # difference of the top label's probability, on average over the samples
    any_max: float  # difference of any probability of any sample


# Measured, efficientnet_lite0 in torch on a CPU with AVX512-BF16, as top_mean / any_max:
#                                            fp16             bf16             fp32
#   its 16 golden samples               0.0011 / 0.0035  0.0161 / 0.0686  0.0000 / 0.0000
#   59 photographs, one per class       0.0012 / 0.0068  0.0100 / 0.0498  0.0000 / 0.0000
#   396 photographs of two classes      0.0013 / 0.0096  0.0095 / 0.0715  0.0000 / 0.0000
#   the same golden samples with the weights of any one of its 99 layers negated, at least: 0.0647 / 0.2266 in bf16
# Other architectures have not been measured yet, for want of public weights without a network.
BOUNDS = {"fp16": Bounds(0.005, 0.04), "bf16": Bounds(0.03, 0.15), "fp32": Bounds(0.0005, 0.002)}


def fidelity(found: torch.Tensor, reference: torch.Tensor, bounds: Bounds) -> tuple[bool, str]:
    """Judge probabilities `[N, C]` against those at export. Returns whether they are within bounds, and the figures in words."""
    if not found.isfinite().all():
        return False, "not all probabilities are finite"
    best = reference.topk(2).values
    clear = (best[:, 0] - best[:, 1]) >= bounds.any_max  # closer than that, either of the two may win
    flips = int((clear & (found.argmax(1) != reference.argmax(1))).sum())
    top = reference.argmax(1, keepdim=True)
    top_mean = float((found.gather(1, top) - reference.gather(1, top)).abs().mean())
    any_max = float((found - reference).abs().max())
    good = flips == 0 and top_mean <= bounds.top_mean and any_max <= bounds.any_max
    figures = f"{flips} of {len(found)} labels differ, top probability off by {top_mean:.4f} on average (allowed {bounds.top_mean})"
    return good, f"{figures}, any by {any_max:.4f} at most (allowed {bounds.any_max})"


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware; without, bf16 is slower than float32."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    return not flags.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def batch_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 4, 8, ... up to `largest`, itself included: the only sizes that an engine ever computes."""
    return tuple(sorted({1 << power for power in range(largest.bit_length()) if 1 << power <= largest} | {largest}))


class Engine:
    """A checkpoint on one device, in the fastest precision that reproduces its golden samples.

    `precision`: auto, fp16, bf16 or fp32; a half precision that misses falls back (fp16 -> bf16 -> fp32) and `why` says so.
    Raises EngineError where float32 misses as well.
    """

    def __init__(self, checkpoint: Checkpoint, device: str, *, precision: str = "auto", max_batch_size: int = 32) -> None:
        self.header = checkpoint.header
        self.device = torch.device(device)
        self.on_cuda = self.device.type == "cuda"
        if self.on_cuda:
            torch.cuda.set_device(self.device)
        self.sizes = batch_sizes(max_batch_size)
        self._golden_pixels = checkpoint.golden_pixels.clone()  # out of the mapped file, which somebody may cut short
        self._golden = (checkpoint.golden_logits / self.header.temperature).softmax(1)
        self._staging: torch.Tensor | None = None
        self.transfer = "shared memory"
        if self.on_cuda:
            crop = self.header.preprocessing.crop
            self._on_device = torch.empty((max_batch_size, crop, crop, 3), dtype=torch.uint8, device=self.device)
            self._staging = torch.empty((max_batch_size, crop, crop, 3), dtype=torch.uint8, pin_memory=True)
            self.transfer = "own pinned buffer"
        self.precision, self.why = self._choose(checkpoint, precision)

    def _choose(self, checkpoint: Checkpoint, asked: str) -> tuple[str, str]:
        precision, missed = asked, ""
        if asked == "auto":
            precision = "fp16" if self.on_cuda else "bf16" if cpu_has_bf16() else "fp32"
        while True:
            # A copy: a precision that misses must not leave its rounding in the weights of the next.
            self._model = architectures.place(copy.deepcopy(checkpoint.model), self.device, DTYPES[precision])
            self._dtype = DTYPES[precision]
            self.warm = {1}
            try:
                good, figures = self.golden_check(precision)
            except RuntimeError as error:  # an operator that this device lacks in this precision
                if precision == "fp32":
                    raise
                good, figures = False, str(error).splitlines()[0]
            if good:
                return precision, f"{missed}{precision} reproduces the golden samples: {figures}"
            if precision == "fp32":
                raise EngineError(f"float32 does not reproduce the golden samples of {self.header.name} on {self.device}: {figures}")
            log.warning("%s misses the golden samples on %s, falling back to %s: %s", precision, self.device, _FALLBACK[precision], figures)
            missed += f"{precision} missed ({figures}); "
            precision = _FALLBACK[precision]

    def golden_check(self, precision: str | None = None) -> tuple[bool, str]:
        """Run the golden samples through this very engine. Returns whether they are within bounds, and the figures in words."""
        return fidelity(self.predict(self._golden_pixels), self._golden, BOUNDS[precision or self.precision])

    def pin(self, slots: torch.Tensor) -> None:
        """Let a GPU copy straight from `slots`, uint8 `[S, crop, crop, 3]` in shared memory, which `predict` will be given."""
        if not self.on_cuda:
            return
        code = torch.cuda.cudart().cudaHostRegister(slots.data_ptr(), slots.numel(), 0)
        if int(code) == 0:
            self._staging, self.transfer = None, "pinned slots"
        else:
            log.warning("cudaHostRegister answered %s: copies go through a pinned buffer of this worker", code)

    def take(self, waiting: int) -> int:
        """How many of `waiting` images (at least one) the next forward should take, counting only sizes that are warm.

        A GPU pads a batch up to the next size, nearly for free; on a CPU a padded image costs as much as a real one, so
        what does not fit goes next.
        """
        if self.on_cuda:
            return min(waiting, max(self.warm))
        return max(size for size in self.warm if size <= waiting)

    def warm_next(self) -> bool:
        """Warm the next cold size, which takes a fraction of a second. False when all are warm."""
        cold = [size for size in self.sizes if size not in self.warm]
        if not cold:
            return False
        repeated = self._golden_pixels[torch.arange(cold[0]) % len(self._golden_pixels)]
        self._forward(repeated.to(self.device))
        self.warm.add(cold[0])
        return True

    def predict(self, pixels: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Classify `pixels[rows]` (all, without `rows`): uint8 `[S, crop, crop, 3]` on the host -> float32 `[N, C]` probabilities."""
        rows = range(len(pixels)) if rows is None else rows
        chunks, start = [], 0
        while start < len(rows):
            count = self.take(len(rows) - start)
            chunks.append(self._forward(self._transfer(pixels, rows[start : start + count]))[:count].cpu())
            start += count
        return torch.cat(chunks)

    def _transfer(self, pixels: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """`pixels[rows]` on the device, padded to a warm size where the device is a GPU."""
        if not self.on_cuda:
            return pixels[list(rows)]
        size = min(size for size in self.warm if size >= len(rows))
        for place, row in enumerate(rows):
            source = pixels[row]
            if self._staging is not None:
                source = self._staging[place].copy_(source)
            self._on_device[place].copy_(source, non_blocking=True)
        return self._on_device[:size]

    @torch.inference_mode()
    def _forward(self, pixels: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model(self.header.preprocessing.normalize(pixels, self._dtype))
        return (logits.float() / self.header.temperature).softmax(1)
