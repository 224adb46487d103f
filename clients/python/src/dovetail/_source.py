"""Conversion of uploadable data to one form: a schema, batches of suitable size, and the number of rows if known."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from . import _arguments
from ._csv import CsvOptions
from ._files import Source, of_dataset, open_files, refuse_csv_options
from ._polars import for_arrow
from ._types import name_of, named
from .errors import InvalidRequest

MESSAGE_BYTES = 4 << 20
"""Batches are cut to messages of about this size: small enough for caches, large enough to be worth a message."""

_FIELDS_BYTES = 256
"""Maximum bytes of a message in addition to the Arrow encoding of its batch."""

_LIMIT_BYTES_LOW = 4 * MESSAGE_BYTES
"""Message limit below which a message is measured before it is sent, because rows of a batch may differ in size."""

_SMALL_BYTES = 256 << 10
"""Batches below this size are concatenated: each costs a message, and later a step of the join."""


__all__ = ["Source", "arriving", "columns_of", "source"]

_UNFIT = (pa.ArrowException, TypeError, ValueError, OverflowError)
"""What pyarrow raises for values that a type does not have."""

_NOTHING = object()


def source(data: Any, csv: CsvOptions | None = None, message_limit: int | None = None) -> Source:
    """Reads any of the forms that :meth:`dovetail.Client.put` documents.

    The batches fit into messages of `message_limit` bytes.
    """
    csv = csv or CsvOptions()
    if _is_path(data) or _is_paths(data):
        found = open_files(data, csv)
    else:
        refuse_csv_options(csv, f"this is a {type(data).__name__}")
        found = _find(data)
    limit = MESSAGE_BYTES if message_limit is None else max(1, message_limit - _FIELDS_BYTES)
    batches = _sized(found.schema, found.batches, min(MESSAGE_BYTES, limit))
    if limit < _LIMIT_BYTES_LOW:
        batches = (part for batch in batches for part in _fitting(batch, limit))
    return Source(found.schema, batches, found.rows)


def arriving(data: Any, message_limit: int | None = None, schema: pa.Schema | None = None) -> Source:
    """Reads the same forms batch by batch: each is ready as soon as it is read. Large ones are split.

    With `schema`, the rows are converted to its columns.
    """
    if _is_path(data) or _is_paths(data):
        found = open_files(data, CsvOptions())
    else:
        found = _find(data) if schema is None else _find_as(data, schema)
    if schema is not None:
        found = _as_columns(found, schema)
    limit = MESSAGE_BYTES if message_limit is None else max(1, message_limit - _FIELDS_BYTES)

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in found.batches:
            for part in _sized(found.schema, [batch], min(MESSAGE_BYTES, limit)):
                yield from _fitting(part, limit) if limit < _LIMIT_BYTES_LOW else [part]

    return Source(found.schema, batches(), found.rows)


def columns_of(argument: str, value: object) -> pa.Schema:
    """Checks the columns of rows that will be sent: a schema, or the types by name.

    >>> columns_of("schema", {"id": "int64", "price": "decimal(9,2)", "at": pa.timestamp("ns")}).names
    ['id', 'price', 'at']
    >>> columns_of("schema", "id")
    Traceback (most recent call last):
    TypeError: schema is 'id' (str); it takes a pyarrow schema, or a mapping of names to types, such as ...
    >>> columns_of("schema", {"id": "integer"})
    Traceback (most recent call last):
    ValueError: schema gives 'integer' for column 'id'; write a type such as int64, float64, string, date, ...
    """
    if isinstance(value, pa.Schema):
        return value
    takes = 'a pyarrow schema, or a mapping of names to types, such as {"id": "int64", "price": "decimal(9,2)"}'
    fields = []
    for name, given in _arguments.mapping_of(argument, value, takes).items():
        data_type = given if isinstance(given, pa.DataType) else named(given) if isinstance(given, str) else None
        if data_type is None:
            raise ValueError(
                f"{argument} gives {given!r} for column {name!r}; write a type such as int64, float64, string, date, "
                "timestamp or decimal(15,2), or a pyarrow type"
            )
        fields.append(pa.field(name, data_type))
    return pa.schema(fields)


def _is_paths(data: object) -> bool:
    return isinstance(data, (list, tuple)) and bool(data) and all(map(_is_path, data))


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
    module = type(data).__module__.split(".")[0]
    if hasattr(type(data), "read") and not (module == "pandas" and isinstance(data, Iterator)):
        raise TypeError(
            f"{_kind(data)} is an open file; give its path, or its contents, as with pyarrow.parquet.read_table(file)"
        )
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
    schema = getattr(data, "schema", None)
    if isinstance(data, Iterator) and isinstance(schema, pa.Schema):
        # The reader of another stream. The C interface would make text of its exceptions.
        return Source(schema, data, None)
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
        _check_columns(data)
        return _find(pa.table(data))
    if isinstance(data, Iterable) and not isinstance(data, (bytes, bytearray, memoryview)):
        return _find_in_iterable(iter(data))
    raise TypeError(
        f"{_kind(data)} is not a table; give a pyarrow Table, RecordBatch, RecordBatchReader, Dataset or Scanner, a "
        "pandas or Polars DataFrame, the path of a Parquet, Arrow or CSV file, a list of paths, a sequence of record "
        "batches, tables or data frames, a dictionary of columns, or a list of rows as dictionaries"
    )


def _kind(data: object) -> str:
    return "None" if data is None else f"an object of type {type(data).__name__}"


def _check_columns(columns: dict[Any, Any]) -> None:
    for name, values in columns.items():
        if not isinstance(name, str) or isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
            raise TypeError(
                f"a dictionary of columns maps their names to values, such as {{'k': [1, 2]}}; this one has "
                f"{_kind(values)} under {name!r}"
            )


def _find_in_iterable(items: Iterator[Any]) -> Source:
    first = next(items, _NOTHING)
    if first is _NOTHING:
        raise TypeError(
            "the sequence of rows is empty, and shows no columns; give a table without rows, such as "
            "schema.empty_table(), or for rows that are joined while they are sent, their schema=..."
        )
    if isinstance(first, dict):
        # As an array they have the columns of all rows; pyarrow's own conversion looks at the first row only.
        return _find(pa.Table.from_struct_array(pa.array([first, *items])))
    begin = _find_item(first, 1)

    def batches() -> Iterator[pa.RecordBatch]:
        yield from begin.batches
        for number, item in enumerate(items, 2):
            if isinstance(item, pa.RecordBatch):
                yield item
                continue
            found = _find_item(item, number)
            # A chunk of a data frame has the types of its own values, and an empty column has none.
            is_frame = not isinstance(item, pa.Table) and not _is_path(item)
            yield from (_as_columns(found, begin.schema) if is_frame else found).batches

    return Source(begin.schema, batches(), None)


def _find_item(item: Any, number: int) -> Source:
    """Reads an item of a sequence: a batch, a table, a data frame or the path of a file."""
    if _is_path(item):
        return open_files(item, CsvOptions())
    if isinstance(item, (pa.RecordBatch, pa.Table)) or hasattr(item, "__arrow_c_stream__") or _is_frame(item):
        return _find(item)
    raise _not_rows(item, number)


def _not_rows(item: object, number: int) -> TypeError:
    return TypeError(
        "a sequence of rows has items that are each a pyarrow RecordBatch or Table, a data frame, or the path of a "
        f"file, or only rows as dictionaries; item {number} of this one is {_kind(item)}"
    )


def _is_frame(item: object) -> bool:
    return type(item).__module__.split(".")[0] in ("pandas", "polars") and hasattr(item, "columns")


def _find_as(data: Any, schema: pa.Schema) -> Source:
    """Reads rows whose Python values have the types of the schema."""
    if isinstance(data, dict):
        _check_columns(data)
        _check_names(data, schema)
        return _find(pa.table([_converted(data[field.name], field) for field in schema], schema=schema))
    is_plain = isinstance(data, (list, tuple)) or (isinstance(data, Iterator) and not hasattr(data, "read"))
    if not is_plain or hasattr(data, "__arrow_c_stream__"):
        return _find(data)
    items = iter(data)
    first = next(items, _NOTHING)
    if first is _NOTHING:
        return Source(schema, iter(()), 0)
    if not isinstance(first, dict):
        return _find_in_iterable(itertools.chain([first], items))
    rows = [first, *items]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise _not_rows(row, number)
    _check_names({name: None for row in rows for name in row}, schema, all_of_them=False)
    columns = [_converted([row.get(field.name) for row in rows], field) for field in schema]
    return _find(pa.table(columns, schema=schema))


def _check_names(names: Iterable[str], schema: pa.Schema, all_of_them: bool = True) -> None:
    names = list(names)
    others = [name for name in names if name not in schema.names]
    if others or (all_of_them and sorted(names) != sorted(schema.names)):
        raise InvalidRequest(
            f"the rows have other columns: {_arguments.listed(names)} instead of {_arguments.listed(schema.names)}"
        )


def _converted(values: Any, field: pa.Field) -> pa.Array | pa.ChunkedArray:
    """Returns the values of a column in its type."""
    try:
        if isinstance(values, (pa.Array, pa.ChunkedArray)):
            return values if values.type == field.type else values.cast(field.type)
        if not hasattr(values, "__len__"):
            values = list(values)
        if pa.types.is_integer(field.type) and isinstance(values, (list, tuple)):
            # pyarrow would cut off the digits behind the point.
            values = [_whole(value) if isinstance(value, float) else value for value in values]
        return pa.array(values, field.type)
    except _UNFIT as error:
        raise InvalidRequest(
            f"column {field.name!r} has values that cannot be converted to {name_of(field.type)}, its type: {error}"
        ) from None


def _whole(value: float) -> int:
    if not value.is_integer():
        raise ValueError(f"{value} is not a whole number")
    return int(value)


def _as_columns(found: Source, schema: pa.Schema) -> Source:
    """Returns the rows with the columns of the schema: in its order and of its types."""
    if found.schema.equals(schema):
        return found
    # The index of a data frame, which has no name, is no column.
    names = found.schema.names
    _check_names([name for name in names if name in schema.names or not name.startswith("__index_level_")], schema)

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in found.batches:
            columns = [_converted(batch.column(field.name), field) for field in schema]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)

    return Source(schema, batches(), found.rows)


def _sized(schema: pa.Schema, batches: Iterable[pa.RecordBatch], message_bytes: int) -> Iterator[pa.RecordBatch]:
    """Returns the same rows in the same order, with large batches split and small ones concatenated."""
    together_bytes = min(_SMALL_BYTES, message_bytes)
    small: list[pa.RecordBatch] = []
    small_bytes = 0
    for batch in batches:
        if batch.schema != schema:
            raise ValueError(
                f"the schema of the batches changes from {schema} to {batch.schema}; all of them have "
                "the same columns and types"
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
