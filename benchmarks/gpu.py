"""One command for a host with a GPU: is the torch engine right there, and does it keep the GPU busy?

For each checkpoint: golden samples in each precision, the forward alone beside the whole pipeline (which must reach 95 % of it from
batches of 32 on), copies to the device, how much of them lies under a forward, the real server under load, and the memory it all takes.
Nothing is downloaded. It ends by itself within its minutes: time that a part leaves over goes to those after it. What needs a missing
package or a GPU is skipped with a line that says so. Exits 1 when a requirement is not met, 2 when nothing could be measured.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import platform
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_checkpoints import checkpoints
from benchmarks.gpu_parts import FROM_BATCH, PARTS, SMOKE, Scale, Subject
from benchmarks.gpu_report import Budget, Report
from benchmarks.load import ROOT, STOPPING, machine, say

if TYPE_CHECKING:
    import torch


def gpu_facts(device: torch.device) -> dict[str, Any]:
    import torch

    facts = machine() | {"platform": platform.platform(), "torch": torch.__version__, "cuda": torch.version.cuda, "device": str(device)}
    if device.type == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(device), "cudnn": torch.backends.cudnn.version()}
        with suppress(OSError):
            asked = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True)
            facts["driver"] = asked.stdout.strip().splitlines()[:1]
    return facts


def measure(paths: list[Path], options: argparse.Namespace, folder: Path, end: float) -> Report:
    """All parts of all checkpoints."""
    import torch

    from benchmarks.gpu_pipeline import make
    from models.checkpoint import read_golden

    device, scale = torch.device(options.device), SMOKE if options.device == "cpu" else Scale()
    known = {path: read_golden(path) for path in paths}
    # All of them now: their processes fork before CUDA is there.
    pipelines = {path: make(golden, max(FROM_BATCH, *scale.sizes)) for path, golden in known.items()}
    try:
        report = Report(options.json, {"machine": gpu_facts(device), "settings": {"device": options.device, "minutes": options.minutes}})
        say(str(report.facts["machine"]))
        budget = Budget(end - time.monotonic(), [PARTS[part][1] for _ in paths for part in options.parts])
        for path in paths:
            subject = Subject(path, device, scale, options.photos, folder, pipelines[path])
            for part in options.parts:
                report.run(part, known[path].header.name, budget.next_limit(), partial(PARTS[part][0], subject))
            subject.release()
    finally:
        for pipeline in pipelines.values():
            pipeline.close()
    return report


def no_gpu(device: str) -> str:
    """Why it can't be measured on this GPU; nothing where it can. Makes no CUDA context: processes are still to be forked."""
    import torch

    try:
        if torch.device(device).type != "cuda":
            return f"no GPU: {device}"
        if (torch.device(device).index or 0) < torch.cuda.device_count() and torch.cuda.is_available():
            return ""
        torch.cuda.init()  # says why
    except (RuntimeError, AssertionError) as error:
        return f"no GPU: {str(error).splitlines()[0]}"
    return f"no GPU {device} among {torch.cuda.device_count()}"


def interrupted(*_: object) -> None:
    """An exception, so that every `finally` runs, and not the one that a failed part ends with."""
    raise KeyboardInterrupt


def main() -> None:
    """Reads the command line, measures, prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, nargs="+", help="default: a resnet50 of random weights, and efficientnet_lite0")
    parser.add_argument("--photos", type=Path, default=ROOT / "examples", help="folder of JPEG, PNG or WebP files")
    parser.add_argument("--json", type=Path, help="also write every sample to this file")
    parser.add_argument("--device", default="cuda:0", help="a GPU; cpu: a short look at whether it all runs, no measurement")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=6, help="that it takes at most")
    options = parser.parse_args()
    begun = time.monotonic()
    faulthandler.dump_traceback_later(60 * options.minutes + 30, exit=True)  # where even a signal does nothing
    logging.basicConfig(level="WARNING", format="%(message)s")
    for number in STOPPING:
        signal.signal(number, interrupted)
    try:
        import torch

        import models.checkpoint  # noqa: F401  # and so safetensors
    except ImportError as error:
        parser.exit(2, f"nothing can be measured: {error}\n")
    if options.device != "cpu" and (reason := no_gpu(options.device)):
        parser.exit(2, f"{reason} (torch {torch.__version__}, CUDA {torch.version.cuda}); --device cpu only sees whether it all runs\n")
    with tempfile.TemporaryDirectory(prefix="gpu-") as temporary:
        folder = Path(temporary)
        paths = checkpoints(options.checkpoint, folder)
        if not paths:
            parser.exit(2, "nothing can be measured: there is no checkpoint\n")
        report = measure(paths, options, folder, begun + 60 * options.minutes)
    lacking = report.shortfalls()
    print(f"\n## {len(lacking)} shortfalls, {time.monotonic() - begun:.0f} s in all\n" + "".join(f"\n{line}\n" for line in lacking))
    sys.exit(bool(lacking))


if __name__ == "__main__":
    main()
