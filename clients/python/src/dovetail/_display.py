"""Display of objects: text for a prompt, HTML for a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from ._progress import human_bytes, human_count
from ._types import name_of

COLUMNS_WIDTH = 72
"""Maximum characters for the columns of a table in a line of text."""


def counted(count: int, thing: str) -> str:
    """Formats a number of things.

    >>> counted(1, "row"), counted(1200, "row")
    ('1 row', '1,200 rows')
    """
    return f"{human_count(count)} {thing}{'' if count == 1 else 's'}"


def columns(schema: pa.Schema, width: int | None = COLUMNS_WIDTH) -> str:
    """Formats the columns and their types, as many as fit.

    >>> columns(pa.schema([("k", pa.int64()), ("v", pa.string())]))
    'k: int64, v: string'
    >>> columns(pa.schema([("k", pa.int64()), ("v", pa.string()), ("w", pa.string())]), width=12)
    'k: int64, ... 2 more'
    """
    shown = [f"{column.name}: {name_of(column.type)}" for column in schema]
    count = len(shown)
    while width is not None and count > 1 and len(", ".join(shown[:count])) > width:
        count -= 1
    rest = [] if count == len(shown) else [f"... {len(shown) - count} more"]
    return ", ".join(shown[:count] + rest)


def text_table(heading: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Formats rows under a heading. The columns with the indices in `right` are right-aligned.

    >>> print(text_table(["table", "rows"], [["orders", "15"], ["items", "1,500"]], right=[1]))
    table    rows
    orders     15
    items   1,500
    """
    table = [heading, *rows]
    widths = [max(len(row[index]) for row in table) for index in range(len(heading))]
    aligned = (
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    )
    return "\n".join(line.rstrip() for line in aligned)


def html_table(heading: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Formats rows like :func:`text_table`, for notebooks."""

    def line(tag: str, cells: Sequence[str]) -> str:
        sides = ("right" if index in right else "left" for index in range(len(cells)))
        styled = zip(sides, cells, strict=True)
        return "".join(f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>' for side, cell in styled)

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{line('th', heading)}</tr></thead><tbody>{body}</tbody></table>"


def html_schema(title: str, schema: pa.Schema) -> str:
    """Formats a title, and a line for each column."""
    rows = [(column.name, name_of(column.type)) for column in schema]
    return f"<p>{html.escape(title)}</p>{html_table(['column', 'type'], rows)}"


class Described(Mapping[str, Any]):
    """Description from the server: a mapping of details, which displays as text."""

    def __init__(self, details: Mapping[str, Any]) -> None:
        self._details = details

    @property
    def text(self) -> str:
        """Text of the server if it has one, else each detail."""
        return str(self._details.get("text") or "\n".join(_lines(self._details))).rstrip()

    def __getitem__(self, key: str) -> Any:
        return self._details[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._details)

    def __len__(self) -> int:
        return len(self._details)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text)}</pre>"


def _lines(details: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    width = max((len(key) for key in details), default=0)
    for key, value in details.items():
        title = f"{indent}{key.replace('_', ' '):{width}}"
        if isinstance(value, Mapping):
            yield title.rstrip()
            yield from _lines(value, indent + "  ")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for item in value:
                yield title.rstrip()
                yield from _lines(item, indent + "  ")
        elif value not in (None, "", []):
            yield f"{title}  {_value(key, value)}"


def _value(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    if isinstance(value, int):
        return human_bytes(value) if "bytes" in key else human_count(value)
    return str(value)
