"""For benchmarks/gpu.py: the checkpoints that it measures by default, made without a download."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.load import ROOT, say


def random_resnet50(path: Path) -> None:
    """A ResNet-50 without public weights that behaves like one with: batch norms that fit, and distinct labels for the golden samples."""
    import torch

    from models import architectures
    from models.export import EXAMPLES, export, golden_from
    from models.labels import imagenet_labels

    torch.manual_seed(0)
    preprocessing = architectures.preprocessing_of("resnet50")
    model = architectures.build("resnet50", num_classes=1000, image_size=preprocessing.crop)
    pixels = golden_from(EXAMPLES, preprocessing)
    inputs = preprocessing.normalize(pixels, torch.float32)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None  # the plain average of what it sees, not a moving one
        if isinstance(last := getattr(module, "bn3", None), torch.nn.BatchNorm2d):
            torch.nn.init.constant_(last.weight, 0.3)  # or the sum of 16 blocks drowns what differs between photographs
    with torch.no_grad():
        model(inputs)
        found = model.eval()(inputs)
        scale = 3 / found.std(0)
        head = model.get_submodule("fc")
        assert isinstance(head, torch.nn.Linear)
        head.weight.mul_(scale[:, None])
        head.bias.sub_(found.mean(0)).mul_(scale)
        tops = model(inputs).argmax(1).tolist()
    assert len(set(tops)) == len(tops), tops
    facts = {"data": "none", "weights": "random, seed 0"}
    export(
        path,
        model,
        name="resnet50",
        architecture="resnet50",
        labels=imagenet_labels(),
        preprocessing=preprocessing,
        golden_pixels=pixels,
        origin=facts,
    )


def checkpoints(given: list[Path] | None, folder: Path) -> list[Path]:
    """Those given, or the default two, as far as they can be had."""
    if given:
        return given
    lite0 = ROOT / "checkpoints/efficientnet_lite0.safetensors"
    ways: list[tuple[Path, Callable[[Path], Any]]] = [(folder / "resnet50.safetensors", random_resnet50)]
    if not lite0.is_file():
        from models.pretrained import pull

        lite0 = folder / lite0.name
        ways.append((lite0, lambda path: pull("efficientnet_lite0", path)))
    found = []
    for path, make in ways:
        try:
            make(path)
        except (ImportError, OSError, ValueError) as error:
            say(f"skipped, it can't be made here: {path.stem}: {error}")
    found = [path for path in (folder / "resnet50.safetensors", lite0) if path.is_file()]
    return found
