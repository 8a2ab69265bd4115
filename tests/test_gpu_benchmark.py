"""The GPU benchmark's own arithmetic, and that all of it runs: what needs CUDA, with a stand-in for its streams and events."""

from __future__ import annotations

import asyncio
import http.server
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import gpu_checkpoints, gpu_client, gpu_parts, gpu_pipeline, gpu_report
from benchmarks.gpu_parts import SMOKE, Scale, Subject
from benchmarks.gpu_report import Budget, Report, Row, Skipped, TimeUp
from benchmarks.load import ROOT
from models.checkpoint import read_golden
from service.engine import Scores

QUICK = Scale((1, 4), 2, 0.02, 1, (2,))


def test_intervals_are_joined_and_intersected() -> None:
    assert gpu_report.union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert gpu_report.common([(0, 2), (3, 5)], [(1, 4)]) == 2
    assert gpu_report.common([(0, 1)], [(1, 2)]) == 0
    assert gpu_report.common([(0, 4), (1, 2)], [(1, 2), (1.5, 3)]) == 2  # nothing counts twice
    assert gpu_report.common([], [(0, 1)]) == 0


def test_copies_before_the_first_forward_do_not_count() -> None:
    row = gpu_report.overlap_row(32, [(0, 9), (11, 13), (14, 16)], [(10, 12), (12, 15)])
    assert row["copies ms"] == 4
    assert row["copies under a forward"] == pytest.approx(0.75)
    assert row["device computes"] == pytest.approx(1.0)
    assert row["batches"] == 2


def test_a_row_has_the_median_of_the_pairs_and_every_sample() -> None:
    good: Row = {"wrong": 0, "failed": 0}
    row = gpu_report.throughput_row(32, [100, 200, 100], [96, 150, 97], True, good)
    assert row["ratio"] == pytest.approx(0.96)
    assert row["forward samples"] == [100, 200, 100]
    assert row["ok"]
    assert not gpu_report.throughput_row(32, [100], [94.9], True, good)["ok"]
    assert gpu_report.throughput_row(8, [100], [10], False, good)["ok"]
    assert not gpu_report.throughput_row(8, [100], [100], False, {"wrong": 1, "failed": 0})["ok"]
    assert gpu_report.alternate(iter([1.0, 3.0]).__next__, iter([2.0, 4.0]).__next__, 2) == ([1, 3], [2, 4])


def test_the_rate_is_between_two_answers() -> None:
    assert gpu_pipeline.rate([0, 1, 2, 4], [8, 8, 8, 8], since=0.5) == pytest.approx(16 / 3)
    assert gpu_pipeline.rate([0, 1], [8, 8], since=0.5) == 0
    assert not gpu_pipeline.over([1, 2, 3], now=9, since=1, seconds=2)  # three answers are too few
    assert not gpu_pipeline.over([0.5, 2, 3, 4], now=9, since=1, seconds=2)
    assert not gpu_pipeline.over([1, 2, 3, 4], now=2.9, since=1, seconds=2)
    assert gpu_pipeline.over([0, 1, 2, 3, 4], now=4, since=1, seconds=2)


def test_time_left_over_goes_to_later_parts() -> None:
    now = [0.0]
    budget = Budget(100, [1, 3, 4], clock=lambda: now[0])
    assert budget.next_limit() == pytest.approx(12.5)
    now[0] = 2.0
    assert budget.next_limit() == pytest.approx(98 * 3 / 7)
    now[0] = 200.0
    assert budget.next_limit() == 0


def test_a_part_ends_in_time_and_keeps_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(tmp_path / "report.json", {"machine": {}})
    before = signal.getsignal(signal.SIGALRM)

    def endless(rows: list[Row]) -> None:
        rows.append({"batch": 1, "ok": True})
        while True:
            time.sleep(0.01)

    def skipped(_: list[Row]) -> None:
        raise Skipped("the server needs litserve")

    def failing(rows: list[Row]) -> None:
        rows.append({"batch": 32, "ratio": 0.5, "ok": False})
        raise RuntimeError("no luck")

    report.run("endless", "m", 0.05, endless)
    report.run("skipped", "m", 5, skipped)
    report.run("failing", "m", 5, failing)
    report.run("late", "m", 0, endless)
    found = json.loads((tmp_path / "report.json").read_text())
    assert [(one["part"], one["note"].split(":")[0], len(one["rows"])) for one in found["parts"]] == [
        ("endless", "cut short", 1),
        ("skipped", "skipped", 0),
        ("failing", "failed", 1),
        ("late", "cut short", 0),
    ]
    assert [line.split(" of ")[0] for line in found["shortfalls"]] == ["endless", "failing", "failing", "late"]
    said = capsys.readouterr().out
    assert "skipped: the server needs litserve" in said
    assert "| 32    | 0.500 | NO |" in said
    assert signal.getsignal(signal.SIGALRM) == before
    with pytest.raises(TimeUp), gpu_report.limited(0.01):
        time.sleep(5)


def test_answers_of_another_slot_show(tiny: Path) -> None:
    golden = read_golden(tiny)
    answers = gpu_pipeline.Answers(golden, 8)
    right = golden.probabilities[answers.kinds]
    assert answers.wrong(range(8), right) == 0
    assert answers.wrong([3, 1], right[[3, 1]]) == 0
    swapped = [place for place in range(8) if answers.kinds[place] != answers.kinds[7 - place]]
    assert answers.wrong(range(8), right[::-1]) == len(swapped) > 0
    assert answers.wrong([0], np.full((1, 10), np.nan, np.float32)) == 1


@pytest.fixture
def make_subject(tiny: Path, tmp_path: Path) -> Iterator[Callable[..., Subject]]:
    made: list[Subject] = []

    def make(kind: type[gpu_pipeline.Threads | gpu_pipeline.WithWorker], device: str = "cpu") -> Subject:
        pipeline = kind(read_golden(tiny), 8)
        made.append(Subject(tiny, torch.device(device), QUICK, Path(), tmp_path, pipeline))
        return made[-1]

    yield make
    for subject in made:
        subject.pipeline.close()


@pytest.mark.parametrize("kind", [gpu_pipeline.Threads, gpu_pipeline.WithWorker])
def test_both_pipelines_answer_rightly_and_notice_what_is_wrong(
    make_subject: Callable[..., Subject], kind: type[gpu_pipeline.Threads | gpu_pipeline.WithWorker]
) -> None:
    subject = make_subject(kind)
    engine = subject.need()
    for size in (1, 4):
        found = subject.pipeline.sample(size, 0.05)
        assert found["images_per_s"] > 10
        assert (found["wrong"], found["failed"], found["mean batch"]) == (0, 0, size)
    run = engine.lanes[0].run

    def backwards(first: int, count: int, *, alone: bool = False) -> Scores:
        found = run(first, count, alone=alone)
        return Scores(found.logits[::-1], found.probabilities[::-1])

    setattr(engine.lanes[0], "run", backwards)  # noqa: B010  # mypy: a method
    assert subject.pipeline.sample(4, 0.05)["wrong"] > 0
    subject.release()
    assert subject.engine is None


def test_an_error_in_a_lane_is_the_parts(make_subject: Callable[..., Subject]) -> None:
    subject = make_subject(gpu_pipeline.Threads)

    def broken(*_: Any) -> None:
        raise RuntimeError("out of luck")

    setattr(subject.need().lanes[0], "run", broken)  # noqa: B010
    with pytest.raises(RuntimeError, match="out of luck"):
        subject.pipeline.sample(1, 5)


def test_without_litserve_threads_drive_the_lanes(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "service.worker", None)  # as if it could not be imported
    assert isinstance(gpu_pipeline.make(read_golden(tiny), 1), gpu_pipeline.Threads)


class _Stream:
    """In place of CUDA's, on the CPU: nothing is asynchronous."""

    def synchronize(self) -> None:
        pass


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self, stream: object = None) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: _Event) -> float:
        return 1000 * (later.at - self.at)


def test_what_needs_cuda_runs(make_subject: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch) -> None:
    subject = make_subject(gpu_pipeline.Threads, "cuda:0")
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 2_000_000)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostUnregister=lambda _: 0))
    build = subject.build

    def on_cpu(precision: str, largest: int) -> Any:
        subject.device = torch.device("cpu")
        engine = build(precision, largest)
        subject.device = torch.device("cuda:0")
        engine.compute, engine.copying = _Stream(), _Stream()  # type: ignore[assignment]
        engine._pinned = True
        return engine

    monkeypatch.setattr(subject, "build", on_cpu)
    rows: dict[str, list[Row]] = {"golden": [], "copies": [], "overlap": []}
    gpu_parts.golden(subject, rows["golden"])
    assert all(row["peak MB"] == 2 for row in rows["golden"] if "start s" in row)
    benchmarked = next(row for row in rows["golden"] if row["asked"] == "auto, cudnn.benchmark")
    assert benchmarked["within"]
    assert not torch.backends.cudnn.benchmark
    monkeypatch.setattr(gpu_parts, "COPIES_S", 0.01)
    gpu_parts.copies(subject, rows["copies"])
    assert [row["from"].partition(",")[0] for row in rows["copies"]] == ["slots", "not registered", "not registered"]
    assert all(value > 0 for row in rows["copies"] for key, value in row.items() if key != "from")
    assert subject.need()._pinned
    engine = subject.need()
    engine._graphs = dict.fromkeys(engine.warm, engine.scores)  # type: ignore[arg-type]
    setattr(engine, "scores", lambda pixels: engine.replay(pixels))  # noqa: B010  # as lanes on a GPU do
    gpu_parts.overlap(subject, rows["overlap"])
    (row,) = rows["overlap"]
    assert row["batches"] >= 2
    assert 0 < row["device computes"] <= 1
    assert 0 <= row["copies under a forward"] <= 1
    assert "put" not in engine.lanes[0].__dict__
    subject.release()


def test_the_served_part_names_the_packages_that_are_missing(make_subject: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_parts, "find_spec", lambda name: None if name == "litserve" else name)
    with pytest.raises(Skipped, match=r"the server needs litserve$"):
        gpu_parts.served(make_subject(gpu_pipeline.Threads), [])


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked = 0

    def do_POST(self) -> None:
        assert self.rfile.read(int(self.headers["Content-Length"])) == b"a photo"
        _Handler.asked += 1
        self.send_response(500 if _Handler.asked % 2 == 0 else 200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


def test_load_without_wrk_counts_what_is_refused_and_what_breaks() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/predict"
        request = gpu_client.whole_request(url, ("image/jpeg", b"a photo"))
        times, bad, broken = asyncio.run(gpu_client.connect_and_ask(url, [request], 2, 0.3))
        server.shutdown()
        thread.join()
    assert len(times) > 10
    assert bad == pytest.approx(len(times) / 2, abs=2)
    assert broken == 0
    times, bad, broken = asyncio.run(gpu_client.connect_and_ask(url, [request], 1, 0.1))  # nobody listens any more
    assert (times, bad) == ([], 0)
    assert broken >= 1


def test_checkpoints_that_are_given_are_taken_and_those_that_can_not_be_made_left_out(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impossible(_: Path) -> None:
        raise ImportError("no timm")

    assert gpu_checkpoints.checkpoints([tiny], tmp_path) == [tiny]
    monkeypatch.setattr(gpu_checkpoints, "random_resnet50", impossible)
    monkeypatch.setattr(gpu_checkpoints, "ROOT", tmp_path)
    monkeypatch.setattr("models.pretrained.pull", lambda name, path: path.write_bytes(b""))
    assert gpu_checkpoints.checkpoints(None, tmp_path) == [tmp_path / "efficientnet_lite0.safetensors"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends_with_2() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("no GPU: ")
    assert done.stderr.count("\n") == 1


def test_all_of_it_runs_on_a_cpu(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--checkpoint", str(tiny), "--json", str(out), "--minutes", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["machine"]["torch"] == torch.__version__
    assert found["shortfalls"] == []
    notes = {one["part"]: one["note"] for one in found["parts"]}
    assert notes == {
        "golden": "",
        "throughput": "",
        **dict.fromkeys(("copies", "overlap"), "skipped: there are no copies to a device on a CPU"),
        "served": "",
    }
    rows = {one["part"]: one["rows"] for one in found["parts"]}
    assert {row["got"] for row in rows["golden"]} >= {"fp32"}
    assert [row["batch"] for row in rows["throughput"]] == list(SMOKE.sizes)
    assert all(len(row["pipeline samples"]) == SMOKE.rounds for row in rows["throughput"])
    assert rows["served"][0]["images/s"] > 0
    assert done.stdout.count("\n## ") == 6
