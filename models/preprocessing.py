"""Preprocessing: how an image becomes what a model sees. Part of the checkpoint, so that training and serving can't differ.

bytes --read--> pixels, uint8 [crop, crop, 3] --normalize, in batches, on the device--> float [N, 3, crop, crop]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from models import images

if TYPE_CHECKING:  # the front door imports this module and never torch
    import torch

MAX_SIDE = 4096

_FILTERS = {filter.name.lower(): filter for filter in Image.Resampling}


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Scale the shorter side to `resize`, cut the middle `crop` x `crop`, then (x / 255 - mean) / std per channel.

    Raises ValueError naming the field, the value and what is allowed.
    """

    resize: int  # pixels of the shorter side before the crop, at least `crop`
    crop: int  # pixels of each side of what the model sees
    interpolation: str  # bilinear, bicubic, lanczos, nearest, box or hamming: Pillow's, with antialiasing
    mean: tuple[float, float, float]  # of R, G, B, in units where white is 1
    std: tuple[float, float, float]  # likewise
    background: tuple[int, int, int] = (255, 255, 255)  # R, G, B from 0 to 255, seen through transparency

    def __post_init__(self) -> None:
        for name in ("resize", "crop"):
            if not _is_int(getattr(self, name), 1, MAX_SIDE):
                raise _wrong(self, name, f"a whole number from 1 to {MAX_SIDE}")
        if self.crop > self.resize:
            raise _wrong(self, "crop", f"at most resize, which is {self.resize}")
        if not isinstance(self.interpolation, str) or self.interpolation not in _FILTERS:
            raise _wrong(self, "interpolation", f"one of {', '.join(sorted(_FILTERS))}")
        for name, low in (("mean", -1e6), ("std", 1e-6)):
            value = getattr(self, name)
            if not _is_triple(value) or not all(_is_number(v) and low <= v <= 1e6 for v in value):
                raise _wrong(self, name, f"three finite numbers{' above 0' if name == 'std' else ''}")
            object.__setattr__(self, name, tuple(map(float, value)))
        if not _is_triple(self.background) or not all(_is_int(v, 0, 255) for v in self.background):
            raise _wrong(self, "background", "three whole numbers from 0 to 255")

    def to_dict(self) -> dict[str, object]:
        """What JSON can hold, and `from_dict` takes."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Preprocessing:
        """Raises ValueError naming a field that is missing, unknown or wrong."""
        known = {field.name for field in fields(cls)}
        for names, fault in ((known - data.keys(), "missing"), (data.keys() - known, "unknown")):
            if names:
                raise ValueError(f"preprocessing.{min(map(str, names))} is {fault}; the fields are {', '.join(sorted(known))}")
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        return cls(**values)

    def pixels(self, image: Image.Image, out: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[np.uint8]:
        """An RGB image of any size -> pixels, uint8 [crop, crop, 3], C-contiguous: a new array, or `out`.

        One resize straight from the crop's box in the image: what torchvision's Resize and CenterCrop give, to the rounding of sizes to
        whole pixels, with no memory or time for what is cut away (a 1 x 60000 image would be 256 x 15 million).
        """
        wide, high = (self.resize * length // min(image.size) for length in image.size)
        left, top = round((wide - self.crop) / 2), round((high - self.crop) / 2)
        x, y = image.width / wide, image.height / high
        box = (left * x, top * y, min((left + self.crop) * x, image.width), min((top + self.crop) * y, image.height))
        # Far larger images are first averaged to three times the size, which no one can see and is quicker.
        small = image.resize((self.crop, self.crop), _FILTERS[self.interpolation], box=box, reducing_gap=3.0)
        if out is None:
            return np.array(small)
        out[:] = np.asarray(small)
        return out

    def read(self, data: bytes, *, max_pixels: int = 100_000_000, out: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[np.uint8]:
        """The bytes of an image file -> pixels, uint8 [crop, crop, 3]: a new array, or `out`. Raises images.ImageError."""
        return self.pixels(images.decode(data, side=self.resize, max_pixels=max_pixels, background=self.background), out)

    @property
    def affine(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(x / 255 - mean) / std as x * scale + bias: scale and bias of R, G, B."""
        return tuple(1 / (255 * s) for s in self.std), tuple(-m / s for m, s in zip(self.mean, self.std, strict=True))

    def normalize(self, pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """uint8 [N, crop, crop, 3] -> `dtype` [N, 3, crop, crop], channels_last, on the same device: (pixels / 255 - mean) / std.

        Computed in float32 as one multiply-add, then rounded to `dtype` once.
        """
        import torch

        count, height, width, _ = pixels.shape
        scale, bias = _rows(*self.affine, width, pixels.device)
        # Whole rows of RGBRGB... and no second buffer: with three values to a step and fresh memory it takes ten times as long on a CPU.
        rows = pixels.reshape(count, height, width * 3).to(torch.float32)
        torch.addcmul(bias, rows, scale, out=rows)
        # NHWC seen as NCHW is channels_last already: nothing is moved.
        return rows.to(dtype).view(count, height, width, 3).permute(0, 3, 1, 2)


@cache  # a copy to the device for every batch would wait there for the batch before; and CUDA graphs keep their address
def _rows(scale: tuple[float, ...], bias: tuple[float, ...], width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    with torch.inference_mode(False):  # whoever comes first, later callers may record gradients
        row, offset = (torch.tensor(three, dtype=torch.float32, device=device).repeat(width) for three in (scale, bias))
        return row, offset


def _is_int(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_triple(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 3


def _wrong(preprocessing: Preprocessing, name: str, allowed: str) -> ValueError:
    return ValueError(f"preprocessing.{name} is {getattr(preprocessing, name)!r}; allowed is {allowed}")
