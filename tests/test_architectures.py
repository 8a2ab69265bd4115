"""Names of architectures give classifiers with the right head; `place` puts them where they compute."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import timm
import torch
import torchvision

from models import architectures
from models.preprocessing import Preprocessing

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("resnet18", 64),
        ("squeezenet1_0", 64),  # its head is a convolution
        ("googlenet", 96),  # these two would give several heads
        ("inception_v3", 299),
        ("maxvit_t", 224),  # these three are built for one size
        ("vit_b_32", 96),
        ("timm:vit_tiny_patch16_224", 96),
        ("timm:test_efficientnet", 64),
    ],
)
def test_each_kind_gives_one_row_of_logits_per_image(name: str, size: int) -> None:
    model = architectures.build(name, num_classes=7, image_size=size)
    assert not model.training
    with torch.inference_mode():
        logits = model(torch.zeros(2, 3, size, size))
    assert logits.shape == (2, 7)
    assert torch.equal(logits[0], logits[1])  # dropout and batch statistics are off


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("resnet51", "close: resnet50"),
        ("efficientnet-b0", "close: efficientnet_b0"),
        ("timm:efficientnet_lite00", "close: efficientnet_lite0"),
        ("timm:resnet51", "close: resnet50"),
        ("qqqq", "timm's architectures are written timm:NAME"),
        ("fcn_resnet50", "unknown architecture 'fcn_resnet50'"),  # torchvision's, but it segments
        ("timm:", "unknown architecture 'timm:'"),
        ("", "unknown architecture ''"),
    ],
)
def test_an_unknown_name_is_refused_and_close_ones_are_named(name: str, close: str) -> None:
    with pytest.raises(ValueError) as caught:
        architectures.build(name, num_classes=7, image_size=64)
    message = str(caught.value)
    assert message.startswith(f"unknown architecture {name!r}")
    for word in close.removeprefix("close: ").split(", "):
        assert word in message
    assert ("close: " in message) == ("close: " in close or name == "fcn_resnet50")


@pytest.mark.parametrize(
    ("name", "size"), [("vit_b_32", 100), ("maxvit_t", 64), ("timm:xcit_nano_12_p16_224", 100), ("timm:twins_svt_small", 100)]
)
def test_a_size_that_the_architecture_cannot_take_is_refused(name: str, size: int) -> None:
    with pytest.raises(ValueError, match=rf"{name} can't be built for {size} x {size} pixels: \S") as caught:
        architectures.build(name, num_classes=7, image_size=size)
    assert "\n" not in str(caught.value)  # it becomes part of a CheckpointError and of a start's one line


@pytest.mark.parametrize(
    ("name", "resize", "crop", "interpolation", "values"),
    [
        ("resnet18", 256, 224, "bilinear", IMAGENET),
        ("resnet50", 232, 224, "bilinear", IMAGENET),  # of its second weights, which are the default
        ("vit_l_16", 242, 224, "bilinear", IMAGENET),
        ("efficientnet_b0", 256, 224, "bicubic", IMAGENET),
        ("googlenet", 256, 224, "bilinear", HALF),  # these two turn ImageNet's into this inside
        ("inception_v3", 342, 299, "bilinear", HALF),
        ("timm:resnet50", 235, 224, "bicubic", IMAGENET),  # 224 / 0.95 = 235.8
        ("timm:resnet50.tv_in1k", 256, 224, "bilinear", IMAGENET),
        ("timm:mobilenetv3_large_100", 256, 224, "bicubic", IMAGENET),
        ("timm:vit_base_patch16_224", 248, 224, "bicubic", HALF),
        ("timm:volo_d5_512", 512, 512, "bicubic", IMAGENET),  # timm pads: 512 / 1.15 is less than the crop
    ],
)
def test_preprocessing_is_that_of_the_published_weights(name: str, resize: int, crop: int, interpolation: str, values: Any) -> None:
    expected = Preprocessing(resize=resize, crop=crop, interpolation=interpolation, **values)
    assert architectures.preprocessing_of(name) == expected


def test_every_architecture_has_preprocessing() -> None:
    for name in torchvision.models.list_models(module=torchvision.models) + [f"timm:{name}" for name in timm.list_models()]:
        found = architectures.preprocessing_of(name)
        assert found.crop <= found.resize, name


def test_without_published_weights_preprocessing_is_imagenets_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timm.models.get_pretrained_cfg", lambda _: None)
    expected = Preprocessing(resize=256, crop=224, interpolation="bilinear", mean=IMAGENET["mean"], std=IMAGENET["std"])
    assert architectures.preprocessing_of("timm:resnet18") == expected


@pytest.mark.parametrize("name", ["resnet51", "timm:resnet51", "timm:resnet50.no_such_tag", ""])
def test_preprocessing_of_an_unknown_name_is_refused_like_its_build(name: str) -> None:
    with pytest.raises(ValueError, match=f"^unknown architecture {name!r}") as asked:
        architectures.preprocessing_of(name)
    with pytest.raises(ValueError) as built:
        architectures.build(name, num_classes=7, image_size=64)
    assert str(built.value) == str(asked.value)


@pytest.mark.parametrize(("name", "expected"), [("resnet18", "False"), ("timm:test_efficientnet", "True")])
def test_timm_is_imported_for_its_own_names_only(name: str, expected: str) -> None:
    build = f"architectures.build({name!r}, num_classes=2, image_size=32)"
    code = f"import sys; from models import architectures; {build}; print('timm' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == expected


def test_a_placed_model_is_ready_for_inference() -> None:
    model = architectures.build("timm:test_efficientnet", num_classes=3, image_size=32).train()
    placed = architectures.place(model, torch.device("cpu"), torch.bfloat16)
    assert not any(module.training for module in placed.modules())
    weights = dict(placed.named_parameters())
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert not any(weight.requires_grad for weight in weights.values())
    convolutions = [weight for weight in weights.values() if weight.dim() == 4]
    assert convolutions
    assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in convolutions)


def test_float32_means_float32_on_a_gpu_too() -> None:
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    architectures.place(torch.nn.Linear(2, 2), torch.device("cpu"), torch.float32)
    assert torch.backends.cudnn.conv.fp32_precision == "ieee"  # type: ignore[attr-defined]
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
