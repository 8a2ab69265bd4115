"""How far a long piece of work is: a bar in a terminal, now and then a plain line anywhere else."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

from tqdm import tqdm

_LINE_EVERY_S = 30.0


def printable(text: str) -> str:
    """A line that stays one: file names may hold line ends and what moves a terminal's cursor."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def say(line: str) -> None:
    """Print a line to stderr, above a bar that is being drawn. Hours of work don't end because nobody reads on."""
    with suppress(OSError):
        tqdm.write(printable(line), file=sys.stderr)
        sys.stderr.flush()


class Progress:
    """Counts images of a known total; shows images/s and the time left on stderr."""

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total, self.done = title, total, 0
        self.started = self._said = time.monotonic()
        self._bar: tqdm[NoReturn] | None = None
        if sys.stderr.isatty():
            known = os.get_terminal_size(sys.stderr.fileno()).columns > 0
            width = {"dynamic_ncols": True} if known else {"ncols": 80}
            self._bar = tqdm(desc=title, total=total, unit=" images", leave=False, smoothing=0.1, file=sys.stderr, **width)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, images: int) -> None:
        self.done += images
        if self._bar is not None:
            self._bar.update(images)
        elif time.monotonic() - self._said >= _LINE_EVERY_S:
            self._said = time.monotonic()
            left = (self.total - self.done) / self.rate
            say(f"{self.title}: {self.done} of {self.total} images, {self.rate:.0f} images/s, {left:.0f} s left")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def rate(self) -> float:
        """Images per second since the beginning."""
        return self.done / max(self.seconds, 1e-9)
