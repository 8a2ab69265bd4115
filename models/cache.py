"""The pixel cache: every image decoded once into one memory-mapped file, from which all epochs and later runs read batches.

Training images are kept as pictures: squares somewhat larger than the model's pixels, for augmentation to cut crops from.
Validation images are kept as exactly the pixels that the server would make of them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import PIL
import torch
from PIL import Image

from models import images
from models.checkpoint import replacing
from models.data import BadFile, DataError, Samples, decode_all
from models.preprocessing import Preprocessing
from models.progress import Progress

Pixels = npt.NDArray[np.uint8]
_BATCHES_AHEAD = 2
_LENGTH_BYTES = 8
_A_DAY_S = 86_400


class Picture(NamedTuple):
    """An image in the form that training cuts crops from: squeezed into a square."""

    pixels: Pixels  # uint8 [side, side, 3]
    aspect: float  # width by height, before it was squeezed


def read_picture(data: bytes, *, side: int, preprocessing: Preprocessing) -> Picture:
    """The bytes of an image file -> the middle of it, at most 4:3, squeezed into a square of `side`. Raises ImageError."""
    image = images.decode(data, side=side, background=preprocessing.background)
    width, height = min(image.width, image.height * 4 / 3), min(image.height, image.width * 4 / 3)
    left, top = (image.width - width) / 2, (image.height - height) / 2
    filter = Image.Resampling[preprocessing.interpolation.upper()]
    small = image.resize((side, side), filter, box=(left, top, left + width, top + height), reducing_gap=3.0)
    return Picture(np.array(small), width / height)


def read_pixels(data: bytes, *, preprocessing: Preprocessing) -> Picture:
    """The bytes of an image file -> exactly the pixels that the server makes of it. Raises ImageError."""
    return Picture(preprocessing.read(data), 1.0)


@dataclass(frozen=True)
class Cached:
    """The decoded images of one split, memory-mapped."""

    samples: Samples  # the files that could be read, N of them
    pixels: Pixels  # uint8 [M, side, side, 3]
    rows: npt.NDArray[np.intp]  # [N], where in `pixels` each sample lies
    aspects: torch.Tensor  # float32 [N], see Picture
    bad: tuple[BadFile, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def load(self, chosen: npt.NDArray[np.intp], pinned: bool = False) -> torch.Tensor:
        """The pixels of some samples, uint8 `[n, side, side, 3]`, in pinned memory for a GPU to copy from."""
        batch = torch.empty((len(chosen), *self.pixels.shape[1:]), dtype=torch.uint8, pin_memory=pinned)
        np.take(self.pixels, self.rows[chosen], axis=0, out=batch.numpy(), mode="clip")  # the default would copy twice
        return batch


def cache_pictures(folder: Path, samples: Samples, preprocessing: Preprocessing) -> Cached:
    """Pictures for training, a quarter larger than the crop, so that a crop of them is still as sharp as what the server sees."""
    side = math.ceil(preprocessing.crop * 1.25)
    return _cache(folder, samples, preprocessing, side, partial(read_picture, side=side, preprocessing=preprocessing))


def cache_pixels(folder: Path, samples: Samples, preprocessing: Preprocessing) -> Cached:
    """The pixels that the server makes of the same files."""
    return _cache(folder, samples, preprocessing, preprocessing.crop, partial(read_pixels, preprocessing=preprocessing))


_Identity = tuple[str, int, int]  # path within the split, bytes, time of the last change in ns; -1 where it can't be read


class _Entry(NamedTuple):
    row: int
    aspect: float
    reason: str | None  # why the file can't be used


def _cache(folder: Path, samples: Samples, preprocessing: Preprocessing, side: int, read: partial[Picture]) -> Cached:
    """Open the cache of these files in `folder`, after decoding those that are not in it as they are now.

    What is written takes its name when it is whole, so an interruption or a second run at the same time does no harm.
    Raises DataError for a label without a usable file, and OSError where the disk is full.
    """
    decoder = (PIL.__version__, importlib.util.find_spec("pillow_heif") is not None)
    settings = {"format": 1, "read": read.func.__name__, "side": side, "preprocessing": preprocessing.to_dict(), "decoder": decoder}
    key = hashlib.sha256(json.dumps([settings, str(samples.folder.resolve())]).encode()).hexdigest()[:16]
    store = folder / f"{samples.folder.parent.name}-{samples.folder.name}-{key}.pixels"
    identities = [_identify(file, samples.folder) for file in samples.files]
    known, pixels = _open(store, side)
    if list(known) != identities:
        known, pixels = _fill(store, dict(zip(identities, samples.files, strict=True)), known, pixels, read)
    entries = list(known.values())
    good = np.array([entry.row for entry in entries if entry.reason is None], dtype=np.intp)
    bad = tuple(BadFile(file, entry.reason) for file, entry in zip(samples.files, entries, strict=True) if entry.reason is not None)
    usable = samples.only(good)
    for label, count in usable.counts().items():
        if not count:
            first = samples.files[samples.targets.tolist().index(samples.labels.index(label))]
            named = next(each for each in bad if each.file == first)
            raise DataError(f"{samples.folder}: no file of {label!r} can be used; one of them: {named}")
    return Cached(usable, pixels, good, torch.tensor([entries[row].aspect for row in good]), bad)


def _identify(file: Path, folder: Path) -> _Identity:
    name = str(file.relative_to(folder))
    try:
        status = file.stat()
    except OSError:
        return name, -1, -1
    return (name, status.st_size, status.st_ctime_ns) if os.access(file, os.R_OK) else (name, -1, -1)


def _open(store: Path, side: int) -> tuple[dict[_Identity, _Entry], Pixels]:
    """What the cache holds, in order of rows, and its pixels, uint8 [rows, side, side, 3]; nothing if there is none, or it is not whole."""
    try:
        with open(store, "rb") as file:
            file.seek(-_LENGTH_BYTES, os.SEEK_END)
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            file.seek(-_LENGTH_BYTES - length, os.SEEK_END)
            lines = enumerate(json.loads(file.read(length)))
            known = {(name, size, changed): _Entry(row, float(aspect), reason) for row, (name, size, changed, aspect, reason) in lines}
            return known, np.memmap(file, np.uint8, "r", shape=(len(known), side, side, 3))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}, np.empty((0, side, side, 3), np.uint8)


def _fill(
    store: Path, files: Mapping[_Identity, Path], known: Mapping[_Identity, _Entry], old: Pixels, read: Callable[[bytes], Picture]
) -> tuple[dict[_Identity, _Entry], Pixels]:
    """Write the cache anew: rows that it has are copied, the others decoded. After the pixels comes the index, then its length."""
    store.parent.mkdir(parents=True, exist_ok=True)
    for left in store.parent.glob(".*.part"):
        with suppress(OSError):  # another run may be at it, too
            if time.time() - left.stat().st_mtime > _A_DAY_S:  # of a process that was killed
                left.unlink()
    shape = (len(files), *old.shape[1:])
    entries: dict[_Identity, _Entry] = {}
    with replacing(store) as temporary, open(temporary, "w+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, math.prod(shape))  # a full disk is an error now, not a killed process later
        except OSError as error:
            raise OSError(f"{store.parent}: no room for {math.prod(shape) / 1e6:.0f} MB of decoded images ({error.strerror})") from None
        pixels = np.memmap(file, np.uint8, "r+", shape=shape)
        fresh = decode_all([path for identity, path in files.items() if identity not in known], read)
        with Progress(f"decoding {store.stem.split('-')[-2]}", len(files)) as progress:
            for row, identity in enumerate(files):
                if identity in known:
                    entries[identity] = known[identity]._replace(row=row)
                    pixels[row] = old[known[identity].row]
                elif isinstance(found := next(fresh), BadFile):
                    # What went wrong in the reading gets an identity that no file will have: it is tried again.
                    key = identity if found.lasting or identity[1] < 0 else (identity[0], -1, row)
                    entries[key] = _Entry(row, 1.0, found.reason)
                else:
                    entries[identity] = _Entry(row, found.aspect, None)
                    pixels[row] = found.pixels
                progress.add(1)
        pixels.flush()
        index = json.dumps([[*identity, entry.aspect, entry.reason] for identity, entry in entries.items()]).encode()
        file.seek(0, os.SEEK_END)
        file.write(index + len(index).to_bytes(_LENGTH_BYTES, "little"))
    return entries, pixels


# Samples -> batches


def even_batches(order: npt.NDArray[np.intp], batch_size: int) -> list[npt.NDArray[np.intp]]:
    """Split into as few batches of at most `batch_size` as possible, their sizes as equal as possible: 9 by 8 are 5 and 4.

    So that the last batch is never a remainder of one, whose batch statistics would mean nothing.
    """
    return np.array_split(order, math.ceil(len(order) / batch_size))


@dataclass(frozen=True)
class Batch:
    """Some samples of one split on the device."""

    pixels: torch.Tensor  # uint8 [n, side, side, 3]
    aspects: torch.Tensor  # float32 [n], see Cached
    targets: torch.Tensor  # int64 [n]


def load_batches(cached: Cached, batches: Sequence[npt.NDArray[np.intp]], device: torch.device) -> Iterator[Batch]:
    """The batches on the device; a thread reads the next ones from the cache meanwhile."""
    pinned = device.type == "cuda"
    targets = torch.from_numpy(cached.samples.targets)

    def read(chosen: npt.NDArray[np.intp]) -> Batch:
        if pinned:
            torch.cuda.set_device(device)  # pinned memory would open a context on GPU 0 otherwise
        return Batch(cached.load(chosen, pinned), cached.aspects[chosen], targets[chosen])

    with ThreadPoolExecutor(1, "loader") as pool:
        ahead: deque[Future[Batch]] = deque(pool.submit(read, chosen) for chosen in batches[:_BATCHES_AHEAD])
        for index in range(len(batches)):
            batch = ahead.popleft().result()
            if index + _BATCHES_AHEAD < len(batches):
                ahead.append(pool.submit(read, batches[index + _BATCHES_AHEAD]))
            yield Batch(*(tensor.to(device, non_blocking=True) for tensor in (batch.pixels, batch.aspects, batch.targets)))
