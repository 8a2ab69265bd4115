"""Augmentation: pictures of the pixel cache -> pixels, varied at random, in batches on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How pictures are varied, each one differently."""

    least_area: float = 0.35  # of a picture that a crop shows, at least
    widest: float = 4 / 3  # a crop's sides may differ by this factor
    light: float = 0.2  # brightness and contrast change by this share at most

    def __call__(self, pictures: torch.Tensor, aspects: torch.Tensor, crop: int, generator: torch.Generator) -> torch.Tensor:
        """Random resized crops, half of them mirrored, a little brighter or darker, with more or less contrast.

        `pictures` uint8 `[N, side, side, 3]` with their `aspects` `[N]` -> pixels, uint8 `[N, crop, crop, 3]`, on the same device.
        `generator` is the CPU's. The crops are those of Szegedy et al. 2015, "Going deeper with convolutions", cut from the
        picture as it was before it was squeezed into a square.
        """
        count = len(pictures)
        drawn = torch.rand((7, count), generator=generator)
        if pictures.is_cuda:
            drawn = drawn.pin_memory()  # so that the copy waits for nothing
        draws = iter(drawn.to(pictures.device, non_blocking=True).unbind())

        def between(low: float, high: float) -> torch.Tensor:
            return next(draws) * (high - low) + low

        area, shape = between(self.least_area, 1.0), between(-math.log(self.widest), math.log(self.widest)).exp()
        wide = (area * shape / aspects).sqrt().clamp(max=1.0)  # share of the picture's width and height, which are `aspects` to 1
        high = (area / shape * aspects).sqrt().clamp(max=1.0)
        x, y = between(-1.0, 1.0) * (1 - wide), between(-1.0, 1.0) * (1 - high)  # the crop's middle, where the picture spans -1 to 1
        mirror = torch.where(next(draws) < 0.5, -1.0, 1.0)
        nothing = torch.zeros_like(wide)
        where = torch.stack([torch.stack([wide * mirror, nothing, x], 1), torch.stack([nothing, high, y], 1)], 1)
        grid = F.affine_grid(where, [count, 3, crop, crop], align_corners=False)
        cut = F.grid_sample(pictures.permute(0, 3, 1, 2).float(), grid, padding_mode="border", align_corners=False)
        contrast, brightness = between(1 - self.light, 1 + self.light), between(1 - self.light, 1 + self.light)
        mean = cut.mean((1, 2, 3))
        cut = cut * contrast[:, None, None, None] + (mean * (brightness - contrast))[:, None, None, None]
        return cut.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()
