"""What this machine gives: the devices to serve on, the cores that this process may use, and who of the server gets how many."""

from __future__ import annotations

import ctypes
import glob
import json
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

_DOOR_CORES = 4  # that one front door keeps busy: at four its event loop is a third busy, and decode threads share its interpreter


class StartError(RuntimeError):
    """The server can't start. The message says why, in one line."""


_FIND_GPUS = """
import json, os, torch
try:
    torch.cuda.init()
    for index in range(torch.cuda.device_count()):
        torch.zeros(1, device=f"cuda:{index}")
    answer = {"count": torch.cuda.device_count()}
except Exception as error:
    answer = {"count": 0, "reason": str(error).splitlines()[0]}
answer["torch"] = f"torch {torch.__version__}, CUDA toolkit {torch.version.cuda}"
answer["visible"] = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
print(json.dumps(answer))
"""


def find_devices(wanted: str) -> list[str]:
    """The devices to serve on: `auto`, `cpu`, `cuda` or `cuda:0,2` -> ["cpu"] or ["cuda:0", "cuda:2"]. Raises StartError.

    A short-lived child asks torch: the parent must never open a CUDA context, nor pay for torch.
    """
    if wanted == "cpu":
        return ["cpu"]
    if wanted == "auto" and not any(glob.glob(pattern) for pattern in ("/dev/nvidia[0-9]*", "/dev/nvmap", "/dev/dxg")):
        log.info("no NVIDIA device on this machine: serving on the CPU")
        return ["cpu"]
    asked = subprocess.run([sys.executable, "-c", _FIND_GPUS], capture_output=True, text=True, check=False)
    try:
        found = json.loads(asked.stdout)
    except ValueError:
        found = {"count": 0, "reason": f"asking torch failed: {asked.stderr.strip()[-300:]}", "torch": "torch", "visible": "all"}
    count = found["count"]
    facts = f"{found['torch']}, CUDA_VISIBLE_DEVICES: {found['visible']}"
    if count == 0:
        reason = f"no usable GPU: {found.get('reason', 'torch sees none')} ({facts})"
        if wanted == "auto":
            log.warning("%s: serving on the CPU", reason)
            return ["cpu"]
        raise StartError(f"device: {wanted} is not possible: {reason}")
    indices = [int(index) for index in wanted.partition(":")[2].split(",") if index] or list(range(count))
    missing = [index for index in indices if index >= count]
    if missing:
        raise StartError(f"device: {wanted} is not possible: there is no cuda:{missing[0]}, the usable ones are 0 to {count - 1} ({facts})")
    return [f"cuda:{index}" for index in dict.fromkeys(indices)]


@dataclass(frozen=True)
class Cores:
    """How the cores are shared."""

    api_servers: int  # processes that speak HTTP
    decode_threads: int  # in each of them
    model_threads: int  # of each worker on the CPU


def share(cpus: int, workers: int, api_servers: int | None = None) -> Cores:
    """Share `cpus` cores. `api_servers`: as many as somebody asked for.

    Decoding and the model may each use every core: neither ever spins, so the scheduler gives a core to whoever has work, and no
    fixed split is right for light and heavy models alike.
    """
    doors = api_servers or max(1, cpus // _DOOR_CORES)
    return Cores(doors, max(1, cpus // doors), max(1, cpus // workers))


def available_cpus(root: Path = Path("/")) -> int:
    """CPUs that this process may use: its affinity, less where a quota is smaller, the container's or any above it (cgroup v2 and v1)."""
    cpus = len(os.sched_getaffinity(0))
    for folder in _cgroups(root):
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
            if quota not in ("max", "-1"):
                cpus = min(cpus, max(1, round(int(quota) / int(period))))
        except (OSError, ValueError):
            continue
    return cpus


def _cgroups(root: Path) -> list[Path]:
    """The folders of all control groups that limit this process's CPU: its own and those above."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    mount = root / "sys/fs/cgroup"
    # A container may see its own group as the root, whatever its path is called.
    found = [mount, mount / "cpu", mount / "cpu,cpuacct"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            top = mount / controllers if controllers else mount
            below = Path(path.lstrip("/"))
            found += [top / part for part in (below, *below.parents)]
    return found


def share_heap() -> None:
    """Have all threads of this process share one heap: glibc would give each its own, and each would keep the most that it ever held."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-8, 1)  # M_ARENA_MAX of malloc.h


def give_large_back() -> None:
    """Have the memory of large pictures go back to the system when they are done: glibc would keep up to 64 MB of it, and more below
    what stays."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 4 << 20)  # M_MMAP_THRESHOLD of malloc.h: a picture of one megapixel
        libc.mallopt(-1, 4 << 20)  # M_TRIM_THRESHOLD
