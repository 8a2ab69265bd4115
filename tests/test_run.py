"""The whole path: photographs in folders -> training -> a checkpoint -> the server -> JSON; and what can be wrong on the way."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models import __main__ as command_line
from models import checkpoint, run
from models.recipe import TrainConfig
from models.run import train
from models.training import BEST
from tests.conftest import EXAMPLES, StartServer, encode, make_data

LABELS = ["蜜蜂", "red ant"]


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    full = [sys.executable, "-m", "models", *map(str, arguments)]
    return subprocess.run(full, capture_output=True, text=True, cwd=EXAMPLES.parent, check=False, timeout=120)


def test_from_photographs_to_an_answer(tmp_path: Path, tiny: Path, start_server: StartServer) -> None:
    data = make_data(tmp_path / "bees and ants", LABELS, train=12, val=6)
    (data / "val/蜜蜂/broken.jpg").write_bytes(b"no image")
    out, folder = tmp_path / "bees.safetensors", tmp_path / "runs" / "first"
    trained = command(
        "train", data, "--init", tiny, "--epochs", 6, "--batch-size", 8, "--lr", 0.01, "--run", folder, "--out", out, "--max-bad", 0.05
    )
    assert trained.returncode == 0, trained.stderr
    assert "\r" not in trained.stderr
    assert f"left out: {data}/val/蜜蜂/broken.jpg: These 8 bytes are no image\n" in trained.stderr
    assert len(re.findall(r"^epoch \d/6: train loss ", trained.stderr, re.M)) == 6
    assert {file.name for file in folder.iterdir()} == {"config.json", "metrics.jsonl", BEST, "bad_files.txt"}

    header = checkpoint.read_header(out)
    assert (header.labels, header.name) == (("red ant", "蜜蜂"), "bees")
    assert header.preprocessing == checkpoint.read_header(tiny).preprocessing
    assert header.origin["data"]["val"] == {"red ant": 6, "蜜蜂": 6}
    assert header.metrics["samples"] == 12

    evaluated = command("evaluate", out, data, "--json", "--max-bad", 0.1)
    assert evaluated.returncode == 0, evaluated.stderr
    document = json.loads(evaluated.stdout)
    assert document["top1"] == header.metrics["top1"] >= 0.9
    # Evaluated with torch: another engine rounds in other places.
    for engine, tolerance in (("torch", 1e-3), ("auto", 0.05)):
        server = start_server(out, "--engine", engine)
        for image in document["images"]:
            answer = server.post(Path(image["file"]).read_bytes(), params={"top_k": 5}).json()
            assert len(answer["predictions"]) == 2  # as many as there are labels
            assert answer["predictions"][0]["label"] == image["predicted"]
            assert answer["predictions"][0]["probability"] == pytest.approx(image["probability"], abs=tolerance)


def config(data: Path, init: Path | None, **changes: object) -> TrainConfig:
    where = {"run": data.parent / "runs" / "one", "out": data.parent / "out.safetensors"}
    return TrainConfig(**{"data": data, "init": init, "epochs": 1, "batch_size": 4, **where, **changes})  # type: ignore[arg-type]


def test_golden_samples_are_validation_images_of_all_classes_or_those_of_a_folder(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_data(tmp_path / "data", "abc", train=2, val=8)
    train(config(data, tiny))
    assert (
        "golden samples: 16, which go into the file, from the validation images; --golden-from FOLDER takes others"
        in capsys.readouterr().err
    )
    found = checkpoint.load(tmp_path / "out.safetensors")
    pixels = {label: [found.header.preprocessing.read(file.read_bytes()) for file in (data / "val" / label).iterdir()] for label in "abc"}
    of_class = [
        next(label for label in "abc" if any((sample.numpy() == one).all() for one in pixels[label])) for sample in found.golden_pixels
    ]
    assert {label: of_class.count(label) for label in "abc"} == {"a": 6, "b": 5, "c": 5}

    header = train(config(data, tiny, run=tmp_path / "runs/two", golden_from=EXAMPLES))
    assert header.origin["golden_samples"] == "examples/"
    again = checkpoint.load(tmp_path / "out.safetensors").golden_pixels
    assert not any(torch.equal(sample, other) for sample in again for other in found.golden_pixels)


def test_the_same_labels_keep_their_head_and_others_get_a_new_one(tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = [f"label {index}" for index in range(10)]
    config_ = config(make_data(tmp_path / "same", own, train=1, val=1), tiny)
    found = run._begin(config_, tuple(own))
    state, before = found.model.state_dict(), checkpoint.load(tiny).model.state_dict()
    assert found.new_head == frozenset()
    assert all(torch.equal(state[name], before[name]) for name in before)
    found = run._begin(config_, (*own[:9], "another"))
    assert found.new_head == {"classifier.weight", "classifier.bias"}
    state = found.model.state_dict()
    assert {name for name in before if not torch.equal(state[name], before[name])} == found.new_head
    assert state["classifier.weight"].abs().max() < 0.1
    assert (
        capsys.readouterr()
        .err.splitlines()[1]
        .endswith("with the weights of tiny " + checkpoint.read_header(tiny).version + " and a new head")
    )


def test_random_weights_of_an_architecture_get_its_published_preprocessing_in_the_size_asked_for(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data", "ab", train=2, val=1)
    header = train(config(data, None, arch="timm:test_efficientnet", image_size=48))
    assert header.architecture == "timm:test_efficientnet"
    assert (header.preprocessing.crop, header.preprocessing.interpolation) == (48, "bicubic")
    assert header.origin["init"] is None
    assert header.origin["recipe"]["lr"] == 1e-3


def test_modules_that_ask_for_the_version_of_their_weights_get_it(tmp_path: Path) -> None:
    """On the way into the run, out of it, into the checkpoint and back: mnasnet refuses weights without it."""
    data = make_data(tmp_path / "data", "ab", train=1, val=1)
    out = tmp_path / "out.safetensors"
    train(config(data, None, arch="mnasnet0_5", image_size=32))
    header = train(config(data, out, run=tmp_path / "runs/two"))
    assert header.architecture == checkpoint.load(out).header.architecture == "mnasnet0_5"


def test_one_file_for_each_class_is_enough_to_run(tmp_path: Path, tiny: Path) -> None:
    header = train(config(make_data(tmp_path / "data", "ab", train=1, val=1), tiny))
    assert header.metrics["samples"] == 2


def test_a_second_run_decodes_nothing_and_an_existing_run_is_refused(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_data(tmp_path / "data", "ab", train=2, val=2)
    train(config(data, tiny))
    monkeypatch.setattr("models.data.read_file", lambda file: pytest.fail(f"{file} was read"))
    train(config(data, tiny, run=tmp_path / "runs/two"))
    with pytest.raises(ValueError, match=rf"^--run {tmp_path}/runs/one: is there already; name another, or remove it"):
        train(config(data, tiny))


def arguments(tmp_path: Path, tiny: Path) -> list[str]:
    data = make_data(tmp_path / "data", "ab", train=2, val=2)
    return [
        "train",
        str(data),
        "--init",
        str(tiny),
        "--epochs",
        "1",
        "--run",
        str(tmp_path / "runs/a"),
        "--out",
        str(tmp_path / "out.safetensors"),
    ]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--epochs", "0"], "--epochs 0: allowed is 1 or more"),
        (["--arch", "resnet18"], "give one of --init CHECKPOINT and --arch NAME"),
        (["--init", "{0}/none.safetensors"], "{0}/none.safetensors: no such file"),
        (["--device", "cuda:99"], "--device cuda:99 is not possible: "),
        (["--out", "{0}/folder.safetensors"], "--out {0}/folder.safetensors: is there already and no regular file"),
        (["--out", "{0}/out.pth"], "--out {0}/out.pth: allowed is a name that ends in .safetensors"),
        (["--epoch", "3"], "unrecognized arguments: --epoch 3"),
        (["--out", "/proc/none/x.safetensors"], "--out /proc/none/x.safetensors: can't be written there"),
        (["--golden-from", "{0}/none"], "{0}/none: no such folder"),
        (["--epochs", "many"], "argument --epochs: invalid int value: 'many'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_anything_is_written(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    given = [*arguments(tmp_path, tiny), *(word.format(tmp_path) for word in more)]
    try:
        code = command_line.main(given)
    except SystemExit as end:  # argparse's own
        code = int(end.code or 0)
    assert code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if " with the weights of " not in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"error: {message.format(tmp_path)}")
    assert not (tmp_path / "runs/a").exists()
    assert not (tmp_path / "out.safetensors").exists()


def test_a_size_that_an_architecture_refuses_is_said_before_anything_is_decoded(tmp_path: Path) -> None:
    data = make_data(tmp_path / "data", "ab", train=1, val=1)
    with pytest.raises(ValueError, match=r"^--image-size: alexnet can't classify 16 x 16 pixels "):
        train(config(data, None, arch="alexnet", image_size=16))
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "now").mkdir()
    (tmp_path / "now-2").mkdir()
    assert run._free(tmp_path / "now") == tmp_path / "now-3"
    assert run._free(tmp_path / "then") == tmp_path / "then"


def test_a_recipe_comes_back_from_json_and_is_named_after_the_data_as_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "flowers").symlink_to("volume-7")
    everything = TrainConfig(
        data=tmp_path / "flowers",
        init=Path("a.safetensors"),
        golden_from=Path("g"),
        run=Path("r"),
        out=Path("o.safetensors"),
        lr=0.1,
        seed=3,
        image_size=64,
    )
    assert TrainConfig.from_dict(json.loads(json.dumps(everything.to_dict()))) == everything
    assert {"data", "init", "golden_from", "run", "out"}.isdisjoint(everything.choices())
    assert replace(everything, out=None).checkpoint == Path("checkpoints/flowers.safetensors")
    assert replace(everything, out=None, data=Path(".")).checkpoint.stem == Path.cwd().name


def test_paths_need_not_be_unicode_but_the_models_name_must(tmp_path: Path, tiny: Path) -> None:
    data = make_data(tmp_path / "caf\udce9", "ab", train=1, val=1)
    train(config(data, tiny))
    assert run.recipe_of(tmp_path / "runs/one").data == data
    with pytest.raises(ValueError, match=r"^--out .*caf\\udce9\.safetensors: the model's name is that of the file"):
        config(data, tiny, out=None)


def test_closed_streams_do_not_stop_a_training(tmp_path: Path, tiny: Path) -> None:
    line = shlex.join([sys.executable, "-m", "models", *arguments(tmp_path, tiny)])
    subprocess.run(f"{line} >&- 2>&-", shell=True, cwd=EXAMPLES.parent, check=True)
    assert checkpoint.read_header(tmp_path / "out.safetensors").labels == ("a", "b")


def test_too_many_bad_files_stop_the_run_and_are_named(tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments(tmp_path, tiny)
    (tmp_path / "data/train/a/0.png").write_bytes(encode((1, 2, 3))[:-30])
    assert command_line.main(given) == 2
    error = capsys.readouterr().err
    assert "error: 1 of 8 files can't be used, more than --max-bad 0.01 allows; mend or remove them, or raise --max-bad\n" in error
    assert f"  {tmp_path}/data/train/a/0.png: The PNG is cut short" in error
    assert not (tmp_path / "runs/a").exists()


def test_evaluate_prints_each_class_or_says_what_is_wrong(tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_data(tmp_path / "data", ["label 1", "label 2"], train=1, val=3)
    assert command_line.main(["evaluate", str(tiny), str(data)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"tiny \w+, {data}/val, \w+ on \w+", lines[0])
    assert re.fullmatch(r"top-1 [01]\.\d{4} \(\d of 6\)", lines[1])
    assert [re.fullmatch(r"  [01]\.\d{4} \(\d of 3\)  (.*)", line)[1] for line in lines[2:]] == ["label 1", "label 2"]  # type: ignore[index]
    (data / "val/label 1").rename(data / "val/cat")
    assert command_line.main(["evaluate", str(tiny), str(data)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {data}/val: 'cat' is no label of {tiny}, which has ")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_was_stopped_can_be_exported(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str], number: int, code: int
) -> None:
    given = [*arguments(tmp_path, tiny), "--epochs", "100000"]
    with subprocess.Popen([sys.executable, "-m", "models", *given], cwd=EXAMPLES.parent, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("epoch 2/"):
                break
        os.kill(process.pid, number)
        rest = process.stderr.read().splitlines()
        assert process.wait(20) == code
    assert re.fullmatch(rf"no checkpoint is written; `\S+ -m models export {tmp_path}/runs/a` makes one of the best epoch so far", rest[-2])
    assert rest[-1] == "stopped"
    out = tmp_path / "out.safetensors"
    assert not out.exists()

    assert command_line.main(["export", str(tmp_path / "runs/a")]) == 0
    header, before = checkpoint.read_header(out), checkpoint.read_header(tiny)
    assert (header.labels, header.preprocessing, header.architecture) == (("a", "b"), before.preprocessing, before.architecture)
    lines = [json.loads(line) for line in (tmp_path / "runs/a/metrics.jsonl").read_text().splitlines()]
    assert lines[header.metrics["epoch"] - 1]["val_top1"] == max(line["val_top1"] for line in lines)
    assert capsys.readouterr().out.splitlines()[1].startswith(f"{out}: out, version {header.version}, 2 labels")


def test_exporting_a_finished_run_again_gives_the_same_checkpoint(tmp_path: Path, tiny: Path) -> None:
    header = train(config(make_data(tmp_path / "data", "ab", train=2, val=2), tiny))
    (tmp_path / "runs/one").rename(tmp_path / "moved")
    path, again = run.export_run(tmp_path / "moved", tmp_path / "again.safetensors")
    assert (path, again.name) == (tmp_path / "again.safetensors", "again")
    assert (again.version, again.metrics) == (header.version, header.metrics)
    assert {**again.origin, "time": ""} == {**header.origin, "time": ""}


@pytest.mark.parametrize(
    ("harm", "more", "message"),
    [
        ("config.json", [], "{0}: not the folder of a run: config.json in it can't be read"),
        (BEST, [], "{0}: no epoch of this run was complete"),
        ("", ["--arch", "resnet18"], "{0}: the folder of a run knows its arch itself; leave out --arch"),
        ("", ["--crop", "64"], "{0}: the folder of a run knows its crop itself; leave out --crop"),
        ("data", [], "{1}/val: its labels are no longer those that {0} was trained with"),
    ],
)
def test_a_run_that_can_not_be_exported_is_refused_with_the_reason(
    tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str], harm: str, more: list[str], message: str
) -> None:
    data, folder = make_data(tmp_path / "data", "ab", train=1, val=1), tmp_path / "runs/one"
    train(config(data, tiny))
    if harm == "data":
        (data / "val/b").rename(data / "val/c")
    elif harm:
        (folder / harm).unlink()
    capsys.readouterr()
    assert command_line.main(["export", str(folder), *more]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message.format(folder, data)}")


def test_memory_that_a_gpu_lacks_is_said_with_the_flag_to_lower(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    monkeypatch.setattr("models.training.Trainer.step", fail)
    assert command_line.main(arguments(tmp_path, tiny)) == 1
    assert (
        capsys.readouterr().err.splitlines()[-1]
        == "error: CUDA out of memory. Tried to allocate 2.00 GiB.; lower --batch-size or --image-size"
    )
