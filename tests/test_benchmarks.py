"""The benchmarks' own arithmetic, that the limit is really measured, and that nothing is left behind."""

import io
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from email.parser import BytesParser
from email.policy import HTTP
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks import limit, load, report, serving
from tests.conftest import encode

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
        body = json.dumps({"predictions": [{"label": "cat", "probability": 0.9}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


needs_wrk = pytest.mark.skipif(shutil.which("wrk") is None, reason="needs wrk")
PHOTO = load.Photo("photo.jpg", bytes(range(256)))


@pytest.fixture
def stub(tmp_path: Path) -> load.Server:
    (tmp_path / "stub.py").write_text(STUB)
    return load.Server("stub", f"{{python}} {tmp_path / 'stub.py'} {{port}}", "/", "/predict")


# Photos and requests


def test_bodies_carry_the_image_unchanged() -> None:
    assert load.request_body(PHOTO, "raw") == ("image/jpeg", PHOTO.data)
    content_type, body = load.request_body(PHOTO, "multipart")
    (part,) = BytesParser(policy=HTTP).parsebytes(f"Content-Type: {content_type}\r\n\r\n".encode() + body).iter_parts()
    assert part.get_param("name", header="content-disposition") == "content"
    assert part.get_payload(decode=True) == PHOTO.data


def test_photos_of_all_names_and_folders_are_taken_and_what_is_none_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "roses").mkdir()
    (tmp_path / "a.JPEG").write_bytes(encode((255, 0, 0), "PNG"))  # the bytes decide
    (tmp_path / "roses/b.webp").write_bytes(encode((255, 0, 0), "WEBP"))
    (tmp_path / "c.jpg").write_bytes(b"no photo at all")
    (tmp_path / "notes.txt").write_text("no photo either")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (40, 30)).save(tmp_path / "d.jpg", exif=turned)
    photos = load.gather(tmp_path)
    assert [(photo.name, photo.type, photo.upright) for photo in photos] == [
        ("a.JPEG", "image/png", True),
        ("d.jpg", "image/jpeg", False),
        ("b.webp", "image/webp", True),
    ]
    assert "c.jpg" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no JPEG"):
        load.gather(tmp_path / "nothing")


def test_big_photos_have_12_megapixels() -> None:
    photo = load.Photo("wide.png", encode((0, 0, 255), "PNG", (80, 60)), "image/png")
    (large,) = load.big([photo])
    with Image.open(io.BytesIO(large.data)) as image:
        assert (image.size, image.format, large.type) == ((4000, 3000), "JPEG", "image/jpeg")
    assert load.big([large]) == [large]


def test_many_photos_are_thinned_out_evenly() -> None:
    assert load._some(range(100), 4) == [0, 25, 50, 75]
    assert load._some(range(3), 4) == [0, 1, 2]


# Rounds, ratios, requirements


def figures(**known: float) -> load.Figures:
    return {**dict.fromkeys(report.COLUMNS, 0.0), **known}


def test_ratios_are_medians_of_rounds_and_stand_in_the_table() -> None:
    # Medians apart would give 60 / 20 = 3; round by round it is 4.
    ours = [figures(images_per_s=value) for value in (40, 60, 100)]
    peer = [figures(images_per_s=value) for value in (10, 30, 20)]
    assert report.ratios(ours, peer) == {"images_per_s": 4.0}
    few = [{"images_per_s": 80.0}] * 3  # as the limit, which has not all figures
    lines = report.table({"ours": ours, "peer": peer, "few": few}).splitlines()
    assert "60.0 (40.0-100.0)" in lines[2]
    assert "20.0 (10.0-30.0)" in lines[3]
    assert [cell.strip() for cell in lines[4].split("|")[1:4]] == ["few", "80.0 (80.0-80.0)", ""]
    assert [cell.strip() for cell in lines[5].split("|")[1:3]] == ["ours / peer", "4.00"]
    assert [cell.strip() for cell in lines[6].split("|")[1:3]] == ["ours / few", "0.75"]
    assert len({len(line) for line in lines}) == 1


OURS = {"images_per_s": 200.0, "p50_ms": 80.0, "p99_ms": 150.0, "alone_p50_ms": 7.0, "big_images_per_s": 60.0, "cpu_ms_per_image": 9.0}
OURS |= {"memory_mb": 300.0, "ready_s": 1.0, "mean_batch": 4.0}
LIMIT = {"images_per_s": 220.0, "cpu_ms_per_image": 8.5, "alone_p50_ms": 6.0}
ONCE = {"first_start_s": 10.0, "idle_percent": 0.5, "growth_percent": 1.0}
COSTS = {1: 5.5, 2: 5.2, 4: 5.0, 8: 4.0}


def rows(architecture: str = "timm:efficientnet_lite0", costs: dict[int, float] = COSTS, **changes: Any) -> dict[str, report.Row]:
    results = {
        "spyglass": [figures(**OURS | changes)] * 3,
        "quickstart": [figures(images_per_s=33.0, big_images_per_s=9.0)] * 3,
        "fastapi-onnx": [figures(images_per_s=105.0)] * 3,
        report.LIMIT: [LIMIT] * 3,
    }
    once = {key: changes.get(key, value) for key, value in ONCE.items()}
    found = report.requirements(results, "spyglass", architecture, "efficientnet_lite0", once, costs)
    return {row.what: row for row in found}


def test_all_requirements_are_met_together() -> None:
    assert len(rows()) == 14
    assert [what for what, row in rows().items() if not row.ok] == []


@pytest.mark.parametrize(
    ("changes", "fall_short"),
    [
        ({"cpu_ms_per_image": 9.31}, ["CPU ms/image at 16, above the in-process loop's"]),
        (
            {"images_per_s": 197.9},
            ["images/s at 16 / in-process limit", "images/s at 16 / LitServe's quickstart", "images/s at 16 / FastAPI + ONNX Runtime"],
        ),
        ({"big_images_per_s": 53.9}, ["12 megapixels: images/s at 4 / LitServe's quickstart"]),
        ({"alone_p50_ms": 7.6}, ["p50 alone / decode + forward of one image"]),
        ({"alone_p50_ms": math.nan}, ["p50 alone / decode + forward of one image"]),
        ({"p99_ms": 161.0}, ["p99 / p50 at 16"]),
        ({"mean_batch": 2.9}, ["mean batch at 16"]),
        ({"errors": 1.0}, ["answers that are not 200, failed connections"]),
        ({"ready_s": 1.6}, ["start to ready, model converted before, s"]),
        ({"memory_mb": 350.0}, ["PSS after load, MB"]),
        ({"first_start_s": 15.1}, ["first start, with an empty cache, s"]),
        ({"idle_percent": 1.0}, ["CPU while idle, % of a core"]),
        ({"growth_percent": 2.0}, ["memory grown over 20,000 requests, %"]),
    ],
)
def test_each_requirement_can_be_missed(changes: dict[str, Any], fall_short: list[str]) -> None:
    found = rows(**changes)
    assert [what for what, row in found.items() if not row.ok] == fall_short
    table = report.verdict(found.values()).splitlines()
    assert [line.split("|")[1].strip() for line in table if line.split("|")[4].strip() == "NO"] == fall_short


def test_other_architectures_are_asked_for_less() -> None:
    what = "images/s at 16 / LitServe's quickstart"
    assert not rows(images_per_s=190.0)[what].ok
    assert rows("resnet50", images_per_s=190.0)[what].ok


def test_small_batches_pass_where_they_are_as_quick() -> None:
    quick = {1: 5.2, 2: 5.1, 4: 5.0, 8: 1.0}
    row = rows(costs=quick, mean_batch=1.5)["mean batch at 16"]
    assert row.ok
    assert "as quick" in report.verdict([row])
    assert not report.smaller_are_as_quick({1: 5.3, 2: 5.1, 4: 5.0})
    assert not report.smaller_are_as_quick({})


@pytest.mark.parametrize("good", [True, False])
def test_the_exit_code_says_whether_all_is_met(good: bool, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "run", lambda *_: ({"once": {}}, good))
    monkeypatch.setattr(shutil, "which", lambda _: "wrk")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    (tmp_path / "photo.png").write_bytes(encode((1, 2, 3)))
    arguments = ["--checkpoint", tiny, "--photos", tmp_path, "--json", tmp_path / "found.json"]
    monkeypatch.setattr(sys, "argv", ["serving", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        serving.main()
    assert int(end.value.code or 0) == (0 if good else 1)
    assert '"once"' in (tmp_path / "found.json").read_text()


def test_a_peer_gets_its_best_numbers_of_workers_and_threads(stub: load.Server) -> None:
    rates = {(1, 1): 10.0, (1, 2): 30.0, (2, 1): 20.0, (2, 2): 5.0}
    best = serving.search(stub, (1, 2), lambda one: rates[one.workers, one.threads])
    assert (best.workers, best.threads) == (1, 2)
    tried: list[tuple[int, int]] = []
    serving.search(stub, (1, 2, 8), lambda one: tried.append((one.workers, one.threads)) or 0.0)  # type: ignore[func-returns-value]
    assert (8, 2) in tried
    assert (8, 8) not in tried


def test_labels_must_agree_where_the_photo_is_clear_and_upright() -> None:
    sideways = load.Photo("turned.jpg", b"", upright=False)
    photos = [PHOTO, PHOTO, PHOTO, sideways]
    expected = [("cat", 0.9), ("dog", 0.8), ("cat", 0.4), ("cat", 0.9)]
    assert serving.agreement([("cat", 0.6), ("cat", 0.9), ("dog", 0.5), ("dog", 0.9)], expected, photos) == (1, 2)
    assert serving.agreement([("dog", 0.9)], [("cat", 0.3)], [PHOTO]) == (0, 1)  # nothing is clear: then all count


# The in-process limit


@pytest.fixture(scope="module")
def measured(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[limit.Way], load.Figures]:
    subject = limit.Limit(tiny, [encode((255, 0, 0)), encode((0, 0, 255), "JPEG")], tmp_path_factory.mktemp("cache"))
    return lambda way: subject.measure(way, 0.1)


@pytest.mark.parametrize(
    "way",
    [
        limit.Way("decode", lanes=2),
        limit.Way("forward", "openvino", "fp32", 2, 1, 4, lanes=1, ahead=4),
        limit.Way("overlapped", "openvino", "fp32", 2, 1, 2, fixed=True, lanes=2, ahead=2),
        limit.Way("single", "torch", "fp32"),
    ],
    ids=str,
)
def test_every_kind_is_measured(way: limit.Way, measured: Callable[[limit.Way], load.Figures]) -> None:
    found = measured(way)
    assert found["images_per_s"] > 0
    assert 0 < found["cpu_ms_per_image"] < 1000
    assert found["p50_ms"] > 0


def test_a_fault_in_a_lane_ends_the_measurement(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = limit.Limit(tiny, [encode((255, 0, 0))], tmp_path)

    def read(_: object, data: bytes) -> Any:
        raise ValueError("broken")

    monkeypatch.setattr(type(subject.preprocessing), "read", read)
    with pytest.raises(ValueError, match="broken"):  # and no thread waits for ever
        subject.measure(limit.Way("decode", lanes=2), 0.1)


def test_the_best_way_is_chosen_by_its_median_among_those_measured_again() -> None:
    def one(images_per_s: float, p50_ms: float) -> load.Figures:
        return {"images_per_s": images_per_s, "p50_ms": p50_ms, "cpu_ms_per_image": 1.0, "others_percent": 0.0}

    lucky, steady = limit.Way("overlapped", "openvino", batch=1), limit.Way("overlapped", "openvino", batch=2)
    once = limit.Way("overlapped", "openvino", batch=4)
    slow, quick = limit.Way("single", threads=1), limit.Way("single", threads=2)
    samples = {
        once: [one(900, 1)],
        lucky: [one(500, 1), one(100, 1), one(100, 1)],
        steady: [one(200, 1), one(200, 1), one(200, 1)],
        slow: [one(300, 9)],
        quick: [one(100, 5)],
    }
    assert limit.ranked(samples, "overlapped") == [steady, lucky, once]
    assert limit.best(samples, "single") == quick


# Processes


def test_a_server_ends_with_all_its_processes(stub: load.Server, tmp_path: Path) -> None:
    with load.running(stub, tmp_path, tmp_path) as live:
        before = load.family(live.pid)
        assert len(before) == 2
        assert load.memory_mb(before) > 1
    assert not load.family(live.pid)


def test_a_server_that_does_not_start_is_shown(tmp_path: Path) -> None:
    server = load.Server("broken", "{python} -c raise(SystemExit('out_of_luck'))", "/", "/")
    with pytest.raises(SystemExit, match="out_of_luck"), load.running(server, tmp_path, tmp_path):
        pass


@needs_wrk
def test_refused_images_are_counted_and_are_not_throughput(stub: load.Server, tmp_path: Path) -> None:
    body = load.request_body(PHOTO, stub.body)
    with load.running(stub, tmp_path, tmp_path) as live:
        assert live.classify(body) == ("cat", 0.9)
        # Many files: with one connection wrk takes low socket numbers only.
        run = load.drive(live, load.write_script([body] * 40, tmp_path / "script"), concurrency=1, seconds=1)
    assert run["requests"] > 10
    assert run["non_2xx"] == pytest.approx(run["requests"] / 2, abs=2)
    assert run["errors"] == 0
    assert 0 < run["p50_ms"] <= run["p99_ms"]


@needs_wrk
def test_an_interrupted_benchmark_leaves_no_process_and_no_file(stub: load.Server, tiny: Path, tmp_path: Path) -> None:
    folder, photos = tmp_path / "temporary", tmp_path / "photos"
    folder.mkdir()
    photos.mkdir()
    (photos / "photo.png").write_bytes(encode((1, 2, 3)))
    start = (
        "from benchmarks import load, serving; "
        f"serving.SERVERS = {{'stub': load.Server('stub', {stub.command!r}, '/', '/predict')}}; serving.main()"
    )
    command = [sys.executable, "-c", start, "--checkpoint", str(tiny), "--photos", str(photos), "--seconds", "60"]
    environment = {"TMPDIR": str(folder), "PATH": os.defpath}
    process = subprocess.Popen(command, cwd=load.ROOT, env=environment, stderr=subprocess.PIPE, start_new_session=True)
    children: set[int] = set()
    try:
        deadline = time.monotonic() + 30
        while len(children) < 3 and time.monotonic() < deadline:
            children = load.family(process.pid).keys() - {process.pid}
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
