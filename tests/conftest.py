"""Shared subjects: a tiny checkpoint, the default checkpoint, and the real server in its own process."""

from __future__ import annotations

import io
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import requests
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from models import architectures
from models.export import export
from models.preprocessing import Preprocessing

EXAMPLES = Path(__file__).parent.parent / "examples"
_LEVELS = (0, 85, 170, 255)
COLOURS = list(itertools.product(_LEVELS, _LEVELS, _LEVELS))  # 64 of them

_TINY = Preprocessing(resize=32, crop=32, interpolation="bilinear", mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))


def make_tiny(path: Path, *, labels: int = 10, temperature: float = 1.0) -> Path:
    """A checkpoint of 0.4 MB for 32 x 32 pixels, untrained, whose head is scaled so that it tells the 64 COLOURS apart."""
    torch.manual_seed(0)
    model = architectures.build("timm:test_efficientnet", num_classes=labels, image_size=32)
    pixels = torch.tensor(COLOURS, dtype=torch.uint8)[:, None, None, :].expand(-1, 32, 32, -1)
    with torch.no_grad():
        found = model(_TINY.normalize(pixels, torch.float32))
        scale = 3 / found.std(0)
        head = model.get_submodule("classifier")
        assert isinstance(head, torch.nn.Linear)
        head.weight.mul_(scale[:, None])
        head.bias.sub_(found.mean(0)).mul_(scale)
    names = tuple(f"label {index}" for index in range(labels))
    export(
        path,
        model,
        name="tiny",
        architecture="timm:test_efficientnet",
        labels=names,
        preprocessing=_TINY,
        golden_pixels=pixels[::4].contiguous(),
        origin={"data": "none"},
        temperature=temperature,
    )
    return path


def with_another_weight(path: Path, out: Path) -> Path:
    """A copy of a checkpoint with one weight changed and the header as it was."""
    with safe_open(path, framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in list(file.keys())}, file.metadata()
    name = next(name for name, tensor in tensors.items() if name.startswith("model.") and tensor.is_floating_point())
    tensors[name].view(-1)[0] += 1
    save_file(tensors, out, metadata)
    return out


def encode(colour: tuple[int, int, int], kind: str = "PNG", size: tuple[int, int] = (40, 40)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind)
    return file.getvalue()


def make_data(root: Path, labels: Sequence[str], *, train: int = 6, val: int = 4) -> Path:
    """`root/{train,val}/<label>/*.png`: noisy images of about one colour for each label, every one different."""
    random = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for label, colour in zip(labels, COLOURS[:: len(COLOURS) // len(labels)], strict=False):
            (root / split / label).mkdir(parents=True)
            for number in range(count):
                noisy = np.clip(np.array(colour) + random.integers(-40, 41, (40, 48, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(noisy).save(root / split / label / f"{number}.png")
    return root


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # two OpenMP teams on the same cores, of two test runs say, spin at each other's barriers for minutes


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "tiny.safetensors")


@pytest.fixture(scope="session")
def default_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from models.pretrained import pull

    path = tmp_path_factory.mktemp("pulled") / "efficientnet_lite0.safetensors"
    pull("efficientnet_lite0", path)
    return path


class Server:
    """`python -m service` in its own process group, on a free port; constructed when it is ready, has ended, or logged `until`."""

    def __init__(self, checkpoint: Path, *arguments: str, until: str = " at http") -> None:
        command = [sys.executable, "-m", "service", "--checkpoint", str(checkpoint), "--host", "127.0.0.1", "--port", "0", *arguments]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SPYGLASS_")}
        environment["SPYGLASS_CACHE_DIR"] = str(checkpoint.parent / "cache")
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment, cwd=EXAMPLES.parent
        )
        self.log: list[str] = []
        self.ended = False
        self.url = ""
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.wait_for_log(until)

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            self._follow(lines)
        with self._news:
            self.ended = True
            self._news.notify_all()

    def _follow(self, lines: IO[str]) -> None:
        for line in lines:
            match = re.search(r"serving .* at (https?)://localhost:(\d+)", line)
            if match:
                self.url = f"{match[1]}://127.0.0.1:{match[2]}"
            with self._news:
                self.log.append(line.rstrip())
                self._news.notify_all()

    def wait_for_log(self, text: str, timeout: float = 120) -> str | None:
        """The first log line that contains `text`; None when the server ended, or time ran out, without one."""

        def found() -> str | None:
            return next((line for line in self.log if text in line), None)

        with self._news:
            self._news.wait_for(lambda: found() or self.ended, timeout)
            return found()

    @property
    def processes(self) -> list[int]:
        """Process ids of the whole group that still run."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                if int(fields[2]) == self.process.pid and fields[0] != "Z":
                    found.append(int(entry.name))
        return found

    def left_behind(self, timeout: float = 2) -> list[int]:
        """Processes of the group that still run after `timeout` seconds: they are not our children, so nothing tells when they end."""
        end = time.monotonic() + timeout
        while self.processes and time.monotonic() < end:
            time.sleep(0.01)
        return self.processes

    def request(self, method: str, path: str, **options: Any) -> requests.Response:
        return requests.request(method, f"{self.url}{path}", timeout=60, **options)

    def post(self, data: bytes, **options: Any) -> requests.Response:
        return requests.post(f"{self.url}/predict", data=data, timeout=60, **options)

    def get(self, path: str, **options: Any) -> requests.Response:
        return requests.get(f"{self.url}{path}", timeout=60, **options)

    def wait(self, timeout: float = 30) -> int:
        code = self.process.wait(timeout)
        self._reader.join(5)
        return code

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.wait()
        finally:
            for pid in self.processes:
                os.kill(pid, signal.SIGKILL)


StartServer = Callable[..., Server]


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Start servers that end with the test."""
    servers: list[Server] = []

    def start(checkpoint: Path, *arguments: str, until: str = " at http") -> Server:
        servers.append(Server(checkpoint, *arguments, until=until))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def tiny_server(tiny: Path) -> Iterator[Server]:
    """One server of the tiny model in float32 for all tests of a module, which must leave it as they found it."""
    server = Server(tiny, "--precision", "fp32", "--max-body-mb", "1", "--max-megapixels", "2")
    assert server.url, "\n".join(server.log)
    yield server
    assert server.stop() == 0
