"""Engine: a checkpoint on one device. Precision, transfer, forward, and the golden check that judges all three."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from functools import partial

import torch

from models import architectures
from models.checkpoint import BOUNDS, Checkpoint, choose_precision, fidelity

log = logging.getLogger(__name__)


def batch_sizes(largest: int) -> tuple[int, ...]:
    """1, 2, 4, 8, ... up to `largest`, itself included: the only sizes that an engine ever computes."""
    return tuple(sorted({1 << power for power in range(largest.bit_length()) if 1 << power <= largest} | {largest}))


class Engine:
    """A checkpoint on one device, in the fastest precision that reproduces its golden samples.

    `precision`: auto, fp16, bf16 or fp32; a half precision that misses falls back (fp16 -> bf16 -> fp32) and `why` says so.
    Raises FidelityError where float32 misses as well.
    """

    def __init__(self, checkpoint: Checkpoint, device: str, *, precision: str = "auto", max_batch_size: int = 32) -> None:
        self.header = checkpoint.header
        self.device = torch.device(device)
        self.on_cuda = self.device.type == "cuda"
        if self.on_cuda:
            torch.cuda.set_device(self.device)
        self.sizes = batch_sizes(max_batch_size)
        self._golden_pixels = checkpoint.golden_pixels.clone()  # out of the mapped file, which somebody may cut short
        self._golden = checkpoint.golden_probabilities
        self._staging: torch.Tensor | None = None
        self.transfer = "shared memory"
        if self.on_cuda:
            crop = self.header.preprocessing.crop
            self._on_device = torch.empty((max_batch_size, crop, crop, 3), dtype=torch.uint8, device=self.device)
            self._staging = torch.empty((max_batch_size, crop, crop, 3), dtype=torch.uint8, pin_memory=True)
            self.transfer = "own pinned buffer"
        first = architectures.fastest_precision(self.device) if precision == "auto" else precision
        self.precision, self.why = choose_precision(checkpoint, self.device, first, partial(self._classify_golden, checkpoint.model))

    def _classify_golden(self, model: torch.nn.Module, precision: str) -> torch.Tensor:
        # A copy: a precision that misses must not leave its rounding in the weights of the next.
        self._dtype = architectures.DTYPES[precision]
        self._model = architectures.place(copy.deepcopy(model), self.device, self._dtype)
        self.warm = {1}
        return self.predict(self._golden_pixels)

    def golden_check(self) -> tuple[bool, str]:
        """Run the golden samples through this very engine. Returns whether they are within bounds, and the figures in words."""
        return fidelity(self.predict(self._golden_pixels), self._golden, BOUNDS[self.precision])

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
