"""Tables in files: Parquet, Arrow IPC (file and stream), ORC and CSV."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from . import _arguments, _csv
from ._display import counted
from ._types import name_of, wider

Path = str | os.PathLike[str]

_BY_MAGIC = {b"PAR1": "parquet", b"ARROW1": "ipc", b"\xff\xff\xff\xff": "stream"}
_BY_NAME = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "ipc",
    ".ipc": "ipc",
    ".feather": "ipc",
    ".arrows": "stream",
    ".arrow_stream": "stream",
    ".stream": "stream",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "csv",
    ".orc": "orc",
}
_NO_JSON = (".json", ".jsonl", ".ndjson")
_KINDS = {
    "parquet": "a Parquet file",
    "ipc": "an Arrow IPC file",
    "stream": "an Arrow IPC stream",
    "orc": "an ORC file",
}

_UNREADABLE = (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, OSError)
"""What pyarrow raises for a file that it does not read."""

_INT96_UNIT = "us"
"""Unit of times that Parquet stores in twelve bytes, also for the command line.

They reach further than 64 bits of nanoseconds: the year 9999 would become the year 1816.
"""


@dataclass
class Source:
    """Rows to upload."""

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]
    rows: int | None
    """Number of rows, if known before the read."""
    is_inferred: bool = False
    """True if the types are inferred from the first rows."""


def open_files(given: Path | Sequence[Path], options: _csv.CsvOptions) -> Source:
    """Opens a file, a folder of files, or several files with the same columns, in this order."""
    paths = [path for one in ([given] if isinstance(given, (str, os.PathLike)) else given) for path in _matching(one)]
    sources = [_open(path, options) for path in paths]
    first = sources[0].schema
    for path, other in zip(paths, sources, strict=True):
        if other.schema != first:
            raise ValueError(_difference(paths[0], sources[0], path, other))
    if len(sources) == 1:
        return sources[0]
    counts = [source.rows for source in sources]
    rows = sum(count for count in counts if count is not None) if None not in counts else None
    return Source(first, (batch for source in sources for batch in source.batches), rows)


def _matching(given: Path) -> list[str]:
    """Returns the path, or the paths that match a pattern such as ``"parts/*.parquet"``."""
    path = os.fspath(given)
    if os.path.isdir(path):
        return _in_folder(path)
    if os.path.exists(path):
        return [path]
    if not glob.has_magic(path):
        try:
            os.stat(path)
        except OSError as error:
            why = _arguments.file_failure(path, error)
            raise FileNotFoundError(
                f"there is no file {path!r}" + ("" if why == "there is no such file" else f": {why}")
            ) from None
        return [path]
    found = sorted(glob.glob(path, recursive=True))
    if not found:
        raise FileNotFoundError(f"there is no file that matches {path!r}")
    return [path for one in found for path in (_in_folder(one) if os.path.isdir(one) else [one])]


def _in_folder(folder: str) -> list[str]:
    """Returns the folder if all its files are Parquet, or else its files, sorted by name.

    Names that begin with a dot or an underscore belong to the writers of the files, and are skipped.
    """
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        found += [os.path.join(place, name) for name in names if not name.startswith((".", "_"))]
    if not found:
        raise ValueError(f"reading {folder}: there is no file in the folder, and a table needs columns")
    kinds = {_kind_of(path) for path in found}
    return [folder] if kinds == {"parquet"} else sorted(found)


def _open(path: str, options: _csv.CsvOptions) -> Source:
    kind = "parquet" if os.path.isdir(path) else _kind_of(path)
    if kind == "csv":
        return Source(*_csv.read(path, options), None, is_inferred=True)
    what = "a folder of Parquet files" if os.path.isdir(path) else _KINDS[kind]
    refuse_csv_options(options, f"this is {what}", f"reading {path}: ")
    if os.path.isfile(path) and _is_cut_short(path, kind):
        raise _cut_short(path, kind)
    try:
        if kind == "stream":
            file = pa.memory_map(path)
            reader = pa.ipc.open_stream(file)
            _check_names(path, reader.schema.names)
            return Source(reader.schema, _whole(_checked(iter(reader), path, kind), file, path), None)
        import pyarrow.dataset as dataset

        of_kind = dataset.ParquetFileFormat(coerce_int96_timestamp_unit=_INT96_UNIT) if kind == "parquet" else kind
        data = dataset.dataset(path, format=of_kind)
        if kind == "parquet":
            _check_intervals(path, data)
        source = of_dataset(data)
        return Source(source.schema, _checked(source.batches, path, kind), source.rows)
    except _UNREADABLE as error:
        if kind == "stream" and _ends_too_soon(error) and _begins_as(path, kind):
            raise _cut_short(path, kind) from None
        if "duplicate field names" in str(error):
            _check_names(path, _names_in(path, kind))
        if "Multiple matches for FieldRef" in str(error) and os.path.isfile(path):
            source = _without_dataset(path, kind)
            return Source(source.schema, _checked(source.batches, path, kind), source.rows)
        raise ValueError(f"reading {path}: it is not {what}, or is damaged: {error}") from None


def _whole(batches: Iterator[pa.RecordBatch], file: pa.NativeFile, path: str) -> Iterator[pa.RecordBatch]:
    """Returns the batches of a stream, and refuses what follows it: pyarrow would leave a second stream out."""
    yield from batches
    if file.tell() < file.size():
        raise ValueError(
            f"reading {path}: there is data after the end of the Arrow IPC stream, such as a second stream; write the "
            "rows as one stream, or give each stream on its own"
        )


def _without_dataset(path: str, kind: str) -> Source:
    """Reads a file with a column such as ``__filename``, which pyarrow's datasets add to those of the file."""
    if kind == "parquet":
        import pyarrow.parquet as pq

        file = pq.ParquetFile(path, coerce_int96_timestamp_unit=_INT96_UNIT)
        return Source(file.schema_arrow, file.iter_batches(), file.metadata.num_rows)
    reader = pa.ipc.open_file(pa.memory_map(path))
    return Source(reader.schema, map(reader.get_batch, range(reader.num_record_batches)), None)


def _names_in(path: str, kind: str) -> list[str]:
    """Returns the columns of a file that pyarrow's datasets refuse."""
    if kind == "parquet" and os.path.isfile(path):
        import pyarrow.parquet as pq

        names: list[str] = pq.read_schema(path).names
        return names
    return list(pa.ipc.open_file(pa.memory_map(path)).schema.names) if kind == "ipc" else []


def _check_names(path: str, names: Sequence[str]) -> None:
    """Refuses columns that share a name. The server would refuse them too, but does not know the file."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(
                f"reading {path}: two columns are named {name!r}; rename one, because joins refer to columns by name"
            )
        seen.add(name)


def _check_intervals(path: str, data: Any) -> None:
    """Refuses the intervals of Parquet. pyarrow would make bytes of them, and the command line drop their months."""
    if str(pa.binary(12)) not in str(data.schema):
        return
    import pyarrow.parquet as pq

    for file in data.files:
        schema = pq.ParquetFile(file).schema
        for column in map(schema.column, range(len(schema))):
            if column.converted_type == "INTERVAL":
                name = column.path.split(".")[0]
                raise ValueError(
                    f"reading {path}: column {name!r} is an INTERVAL of Parquet, for which there is no type; write a "
                    "duration, a number or text instead"
                )


def _begins_as(path: str, kind: str) -> bool:
    """True if a file begins with the mark of its kind."""
    with open(path, "rb") as file:
        start = file.read(max(map(len, _BY_MAGIC)))
    return any(start.startswith(mark) for mark, known in _BY_MAGIC.items() if known == kind)


def _is_cut_short(path: str, kind: str) -> bool:
    """True if a file begins as its kind but does not end so. The index of its rows is at the end."""
    mark = next((mark for mark, known in _BY_MAGIC.items() if known == kind), None)
    if mark is None or kind == "stream":
        return False
    with open(path, "rb") as file:
        begins = file.read(len(mark)) == mark
        file.seek(max(0, os.path.getsize(path) - len(mark)))
        return begins and file.read() != mark


def _ends_too_soon(error: Exception) -> bool:
    """Whether an Arrow IPC stream ends within a message."""
    return re.search(r"Expected to (?:be able to )?read \d+ |Corrupted .*, only \d+ bytes", str(error)) is not None


def _cut_short(path: str, kind: str) -> ValueError:
    return ValueError(
        f"reading {path}: it is cut short: it begins as {_KINDS[kind]}, but its end is missing; check that "
        "it was written and copied in full"
    )


def _checked(batches: Iterator[pa.RecordBatch], path: str, kind: str) -> Iterator[pa.RecordBatch]:
    """Returns the batches. Errors of the file between them name the file."""
    try:
        yield from batches
    except _UNREADABLE as error:
        if kind == "stream" and _ends_too_soon(error):
            raise _cut_short(path, kind) from None
        raise ValueError(f"reading {path}: the rest of it is damaged: {error}") from None


def of_dataset(data: Any) -> Source:
    """Returns the rows of a pyarrow Dataset."""
    reader = data.scanner(use_threads=True, batch_readahead=4).to_reader()
    return Source(reader.schema, iter(reader), data.count_rows())


def refuse_csv_options(options: _csv.CsvOptions, but: str, context: str = "") -> None:
    """Refuses CSV options for other data, because the caller expects them to take effect."""
    for name in options.given:
        raise ValueError(f"{context}{name} applies to CSV only, and {but}; leave {name} out")


def _kind_of(path: str) -> str:
    """Returns the format of a file. Its first bytes are more reliable than its name."""
    try:
        with open(path, "rb") as file:
            start = file.read(max(map(len, _BY_MAGIC)))
    except OSError as error:
        raise type(error)(f"reading {path}: {_arguments.file_failure(path, error)}") from None
    if not start:
        raise ValueError(f"reading {path}: {_csv.EMPTY}")
    for magic, kind in _BY_MAGIC.items():
        if start.startswith(magic):
            return kind
    is_gzip = start.startswith(_csv.GZIP_MAGIC)
    if path.lower().endswith(".gz") and not is_gzip:
        raise ValueError(f"reading {path}: its name ends in .gz, but it is not gzip; rename it without .gz")
    name = path.lower().removesuffix(".gz") if is_gzip else path.lower()
    extension = os.path.splitext(name)[1]
    by_name = _BY_NAME.get(extension)
    if is_gzip and by_name != "csv":
        raise ValueError(
            f"reading {path}: it is compressed by gzip, which only CSV may be; name it .csv.gz if it is CSV, "
            "or else decompress it first"
        )
    if extension in _NO_JSON:
        # pyarrow would make floats of decimals, and of whole numbers beyond int64.
        raise ValueError(
            f"reading {path}: JSON can be written but not read; upload it as Parquet, Arrow IPC or CSV, or hand over "
            "a pyarrow, pandas or Polars table"
        )
    if by_name is None:
        raise ValueError(f"reading {path}: the name does not show the format; use one of {', '.join(_BY_NAME)}")
    return by_name


def _difference(first_path: str, first: Source, path: str, source: Source) -> str:
    pairs = enumerate(zip(first.schema, source.schema, strict=False), 1)
    what = f"{counted(len(first.schema), 'column')} there, {len(source.schema)} here"
    for place, (one, other) in pairs:
        if one == other:
            continue
        what = f"{one.name!r} may have nulls in only one of them"
        if one.name != other.name:
            what = f"column {place} is {one.name!r} there, {other.name!r} here"
        elif one.type != other.type:
            what = f"{one.name!r} is {name_of(one.type)} there, {name_of(other.type)} here"
            if first.is_inferred and source.is_inferred:
                said = {one.name: wider(one.type, other.type)}
                what += f"; use types={said} for both files"
        break
    return f"{path} does not have the columns of {first_path}: {what}"
