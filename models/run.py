"""A folder of labelled photographs -> a run -> the checkpoint of its best epoch."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

from models import architectures, checkpoint
from models.cache import Cached, cache_pictures, cache_pixels, even_batches
from models.checkpoint import GOLDEN_SAMPLES, Checkpoint, Header, python
from models.data import BadFile, DataError, check_bad, find_samples, find_splits
from models.evaluation import Classifier, find_device, judge, prepare
from models.export import export, golden_from
from models.preprocessing import Preprocessing
from models.progress import say
from models.recipe import TrainConfig
from models.training import BEST, Trainer

CONFIG = "config.json"


def train(config: TrainConfig) -> Header:
    """Train as `config` says, and write the checkpoint of the best epoch. Returns its header.

    Raises DataError, CheckpointError and ValueError, in words for the user, before anything is written; OSError where that fails later.
    """
    device = find_device(config.device)
    prepare(device)
    runs = config.run.parent if config.run else Path("runs")
    if config.run and config.run.exists():
        raise ValueError(f"--run {config.run}: is there already; name another, or remove it")
    train_samples, val_samples = find_splits(config.data)
    _must_be_writable(config.checkpoint)
    torch.manual_seed(config.seed)
    start = _begin(config, train_samples.labels)
    try:
        architectures.check_size(start.model, start.architecture, start.preprocessing.crop)
    except ValueError as error:
        raise ValueError(f"--image-size: {error}") from None
    train_images = cache_pictures(runs / ".cache", train_samples, start.preprocessing)
    val_images = cache_pixels(runs / ".cache", val_samples, start.preprocessing)
    bad = (*train_images.bad, *val_images.bad)
    check_bad(bad, len(train_samples.files) + len(val_samples.files), config.max_bad)
    golden, source = _golden(val_images, config.golden_from, start.preprocessing)

    run = config.run or _free(runs / datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))
    run.mkdir(parents=True)
    config = replace(config, run=run, out=config.checkpoint, data=Path(os.path.abspath(config.data)))
    data = {
        "name": config.data.name,
        "train": train_images.samples.counts(),
        "val": val_images.samples.counts(),
        "bad_files": len(bad),
    }
    facts = {
        "recipe": config.to_dict(),
        "architecture": start.architecture,
        "labels": train_samples.labels,
        "preprocessing": start.preprocessing.to_dict(),
        "origin": {"data": data, "recipe": config.choices(), "init": start.origin},
    }
    # Paths need not be UTF-8; this is how Python keeps the others.
    (run / CONFIG).write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", errors="surrogateescape")
    _report_bad(bad, run)
    say(f"{len(train_samples.labels)} classes, {len(train_images)} images for training, {len(val_images)} for validation; {run}")
    try:
        Trainer(config, start.model, start.preprocessing, device, train_images, val_images, start.new_head).fit(run)
    except torch.OutOfMemoryError as error:
        raise MemoryError(f"{str(error).splitlines()[0]}; lower --batch-size or --image-size") from None
    except KeyboardInterrupt:
        if (run / BEST).exists():
            say(f"no checkpoint is written; `{python()} -m models export {shlex.quote(str(run))}` makes one of the best epoch so far")
        raise
    return _export(run, config.checkpoint, device, val_images, golden, source)


def export_run(run: Path, out: Path | None = None, golden_from: Path | None = None) -> tuple[Path, Header]:
    """Write the checkpoint of the best epoch of a run, also of one that was stopped. Returns the file and its header.

    `out` and `golden_from` are by default what the run was told. Raises DataError, CheckpointError and ValueError, as `train` does.
    """
    config, facts = recipe_of(run), _facts(run)
    preprocessing = Preprocessing.from_dict(facts["preprocessing"])
    if not (run / BEST).exists():
        raise ValueError(f"{run}: no epoch of this run was complete; there are no weights to export")
    device = find_device(config.device)
    prepare(device)
    val_samples = find_samples(config.data / "val")
    if list(val_samples.labels) != facts["labels"]:
        raise DataError(f"{val_samples.folder}: its labels are no longer those that {run} was trained with")
    _must_be_writable(out or config.checkpoint)
    val_images = cache_pixels(run.parent / ".cache", val_samples, preprocessing)
    golden, source = _golden(val_images, golden_from or config.golden_from, preprocessing)
    return out or config.checkpoint, _export(run, out or config.checkpoint, device, val_images, golden, source)


def recipe_of(run: Path) -> TrainConfig:
    """What a run was told. Raises ValueError where the folder is not one of a run."""
    try:
        return TrainConfig.from_dict(_facts(run)["recipe"])
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{run}: not the folder of a run: {CONFIG} in it can't be read ({error})") from None


def _facts(run: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((run / CONFIG).read_text(encoding="utf-8", errors="surrogateescape"))
    return facts


def _free(run: Path) -> Path:
    """`run`, or with a number behind it where another run began in the same second."""
    others = (run.with_name(f"{run.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([run], others) if not path.exists())


def _golden(val_images: Cached, folder: Path | None, preprocessing: Preprocessing) -> tuple[torch.Tensor, str]:
    """The golden samples, uint8 `[16, crop, crop, 3]`, and where they come from."""
    if folder:
        return golden_from(folder, preprocessing), f"{folder.resolve().name}/"
    spread = np.linspace(0, len(val_images) - 1, GOLDEN_SAMPLES).astype(np.intp)  # over all labels, by which they are sorted
    return val_images.load(spread), "the validation images"


def _export(run: Path, out: Path, device: torch.device, val_images: Cached, golden: torch.Tensor, source: str) -> Header:
    facts = _facts(run)
    preprocessing = Preprocessing.from_dict(facts["preprocessing"])
    model = architectures.build(facts["architecture"], num_classes=len(facts["labels"]), image_size=preprocessing.crop)
    with safe_open(run / BEST, framework="pt") as file:
        epoch = int(file.metadata()["epoch"])
    architectures.set_weights(model, safetensors.torch.load_file(run / BEST))
    hint = "; --golden-from FOLDER takes others" if source == "the validation images" else ""
    say(f"golden samples: {len(golden)}, which go into the file, from {source}{hint}")

    def measure(made: Checkpoint) -> dict[str, Any]:
        classifier = Classifier(made, device)
        chunks = even_batches(np.arange(len(val_images)), 256)
        probabilities = torch.cat([classifier.predict(val_images.load(rows)) for rows in chunks])
        return judge(classifier, val_images.samples, probabilities).metrics() | {"epoch": epoch}

    return export(
        out,
        model,
        name=out.stem,
        architecture=facts["architecture"],
        labels=tuple(facts["labels"]),
        preprocessing=preprocessing,
        golden_pixels=golden,
        origin=facts["origin"] | {"golden_samples": source},
        measure=measure,
    )


def _must_be_writable(out: Path) -> None:
    """Hours of training must not end in a file that can't be written. Raises ValueError."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        there = out.exists()
    except OSError as error:
        raise ValueError(f"--out {out}: can't be written there ({error.strerror})") from None
    if there and not out.is_file():
        raise ValueError(f"--out {out}: is there already and no regular file")
    if not os.access(out.parent, os.W_OK):
        raise ValueError(f"--out {out}: its folder is not writable")


@dataclass(frozen=True)
class _Start:
    """What a run begins with."""

    model: nn.Module
    architecture: str
    preprocessing: Preprocessing
    new_head: frozenset[str]  # names of the weights that did not come with the others
    origin: dict[str, Any] | None  # of the weights; None for random ones


def _begin(config: TrainConfig, labels: tuple[str, ...]) -> _Start:
    """The model with the weights of --init, or random ones. Raises CheckpointError and ValueError."""
    if config.init is None:
        assert config.arch is not None
        preprocessing = _resized(architectures.preprocessing_of(config.arch), config.image_size)
        model = architectures.build(config.arch, num_classes=len(labels), image_size=preprocessing.crop)
        say(f"{config.arch} with random weights")
        return _Start(model, config.arch, preprocessing, frozenset(), None)
    loaded = checkpoint.load(config.init)
    header, preprocessing = loaded.header, _resized(loaded.header.preprocessing, config.image_size)
    model = architectures.build(header.architecture, num_classes=len(labels), image_size=preprocessing.crop)
    state = loaded.model.state_dict()
    if labels != header.labels:
        # The head is what depends on the number of classes.
        other = architectures.build(header.architecture, num_classes=len(header.labels) + 1, image_size=header.preprocessing.crop)
        state = {name: state[name] for name, tensor in other.state_dict().items() if tensor.shape == state[name].shape}
    try:
        architectures.set_weights(model, state)
    except RuntimeError:
        raise ValueError(
            f"--image-size {preprocessing.crop}: the weights of {config.init} are for {header.preprocessing.crop} pixels only"
        ) from None
    new_head = {name: weight for name, weight in model.named_parameters() if name not in state}
    for weight in new_head.values():
        # Small: some architectures begin with a head so large that, on good features, the first steps only undo it.
        nn.init.zeros_(weight) if weight.ndim == 1 else nn.init.normal_(weight, std=0.01)
    say(f"{header.architecture} with the weights of {header.name} {header.version}" + (" and a new head" if new_head else ""))
    origin = {"name": header.name, "version": header.version, "licence": header.origin.get("licence", "unknown")}
    return _Start(model, header.architecture, preprocessing, frozenset(new_head), origin)


def _resized(preprocessing: Preprocessing, size: int | None) -> Preprocessing:
    if size is None:
        return preprocessing
    return replace(preprocessing, crop=size, resize=round(preprocessing.resize / preprocessing.crop * size))


def _report_bad(bad: tuple[BadFile, ...], run: Path) -> None:
    if not bad:
        return
    lines = [str(each) for each in bad]
    (run / "bad_files.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for line in lines[:20]:
        say(f"left out: {line}")
    say(f"{len(bad)} files can't be used and are left out; all of them: {run / 'bad_files.txt'}")
