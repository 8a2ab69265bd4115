"""What Docker builds, runs and asks, as far as it can be told without Docker: the files agree with each other and with the code."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.server import START_LIMIT_S
from service.settings import PREFIX, Settings

ROOT = Path(__file__).parent.parent
HEALTHCHECK = "deploy/healthcheck.py"
INSTRUCTIONS = [line for line in (ROOT / "Dockerfile").read_text().replace("\\\n", "").splitlines() if re.match("[A-Z]", line)]
COPIED = [source for line in INSTRUCTIONS if line.startswith("COPY ") and "--from" not in line for source in line.split()[1:-1]]


class _Loader(yaml.SafeLoader):
    pass


_Loader.add_constructor("!reset", lambda *_: "reset")


def compose(name: str) -> dict[str, Any]:
    services = yaml.load((ROOT / name).read_text(), _Loader)["services"]
    assert isinstance(services, dict)
    return services


SERVICES = compose("docker-compose.yml")


def in_build_context(path: str) -> bool:
    """By the kinds of patterns that .dockerignore has: the last that fits the path, or a folder above it, decides."""
    found = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = re.escape(line.removeprefix("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if not line.startswith("#") and re.fullmatch(f"{pattern}(/.*)?", path):
            found = line.startswith("!")
    return found


def test_what_the_dockerfile_copies_exists_and_reaches_the_build() -> None:
    assert {*tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"], HEALTHCHECK} <= set(COPIED)
    for source in COPIED:
        assert (ROOT / source).exists()
        assert in_build_context(source)
        assert in_build_context(f"{source}/file")


@pytest.mark.parametrize(
    "path", [".git/config", ".venv/bin/python", ".env", "checkpoints/a.safetensors", "data/a.jpg", "runs/a", "models/__pycache__/a.pyc"]
)
def test_nothing_else_reaches_the_build(path: str) -> None:
    assert not in_build_context(path)


def last(instruction: str) -> str:
    return [line for line in INSTRUCTIONS if line.split()[0] == instruction][-1].partition(" ")[2]


def test_the_image_is_not_root_and_its_server_is_process_1() -> None:
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last("USER"))
    assert yaml.safe_load(last("ENTRYPOINT")) == ["python", "-m", "service"]  # no shell, which would keep SIGTERM to itself


def test_the_image_asks_its_own_health_check_for_as_long_as_a_start_may_take() -> None:
    options, _, command = last("HEALTHCHECK").partition(" CMD ")
    assert yaml.safe_load(command) == ["python", "-S", f"/app/{HEALTHCHECK}"]
    assert f"--start-period={START_LIMIT_S:.0f}s" in shlex.split(options)


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_services_can_do_little_and_have_all_gpus(service: dict[str, Any]) -> None:
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["deploy"]["resources"]["reservations"]["devices"] == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]


def test_the_file_for_hosts_without_a_gpu_takes_the_reservation_from_every_service() -> None:
    assert compose("deploy/docker-compose.cpu.yml") == {name: {"deploy": "reset"} for name in SERVICES}


def test_every_setting_reaches_the_server_but_where_it_listens_and_keeps_things() -> None:
    wanted = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields if name not in ("host", "port", "cache_dir")}
    assert set(SERVICES["spyglass"]["environment"]) == wanted


def test_a_stop_has_time_to_drain() -> None:
    assert int(SERVICES["spyglass"]["stop_grace_period"].removesuffix("s")) > Settings.model_fields["drain_s"].default + 4


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES)
def test_mounted_folders_are_in_git_lest_docker_makes_them_as_root(service: dict[str, Any]) -> None:
    for volume in service["volumes"]:
        folder, _, inside = volume.partition(":")
        if not folder.startswith("."):
            assert folder == "cache"
            assert f"SPYGLASS_CACHE_DIR={inside}" in last("ENV").split()
            continue
        assert inside.removesuffix(":ro") == f"/app/{Path(folder).name}"
        assert (ROOT / folder / ".gitignore").read_text() == "*\n!.gitignore\n"


@contextmanager
def answering(status: int) -> Iterator[str]:
    """The port of a server that gives GET /readyz this status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/readyz" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield str(server.server_port)
        server.shutdown()
        thread.join()


def check(**environment: str) -> tuple[int, str]:
    """Exit code and reason of the health check, started as Docker does."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    ended = subprocess.run(
        [sys.executable, "-S", HEALTHCHECK], cwd=ROOT, env=clean | environment, capture_output=True, text=True, check=False, timeout=30
    )
    return ended.returncode, ended.stderr.strip()


def test_the_health_check_passes_on_200_only() -> None:
    with answering(200) as port:
        assert check(SPYGLASS_PORT=port) == (0, "")
        assert check(SPYGLASS_PORT=port, SPYGLASS_HOST="127.0.0.1", SPYGLASS_SSL_CERTFILE="") == (0, "")
    with answering(503) as port:
        assert check(SPYGLASS_PORT=port) == (1, "HTTP/1.0 503 Service Unavailable")


def test_the_health_check_fails_when_nothing_listens() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    code, reason = check(SPYGLASS_PORT=str(port))
    assert code == 1
    assert reason.startswith("ConnectionRefusedError")


def test_the_health_check_speaks_tls_when_the_server_has_a_certificate() -> None:
    with answering(200) as port:
        code, reason = check(SPYGLASS_PORT=port, SPYGLASS_SSL_CERTFILE="cert.pem")
    assert code == 1
    assert reason.startswith("SSLError")


@pytest.mark.parametrize(
    ("host", "port", "address"),
    [
        ("", "", ("0.0.0.0", 8000)),
        ("", "9000", ("0.0.0.0", 9000)),
        ("::1", "", ("::1", 8000)),
        ("", "tcp://10.0.0.1:80", ("0.0.0.0", 8000)),
    ],
)
def test_the_health_check_asks_where_the_server_listens(
    host: str, port: str, address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = runpy.run_path(str(ROOT / HEALTHCHECK))["main"]
    asked = []

    def refuse(address: tuple[str, int], timeout: float) -> None:
        asked.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setenv("SPYGLASS_HOST", host)
    monkeypatch.setenv("SPYGLASS_PORT", port)
    assert main() == 1
    assert asked == [address]
