"""Tables, devices and description of a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import pyarrow as pa

from . import _arguments
from ._display import COLUMNS_WIDTH, Described, columns, counted, html_schema, html_table, text_table
from ._progress import human_bytes, human_count
from .errors import NotFound

_TABLE_HEADING = ["table", "rows", "bytes", "columns"]
_TABLE_RIGHT = [1, 2]


@dataclass(frozen=True, repr=False)
class TableInfo:
    """Table on the server.

    Attributes:
        name: Name of the table.
        rows: Number of rows.
        bytes: Bytes of the buffers in the memory of the server.
        schema: Columns and their types.
        details: Other properties from the server, such as ``sorted_by``.
    """

    name: str
    rows: int
    bytes: int
    schema: pa.Schema
    details: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"<TableInfo {self._title()}; {columns(self.schema)}>"

    def _repr_html_(self) -> str:
        return html_schema(self._title(), self.schema)

    def _title(self) -> str:
        return f"{self.name}: {counted(self.rows, 'row')}, {human_bytes(self.bytes)}"


class Tables(Sequence[TableInfo]):
    """Tables of a server, by name. Displays as a table.

    Example:
        >>> client.put("letters", {"letter": ["a", "b"]}, mode="replace")
        2
        >>> tables = client.tables()
        >>> "letters" in tables, tables["letters"].rows
        (True, 2)
        >>> client.drop("letters")
        2
    """

    def __init__(self, tables: Sequence[TableInfo]) -> None:
        self._tables = list(tables)

    @overload
    def __getitem__(self, index: int) -> TableInfo: ...
    @overload
    def __getitem__(self, index: slice) -> Tables: ...
    @overload
    def __getitem__(self, index: str) -> TableInfo: ...
    def __getitem__(self, index: int | slice | str) -> TableInfo | Tables:
        if isinstance(index, str):
            found = next((table for table in self._tables if table.name == index), None)
            if found is None:
                names = [table.name for table in self._tables]
                meant = _arguments.did_you_mean(index, names)
                raise NotFound(
                    f"there is no table {index!r} in this list; there are {_arguments.listed(names) or 'none'}{meant}"
                )
            return found
        return Tables(self._tables[index]) if isinstance(index, slice) else self._tables[index]

    def __contains__(self, table: object) -> bool:
        """True if the list has this table or a table of this name."""
        return any(table in (known, known.name) for known in self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def __repr__(self) -> str:
        return text_table(_TABLE_HEADING, self._rows(COLUMNS_WIDTH), right=_TABLE_RIGHT) if self else "no tables"

    def _repr_html_(self) -> str:
        return html_table(_TABLE_HEADING, self._rows(None), right=_TABLE_RIGHT) if self else "<p>no tables</p>"

    def _rows(self, width: int | None) -> list[list[str]]:
        return [
            [table.name, human_count(table.rows), human_bytes(table.bytes), columns(table.schema, width)]
            for table in self._tables
        ]


class Topology(Described):
    """Devices of a server, their memory and their links. Prints as the diagram of the server."""


class ServerInfo(Described):
    """Version, devices, memory and limits of a server. Prints one line for each."""
