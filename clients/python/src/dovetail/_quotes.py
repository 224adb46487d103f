"""Quotes of CSV, looked at as its bytes pass.

pyarrow takes a quote that is not closed to go on to the end of the file, and what is behind one that closes for a part
of the field, so that one quote too many swallows rows without a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""What spreadsheets begin UTF-8 with."""

_ADVICE = "a field that begins with a quote ends with one, and a quote within it is doubled"


class Quotes:
    """What pyarrow reads instead of the file; refuses to go on behind a quote that is wrong."""

    def __init__(self, file: Any, delimiter: str) -> None:
        end, field, quoted, _ = _parts(delimiter)
        self._file = file
        # One pass of an automaton over megabytes, without Python's lock.
        self._closed = rf"\A(?:{field}{end})*{field}\z"
        self._open = rf"\A(?:{field}{end})*{quoted}\z"
        self._is_start = True
        self._is_open = False
        self._rest = b""

    def read(self, size: int) -> bytes:
        """The next bytes."""
        data: bytes = self._file.read(size)
        text = self._rest + data
        # Behind a line end it is known whether a quote before it closes a field or is one of two.
        cut = text.rfind(b"\n") + 1 if data else len(text)
        self._rest = text[cut:]
        self._check(text[:cut])
        if not data and self._is_open:
            raise pa.ArrowInvalid("a quote is not closed")
        return data

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return bool(self._file.closed)

    def _check(self, text: bytes) -> None:
        if self._is_start and text:
            text = text.removeprefix(BYTE_ORDER_MARK)
            self._is_start = False
        if self._is_open:
            text = b'"' + text
        elif b'"' not in text:
            return
        value = pa.scalar(text, pa.large_binary())
        self._is_open = not pc.match_substring_regex(value, self._closed).as_py()
        if self._is_open and not pc.match_substring_regex(value, self._open).as_py():
            raise pa.ArrowInvalid("something is behind the quote that closes a field")


def first_wrong(lines: Iterable[bytes], delimiter: str) -> str | None:
    r"""What is wrong with the first quote that is, and on which line; slowly.

    >>> first_wrong([b'a,"b\n', b'c"\n'], ","), first_wrong([b'a,b\n', b'5",""\n'], ",")
    (None, None)
    >>> first_wrong([b'a,"b\n', b'c"d\n'], ",").split(";")[0]
    "line 2 has 'd' behind the quote that closes a field, which began on line 1"
    >>> first_wrong([b'a\n', b'"b\n', b'c\n'], ",").split(";")[0]
    'line 2 has a quote that opens a field and is not closed'
    """
    end, _, quoted, other = (part.encode() for part in _parts(delimiter))
    sound = re.compile(rb'(?:%b"(?=%b|\Z)|%b|%b)*' % (quoted, end, other, end))
    closed = re.compile(rb'%b"(?!")' % quoted)
    opened = None
    for number, line in enumerate(lines, 1):
        text = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        text = text if opened is None else b'"' + text
        place = sound.match(text).end()  # type: ignore[union-attr]
        if place == len(text):
            opened = None
            continue
        opened = number if opened is None or place > 0 else opened
        if (found := closed.match(text, place)) is not None:
            behind = text[found.end() :].decode(errors="replace")[0]
            began = f", which began on line {opened}" if opened < number else ""
            return f"line {number} has {behind!r} behind the quote that closes a field{began}; {_ADVICE}"
    return None if opened is None else f"line {opened} has a quote that opens a field and is not closed; {_ADVICE}"


def _parts(delimiter: str) -> tuple[str, str, str, str]:
    """Regular expressions, for Python's engine and that of pyarrow, of parts of the text.

    Of what ends a field, of a field, of one whose quote is still open, and of one that begins with no quote.
    """
    ends = rf"\x{ord(delimiter):02x}\r\n"
    other = rf'[^"{ends}][^{ends}]*'
    quoted = r'"[^"]*(?:""[^"]*)*'
    return f"[{ends}]", f'(?:{quoted}"|{other}|)', quoted, other
