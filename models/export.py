"""Weights in memory -> a verified checkpoint with golden samples."""

from __future__ import annotations

import contextlib
import datetime
import platform
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps

from models import architectures, checkpoint, images
from models.checkpoint import GOLDEN_SAMPLES, Checkpoint, CheckpointError, Header
from models.data import files_below, read_file
from models.preprocessing import Preprocessing

EXAMPLES = Path(__file__).parent.parent / "examples"


@torch.inference_mode()
def logits(model: torch.nn.Module, preprocessing: Preprocessing, pixels: torch.Tensor) -> torch.Tensor:
    """The reference forward: float32 on the CPU. uint8 `[N, crop, crop, 3]` -> float32 `[N, C]`."""
    return torch.cat([model(preprocessing.normalize(chunk, torch.float32)) for chunk in pixels.split(8)]).float()


def export(
    path: Path,
    model: torch.nn.Module,
    *,
    name: str,
    architecture: str,
    labels: tuple[str, ...],
    preprocessing: Preprocessing,
    golden_pixels: torch.Tensor,
    origin: dict[str, Any],
    temperature: float = 1.0,
    measure: Callable[[Checkpoint], dict[str, Any]] | None = None,
) -> Header:
    """Write `model` (float32, on the CPU) as a checkpoint; its golden samples are `golden_pixels`, uint8 `[16, crop, crop, 3]`.

    `measure` gets the checkpoint as it will be, but for the metrics, which are what it returns.

    Raises CheckpointError where the parts do not fit each other.
    """
    assert len(golden_pixels) == GOLDEN_SAMPLES
    model.eval()
    circumstances = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "libraries": {library: version(library) for library in ("torch", "torchvision", "timm", "pillow")},
        "python": platform.python_version(),
    }
    header = Header(
        name=name,
        version=checkpoint.version_of(model.state_dict(), labels, preprocessing, temperature),
        architecture=architecture,
        labels=labels,
        preprocessing=preprocessing,
        temperature=temperature,
        origin=origin | circumstances,
    )
    try:
        architectures.check_size(model, architecture, preprocessing.crop)
    except ValueError as error:
        raise CheckpointError(path, "architecture", str(error)) from None
    golden_logits = logits(model, preprocessing, golden_pixels)
    made = Checkpoint(header=header, model=model, golden_pixels=golden_pixels, golden_logits=golden_logits)
    if measure is not None:
        made = replace(made, header=replace(header, metrics=measure(made)))
    checkpoint.save(path, made)
    return made.header


# Parts of a photograph in twelfths, left, top, right, bottom: the whole, two thirds, a close-up, quarters; then the same mirrored.
_PARTS = [(0, 0, 12, 12), (0, 0, 8, 12), (4, 0, 12, 12), (3, 3, 9, 9), (0, 0, 6, 6), (6, 0, 12, 6), (0, 6, 6, 12), (6, 6, 12, 12)]


def golden_from(folder: Path, preprocessing: Preprocessing) -> torch.Tensor:
    """The golden samples of a checkpoint, uint8 `[16, crop, crop, 3]`: views of 16 photographs that are spread over all in `folder`.

    Of fewer photographs several views are taken. Folders in it count, hidden files don't, and what is no image is passed over.
    Raises ValueError where no photograph is left.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}; golden samples are taken from photographs")
    files = sorted(files_below(folder))
    bounds = [len(files) * step // GOLDEN_SAMPLES for step in range(GOLDEN_SAMPLES + 1)]
    found = [image for start, end in pairwise(bounds) if (image := _first_image(files[start:end], preprocessing)) is not None]
    if not found:
        raise ValueError(f"{folder}: no image in it that can be read; golden samples are taken from photographs")
    views = [(image, part, mirrored) for mirrored in (False, True) for part in _PARTS for image in found][:GOLDEN_SAMPLES]
    return torch.stack([torch.from_numpy(preprocessing.pixels(_view(*view))) for view in views])


def _first_image(files: list[Path], preprocessing: Preprocessing) -> Image.Image | None:
    for file in files:
        with contextlib.suppress(images.ImageError, OSError):
            return images.decode(read_file(file), side=2 * preprocessing.resize, background=preprocessing.background)
    return None


def _view(image: Image.Image, part: tuple[int, int, int, int], mirrored: bool) -> Image.Image:
    left, top, right, bottom = part
    wide, high = image.size
    view = image.crop((left * wide // 12, top * high // 12, -(-right * wide // 12), -(-bottom * high // 12)))
    return ImageOps.mirror(view) if mirrored else view
