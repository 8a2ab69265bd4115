"""The cores that this process may use, and who of the server gets how many."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_DOOR_CORES = 4  # that one front door keeps busy: at four its event loop is a third busy, and decode threads share its interpreter


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
