"""python -m models: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import save_file

from models import __main__ as command_line
from models import architectures, checkpoint
from models.export import logits
from models.preprocessing import Preprocessing
from models.pretrained import PullError
from tests.conftest import EXAMPLES, encode, make_tiny

SMALL = "timm:test_efficientnet"
LABELS = ("猫", "hot dog", "Löwe, männlich")


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A folder with weights as a training script saves them, beside their labels."""
    torch.manual_seed(1)
    model = architectures.build(SMALL, num_classes=3, image_size=32)
    state = {f"net.{name}": tensor for name, tensor in model.state_dict().items()} | {"criterion.weight": torch.ones(3)}
    torch.save({"state_dict": state, "args": argparse.Namespace(lr=0.1)}, tmp_path / "best.pth.tar")
    (tmp_path / "labels.txt").write_text("\n".join(LABELS), encoding="utf-8")
    return tmp_path


def _export(folder: Path, *more: str, weights: str = "best.pth.tar", arch: str = SMALL, labels: str = "labels.txt") -> int:
    return command_line.main(["export", str(folder / weights), "--arch", arch, "--labels", str(folder / labels), *more])


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "models", *arguments]
    return subprocess.run(command, capture_output=True, cwd=EXAMPLES.parent, env=os.environ | environment, check=False)


def _error(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of what was refused."""
    found = re.fullmatch(r"error: ([^\n]+)\n", capsys.readouterr().err)
    assert found is not None
    return found[1]


# export


def test_export_end_to_end_gives_the_models_own_logits(given: Path) -> None:
    source = torchvision.models.resnet18(num_classes=3).eval()
    torch.save({"model": source.state_dict(), "args": argparse.Namespace(workers=16)}, given / "model_89.pth")
    out = given / "new folder" / "pets.safetensors"
    ended = _run("export", str(given / "model_89.pth"), "--arch", "resnet18", "--labels", str(given / "labels.txt"), "-o", str(out))
    assert (ended.returncode, ended.stderr) == (0, b"")
    found = checkpoint.load(out)
    assert (found.header.name, found.header.architecture, found.header.labels) == ("pets", "resnet18", LABELS)
    transform = torchvision.models.ResNet18_Weights.DEFAULT.transforms()
    pixels = found.golden_pixels.permute(0, 3, 1, 2) / 255
    normalized = torchvision.transforms.functional.normalize(pixels, transform.mean, transform.std)
    with torch.inference_mode():
        torch.testing.assert_close(found.golden_logits, source(normalized), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(found.model, found.header.preprocessing, found.golden_pixels), found.golden_logits)


def test_export_says_what_it_took_left_out_and_assumed(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = given / "pets.safetensors"
    assert _export(given, "-o", str(out)) == 0
    first = checkpoint.read_header(out)
    assert capsys.readouterr().out.splitlines() == [
        f"weights: state_dict.net of {given}/best.pth.tar",
        "left out: criterion.weight",
        "preprocessing: resize 168, crop 160, bicubic, mean 0.485 0.456 0.406, std 0.229 0.224 0.225; "
        f"of the published weights of {SMALL}, but for what you gave",
        "golden samples: 16, which go into the file, from examples/; --golden-from FOLDER takes your own",
        f"{out}: pets, version {first.version}, 3 labels, 1.6 MB",
        f"serve it: {checkpoint.python()} -m service --checkpoint {out}",
    ]
    assert first.origin["weights"] == "best.pth.tar"
    assert first.origin["key"] == "state_dict.net"
    assert first.origin["recipe"] == "exported weights"
    assert first.origin["sha256"] == hashlib.sha256((given / "best.pth.tar").read_bytes()).hexdigest()
    assert "licence" not in first.origin
    assert _export(given, "-o", str(out), "--crop", "32") == 0
    assert f", replaces version {first.version}\n" in capsys.readouterr().out


def test_export_says_which_other_weights_there_are(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = architectures.build(SMALL, num_classes=3, image_size=32).state_dict()
    torch.save({"model": state, "model_ema": state}, given / "both.pth")
    assert _export(given, "-o", str(given / "pets.safetensors"), weights="both.pth") == 0
    assert capsys.readouterr().out.startswith(f"weights: model_ema of {given}/both.pth; --key takes another: model\n")
    assert _export(given, "-o", str(given / "pets.safetensors"), "--key", "model", weights="both.pth") == 0
    assert checkpoint.read_header(given / "pets.safetensors").origin["key"] == "model"


def test_export_writes_into_checkpoints_under_the_files_name(given: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(given)
    assert _export(given, "--crop", "32") == 0
    assert checkpoint.read_header(Path("checkpoints/best.safetensors")).name == "best"


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (["--crop", "32"], {"resize": 34, "crop": 32}),  # 32 * 168 / 160 = 33.6
        (["--crop", "32", "--resize", "64"], {"resize": 64, "crop": 32}),
        (["--resize", "200", "--interpolation", "bilinear"], {"resize": 200, "interpolation": "bilinear"}),
        (["--mean", "0", "0.1", "0.2", "--std", "1", "1", "0.5"], {"mean": (0.0, 0.1, 0.2), "std": (1.0, 1.0, 0.5)}),
    ],
)
def test_export_takes_single_values_of_the_preprocessing(given: Path, options: list[str], changes: dict[str, Any]) -> None:
    assert _export(given, "-o", str(given / "pets.safetensors"), *options) == 0
    expected = architectures.preprocessing_of(SMALL).to_dict() | changes
    found = checkpoint.read_header(given / "pets.safetensors").preprocessing
    assert found == Preprocessing.from_dict(expected)


def test_export_takes_golden_samples_of_a_folder(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (given / "photos").mkdir()
    (given / "photos" / "red.png").write_bytes(encode((255, 0, 0)))
    assert _export(given, "-o", str(given / "pets.safetensors"), "--golden-from", str(given / "photos")) == 0
    assert f"golden samples: 16, which go into the file, from photographs in {given}/photos\n" in capsys.readouterr().out
    found = checkpoint.load(given / "pets.safetensors")
    assert found.header.origin["golden_samples"] == "photos/"
    assert found.golden_pixels.flatten(0, 2).unique(dim=0).tolist() == [[255, 0, 0]]


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"weights": "absent.pth"}, [], "absent.pth: no such file"),
        ({"weights": "labels.txt"}, [], "labels.txt: can't be read as weights"),
        ({"labels": "absent.txt"}, [], "absent.txt: no such file or folder"),
        ({"labels": "."}, [], "no folder in it"),
        ({"arch": "resnet51"}, [], "unknown architecture 'resnet51' (close: resnet"),
        ({"arch": "timm:resnet18"}, [], "best.pth.tar: no weights of timm:resnet18; the file holds state_dict ("),
        ({}, ["--key", "model"], "no weights of timm:test_efficientnet under the key 'model'"),
        ({}, ["--crop", "300", "--resize", "200"], "preprocessing.crop is 300; allowed is at most resize, which is 200"),
        ({}, ["--interpolation", "sinc"], "preprocessing.interpolation is 'sinc'; allowed is one of bicubic, bilinear"),
        ({}, ["--std", "1", "1", "0"], "preprocessing.std is (1.0, 1.0, 0.0)"),
        ({}, ["--mean", "123.7", "116.3", "103.5"], "--mean 123.7 116.3 103.5: white is 1 here; divide it, and --std, by 255"),
        ({}, ["--golden-from", "absent"], "absent: no such folder"),
        ({}, ["--golden-from", "tests"], "tests: no image in it that can be read"),
    ],
)
def test_export_refuses_wrong_input_with_2_and_one_line(
    given: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], options: list[str], message: str
) -> None:
    assert _export(given, "-o", str(given / "new" / "pets.safetensors"), *options, **changes) == 2
    assert message in _error(capsys)
    assert not (given / "new").exists()


def test_weights_need_an_architecture_and_labels(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["export", str(given / "best.pth.tar"), "--arch", SMALL]) == 2
    assert _error(capsys).startswith(f"{given}/best.pth.tar: --arch NAME and --labels LABELS are needed")


def test_export_never_replaces_the_weights_themselves(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = architectures.build(SMALL, num_classes=3, image_size=32).state_dict()
    save_file(state, given / "best.safetensors")
    before = (given / "best.safetensors").read_bytes()
    assert _export(given, "-o", str(given / "." / "best.safetensors"), weights="best.safetensors") == 2
    assert "would replace the weights themselves" in _error(capsys)
    assert (given / "best.safetensors").read_bytes() == before


# pull


def test_pull_writes_into_a_new_folder_and_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "some" / "folder" / "model.safetensors"
    assert command_line.main(["pull", "efficientnet_lite0", "-o", str(path)]) == 0
    version = checkpoint.read_header(path).version
    assert capsys.readouterr().out == f"{path}: efficientnet_lite0, version {version}, 1000 labels, 21.3 MB\n"


def _pull_fails_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> list[Path]:
    written: list[Path] = []

    def fail(_: str, path: Path) -> None:
        written.append(path)
        raise error

    monkeypatch.setattr("models.pretrained.pull", fail)
    return written


def test_pull_without_an_output_writes_into_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written = _pull_fails_with(monkeypatch, PullError("enough"))
    assert command_line.main(["pull", "resnet18"]) == 1
    assert written == [Path("checkpoints/resnet18.safetensors")]


@pytest.mark.parametrize("out", ["file/model.safetensors", "folder.safetensors"])
def test_a_path_that_cannot_be_written_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.safetensors").mkdir()
    assert command_line.main(["pull", "efficientnet_lite0", "-o", str(tmp_path / out)]) == 2
    assert _error(capsys).startswith(f"{tmp_path}/{out.partition('/')[0]}: ")


def test_pull_refuses_an_unknown_name_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["pull", "resnet51"]) == 2
    assert "no public weights for 'resnet51'" in _error(capsys)


# inspect


def test_inspect_shows_the_header_readably(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_tiny(tmp_path / "tiny.safetensors")
    assert command_line.main(["inspect", str(path)]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    shown = {name: value for name, value in (re.split(" {2,}", line.strip(), maxsplit=1) for line in lines)}
    assert first == f"{path}, {path.stat().st_size / 1e6:.1f} MB"
    assert (shown["name"], shown["version"]) == ("tiny", checkpoint.read_header(path).version)
    assert (shown["architecture"], shown["temperature"], shown["metrics"], shown["origin.data"]) == (SMALL, "1.0", "none", "none")
    assert shown["labels"] == '10: "label 0", "label 1", "label 2", "label 3", "label 4" and 5 more'
    assert shown["preprocessing"] == "resize 32, crop 32, bilinear, mean 0.5 0.5 0.5, std 0.25 0.25 0.25, background 255 255 255"


def test_inspect_as_json_gives_the_whole_header(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _export(given, "-o", str(given / "pets.safetensors")) == 0
    capsys.readouterr()
    assert command_line.main(["inspect", str(given / "pets.safetensors"), "--json"]) == 0
    output = capsys.readouterr().out
    assert json.loads(output) == checkpoint.read_header(given / "pets.safetensors").to_dict()
    assert '"猫"' in output


def test_inspect_prints_labels_that_the_terminal_cannot_write(given: Path) -> None:
    assert _export(given, "-o", str(given / "Ärzte 🐈.safetensors")) == 0
    shown = _run("inspect", str(given / "Ärzte 🐈.safetensors"), PYTHONIOENCODING="ascii")
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert rb'3: "\u732b", "hot dog", "L\u00f6we, m\u00e4nnlich"' in shown.stdout
    document = _run("inspect", str(given / "Ärzte 🐈.safetensors"), "--json", PYTHONIOENCODING="ascii")
    assert json.loads(document.stdout)["labels"] == list(LABELS)
    assert json.loads(document.stdout)["name"] == "Ärzte 🐈"


def test_inspect_escapes_what_would_move_the_cursor(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _export(given, "-o", str(given / "a\x1b[2J.safetensors")) == 0
    capsys.readouterr()
    assert command_line.main(["inspect", str(given / "a\x1b[2J.safetensors")]) == 0
    assert re.search(r'name +"a\\u001b\[2J"\n', capsys.readouterr().out)


def test_inspect_imports_no_torch(tiny: Path) -> None:
    code = "import sys; from models.__main__ import main; main(['inspect', sys.argv[1]]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(tiny)], cwd=EXAMPLES.parent, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("name", ["absent.safetensors", "", "labels.txt"])
def test_inspect_refuses_what_is_no_checkpoint(given: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert command_line.main(["inspect", str(given / name)]) == 2
    assert _error(capsys).startswith(f"{given / name}: no")


# Exit codes


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (PullError("no network"), 1, "error: no network"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "error: [Errno 28] No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "/root/x"), 2, "error: /root/x: Permission denied"),
        (ValueError("--x is 3"), 2, "error: --x is 3"),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
)
def test_each_failure_has_its_exit_code_and_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
) -> None:
    _pull_fails_with(monkeypatch, error)
    assert command_line.main(["pull", "resnet18"]) == code
    assert capsys.readouterr().err == f"{line}\n"


def test_a_full_disk_ends_with_1_and_leaves_nothing(given: Path) -> None:
    code = (
        "import resource, sys; from models.__main__ import main; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        "sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["export", str(given / "best.pth.tar"), "--arch", SMALL, "--labels", str(given / "labels.txt")]
    command = [sys.executable, "-c", code, *arguments, "-o", str(given / "new" / "pets.safetensors")]
    ended = subprocess.run(command, cwd=EXAMPLES.parent, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert re.fullmatch(r"error: [^\n]+\n", ended.stderr)
    assert list((given / "new").iterdir()) == []


def test_a_reader_that_has_seen_enough_is_no_error(tiny: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "models", "inspect", str(tiny)]
    ended = subprocess.run(command, cwd=EXAMPLES.parent, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")


WRONG = [
    "",
    "pull",
    "push resnet18",
    "pull resnet18 --out",
    "pull a b",
    "pull a --out a.pth",
    "export a --arch b --labels c --crop x",
    "inspect",
]


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_arguments_end_with_2_and_one_line(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command_line.main(arguments.split())
    assert caught.value.code == 2
    assert re.search(r"; `python -m models\b.* --help` says more$", _error(capsys))
