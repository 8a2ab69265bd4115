"""The names of the classes, in the order of the logits, from what others keep them in."""

from __future__ import annotations

import json
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class LabelsError(ValueError):
    """Labels that can't be used. The message names the file, where in it, and what is wrong."""


def as_label(name: object) -> str | None:
    """The name in Unicode's composed form, or None where it can't be a label: not a text, empty, or with control characters.

    One file system takes accents apart and another composes them: the same name must be the same label.
    """
    if not isinstance(name, str) or not name.strip() or any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
        return None
    return unicodedata.normalize("NFC", name)


def imagenet_labels() -> tuple[str, ...]:
    """The 1,000 labels of ImageNet-1k in index order, as torchvision names them (every one unique)."""
    import torchvision

    return tuple(torchvision.models.ResNet18_Weights.IMAGENET1K_V1.meta["categories"])


def read_labels(source: str) -> tuple[str, ...]:
    """Read at least two labels, each there once.

    `source` is the word `imagenet`; a folder of label folders, sorted by name as torchvision's ImageFolder does; a JSON file
    (`["cat", "dog"]`, `{"0": "cat"}`, `{"0": ["n02124075", "cat"]}` or `{"cat": 0}`); or a text file with one label a line.
    Raises LabelsError.
    """
    if source == "imagenet":
        return imagenet_labels()
    path = Path(source)
    if path.is_dir():
        return _of_folder(path)
    if not path.is_file():
        raise LabelsError(f"{path}: no such file or folder; --labels takes a file, a folder of label folders, or the word imagenet")
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise LabelsError(f"{path}: line {data.count(10, 0, error.start) + 1}: not UTF-8; save it in that encoding") from None
    named = _of_json(path, text) if path.suffix.lower() == ".json" else _of_lines(path, text)
    return _checked(path, named)


def _of_folder(path: Path) -> tuple[str, ...]:
    labels = tuple(sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith(".")))
    if len(labels) < 2 or {*labels} <= {"train", "val", "valid", "validation", "test"}:
        found = f"only {', '.join(labels)}" if labels else "no folder"
        raise LabelsError(f"{path}: {found} in it; name the folder that holds a folder for each label, such as data/train")
    return _checked(path, [(f"folder {label!r}", label) for label in labels])


def _of_lines(path: Path, text: str) -> list[tuple[str, object]]:
    lines = [line.strip() for line in text.rstrip().split("\n")]
    if "" in lines:
        raise LabelsError(f"{path}: line {lines.index('') + 1}: empty; each line is the label of one class, in the order of the logits")
    return [(f"line {number}", line) for number, line in enumerate(lines, 1)]


def _of_json(path: Path, text: str) -> list[tuple[str, object]]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise LabelsError(f"{path}: line {error.lineno}: not valid JSON ({error.msg})") from None
    except RecursionError:
        raise LabelsError(f"{path}: not a list of labels, but nested without end") from None
    if isinstance(document, list):
        return [(f"entry {index}", label) for index, label in enumerate(document)]
    if not isinstance(document, dict) or not document:
        raise LabelsError(f'{path}: must hold ["cat", "dog"], {{"0": "cat", "1": "dog"}} or {{"cat": 0, "dog": 1}}')
    by_index: list[tuple[object, Any]] = [(key, value) for key, value in document.items()]
    if all(type(value) is int for value in document.values()):
        by_index = [(value, key) for key, value in document.items()]
    found: dict[int, Any] = {}
    for key, label in by_index:
        if not str(key).isdecimal() or int(str(key)) in found:
            raise LabelsError(f"{path}: {key!r} {'is there twice' if str(key).isdecimal() else 'is no index'}; they count from 0")
        found[int(str(key))] = label
    if missing := sorted({*range(len(found))} - found.keys()):
        raise LabelsError(f"{path}: no label for index {missing[0]}; there are {len(found)}, so they must be 0 to {len(found) - 1}")
    return [(f"index {index}", label) for index, label in enumerate(_plain_names([found[index] for index in range(len(found))]))]


def _plain_names(labels: list[Any]) -> list[Any]:
    """[id, name] of ImageNet's class index -> the name, with the id where two classes share it ("crane" the bird and the machine)."""
    if not all(isinstance(label, list) and [*map(type, label)] == [str, str] for label in labels):
        return labels
    times = Counter(name for _, name in labels)
    return [f"{name} ({identity})" if times[name] > 1 else name for identity, name in labels]


def _checked(path: Path, named: Iterable[tuple[str, object]]) -> tuple[str, ...]:
    found: dict[str, str] = {}
    for where, name in named:
        label = as_label(name)
        if label is None:
            raise LabelsError(f"{path}: {where}: {name!r} is no label; it must be a text, not empty, without control characters")
        if label in found:
            raise LabelsError(f"{path}: {where}: {label!r} is there already, in {found[label]}; each label must be there once")
        found[label] = where
    if len(found) < 2:
        raise LabelsError(f"{path}: a classifier needs at least two labels, there is {len(found)}")
    return tuple(found)
