"""The recipe is checked, the steps do what it says, and the best epoch is the one that is kept."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from models import architectures, training
from models.cache import Batch, cache_pictures, cache_pixels, load_batches
from models.data import find_splits
from models.preprocessing import Preprocessing
from models.progress import Progress
from models.recipe import TrainConfig
from models.training import BEST, Trainer
from tests.conftest import make_data

PREPROCESSING = Preprocessing(resize=36, crop=32, interpolation="bilinear", mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))


def trainer(data: Path, **changes: Any) -> Trainer:
    """From random weights, with one step of 0.4 MB taking some ten milliseconds."""
    config = TrainConfig(**{"data": data, "arch": "timm:test_efficientnet", "epochs": 2, "batch_size": 8, **changes})
    train, val = find_splits(data)
    torch.manual_seed(config.seed)
    model = architectures.build("timm:test_efficientnet", num_classes=len(train.labels), image_size=32)
    cache = data.parent / "cache"
    images = cache_pictures(cache, train, PREPROCESSING), cache_pixels(cache, val, PREPROCESSING)
    return Trainer(config, model, PREPROCESSING, torch.device("cpu"), *images)


def fit(data: Path, name: str, **changes: Any) -> tuple[int, list[dict[str, Any]], dict[str, torch.Tensor]]:
    """The epoch whose weights were kept, the lines of metrics.jsonl, and the weights."""
    run = data.parent / name
    run.mkdir()
    trainer(data, **changes).fit(run)
    with safe_open(run / BEST, framework="pt") as file:
        best = int(file.metadata()["epoch"])
    return best, [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()], load_file(run / BEST)


def test_colours_are_learnt_and_the_best_epoch_is_kept(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data", "ab", train=16, val=8)
    best, lines, weights = fit(data, "run", epochs=12, lr=0.003)
    scores = [(line["val_top1"], -line["val_loss"]) for line in lines]
    assert scores[best - 1] == max(scores)
    assert max(scores)[0] >= 0.9
    assert lines[-1]["train_loss"] < lines[0]["train_loss"]
    assert set(lines[0]) == {"epoch", "train_loss", "val_loss", "val_top1", "val_samples", "lr", "images_per_second", "seconds"}
    assert [line["epoch"] for line in lines] == list(range(1, 13))
    found = trainer(data)
    found.model.load_state_dict(weights)
    with Progress("again", 16) as progress:
        assert found.validate(progress)[1] == max(scores)[0]


def test_the_same_seed_gives_the_same_weights_and_another_gives_others(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data", "ab")
    first, again, other = (fit(data, name, seed=seed, epochs=1)[2] for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["conv_stem.weight"], other["conv_stem.weight"])


@pytest.mark.parametrize(
    ("files", "batch_size", "sizes"), [(9, 4, [3, 3, 3]), (9, 8, [5, 4]), (17, 16, [9, 8]), (1, 8, [2]), (1, 1, [1, 1])]
)
def test_every_image_is_trained_on_once_an_epoch_whatever_the_batch_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int, batch_size: int, sizes: list[int]
) -> None:
    data = make_data(tmp_path / "data", "ab", train=1, val=1)
    for number in range(1, files - 1):
        (data / "train/a" / f"more {number}.png").write_bytes((data / "train/a/0.png").read_bytes())
    found = trainer(data, batch_size=batch_size, epochs=1)
    seen: list[int] = []
    step = found.step

    def counting(batch: Batch) -> torch.Tensor:
        seen.append(len(batch.targets))
        return step(batch)

    monkeypatch.setattr(found, "step", counting)
    (tmp_path / "run").mkdir()
    found.fit(tmp_path / "run")
    assert seen == sizes
    assert found.steps == found.all_steps == len(sizes)
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text())["val_samples"] == 2


def test_a_batch_of_one_does_not_touch_batch_statistics_and_the_next_does(tmp_path: Path) -> None:
    found = trainer(make_data(tmp_path / "data", "ab", train=2))
    # A norm over one value for each channel, where torch raises.
    found.model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 2))
    found.norms = [module for module in found.model if isinstance(module, nn.BatchNorm2d)]
    one, three = (next(load_batches(found.train_images, [torch.arange(count).numpy()], found.device)) for count in (1, 3))
    for _ in range(2):
        before = found.norms[0].num_batches_tracked
        assert before is not None
        count = int(before)
        assert math.isfinite(found.step(one))
        assert found.norms[0].num_batches_tracked == count
        found.step(three)
        assert found.norms[0].num_batches_tracked == count + 1


def test_a_checkpoint_keeps_its_batch_statistics_and_random_weights_get_theirs(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data", "ab")
    for changes, learnt in (({}, True), ({"arch": None, "init": Path("a.safetensors")}, False)):
        found = trainer(data, **changes)
        mean = found.norms[0].running_mean
        assert mean is not None
        before = mean.clone()
        found.step(next(load_batches(found.train_images, [torch.arange(4).numpy()], found.device)))
        assert torch.equal(mean, before) != learnt


def test_the_learning_rate_rises_to_its_peak_and_falls_as_a_cosine(tmp_path: Path) -> None:
    found = trainer(make_data(tmp_path / "data", "ab", train=20), batch_size=4, epochs=2, lr=0.5, warmup=0.2)
    rates = []
    for found.steps in range(20):
        found._set_lr()
        rates.append(found.optimizer.param_groups[0]["lr"])
    assert found.all_steps == 20
    assert rates[:5] == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5])
    assert rates[12] == pytest.approx(0.25)
    assert 0 < rates[-1] < 0.01
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_biases_and_norms_do_not_decay_and_a_new_head_learns_faster() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Linear(4, 2))
    groups = training._groups(model, frozenset({"2.weight", "2.bias"}), 0.1, 0.05)
    found = {(group["peak"], group["weight_decay"]): [tuple(weight.shape) for weight in group["params"]] for group in groups}
    assert found == {(0.1, 0.05): [(4, 3, 1, 1)], (0.1, 0.0): [(4,), (4,), (4,)], (1.0, 0.05): [(2, 4)], (1.0, 0.0): [(2,)]}


def test_a_loss_or_a_weight_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data", "ab")
    (tmp_path / "run").mkdir()
    for harm in ("conv_stem.weight", "unused"):
        found = trainer(data, lr=0.25)
        found.model.register_parameter("unused", nn.Parameter(torch.zeros(3)))  # as a kernel's taps are that see nothing but padding
        found.model.get_parameter(harm).data[0] = torch.nan
        with pytest.raises(ValueError, match=r"the loss or a weight is no finite number any more: lower --lr \(now 0.25\)"):
            found.fit(tmp_path / "run")
        assert list((tmp_path / "run").iterdir()) == []


def test_a_validation_loss_that_is_no_number_is_never_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    found = trainer(make_data(tmp_path / "data", "ab"))
    monkeypatch.setattr(found, "validate", lambda _: (math.nan, 1.0))
    with pytest.raises(ValueError, match=r"the validation loss became nan: lower --lr \(now 0.001\)"):
        found.fit(tmp_path / "run")
    assert not (tmp_path / "run" / BEST).exists()


def test_mixed_precision_is_what_the_device_does_well(monkeypatch: pytest.MonkeyPatch) -> None:
    for supported, dtype in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda supported=supported, **_: supported)
        assert training._training_dtype(torch.device("cuda"), 32) == dtype
    for fastest, crop, dtype in (("bf16", 64, torch.bfloat16), ("bf16", 63, torch.float32), ("fp32", 224, torch.float32)):
        monkeypatch.setattr(architectures, "fastest_precision", lambda _, fastest=fastest: fastest)
        assert training._training_dtype(torch.device("cpu"), crop) == dtype


def test_float16_scales_its_gradients_and_skips_a_step_that_overflows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_training_dtype", lambda *_: torch.float16)
    found = trainer(make_data(tmp_path / "data", "ab"))
    assert found.scaler.is_enabled()
    (batch,) = load_batches(found.train_images, [torch.arange(6).numpy()], found.device)
    before = {name: weight.clone() for name, weight in found.model.named_parameters()}
    found.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    assert math.isfinite(found.step(batch))
    assert all(torch.equal(weight, before[name]) for name, weight in found.model.named_parameters())
    assert found.scaler.get_scale() < 2.0**60
    found.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    found.step(batch)
    assert not torch.equal(found.model.get_parameter("conv_stem.weight"), before["conv_stem.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": None}, "give one of --init CHECKPOINT and --arch NAME"),
        ({"init": Path("a.safetensors")}, "give one of --init CHECKPOINT and --arch NAME"),
        ({"epochs": 0}, "--epochs 0: allowed is 1 or more"),
        ({"batch_size": -1}, "--batch-size -1: allowed is 1 or more"),
        ({"lr": 0.0}, "--lr 0.0: allowed is a number above 0"),
        ({"lr": math.nan}, "--lr nan: allowed is a number above 0"),
        ({"weight_decay": -0.1}, "--weight-decay -0.1: allowed is 0 or more"),
        ({"max_bad": 1.5}, "--max-bad 1.5: allowed is from 0 to 1"),
        ({"label_smoothing": math.nan}, "--label-smoothing nan: allowed is from 0 to 1"),
        ({"seed": -1}, "--seed -1: allowed is a whole number from 0"),
    ],
)
def test_a_wrong_value_is_refused_by_its_flag(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        TrainConfig(**{"data": Path("data"), "arch": "resnet18", **change})
    assert str(caught.value).startswith(message)
