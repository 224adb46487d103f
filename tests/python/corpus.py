"""Small files of every format that both clients read, with every option of the format and of its readers.

``test_files.py`` reads each with the command line and with the Python client. ``tests/csv/cases.json`` has further
CSV, with the tables that it becomes.
"""

from __future__ import annotations

import base64
import gzip
import io
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.ipc as ipc
import pyarrow.parquet as pq

YEAR_9999 = 253402214400
"""A day of the year 9999 in seconds, which 64 bits of nanoseconds do not reach."""

ROWS = 1000


@dataclass(frozen=True)
class File:
    """A file, and the options to read it with, as the Python client takes them."""

    about: str
    extension: str
    content: bytes
    options: dict[str, Any] = field(default_factory=dict)


def numbers_as(type_: pa.DataType, *values: int | None) -> pa.Array:
    """Makes an array of the numbers that stand for its values, also of values that Python does not have."""
    width = {32: pa.int32(), 64: pa.int64()}[type_.bit_width]
    return pa.array(values, width).view(type_)


def _dictionary(values: pa.Array, indices: Sequence[int | None] = (0, None, 1, 0), **more: Any) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(indices, more.pop("keys", pa.int32())), values, **more)


def _extension(type_: pa.DataType, *values: Any) -> pa.Array:
    return pa.ExtensionArray.from_storage(type_, pa.array(values, type_.storage_type))


def columns() -> dict[str, pa.Array]:
    """Returns columns of every type, with their extreme values."""
    found: dict[str, pa.Array] = {"null": pa.nulls(3), "bool": pa.array([True, None, False])}
    for bits in (8, 16, 32, 64):
        found[f"int{bits}"] = pa.array([-(1 << bits - 1), None, (1 << bits - 1) - 1], f"int{bits}")
        found[f"uint{bits}"] = pa.array([0, None, (1 << bits) - 1], f"uint{bits}")
    found["float16"] = pa.array(np.array([1.5, np.nan, np.inf, -0.0], np.float16))
    found["float32"] = pa.array([1.5, None, float("nan"), -0.0], pa.float32())
    found["float64"] = pa.array([1.5, None, float("nan"), float("-inf")])
    for type_ in (
        *(pa.decimal32(7, 2), pa.decimal64(15, 2), pa.decimal128(38, 2), pa.decimal128(5, 2), pa.decimal128(15, 2)),
        *(pa.decimal128(20, 0), pa.decimal256(76, 10), pa.decimal256(9, 2)),
    ):
        found[str(type_)] = pa.array([Decimal("123.00"), None, Decimal("-1.00")]).cast(type_)
    for kind in ("string", "large_string", "string_view"):
        found[kind] = pa.array(["", None, "né", "a longer text, not inlined"], getattr(pa, kind)())
    for kind in ("binary", "large_binary", "binary_view"):
        found[kind] = pa.array([b"", None, b"\xff\0", b"longer bytes, not inlined"], getattr(pa, kind)())
    for width in (0, 3, 16):
        found[f"binary({width})"] = pa.array([b"x" * width, None], pa.binary(width))
    found["date32"] = numbers_as(pa.date32(), 0, None, -719162, 2932896, 2**31 - 1)
    found["date64"] = numbers_as(pa.date64(), 0, None, 86_400_000 * 20_000)
    found["date64 beyond days"] = numbers_as(pa.date64(), 0, None, 1 << 62)
    for type_, last in (
        *((pa.time32("s"), 86_399), (pa.time32("ms"), 86_399_999)),
        *((pa.time64("us"), 86_399_999_999), (pa.time64("ns"), 86_399_999_999_999)),
    ):
        found[str(type_)] = numbers_as(type_, 0, None, last)
    for unit in ("s", "ms", "us", "ns"):
        for zone in (None, "UTC", "Europe/Berlin", "+02:00", "-0330", "Z", "Nowhere/There"):
            found[f"timestamp {unit} {zone}"] = numbers_as(pa.timestamp(unit, zone), 0, None, 1767225600)
        found[f"timestamp {unit} beyond years"] = numbers_as(pa.timestamp(unit), 0, None, 1 << 62, -(1 << 62))
        found[f"duration {unit}"] = numbers_as(pa.duration(unit), 0, None, 1 << 62, -1)
    found["interval"] = pa.array([(1, 2, 3), None, (-1, -2, -3)], pa.month_day_nano_interval())
    found |= _nested()
    for keys in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
        found[f"dictionary {keys}"] = _dictionary(pa.array(["x", "y"]), keys=getattr(pa, keys)())
    for values in (
        *(pa.array(["x", "y"], pa.large_string()), pa.array(["x", "y"], pa.string_view()), pa.array([b"x", b"y"])),
        *(pa.array([b"x", b"y"], pa.binary(1)), pa.array([5, 6]), pa.array([5.5, 6]), pa.array([True, False])),
        *(numbers_as(pa.timestamp("s"), 5, 6), numbers_as(pa.date32(), 5, 6), numbers_as(pa.date64(), 0, 86_400_000)),
        pa.array([Decimal("1.5"), Decimal("2.5")]),
    ):
        found[f"dictionary of {values.type}"] = _dictionary(values)
    found["dictionary with a null"] = _dictionary(pa.array(["x", None]))
    found["dictionary with a value twice"] = _dictionary(pa.array(["x", "x"]))
    found["dictionary, ordered"] = _dictionary(pa.array(["x", "y"]), ordered=True)
    found["dictionary without values"] = _dictionary(pa.array([], pa.string()), [None, None])
    found["uuid"] = _extension(pa.uuid(), b"a" * 16, None)
    found["json"] = _extension(pa.json_(), '{"a":1}', None)
    found["bool8"] = _extension(pa.bool8(), 0, None, 1)
    found["opaque"] = _extension(pa.opaque(pa.int32(), "t", "v"), 0, None, 1)
    found["tensor"] = _extension(pa.fixed_shape_tensor(pa.int32(), [2]), [1, 2], [3, 4])
    return found


def _nested() -> dict[str, pa.Array]:
    number = pa.int32()
    required = pa.field("item", number, nullable=False)
    two = _dictionary(pa.array(["x", "y"]))
    either = [pa.array([1, 2, 3]), pa.array(["a", "b", "c"])]
    ids = pa.array([0, 1, 0], pa.int8())
    return {
        "list": pa.array([[1, None], None, []], pa.list_(number)),
        "list, required": pa.array([[1, 2], None, []], pa.list_(required)),
        "list, named element": pa.array([[1, 2], None, []], pa.list_(pa.field("element", number))),
        "list, another name": pa.array([[1, 2], None, []], pa.list_(pa.field("number", number))),
        "large_list": pa.array([["x", None], None, []], pa.large_list(pa.string())),
        "list_view": pa.array([[1, None], None, []], pa.list_view(number)),
        "large_list_view": pa.array([[1, None], None, []], pa.large_list_view(number)),
        "fixed_size_list": pa.array([[1, None], None, [3, 4]], pa.list_(number, 2)),
        "fixed_size_list of none": pa.array([[], None, []], pa.list_(number, 0)),
        "struct": pa.array([{"a": 1, "b": "x"}, None, {}], pa.struct({"a": pa.int8(), "b": pa.string()})),
        "struct, required": pa.array([{"item": 1}, {"item": 2}], pa.struct([required])),
        "struct of nothing": pa.array([{}, None], pa.struct([])),
        "struct with a name twice": pa.StructArray.from_arrays([pa.array([1]), pa.array(["x"])], names=["a", "a"]),
        "map": pa.array([[("a", 1)], None, []], pa.map_(pa.string(), number)),
        "map, required": pa.array([[("a", 1)], None, []], pa.map_(pa.string(), required)),
        "map, sorted": pa.array([[("a", 1)], None, []], pa.map_(pa.string(), number, keys_sorted=True)),
        "list of structs": pa.array([[{"a": [1]}], None], pa.list_(pa.struct({"a": pa.list_(pa.int64())}))),
        "list of seconds": pa.array([[0, None], None], pa.list_(pa.timestamp("s"))),
        "list of dates": pa.array([[0, None], None], pa.list_(pa.int64())).cast(pa.list_(pa.date64())),
        "struct of seconds": pa.array([{"t": 0}, None], pa.struct({"t": pa.timestamp("s", "Europe/Berlin")})),
        "list of dictionaries": pa.ListArray.from_arrays(pa.array([0, 2, 2, 4], pa.int32()), two),
        "struct of a dictionary": pa.StructArray.from_arrays([two], names=["d"]),
        "run_end_encoded": pa.RunEndEncodedArray.from_arrays(pa.array([2, 4], pa.int32()), pa.array(["x", None])),
        "sparse_union": pa.UnionArray.from_sparse(ids, either),
        "dense_union": pa.UnionArray.from_dense(ids, pa.array([0, 0, 1], pa.int32()), either),
    }


def table() -> pa.Table:
    """A table of some rows, for the ways to encode them."""
    rows = range(ROWS)
    return pa.table(
        {
            "k": pa.array(rows),
            "x": pa.array([row / 7 for row in rows]),
            "s": pa.array([None if row % 7 == 0 else f"name {row % 50}" for row in rows]),
            "b": pa.array([row % 3 == 0 for row in rows]),
            "i": pa.array(rows, pa.int32()),
            "f": pa.array([row / 3 for row in rows], pa.float32()),
            "bin": pa.array([bytes([row % 256] * 3) for row in rows], pa.binary(3)),
        }
    )


def parquet(name: str, rows: pa.Table, **options: Any) -> File:
    """Writes a table as Parquet."""
    to = io.BytesIO()
    pq.write_table(rows, to, **options)
    return File(name, ".parquet", to.getvalue())


def arrow(
    name: str, rows: pa.Table, kind: str, batches: Sequence[pa.RecordBatch] | None = None, **options: Any
) -> File:
    """Writes a table as an Arrow IPC file (``arrow``) or stream (``arrows``)."""
    to = io.BytesIO()
    begin = ipc.new_file if kind == "arrow" else ipc.new_stream
    with begin(to, rows.schema, options=ipc.IpcWriteOptions(**options)) as writer:
        for batch in rows.to_batches() if batches is None else batches:
            writer.write_batch(batch)
    return File(name, f".{kind}", to.getvalue())


def types_in_parquet() -> Iterator[File]:
    """Yields a file for each type that pyarrow writes as Parquet, with and without its Arrow schema."""
    for (name, column), kept in itertools.product(columns().items(), (True, False)):
        try:
            yield parquet(name if kept else f"{name}, no Arrow schema", pa.table({"c": column}), store_schema=kept)
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid, OSError):
            continue


def types_in_arrow() -> Iterator[File]:
    """Yields a file for each type."""
    for (name, column), kind in itertools.product(columns().items(), ("arrow", "arrows")):
        yield arrow(name, pa.table({"c": column}), kind)


def encodings() -> Iterator[File]:
    """Yields one table in all encodings of Parquet."""
    rows = table()
    for codec in ("none", "snappy", "gzip", "brotli", "zstd", "lz4"):
        yield parquet(f"codec {codec}", rows, compression=codec)
    for version in ("1.0", "2.4", "2.6"):
        yield parquet(f"version {version}", rows, version=version)
    plain = {"use_dictionary": False}
    split = dict.fromkeys(["x", "f", "i", "k", "bin"], "BYTE_STREAM_SPLIT")
    yield parquet("byte stream split", rows.select(list(split)), **plain, column_encoding=split)
    packed = dict.fromkeys(["k", "i"], "DELTA_BINARY_PACKED")
    yield parquet("delta, packed", rows.select(["k", "i"]), **plain, column_encoding=packed)
    yield parquet("delta, lengths", rows.select(["s"]), **plain, column_encoding={"s": "DELTA_LENGTH_BYTE_ARRAY"})
    delta = dict.fromkeys(["s", "bin"], "DELTA_BYTE_ARRAY")
    yield parquet("delta, bytes", rows.select(["s", "bin"]), **plain, column_encoding=delta)
    yield parquet("run lengths", rows.select(["b"]), **plain, column_encoding={"b": "RLE"}, data_page_version="2.0")
    yield parquet("plain", rows, **plain)
    yield parquet("pages of version 2", rows, data_page_version="2.0", compression="zstd")
    yield parquet("page index and checksums", rows, write_page_index=True, write_page_checksum=True)
    yield parquet("row groups", rows, row_group_size=100)
    yield parquet("no statistics", rows, write_statistics=False)
    yield parquet("no rows", rows.slice(0, 0))
    decimals = [pa.array([1, 2], pa.decimal128(digits, 2)) for digits in (5, 15)]
    yield parquet("decimals as whole numbers", pa.table(decimals, names=["a", "b"]), store_decimal_as_integer=True)
    yield parquet("lists of items", pa.table({"l": pa.array([[1], None])}), use_compliant_nested_type=False)
    times = pa.table({"t": numbers_as(pa.timestamp("us", "Europe/Berlin"), 1000, 2000, None)})
    yield parquet("coarser times", times, coerce_timestamps="ms")
    yield parquet("times of Spark", times, flavor="spark")


def arrow_schemas() -> Iterator[File]:
    """Yields numbers and text to which the Arrow schema of the file gives other types, and no schema at all."""
    stored = {
        "numbers": pa.array([0, None, 86_400_000]),
        "small numbers": pa.array([0, None, 1], pa.int32()),
        "text": pa.array(["x", None]),
        "bytes": pa.array([b"x", None]),
        "times": numbers_as(pa.timestamp("ms", "UTC"), 0, None, 1000),
        "local times": numbers_as(pa.timestamp("ms"), 0, None, 1000),
    }
    types = [
        *(pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("ns", "Europe/Berlin"), pa.timestamp("ms", "UTC")),
        *(pa.date64(), pa.date32(), pa.time32("s"), pa.time64("us"), pa.duration("s"), pa.int32(), pa.string()),
        *(pa.large_string(), pa.dictionary(pa.int8(), pa.string()), pa.decimal128(9, 2)),
        *(pa.list_(pa.int64()), pa.binary(), pa.binary_view()),
    ]
    for (name, column), type_ in itertools.product(stored.items(), types):
        schema = base64.b64encode(pa.schema({"c": type_}).serialize()).decode()
        yield _with_arrow_schema(f"{name} as {type_}", pa.table({"c": column}), schema)
    for name, schema in {"no schema": "AAAA", "no base64": "?", "nothing": ""}.items():
        yield _with_arrow_schema(name, pa.table({"c": [1]}), schema)


def _with_arrow_schema(name: str, rows: pa.Table, schema: str) -> File:
    to = io.BytesIO()
    with pq.ParquetWriter(to, rows.schema, store_schema=False) as writer:
        writer.write_table(rows)
        writer.add_key_value_metadata({"ARROW:schema": schema})
    return File(name, ".parquet", to.getvalue())


def int96() -> Iterator[File]:
    """Yields times in twelve bytes, of years that nanoseconds do not reach."""
    for (unit, of_second), zone, kept in itertools.product(
        (("us", 10**6), ("ms", 1000), ("s", 1)), (None, "UTC", "Europe/Berlin"), (True, False)
    ):
        type_ = pa.timestamp(unit, zone)
        values = [0, None, YEAR_9999 * of_second, -62135596800 * of_second]
        lists = pa.array([[value] for value in values], pa.list_(pa.int64())).cast(pa.list_(type_))
        rows = pa.table({"t": numbers_as(type_, *values), "l": lists, "i": range(4)})
        name = f"INT96 {unit} {zone} {kept}"
        yield parquet(name, rows, use_deprecated_int96_timestamps=True, store_schema=kept)
    fine = numbers_as(pa.timestamp("ns"), 1767225600123456789, -1, None)
    for kept in (True, False):
        more = {"use_deprecated_int96_timestamps": True, "store_schema": kept}
        yield parquet(f"INT96 ns {kept}", pa.table({"t": fine}), **more)
        yield parquet(f"INT96 dictionary {kept}", pa.table({"t": fine.dictionary_encode()}), **more)


def batches() -> Iterator[File]:
    """Yields tables in one batch, several and none, with all options of Arrow IPC."""
    rows = table()
    batch = rows.to_batches()[0]
    none = batch.slice(0, 0)
    grown = [pa.record_batch({"d": _dictionary(pa.array(["a", "b", "c"][:count]))}) for count in (2, 3)]
    other = pa.record_batch({"d": _dictionary(pa.array(["z", "a"]))})
    dictionaries = pa.Table.from_batches(grown[:1])
    for kind in ("arrow", "arrows"):
        yield arrow("empty batches", rows, kind, [none, batch.slice(0, 3), none, batch.slice(3, 3), none])
        yield arrow("no batch", rows, kind, [])
        yield arrow("slices", rows, kind, [batch.slice(3, 5)])
        for codec in ("lz4", "zstd"):
            yield arrow(f"IPC {codec}", rows, kind, compression=codec)
        yield arrow("IPC version 4", rows, kind, metadata_version=ipc.MetadataVersion.V4)
        yield arrow("IPC legacy", rows, kind, use_legacy_format=True)
        yield arrow("dictionary twice", dictionaries, kind, [grown[0], grown[0]], unify_dictionaries=True)
        yield arrow("dictionary deltas", dictionaries, kind, grown, emit_dictionary_deltas=True)
    yield arrow("dictionary grows", dictionaries, "arrows", grown)
    yield arrow("dictionary replaced", dictionaries, "arrows", [grown[0], other])
    together = pa.Table.from_batches([*grown, other]).unify_dictionaries()
    yield parquet("dictionaries of row groups", together, row_group_size=2)
    for more in ({}, {"compression": "lz4"}, {"compression": "uncompressed"}):
        to = io.BytesIO()
        feather.write_feather(rows, to, **more)
        yield File(f"feather {more}", ".feather", to.getvalue())


def names() -> Iterator[File]:
    """Yields tables whose columns have unusual names, metadata, or nothing in them."""
    for name, given in {
        "point": ["a.b", "c"],
        "empty": ["", "c"],
        "twice": ["a", "a"],
        "capitals": ["a", "A"],
        "not ASCII": ["né", "日本"],
        "NUL": ["a\0b", "c"],
        "line end": ["a\nb", "c"],
        "of a dataset": ["__fragment_index", "__filename"],
        "spaces": [" a ", "b "],
        "quotes": ['a"b', "c'd"],
        "long": ["x" * 5000, "y"],
    }.items():
        rows = pa.Table.from_arrays([pa.array([1, 2]), pa.array(["x", None])], names=given)
        yield parquet(f"name {name}", rows)
        yield arrow(f"name {name}", rows, "arrow")
        yield arrow(f"name {name}", rows, "arrows")
    fields = [
        pa.field("k", pa.int64(), nullable=False, metadata={"m": "v"}),
        pa.field("s", pa.string(), metadata={"PARQUET:field_id": "7"}),
    ]
    described = pa.table([pa.array([1, 2]), pa.array(["a", "b"])], schema=pa.schema(fields, metadata={"who": "me"}))
    nothing = pa.table({})
    no_columns = pa.RecordBatch.from_struct_array(pa.array([{}, {}], pa.struct([])))
    yield parquet("metadata", described)
    yield parquet("metadata, no Arrow schema", described, store_schema=False)
    yield parquet("no columns", nothing)
    for kind in ("arrow", "arrows"):
        yield arrow("metadata", described, kind)
        yield arrow("no columns", nothing, kind)
        yield arrow("no columns but rows", nothing, kind, [no_columns])


def damaged() -> Iterator[File]:
    """Yields files that are cut short, damaged, or not what their names say."""
    good = parquet("good", table()).content
    for name, content in {
        "cut": good[:-20],
        "cut early": good[:8],
        "its mark": b"PAR1",
        "its marks": b"PAR1PAR1",
        "pages": good[:100] + b"\xff" * 50 + good[150:],
        "encrypted": b"PARE" + good[4:-4] + b"PARE",
        "text": b"hello world, this is no Parquet",
        "empty": b"",
        "length": good[:-8] + b"\xff\xff\xff\x7f" + good[-4:],
        "IPC": arrow("good", table(), "arrow").content,
    }.items():
        yield File(f"bad {name}", ".parquet", content)
    for kind in ("arrow", "arrows"):
        good = arrow("good", table(), kind).content
        for name, content in {
            "cut": good[:-20],
            "cut early": good[:8],
            "half": good[: len(good) // 2],
            "six bytes": good[:6],
            "flipped": good[:30] + b"\xff" * 20 + good[50:],
            "no end": good[:-8],
            "more": good + b"trailing",
            "text": b"hello world, this is no Arrow",
            "zeros": good + bytes(8),
            "empty": b"",
        }.items():
            yield File(f"bad {name}", f".{kind}", content)
    good = parquet("good", table()).content
    for extension in (".csv", ".arrow", "", ".parquet.gz", ".txt"):
        yield File("Parquet", extension, good)
    for extension in (".json", ".xlsx", ".avro", "", ".csv.zst", ".csv.bz2", ".parquet.gz", ".csv.gz", ".md"):
        yield File("text", extension, b"hello, world\n1,2\n")
    for extension in (".parquet.gz", ".csv", ".CSV.GZ", "", ".gz", ".tsv.gz", ".arrow"):
        yield File("gzip", extension, gzip.compress(b"a,b\n1,2\n"))
    for options in ({"delimiter": ";"}, {"header": False}, {"types": {"k": "int64"}}, {"null_values": ["NA"]}):
        yield File("Parquet with options", ".parquet", good, options)


def other_writers(folder: str) -> Iterator[File]:
    """Yields files that Polars and DuckDB write."""
    frame = pl.DataFrame(
        {"i": [1, None], "s": ["x", None], "bin": [b"x", None], "l": [[1], None], "st": [{"a": 1}, None]}
    ).with_columns(
        cat=pl.Series(["a", None], dtype=pl.Categorical),
        enum=pl.Series(["a", None], dtype=pl.Enum(["a", "b"])),
        arr=pl.Series([[1, 2], None], dtype=pl.Array(pl.Int32, 2)),
        date=pl.Series([1, None]).cast(pl.Date),
        time=pl.Series([1, None]).cast(pl.Time),
        stamp=pl.Series([1, None]).cast(pl.Datetime("ns", "Europe/Berlin")),
        taken=pl.Series([1, None]).cast(pl.Duration("us")),
        dec=pl.Series([1, None]).cast(pl.Decimal(10, 2)),
        none=pl.Series([None, None], dtype=pl.Null),
    )
    for column in frame.columns:
        one = frame.select(column)
        for kind, write in (("parquet", one.write_parquet), ("arrow", one.write_ipc), ("arrows", one.write_ipc_stream)):
            to = io.BytesIO()
            write(to)
            yield File(f"Polars {column}", f".{kind}", to.getvalue())
    for codec in ("lz4", "snappy", "gzip", "brotli", "zstd"):
        to = io.BytesIO()
        frame.select("i", "s").write_parquet(to, compression=codec)
        yield File(f"Polars {codec}", ".parquet", to.getvalue())
    values = {
        "uuid": "'00000000-0000-0000-0000-00000000000a'::uuid",
        **{kind: f"1::{kind}" for kind in ("hugeint", "uhugeint", "utinyint", "tinyint", "bignum", "float", "ubigint")},
        **{f"decimal {digits}": f"1.5::decimal({digits},1)" for digits in (4, 9, 18, 38)},
        **{kind: f"'2026-01-01'::{kind}" for kind in ("timestamp", "timestamp_s", "timestamp_ms", "timestamp_ns")},
        "timestamptz": "'2026-01-01'::timestamptz",
        "interval": "interval 3 days",
        "timetz": "'10:11:12+02'::timetz",
        "time": "'10:11:12'::time",
        "enum": "'a'::enum('a','b')",
        "json": "'{\"a\":1}'::json",
        "map": "map{'a':1}",
        "struct": "{'a':1,'b':[1]}",
        "list": "[1,2]",
        "array": "[1,2]::int[2]",
        "blob": "'a'::blob",
        "bit": "'101'::bit",
        "infinity": "'infinity'::timestamp",
        "infinite date": "'infinity'::date",
        "null": "null",
    }
    with duckdb.connect() as database:
        for (name, value), kind in itertools.product(values.items(), ("parquet", "csv")):
            path = f"{folder}/duckdb.{kind}"
            database.sql(f"copy (select {value} as c, 1 as k) to '{path}'")
            with open(path, "rb") as file:
                yield File(f"DuckDB {name}", f".{kind}", file.read())


_FIELDS = [
    *("", "1", "-1", "007", "1.5", "1e5", "true", "False", "x", "né", "2026-01-31", "2026-01-31 10:11:12", '""', '"1"'),
    *(
        "2026-01-31T10:11:12Z",
        "2026-01-31 10:11:12.1234567",
        "2026-01-31T10:11:12+01:00",
        '"a,b"',
        '"a\nb"',
        '"a\r\nb"',
    ),
    *('"a""b"', 'a"b', " 1", "1 ", "NA", "nan", "inf", "9223372036854775808", "9223372036854775807", "0x1", "+1", ".5"),
    *(
        "5.",
        ".",
        "1e400",
        "\t",
        "a;b",
        "a\tb",
        "\0",
        "\ufeff",
        "\u00a0",
        '"1,000"',
        '"unclosed',
        "10:11:12",
        "1_000",
        "-",
    ),
    *("-.5", "00:00:00", "0001-01-01", "9999-12-31", "10000-01-01", "null", '"" ', '"a"b', "\x0b", "\x1a", "#c", "\\"),
    *('\\"', "'a'", "1970-01-01 00:00:00.000001", "1677-01-01 00:00:00.0000001", "\u2028", "x" * 300),
]

_TYPES = [
    *(
        "int8",
        "uint16",
        "int64",
        "float32",
        "float16",
        "bool",
        "string",
        "large_string",
        "string_view",
        "date",
        "date64",
    ),
    *("time32(s)", "time64(ns)", "timestamp", "timestamp(ns)", "timestamp(s)", "timestamp(ms, UTC)", "decimal(9,2)"),
    *("timestamp(us, Europe/Berlin)", "decimal(38,10)"),
]


def random_csv(seed: int, count: int) -> Iterator[File]:
    """Yields CSV of random fields, line ends and options."""
    for number in range(seed, seed + count):
        yield _random_csv(number)


def _random_csv(number: int) -> File:
    random_ = random.Random(number)
    choose, chance = random_.choice, random_.random
    columns, delimiter = choose([1, 1, 2, 3]), choose([*",,,,", ";", "\t", "|", " "])
    line_end, fields = choose(["\n", "\n", "\r\n", "\r", None]), random_.sample(_FIELDS, choose([3, 6, 12]))
    odd_names = ["a", "b", "c", "", '"a b"', "k", "né", '"x,y"', '"n\nl"', "1"]
    header = ["a", "b", "c"][:columns] if chance() < 0.9 else [choose(odd_names) for _ in range(columns)]
    lines = [header]
    for _ in range(choose([0, 1, 2, 5])):
        lines.append([choose(fields) for _ in range(columns if chance() < 0.97 else choose([1, 2, 4]))])
    if chance() < 0.25:
        lines.insert(random_.randrange(len(lines) + 1), [""])
    text = "".join(delimiter.join(line) + (line_end or choose(["\n", "\r\n"])) for line in lines)
    text = text.rstrip("\r\n") if chance() < 0.4 else text
    text = "\ufeff" + text if chance() < 0.1 else text
    text += choose(["\n\n", "\r", "  ", "\0", "\x1a"]) if chance() < 0.05 else ""
    options: dict[str, Any] = {}
    if delimiter != "," and chance() < 0.7:
        options["delimiter"] = delimiter
    if chance() < 0.15:
        options["header"] = False
    if chance() < 0.3:
        options["infer_rows"] = choose([0, 1, 2, 3])
    if chance() < 0.2:
        options["null_values"] = choose([["NA"], ["NA", "null"], ["1"], ["x", "1.5"], [" 1"]])
    if chance() < 0.3:
        options["types"] = {"column_1" if "header" in options else "a": choose(_TYPES)}
    content = text.encode(choose([*["utf-8"] * 20, "latin-1", "utf-16"]), errors="replace")
    if chance() < 0.05:
        return File(f"random {number}", ".csv.gz", gzip.compress(content), options)
    return File(f"random {number}", ".csv", content, options)
