"""Weights that others saved -> one of our architectures, every weight checked.

a file --_read, which runs nothing of it--> entries --_find: which one, under which prefix--> state dict --place--> the model
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

State = dict[str, torch.Tensor]

_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}  # what DDP, compile and FSDP put into names
_COUNT = "num_batches_tracked"  # only training uses it, and old files lack it
_AVERAGED = re.compile(r"(?:^|[._])(?:ema|swa|averaged?)(?:$|[._])")
_INSTEAD = "save the state dict alone: torch.save(model.state_dict(), FILE)"


class WeightsError(ValueError):
    """Weights that can't be used. The message names the file and the weight, and says what to change."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Which part of a file `load` took."""

    key: str  # dotted, such as model_ema or state_dict.net; empty where the whole file is the state dict
    others: tuple[str, ...]  # the keys of other weights that might fit
    left_out: tuple[str, ...]  # weights beside the model in the same state dict, such as a criterion's


def load(model: nn.Module, path: Path, *, architecture: str, labels: int, key: str | None = None) -> Taken:
    """Read the weights of `model` from a file of torch.save or safetensors, as training scripts write them.

    The state dict may lie anywhere in the file, its names may have gained a prefix and the names of wrappers. Of several
    that fit, an averaged one is taken; `key` names another. Nothing of the file is run or imported. Raises WeightsError.
    """
    tree = _read(path)
    names = {_plain(name) for name in model.state_dict() if not name.endswith(_COUNT)}
    taken, state = _find(tree, names, key, path, architecture)
    place(model, state, architecture=architecture, labels=labels, source=f"{path}: {taken.key}".removesuffix(": "))
    return taken


def place(model: nn.Module, state: Mapping[str, torch.Tensor], *, architecture: str, labels: int, source: str) -> None:
    """Put a state dict into `model`, which it must fit: no weight missing, none too many, all finite and of the right shape.

    Numbers of any precision become those of the model. Left out is what only training uses: auxiliary heads, counts of
    batches. Raises WeightsError, beginning with `source`.
    """
    own, names = model.state_dict(), {_plain(name): name for name in model.state_dict()}
    spare = {_plain(name) for name, _ in model.named_buffers()}  # buffers that other versions saved, and this one computes
    given = {_plain(name): tensor for name, tensor in state.items()}
    missing = [name for name in names if name not in given and not name.endswith(_COUNT)]
    extra = [name for name in given if name not in names and name not in spare and not _of_training(name, architecture)]
    if missing or extra:
        count = f"{len(missing)} of {architecture}'s {len(names)} weights are missing, the first is {missing[0]}" if missing else ""
        more = f"{len(extra)} weights are not {architecture}'s, the first is {extra[0]}" if extra else ""
        raise WeightsError(f"{source}: {'; '.join(filter(None, (count, more)))}; is it another architecture? (--arch)")
    common = [name for name in names if name in given]
    wrong = [name for name in common if given[name].shape != own[names[name]].shape]
    if wrong:
        raise WeightsError(f"{source}: {_misfit(wrong, given, {name: own[names[name]] for name in wrong}, architecture, labels)}")
    for name in common:
        tensor, wanted = given[name].detach(), own[names[name]]
        if tensor.is_floating_point() != wanted.is_floating_point() or tensor.is_meta:
            raise WeightsError(f"{source}: {name} is {tensor.dtype} on {tensor.device}; it must be {wanted.dtype}, with its values")
        own[names[name]] = tensor.to(wanted.dtype)
        if not own[names[name]].isfinite().all():
            raise WeightsError(f"{source}: {name} is not finite everywhere (NaN or infinity): the training diverged; take an earlier one")
    model.load_state_dict(own)


def _misfit(wrong: list[str], given: State, wanted: State, architecture: str, labels: int) -> str:
    found = given[wrong[0]].shape
    if all(wanted[name].shape[:1] == (labels,) and given[name].shape == (*found[:1], *wanted[name].shape[1:]) for name in wrong):
        problem, change = f", so {found[0]} labels belong to it", f"{labels} were given (--labels)"
    else:
        problem, change = "", "is it another architecture (--arch) or another size of image (--crop)?"
    name = wrong[0]
    return f"{name} has shape {list(found)}, {architecture} needs {list(wanted[name].shape)}{problem}; {change}"


def _of_training(name: str, architecture: str) -> bool:
    auxiliary = architecture.removeprefix("timm:").startswith(("googlenet", "inception_v3"))
    return name == "n_averaged" or (auxiliary and name.startswith(("aux1.", "aux2.", "AuxLogits.")))


def _plain(name: str) -> str:
    """A weight's name without those of wrappers, and as torchvision names it today."""
    name = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    name = re.sub(r"(denselayer\d+\.(?:norm|conv))\.([12])\.", r"\1\2.", name)  # until modules' names lost their dots
    return re.sub(r"(encoder_layer_\d+\.mlp)\.linear_([12])\.", lambda old: f"{old[1]}.{3 * int(old[2]) - 3}.", name)


# Which part of the file


def _find(tree: object, names: set[str], key: str | None, path: Path, architecture: str) -> tuple[Taken, State]:
    found = _state_dicts(tree)
    entries = {entry: {_plain(name): tensor for name, tensor in state.items()} for entry, state in found.items()}
    fitting: Counter[tuple[str, str]] = Counter()  # how many of the names are there, by entry and prefix
    for entry, state in entries.items():
        for parts in map(_split, state):
            for at in range(len(parts)):
                prefix = "".join(parts[:at])
                if "".join(parts[at:]) in names and (key is None or f"{entry}.{prefix}".lstrip(".").startswith(f"{key}.")):
                    fitting[entry, prefix] += 1
    places = {f"{entry}.{prefix}".strip("."): (entry, prefix) for (entry, prefix), count in fitting.items() if 2 * count >= len(names)}
    if not places:
        under = "" if key is None else f" under the key {key!r}"
        raise WeightsError(f"{path}: no weights of {architecture}{under}; {_listing(tree)}")

    best = [dotted for dotted, place in places.items() if fitting[place] == max(fitting.values())]
    best = [dotted for dotted in best if _AVERAGED.search(dotted)] or best
    states = [_inside(entries[entry], prefix) for entry, prefix in map(places.__getitem__, best)]
    # The same tensors under a second name, as in a module that holds its model twice, do no harm.
    if any(not state[name].is_set_to(states[0][name]) for state in states[1:] for name in names & state.keys() & states[0].keys()):
        raise WeightsError(f"{path}: weights of {architecture} under several keys; choose one with --key: {', '.join(best)}")
    entry, prefix = places[best[0]]
    if len(states[0]) < sum(_plain(name).startswith(prefix) for name in found[entry]):
        raise WeightsError(f"{path}: weights of one name, with and without a wrapper's such as 'module.'; save only one of them")
    beside = tuple(name for name in entries[entry] if not name.startswith(prefix) and name != "n_averaged")
    return Taken(key=best[0], others=tuple(dotted for dotted in places if dotted and dotted != best[0]), left_out=beside), states[0]


def _split(name: str) -> list[str]:
    """model.fc.weight -> model., fc., weight: any of its beginnings joined is a prefix."""
    return re.findall(r"[^.]*\.|[^.]+$", name)


def _inside(state: State, prefix: str) -> State:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def _state_dicts(tree: object, key: str = "", depth: int = 4) -> dict[str, State]:
    """Every dict that holds tensors by name, under its dotted key. An optimizer's are under numbers."""
    if not isinstance(tree, dict) or not depth:
        return {}
    named = {name: value for name, value in tree.items() if isinstance(name, str)}
    tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor) and value.layout == torch.strided}
    found = {key: tensors} if tensors else {}
    for name, value in named.items():
        found |= _state_dicts(value, f"{key}.{name}" if key else name, depth - 1)
    return found


def _listing(tree: object) -> str:
    if not isinstance(tree, dict):
        return f"the file holds {_describe(tree)}; {_INSTEAD}"
    found = [f"{name} ({_describe(value)})" for name, value in tree.items()]
    more = f" and {len(found) - 12} more" if len(found) > 12 else ""
    foreign = any(isinstance(value, _Foreign) for value in tree.values()) and not _state_dicts(tree)
    return f"the file holds {', '.join(found[:12]) or 'nothing'}{more}" + (f"; {_INSTEAD}" if foreign else "")


def _describe(value: object) -> str:
    weights = sum(map(len, _state_dicts(value).values()))
    if isinstance(value, torch.Tensor):
        return str(list(value.shape))
    return f"{weights} weights" if weights else type(value).__name__


# Reading without running


class _Class(type):
    """Equal to dict, since torch puts items into nothing else, and files hold subclasses of it, such as Lightning's AttributeDict."""

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is dict

    __hash__ = type.__hash__


class _Foreign(dict[Any, Any], metaclass=_Class):
    """Stands for any object of a class that isn't torch's own. Takes whatever its pickle gives it, and keeps only items."""

    def __init__(self, *_: object) -> None:
        super().__init__()

    def __setstate__(self, _: object) -> None:
        pass

    __hash__ = object.__hash__  # type: ignore[assignment]  # it may be a key


def _read(path: Path) -> object:
    if not path.is_file():
        raise WeightsError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
    with path.open("rb") as file:
        head = file.read(9)
    try:
        if head[8:] == b"{":  # after the length of the JSON
            return safetensors.torch.load_file(path)
        stubs: list[Any] = [(_stub(name), name) for name in _foreign_names(path, head)]
        with warnings.catch_warnings(), torch.serialization.safe_globals(stubs):
            warnings.simplefilter("ignore")  # about how the file was written
            tree = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of bytes that are broken or hostile, anything may come
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0] or type(error).__name__
        if "weights_only" in reason:  # torch advises to run it
            reason = "it holds code, not only weights"
        raise WeightsError(f"{path}: can't be read as weights ({reason}); {_INSTEAD}") from error
    if isinstance(tree, _Foreign) and not tree:
        raise WeightsError(f"{path}: a whole pickled object ({type(tree).__name__}), which only its own code could read; {_INSTEAD}")
    return tree


def _foreign_names(path: Path, head: bytes) -> set[str]:
    """The classes and functions, by full name, that the pickle in a file of torch.save would look up."""
    if head.startswith(b"PK"):
        return set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    from torch._weights_only_unpickler import get_globals_in_pkl  # the public function reads zip archives only

    with path.open("rb") as file:  # before torch 1.6: a magic number, a version, sizes of integers, the object
        return set().union(*(get_globals_in_pkl(file) for _ in range(4)))


def _stub(name: str) -> Callable[..., object]:
    if name == "collections.deque":
        return lambda *_: []  # torch appends to lists only
    return _Class(name, (_Foreign,), {})
