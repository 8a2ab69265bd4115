"""Weights as other tools save them fit their architecture, or are refused with what to change; nothing in their files is run."""

from __future__ import annotations

import argparse
import collections
import importlib
import os
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm.utils
import torch
import torchvision
from torch import nn
from torch.optim.swa_utils import AveragedModel

from models import architectures, weights
from models.weights import Taken, WeightsError

SMALL = "timm:test_efficientnet"


def _build(architecture: str = SMALL, labels: int = 3, size: int = 64) -> nn.Module:
    return architectures.build(architecture, num_classes=labels, image_size=size)


def _fresh(seed: int = 1) -> nn.Module:
    """A model none of whose weights are those that it begins with."""
    torch.manual_seed(seed)
    model = _build()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.rand_like(tensor) if tensor.is_floating_point() else tensor + seed)
    return model


def _load(path: Path, architecture: str = SMALL, labels: int = 3, key: str | None = None) -> tuple[Taken, nn.Module]:
    model = _build(architecture, labels)
    return weights.load(model, path, architecture=architecture, labels=labels, key=key), model


def _same(first: nn.Module, second: nn.Module) -> bool:
    mine, yours = first.state_dict(), second.state_dict()
    return mine.keys() == yours.keys() and all(torch.equal(mine[name], yours[name]) for name in mine)


def _refused(path: Path, **options: Any) -> str:
    with pytest.raises(WeightsError) as caught:
        _load(path, **options)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


# Files of other tools


def test_torchvisions_reference_script_with_averaged_weights(tmp_path: Path) -> None:
    model = _fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.zeros(2, 3, 64, 64)).sum().backward()
    optimizer.step()
    average = AveragedModel(_fresh(2), use_buffers=True)
    args = argparse.Namespace(model="small", output_dir=tmp_path, lr=0.1, amp=None)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "lr_scheduler": {"last_epoch": 3}, "epoch": 3, "args": args}
    torch.save(saved | {"model_ema": average.state_dict()}, tmp_path / "model_3.pth")
    taken, found = _load(tmp_path / "model_3.pth")
    assert taken == Taken(key="model_ema", others=("model",), left_out=())
    assert _same(found, average.module)
    taken, found = _load(tmp_path / "model_3.pth", key="model")
    assert taken.key == "model"
    assert _same(found, model)


def test_timms_own_saver(tmp_path: Path) -> None:
    utils: Any = timm.utils
    model, average = _fresh(), utils.ModelEmaV3(_fresh(2))
    saver = utils.CheckpointSaver(
        model,
        torch.optim.SGD(model.parameters()),
        args=argparse.Namespace(model="test_efficientnet", log=Path("logs"), seed=np.int64(3)),
        model_ema=average,
        checkpoint_dir=str(tmp_path),
    )
    saver.save_checkpoint(0, metric=np.float64(0.5))
    taken, found = _load(tmp_path / "model_best.pth.tar")
    assert (taken.key, taken.others) == ("state_dict_ema", ("state_dict",))
    assert _same(found, average.module)


class AttributeDict(dict[str, Any]):  # Lightning's hyper-parameters: a dict, but not of that class
    def __getattr__(self, name: str) -> Any:
        return self[name]


@pytest.mark.parametrize("attribute", ["model", "net.backbone", "_orig_mod.net"])
def test_lightning_with_the_model_under_any_attribute(tmp_path: Path, attribute: str) -> None:
    model = _fresh()
    state = {f"{attribute}.{name}": tensor for name, tensor in model.state_dict().items()}
    saved = {
        "state_dict": state | {"criterion.weight": torch.ones(3)},
        "hyper_parameters": AttributeDict(lr=0.1, root=tmp_path, criterion=nn.CrossEntropyLoss, counts=collections.Counter("abc")),
        "hparams_name": "kwargs",
        "callbacks": {"ModelCheckpoint{'monitor': 'loss'}": {"best_model_score": torch.tensor(0.1), "kth": collections.deque([1, 2], 5)}},
        "optimizer_states": [collections.defaultdict(dict, {"state": {0: {"exp_avg": torch.zeros(3)}}})],
    }
    torch.save(saved, tmp_path / "last.ckpt")
    taken, found = _load(tmp_path / "last.ckpt")
    assert taken.key == f"state_dict.{attribute.removeprefix('_orig_mod.')}"
    assert taken.left_out == ("criterion.weight",)
    assert _same(found, model)


def _compiled(module: nn.Module) -> nn.Module:
    found = torch.compile(module)  # compiles nothing until it is called
    assert isinstance(found, nn.Module)
    return found


def test_the_names_that_wrappers_leave_anywhere(tmp_path: Path) -> None:
    model = _fresh()
    torch.save(nn.DataParallel(_compiled(_fresh())).state_dict(), tmp_path / "around.pth")
    inside = _fresh()
    inside.blocks = _compiled(inside.get_submodule("blocks"))
    torch.save(inside.state_dict(), tmp_path / "inside.pth")
    assert any("blocks._orig_mod." in name for name in torch.load(tmp_path / "inside.pth"))
    for name in ("around.pth", "inside.pth"):
        taken, found = _load(tmp_path / name)
        assert taken == Taken(key="", others=(), left_out=())
        assert _same(found, model)


def test_a_name_of_a_wrapper_that_is_the_architectures_own(tmp_path: Path) -> None:
    model = nn.Sequential(collections.OrderedDict(module=nn.Linear(2, 2)))
    weights.place(model, {"module.weight": torch.ones(2, 2), "module.bias": torch.ones(2)}, architecture="x", labels=2, source="x")
    assert torch.equal(model.state_dict()["module.weight"], torch.ones(2, 2))


@pytest.mark.parametrize("kind", ["safetensors", "zip", "legacy"])
def test_bare_state_dicts(tmp_path: Path, kind: str) -> None:
    model, path = _fresh(), tmp_path / "weights"
    if kind == "safetensors":
        safetensors.torch.save_file(model.state_dict(), path)
    else:
        torch.save(model.state_dict(), path, _use_new_zipfile_serialization=kind == "zip")
    assert _same(_load(path)[1], model)


def test_a_legacy_file_with_objects_in_it(tmp_path: Path) -> None:
    saved = {"state_dict": _fresh().state_dict(), "best": np.float32(1), "args": argparse.Namespace(seed=1)}
    torch.save(saved, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert _same(_load(tmp_path / "old.pth")[1], _fresh())


def test_a_state_dict_inside_a_dict_of_a_foreign_class(tmp_path: Path) -> None:
    torch.save(AttributeDict(net=_fresh().state_dict()), tmp_path / "model.pth")
    assert _load(tmp_path / "model.pth")[0].key == "net"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_become_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    model = _fresh()
    torch.save(_fresh().to(dtype).state_dict(), tmp_path / "half.pth")
    found = _load(tmp_path / "half.pth")[1].state_dict()
    assert found.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor.to(dtype).to(tensor.dtype) if tensor.is_floating_point() else tensor)


def test_parameters_instead_of_tensors_and_no_counts_of_batches(tmp_path: Path) -> None:
    model = _fresh()
    state = {name: nn.Parameter(tensor) for name, tensor in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    torch.save(state, tmp_path / "old.pth")
    found = _load(tmp_path / "old.pth")[1]
    model.eval()
    with torch.no_grad():
        assert torch.equal(found(torch.ones(1, 3, 64, 64)), model(torch.ones(1, 3, 64, 64)))


# Names that have changed, and what only training uses


@pytest.mark.parametrize(
    ("name", "now", "before"),
    [
        ("densenet121", r"(denselayer\d+\.(?:norm|conv))([12])\.", r"\1.\2."),
        ("vit_b_32", r"mlp\.(0)\.", "mlp.linear_1."),
        ("vit_b_32", r"mlp\.(3)\.", "mlp.linear_2."),
    ],
)
def test_old_names_are_placed(name: str, now: str, before: str) -> None:
    model = _build(name)
    trained = {key: tensor + 1 for key, tensor in model.state_dict().items()}
    old = {re.sub(now, before, key): tensor for key, tensor in trained.items()}
    assert old.keys() != trained.keys()
    weights.place(model, old, architecture=name, labels=3, source="old")
    assert all(torch.equal(tensor, trained[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_auxiliary_heads_are_left_out(tmp_path: Path, name: str) -> None:
    trained: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=3, aux_logits=True, init_weights=False)
    torch.save(trained.state_dict(), tmp_path / "model.pth")
    found = _load(tmp_path / "model.pth", architecture=name)[1]
    assert all(torch.equal(tensor, trained.state_dict()[key]) for key, tensor in found.state_dict().items())


def test_mnasnet_which_asks_for_a_version_of_its_own(tmp_path: Path) -> None:
    model = _build("mnasnet0_5")
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert _same(_load(tmp_path / "model.safetensors", architecture="mnasnet0_5")[1], model)


# Which weights


def test_averaged_weights_are_taken_though_they_count_no_batches(tmp_path: Path) -> None:
    average = {name: tensor for name, tensor in _fresh(2).state_dict().items() if not name.endswith("num_batches_tracked")}
    torch.save({"model": _fresh().state_dict(), "ema_state_dict": average}, tmp_path / "model.pth")
    assert _load(tmp_path / "model.pth")[0] == Taken(key="ema_state_dict", others=("model",), left_out=())


def test_two_that_fit_are_not_guessed_between(tmp_path: Path) -> None:
    torch.save({"student": _fresh().state_dict(), "teacher": _fresh(2).state_dict()}, tmp_path / "model.pth")
    assert _refused(tmp_path / "model.pth").endswith("choose one with --key: student, teacher")
    assert _same(_load(tmp_path / "model.pth", key="teacher")[1], _fresh(2))


def test_two_prefixes_of_one_state_dict(tmp_path: Path) -> None:
    plain, average = _fresh().state_dict(), AveragedModel(_fresh(2)).state_dict()
    state = {f"net.{name}": tensor for name, tensor in plain.items()} | {f"ema.{name}": tensor for name, tensor in average.items()}
    torch.save({"state_dict": state}, tmp_path / "model.ckpt")
    taken, found = _load(tmp_path / "model.ckpt")
    assert taken.key == "state_dict.ema"
    assert len(taken.left_out) == len(plain)
    assert _same(found, _fresh(2))
    assert _same(_load(tmp_path / "model.ckpt", key="state_dict.net")[1], _fresh())


def test_one_model_under_two_names_is_one_model(tmp_path: Path) -> None:
    holder = nn.Module()
    holder.model = _fresh()
    holder.compiled = _compiled(holder.model)
    torch.save({"state_dict": holder.state_dict()}, tmp_path / "model.ckpt")
    assert _load(tmp_path / "model.ckpt")[0].key == "state_dict.model"


@pytest.mark.parametrize("key", ["nothing", "optimizer", "mode", ""])
def test_an_unknown_key_lists_what_is_there(tmp_path: Path, key: str) -> None:
    saved = {"model": _fresh().state_dict(), "optimizer": {"state": {0: torch.ones(1)}}, "epoch": 3, "args": argparse.Namespace()}
    torch.save(saved, tmp_path / "model.pth")
    count = len(_fresh().state_dict())
    listed = f"the file holds model ({count} weights), optimizer (dict), epoch (int), args (argparse.Namespace)"
    assert _refused(tmp_path / "model.pth", key=key) == f"no weights of {SMALL} under the key {key!r}; {listed}"


# Weights that don't fit


def test_a_larger_architecture_with_the_same_names_is_never_cut_down(tmp_path: Path) -> None:
    torch.save(_build("resnet34").state_dict(), tmp_path / "model.pth")
    extra = "96 weights are not resnet18's, the first is layer1.2.conv1.weight; is it another architecture? (--arch)"
    assert _refused(tmp_path / "model.pth", architecture="resnet18") == extra
    missing = _refused(tmp_path / "model.pth", architecture="resnet50")
    assert re.match(r"\d+ of resnet50's 320 weights are missing, the first is layer1.0.conv3.weight; .*--arch", missing)


def test_another_architecture_is_named_with_what_is_there(tmp_path: Path) -> None:
    torch.save(_build("resnet18").state_dict(), tmp_path / "model.pth")
    message = _refused(tmp_path / "model.pth")
    assert message.startswith(f"no weights of {SMALL}; the file holds conv1.weight ([64, 3, 7, 7]), bn1.weight ([64])")
    assert message.endswith(" and 110 more")


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_missing_weight_is_named(tmp_path: Path, prefix: str) -> None:
    state = {f"{prefix}{name}": tensor for name, tensor in _fresh().state_dict().items()}
    del state[f"{prefix}classifier.bias"]
    torch.save({"state_dict": state}, tmp_path / "model.pth")
    message = _refused(tmp_path / "model.pth")
    assert message.startswith(f"state_dict{'.' + prefix.strip('.') if prefix else ''}: 1 of {SMALL}'s {len(state) + 1} weights are missing")
    assert "the first is classifier.bias" in message


def test_a_head_of_another_make_is_named(tmp_path: Path) -> None:
    state = {name.replace("classifier.", "classifier.1."): tensor for name, tensor in _fresh().state_dict().items()}
    torch.save(state, tmp_path / "model.pth")
    message = _refused(tmp_path / "model.pth")
    assert "the first is classifier.weight; 2 weights are not timm:test_efficientnet's, the first is classifier.1.weight" in message


def test_a_weight_that_is_there_twice_is_not_guessed(tmp_path: Path) -> None:
    state = _fresh().state_dict()
    torch.save(state | {f"module.{name}": tensor for name, tensor in _fresh(2).state_dict().items()}, tmp_path / "model.pth")
    assert "weights of one name, with and without a wrapper's" in _refused(tmp_path / "model.pth")


def test_rows_of_the_head_that_are_not_the_labels(tmp_path: Path) -> None:
    torch.save(_fresh().state_dict(), tmp_path / "model.pth")
    message = _refused(tmp_path / "model.pth", labels=5)
    assert re.search(r"^classifier.weight has shape \[3, \d+\], \S+ needs \[5, \d+\], so 3 labels belong to it; 5 were given", message)


def test_a_wrong_shape_is_named_with_both(tmp_path: Path) -> None:
    torch.save({"model": _build("wide_resnet50_2").state_dict()}, tmp_path / "model.pth")
    message = _refused(tmp_path / "model.pth", architecture="resnet50")
    assert message.startswith("model: layer1.0.conv1.weight has shape [128, 64, 1, 1], resnet50 needs [64, 64, 1, 1]; is it another arch")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, value: float) -> None:
    state = _fresh().state_dict()
    state["classifier.weight"][0, 0] = value
    torch.save(state, tmp_path / "model.pth")
    assert _refused(tmp_path / "model.pth").startswith("classifier.weight is not finite everywhere")


@pytest.mark.parametrize("kind", ["int8", "complex64", "meta"])
def test_weights_that_are_no_plain_numbers_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    state = _fresh().state_dict()
    weight = state["classifier.weight"]
    state["classifier.weight"] = weight.to("meta") if kind == "meta" else weight.to(getattr(torch, kind))
    torch.save(state, tmp_path / "model.pth")
    message = _refused(tmp_path / "model.pth")
    assert re.match(r"classifier.weight is torch\.\w+ on \w+; it must be torch.float32, with its values", message)
    assert kind in message


def test_sparse_weights_count_as_missing(tmp_path: Path) -> None:
    state = _fresh().state_dict()
    torch.save(state | {"classifier.weight": state["classifier.weight"].to_sparse()}, tmp_path / "model.pth")
    assert "weights are missing, the first is classifier.weight" in _refused(tmp_path / "model.pth")


# Nothing in a file is run


class Hostile:
    def __init__(self, function: Any, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("call", ["os.system", "builtins.exec", "pathlib.Path.touch"])
def test_a_hostile_pickle_runs_nothing(tmp_path: Path, call: str, legacy: bool) -> None:
    trace, path = tmp_path / "ran", tmp_path / "model.pth"
    hostile = {
        "os.system": Hostile(os.system, f"touch {trace}"),
        "builtins.exec": Hostile(exec, f"import pathlib; pathlib.Path({str(trace)!r}).touch()"),
        "pathlib.Path.touch": Hostile(Path.touch, trace),
    }[call]
    torch.save({"model": _fresh().state_dict(), "args": hostile}, path, _use_new_zipfile_serialization=not legacy)
    if call == "builtins.exec":  # a mere name here, so the weights beside it can be had
        assert _load(path)[0].key == "model"
    else:
        assert "can't be read as weights" in _refused(path)
    assert not trace.exists()
    torch.load(path, weights_only=False)
    assert trace.exists()


def test_nothing_foreign_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_config.py").write_text("class Config:\n    def __init__(self):\n        self.lr = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    torch.save({"model": _fresh().state_dict(), "config": importlib.import_module("some_config").Config()}, tmp_path / "model.pth")
    del sys.modules["some_config"]
    allowed = {*torch.serialization.get_safe_globals()}
    assert _same(_load(tmp_path / "model.pth")[1], _fresh())
    assert "some_config" not in sys.modules
    assert {*torch.serialization.get_safe_globals()} == allowed


@pytest.mark.parametrize("legacy", [False, True])
def test_a_whole_pickled_module_is_refused_with_what_to_do(tmp_path: Path, legacy: bool) -> None:
    torch.save(_fresh(), tmp_path / "model.pth", _use_new_zipfile_serialization=not legacy)
    message = _refused(tmp_path / "model.pth")
    assert legacy or message.startswith("a whole pickled object (timm.models.efficientnet.EfficientNet)")
    assert message.endswith("save the state dict alone: torch.save(model.state_dict(), FILE)")


def test_a_whole_module_in_an_entry_is_refused_likewise(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "model": _fresh()}, tmp_path / "model.pth")
    message = _refused(tmp_path / "model.pth")
    assert "the file holds epoch (int), model (timm.models.efficientnet.EfficientNet); save the state dict alone" in message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\3\4",
        b"<!DOCTYPE html>",
        pickle.dumps({"a": 1}),
        b"\x10\0\0\0\0\0\0\0{broken         ",
        b"version https://git-lfs.github.com",
    ],
)
def test_what_is_no_file_of_weights_is_refused_in_one_line(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.pth").write_bytes(data)
    assert re.match(r"can't be read as weights \(.+\); save the state dict alone", _refused(tmp_path / "model.pth"))


def test_other_things_that_torch_saves_are_refused(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pth")
    assert "the file holds list; save the state dict alone" in _refused(tmp_path / "list.pth")
    torch.save({"model": _fresh().state_dict()}, tmp_path / "protocol.pth", pickle_protocol=4)
    assert "can't be read as weights" in _refused(tmp_path / "protocol.pth")
    torch.save({}, tmp_path / "empty.pth")
    assert "the file holds nothing" in _refused(tmp_path / "empty.pth")


def test_a_path_to_no_file_is_refused(tmp_path: Path) -> None:
    assert _refused(tmp_path / "absent.pth") == "no such file"
    assert _refused(tmp_path) == "not a file"
