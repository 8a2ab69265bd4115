"""The contract between training and serving: one safetensors file with weights, labels, preprocessing and golden samples."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from models.preprocessing import Preprocessing

if TYPE_CHECKING:  # most processes of the server read a header, or this file's golden samples, and never import torch
    import torch

log = logging.getLogger(__name__)

FORMAT = 1
GOLDEN_SAMPLES = 16
_KEY = "spyglass"


def python() -> str:
    """How to start this Python from a shell that stands where we do: for messages that say what to type."""
    path = os.path.relpath(Path(sys.executable).with_name("python"))
    return "python" if path.startswith("..") or not os.path.exists(path) else path


class CheckpointError(ValueError):
    """A checkpoint that must not be served. The message names the file, the field, and what is wrong with it."""

    def __init__(self, path: Path, field: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if field == "file" else f"{path}: {field}: {problem}")
        self.path, self.field, self.problem = path, field, problem


@dataclass(frozen=True, kw_only=True)
class Header:
    """Everything about a checkpoint but its tensors."""

    name: str
    version: str  # see version_of
    architecture: str  # see architectures.build
    labels: tuple[str, ...]  # in the order of the logits
    preprocessing: Preprocessing
    temperature: float = 1.0  # the logits are divided by it before the softmax
    metrics: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, Any] = field(default_factory=dict)  # data, recipe, licence, library versions, time, code revision

    def to_dict(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"format": FORMAT, **fields, "labels": list(self.labels), "preprocessing": self.preprocessing.to_dict()}


@dataclass(frozen=True, kw_only=True)
class Golden:
    """The golden samples of a checkpoint: what must come out for what."""

    header: Header
    pixels: npt.NDArray[np.uint8]  # [16, crop, crop, 3]
    logits: npt.NDArray[np.float32]  # [16, C]: what the model gave at export

    @property
    def probabilities(self) -> npt.NDArray[np.float32]:
        """What must come out for the pixels: float32 [16, C]."""
        scaled = self.logits / np.float32(self.header.temperature)
        powers = np.exp(scaled - scaled.max(1, keepdims=True))
        found: npt.NDArray[np.float32] = powers / powers.sum(1, keepdims=True)
        return found


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint in memory."""

    header: Header
    model: torch.nn.Module  # eval mode, float32, on the CPU
    golden_pixels: torch.Tensor  # uint8 [16, crop, crop, 3]
    golden_logits: torch.Tensor  # float32 [16, C]: what the model gave at export

    @property
    def golden(self) -> Golden:
        """The golden samples by themselves, copied out of the mapped file, which somebody may cut short."""
        return Golden(header=self.header, pixels=self.golden_pixels.numpy().copy(), logits=self.golden_logits.numpy().copy())


Arrays = Iterable[tuple[str, npt.NDArray[Any]]]


def version_of(state: Mapping[str, torch.Tensor], labels: tuple[str, ...], preprocessing: Preprocessing, temperature: float) -> str:
    """Short hash of all that decides an answer: equal models have equal versions."""
    arrays = ((name, tensor.detach().cpu().contiguous().numpy()) for name, tensor in sorted(state.items()))
    return _version_of(arrays, labels, preprocessing, temperature)


def _version_of(weights: Arrays, labels: tuple[str, ...], preprocessing: Preprocessing, temperature: float) -> str:
    facts = {"labels": labels, "preprocessing": preprocessing.to_dict(), "temperature": temperature}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, array in weights:
        digest.update(f"{name} torch.{array.dtype} {list(array.shape)}".encode())
        digest.update(array.data)
    return digest.hexdigest()[:12]


def read_header(path: Path) -> Header:
    """Read labels, preprocessing and the other facts in milliseconds, without the weights and without torch.

    Raises CheckpointError.
    """
    if path.exists() and not path.is_file():
        raise CheckpointError(path, "file", "not a regular file")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        if isinstance(error, FileNotFoundError) and not path.exists():
            others = sorted(other.name for other in path.parent.glob("*.safetensors"))
            there = f"; {path.parent} has {', '.join(others[:10])}" if others else ""
            hint = f"; `{python()} -m models pull efficientnet_lite0` makes the default checkpoint"
            raise CheckpointError(path, "file", f"no such file{there or hint}") from None
        raise CheckpointError(path, "file", f"not a readable safetensors file ({error}); {_export_hint()}") from None
    if _KEY not in metadata:
        raise CheckpointError(path, _KEY, f"not in the safetensors header: plain weights, no checkpoint; {_export_hint()}")
    try:
        document = json.loads(metadata[_KEY])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, _KEY, f"not valid JSON ({error})") from None
    return _parse_header(document, path)


def read_golden(path: Path) -> Golden:
    """Read the golden samples without torch and without building the model, for an engine that has it in another form.

    That the weights are those of the version is checked all the same. Raises CheckpointError.
    """
    header = read_header(path)
    try:
        with safe_open(path, framework="numpy") as file:
            names = set(file.keys())
            weights = ((name.removeprefix("model."), file.get_tensor(name)) for name in sorted(names) if name.startswith("model."))
            _check_version(_version_of(weights, header.labels, header.preprocessing, header.temperature), header, path)
            found = {name: file.get_tensor(name) for name in _GOLDEN if name in names}
    except (OSError, SafetensorError, TypeError) as error:  # TypeError: a dtype that numpy lacks, and so none of a checkpoint's
        raise CheckpointError(path, "file", f"not a readable safetensors file ({error})") from None
    _check_golden(found, header, path)
    return Golden(header=header, pixels=found["golden.pixels"], logits=found["golden.logits"])


_GOLDEN = {"golden.pixels": "uint8", "golden.logits": "float32"}


def _check_golden(found: Mapping[str, Any], header: Header, path: Path) -> None:
    crop, classes = header.preprocessing.crop, len(header.labels)
    shapes = {"golden.pixels": (GOLDEN_SAMPLES, crop, crop, 3), "golden.logits": (GOLDEN_SAMPLES, classes)}
    for name, dtype in _GOLDEN.items():
        if name not in found:
            raise CheckpointError(path, name, "missing")
        is_dtype, is_shape = str(found[name].dtype).removeprefix("torch."), tuple(found[name].shape)
        if (is_dtype, is_shape) != (dtype, shapes[name]):
            raise CheckpointError(path, name, f"must be {dtype} {list(shapes[name])}, is {is_dtype} {list(is_shape)}")
    if not np.isfinite(np.asarray(found["golden.logits"])).all():
        raise CheckpointError(path, "golden.logits", "not all numbers are finite")


def _check_version(version: str, header: Header, path: Path) -> None:
    if version != header.version:
        raise CheckpointError(path, "version", f"the header says {header.version}, the contents give {version}: the file was changed")


def _export_hint() -> str:
    return f"`{python()} -m models export` makes a checkpoint of weights from elsewhere"


def _parse_header(document: Any, path: Path) -> Header:
    def need(condition: bool, field: str, problem: str) -> None:
        if not condition:
            raise CheckpointError(path, field, problem)

    need(isinstance(document, dict), _KEY, "not a JSON object")
    found = document.get("format")
    need(found == FORMAT and type(found) is int, "format", f"{found!r} is unknown to this version, which reads format {FORMAT}")
    fields = {"format", *Header.__dataclass_fields__}
    need(not fields - document.keys(), ", ".join(sorted(fields - document.keys())), "missing from the header")
    need(not document.keys() - fields, ", ".join(sorted(document.keys() - fields)), f"not a field of format {FORMAT}")
    for name in ("name", "version", "architecture"):
        need(_is_text(document[name]), name, "must be a text that is not empty")
    labels = document["labels"]
    need(isinstance(labels, list) and all(map(_is_text, labels)), "labels", "must be a list of texts that are not empty")
    need(len(labels) >= 2, "labels", f"a classifier needs at least two labels, there is {len(labels)}")
    twice = sorted(label for label, count in Counter(labels).items() if count > 1)
    need(not twice, "labels", f"each label must be there once; more than once: {', '.join(map(repr, twice[:5]))}")
    temperature = document["temperature"]
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    need(number and 0 < temperature <= sys.float_info.max, "temperature", f"must be a positive number, not {temperature!r}")
    for name in ("metrics", "origin", "preprocessing"):
        need(isinstance(document[name], dict), name, "must be a JSON object")
    try:
        preprocessing = Preprocessing.from_dict(document["preprocessing"])
    except ValueError as error:
        raise CheckpointError(path, "preprocessing", str(error)) from None
    values = {name: document[name] for name in Header.__dataclass_fields__}
    return Header(**{**values, "labels": tuple(labels), "preprocessing": preprocessing, "temperature": float(temperature)})


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and value.encode() != b""
    except UnicodeEncodeError:  # a lone surrogate, which no JSON answer can carry
        return False


def load(path: Path) -> Checkpoint:
    """Read and check a whole checkpoint. Raises CheckpointError for anything that is not exactly as it must be."""
    import safetensors.torch

    from models import architectures

    header = read_header(path)
    try:
        tensors = safetensors.torch.load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(path, "file", f"not a readable safetensors file ({error})") from None
    crop, classes = header.preprocessing.crop, len(header.labels)
    try:
        model = architectures.build(header.architecture, num_classes=classes, image_size=crop)
    except ValueError as error:
        raise CheckpointError(path, "architecture", str(error)) from None

    golden = {name: tensors.pop(name) for name in _GOLDEN if name in tensors}
    _check_golden(golden, header, path)
    strangers = sorted(name for name in tensors if not name.startswith("model."))
    if strangers:
        raise CheckpointError(path, strangers[0], "a tensor that is neither model.* nor golden.*")
    state = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    _check_weights(state, model.state_dict(), header, path)
    _check_version(version_of(state, header.labels, header.preprocessing, header.temperature), header, path)
    architectures.set_weights(model, state, assign=True)
    model.requires_grad_(False)
    return Checkpoint(header=header, model=model, golden_pixels=golden["golden.pixels"], golden_logits=golden["golden.logits"])


def _check_weights(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], header: Header, path: Path) -> None:
    missing, extra = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    for names, problem in ((missing, "missing"), (extra, f"not a weight of {header.architecture}")):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise CheckpointError(path, f"model.{names[0]}", problem + more)
    for name, tensor in expected.items():
        if state[name].shape != tensor.shape:
            found, wanted = list(state[name].shape), list(tensor.shape)
            if found[1:] == wanted[1:] and wanted[:1] == [len(header.labels)]:
                raise CheckpointError(path, "labels", f"{wanted[0]} labels, but the head model.{name} has {found[0]} rows")
            raise CheckpointError(path, f"model.{name}", f"has shape {found}, {header.architecture} needs {wanted}")
        if state[name].dtype != tensor.dtype:
            raise CheckpointError(path, f"model.{name}", f"is {state[name].dtype}, must be {tensor.dtype}")
        if not state[name].isfinite().all():
            raise CheckpointError(path, f"model.{name}", "is not finite everywhere: NaN or infinity")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside `path`, which takes its name if the block ends well, and is removed if not. Raises OSError."""
    descriptor, name = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except SafetensorError as error:  # its name for a full disk
        raise OSError(f"{path}: can't be written ({error})") from None
    finally:
        temporary.unlink(missing_ok=True)


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint so that a crash at any moment leaves the old file or the new one, whole.

    What was written is loaded back and compared before it takes the name. Raises CheckpointError or OSError.
    """
    import safetensors.torch
    import torch

    # Cloned: safetensors refuses weights that share memory, and channels_last ones that are not contiguous.
    tensors = {f"model.{name}": tensor.detach().cpu().contiguous().clone() for name, tensor in checkpoint.model.state_dict().items()}
    tensors |= {"golden.pixels": checkpoint.golden_pixels.contiguous(), "golden.logits": checkpoint.golden_logits.contiguous()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        safetensors.torch.save_file(tensors, temporary, metadata={_KEY: json.dumps(checkpoint.header.to_dict())})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        try:
            load(temporary)
        except CheckpointError as error:
            raise CheckpointError(path, error.field, error.problem) from None
        written = safetensors.torch.load_file(temporary)
        for name, tensor in tensors.items():
            if not torch.equal(written[name], tensor):
                raise CheckpointError(path, name, "does not read back as it was written")
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@dataclass(frozen=True)
class Bounds:
    """How far the probabilities of the golden samples may lie from those at export."""

    top_mean: float  # difference of the top label's probability, on average over the samples
    any_max: float  # difference of any probability of any sample


# Measured on a CPU with AVX512-BF16 but no fp16 arithmetic, against torch in float32, as top_mean / any_max, on the 16 golden samples
# and on 59 photographs, one per class (* fp16 on every second of them):
#                                    golden samples                                   photographs
#                                    torch fp16       torch bf16       OpenVINO bf16    torch fp16       torch bf16       OpenVINO bf16
#   efficientnet_lite0, published    0.0011 / 0.0035  0.0161 / 0.0686  0.0104 / 0.0260  0.0012 / 0.0068  0.0100 / 0.0498  0.0106 / 0.1194
#   the same, fine-tuned, 2 labels * 0.0004 / 0.0010  0.0036 / 0.0167  0.0036 / 0.0108  0.0003 / 0.0011  0.0032 / 0.0093  0.0023 / 0.0088
#   resnet18, 2 labels               0.0003 / 0.0012  0.0017 / 0.0080  0.0012 / 0.0091  0.0002 / 0.0017  0.0021 / 0.0198  0.0016 / 0.0206
#   vit_tiny, 2 labels               0.0000 / 0.0001  0.0003 / 0.0009  0.0003 / 0.0008  0.0000 / 0.0001  0.0003 / 0.0013  0.0003 / 0.0012
#   mobilenet_v3_small, 2 labels     0.0000 / 0.0000  0.0001 / 0.0001  0.0001 / 0.0001  0.0000 / 0.0000  0.0001 / 0.0001  0.0001 / 0.0001
#   resnet50, untrained              0.0017 / 0.0062  0.0099 / 0.0300  0.0095 / 0.0311  0.0073 / 0.0402  0.0433 / 0.2815  0.0419 / 0.1677
#   densenet121, untrained           0.0016 / 0.0057  0.0112 / 0.0618  0.0084 / 0.0430  0.0044 / 0.0191  0.0304 / 0.2017  0.0272 / 0.1920
#   test_efficientnet, untrained     0.0006 / 0.0024  0.0049 / 0.0255  0.0071 / 0.0595  0.0021 / 0.0233  0.0252 / 0.1527  0.0191 / 0.1253
#   convnext_tiny, untrained *       0.0003 / 0.0022  0.0014 / 0.0201  0.0027 / 0.0196  0.0009 / 0.0045  0.0066 / 0.0494  0.0108 / 0.0662
#   swin_t, untrained                0.0005 / 0.0026  0.0037 / 0.0157  0.0034 / 0.0103  0.0016 / 0.0070  0.0114 / 0.0499  0.0122 / 0.0561
# In float32, torch and OpenVINO: at most 0.00001 / 0.00003 for any of them.
# Only the published weights, and those fine-tuned from them on ants and bees for an epoch (94 % right), tell labels apart. The others of
# 2 labels had 40 s of training on ants and bees at 128 pixels and are no better than chance; mobilenet_v3_small gives one answer to all.
# The untrained ones have 1000 labels, batch norms set on the golden samples, and heads scaled up 8 to 62 times, so that nearly each
# golden sample gets a label of its own (at 0.06 to 0.09 on average; photographs at 0.52 to 0.76); that scales rounding up as well.
# Golden samples: all within the bounds. Photographs: resnet50 misses fp16's and bf16's, densenet121 bf16's, test_efficientnet bf16's in
# torch; whether trained weights of these do is not known. One that misses on its golden samples falls back, which costs speed only.
# Earlier, efficientnet_lite0 in torch, on 396 photographs of two classes: fp16 0.0013 / 0.0096, bf16 0.0095 / 0.0715.
# One layer's weights negated at a time, golden samples, torch bf16: all 99 layers of efficientnet_lite0 miss (at least 0.0647 / 0.2266).
# Of 13 layers of each of the others all miss, but for 1 of convnext_tiny (0.0075 / 0.0531), 9 of vit_tiny and 11 of mobilenet_v3_small,
# which pass: where a model's answers hardly depend on the image, they hardly depend on most layers, and the check sees little.
BOUNDS = {"fp16": Bounds(0.005, 0.04), "bf16": Bounds(0.03, 0.15), "fp32": Bounds(0.0005, 0.002)}


def fidelity(found: npt.NDArray[np.float32], reference: npt.NDArray[np.float32], bounds: Bounds) -> tuple[bool, str]:
    """Judge probabilities `[N, C]` against those at export. Returns whether they are within bounds, and the figures in words."""
    if not np.isfinite(found).all():
        return False, "not all probabilities are finite"
    best = np.sort(reference, axis=1)
    clear = (best[:, -1] - best[:, -2]) >= bounds.any_max  # closer than that, either of the two may win
    top = reference.argmax(1)
    flips = int((clear & (found.argmax(1) != top)).sum())
    rows = np.arange(len(found))
    top_mean = float(np.abs(found[rows, top] - reference[rows, top]).mean())
    any_max = float(np.abs(found - reference).max())
    good = flips == 0 and top_mean <= bounds.top_mean and any_max <= bounds.any_max
    figures = f"{flips} of {len(found)} labels differ, top probability off by {top_mean:.4f} on average (allowed {bounds.top_mean})"
    return good, f"{figures}, any by {any_max:.4f} at most (allowed {bounds.any_max})"


_FALLBACK = {"fp16": "bf16", "bf16": "fp32"}


class FidelityError(RuntimeError):
    """A checkpoint that this device must not serve. The message says what was measured."""


def choose_precision(golden: Golden, engine: str, first: str, classify: Callable[[str], npt.NDArray[np.float32]]) -> tuple[str, str]:
    """The first of the precisions `first` and those it falls back to that reproduces the golden samples, and why it is this one.

    `classify` gets ready for a precision (fp16, bf16, fp32) and returns the probabilities of the golden pixels in it,
    float32 `[16, C]`. The last call is the one that counts. Raises FidelityError, which names `engine`, where float32 misses as well.
    """
    precision, missed = first, ""
    while True:
        fault = "misses the golden samples"
        try:
            good, figures = fidelity(classify(precision), golden.probabilities, BOUNDS[precision])
        except RuntimeError as error:  # an operator that this device lacks in this precision
            if precision == "fp32":
                raise
            good, figures, fault = False, str(error).splitlines()[0], "can't be used"
        if good:
            return precision, f"{missed}{precision} reproduces the golden samples: {figures}"
        if precision == "fp32":
            raise FidelityError(f"float32 does not reproduce the golden samples of {golden.header.name} on {engine}: {figures}")
        log.warning("%s %s on %s, falling back to %s: %s", precision, fault, engine, _FALLBACK[precision], figures)
        missed += f"{precision} {fault} ({figures}); "
        precision = _FALLBACK[precision]
