"""The contract: what `save` writes `load` gives back, and everything that is not exactly so is refused by file and field."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from models import checkpoint
from models.checkpoint import Bounds, CheckpointError, fidelity
from tests.conftest import make_tiny, with_another_weight

Tensors = dict[str, torch.Tensor]
HEAD = "model.classifier.weight"


def rewrite(source: Path, target: Path, header: Callable[[dict[str, Any]], object], tensors: Callable[[Tensors], object]) -> Path:
    """Copy a checkpoint with its header and its tensors changed in place by two functions."""
    contents = safetensors.torch.load_file(source)
    with safe_open(source, framework="pt") as file:
        document = json.loads(file.metadata()["spyglass"])
    header(document)
    tensors(contents)
    safetensors.torch.save_file(contents, target, metadata={"spyglass": json.dumps(document)})
    return target


def nothing(_: object) -> None:
    pass


def refusal(path: Path) -> str:
    """The field that `load` names, and what it says about it."""
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path)
    error, message = caught.value, str(caught.value)
    assert message == (f"{path}: {error.problem}" if error.field == "file" else f"{path}: {error.field}: {error.problem}")
    assert "\n" not in message
    return f"{error.field}: {error.problem}"


def test_what_is_saved_is_what_is_loaded(tiny: Path, tmp_path: Path) -> None:
    first = checkpoint.load(tiny)
    checkpoint.save(tmp_path / "new folder" / "copy.safetensors", first)
    second = checkpoint.load(tmp_path / "new folder" / "copy.safetensors")
    assert second.header == first.header == checkpoint.read_header(tiny)
    assert torch.equal(second.golden_pixels, first.golden_pixels)
    assert torch.equal(second.golden_logits, first.golden_logits)
    before, after = first.model.state_dict(), second.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    assert not second.model.training
    assert not any(weight.requires_grad for weight in second.model.parameters())


def test_an_unchanged_copy_of_the_test_subject_is_not_refused(tiny: Path, tmp_path: Path) -> None:
    checkpoint.load(rewrite(tiny, tmp_path / "same.safetensors", nothing, nothing))  # so it is the change that the others refuse


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop("model.conv_stem.weight"), "model.conv_stem.weight: missing"),
        (lambda t: (t.pop("model.bn1.bias"), t.pop("model.bn1.weight")), "model.bn1.bias: missing (and 1 more)"),
        (lambda t: t.update({"model.new.weight": torch.zeros(1)}), "model.new.weight: not a weight of timm:test_efficientnet"),
        (lambda t: t.update({"model.bn1.bias": torch.zeros(3)}), "model.bn1.bias: has shape [3], timm:test_efficientnet needs [24]"),
        (lambda t: t.update({"model.bn1.bias": t["model.bn1.bias"].half()}), "model.bn1.bias: is torch.float16, must be torch.float32"),
        (lambda t: t.update({"model.bn1.num_batches_tracked": torch.zeros(())}), "model.bn1.num_batches_tracked: is torch.float32"),
        (lambda t: t.update({HEAD: t[HEAD][:9].clone()}), "labels: 10 labels, but the head model.classifier.weight has 9 rows"),
        (lambda t: t.update({"model.classifier.bias": torch.zeros(11)}), "labels: 10 labels, but the head model.classifier.bias has 11"),
        (lambda t: t[HEAD][3, 5].neg_(), "version: the header says"),
        (lambda t: t["model.bn1.num_batches_tracked"].add_(1), "version: the header says"),
        (lambda t: t.pop("golden.pixels"), "golden.pixels: missing"),
        (lambda t: t.pop("golden.logits"), "golden.logits: missing"),
        (lambda t: t.update({"golden.pixels": t["golden.pixels"][:15].clone()}), "golden.pixels: must be uint8 [16, 32, 32, 3]"),
        (lambda t: t.update({"golden.pixels": t["golden.pixels"].float()}), "golden.pixels: must be uint8 [16, 32, 32, 3]"),
        (lambda t: t.update({"golden.logits": t["golden.logits"][:, :9].clone()}), "golden.logits: must be float32 [16, 10]"),
        (
            lambda t: t.update({"golden.logits": t["golden.logits"].double()}),
            "golden.logits: must be float32 [16, 10], is float64",
        ),
        (lambda t: t["golden.logits"][15, 9].fill_(torch.nan), "golden.logits: not all numbers are finite"),
        (lambda t: t["golden.logits"][0, 0].fill_(-torch.inf), "golden.logits: not all numbers are finite"),
        (lambda t: t.update({"optimizer": torch.zeros(1)}), "optimizer: a tensor that is neither model.* nor golden.*"),
        (lambda t: t.update({"golden.extra": torch.zeros(1)}), "golden.extra: a tensor that is neither"),
    ],
)
def test_wrong_tensors_are_refused_by_name(tiny: Path, tmp_path: Path, change: Callable[[Tensors], object], expected: str) -> None:
    assert refusal(rewrite(tiny, tmp_path / "bad.safetensors", nothing, change)).startswith(expected)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda h: h.update(format=2), "format: 2 is unknown to this version, which reads format 1"),
        (lambda h: h.update(format=True), "format: True is unknown"),
        (lambda h: h.update(format="1"), "format: '1' is unknown"),
        (lambda h: h.pop("format"), "format: None is unknown"),
        (lambda h: h.pop("labels"), "labels: missing from the header"),
        (lambda h: (h.pop("origin"), h.pop("metrics")), "metrics, origin: missing from the header"),
        (lambda h: h.update(licence="MIT"), "licence: not a field of format 1"),
        (lambda h: h.update(name=""), "name: must be a text that is not empty"),
        (lambda h: h.update(architecture=5), "architecture: must be a text"),
        (lambda h: h.update(architecture="resnet51"), "architecture: unknown architecture 'resnet51' (close: resnet"),
        (lambda h: h.update(version="0" * 12), "version: the header says 000000000000, the contents give"),
        (lambda h: h.update(version=None), "version: must be a text"),
        (lambda h: h["labels"].__setitem__(slice(0, 2), ["label 1", "label 0"]), "version: the header says"),
        (lambda h: h["labels"].pop(), "golden.logits: must be float32 [16, 9]"),
        (lambda h: h["labels"].__setitem__(9, "label 3"), "labels: each label must be there once; more than once: 'label 3'"),
        (lambda h: h["labels"].__setitem__(9, ""), "labels: must be a list of texts"),
        (lambda h: h["labels"].__setitem__(9, 9), "labels: must be a list of texts"),
        (lambda h: h["labels"].__setitem__(9, "\ud800"), "labels: must be a list of texts"),  # no JSON answer could carry it
        (lambda h: h.update(name="\ud800"), "name: must be a text"),
        (lambda h: h.update(labels=[*map(str, range(100_000)), "7"]), "labels: each label must be there once; more than once: '7'"),
        (lambda h: h.update(labels="ten labels"), "labels: must be a list of texts"),
        (lambda h: h.update(labels=["only"]), "labels: a classifier needs at least two labels, there is 1"),
        (lambda h: h.update(labels=[]), "labels: a classifier needs at least two labels, there is 0"),
        (lambda h: h.update(preprocessing=None), "preprocessing: must be a JSON object"),
        (lambda h: h["preprocessing"].pop("mean"), "preprocessing: preprocessing.mean is missing"),
        (lambda h: h["preprocessing"].update(zoom=2), "preprocessing: preprocessing.zoom is unknown"),
        (lambda h: h["preprocessing"].update(crop=33), "preprocessing: preprocessing.crop is 33; allowed is at most resize"),
        (lambda h: h["preprocessing"].update(std=[1, 1, 0]), "preprocessing: preprocessing.std is (1, 1, 0)"),
        (lambda h: h["preprocessing"].update(mean=[0.5, 0.5, 0.4]), "version: the header says"),
        (lambda h: h.update(metrics=[]), "metrics: must be a JSON object"),
        (lambda h: h.update(origin="web"), "origin: must be a JSON object"),
        *((lambda h, bad=bad: h.update(temperature=bad), "temperature: must be a positive number") for bad in (0, -1.5, "1", None, True)),
        (lambda h: h.update(temperature=float("nan")), "temperature: must be a positive number, not nan"),
        (lambda h: h.update(temperature=float("inf")), "temperature: must be a positive number, not inf"),
        (lambda h: h.update(temperature=10**400), "temperature: must be a positive number"),
        (lambda h: h["preprocessing"].update(mean=[10**400, 0, 0]), "preprocessing: preprocessing.mean"),
        (lambda h: h.update(temperature=1.5), "version: the header says"),
    ],
)
def test_a_wrong_header_is_refused_by_field(tiny: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], expected: str) -> None:
    assert refusal(rewrite(tiny, tmp_path / "bad.safetensors", change, nothing)).startswith(expected)


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (b"", "file: not a readable safetensors file"),
        (b"\xff\xd8\xff\xe0 a photograph, perhaps", "file: not a readable safetensors file"),
        (struct.pack("<Q", 2**60) + b"{}", "file: not a readable safetensors file"),
        (safetensors.torch.save({"weight": torch.zeros(2)}), "spyglass: not in the safetensors header: plain weights"),
        (safetensors.torch.save({"weight": torch.zeros(2)}, metadata={"spyglass": "{"}), "spyglass: not valid JSON"),
        (safetensors.torch.save({"weight": torch.zeros(2)}, metadata={"spyglass": "[]"}), "spyglass: not a JSON object"),
        (safetensors.torch.save({"weight": torch.zeros(2)}, metadata={"spyglass": "[" * 100_000}), "spyglass: not valid JSON"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path, contents: bytes, expected: str) -> None:
    (tmp_path / "strange.safetensors").write_bytes(contents)
    assert refusal(tmp_path / "strange.safetensors").startswith(expected)


def test_a_file_cut_off_anywhere_is_refused(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    for length in (7, 8, 200, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.safetensors").write_bytes(whole[:length])
        assert refusal(tmp_path / "cut.safetensors").startswith("file: not a readable safetensors file")


def test_a_missing_file_is_refused_and_the_remedy_named(tmp_path: Path) -> None:
    assert re.match(r"file: no such file; `\S*python\S* -m models pull efficientnet_lite0` makes", refusal(tmp_path / "none.safetensors"))
    (tmp_path / "some.safetensors").touch()
    assert refusal(tmp_path / "none.safetensors") == f"file: no such file; {tmp_path} has some.safetensors"
    assert refusal(tmp_path).startswith("file: not a regular file")
    os.mkfifo(tmp_path / "pipe.safetensors")  # opening it would wait for ever
    assert refusal(tmp_path / "pipe.safetensors").startswith("file: not a regular file")


class Payload:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_a_pickle_is_refused_without_being_opened(tmp_path: Path, kind: str) -> None:
    path, trace = tmp_path / "weights.safetensors", tmp_path / "trace"
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Payload(trace)))
        pickle.loads(path.read_bytes())
        assert trace.exists()  # it bites whoever opens it
        trace.unlink()
    else:
        torch.save({"weight": torch.zeros(2), "more": Payload(trace)}, path)
    assert refusal(path).startswith("file: not a readable safetensors file")
    assert not trace.exists()


def test_equal_models_have_equal_versions_and_different_ones_different(tiny: Path, tmp_path: Path) -> None:
    again = make_tiny(tmp_path / "again.safetensors")
    assert checkpoint.read_header(again).version == checkpoint.read_header(tiny).version
    found = checkpoint.load(tiny)
    header, state = found.header, found.model.state_dict()
    facts: dict[str, Any] = {"labels": header.labels, "preprocessing": header.preprocessing, "temperature": 1.0}
    versions = [
        checkpoint.version_of(state, **facts),
        checkpoint.version_of(state, **facts | {"labels": header.labels[::-1]}),
        checkpoint.version_of(state, **facts | {"temperature": 1.1}),
        checkpoint.version_of(state, **facts | {"preprocessing": replace(header.preprocessing, background=(0, 0, 0))}),
        checkpoint.version_of(state | {"conv_stem.weight": state["conv_stem.weight"].roll(1)}, **facts),
        checkpoint.version_of(state | {"bn1.bias": state["bn1.weight"], "bn1.weight": state["bn1.bias"]}, **facts),
    ]
    assert versions[0] == header.version
    assert len(set(versions)) == len(versions)


def test_channels_last_weights_are_saved_and_mean_the_same(tiny: Path, tmp_path: Path) -> None:
    found = checkpoint.load(tiny)
    moved = replace(found, model=found.model.to(memory_format=torch.channels_last))
    stem = moved.model.get_parameter("conv_stem.weight")
    assert not stem.is_contiguous()
    checkpoint.save(tmp_path / "moved.safetensors", moved)
    assert (tmp_path / "moved.safetensors").read_bytes() == tiny.read_bytes()


def test_weights_that_are_no_numbers_are_not_saved(tiny: Path, tmp_path: Path) -> None:
    found = checkpoint.load(tiny)
    found.model.get_parameter("conv_stem.weight").data[0, 0, 0, 0] = torch.nan
    header = found.header
    version = checkpoint.version_of(found.model.state_dict(), header.labels, header.preprocessing, header.temperature)
    with pytest.raises(CheckpointError, match=r"model.conv_stem.weight: is not finite everywhere"):
        checkpoint.save(tmp_path / "x.safetensors", replace(found, header=replace(header, version=version)))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_oserror(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(OSError, match=rf"^{tmp_path}/x.safetensors: can't be written \(No space left on device\)"):
        checkpoint.save(tmp_path / "x.safetensors", checkpoint.load(tiny))


def test_a_model_that_load_would_refuse_is_not_saved(tiny: Path, tmp_path: Path) -> None:
    found = checkpoint.load(tiny)
    path = tmp_path / "kept.safetensors"
    checkpoint.save(path, found)
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="version"):
        checkpoint.save(path, replace(found, header=replace(found.header, temperature=2.0)))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["kept.safetensors"]


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
def test_an_error_while_saving_leaves_the_old_file_and_nothing_else(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "kept.safetensors"
    path.write_bytes(b"the old one")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(f"os.{step}", fail)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(path, checkpoint.load(tiny))
    assert path.read_bytes() == b"the old one"
    assert os.listdir(tmp_path) == ["kept.safetensors"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_process_killed_while_saving_leaves_the_old_file(tiny: Path, tmp_path: Path, step: str) -> None:
    path = tmp_path / "kept.safetensors"
    path.write_bytes(b"the old one")
    code = f"""
import os, signal, sys
from pathlib import Path
from models import checkpoint
found = checkpoint.load(Path(sys.argv[1]))
os.{step} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
checkpoint.save(Path(sys.argv[2]), found)
"""
    ended = subprocess.run([sys.executable, "-c", code, tiny, path], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert path.read_bytes() == b"the old one"
    checkpoint.save(path, checkpoint.load(tiny))  # and the next save is not hindered by what was left
    assert path.read_bytes() == tiny.read_bytes()


def test_the_header_is_read_without_torch_and_without_the_weights(tiny: Path, tmp_path: Path) -> None:
    length = 8 + struct.unpack("<Q", tiny.read_bytes()[:8])[0]
    sparse = tmp_path / "sparse.safetensors"
    sparse.write_bytes(tiny.read_bytes()[:length])
    os.truncate(sparse, tiny.stat().st_size)  # the weights are a hole: version, shapes and numbers would all be wrong
    code = """
import sys
from pathlib import Path
from models.checkpoint import read_header
print(read_header(Path(sys.argv[1])).labels[9], "torch" in sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", code, sparse], capture_output=True, text=True, check=True)
    assert ended.stdout == "label 9 False\n"
    with pytest.raises(CheckpointError):
        checkpoint.load(sparse)


def test_the_golden_samples_are_read_without_torch_and_the_weights_are_checked_all_the_same(tiny: Path, tmp_path: Path) -> None:
    loaded, golden = checkpoint.load(tiny), checkpoint.read_golden(tiny)
    assert golden.header == loaded.header
    assert np.array_equal(golden.pixels, loaded.golden_pixels)
    np.testing.assert_allclose(golden.probabilities, loaded.golden_logits.softmax(1), rtol=0, atol=1e-6)
    code = """
import sys
from pathlib import Path
from models.checkpoint import read_golden
print(len(read_golden(Path(sys.argv[1])).pixels), "torch" in sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", code, tiny], capture_output=True, text=True, check=True)
    assert ended.stdout == "16 False\n"
    changed = with_another_weight(tiny, tmp_path / "changed.safetensors")
    with pytest.raises(CheckpointError, match=r"version: the header says .*: the file was changed"):
        checkpoint.read_golden(changed)


def test_the_header_is_read_in_milliseconds(default_checkpoint: Path) -> None:
    took = []
    for _ in range(5):
        begun = time.perf_counter()
        checkpoint.read_header(default_checkpoint)
        took.append(time.perf_counter() - begun)
    assert min(took) < 0.02


CLEAR = np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]], np.float32)
NEAR = np.array([[0.45, 0.44, 0.11], [0.1, 0.1, 0.8]], np.float32)
LOOSE = Bounds(0.1, 0.2)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_not_finite_is_never_within_bounds(wrong: float) -> None:
    found = CLEAR.copy()
    found[1, 0] = wrong
    assert fidelity(found, CLEAR, Bounds(np.inf, np.inf)) == (False, "not all probabilities are finite")


def test_a_flip_counts_only_where_the_two_best_were_apart() -> None:
    swapped = NEAR[:, [1, 0, 2]]
    assert fidelity(swapped, NEAR, LOOSE)[0]
    good, figures = fidelity(CLEAR[:, [1, 0, 2]], CLEAR, Bounds(1.0, 0.5))  # the labels differ by exactly the bound: clear
    assert not good
    assert figures.startswith("1 of 2 labels differ")


def test_the_bounds_are_on_the_top_label_on_average_and_on_any_at_most() -> None:
    found = CLEAR + np.array([[-0.06, 0.06, 0.0], [0.0, 0.0, 0.0]], np.float32)
    assert fidelity(found, CLEAR, Bounds(0.031, 0.061))[0]
    assert not fidelity(found, CLEAR, Bounds(0.029, 0.061))[0]
    assert not fidelity(found, CLEAR, Bounds(0.031, 0.059))[0]
    figures = fidelity(found, CLEAR, Bounds(0.031, 0.061))[1]
    assert "off by 0.0300 on average (allowed 0.031), any by 0.0600 at most (allowed 0.061)" in figures
