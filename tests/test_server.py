"""The life of the server's processes: start, refusal to start, idleness, stop; and the real model over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file

from models import checkpoint
from models.export import logits
from tests.conftest import EXAMPLES, Server, StartServer, encode, make_tiny


def ticks(pids: list[int]) -> int:
    """User and system time of processes, in clock ticks."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(field[11]) + int(field[12]) for field in fields)


def test_the_real_model_names_the_examples_over_http(start_server: StartServer, default_checkpoint: Path) -> None:
    server = start_server(default_checkpoint)
    loaded = checkpoint.load(default_checkpoint)
    for name, right in (("cat.jpg", {"tiger cat", "tabby", "Egyptian cat"}), ("coffee.jpg", {"espresso"}), ("temple.jpg", {"palace"})):
        photograph = (EXAMPLES / name).read_bytes()
        best = server.post(photograph).json()["predictions"][0]
        assert best["label"] in right
        pixels = torch.from_numpy(loaded.header.preprocessing.read(photograph))[None]
        reference = logits(loaded.model, loaded.header.preprocessing, pixels).softmax(1)[0]
        assert best["probability"] == pytest.approx(float(reference[best["index"]]), abs=0.1)
    assert server.stop() == 0


def test_idle_costs_nothing_and_on_a_cpu_nobody_imports_torch(start_server: StartServer, tiny: Path) -> None:
    server = start_server(tiny, "--max-batch-size", "4", "--workers-per-device", "2", "--api-servers", "2")
    server.post(encode((1, 2, 3)))
    pids = server.processes
    assert len(pids) == 5
    shares = []
    for _ in range(3):  # the first may still see the warming of batch sizes
        before, begun = ticks(pids), time.monotonic()
        time.sleep(2)  # idleness is what is measured
        shares.append((ticks(pids) - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - begun))
    assert min(shares) < 0.01, shares
    assert not [pid for pid in pids if "libtorch" in Path(f"/proc/{pid}/maps").read_text()]


def test_two_workers_on_the_cpu_both_work_and_agree(start_server: StartServer, tiny: Path) -> None:
    server = start_server(tiny, "--workers-per-device", "2", "--precision", "fp32", "--api-servers", "2", "--max-batch-size", "4")
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(server.post, [encode((10, 200, 30))] * 200))
    found = {tuple((item["index"], round(item["probability"], 5)) for item in answer.json()["predictions"]) for answer in answers}
    assert len(found) == 1
    workers = server.get("/info").json()["workers"]
    assert len({worker["pid"] for worker in workers}) == 2
    assert all(worker["images"] > 0 for worker in workers)
    assert sum(worker["images"] for worker in workers) == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("to_group", [False, True], ids=["parent", "group"])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_signal_ends_all_after_what_was_accepted_is_answered(
    start_server: StartServer, tiny: Path, number: signal.Signals, to_group: bool, busy: bool
) -> None:
    server = start_server(tiny, "--max-batch-size", "2")
    image = (EXAMPLES / "coffee.jpg").read_bytes()

    def ask(_: int) -> int | None:
        try:
            return requests.post(f"{server.url}/predict", data=image, timeout=30).status_code
        except requests.ConnectionError:
            return None  # not accepted any more

    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(ask, index) for index in range(16 if busy else 0)]
        if busy:
            with requests.Session() as session:  # all have arrived once there are that many log lines or images
                while session.get(f"{server.url}/info", timeout=30).json()["workers"][0]["images"] < 2:
                    pass
        begun = time.monotonic()
        (os.killpg if to_group else os.kill)(server.process.pid, number)
        assert server.wait(10) == 0
        assert time.monotonic() - begun < 5
        assert {request.result() for request in asked} <= {200, None}
        if busy:
            assert [request.result() for request in asked].count(200) >= 2
    assert server.left_behind() == []
    port = int(server.url.rpartition(":")[2])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def test_a_signal_during_the_start_ends_it(tiny: Path, start_server: StartServer) -> None:
    server = start_server(tiny, until="loading")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(10) == 0
    assert server.url == ""
    assert server.left_behind() == []


def test_a_signal_before_there_is_a_server_ends_it_too(tiny: Path) -> None:
    """As process 1 of a container it would not get one that it has not asked for."""
    command = [sys.executable, "-m", "service", "--checkpoint", str(tiny), "--port", "0"]
    with subprocess.Popen(command, cwd=EXAMPLES.parent, stderr=subprocess.PIPE) as process:
        folder = Path("/proc") / str(process.pid)
        while not int((folder / "status").read_text().partition("SigCgt:")[2].split()[0], 16) >> (signal.SIGTERM - 1) & 1:
            assert process.poll() is None
        assert "pydantic_core" not in (folder / "maps").read_text()  # the settings are not read yet
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_when_the_parent_is_killed_every_child_ends_and_the_port_is_free(start_server: StartServer, tiny: Path) -> None:
    server = start_server(tiny)
    port = int(server.url.rpartition(":")[2])
    server.process.kill()
    server.wait(10)
    assert server.left_behind() == []
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def test_a_worker_that_dies_in_service_ends_the_server_with_its_reason(start_server: StartServer, tiny: Path) -> None:
    server = start_server(tiny)
    os.kill(server.get("/info").json()["workers"][0]["pid"], signal.SIGKILL)
    assert server.wait(10) == 1
    assert any("worker-0 died (killed by SIGKILL)" in line for line in server.log)
    assert server.left_behind() == []


def refused(server: Server) -> str:
    """The one line in which a server says why it does not start."""
    assert server.wait(60) == 1
    assert server.left_behind() == []
    assert not any("Traceback" in line for line in server.log)
    (line,) = [line for line in server.log if line.startswith("error: ")]
    return line


def test_a_checkpoint_that_is_not_there_ends_the_start(start_server: StartServer, tmp_path: Path) -> None:
    line = refused(start_server(tmp_path / "none.safetensors"))
    assert "none.safetensors" in line
    assert "python -m models pull" in line


def test_a_worker_that_refuses_its_checkpoint_ends_the_start_with_the_reason(start_server: StartServer, tiny: Path, tmp_path: Path) -> None:
    header = checkpoint.read_header(tiny)
    tensors = load_file(tiny)
    tensors["model.classifier.bias"] += 1
    save_file(tensors, tmp_path / "changed.safetensors", metadata={"spyglass": json.dumps(header.to_dict())})
    line = refused(start_server(tmp_path / "changed.safetensors"))
    assert "worker-0 died before it was ready" in line
    assert "version" in line


def test_a_checkpoint_replaced_during_the_start_ends_it(start_server: StartServer, tiny: Path, tmp_path: Path) -> None:
    served = tmp_path / "served.safetensors"
    served.write_bytes(tiny.read_bytes())
    other = make_tiny(tmp_path / "other.safetensors", labels=12)
    server = start_server(served, until="loading")
    os.replace(other, served)
    assert "replaced while the server started" in refused(server)


def test_a_certificate_that_cannot_be_used_ends_the_start_at_once(start_server: StartServer, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    line = refused(start_server(tiny, "--ssl-certfile", str(tmp_path / "cert.pem"), "--ssl-keyfile", str(tmp_path / "cert.pem")))
    assert line.startswith("error: ssl_certfile, ssl_keyfile: ")


@pytest.mark.parametrize("arguments", [["--host", ".."], ["--host", "a" * 70 + ".x"], ["--host", "no.such.host.invalid"]])
def test_a_host_that_is_none_ends_the_start(start_server: StartServer, tiny: Path, arguments: list[str]) -> None:
    assert "can't listen on" in refused(start_server(tiny, *arguments))


def test_children_begin_with_the_signals_of_their_parent_blocked(start_server: StartServer, tiny: Path) -> None:
    server = start_server(tiny, until="loading")
    bit = 1 << (signal.SIGINT - 1)
    blocked: dict[int, bool] = {}
    while not server.url and not server.ended:
        for pid in server.processes:
            if pid != server.process.pid:
                with contextlib.suppress(OSError, ValueError):
                    status = Path(f"/proc/{pid}/status").read_text()
                    masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigBlk", "SigIgn"))]
                    blocked[pid] = blocked.get(pid, True) and any(mask & bit for mask in masks)
    assert blocked
    assert all(blocked.values())


def test_a_port_in_use_ends_the_start_at_once(tiny: Path, start_server: StartServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        line = refused(start_server(tiny, "--port", str(other.getsockname()[1])))
    assert "Address already in use" in line


def test_of_two_servers_that_load_for_one_port_the_later_says_so(tiny: Path, start_server: StartServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    servers = [start_server(tiny, "--port", port, until="loading") for _ in range(2)]
    lines = [server.wait_for_log(" at http") for server in servers]
    assert sum(line is not None for line in lines) == 1
    assert "Address already in use" in refused(servers[lines.index(None)])


def test_it_answers_from_the_moment_it_says_that_it_serves(tiny: Path, start_server: StartServer) -> None:
    for _ in range(3):
        assert start_server(tiny).get("/readyz").status_code == 200


def test_a_wrong_setting_ends_the_start_with_exit_code_2(tiny: Path, start_server: StartServer) -> None:
    server = start_server(tiny, "--max-batch-size", "none")
    assert server.wait(30) == 2
    assert server.log == [
        "error: max_batch_size: 'none' is not allowed: Input should be a valid integer, unable to parse string as an integer"
    ]
