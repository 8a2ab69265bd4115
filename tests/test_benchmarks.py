"""The benchmark's own arithmetic, and that it leaves nothing behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from email.parser import BytesParser
from email.policy import HTTP
from pathlib import Path

import pytest

from benchmarks import serving

# A server that has a child which ignores SIGTERM, and refuses every second image.
STUB = """
import http.server, json, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version, asked = "HTTP/1.1", 0
    def do_GET(self):
        self.answer(200)
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        Handler.asked += 1
        self.answer(500 if Handler.asked % 2 == 0 else 200)
    def answer(self, status):
        body = json.dumps({"predictions": [{"label": "cat"}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def stub(tmp_path: Path) -> serving.Server:
    (tmp_path / "stub.py").write_text(STUB)
    return serving.Server("stub", f"{{python}} {tmp_path / 'stub.py'} {{port}}", "/", "/predict")


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.jpg"
    path.write_bytes(bytes(range(256)))
    return path


def test_bodies_carry_the_image_unchanged(photo: Path) -> None:
    assert serving.request_body(photo, "raw") == ("image/jpeg", photo.read_bytes())
    content_type, body = serving.request_body(photo, "multipart")
    (part,) = BytesParser(policy=HTTP).parsebytes(f"Content-Type: {content_type}\r\n\r\n".encode() + body).iter_parts()
    assert part.get_param("name", header="content-disposition") == "content"
    assert part.get_payload(decode=True) == photo.read_bytes()


def test_ratios_are_medians_of_rounds_and_stand_in_the_table() -> None:
    def figures(images_per_s: float) -> serving.Figures:
        return {**dict.fromkeys(serving.COLUMNS, 0.0), "images_per_s": images_per_s}

    # Medians apart would give 60 / 20 = 3; round by round it is 4.
    ours, peer = [figures(value) for value in (40, 60, 100)], [figures(value) for value in (10, 30, 20)]
    assert serving.ratios(ours, peer) == {"images_per_s": 4.0}
    lines = serving.table({"ours": ours, "peer": peer}).splitlines()
    assert "60.0 (40.0-100.0)" in lines[2]
    assert "20.0 (10.0-30.0)" in lines[3]
    assert [cell.strip() for cell in lines[4].split("|")[1:3]] == ["ours / peer", "4.00"]
    assert len({len(line) for line in lines}) == 1


def test_a_server_ends_with_all_its_processes(stub: serving.Server, tmp_path: Path) -> None:
    with serving.running(stub, tmp_path, tmp_path) as live:
        before = serving.family(live.pid)
        assert len(before) == 2
        assert serving.memory_mb(before) > 1
    assert not serving.family(live.pid)


def test_a_server_that_does_not_start_is_shown(tmp_path: Path) -> None:
    server = serving.Server("broken", "{python} -c raise(SystemExit('out_of_luck'))", "/", "/")
    with pytest.raises(SystemExit, match="out_of_luck"), serving.running(server, tmp_path, tmp_path):
        pass


@pytest.mark.skipif(shutil.which("wrk") is None, reason="needs wrk")
def test_refused_images_are_counted_and_are_not_throughput(stub: serving.Server, photo: Path, tmp_path: Path) -> None:
    body = serving.request_body(photo, stub.body)
    with serving.running(stub, tmp_path, tmp_path) as live:
        assert live.classify(body) == "cat"
        load = serving.drive(live, serving.write_script([body], tmp_path), concurrency=2, seconds=1)
    assert load["requests"] > 10
    assert load["non_2xx"] == pytest.approx(load["requests"] / 2, abs=2)
    assert load["errors"] == 0
    assert 0 < load["p50_ms"] <= load["p99_ms"]


@pytest.mark.skipif(shutil.which("wrk") is None, reason="needs wrk")
def test_an_interrupted_benchmark_leaves_no_process_and_no_file(stub: serving.Server, photo: Path, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    start = (
        "import sys; from benchmarks import serving; "
        f"serving.SERVERS = {{'stub': serving.Server('stub', {stub.command!r}, '/', '/predict')}}; serving.main()"
    )
    command = [sys.executable, "-c", start, "--checkpoint", str(photo), "--photos", str(photo.parent), "--seconds", "60"]
    environment = {"TMPDIR": str(folder), "PATH": os.defpath}
    process = subprocess.Popen(command, cwd=serving.ROOT, env=environment, stderr=subprocess.PIPE, start_new_session=True)
    children: set[int] = set()
    try:
        deadline = time.monotonic() + 30
        while len(children) < 3 and time.monotonic() < deadline:
            children = serving.family(process.pid).keys() - {process.pid}
            time.sleep(0.05)
        assert len(children) == 3  # the stub, its child, wrk
        process.terminate()
        _, said = process.communicate(timeout=30)
        assert process.returncode == 128 + signal.SIGTERM, said
    finally:
        process.kill()
        process.wait()
    assert not [pid for pid in children if _alive(pid)]
    assert not list(folder.iterdir())


def _alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
