"""Evaluation counts what the checkpoint answers, in the precision in which it is served."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from models import architectures, checkpoint
from models.checkpoint import BOUNDS, Bounds, CheckpointError, FidelityError
from models.data import DataError, find_samples
from models.evaluation import Classifier, Evaluation, evaluate, find_device, judge
from models.export import logits
from tests.conftest import encode

CPU = torch.device("cpu")


@pytest.fixture
def photographs(tmp_path: Path, tiny: Path) -> Path:
    """Three images of two labels of `tiny`, in folders named after what it answers for them; the last one in the wrong folder."""
    loaded = checkpoint.load(tiny)
    names: list[str] = []
    for number, colour in enumerate(((255, 0, 0), (0, 255, 255), (0, 0, 0))):
        data = encode(colour)
        pixels = torch.from_numpy(loaded.header.preprocessing.read(data))[None]
        best = int(logits(loaded.model, loaded.header.preprocessing, pixels).argmax())
        names.append(loaded.header.labels[best] if number < 2 else next(name for name in names if name != loaded.header.labels[best]))
        (tmp_path / "photographs" / names[-1]).mkdir(parents=True, exist_ok=True)
        (tmp_path / "photographs" / names[-1] / f"{number}.png").write_bytes(data)
    assert len(set(names)) == 2
    return tmp_path / "photographs"


def test_top1_is_counted_over_all_and_over_each_class(tiny: Path, photographs: Path) -> None:
    found = evaluate(tiny, photographs, device="cpu", precision="fp32")
    assert (found.top1, found.right.sum(), len(found.right)) == (2 / 3, 2, 3)
    version = checkpoint.read_header(tiny).version
    assert found.to_text().splitlines()[:2] == [f"tiny {version}, {photographs}, fp32 on cpu", "top-1 0.6667 (2 of 3)"]
    document = json.loads(json.dumps(found.to_dict()))
    assert {facts["samples"]: facts["correct"] for facts in document["classes"].values()} == {2: 1, 1: 1}
    wrong = [image for image in document["images"] if image["label"] != image["predicted"]]
    assert [Path(image["file"]).name for image in wrong] == ["2.png"]
    assert all(0 < image["probability"] <= 1 for image in document["images"])
    assert (document["correct"], document["samples"], document["precision"]) == (2, 3, "fp32")
    assert document["model"] == {"name": "tiny", "version": checkpoint.read_header(tiny).version}


def test_a_data_folder_stands_for_its_val_split(tiny: Path, photographs: Path) -> None:
    whole = photographs.parent / "data"
    whole.mkdir()
    photographs.rename(whole / "val")
    assert evaluate(tiny, whole, device="cpu").samples.folder == whole / "val"


def test_more_photographs_than_are_decoded_at_once_keep_their_places(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "label 0"
    folder.mkdir()
    for number in range(150):
        (folder / f"{number:03}.png").write_bytes(encode((number, 255 - number, 7 * number % 256)))
    (folder / "001.png").write_bytes(b"not an image")
    found = evaluate(tiny, tmp_path, device="cpu", precision="fp32", max_bad=0.01)
    assert [file.name for file in found.samples.files] == [f"{number:03}.png" for number in range(150) if number != 1]
    assert [bad.file.name for bad in found.bad] == ["001.png"]
    loaded = checkpoint.load(tiny)
    pixels = torch.stack([torch.from_numpy(loaded.header.preprocessing.read(file.read_bytes())) for file in found.samples.files])
    expected = logits(loaded.model, loaded.header.preprocessing, pixels).softmax(1).max(1)
    np.testing.assert_array_equal(found.predicted, expected.indices.numpy())
    np.testing.assert_allclose(found.probability, expected.values.numpy(), atol=1e-5)
    with pytest.raises(DataError, match="1 of 150 files can't be used"):
        evaluate(tiny, tmp_path, device="cpu", max_bad=0.0)


def test_a_label_that_the_checkpoint_lacks_is_named_with_the_close_ones(tiny: Path, photographs: Path) -> None:
    (photographs / "label 33").mkdir()
    (photographs / "label 33" / "x.png").write_bytes(encode((0, 0, 0)))
    with pytest.raises(DataError, match=rf"^{photographs}: 'label 33' is no label of {tiny}, which has 'label 3', "):
        evaluate(tiny, photographs, device="cpu")


def test_what_is_missing_is_named(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        evaluate(tmp_path / "x.safetensors", tmp_path)
    with pytest.raises(DataError, match=f"^{tmp_path}/x: no such folder"):
        evaluate(tiny, tmp_path / "x")


def test_it_runs_in_the_precision_of_the_server_and_falls_back_like_it(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = checkpoint.load(tiny)
    assert Classifier(loaded, CPU).precision == architectures.fastest_precision(CPU)
    assert Classifier(loaded, CPU, "bf16").precision == "bf16"
    monkeypatch.setitem(BOUNDS, "bf16", Bounds(0.0, 0.0))
    found = Classifier(loaded, CPU, "bf16")
    assert found.precision == "fp32"
    assert found.why.startswith("bf16 misses the golden samples (")
    np.testing.assert_allclose(found.predict(loaded.golden_pixels), loaded.golden.probabilities, rtol=0, atol=1e-5)
    monkeypatch.setitem(BOUNDS, "fp32", Bounds(-1.0, 0.0))
    with pytest.raises(FidelityError, match="float32 does not reproduce the golden samples of tiny on cpu"):
        Classifier(loaded, CPU, "bf16")


def test_a_judgement_knows_each_row(tiny: Path, photographs: Path) -> None:
    classifier, samples = Classifier(checkpoint.load(tiny), CPU), find_samples(photographs)
    probabilities = torch.eye(10)[samples.targets[[0, 1, 0]]]
    found: Evaluation = judge(classifier, samples, probabilities)
    assert found.predicted.tolist() == samples.targets[[0, 1, 0]].tolist()
    assert found.right.tolist() == (samples.targets[[0, 1, 0]] == samples.targets).tolist()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", "--device gpu: allowed are auto, cpu, cuda and cuda:1"),
        ("meta", "--device meta: allowed are"),
        ("cuda:99", "--device cuda:99 is not possible: "),
    ],
)
def test_a_device_that_is_not_there_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        find_device(name)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_cuda_is_the_first_gpu_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    assert find_device("cuda") == torch.device("cuda", 0)  # torch.cuda.set_device refuses one without
    assert find_device("cuda:1") == torch.device("cuda", 1)


def test_auto_takes_the_cpu_where_nothing_else_is() -> None:
    assert find_device("cpu") == CPU
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
