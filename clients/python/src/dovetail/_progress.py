"""Progress on a terminal or in a notebook, without a dependency."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TypeAlias

ProgressArgument: TypeAlias = "bool | Callable[[Any], None] | None"
"""``True`` draws a bar on standard error; a function is called with each new state; ``None`` keeps quiet."""


def reporter(progress: ProgressArgument, title: str) -> Callable[[Any], None]:
    """The function to call with each new state (which has a ``fraction`` and a ``summary``)."""
    if callable(progress):
        return progress
    return Bar(title) if progress else lambda _state: None


class Bar:
    """One line on standard error that redraws itself, at most ten times a second.

    Where standard error is no terminal it prints nothing but the last state.
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


def human_bytes(count: float) -> str:
    """A number of bytes for people.

    >>> human_bytes(1536)
    '1.5 KiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def human_count(count: int) -> str:
    """A number for people.

    >>> human_count(1234567)
    '1,234,567'
    """
    return f"{count:,}"
