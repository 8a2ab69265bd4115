"""A checkpoint's model -> an OpenVINO model in a cache folder, once per version, made by a short-lived process of its own.

    uint8 [N, crop, crop, 3] --normalize, model, softmax, all in the converted model--> float32 [N, C] logits, [N, C] probabilities

So the workers never import torch. One conversion serves every precision: the weights stay float32, and what a CPU computes in is
chosen when the model is compiled, which takes a fraction of a second.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path

from models.checkpoint import Header, load, read_header

log = logging.getLogger(__name__)

_FORM = 2  # raised when this file makes another model of the same checkpoint


def refuse_telemetry() -> None:
    """To be called before OpenVINO is imported: it reports its use over the network, and forks a process for that."""
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # importing it fails then, and OpenVINO does without


class ConversionError(RuntimeError):
    """A model that OpenVINO can't take. The message says why."""


def folder_of(header: Header, cache_dir: Path) -> Path:
    """Where the conversion of a checkpoint lies, or would lie."""
    # The version says nothing of the architecture: two may have the same weights and compute with them differently.
    made_by = f"{_FORM} {header.architecture} {version('openvino')}"
    return cache_dir / f"{header.version}-{hashlib.sha256(made_by.encode()).hexdigest()[:8]}"


def ensure(checkpoint: Path, cache_dir: Path, *, broken: int = 0) -> Path:
    """The converted model's file: out of `cache_dir`, or else converted into it. `broken`: the inode of one that is to be replaced.

    Safe when several processes ask at once: one converts, the others wait. A conversion that is interrupted leaves nothing that
    counts. Raises ConversionError where OpenVINO can't take the model, CheckpointError, and OSError where `cache_dir` can't be written.
    """
    folder = folder_of(read_header(checkpoint), cache_dir)
    model = folder / "model.xml"

    def usable() -> bool:
        return model.exists() and model.stat().st_ino != broken

    if usable():
        return model
    cache_dir.mkdir(parents=True, exist_ok=True)
    lock = os.open(cache_dir, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Nobody else converts now: what is there was left by one that was killed.
        for left in cache_dir.glob(".*.part"):
            shutil.rmtree(left, ignore_errors=True)
        if not usable():  # another process may have converted meanwhile
            if folder.exists():
                shutil.rmtree(folder)
            log.info("converting %s for OpenVINO, which takes some seconds and is done once", checkpoint)
            with tempfile.TemporaryDirectory(prefix=".", suffix=".part", dir=cache_dir) as temporary:
                made = Path(temporary) / "made"
                _convert_in_a_child(checkpoint, made)
                os.rename(made, folder)
    finally:
        os.close(lock)  # and with it the lock
    return model


def _convert_in_a_child(checkpoint: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "service.conversion", str(checkpoint.resolve()), str(folder.resolve())]
    # It ends with this process, whose end closes the pipe that it reads.
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent
    )
    assert child.stdin is not None
    assert child.stderr is not None
    with child, child.stderr, child.stdin:
        said = child.stderr.read().strip()
    if child.returncode:
        raise ConversionError(said.splitlines()[-1] if said else f"the conversion ended with exit code {child.returncode}")


def convert(checkpoint: Path, folder: Path) -> None:
    """Write `folder`/model.xml and its weights. Imports torch. Raises CheckpointError, OSError, and what OpenVINO and torch raise."""
    refuse_telemetry()
    import openvino
    import torch
    from openvino.frontend import FrontEndManager
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder

    loaded = load(checkpoint)
    preprocessing, temperature = loaded.header.preprocessing, loaded.header.temperature

    class Served(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = loaded.model
            self.scale, self.bias = (torch.nn.Buffer(torch.tensor(three)) for three in preprocessing.affine)

        def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            images = (pixels.float() * self.scale + self.bias).permute(0, 3, 1, 2)
            logits: torch.Tensor = self.model(images)
            return logits, (logits / temperature).softmax(1)

    crop = preprocessing.crop
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch calls tracing old; exporting takes four times as long and gives the same model
        example = torch.zeros((2, crop, crop, 3), dtype=torch.uint8)
        traced = TorchScriptPythonDecoder(Served().eval(), example_input=example, trace_kwargs={"check_trace": False})
        frontend = FrontEndManager().load_by_framework("pytorch")
        model = frontend.convert(frontend.load(traced))
    model.reshape([-1, crop, crop, 3])
    folder.mkdir()
    openvino.save_model(model, folder / "model.xml", compress_to_fp16=False)
    for name in ("model.bin", "model.xml"):
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())


def _follow_stdin() -> None:
    """End this process when the other end of its standard input is closed: whoever wants the conversion is gone."""
    import threading

    def wait() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    _follow_stdin()
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except Exception as error:
        sys.exit(" ".join(str(error).split()) or type(error).__name__)
