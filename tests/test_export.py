"""Weights -> a checkpoint that says where it comes from."""

from __future__ import annotations

import datetime
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from PIL import Image

from models import architectures, checkpoint
from models.checkpoint import CheckpointError
from models.export import EXAMPLES, export, golden_from, logits
from models.preprocessing import Preprocessing
from tests.conftest import COLOURS, encode

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
    header = _export(
        tmp_path / "small.safetensors", _model(), temperature=1.25, measure=lambda made: {"top1": 0.5, "samples": len(made.golden_pixels)}
    )
    assert header == checkpoint.read_header(tmp_path / "small.safetensors")
    assert (header.temperature, header.metrics, header.preprocessing) == (1.25, {"top1": 0.5, "samples": 16}, PREPROCESSING)
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


def _fill(folder: Path, colours: list[tuple[int, int, int]]) -> None:
    for index, colour in enumerate(colours):
        (folder / f"{index // 10}").mkdir(exist_ok=True, parents=True)
        (folder / f"{index // 10}" / f"{index:02}.png").write_bytes(encode(colour))


def test_golden_samples_are_spread_over_all_photographs_of_a_folder(tmp_path: Path) -> None:
    _fill(tmp_path, COLOURS)
    pixels = golden_from(tmp_path, PREPROCESSING)
    assert (pixels.dtype, pixels.shape) == (torch.uint8, (16, 32, 32, 3))
    assert pixels[:, 16, 16].tolist() == [list(colour) for colour in COLOURS[::4]]
    assert torch.equal(pixels, golden_from(tmp_path, PREPROCESSING))


def test_hidden_files_count_as_little_as_what_is_no_image(tmp_path: Path) -> None:
    _fill(tmp_path / "good", COLOURS[:16])
    _fill(tmp_path / ".cache", [(7, 7, 7)])
    (tmp_path / "good" / ".hidden.png").write_bytes(encode((7, 7, 7)))
    whole = (tmp_path / "good" / "0" / "03.png").read_bytes()
    (tmp_path / "good" / "0" / "03.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "good" / "notes.txt").write_text("no image")
    found = {tuple(colour) for colour in golden_from(tmp_path, PREPROCESSING)[:, 16, 16].tolist()}
    assert found == {*COLOURS[:16]} - {COLOURS[3]}


@pytest.mark.parametrize("count", [1, 3])
def test_of_few_photographs_there_are_several_views(tmp_path: Path, count: int) -> None:
    for index in range(count):
        Image.effect_noise((120 + index, 80), 100).convert("RGB").save(tmp_path / f"{index}.png")
    assert len(golden_from(tmp_path, PREPROCESSING).flatten(1).unique(dim=0)) == 16


def test_a_photograph_of_one_pixel_has_views_too(tmp_path: Path) -> None:
    (tmp_path / "dot.png").write_bytes(encode((1, 2, 3), size=(1, 1)))
    assert golden_from(tmp_path, PREPROCESSING).unique().tolist() == [1, 2, 3]


def test_a_folder_without_photographs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no image")
    for folder, problem in (
        (tmp_path, "no image in it that can be read"),
        (tmp_path / "absent", "no such folder"),
        (tmp_path / "notes.txt", "not a folder"),
    ):
        with pytest.raises(ValueError, match=f"^{folder}: {problem}; golden samples are taken from photographs$"):
            golden_from(folder, PREPROCESSING)


def test_the_examples_give_sixteen_views(tmp_path: Path) -> None:
    assert len(golden_from(EXAMPLES, PREPROCESSING).flatten(1).unique(dim=0)) == 16
