"""Which engine a worker gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from models.checkpoint import CheckpointError
from service import conversion
from service.conversion import ConversionError
from service.engine import Engine
from service.loop import build_engine
from service.slots import Layout, Memory, WakePipe
from tests.conftest import with_another_weight
from tests.test_worker import options_for


def build(tiny: Path, cache: Path, **changes: Any) -> Engine:
    memory = Memory(Layout(slots=2, crop=32, classes=10, workers=1, doors=1))
    return build_engine(options_for(tiny, memory, [], [WakePipe()], cache_dir=cache, **changes), "cpu")


def test_a_cpu_gets_openvino_or_the_engine_that_was_asked_for(tiny: Path, tmp_path: Path) -> None:
    assert build(tiny, tmp_path).name == "openvino"
    assert build(tiny, tmp_path, engine="torch").name == "torch"


def test_a_model_that_openvino_can_not_take_is_served_by_torch_and_says_why(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(checkpoint: Path, folder: Path) -> None:
        raise ConversionError("aten::peculiar is not known")

    monkeypatch.setattr(conversion, "_convert_in_a_child", fail)
    engine = build(tiny, tmp_path)
    assert engine.name == "torch"
    assert engine.why.startswith("OpenVINO can't serve this model (aten::peculiar is not known); torch: fp32 reproduces")
    with pytest.raises(ConversionError):
        build(tiny, tmp_path, engine="openvino")


def test_a_changed_checkpoint_is_refused_by_either_engine(tiny: Path, tmp_path: Path) -> None:
    changed = with_another_weight(tiny, tmp_path / "changed.safetensors")
    for engine in ("auto", "openvino", "torch"):
        with pytest.raises(CheckpointError, match="the file was changed"):
            build(changed, tmp_path / "cache", engine=engine)
