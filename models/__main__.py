"""python -m models train | evaluate | export | pull | inspect"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn, get_args, get_type_hints

from models.checkpoint import CheckpointError, FidelityError, Header, python, read_header
from models.preprocessing import Preprocessing
from models.progress import say
from models.recipe import TrainConfig

# torch is slow to import: each command does, once its arguments are known to be right.

# Of what the system refuses, this is the user's to put right, as every ValueError is; a full disk or no network isn't.
_WRONG_PATH = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


def main(arguments: list[str] | None = None) -> int:
    """0: done; 2: something given was wrong; 1: it failed although that was right; 130: Ctrl-C; 143: SIGTERM or SIGHUP."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us; a file opened now would take its place
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for as long as the process lives
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # labels are of any script, a terminal perhaps of one
    try:
        options = _parser().parse_args(arguments)
        options.run_command(options)
        sys.stdout.flush()
    except KeyboardInterrupt as stop:
        return _end(143 if isinstance(stop, _Terminated) else 130, "stopped")
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except _WRONG_PATH as error:
        path = error.filename2 or error.filename  # the second is the name that a written file was to get
        return _end(2, f"error: {path}: {error.strerror}" if path else f"error: {error}")
    except ValueError as error:
        return _end(2, f"error: {error}")
    except (OSError, MemoryError, FidelityError) as error:
        return _end(1, f"error: {error}" if str(error) else "error: out of memory")
    return 0


class _Terminated(KeyboardInterrupt):
    """A signal to be cleaned up after like a Ctrl-C."""


def _terminate(*_: object) -> NoReturn:
    raise _Terminated


def _end(code: int, line: str) -> int:
    print(line, file=sys.stderr)
    return code


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)  # --epoch is a mistake, not --epochs

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; `{self.prog} --help` says more\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m models", description="Makes the checkpoints that `python -m service` serves.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_train(commands.add_parser("train", help="a folder of labelled photographs -> a checkpoint"))
    _add_evaluate(commands.add_parser("evaluate", help="how often a checkpoint is right"))
    _add_pull(commands.add_parser("pull", help="public pretrained weights -> a checkpoint"))
    _add_export(commands.add_parser("export", help="your own weights, from any training script -> a checkpoint"))
    _add_inspect(commands.add_parser("inspect", help="what is in a checkpoint"))
    return parser


# train


_METAVARS = {Path: "PATH", str: "NAME", int: "N", float: "X"}


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Trains on DATA/train/<label>/* and DATA/val/<label>/*, and writes the checkpoint of the best epoch: the one with the highest "
        "top-1 on val, of equal ones the one with the least loss."
    )
    parser.add_argument("data", type=Path, metavar="DATA", help="the folder that holds train and val")
    hints = get_type_hints(TrainConfig, include_extras=True)
    for field in dataclasses.fields(TrainConfig):
        if field.name != "data":
            kind, text = get_args(hints[field.name])
            kind = next((part for part in get_args(kind) if part is not NoneType), kind)  # Path | None -> Path
            shown = "" if field.default is None else f" (default: {field.default})"
            flags = [f"--{field.name.replace('_', '-')}", *(["-o"] if field.name == "out" else [])]
            parser.add_argument(*flags, type=kind, default=field.default, metavar=_METAVARS[kind], help=text + shown)
    parser.set_defaults(run_command=_train)


def _train(options: argparse.Namespace) -> None:
    config = TrainConfig(**{field.name: getattr(options, field.name) for field in dataclasses.fields(TrainConfig)})

    from models.run import train

    before = _version_at(config.checkpoint)
    _say_trained(config.checkpoint, train(config), before)


def _say_trained(path: Path, header: Header, before: str) -> None:
    found = header.metrics
    print(f"epoch {found['epoch']}: top-1 {found['top1']:.4f} ({found['correct']} of {found['samples']} validation images)")
    _say_written(path, header, before)
    _say_how_to_serve(path)


# evaluate


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Classifies labelled photographs as the server would on this device, and counts how often the first label is right."
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="such as checkpoints/efficientnet_lite0.safetensors")
    parser.add_argument(
        "data", type=Path, metavar="DATA_OR_SPLIT", help="a folder of label folders, or one that holds such a folder as val"
    )
    parser.add_argument("--json", action="store_true", help="all figures, and the answer for each photograph, as JSON")
    parser.add_argument("--device", metavar="NAME", default="auto", help="auto, cpu, cuda or cuda:1 (default: auto)")
    parser.add_argument(
        "--precision", default="auto", choices=("auto", "fp16", "bf16", "fp32"), help="default: auto, what the server would take"
    )
    parser.add_argument(
        "--max-bad", type=float, metavar="X", default=0.01, help="share of the files that may be unreadable (default: 0.01)"
    )
    parser.set_defaults(run_command=_evaluate)


def _evaluate(options: argparse.Namespace) -> None:
    from models.evaluation import evaluate

    found = evaluate(options.checkpoint, options.data, device=options.device, precision=options.precision, max_bad=options.max_bad)
    for bad in found.bad:
        say(f"left out: {bad}")
    print(_json(found.to_dict(), indent=2) if options.json else found.to_text())


# pull


def _add_pull(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", help="efficientnet_lite0 (needs no network), or any classification architecture of torchvision"
    )
    parser.add_argument(
        "-o", "--out", type=_checkpoint_path, metavar="PATH", help="the file to write (default: checkpoints/NAME.safetensors)"
    )
    parser.set_defaults(run_command=_pull)


def _pull(options: argparse.Namespace) -> None:
    from models.pretrained import pull

    out = options.out or Path("checkpoints") / f"{options.name}.safetensors"
    before = _version_at(out)
    _say_written(out, pull(options.name, out), before)


def _version_at(path: Path) -> str:
    try:
        header = read_header(path)
    except CheckpointError:
        return ", replaces a file that was no checkpoint" if path.exists() else ""
    top1 = header.metrics.get("top1")
    return f", replaces version {header.version}" + (f" (top-1 {top1:.4f})" if isinstance(top1, float) else "")


def _say_written(path: Path, header: Header, before: str) -> None:
    size = f"{path.stat().st_size / 1e6:.1f} MB"
    print(f"{path}: {header.name}, version {header.version}, {len(header.labels)} labels, {size}{before}")


def _say_how_to_serve(path: Path) -> None:
    print(f"serve it: {python()} -m service --checkpoint {shlex.quote(str(path))}")


def _checkpoint_path(text: str) -> Path:
    if not text.endswith(".safetensors"):
        raise argparse.ArgumentTypeError(f"{text!r} must end in .safetensors")
    return Path(text)


# export


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Makes a checkpoint of weights that torch.save or safetensors wrote: a state dict, bare or inside the file of a training "
        "script (torchvision's, timm's, Lightning's, your own). Nothing in the file is run. Or of a run of `train`, also one that was "
        "stopped, which knows all the rest."
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="such as model_best.pth.tar, last.ckpt, model.safetensors; or runs/NAME")
    parser.add_argument("--arch", metavar="NAME", help="torchvision's name of the architecture, or timm:NAME")
    parser.add_argument(
        "--labels",
        help="the names of the classes in the order of the logits: a text file with one a line, a JSON file (a list, index to label or "
        "label to index), the folder of label folders that the model was trained on, or the word imagenet",
    )
    parser.add_argument(
        "-o", "--out", type=_checkpoint_path, metavar="PATH", help="the file to write (default: checkpoints/ and FILE's name, .safetensors)"
    )
    parser.add_argument("--key", metavar="NAME", help="the entry of FILE to take (default: averaged weights, else the only ones that fit)")
    parser.add_argument(
        "--golden-from",
        type=Path,
        metavar="FOLDER",
        help="photographs for the golden samples (default: examples/, or what the run took)",
    )
    group = parser.add_argument_group("preprocessing, where it differs from that of the architecture's published weights")
    group.add_argument("--resize", type=int, metavar="N", help="pixels of the shorter side before the crop")
    group.add_argument(
        "--crop", type=int, metavar="N", help="pixels of each side of what the model sees; alone, it changes --resize in proportion"
    )
    group.add_argument("--interpolation", metavar="NAME", help="bilinear, bicubic, ...")
    for name in ("--mean", "--std"):
        group.add_argument(name, type=float, nargs=3, metavar=("R", "G", "B"), help="in units where white is 1")
    parser.set_defaults(run_command=_export)


def _export(options: argparse.Namespace) -> None:
    if options.file.is_dir():
        _export_run(options)
    elif options.arch is None or options.labels is None:
        raise ValueError(f"{options.file}: --arch NAME and --labels LABELS are needed; only the folder of a run knows them itself")
    else:
        _export_weights(options)


def _export_run(options: argparse.Namespace) -> None:
    given = [name for name in ("arch", "labels", "key", *_PREPROCESSING) if getattr(options, name) is not None]
    if given:
        raise ValueError(f"{options.file}: the folder of a run knows its {given[0]} itself; leave out --{given[0]}")

    from models.run import export_run, recipe_of

    before = _version_at(options.out or recipe_of(options.file).checkpoint)
    _say_trained(*export_run(options.file, options.out, options.golden_from), before)


_PREPROCESSING = ("resize", "crop", "interpolation", "mean", "std")


def _export_weights(options: argparse.Namespace) -> None:
    from models import architectures, weights
    from models.export import EXAMPLES, export, golden_from
    from models.labels import read_labels

    file: Path = options.file
    out: Path = options.out or Path("checkpoints") / f"{Path(file.name.removesuffix('.tar')).stem}.safetensors"
    if out.resolve() == file.resolve():
        raise ValueError(f"{out}: would replace the weights themselves; name another file with -o")
    labels = read_labels(options.labels)
    preprocessing = _changed(architectures.preprocessing_of(options.arch), options)
    model = architectures.build(options.arch, num_classes=len(labels), image_size=preprocessing.crop)
    taken = weights.load(model, file, architecture=options.arch, labels=len(labels), key=options.key)
    print(f"weights: {taken.key or 'all'} of {file}" + (f"; --key takes another: {_few(taken.others)}" if taken.others else ""))
    if taken.left_out:
        print(f"left out: {_few(taken.left_out)}")
    print(f"preprocessing: {_in_words(preprocessing)}; of the published weights of {options.arch}, but for what you gave")
    golden = golden_from(options.golden_from or EXAMPLES, preprocessing)
    photographs = f"photographs in {options.golden_from}" if options.golden_from else "examples/; --golden-from FOLDER takes your own"
    print(f"golden samples: {len(golden)}, which go into the file, from {photographs}")
    with file.open("rb") as data:
        origin = {"weights": file.name, "sha256": hashlib.file_digest(data, "sha256").hexdigest(), "recipe": "exported weights"}
    origin |= {"golden_samples": f"{options.golden_from.resolve().name if options.golden_from else 'examples'}/"}
    before = _version_at(out)
    header = export(
        out,
        model,
        name=out.stem,
        architecture=options.arch,
        labels=labels,
        preprocessing=preprocessing,
        golden_pixels=golden,
        origin=origin | ({"key": taken.key} if taken.key else {}),
    )
    _say_written(out, header, before)
    _say_how_to_serve(out)


def _changed(preprocessing: Preprocessing, options: argparse.Namespace) -> Preprocessing:
    given: dict[str, Any] = {name: getattr(options, name) for name in _PREPROCESSING}
    changes: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items() if value is not None
    }
    if "crop" in changes and "resize" not in changes:
        changes["resize"] = round(changes["crop"] * preprocessing.resize / preprocessing.crop)
    if max(changes.get("mean", [0])) > 1:
        raise ValueError(f"--mean {' '.join(map(str, options.mean))}: white is 1 here; divide it, and --std, by 255")
    return replace(preprocessing, **changes)


def _few(names: Sequence[str], count: int = 5) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def _in_words(preprocessing: Preprocessing) -> str:
    mean, std = (" ".join(f"{value:.4g}" for value in triple) for triple in (preprocessing.mean, preprocessing.std))
    size = f"resize {preprocessing.resize}, crop {preprocessing.crop}"
    return f"{size}, {preprocessing.interpolation}, mean {mean}, std {std}"


# inspect


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="such as checkpoints/efficientnet_lite0.safetensors")
    parser.add_argument("--json", action="store_true", help="the whole header as JSON")
    parser.set_defaults(run_command=_inspect)


def _inspect(options: argparse.Namespace) -> None:
    header = read_header(options.checkpoint)
    if options.json:
        print(_json(header.to_dict(), indent=2))
        return
    print(f"{options.checkpoint}, {options.checkpoint.stat().st_size / 1e6:.1f} MB")
    background = " ".join(map(str, header.preprocessing.background))
    rows: list[tuple[str, object]] = [
        ("name", header.name),
        ("version", header.version),
        ("architecture", header.architecture),
        ("labels", f"{len(header.labels)}: {_few([_json(label) for label in header.labels])}"),
        ("preprocessing", f"{_in_words(header.preprocessing)}, background {background}"),
        ("temperature", header.temperature),
    ]
    for title, facts in (("metrics", header.metrics), ("origin", header.origin)):
        rows += [(f"{title}.{name}", value) for name, value in facts.items()] or [(title, "none")]
    wide = max(len(name) for name, _ in rows)
    for name, value in rows:
        text = value if isinstance(value, str) and value.isprintable() else _json(value)
        print(f"  {name:{wide}}  {text if len(text) <= 300 else text[:297] + '...'}")


def _json(value: object, indent: int | None = None) -> str:
    """Letters as they are where stdout can write them, else as JSON's own escapes."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, indent=indent)
    return text


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # not under nohup
        signal.signal(signal.SIGHUP, _terminate)
    code = main()
    if code > 2:  # stopped amid its work, torch sometimes aborts while Python takes it apart
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
