"""The loop that follows a recipe and keeps the best epoch's weights."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

from models import architectures
from models.augmentation import Augmentation
from models.cache import Batch, Cached, even_batches, load_batches
from models.checkpoint import replacing
from models.preprocessing import Preprocessing
from models.progress import Progress, say
from models.recipe import TrainConfig

HEAD_LR = 10.0  # times the learning rate of the other weights, for a head that begins at random on trained features
BEST = "best.safetensors"  # in the run's folder: plain weights, no checkpoint


class Trainer:
    """AdamW with warm-up and cosine, mixed precision, channels_last; keeps the best epoch's weights."""

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        preprocessing: Preprocessing,
        device: torch.device,
        train: Cached,
        val: Cached,
        new_head: frozenset[str] = frozenset(),
    ) -> None:
        self.config, self.preprocessing, self.device, self.train_images, self.val_images = config, preprocessing, device, train, val
        self.model = model.to(device).to(memory_format=torch.channels_last)
        self.norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)]
        self.dtype = _training_dtype(device, preprocessing.crop)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.dtype == torch.float16)  # bf16 has float32's range
        self.optimizer = torch.optim.AdamW(_groups(model, new_head, config.peak_lr, config.weight_decay), fused=True)
        self.steps, self.all_steps = 0, config.epochs * len(even_batches(train.rows, config.batch_size))
        self.augment = Augmentation()
        self.random = torch.Generator().manual_seed(config.seed)

    def _set_lr(self) -> None:
        """A straight rise to the peak, then a cosine to zero at the end."""
        rise = max(1, round(self.config.warmup * self.all_steps))
        share = (self.steps + 1) / rise
        if self.steps >= rise:
            share = 0.5 * (1 + math.cos(math.pi * (self.steps - rise) / (self.all_steps - rise)))
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * share

    def fit(self, run: Path) -> None:
        """Train all epochs; write a line of metrics for each, and the weights of the best: highest top-1, then least loss."""
        best_score = (-1.0, 0.0)
        for epoch in range(1, self.config.epochs + 1):
            started = time.monotonic()
            with Progress(f"epoch {epoch}/{self.config.epochs}", len(self.train_images)) as progress:
                train_loss = self.train_epoch(progress)
                lr, rate = min(group["lr"] for group in self.optimizer.param_groups), progress.rate
            with Progress("validation", len(self.val_images)) as progress:
                val_loss, val_top1 = self.validate(progress)
            facts = {
                "epoch": epoch,
                "train_loss": train_loss,
                "val_loss": val_loss,
                "val_top1": val_top1,
                "val_samples": len(self.val_images),
                "lr": lr,
                "images_per_second": round(rate, 1),
                "seconds": round(time.monotonic() - started, 2),
            }
            with open(run / "metrics.jsonl", "a") as file:
                file.write(json.dumps(facts) + "\n")
            if not math.isfinite(val_loss):
                raise ValueError(f"the validation loss became {val_loss}: lower --lr (now {self.config.peak_lr:g})")
            better = (val_top1, -val_loss) > best_score
            if better:
                best_score = (val_top1, -val_loss)
                _write_weights(self.model, run / BEST, epoch)
            say(
                f"epoch {epoch}/{self.config.epochs}: train loss {train_loss:.4f}, val loss {val_loss:.4f}, top-1 {val_top1:.4f}, "
                f"{rate:.0f} images/s, {facts['seconds']:.0f} s{', the best so far' if better else ''}"
            )

    def train_epoch(self, progress: Progress) -> float:
        """One step for each batch. Returns the mean loss. Raises ValueError where that, or a weight, is no number any more."""
        order = torch.randperm(len(self.train_images), generator=self.random).numpy()
        total = torch.zeros((), device=self.device)
        for batch in load_batches(self.train_images, even_batches(order, self.config.batch_size), self.device):
            total += self.step(batch) * len(batch.targets)
            progress.add(len(batch.targets))
        for tensor in self.model.state_dict().values():
            total += 0 * tensor.sum()  # of all that is no number, one is enough
        mean = float(total) / len(self.train_images)
        if not math.isfinite(mean):
            raise ValueError(f"the loss or a weight is no finite number any more: lower --lr (now {self.config.peak_lr:g})")
        return mean

    def step(self, batch: Batch) -> torch.Tensor:
        """Forward, backward, update. Returns the loss."""
        self.model.train()
        if self.config.init or len(batch.targets) == 1:
            # Features that were learnt keep the statistics they were learnt with: a few small batches have worse ones, and one image none.
            for norm in self.norms:
                norm.eval()
        pixels = self.augment(batch.pixels, batch.aspects, self.preprocessing.crop, self.random)
        logits = self._forward(pixels)
        loss = F.cross_entropy(logits.float(), batch.targets, label_smoothing=self.config.label_smoothing)
        self._set_lr()
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.steps += 1
        return loss.detach()

    @torch.inference_mode()
    def validate(self, progress: Progress) -> tuple[float, float]:
        """Mean loss, without smoothing, and top-1."""
        self.model.eval()
        loss, right = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        for batch in load_batches(self.val_images, even_batches(np.arange(len(self.val_images)), self.config.batch_size), self.device):
            logits = self._forward(batch.pixels).float()
            loss += F.cross_entropy(logits, batch.targets, reduction="sum")
            right += (logits.argmax(1) == batch.targets).sum()
            progress.add(len(batch.targets))
        return float(loss) / len(self.val_images), float(right) / len(self.val_images)

    def _forward(self, pixels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits: torch.Tensor = self.model(self.preprocessing.normalize(pixels, torch.float32))
        return logits


def _groups(model: nn.Module, new_head: frozenset[str], lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """The weights by learning rate and decay. A new head learns faster than the features under it; biases and norms don't decay."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, weight in model.named_parameters():
        key = (lr * HEAD_LR if name in new_head else lr, weight_decay if weight.ndim > 1 else 0.0)
        groups.setdefault(key, []).append(weight)
    return [{"params": weights, "peak": peak, "weight_decay": decay} for (peak, decay), weights in groups.items()]


def _training_dtype(device: torch.device, crop: int) -> torch.dtype:
    """What matrix products are computed in; the weights stay float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    if crop < 64:
        # oneDNN leaves rubbish in bf16 gradients of a strided convolution over a single pixel, which is what such images end as.
        return torch.float32
    return architectures.DTYPES[architectures.fastest_precision(device)]


def _write_weights(model: nn.Module, path: Path, epoch: int) -> None:
    """The old file or the new one, whole, whenever the process ends. Raises OSError."""
    weights = {name: tensor.cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    with replacing(path) as temporary:
        safetensors.torch.save_file(weights, temporary, metadata={"epoch": str(epoch)})
