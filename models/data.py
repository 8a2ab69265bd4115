"""Labelled folders -> samples; their files read in parallel, the bad ones named."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from models.images import ImageError
from models.labels import as_label
from models.progress import printable, say

T = TypeVar("T")

_DECODED_AT_ONCE = 256
_LARGEST_FILE = 1 << 30  # bytes; larger than any image within the limit of pixels, and read whole, one for each core
_LITTER = {"Thumbs.db", "desktop.ini"}  # what systems leave in folders, besides hidden files
_LAYOUT = "photographs belong into {0}/train/<label>/ and {0}/val/<label>/"


class DataError(ValueError):
    """Data that can't be used. The message names the folder or the files, and what to change."""


# Folders -> samples


@dataclass(frozen=True)
class Samples:
    """The files of one split, sorted by label and path, and what they show."""

    folder: Path
    labels: tuple[str, ...]
    files: tuple[Path, ...]
    targets: npt.NDArray[np.int64]  # [N], the index of each file's label

    def counts(self) -> dict[str, int]:
        """How many files each label has."""
        return dict(zip(self.labels, np.bincount(self.targets, minlength=len(self.labels)).tolist(), strict=True))

    def only(self, rows: npt.NDArray[np.intp]) -> Samples:
        return replace(self, files=tuple(self.files[row] for row in rows), targets=self.targets[rows])


def find_samples(folder: Path) -> Samples:
    """The files of `folder/<label>/`, at any depth. A label is the name of its folder; hidden files and folders don't count.

    Raises DataError for a missing folder, one without label folders, and a label folder without files.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}")
    found: dict[str, Path] = {}
    strays = []
    for entry in _visible(folder):
        if not _is_folder(entry):
            strays.append(entry.path)
            continue
        label = as_label(entry.name)
        if label is None or label in found:
            problem = "its name must not be empty nor have control characters" if label is None else "another folder has the same name"
            raise DataError(f"{folder}: the folder {entry.name!r} can't be a label: {problem}; rename it")
        found[label] = Path(entry.path)
    if not found:
        raise DataError(f"{folder}: no label folders in it; the photographs of each class belong into a folder named after it")
    if strays:
        say(f"{strays[0]}: left out, since it lies in no label folder" + (f", and {len(strays) - 1} others" if len(strays) > 1 else ""))
    labels = tuple(sorted(found))
    files = [sorted(files_below(found[label])) for label in labels]
    for label, of_label in zip(labels, files, strict=True):
        if not of_label:
            raise DataError(f"{found[label]}: no files in it; put photographs of {label!r} there or remove the folder")
    targets = np.repeat(np.arange(len(labels)), [len(of_label) for of_label in files])
    return Samples(folder, labels, tuple(file for of_label in files for file in of_label), targets)


def find_splits(root: Path) -> tuple[Samples, Samples]:
    """The samples of `root/train` and `root/val`, which must have the same labels, at least two. Raises DataError."""
    if not root.is_dir():
        raise DataError(f"{root}: {'not a folder' if root.exists() else 'no such folder'}; {_LAYOUT.format(root)}")
    for split in ("train", "val"):
        if not (root / split).is_dir():
            above = root.resolve().parent
            hint = f"name {above}, which has it" if (above / split).is_dir() else _LAYOUT.format(root)
            raise DataError(f"{root / split}: no such folder; {hint}")
    train, val = find_samples(root / "train"), find_samples(root / "val")
    if len(train.labels) < 2:
        raise DataError(f"{train.folder}: only one class, {train.labels[0]!r}; a classifier needs at least two label folders")
    for here, there in ((val, train), (train, val)):
        missing = [label for label in there.labels if label not in here.labels]
        if missing:
            names = ", ".join(map(repr, missing[:5])) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise DataError(f"{here.folder}: no folder for {names}, which {there.folder} has; both need the same classes")
    return train, val


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".") and entry.name not in _LITTER]
    except OSError as error:
        raise DataError(f"{folder}: can't be read ({error.strerror})") from None


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or into a folder that is closed to us: what it is shows when it is read
        return False


def files_below(folder: Path, above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[Path]:
    """Every entry that is no folder, also what can't be read: that is named later. Links are followed, once."""
    status = folder.stat()
    here = (status.st_dev, status.st_ino)
    if here in above:  # a link to a folder that it lies in
        return
    for entry in _visible(folder):
        if _is_folder(entry):
            yield from files_below(Path(entry.path), above | {here})
        else:
            yield Path(entry.path)


# Files -> pixels


def read_file(file: Path) -> bytes:
    """Raises OSError, also for what is no regular file: reading a named pipe would wait for ever; ImageError for a huge one."""
    status = file.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError("not a regular file")
    if status.st_size > _LARGEST_FILE:
        raise ImageError("image_too_large", f"These {status.st_size / 1e9:.0f} GB are no image that is decoded here")
    return file.read_bytes()


@dataclass(frozen=True)
class BadFile:
    """A file that can't be used, and why."""

    file: Path
    reason: str
    lasting: bool = True  # it lies in the bytes; or else in the reading, which may go well another time

    def __str__(self) -> str:
        return printable(f"{self.file}: {self.reason}")


def check_bad(bad: Sequence[BadFile], total: int, max_bad: float) -> None:
    """Raise DataError where more than `max_bad` of `total` files are bad."""
    if len(bad) > max_bad * total:
        named = "".join(f"\n  {each}" for each in bad[:10]) + ("\n  ..." if len(bad) > 10 else "")
        allowed = f"more than --max-bad {max_bad:g} allows; mend or remove them, or raise --max-bad"
        raise DataError(f"{len(bad)} of {total} files can't be used, {allowed}{named}")


def decode_all(files: Sequence[Path], read: Callable[[bytes], T]) -> Iterator[T | BadFile]:
    """Read files in parallel, in order: what `read` makes of each one's bytes, or what is wrong with it."""

    def decode(file: Path) -> T | BadFile:
        try:
            return read(read_file(file))
        except ImageError as error:
            return BadFile(file, str(error).partition(". ")[0].removesuffix("."))  # what follows is for clients of the server
        except OSError as error:
            return BadFile(file, f"can't be read ({error.strerror or error})", lasting=False)
        except MemoryError:
            return BadFile(file, "needs more memory than there is", lasting=False)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "decode") as pool:  # the codecs release the interpreter's lock
        for start in range(0, len(files), _DECODED_AT_ONCE):  # in pieces: neither memory nor a Ctrl-C waits for all of them
            yield from pool.map(decode, files[start : start + _DECODED_AT_ONCE])
