"""A bar in a terminal, plain lines elsewhere, nothing for what is quick."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios

import pytest

from models.progress import Progress, say

COUNT = "from models.progress import Progress, say\nwith Progress('counting', 50) as p:\n  p.add(20)\n  say('a line')\n  p.add(30)"


def test_quick_work_says_nothing_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("counting", 50) as bar:
        bar.add(20)
        bar.add(30)
    assert bar.done == 50
    assert capsys.readouterr() == ("", "")


def test_long_work_says_now_and_then_how_far_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("models.progress.time.monotonic", lambda: float(next(clock)))
    with Progress("counting", 400) as bar:  # at 0
        for _ in range(4):
            bar.add(50)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("counting: ")
    assert lines[0].endswith(" s left")
    assert len(lines) < 4
    assert all("\r" not in line and "images/s" in line for line in lines)


def test_a_terminal_gets_a_bar_and_lines_above_it() -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    subprocess.run([sys.executable, "-c", COUNT], stderr=theirs, check=True)
    shown = os.read(ours, 10_000).decode()
    os.close(theirs)
    os.close(ours)
    assert "counting" in shown
    assert "50" in shown
    assert "a line\r\n" in shown
    assert "images" in shown


def test_a_closed_or_broken_stderr_ends_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    subprocess.run([sys.executable, "-c", f"{COUNT}\nprint('done')"], stderr=writer, check=True)
    os.close(writer)


def test_lines_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    say("ein Käfer")
    assert capsys.readouterr() == ("", "ein Käfer\n")
