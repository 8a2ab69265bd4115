"""What the machine gives, and who gets what of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from service.machine import Cores, StartError, available_cpus, find_devices, share


def test_available_cpus_are_those_of_the_affinity() -> None:
    code = """
import os
from service.machine import available_cpus
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(available_cpus())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
    assert ended.stdout.strip() == "1"
    assert 1 <= available_cpus() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64),
        # cgroup v2, as a container sees it
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, 64),
        ({"sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
        ({"sys/fs/cgroup/cpu.max": "350000 100000\n", "proc/self/cgroup": "0::/\n"}, 4),
        ({"sys/fs/cgroup/cpu.max": "10000 100000\n"}, 1),
        ({"sys/fs/cgroup/cpu.max": "9900000 100000\n"}, 64),
        ({"sys/fs/cgroup/cpu.max": "rubbish\n"}, 64),
        # a systemd service with CPUQuota, and a slice above it with less
        (
            {
                "proc/self/cgroup": "0::/system.slice/spyglass.service\n",
                "sys/fs/cgroup/system.slice/spyglass.service/cpu.max": "300000 100000",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "0::/system.slice/spyglass.service\n",
                "sys/fs/cgroup/system.slice/spyglass.service/cpu.max": "max 100000",
                "sys/fs/cgroup/system.slice/cpu.max": "800000 100000",
            },
            8,
        ),
        # cgroup v1, in a container and outside of one
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 64),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 3),
        (
            {
                "proc/self/cgroup": "5:memory:/a\n4:cpu,cpuacct:/docker/1f\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/1f/cpu.cfs_quota_us": "500000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/1f/cpu.cfs_period_us": "50000\n",
            },
            10,
        ),
    ],
)
def test_available_cpus_are_no_more_than_any_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert available_cpus(tmp_path) == expected


@pytest.mark.parametrize(
    ("cpus", "workers", "expected"),
    [
        (1, 1, Cores(1, 1, 1)),
        (2, 1, Cores(1, 2, 2)),
        (4, 1, Cores(1, 4, 4)),
        (16, 1, Cores(4, 4, 16)),
        (64, 1, Cores(16, 4, 64)),
        (64, 8, Cores(16, 4, 8)),
        (2, 4, Cores(1, 2, 1)),
    ],
)
def test_the_shares_of_machines_of_all_sizes(cpus: int, workers: int, expected: Cores) -> None:
    assert share(cpus, workers) == expected


def test_front_doors_that_were_asked_for_share_the_decode_threads() -> None:
    assert share(16, 1, api_servers=2) == Cores(2, 8, 16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a usable GPU")
def test_cuda_without_a_gpu_says_why() -> None:
    assert find_devices("cpu") == find_devices("auto") == ["cpu"]
    with pytest.raises(StartError, match=r"device: cuda:1 is not possible: no usable GPU: .+CUDA toolkit .+CUDA_VISIBLE_DEVICES"):
        find_devices("cuda:1")


def test_one_heap_for_all_threads_keeps_less() -> None:
    """Eight threads that each held much for a moment: with a heap each, what is freed below the top stays with the process."""
    code = """
import ctypes, sys, threading
from service.machine import share_heap
if sys.argv[1] == "one":
    share_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
heaps = set()
def hold():
    block = libc.malloc(1000)
    heaps.add(block >> 26)  # a heap that is not the main one is aligned to 64 MB
    together.wait()
    libc.free(block)
together = threading.Barrier(8)
threads = [threading.Thread(target=hold) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(heaps))
"""
    counts = []
    for how in ("many", "one"):
        command = [sys.executable, "-c", code, how]
        ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
        counts.append(int(ended.stdout))
    assert counts[1] == 1 < counts[0]


def test_the_memory_of_large_pictures_goes_back_to_the_system() -> None:
    code = """
import ctypes, sys
from pathlib import Path
from service.machine import give_large_back
if sys.argv[1] == "back":
    give_large_back()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) // 256
before = resident()
libc.free(libc.malloc(17 << 20))  # from now on glibc takes such blocks from the heap
blocks = [libc.malloc(16 << 20) for _ in range(3)]
for block in blocks: libc.memset(block, 1, 16 << 20)
kept = [libc.malloc(100_000) for _ in range(9)]  # above them
for block in blocks: libc.free(block)
print(resident() - before)
"""
    kept = {}
    for how in ("kept", "back"):
        command = [sys.executable, "-c", code, how]
        kept[how] = int(subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent).stdout)
    assert kept["back"] < 8 < 40 < kept["kept"]  # megabytes
