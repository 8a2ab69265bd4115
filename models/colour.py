"""Pixels of any mode -> RGB as a person would see it: samples to 8 bits, colours to sRGB, transparency onto a background."""

from __future__ import annotations

import io
from functools import lru_cache

import numpy as np
from PIL import Image, ImageCms, TiffImagePlugin

MAX_PROFILE_BYTES = 4 << 20  # larger ICC profiles are ignored


def flatten(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """Any mode -> RGB: samples to 8 bits, colours to sRGB, transparency onto the background."""
    profile, alpha = image.info.get("icc_profile"), None
    if image.mode[0] in "IF":
        image, alpha = _eight_bits(image)
    elif image.has_transparency_data:
        grey = image.mode in ("1", "L", "LA", "La")
        if image.mode != "RGBA":
            image = image.convert("LA" if grey else "RGBA")
        alpha = image.getchannel("A")
        image = image.getchannel("L") if grey else image
    elif image.mode not in ("L", "RGB", "CMYK"):
        image = image.convert("L" if image.mode == "1" else "RGB")
    transform = _to_srgb(profile, image.mode) if isinstance(profile, bytes) and len(profile) <= MAX_PROFILE_BYTES else None
    if transform is not None:
        image = ImageCms.applyTransform(image, transform, inPlace=image.mode in ("RGB", "RGBA")) or image
    if alpha is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    flat = Image.new("RGB", image.size, background)
    flat.paste(image if image.mode == "RGBA" else image.convert("RGB"), (0, 0), alpha)
    return flat


def _eight_bits(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """16-bit, 32-bit and float samples -> grey and, where one value is transparent, alpha."""
    values = np.asarray(image).reshape(-1)
    bands = [values[at : at + (1 << 20)] for at in range(0, values.size, 1 << 20)]  # so that floats of them all never exist at once
    tags = image.tag_v2 if isinstance(image, TiffImagePlugin.TiffImageFile) else {}
    low, high = 0.0, 4095.0 if tags.get(258) == (12,) else 65535.0
    if not image.mode.startswith("I;16"):
        ends = [(float(some.min()), float(some.max())) for band in bands if (some := band[np.isfinite(band)]).size]
        low, high = min((end[0] for end in ends), default=0.0), max((end[1] for end in ends), default=0.0)
        top = next((top for top in (1.0, 255.0, 65535.0) if high <= top and (top > 1 or image.mode == "F")), None)
        low, high = (0.0, top) if top and low >= 0 else (low, high)
    if tags.get(262) == 0:  # white is zero, which Pillow heeds up to 8 bits only
        low, high = high, low
    grey = np.empty(values.shape, np.uint8)
    for at, band in enumerate(bands):
        with np.errstate(invalid="ignore"):  # numpy warns of some NaNs
            exact = band.astype(np.float64)
        scaled = (np.nan_to_num(exact, nan=low, posinf=max(low, high), neginf=min(low, high)) - low) * 255.0
        grey[at << 20 : (at + 1) << 20] = np.clip(scaled / ((high - low) or 1.0) + 0.5, 0, 255)
    key = image.info.get("transparency")
    alpha = None if key is None else Image.fromarray(np.where(values == key, np.uint8(0), np.uint8(255)).reshape(image.size[::-1]))
    return Image.fromarray(grey.reshape(image.size[::-1])), alpha


_SPACES = {"L": b"GRAY", "RGB": b"RGB ", "RGBA": b"RGB ", "CMYK": b"CMYK"}


@lru_cache(maxsize=16)
def _to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """The transform from this profile to sRGB; None if there is nothing to do: not for this mode, broken, or sRGB in all but name."""
    if profile[16:20] != _SPACES.get(mode):
        return None
    steps = np.linspace(0, 255, 6, dtype=np.uint8)
    colours = np.stack(np.meshgrid(*[steps] * len(mode)), axis=-1).reshape(1, -1, len(mode))
    probe = Image.frombytes(mode, (colours.shape[1], 1), colours.tobytes())
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        target = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
        out = mode if mode in ("RGB", "RGBA") else "RGB"
        intent, flags = ImageCms.Intent.RELATIVE_COLORIMETRIC, ImageCms.Flags.BLACKPOINTCOMPENSATION
        transform = ImageCms.buildTransform(source, target, mode, out, intent, flags)
        moved = ImageCms.applyTransform(probe, transform)
    except Exception:  # whatever littlecms finds wrong with it
        return None
    change = np.abs(np.asarray(moved, np.int16) - np.asarray(probe.convert(out), np.int16))
    return transform if change.max() > 2 else None
