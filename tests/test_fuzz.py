"""Mutated image files through the decoder and the real server, for a few seconds; `python -m benchmarks.fuzz` does it at length."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from benchmarks import fuzz, load, mutations
from models.images import ImageError
from models.preprocessing import Preprocessing
from tests.conftest import EXAMPLES, Server

SEED = 20
PREPROCESSING = Preprocessing(resize=64, crop=56, interpolation="bilinear", mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))


@pytest.fixture(scope="module")
def files() -> list[bytes]:
    return mutations.subjects([photo.data for photo in load.gather(EXAMPLES)])


def test_every_whole_file_decodes(files: list[bytes]) -> None:
    for number, data in enumerate(files):
        assert PREPROCESSING.read(data).shape == (56, 56, 3), number
    starts = {data[:4] for data in files} | {data[8:12] for data in files}
    assert starts >= {b"\x89PNG", b"GIF8", b"II*\0", b"II\x2b\0", b"WEBP", b"avif", b"avis"}
    assert {data[:2] for data in files} >= {b"\xff\xd8", b"BM"}


def test_a_file_is_made_again_from_its_number_and_most_are_broken(files: list[bytes]) -> None:
    made = [mutations.mutated(files, SEED, number) for number in range(300)]
    assert [mutations.mutated(files, SEED, number) for number in range(300)] == made
    assert mutations.mutated(files, SEED + 1, 7) != made[7]
    assert len(set(made)) > 290
    assert sum(data in files for data in made) < 60


def test_the_decoder_takes_mutated_files_in_steady_memory(files: list[bytes]) -> None:
    found = fuzz.in_a_child(PREPROCESSING.read, files, SEED, 6_000)
    assert found.wrong == []  # its lines name the files
    assert found.growth_percent < 10  # a small process has not settled after so few: a leak of 1 kB a file would be 15 %
    assert found.answers.total() == 12_000
    assert set(found.answers) == {"decoded"} | fuzz.CODES


def test_the_server_answers_mutated_files_without_a_500(files: list[bytes], tiny_server: Server) -> None:
    found = fuzz.over_http(f"{tiny_server.url}/predict", tiny_server.process.pid, files, SEED, 400)
    assert found.wrong == []
    assert set(found.answers) <= {"200", "400", "413", "415", "422"}
    assert found.answers["200"] > 30
    assert found.answers["422"] > 100


# What the fuzzing itself must notice


def _raise(data: bytes) -> None:
    raise KeyError("length") if len(data) % 2 else ImageError("not_a_code", "never heard of")


def _die(data: bytes) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_other_errors_and_codes_are_wrong_and_named_by_number(files: list[bytes], capsys: pytest.CaptureFixture[str]) -> None:
    found = fuzz.in_process(_raise, files, SEED, 100, [_Now()])
    assert len(found.wrong) == 200
    assert any(line.endswith(": KeyError('length')") for line in found.wrong)
    assert any(line.startswith(f"{SEED}:99: ") for line in found.wrong)
    assert any(line.endswith("not_a_code") for line in found.wrong)
    assert not fuzz.report("in process", found, SEED)
    assert f"WRONG {SEED}:100: " in capsys.readouterr().out


def test_a_process_that_dies_is_told_with_the_files_that_it_was_at(files: list[bytes]) -> None:
    found = fuzz.in_a_child(_die, files, SEED, 100)
    assert "exit code -9" in found.wrong[0]
    assert f"{SEED}:10" in found.wrong[0]
    assert not fuzz.report("in process", found, SEED)


def test_growth_is_told_by_the_least_memory_of_a_stretch() -> None:
    steady = [50.0, 80.0] * (fuzz.READINGS // 2)
    assert fuzz.Found(memory_mb=steady).growth_percent == 0
    leaking = [reading + number for number, reading in enumerate(steady)]
    assert fuzz.Found(memory_mb=leaking).growth_percent == pytest.approx(100 * 40 / 50)
    assert not fuzz.report("in process", fuzz.Found(memory_mb=leaking), SEED)


class _Now:
    value: Any = -1
