"""A conversion is made once, by one process, and is whole or not there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino
import pytest

from models import checkpoint
from models.checkpoint import CheckpointError
from service import conversion
from service.conversion import ConversionError, ensure
from tests.conftest import with_another_weight

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def converted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure(tiny, tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_it_gives_the_models_logits_and_probabilities_for_pixels_in_any_number(converted: Path, tiny: Path, count: int) -> None:
    golden = checkpoint.read_golden(tiny)
    compiled = openvino.Core().compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1})
    logits, probabilities = compiled([golden.pixels[:count]]).to_tuple()
    np.testing.assert_allclose(logits, golden.logits[:count], rtol=0, atol=1e-4)
    np.testing.assert_allclose(probabilities, golden.probabilities[:count], rtol=0, atol=1e-5)
    assert logits.dtype == probabilities.dtype == np.float32


def test_it_is_made_once_and_found_without_torch(converted: Path, tiny: Path) -> None:
    before = converted.stat()
    code = """
import sys
from pathlib import Path
from service.conversion import ensure
print(ensure(Path(sys.argv[1]), Path(sys.argv[2])), "torch" in sys.modules)
"""
    command = [sys.executable, "-c", code, str(tiny), str(converted.parent.parent)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert ended.stdout == f"{converted} False\n"
    assert converted.stat() == before
    assert [path.name for path in converted.parent.parent.iterdir()] == [converted.parent.name]


def test_of_several_that_ask_at_once_one_converts(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    convert = conversion._convert_in_a_child

    def counted(path: Path, folder: Path) -> None:
        asked.append(folder)
        convert(path, folder)

    monkeypatch.setattr(conversion, "_convert_in_a_child", counted)
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: ensure(tiny, tmp_path), range(4)))
    assert len(found) == len(asked) == 1


def test_what_decides_the_conversion_decides_its_place(tiny: Path, tmp_path: Path) -> None:
    header = checkpoint.read_header(tiny)
    others = [replace(header, version="0123456789ab"), replace(header, architecture="timm:test_resnet")]
    assert len({conversion.folder_of(each, tmp_path) for each in (header, *others)}) == 3


def test_a_conversion_in_an_older_form_is_not_used(converted: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_FORM", 1)  # it gave probabilities only
        older = conversion.folder_of(checkpoint.read_header(tiny), tmp_path)
    older.mkdir()
    (older / "model.xml").touch()
    monkeypatch.setattr(conversion, "_convert_in_a_child", lambda _, folder: shutil.copytree(converted.parent, folder))
    assert ensure(tiny, tmp_path).read_bytes() == converted.read_bytes()


def test_an_interrupted_conversion_leaves_nothing_that_counts(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.bin").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "_convert_in_a_child", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ensure(tiny, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_conversion_left_is_removed_by_the_next(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / ".killed.part" / "made").mkdir(parents=True)
    model = ensure(tiny, tmp_path)
    assert list(tmp_path.iterdir()) == [model.parent]


def test_openvino_is_kept_from_reporting_its_use() -> None:
    code = "import sys, service.openvino_engine, openvino.tools.ovc; print(sys.modules['openvino_telemetry'])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ended.stdout == "None\n"


def test_a_model_that_can_not_be_converted_says_why(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConversionError, match="exit code 1"):
        ensure(tiny, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_was_changed_is_not_converted(tiny: Path, tmp_path: Path) -> None:
    changed = with_another_weight(tiny, tmp_path / "changed.safetensors")
    with pytest.raises(ConversionError, match=r"changed\.safetensors: version: .* the file was changed"):
        ensure(changed, tmp_path / "cache")


def test_no_such_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        ensure(tmp_path / "none.safetensors", tmp_path)


def test_the_child_ends_with_its_parent(tiny: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "service.conversion", str(tiny), str(tmp_path / "made")]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT)
    assert child.stdin is not None
    child.stdin.close()  # what the end of the parent does
    assert child.wait(30) == 1
    assert not (tmp_path / "made").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_can_not_be_written_is_an_oserror(tiny: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="denied"):
        ensure(tiny, tmp_path / "cache")
