"""Weights -> a checkpoint that says where it comes from."""

from __future__ import annotations

import datetime
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from models import architectures, checkpoint
from models.checkpoint import CheckpointError
from models.export import export, logits
from models.preprocessing import Preprocessing

PREPROCESSING = Preprocessing(resize=36, crop=32, interpolation="bicubic", mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.3))


def _export(path: Path, model: torch.nn.Module, **changes: object) -> checkpoint.Header:
    pixels = torch.randint(0, 256, (16, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    facts = {
        "name": "small",
        "architecture": "timm:test_efficientnet",
        "labels": ("a", "b", "c"),
        "preprocessing": PREPROCESSING,
        "golden_pixels": pixels,
        "origin": {"data": "noise"},
    }
    return export(path, model, **(facts | changes))  # type: ignore[arg-type]


def _model() -> torch.nn.Module:
    return architectures.build("timm:test_efficientnet", num_classes=3, image_size=32)


def test_the_golden_logits_are_those_of_the_model_in_evaluation_mode(tmp_path: Path) -> None:
    model = _model().train()  # as training leaves it: batch norms would take their figures from the batch
    _export(tmp_path / "small.safetensors", model)
    found = checkpoint.load(tmp_path / "small.safetensors")
    with torch.no_grad():
        expected = model.eval()(PREPROCESSING.normalize(found.golden_pixels, torch.float32))
    torch.testing.assert_close(found.golden_logits, expected)
    torch.testing.assert_close(logits(found.model, found.header.preprocessing, found.golden_pixels[3:4]), expected[3:4])


def test_the_header_holds_what_was_given_and_how_it_was_made(tmp_path: Path) -> None:
    header = _export(tmp_path / "small.safetensors", _model(), temperature=1.25, metrics={"top1": 0.5})
    assert header == checkpoint.read_header(tmp_path / "small.safetensors")
    assert (header.temperature, header.metrics, header.preprocessing) == (1.25, {"top1": 0.5}, PREPROCESSING)
    assert header.origin["data"] == "noise"
    assert header.origin["libraries"]["torch"] == version("torch")
    made = datetime.datetime.fromisoformat(header.origin["time"])
    assert abs(datetime.datetime.now(datetime.UTC) - made) < datetime.timedelta(minutes=1)


@pytest.mark.parametrize(
    ("change", "field"),
    [({"labels": ("a", "b")}, "golden.logits"), ({"labels": ("a", "b", "a")}, "labels"), ({"architecture": "resnet18"}, "model.")],
)
def test_parts_that_do_not_fit_are_refused_and_nothing_is_written(tmp_path: Path, change: dict[str, object], field: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        _export(tmp_path / "small.safetensors", _model(), **change)
    assert caught.value.field.startswith(field)
    assert list(tmp_path.iterdir()) == []
