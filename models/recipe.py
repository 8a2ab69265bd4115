"""The recipe of a training run: every choice, its default and what it is for."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from models.labels import as_label
from models.progress import printable


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The recipe of a run; each field but `data` is a flag of `python -m models train`. Raises ValueError naming the flag."""

    data: Path
    init: Annotated[Path | None, "fine-tune this checkpoint: its weights, its preprocessing, and a new head where labels differ"] = None
    arch: Annotated[str | None, "train this architecture (resnet50, timm:NAME) from random weights"] = None
    epochs: Annotated[int, "how often every training image is seen"] = 10
    batch_size: Annotated[int, "images in a step, at most; steps are made equally large"] = 32
    lr: Annotated[float | None, "peak learning rate; default 1e-4 with --init, 1e-3 with --arch"] = None
    weight_decay: Annotated[float, "of AdamW, on weights but not on biases and norms"] = 0.05
    label_smoothing: Annotated[float, "share of the target spread over all labels"] = 0.1
    warmup: Annotated[float, "share of the steps in which the learning rate rises, before it falls as a cosine"] = 0.1
    image_size: Annotated[int | None, "side of the pixels that the model sees; default: as --init, or as published for --arch"] = None
    seed: Annotated[int, "of the head, the order and the augmentation"] = 0
    device: Annotated[str, "auto, cpu, cuda or cuda:1"] = "auto"
    max_bad: Annotated[float, "share of the files that may be unreadable before the run stops"] = 0.01
    golden_from: Annotated[Path | None, "take the golden samples from this folder instead of from the validation images"] = None
    run: Annotated[Path | None, "folder of the run, which must not exist; default runs/DATE-TIME"] = None
    out: Annotated[Path | None, "the checkpoint to write; default checkpoints/NAME-OF-DATA.safetensors"] = None

    def __post_init__(self) -> None:
        def need(condition: bool, name: str, allowed: str) -> None:
            if not condition:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: allowed is {allowed}")

        if (self.init is None) == (self.arch is None):
            raise ValueError("give one of --init CHECKPOINT and --arch NAME")
        need(self.epochs >= 1, "epochs", "1 or more")
        need(self.batch_size >= 1, "batch_size", "1 or more")
        need(self.lr is None or 0 < self.lr < math.inf, "lr", "a number above 0")
        need(0 <= self.weight_decay < math.inf, "weight_decay", "0 or more")
        for name in ("label_smoothing", "warmup", "max_bad"):
            need(0 <= getattr(self, name) <= 1, name, "from 0 to 1")
        need(self.out is None or self.out.suffix == ".safetensors", "out", "a name that ends in .safetensors")
        if as_label(self.checkpoint.stem) is None:
            raise ValueError(f"--out {printable(str(self.checkpoint))}: the model's name is that of the file; give one that can be printed")
        need(0 <= self.seed < 2**63, "seed", "a whole number from 0 to 2^63 - 1")

    @property
    def peak_lr(self) -> float:
        return self.lr or (1e-4 if self.init else 1e-3)

    @property
    def checkpoint(self) -> Path:
        """The file to write."""
        # Not resolved: the name is that of a link, not of what it leads to.
        return self.out or Path("checkpoints") / f"{os.path.basename(os.path.abspath(self.data))}.safetensors"

    def to_dict(self) -> dict[str, Any]:
        """Every field, as JSON can hold it."""
        fields = dataclasses.asdict(self) | {"lr": self.peak_lr}
        return {name: str(value) if isinstance(value, Path) else value for name, value in fields.items()}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> TrainConfig:
        """What `to_dict` gave. Raises TypeError and ValueError."""
        paths = cls._paths()
        values: dict[str, Any] = {name: Path(value) if value and name in paths else value for name, value in fields.items()}
        return cls(**values)

    @classmethod
    def _paths(cls) -> set[str]:
        """The fields that hold paths, which are texts in JSON."""
        return {name for name, kind in get_type_hints(cls).items() if Path in (kind, *get_args(kind))}

    def choices(self) -> dict[str, Any]:
        """The fields that decide the weights, without the paths, which are nobody else's business."""
        return {name: value for name, value in self.to_dict().items() if name not in self._paths()}
