"""A folder of labelled photographs -> a run -> the checkpoint of its best epoch."""

from __future__ import annotations

import datetime
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import nn

from models import architectures, checkpoint
from models.cache import cache_pictures, cache_pixels, even_batches
from models.checkpoint import GOLDEN_SAMPLES, Checkpoint, Header
from models.data import BadFile, check_bad, find_splits
from models.evaluation import Classifier, find_device, judge, keep_freed_memory
from models.export import export, golden_from
from models.preprocessing import Preprocessing
from models.progress import say
from models.recipe import TrainConfig
from models.training import BEST, Trainer


def train(config: TrainConfig) -> Header:
    """Train as `config` says, and write the checkpoint of the best epoch. Returns its header.

    Raises DataError, CheckpointError and ValueError, in words for the user, before anything is written; OSError where that fails later.
    """
    device = find_device(config.device)
    keep_freed_memory(device)
    run = config.run or Path("runs") / datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    if run.exists():
        raise ValueError(f"--run {run}: is there already; name another, or remove it")
    out = config.checkpoint
    _must_be_writable(out)
    train_samples, val_samples = find_splits(config.data)
    labels = train_samples.labels
    torch.manual_seed(config.seed)
    start = _begin(config, labels)
    preprocessing = start.preprocessing

    train_images = cache_pictures(run.parent / ".cache", train_samples, preprocessing)
    val_images = cache_pixels(run.parent / ".cache", val_samples, preprocessing)
    bad = (*train_images.bad, *val_images.bad)
    check_bad(bad, len(train_samples.files) + len(val_samples.files), config.max_bad)
    if config.golden_from:
        golden, source = golden_from(config.golden_from, preprocessing), f"{config.golden_from.resolve().name}/"
    else:
        golden = val_images.load(np.linspace(0, len(val_images) - 1, GOLDEN_SAMPLES).astype(np.intp))  # they are in order of labels
        source = "the validation images"

    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(config.to_dict() | {"labels": labels}, indent=2, ensure_ascii=False))
    _report_bad(bad, run)
    say(f"{len(labels)} classes, {len(train_images)} images for training, {len(val_images)} for validation; {run}")

    try:
        best = Trainer(config, start.model, preprocessing, device, train_images, val_images, start.new_head).fit(run)
    except torch.OutOfMemoryError as error:
        raise MemoryError(f"{str(error).splitlines()[0]}; lower --batch-size or --image-size") from None
    except KeyboardInterrupt:
        say(f"no checkpoint is written; weights of the best epoch so far, if one was complete: {run / BEST}")
        raise

    model = architectures.build(start.architecture, num_classes=len(labels), image_size=preprocessing.crop)
    model.load_state_dict(safetensors.torch.load_file(run / BEST))
    hint = "" if config.golden_from else "; --golden-from FOLDER takes others"
    say(f"golden samples: {len(golden)}, which go into the file, from {source}{hint}")

    def measure(made: Checkpoint) -> dict[str, Any]:
        classifier = Classifier(made, device)
        chunks = even_batches(np.arange(len(val_images)), 256)
        probabilities = torch.cat([classifier.predict(val_images.load(rows)) for rows in chunks])
        return judge(classifier, val_images.samples, probabilities).metrics() | {"epoch": best}

    return export(
        out,
        model,
        name=out.stem,
        architecture=start.architecture,
        labels=labels,
        preprocessing=preprocessing,
        golden_pixels=golden,
        origin={
            "data": {
                "name": config.data.resolve().name,
                "train": train_images.samples.counts(),
                "val": val_images.samples.counts(),
                "bad_files": len(bad),
            },
            "recipe": config.choices(),
            "init": start.origin,
            "golden_samples": source,
        },
        measure=measure,
    )


def _must_be_writable(out: Path) -> None:
    """Hours of training must not end in a file that can't be written. Raises ValueError."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out}: its folder can't be made ({error.strerror})") from None
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        raise ValueError(f"--out {out}: {'is a folder' if out.is_dir() else 'its folder is not writable'}")


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
        new_head = model.load_state_dict(state, strict=False).missing_keys
    except RuntimeError:
        raise ValueError(
            f"--image-size {preprocessing.crop}: the weights of {config.init} are for {header.preprocessing.crop} pixels only"
        ) from None
    for name in new_head:
        # Small: some architectures begin with a head so large that, on good features, the first steps only undo it.
        weight = model.get_parameter(name)
        nn.init.zeros_(weight) if weight.ndim == 1 else nn.init.normal_(weight, std=0.01)
    say(f"{header.architecture} with the weights of {header.name} {header.version}" + (" and a new head" if new_head else ""))
    origin = {"name": header.name, "version": header.version, "origin": header.origin}
    return _Start(model, header.architecture, preprocessing, frozenset(new_head), origin)


def _resized(preprocessing: Preprocessing, size: int | None) -> Preprocessing:
    if size is None:
        return preprocessing
    return replace(preprocessing, crop=size, resize=round(preprocessing.resize / preprocessing.crop * size))


def _report_bad(bad: tuple[BadFile, ...], run: Path) -> None:
    if not bad:
        return
    lines = [f"{each.file}: {each.reason}" for each in bad]
    (run / "bad_files.txt").write_text("\n".join(lines) + "\n", errors="surrogateescape")
    for line in lines[:20]:
        say(f"left out: {line}")
    say(f"{len(bad)} files can't be used and are left out; all of them: {run / 'bad_files.txt'}")
