"""Conversion of uploadable data to one form: a schema, batches of suitable size, and the number of rows if known."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from ._csv import CsvOptions
from ._files import Source, of_dataset, open_files, refuse_csv_options
from ._polars import for_arrow

MESSAGE_BYTES = 4 << 20
"""Batches are cut to messages of about this size: small enough for caches, large enough to be worth a message."""

_FIELDS_BYTES = 256
"""Maximum bytes of a message in addition to the Arrow encoding of its batch."""

_LIMIT_BYTES_LOW = 4 * MESSAGE_BYTES
"""Message limit below which a message is measured before it is sent, because rows of a batch may differ in size."""

_SMALL_BYTES = 256 << 10
"""Batches below this size are concatenated: each costs a message, and later a step of the join."""


__all__ = ["Source", "arriving", "source"]


def source(data: Any, csv: CsvOptions | None = None, message_limit: int | None = None) -> Source:
    """Reads any of the forms that :meth:`dovetail.Client.put` documents.

    The batches fit into messages of `message_limit` bytes.
    """
    csv = csv or CsvOptions()
    if _is_path(data) or (isinstance(data, (list, tuple)) and data and all(map(_is_path, data))):
        found = open_files(data, csv)
    else:
        refuse_csv_options(csv, f"this is a {type(data).__name__}")
        found = _find(data)
    limit = MESSAGE_BYTES if message_limit is None else max(1, message_limit - _FIELDS_BYTES)
    batches = _sized(found.schema, found.batches, min(MESSAGE_BYTES, limit))
    if limit < _LIMIT_BYTES_LOW:
        batches = (part for batch in batches for part in _fitting(batch, limit))
    return Source(found.schema, batches, found.rows)


def arriving(data: Any, message_limit: int | None = None) -> Source:
    """Reads the same forms batch by batch: each is ready as soon as it is read. Large ones are split."""
    found = open_files(data, CsvOptions()) if _is_path(data) else _find(data)
    limit = MESSAGE_BYTES if message_limit is None else max(1, message_limit - _FIELDS_BYTES)

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in found.batches:
            for part in _sized(found.schema, [batch], min(MESSAGE_BYTES, limit)):
                yield from _fitting(part, limit) if limit < _LIMIT_BYTES_LOW else [part]

    return Source(found.schema, batches(), found.rows)


def _is_path(data: object) -> bool:
    return isinstance(data, (str, os.PathLike))


def _find(data: Any) -> Source:
    if isinstance(data, pa.Table):
        return Source(data.schema, iter(data.to_batches()), data.num_rows)
    if isinstance(data, pa.RecordBatch):
        return Source(data.schema, iter([data]), data.num_rows)
    if isinstance(data, pa.RecordBatchReader):
        return Source(data.schema, iter(data), None)
    if isinstance(data, (pa.Array, pa.ChunkedArray)) or hasattr(type(data), "dtype"):
        raise TypeError(
            f'{_kind(data)} is one column without a name; give a dictionary of columns, such as {{"k": values}}'
        )
    if hasattr(type(data), "read"):
        raise TypeError(
            f"{_kind(data)} is an open file; give its path, or its contents, as with pyarrow.parquet.read_table(file)"
        )
    module = type(data).__module__.split(".")[0]
    if module == "pandas" and hasattr(data, "columns") and hasattr(data, "to_dict"):
        return _find(pa.Table.from_pandas(data))
    if module == "polars":
        data = for_arrow(data.collect() if hasattr(data, "collect") else data)
    if hasattr(data, "scanner") and hasattr(data, "count_rows"):
        return of_dataset(data)
    if callable(getattr(data, "to_reader", None)):
        # A Scanner, which may be of batches that can be read once only. So its rows are not counted.
        reader = data.to_reader()
        return Source(reader.schema, iter(reader), None)
    if hasattr(data, "__arrow_c_stream__"):
        rows = len(data) if hasattr(data, "__len__") else None
        try:
            reader = pa.RecordBatchReader.from_stream(data)
        except pa.ArrowInvalid as error:
            if "format string" not in str(error):
                raise
            raise TypeError(
                f"{_kind(data)} has a column of a type that pyarrow does not know ({error}); convert the column first"
            ) from None
        return Source(reader.schema, iter(reader), rows)
    if isinstance(data, dict):
        return _find(_table_of_columns(data))
    if isinstance(data, Iterable) and not isinstance(data, (bytes, bytearray, memoryview)):
        return _find_in_iterable(iter(data))
    raise TypeError(
        f"{_kind(data)} cannot be uploaded; give a pyarrow Table, RecordBatch, RecordBatchReader, Dataset or Scanner, "
        "a pandas or Polars DataFrame, the path of a Parquet, Arrow or CSV file, a list of paths, a sequence of record "
        "batches, a dictionary of columns, or a list of rows as dictionaries"
    )


def _kind(data: object) -> str:
    return "None" if data is None else f"an object of type {type(data).__name__}"


def _table_of_columns(columns: dict[Any, Any]) -> pa.Table:
    for name, values in columns.items():
        if not isinstance(name, str) or isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
            raise TypeError(
                f"a dictionary to upload maps column names to values, such as {{'k': [1, 2]}}; this one has "
                f"{_kind(values)} under {name!r}"
            )
    return pa.table(columns)


def _find_in_iterable(items: Iterator[Any]) -> Source:
    first = next(items, None)
    if isinstance(first, dict):
        # As an array they have the columns of all rows; pyarrow's own conversion looks at the first row only.
        return _find(pa.Table.from_struct_array(pa.array([first, *items])))
    if not isinstance(first, pa.RecordBatch):
        begins = "is empty" if first is None else f"begins with {_kind(first)}"
        raise TypeError(
            "a sequence to upload has at least one item, each a pyarrow RecordBatch, a row as a dictionary, or the "
            f"path of a file; this one {begins}"
        )

    def batches() -> Iterator[pa.RecordBatch]:
        yield first
        yield from items

    return Source(first.schema, batches(), None)


def _sized(schema: pa.Schema, batches: Iterable[pa.RecordBatch], message_bytes: int) -> Iterator[pa.RecordBatch]:
    """Returns the same rows in the same order, with large batches split and small ones concatenated."""
    together_bytes = min(_SMALL_BYTES, message_bytes)
    small: list[pa.RecordBatch] = []
    small_bytes = 0
    for batch in batches:
        if batch.schema != schema:
            raise ValueError(
                f"the schema of the batches changes from {schema} to {batch.schema}; upload one schema at a time"
            )
        if batch.num_rows == 0:
            continue
        size_bytes = batch.nbytes
        if size_bytes < together_bytes:
            small.append(batch)
            small_bytes += size_bytes
            if small_bytes >= together_bytes or len(small) >= 1024:
                yield from _together(small)
                small, small_bytes = [], 0
            continue
        yield from _together(small)
        small, small_bytes = [], 0
        rows = max(1, batch.num_rows * message_bytes // size_bytes)
        for first in range(0, batch.num_rows, rows):
            yield batch.slice(first, rows)
    yield from _together(small)


def _fitting(batch: pa.RecordBatch, limit_bytes: int) -> Iterator[pa.RecordBatch]:
    """Splits the batch into parts that fit into a message. The server refuses a single row that does not fit."""
    if batch.num_rows <= 1 or pa.ipc.get_record_batch_size(batch) <= limit_bytes:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _fitting(batch.slice(0, half), limit_bytes)
    yield from _fitting(batch.slice(half), limit_bytes)


def _together(batches: list[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
    if len(batches) < 2:
        return list(batches)
    try:
        together: list[pa.RecordBatch] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        # Their dictionaries have too many values for the keys of one, or values that pyarrow does not put together.
        return batches
    return together
