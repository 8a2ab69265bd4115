"""A checkpoint judged on labelled photographs, run on a device in the precision in which the server would run it."""

from __future__ import annotations

import copy
import difflib
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from models import architectures, checkpoint
from models.checkpoint import Checkpoint, choose_precision
from models.data import BadFile, DataError, Samples, check_bad, decode_all, find_samples
from models.progress import Progress

_BATCH = 32


def find_device(name: str) -> torch.device:
    """auto, cpu, cuda or cuda:1 -> a device that works. Raises ValueError naming the option, the value and what is wrong."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise ValueError(f"--device {name}: allowed are auto, cpu, cuda and cuda:1")
    device = torch.device("cuda", 0) if name == "cuda" else torch.device(name)  # with its index, which some functions want
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # a torch built without CUDA asserts
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {name} is not possible: {reason} (torch {torch.__version__}, CUDA {torch.version.cuda})") from None
    return device


def prepare(device: torch.device) -> None:
    """Make a GPU the current one; on the CPU, let this process keep the memory of freed activations."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        architectures.keep_memory()


class Classifier:
    """A checkpoint on a device, in the precision that its golden samples allow. Raises FidelityError where they allow none."""

    def __init__(self, loaded: Checkpoint, device: torch.device, precision: str = "auto") -> None:
        self.header, self.device = loaded.header, device

        def classify_golden(precision: str) -> npt.NDArray[np.float32]:
            self._dtype = architectures.DTYPES[precision]
            self._model = architectures.place(copy.deepcopy(loaded.model), device, self._dtype)
            return self.predict(loaded.golden_pixels).numpy()

        first = architectures.fastest_precision(device) if precision == "auto" else precision
        self.precision, self.why = choose_precision(loaded.golden, str(device), first, classify_golden)

    @torch.inference_mode()
    def predict(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8 `[N, crop, crop, 3]` on the host -> float32 `[N, C]` probabilities."""
        return torch.cat([self._forward(chunk.to(self.device)).cpu() for chunk in pixels.split(_BATCH)])

    def _forward(self, pixels: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model(self.header.preprocessing.normalize(pixels, self._dtype))
        return (logits.float() / self.header.temperature).softmax(1)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a checkpoint answers for each photograph of a split, and how often that is right."""

    classifier: Classifier
    samples: Samples  # the files that could be read; targets are indices of the checkpoint's labels
    predicted: npt.NDArray[np.int64]  # [N]
    probability: npt.NDArray[np.float32]  # [N], of the predicted label
    bad: tuple[BadFile, ...] = ()

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        return np.equal(self.predicted, self.samples.targets)

    @property
    def top1(self) -> float:
        """The share of photographs whose label comes first."""
        return float(self.right.mean())

    def metrics(self) -> dict[str, Any]:
        """Top-1 and what it was measured on and with, as JSON can hold it."""
        return {
            "top1": self.top1,
            "correct": int(self.right.sum()),
            "samples": len(self.right),
            "precision": self.classifier.precision,
            "device": str(self.classifier.device),
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it: the metrics, each class, each photograph, each file left out."""
        header, rows = self.classifier.header, zip(self.samples.files, self.samples.targets, self.predicted, self.probability, strict=True)
        return {
            "model": {"name": header.name, "version": header.version},
            "data": str(self.samples.folder),
            **self.metrics(),
            "classes": {
                label: {"top1": correct / count, "correct": correct, "samples": count} for label, correct, count in self._by_class()
            },
            "images": [
                {
                    "file": str(file),
                    "label": header.labels[target],
                    "predicted": header.labels[predicted],
                    "probability": float(probability),
                }
                for file, target, predicted, probability in rows
            ],
            "bad_files": [{"file": str(bad.file), "reason": bad.reason} for bad in self.bad],
        }

    def to_text(self) -> str:
        """What was judged on what; top-1 with its count, and the same for each class."""
        header, run = self.classifier.header, f"{self.classifier.precision} on {self.classifier.device}"
        lines = [
            f"{header.name} {header.version}, {self.samples.folder}, {run}",
            f"top-1 {self.top1:.4f} ({self.right.sum()} of {len(self.right)})",
        ]
        return "\n".join(lines + [f"  {correct / count:.4f} ({correct} of {count})  {label}" for label, correct, count in self._by_class()])

    def _by_class(self) -> Iterator[tuple[str, int, int]]:
        labels = self.classifier.header.labels
        counts = np.bincount(self.samples.targets, minlength=len(labels))
        correct = np.bincount(self.samples.targets[self.right], minlength=len(labels))
        return ((label, int(correct[index]), int(counts[index])) for index, label in enumerate(labels) if counts[index])


def evaluate(path: Path, data: Path, *, device: str = "auto", precision: str = "auto", max_bad: float = 0.01) -> Evaluation:
    """Classify the photographs of a split, `data/<label>/`, or of `data/val/`, as the server would.

    Raises CheckpointError, FidelityError, DataError for labels that the checkpoint lacks and for too many bad files, and ValueError
    for a device that is not there.
    """
    if not 0 <= max_bad <= 1:
        raise ValueError(f"--max-bad {max_bad}: allowed is from 0 to 1")
    where = find_device(device)
    prepare(where)
    labels = checkpoint.read_header(path).labels
    whole = (data / "val").is_dir() and "val" not in labels
    samples = find_samples(data / "val" if whole else data)
    for label in samples.labels:
        if label not in labels:
            close = difflib.get_close_matches(label, labels, n=3) or labels[:3]
            more = ", ..." if len(labels) > len(close) else ""
            raise DataError(f"{samples.folder}: {label!r} is no label of {path}, which has {', '.join(map(repr, close))}{more}")
    classifier = Classifier(checkpoint.load(path), where, precision)
    results: list[torch.Tensor] = []
    good, bad = [], []
    with Progress("evaluating", len(samples.files)) as progress:
        decoded = decode_all(samples.files, classifier.header.preprocessing.read)
        for start in range(0, len(samples.files), 4 * _BATCH):
            # Some batches decoded, then classified: at the same time both would want all cores.
            chunk = list(itertools.islice(decoded, 4 * _BATCH))
            pixels = [torch.from_numpy(found) for found in chunk if not isinstance(found, BadFile)]
            good += [start + row for row, found in enumerate(chunk) if not isinstance(found, BadFile)]
            bad += [found for found in chunk if isinstance(found, BadFile)]
            if pixels:
                results.append(classifier.predict(torch.stack(pixels)))
            progress.add(len(chunk))
    check_bad(bad, len(samples.files), max_bad)
    if not good:
        raise DataError(f"{samples.folder}: none of its files is an image that can be used; one of them: {bad[0].file}: {bad[0].reason}")
    index = np.array([labels.index(label) for label in samples.labels])
    usable = replace(samples.only(np.array(good, dtype=np.intp)), labels=labels)
    return judge(classifier, replace(usable, targets=index[usable.targets]), torch.cat(results), bad)


def judge(classifier: Classifier, samples: Samples, probabilities: torch.Tensor, bad: Iterable[BadFile] = ()) -> Evaluation:
    """The evaluation of `probabilities` `[N, C]` that `classifier` gave for `samples`, whose targets are indices of its labels."""
    best = probabilities.max(1)
    return Evaluation(
        classifier=classifier,
        samples=samples,
        predicted=best.indices.numpy(),
        probability=best.values.numpy(),
        bad=tuple(bad),
    )
