"""Weights in memory -> a verified checkpoint with golden samples."""

from __future__ import annotations

import datetime
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from models import checkpoint
from models.checkpoint import GOLDEN_SAMPLES, Checkpoint, CheckpointError, Header
from models.preprocessing import Preprocessing


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
    metrics: dict[str, Any] | None = None,
) -> Header:
    """Write `model` (float32, on the CPU) as a checkpoint; its golden samples are `golden_pixels`, uint8 `[16, crop, crop, 3]`.

    Raises CheckpointError where the parts do not fit each other.
    """
    assert len(golden_pixels) == GOLDEN_SAMPLES
    model.eval()
    made = {
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
        metrics=metrics or {},
        origin=origin | made,
    )
    try:
        golden_logits = logits(model, preprocessing, golden_pixels)
    except (RuntimeError, AssertionError) as error:  # some architectures take one size only, and say so here
        crop = preprocessing.crop
        raise CheckpointError(path, "architecture", f"{architecture} can't classify {crop} x {crop} pixels ({error})") from error
    checkpoint.save(path, Checkpoint(header=header, model=model, golden_pixels=golden_pixels, golden_logits=golden_logits))
    return header
