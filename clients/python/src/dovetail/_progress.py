"""Progress on a terminal or in a notebook, without a dependency."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from . import _arguments

ProgressArgument: TypeAlias = "bool | Callable[[Any], None] | None"
"""``True`` for a bar on standard error, a function to call with each new state, or ``None`` for no output."""


def reporter(progress: ProgressArgument, title: str) -> Callable[[Any], None]:
    """Returns the function to call with each new state, which has a ``fraction`` and a ``summary``."""
    progress = _arguments.progress(progress)
    if callable(progress):
        return progress
    return Bar(title) if progress else lambda _state: None


class Bar:
    """Line on standard error that is redrawn at most ten times a second.

    If standard error is not a terminal, it prints only the last state.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._drawn = 0.0
        self._width = 0

    def __call__(self, state: Any) -> None:
        now = time.monotonic()
        done = bool(getattr(state, "done", False))
        if not done and (now - self._drawn < 0.1 or not sys.stderr.isatty()):
            return
        self._drawn = now
        fraction = state.fraction
        bar = "" if fraction is None else f" [{'#' * round(fraction * 24):24}] {fraction:4.0%}"
        line = f"{self._title}{bar} {state.summary}"
        start = "\r" if sys.stderr.isatty() else ""
        sys.stderr.write(f"{start}{line:{self._width}}" + ("\n" if done else ""))
        sys.stderr.flush()
        self._width = len(line)


@dataclass(frozen=True)
class Transfer:
    """Progress of a transfer of rows, up or down."""

    rows: int
    bytes: int
    rows_total: int | None
    seconds: float
    done: bool = False

    @property
    def fraction(self) -> float | None:
        """Share that is done, 0 to 1. ``None`` if the total is unknown."""
        if self.done:
            return 1.0
        return None if not self.rows_total else min(1.0, self.rows / self.rows_total)

    @property
    def summary(self) -> str:
        """Rows, bytes and rate in words."""
        rate = f", {human_bytes(self.bytes / self.seconds)}/s" if self.seconds > 0 else ""
        left = ""
        if not self.done and self.fraction and self.seconds > 1:
            left = f", {human_seconds(self.seconds * (1 - self.fraction) / self.fraction)} left"
        return f"{human_count(self.rows)} rows, {human_bytes(self.bytes)}{rate}{left}"


def human_bytes(count: float) -> str:
    """Formats a number of bytes.

    >>> human_bytes(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_seconds(seconds: float) -> str:
    """Formats a duration, in whole seconds.

    >>> human_seconds(6.2), human_seconds(200), human_seconds(7500)
    ('7 s', '3 min 20 s', '2 h 5 min')
    """
    whole = math.ceil(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{human_count(whole // 3600)} h {whole % 3600 // 60} min"


def human_count(count: int) -> str:
    """Formats a count.

    >>> human_count(1234567)
    '1,234,567'
    """
    return f"{count:,}"
