"""Names of architectures -> modules with the right head; modules -> a precision on a device."""

from __future__ import annotations

import ctypes
import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

from models.preprocessing import Preprocessing


def build(name: str, *, num_classes: int, image_size: int) -> nn.Module:
    """Build an untrained classifier: float `[N, 3, image_size, image_size]` -> logits `[N, num_classes]`.

    `name` is a classification architecture of torchvision's registry (`resnet50`), or one of timm's as `timm:NAME`.
    Auxiliary heads, which only training uses, are left out. Raises ValueError for an unknown name, naming the
    closest ones, and for an image size that the architecture can't take.
    """
    if name.startswith("timm:"):
        return _build_timm(name.removeprefix("timm:"), num_classes, image_size)
    _check_torchvision(name)
    options: dict[str, object] = {}
    if name in ("googlenet", "inception_v3"):
        options = {"aux_logits": False, "init_weights": False}
    elif name.startswith("vit_"):
        options = {"image_size": image_size}  # the position embedding has one entry per patch
    elif name.startswith("maxvit"):
        options = {"input_size": (image_size, image_size)}  # its windows are laid out for one size
    try:
        model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=num_classes, **options)
    except (ValueError, AssertionError) as error:
        raise ValueError(f"{name} can't be built for {image_size} x {image_size} pixels: {' '.join(str(error).split())}") from error
    return model.eval()


def _build_timm(name: str, num_classes: int, image_size: int) -> nn.Module:
    import timm

    config = _timm_config(name)
    options: dict[str, Any] = {"img_size": image_size} if config is not None and config.fixed_input_size else {}
    try:
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=num_classes, **options)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise ValueError(f"timm:{name} can't be built for {image_size} x {image_size} pixels: {' '.join(str(error).split())}") from error
    return model.eval()


def preprocessing_of(name: str) -> Preprocessing:
    """How an architecture's published weights want their images; for one that has none, ImageNet's usual 224 pixels of 256.

    Of timm's "squash" and "border", which fit the whole image into the crop, the usual middle crop is made. Raises ValueError
    for an unknown name.
    """
    if name.startswith("timm:"):
        config = _timm_config(name.removeprefix("timm:"))
        if config is None:
            mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
            return Preprocessing(resize=256, crop=224, interpolation="bilinear", mean=mean, std=std)
        crop = min(config.input_size[1:])
        resize = max(crop, math.floor(crop / config.crop_pct))  # rounded as timm does
        return Preprocessing(resize=resize, crop=crop, interpolation=config.interpolation, mean=config.mean, std=config.std)
    _check_torchvision(name)
    transform = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    mean, std = tuple(transform.mean), tuple(transform.std)
    if name in ("googlenet", "inception_v3"):
        # Their published weights want inputs of mean and deviation 0.5; torchvision reaches that by a second step in the module.
        mean = std = (0.5, 0.5, 0.5)
    return Preprocessing(
        resize=transform.resize_size[0],
        crop=transform.crop_size[0],
        interpolation=transform.interpolation.value,
        mean=mean,
        std=std,
    )


def _check_torchvision(name: str) -> None:
    names = torchvision.models.list_models(module=torchvision.models)
    if name not in names:
        raise ValueError(f"unknown architecture {name!r}{_closest(name, names)}; timm's architectures are written timm:NAME")


def _timm_config(name: str) -> Any:
    """What timm knows of an architecture's published weights, or None."""
    import timm  # slow to import, so only for such names

    if not timm.is_model(name):
        raise ValueError(f"unknown architecture 'timm:{name}'{_closest(name, timm.list_models())}")
    try:
        return timm.models.get_pretrained_cfg(name)
    except RuntimeError as error:  # the tag in resnet50.TAG is unknown
        raise ValueError(f"unknown architecture 'timm:{name}': {error}") from None


def _closest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=3)
    return f" (close: {', '.join(close)})" if close else ""


@torch.inference_mode()
def check_size(model: nn.Module, name: str, image_size: int) -> None:
    """Raise ValueError where a model can't classify images of this size: some refuse one only when they see it."""
    try:
        model.eval()(torch.zeros(1, 3, image_size, image_size))
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{name} can't classify {image_size} x {image_size} pixels ({reason})") from error


def set_weights(model: nn.Module, state: Mapping[str, torch.Tensor], *, assign: bool = False) -> None:
    """Load a state dict that need not hold every weight; the others stay. Raises RuntimeError for a wrong name or shape.

    `assign` takes the tensors themselves in place of copies.
    """
    whole = model.state_dict()  # with the versions of its modules, which some of them want to see
    if strangers := state.keys() - whole.keys():
        raise RuntimeError(f"not in the model: {', '.join(sorted(strangers))}")
    whole.update(state)
    model.load_state_dict(whole, assign=assign)


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def fastest_precision(device: torch.device) -> str:
    """The precision to try first for inference. bf16 only where a CPU multiplies it in hardware: it is slower than float32 without."""
    if device.type == "cuda":
        return "fp16"
    return "fp32" if _CPU_BF16.isdisjoint(Path("/proc/cpuinfo").read_text().split()) else "bf16"


_CPU_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}


def keep_memory() -> None:
    """On a CPU, let this process keep the memory of freed activations.

    glibc would give each large one back to the kernel, which clears it for the next: half of the time of a light model.
    """
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for option, value in ((-4, 0), (-1, 1 << 30), (-2, 1 << 28)):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD of malloc.h
            libc.mallopt(option, value)


def place(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Put a model for inference on a device, in a precision, its convolutions channels_last. Changes the model in place."""
    if dtype == torch.float32:
        # float32 means float32: TF32, cuDNN's default, misses the golden samples' bounds for it.
        torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]  # torch puts them there at run time
        torch.backends.cudnn.rnn.fp32_precision = "ieee"  # type: ignore[attr-defined]
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    return model.eval().requires_grad_(False).to(device, dtype).to(memory_format=torch.channels_last)
