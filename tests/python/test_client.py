"""The Python client: every form of data, every way of asking, and what it shows."""

from __future__ import annotations

import gzip
import http.server
import inspect
import itertools
import json
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset
import pyarrow.flight
import pyarrow.parquet
import pytest

import dovetail
from dovetail._command import OPTIONS, join_command
from dovetail._connection import Connections
from dovetail._jobs import Jobs
from harness import WAIT_SECONDS, Server, slow_devices

TABLE = pa.table({"k": pa.array([1, 2, 3, None], pa.int64()), "s": ["a", None, "ß", "🦀"]})


def forms(folder: Path) -> dict[str, object]:
    """The same table in every form that can be uploaded."""
    pa.parquet.write_table(TABLE, folder / "table.parquet")
    with pa.OSFile(str(folder / "table.arrow"), "wb") as sink, pa.ipc.new_file(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)
    pa.csv.write_csv(TABLE, folder / "table.csv")
    return {
        "table": TABLE,
        "batch": TABLE.to_batches()[0],
        "reader": TABLE.to_reader(),
        "batches": TABLE.to_batches(max_chunksize=1),
        "generator": (batch for batch in TABLE.to_batches(max_chunksize=1)),
        "dataset": pa.dataset.dataset(TABLE),
        "scanner": pa.dataset.dataset(TABLE).scanner(),
        "scanner of batches": pa.dataset.Scanner.from_batches(iter(TABLE.to_batches()), schema=TABLE.schema),
        "pandas": TABLE.to_pandas(types_mapper=pd.ArrowDtype),
        "polars": pl.from_arrow(TABLE),
        "lazy polars": pl.from_arrow(TABLE).lazy(),
        "dictionary": TABLE.to_pydict(),
        "rows": TABLE.to_pylist(),
        "generator of rows": (row for row in TABLE.to_pylist()),
        "parquet path": folder / "table.parquet",
        "parquet path as text": str(folder / "table.parquet"),
        "arrow path": folder / "table.arrow",
        "csv path": folder / "table.csv",
    }


FORMS = [
    "table", "batch", "reader", "batches", "generator", "dataset", "scanner", "scanner of batches", "pandas", "polars",
    "lazy polars", "dictionary", "rows", "generator of rows", "parquet path", "parquet path as text", "arrow path",
    "csv path",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("streams", [1, 2])
def test_every_form_of_data_is_uploaded(client: dovetail.Client, tmp_path: Path, form: str, streams: int) -> None:
    assert client.put("t", forms(tmp_path)[form], streams=streams) == 4
    back = client.get("t")
    assert back.num_rows == 4
    if streams == 1 or form not in ("batches", "generator"):
        assert back["k"].to_pylist() == TABLE["k"].to_pylist()
        assert back["s"].cast(pa.string()).to_pylist() == ["a", None, "ß", "🦀"]


def test_files_with_the_same_columns_become_one_table(client: dovetail.Client, tmp_path: Path) -> None:
    parts = [TABLE.slice(0, 1), TABLE.slice(1, 2), TABLE.slice(3)]
    for index, part in enumerate(parts):
        pa.parquet.write_table(part, tmp_path / f"part-{index}.parquet")
    paths = [tmp_path / f"part-{index}.parquet" for index in (2, 0, 1)]
    assert client.put("listed", paths) == 4
    assert client.get("listed")["k"].to_pylist() == [None, 1, 2, 3], "in the order of the list"
    assert client.put("matched", str(tmp_path / "part-*.parquet")) == 4
    assert client.get("matched")["k"].to_pylist() == [1, 2, 3, None]
    (tmp_path / "part.csv").write_text("k,s\n4,d\n")
    assert client.put("mixed", [paths[1], tmp_path / "part.csv"]) == 2
    (tmp_path / "other.csv").write_text("k,s\n4.5,d\n")
    differs = "other.csv does not have the columns of .*part.csv: "
    with pytest.raises(ValueError, match=differs + "'k' is int64 there, float64 here; use types={'k': 'float64'}"):
        client.put("t", [tmp_path / "part.csv", tmp_path / "other.csv"])
    assert client.put("t", [tmp_path / "part.csv", tmp_path / "other.csv"], types={"k": "float64"}) == 2
    for text, words in {
        "k,z\n4,d\n": "column 2 is 's' there, 'z' here$",
        "k,s\n4,1\n": "'s' is string there, int64 here; use types={'s': 'string'}",
        "k\n4\n": "2 columns there, 1 here$",
    }.items():
        (tmp_path / "other.csv").write_text(text)
        with pytest.raises(ValueError, match=differs + words):
            client.put("t", [tmp_path / "part.csv", tmp_path / "other.csv"])
    with pytest.raises(FileNotFoundError, match=r"no file that matches .*none-\*"):
        client.put("u", str(tmp_path / "none-*.parquet"))


NO_JSON = (
    "JSON can be written but not read; upload it as Parquet, Arrow IPC or CSV, or hand over a pyarrow, pandas or "
    "Polars table$"
)


def test_the_first_bytes_of_a_file_decide_its_format(client: dovetail.Client, tmp_path: Path) -> None:
    with pa.OSFile(str(tmp_path / "t.data"), "wb") as sink, pa.ipc.new_stream(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)
    assert client.put("stream", tmp_path / "t.data") == 4
    pa.parquet.write_table(TABLE, tmp_path / "t.csv")
    assert client.put("parquet", tmp_path / "t.csv") == 4
    (tmp_path / "t.doc").write_text("hello")
    (tmp_path / "t.parquet").write_text("hello")
    (tmp_path / "t.orc.gz").write_bytes(gzip.compress(b"hello"))
    for name in ("t.json", "t.jsonl", "t.NDJSON"):
        (tmp_path / name).write_text('{"k": 18446744073709551615}\n')
    for name, words in {
        "t.doc": "the name does not show the format; use one of .parquet, .* .csv, .tsv, .txt, .orc$",
        "t.parquet": "it is not a Parquet file",
        "t.orc.gz": "it is compressed by gzip, which only CSV may be; name it .csv.gz",
        "t.json": NO_JSON,
        "t.jsonl": NO_JSON,
        "t.NDJSON": NO_JSON,
    }.items():
        with pytest.raises(ValueError, match=f"^reading .*{name}: {words}"):
            client.put("t", tmp_path / name)


def test_orc_is_read_without_loss(client: dovetail.Client, tmp_path: Path) -> None:
    orc = pytest.importorskip("pyarrow.orc")
    # All that ORC has, at the ends of their ranges; its times are of nanoseconds.
    least, most = -(2**63) + 1, 2**63 - 1
    table = pa.table(
        {
            "bool": [True, False, None],
            "byte": pa.array([-128, 127, None], pa.int8()),
            "short": pa.array([-(2**15), 2**15 - 1, None], pa.int16()),
            "int": pa.array([-(2**31), 2**31 - 1, None], pa.int32()),
            "long": [-(2**63), most, None],
            "float": pa.array([0.1, float("-inf"), None], pa.float32()),
            "double": [0.1, 1.7976931348623157e308, None],
            "string": ["", "\u00e9", None],
            "binary": [b"", b"\xff\x00", None],
            "date": pa.array([-719_162, 2_932_896, None], pa.date32()),
            "timestamp": pa.array([-1, most, None], pa.timestamp("ns")),
            "instant": pa.array([least, -999_999_999, None], pa.timestamp("ns", "UTC")),
            "decimal": pa.array(["12345678901234567890123456789012345.678", "-0.001", None]).cast(pa.decimal128(38, 3)),
            "list": pa.array([[1, None], [], None], pa.list_(pa.int64())),
            "struct": [{"a": 1, "b": "x"}, {"a": None, "b": None}, None],
        }
    )
    orc.write_table(table, tmp_path / "t.orc")
    assert client.put("t", tmp_path / "t.orc") == 3
    read = client.get("t")
    assert read.schema.types == table.schema.types
    for name in table.column_names:
        assert read[name].equals(table[name]), name
    # What it has and nanoseconds have no room for is an error, and no other time.
    times = pa.table({"t": pa.array([32_503_680_000], pa.timestamp("s"))})
    orc.write_table(times, tmp_path / "far.orc")
    with pytest.raises(ValueError, match=r"^reading .*far\.orc: .*out of range for nanosecond"):
        client.put("far", tmp_path / "far.orc")


def test_a_folder_is_uploaded_as_the_files_in_it(client: dovetail.Client, tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    (parts / "more").mkdir(parents=True)
    with pytest.raises(
        ValueError, match=f"^reading {parts}: there is no file in the folder, and a table needs columns$"
    ):
        client.put("t", parts)
    (parts / "_SUCCESS").write_text("")
    (parts / "b.csv").write_text("k\n2\n")
    (parts / "a.csv").write_text("k\n1\n")
    (parts / "more" / "c.csv").write_text("k\nNA\n")
    for words in ("NULL,NA", ["NA"], ("NULL", "NA")):
        assert client.put("t", parts, "replace", null_values=words, types={"k": "int8"}) == 3
        assert client.get("t")["k"].to_pylist() == [1, 2, None]
    with pytest.raises(
        ValueError, match=r"c\.csv does not have the columns of .*a\.csv: 'k' is int64 there, string here"
    ):
        client.put("u", str(parts))
    parquet = tmp_path / "parquet"
    parquet.mkdir()
    for index in (0, 1):
        pa.parquet.write_table(TABLE, parquet / f"{index}.parquet")
    assert client.put("p", parquet) == 8
    assert client.put("both", str(tmp_path / "parqu*")) == 8


def test_csv_without_nulls_is_appended_to_non_nullable_columns(client: dovetail.Client, tmp_path: Path) -> None:
    schema = pa.schema([pa.field("k", pa.int64(), nullable=False)])
    client.put("t", pa.table({"k": [1]}, schema=schema))
    file = tmp_path / "t.csv"
    file.write_text("k\n2\n3\n")
    assert client.put("t", file, mode="append") == 2
    file.write_text("k\n4\nNA\n")
    with pytest.raises(dovetail.InvalidRequest, match='column "k" is declared not null, and row 2 has a null'):
        client.put("t", file, mode="append", null_values=["NA"])
    assert client.schema("t") == schema
    assert client.get("t")["k"].to_pylist() == [1, 2, 3]


def test_a_truncated_file_is_named(client: dovetail.Client, tmp_path: Path) -> None:
    pa.parquet.write_table(TABLE, tmp_path / "t.parquet")
    for name, new in {"t.arrow": pa.ipc.new_file, "t.arrows": pa.ipc.new_stream}.items():
        with pa.OSFile(str(tmp_path / name), "wb") as sink, new(sink, TABLE.schema) as writer:
            writer.write_table(TABLE)
    for name, kind in {
        "t.parquet": "a Parquet file",
        "t.arrow": "an Arrow IPC file",
        "t.arrows": "an Arrow IPC stream",
    }.items():
        data = (tmp_path / name).read_bytes()
        for cut in (20, len(data) - 20):
            (tmp_path / name).write_bytes(data[:-cut])
            words = f"^reading .*{name}: it is cut short: it begins as {kind}, but its end is missing"
            with pytest.raises(ValueError, match=words):
                client.put("t", tmp_path / name)
    assert len(client.tables()) == 0


def test_an_empty_file_or_one_with_duplicate_column_names_is_named(client: dovetail.Client, tmp_path: Path) -> None:
    twice = pa.table([[1], [2]], names=["k", "k"])
    pa.parquet.write_table(twice, tmp_path / "twice.parquet")
    for name, new in {"twice.arrow": pa.ipc.new_file, "twice.arrows": pa.ipc.new_stream}.items():
        with pa.OSFile(str(tmp_path / name), "wb") as sink, new(sink, twice.schema) as writer:
            writer.write_table(twice)
    for name in ("empty.parquet", "empty.csv.gz", "empty"):
        (tmp_path / name).touch()
    for path in tmp_path.iterdir():
        words = "two columns are named 'k'; rename one" if "twice" in path.name else "it is empty, and a table needs"
        with pytest.raises(ValueError, match=f"^reading .*{path.name}: {words}"):
            client.put("t", path)
    assert len(client.tables()) == 0


def test_types_are_shown_by_the_names_that_the_options_accept(client: dovetail.Client, tmp_path: Path) -> None:
    types = {"d": "date", "p": "decimal(9,2)", "t": "timestamp", "z": "timestamp(us, UTC)"}
    (tmp_path / "t.csv").write_text("d,p,t,z\n2026-01-31,1.5,2026-01-31,2026-01-31T10:11:12Z\n")
    client.put("t", tmp_path / "t.csv", types=types)
    shown = ", ".join(f"{name}: {kind}" for name, kind in types.items())
    assert repr(client.tables()["t"]).endswith(f"; {shown}>")
    with pytest.raises(ValueError, match=r"'decimal\(40,2\)' for column 'p', which is not a type .* at most 38 digits"):
        client.put("u", tmp_path / "t.csv", types={"p": "decimal(40,2)"})


def test_a_table_that_is_replaced_while_it_is_fetched_is_fetched_again(
    client: dovetail.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are of one version, and an error says so where some of them were handed out."""
    old, new = pa.table({"k": [1, 2, 3]}), pa.table({"k": [4, 5]})
    ask, replacements = client._table_info, iter([new])

    def replaced_meanwhile(name: str) -> pyarrow.flight.FlightInfo:
        info = ask(name)
        if (data := next(replacements, None)) is not None:
            client.put(name, data, mode="replace")
        return info

    monkeypatch.setattr(client, "_table_info", replaced_meanwhile)
    client.put("t", old)
    assert client.get("t") == new
    replacements = iter([old])
    assert client.reader("t").read_all() == old
    replacements = iter([pa.table({"k": ["a"]})])
    with pytest.raises(dovetail.FailedPrecondition, match="was replaced or appended to since .*; call reader again"):
        client.reader("t").read_all()
    replacements = itertools.cycle([old, new])
    with pytest.raises(dovetail.FailedPrecondition, match="was replaced or appended to since .*; call get again"):
        client.get("t")


def test_batches_respect_the_message_limit_of_the_server(start: Callable[..., Server]) -> None:
    server = start(devices="host:1", host_memory="256MiB", message_limit="32KiB")
    # Rows of one batch that differ in size, by which those of a mean size would be too large.
    text = ["x" * (9000 if row % 1000 < 3 else 5) for row in range(50_000)]
    tables = [
        pa.table({"k": np.arange(2_000_000)}),
        pa.table({"s": text, "d": pa.array(["a", "b"] * 25_000).dictionary_encode()}),
        pa.table({f"c{column}": [1, 2] for column in range(50)}),
    ]
    with server.connect() as client:
        for table in tables:
            for streams in (1, 2):
                assert client.put("t", table, mode="replace", streams=streams) == len(table)
            client.put("t", table, mode="replace")
            assert client.get("t").equals(table)
        with pytest.raises(dovetail.Error, match="message-limit"):
            client.put("u", {"s": ["x" * 40_000]})


def test_csv_options_are_refused_for_other_formats(client: dovetail.Client, tmp_path: Path) -> None:
    pa.parquet.write_table(TABLE, tmp_path / "t.parquet")
    options = {"types": {"k": "int8"}, "delimiter": ";", "header": True, "infer_rows": 5, "null_values": "NA"}
    for name, value in options.items():
        with pytest.raises(ValueError, match=f"{name} applies to CSV only, and this is a Parquet file"):
            client.put("t", tmp_path / "t.parquet", **{name: value})
        with pytest.raises(ValueError, match=f"{name} applies to CSV only, and this is a Table"):
            client.put("t", TABLE, **{name: value})


def test_a_list_of_rows_has_the_columns_of_all_rows(client: dovetail.Client) -> None:
    assert client.put("t", [{"a": 1}, {"b": "x", "a": None}]) == 2
    assert client.get("t").to_pydict() == {"a": [1, None], "b": [None, "x"]}
    with pytest.raises(ValueError, match="cannot mix"):
        client.put("u", [{"a": 1}, 2])
    assert client.put("v", pd.DataFrame({"dtype": [1], "read": [2]})) == 1


def test_unsupported_data_is_refused_before_anything_is_sent(client: dovetail.Client, tmp_path: Path) -> None:
    for data in (42, None, object(), b"k,s"):
        with pytest.raises(TypeError, match="is not a table; give a pyarrow Table, .* a dictionary of columns"):
            client.put("t", data)
    for data in ([1, 2], [(1, 2)], {3, 4}, [None]):
        with pytest.raises(TypeError, match="a sequence of rows has items that are .* item 1 of this one is"):
            client.put("t", data)
    with pytest.raises(TypeError, match="the sequence of rows is empty, and shows no columns"):
        client.put("t", [])
    for data in (pd.Series([1]), pd.Index([1]), pl.Series([1]), np.arange(3), TABLE["k"], pa.array([1])):
        with pytest.raises(
            TypeError, match='is one column without a name; give a dictionary of columns, such as {"k": values}'
        ):
            client.put("t", data)
    for data in ({"k": 1}, {"k": "abc"}, {1: [1]}):
        with pytest.raises(TypeError, match="a dictionary of columns maps their names to values"):
            client.put("t", data)
    (tmp_path / "t.csv").write_text("k\n1\n")
    with (tmp_path / "t.csv").open("rb") as file, pytest.raises(TypeError, match="is an open file; give its path"):
        client.put("t", file)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        client.put("t", "nowhere.parquet")
    with pytest.raises(ValueError, match="streams=1"):
        client.put("t", TABLE, sorted_by="k", streams=2)
    assert len(client.tables()) == 0


WRONG_ARGUMENTS: dict[str, tuple[Callable[[dovetail.Client], object], type[Exception], str]] = {
    "name": (lambda client: client.put(5, TABLE), TypeError, "name is 5 (int); it takes the name of a table, as a str"),
    "mode": (lambda client: client.put("t", TABLE, mode=1), TypeError, "mode is 1 (int); it takes"),
    "streams": (
        lambda client: client.put("t", TABLE, streams="4"),
        TypeError,
        "streams is '4' (str); it takes a whole number from 1 to 64",
    ),
    "no streams": (
        lambda client: client.put("t", TABLE, streams=0),
        ValueError,
        "streams is 0; it takes a whole number from 1 to 64",
    ),
    "a thousand streams": (
        lambda client: client.put("t", TABLE, streams=1000),
        ValueError,
        "streams is 1000; it takes a whole number from 1 to 64",
    ),
    "true streams": (lambda client: client.put("t", TABLE, streams=True), TypeError, "streams is True (bool)"),
    "sorted_by": (
        lambda client: client.put("t", TABLE, sorted_by=1),
        TypeError,
        "sorted_by is 1 (int); it takes a name",
    ),
    "sorted_by of numbers": (
        lambda client: client.put("t", TABLE, sorted_by=[1]),
        TypeError,
        "sorted_by holds 1 (int)",
    ),
    "unique": (
        lambda client: client.put("t", TABLE, unique=3),
        TypeError,
        "unique is 3 (int); it takes a name, or a list",
    ),
    "unique of numbers": (lambda client: client.put("t", TABLE, unique=["k", 3]), TypeError, "unique is 3 (int)"),
    "progress": (
        lambda client: client.put("t", TABLE, progress="bar"),
        TypeError,
        "progress is 'bar' (str); it takes True",
    ),
    "get": (lambda client: client.get(None), TypeError, "name is None; it takes the name of a table"),
    "get columns": (lambda client: client.get("t", columns="k"), TypeError, "columns is 'k' (str); it takes a list"),
    "get no columns": (lambda client: client.get("t", columns=[]), ValueError, "columns is empty; name at least one"),
    "get limit": (lambda client: client.get("t", limit=0), ValueError, "limit is 0; it takes a whole number of at le"),
    "get progress": (lambda client: client.get("t", progress=1), TypeError, "progress is 1 (int)"),
    "reader": (lambda client: client.reader(b"t"), TypeError, "name is b't' (bytes)"),
    "schema": (lambda client: client.schema(1.5), TypeError, "name is 1.5 (float)"),
    "drop": (lambda client: client.drop(["t"]), TypeError, "name is ['t'] (list)"),
    "left": (lambda client: client.join(1, "t", on="k"), TypeError, "left is 1 (int); it takes the name of a table"),
    "right": (lambda client: client.join("t", TABLE, on="k"), TypeError, "right is "),
    "on": (lambda client: client.join("t", "t", on=5), TypeError, "on is 5 (int); it takes the name of a column"),
    "On": (lambda client: client.join("t", "t", on=dovetail.On(5)), TypeError, "On.left is 5 (int)"),
    "how": (lambda client: client.join("t", "t", on="k", how=None), TypeError, "how is None; it takes a kind of join"),
    "columns": (
        lambda client: client.join("t", "t", on="k", columns="k"),
        TypeError,
        "columns is 'k' (str); it takes a list",
    ),
    "no columns": (
        lambda client: client.join("t", "t", on="k", columns=[]),
        ValueError,
        "columns is empty; name at least one",
    ),
    "no keys": (lambda client: client.join("t", "t"), TypeError, "a join takes either on, or left_on with right_on"),
    "keys of one side": (
        lambda client: client.explain("t", "t", left_on="k"),
        TypeError,
        "a join takes either on, or left_on with right_on",
    ),
    "keys twice": (
        lambda client: client.join("t", "t", on="k", left_on="k", right_on="k"),
        TypeError,
        "a join takes either on, or left_on with right_on",
    ),
    "keys without a partner": (
        lambda client: client.submit("t", "t", left_on=["k", "s"], right_on="k"),
        ValueError,
        "left_on names 2 columns, and right_on 1",
    ),
    "types": (lambda client: client.put("t", "t.csv", types="int8"), TypeError, "types is 'int8' (str); it takes a"),
    "unknown type": (
        lambda client: client.put("t", "t.csv", types={"k": "integerish"}),
        ValueError,
        "types gives 'integerish' for column 'k', which is not a type that CSV is read as",
    ),
    "delimiter": (
        lambda client: client.put("t", "t.csv", delimiter="||"),
        ValueError,
        "delimiter is '||'; it takes one ASCII character",
    ),
    "delimiter beyond ASCII": (
        lambda client: client.put("t", "t.csv", delimiter="é"),
        ValueError,
        "delimiter is 'é'; it takes one ASCII character, such as ';', that is not a quote or a line end",
    ),
    "a quote for a delimiter": (lambda client: client.put("t", "t.csv", delimiter='"'), ValueError, "not a quote"),
    "a line end for a delimiter": (lambda client: client.put("t", "t.csv", delimiter="\n"), ValueError, "a line end"),
    "strategy": (lambda client: client.join("t", "t", on="k", strategy=1), TypeError, "strategy is 1 (int)"),
    "nulls_equal": (
        lambda client: client.join("t", "t", on="k", nulls_equal="no"),
        TypeError,
        "nulls_equal is 'no' (str)",
    ),
    "into": (lambda client: client.join("t", "t", on="k", into=1), TypeError, "into is 1 (int)"),
    "devices": (
        lambda client: client.join("t", "t", on="k", devices=1.5),
        TypeError,
        "devices is 1.5 (float); it takes a number",
    ),
    "no devices": (
        lambda client: client.join("t", "t", on="k", devices=0),
        ValueError,
        "devices is 0; it takes a number",
    ),
    "priority": (
        lambda client: client.join("t", "t", on="k", priority=1.5),
        TypeError,
        "priority is 1.5 (float); it takes a whole number",
    ),
    "unknown mode": (
        lambda client: client.put("t", TABLE, mode="overwrite"),
        ValueError,
        "mode is 'overwrite'; it takes 'create', 'replace', 'append' or 'create_if_missing'",
    ),
    "into_mode": (
        lambda client: client.join("t", "t", on="k", into="u", into_mode="append"),
        ValueError,
        "into_mode is 'append'; it takes 'create' or 'replace'",
    ),
    "retain_seconds": (
        lambda client: client.join("t", "t", on="k", retain_seconds=0.5),
        TypeError,
        "retain_seconds is 0.5",
    ),
    "batch_rows": (lambda client: client.join("t", "t", on="k", batch_rows="9"), TypeError, "batch_rows is '9' (str)"),
    "join progress": (
        lambda client: client.join("t", "t", on="k", progress="bar"),
        TypeError,
        "progress is 'bar' (str)",
    ),
    "submit": (lambda client: client.submit("t", "t", "k", device=1), TypeError, "submit() has no argument 'device'"),
    "explain": (
        lambda client: client.explain("t", "t", "k", retain=1),
        TypeError,
        "explain() has no argument 'retain'",
    ),
    "command": (
        lambda client: client.command("join"),
        TypeError,
        "command is 'join' (str); it takes a mapping such as",
    ),
    "command of an object": (lambda client: client.command({"join": object()}), TypeError, "cannot be sent as JSON"),
    "job": (lambda client: client.job("7"), TypeError, "identity is '7' (str); it takes a whole number"),
    "wait": (
        lambda client: dovetail.Job(client._connections, 7).wait("1"),
        TypeError,
        "timeout is '1' (str); it takes",
    ),
    "uri": (lambda client: dovetail.connect(8815), TypeError, "uri is 8815 (int); it takes the address of a server"),
    "token": (lambda client: dovetail.connect(client.uri, token=b"t"), TypeError, "token is b't' (bytes)"),
    "timeout": (
        lambda client: dovetail.connect(client.uri, timeout=0),
        ValueError,
        "timeout is 0; it takes a number of seconds",
    ),
    "call_timeout": (
        lambda client: dovetail.connect(client.uri, call_timeout="9"),
        TypeError,
        "call_timeout is '9' (str)",
    ),
    "cert": (lambda client: dovetail.connect(client.uri, cert="c.pem"), ValueError, "cert is given without key"),
    "certs": (
        lambda client: dovetail.connect(client.uri, tls_root_certs="nowhere.pem"),
        FileNotFoundError,
        "tls_root_certs names the file nowhere.pem, which cannot be read: there is no such file; it takes PEM",
    ),
    "certs in a folder": (
        lambda client: dovetail.connect(client.uri, tls_root_certs="/"),
        IsADirectoryError,
        "tls_root_certs names the file /, which cannot be read: it is a folder, not a file; it takes PEM",
    ),
    "token of no file": (
        lambda client: dovetail.connect(client.uri, token="@/no/such/file"),
        ValueError,
        "token names the file /no/such/file, which cannot be read: there is no folder /no",
    ),
    "file in no folder": (
        lambda client: client.put("t", "/no/such.csv"),
        FileNotFoundError,
        "there is no file '/no/such.csv': there is no folder /no",
    ),
    "certs of a number": (
        lambda client: dovetail.connect(client.uri, tls_root_certs=1),
        TypeError,
        "tls_root_certs is 1",
    ),
}


@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_a_wrong_argument_is_named_with_its_value_and_the_accepted_values(client: dovetail.Client, case: str) -> None:
    call, kind, words = WRONG_ARGUMENTS[case]
    with pytest.raises(kind) as caught:
        call(client)
    assert type(caught.value) is kind and words in str(caught.value), str(caught.value)
    # Before anything was sent.
    assert len(client.tables()) == 0 and len(client.jobs()) == 0


def test_submit_and_explain_take_the_arguments_of_join() -> None:
    takes = inspect.signature(join_command).parameters
    assert set(OPTIONS) == set(takes) - {"left", "right", "on"}


def test_keys_may_be_given_per_side(client: dovetail.Client) -> None:
    client.put("a", {"x": [1, 2, 3], "y": ["p", "q", "r"]})
    client.put("b", {"u": [2, 3], "v": ["q", "s"]})
    assert client.join("a", "b", left_on="x", right_on="u").num_rows == 2
    assert client.submit("a", "b", left_on=["x", "y"], right_on=["u", "v"]).wait().rows == 1


def test_arguments_may_be_numpy_values_and_any_sequence(client: dovetail.Client) -> None:
    client.put("t", TABLE, streams=np.int64(2), unique=(("k",),))
    options = {"priority": np.int32(1), "retain_seconds": np.int64(60), "nulls_equal": np.True_, "devices": "host:1"}
    with client.join("t", "t", on=("k",), columns=np.array(["k"]).tolist(), **options) as result:
        assert result.wait().status().raw["device"] == "host:1"
        assert result.table().num_rows == 4


def test_a_call_that_reaches_its_limit_names_the_limit_and_the_remedy(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = start(topology=slow_devices(tmp_path, "4MB/s"), host_memory="1GiB")

    def batches() -> Iterator[pa.RecordBatch]:
        yield TABLE.to_batches()[0]
        time.sleep(3)
        yield TABLE.to_batches()[0]

    with server.connect() as patient, server.connect(call_timeout=2) as client:
        patient.put("many", {"k": np.zeros(20_000, np.int64)})
        # The only device is taken for minutes.
        running = patient.join("many", "many", on="k", retain_seconds=0)
        server.wait_for(lambda: running.status().state == "running", "the join to run")
        one, other = (client.submit("many", "many", on="k", how="left_semi") for _ in range(2))
        for call, what in (
            (lambda: one.result().table(), f"fetching the result of job {one.id}"),
            (lambda: other.result().reader().read_all(), f"fetching the result of job {other.id}"),
            (lambda: client.put("slow", batches()), "uploading table 'slow'"),
        ):
            with pytest.raises(dovetail.DeadlineExceeded) as caught:
                call()
            assert str(caught.value).startswith(
                f"{what} was not done within 2 s, the limit of each call of this client"
            )
            assert "connect(call_timeout=...)" in str(caught.value)
        for job in (one, other, running):
            job.cancel()


def test_each_mode_has_its_documented_effect(client: dovetail.Client) -> None:
    client.put("t", {"k": [1]})
    client.put("t", {"k": [2, 3]}, mode="append")
    assert client.get("t")["k"].to_pylist() == [1, 2, 3]
    client.put("t", {"k": [4]}, mode="create_if_missing")
    assert client.get("t")["k"].to_pylist() == [1, 2, 3, 4]
    client.put("t", {"x": ["other"]}, mode="replace")
    assert client.get("t").to_pydict() == {"x": ["other"]}
    client.put("u", {"k": [5]}, mode="create_if_missing")
    assert [(table.name, table.rows) for table in client.tables()] == [("t", 1), ("u", 1)]


def test_a_table_without_rows_keeps_its_columns(client: dovetail.Client) -> None:
    client.put("t", TABLE.slice(0, 0))
    assert client.get("t").schema == TABLE.schema
    assert client.schema("t") == TABLE.schema
    assert client.reader("t").read_all().num_rows == 0


@pytest.mark.parametrize("streams", [1, 4])
def test_a_large_table_comes_back_whole(client: dovetail.Client, seed: int, streams: int) -> None:
    rng = np.random.default_rng(seed)
    rows = 1_500_000
    table = pa.table({"n": np.arange(rows), "x": rng.standard_normal(rows), "s": rng.integers(0, 99, rows).astype(str)})
    states: list[dovetail.UploadProgress] = []
    assert client.put("t", table, streams=streams, progress=states.append) == rows
    assert states[-1].done and states[-1].rows == rows and states[-1].fraction == 1.0
    assert [state.rows for state in states] == sorted(state.rows for state in states)
    for back in (client.get("t"), client.reader("t").read_all()):
        assert back.num_rows == rows
        by_number = back.sort_by("n")
        assert by_number["n"].to_numpy().tolist() == list(range(rows))
        assert by_number["x"].combine_chunks().equals(table["x"].combine_chunks())
        assert by_number["s"].combine_chunks().equals(table["s"].combine_chunks())
    if streams == 1:
        assert client.get("t").equals(table)


def test_a_scanner_uploads_its_columns_and_rows(client: dovetail.Client) -> None:
    dataset = pa.dataset.dataset(TABLE)
    assert client.put("t", dataset.scanner(columns=["s"], filter=pa.dataset.field("k") > 1)) == 2
    assert client.get("t").to_pydict() == {"s": [None, "ß"]}


def test_integers_of_128_bits_are_uploaded_as_decimals(client: dovetail.Client) -> None:
    frame = pl.DataFrame(
        {
            "k": pl.Series([1, None, -(10**38) + 1], dtype=pl.Int128),
            "u": pl.Series([10**38 - 1, 0, 7], dtype=pl.UInt128),
            "l": pl.Series([[1], None, [2, None]], dtype=pl.List(pl.Int128)),
            "v": [1, 2, 3],
        }
    )
    for name, data in {"eager": frame, "lazy": frame.lazy()}.items():
        assert client.put(name, data) == 3
        back = client.get(name)
        assert back.schema.field("k").type == back.schema.field("u").type == pa.decimal128(38, 0)
        assert [value and int(value) for value in back["k"].to_pylist()] == [1, None, -(10**38) + 1]
        assert [int(value) for value in back["u"].to_pylist()] == [10**38 - 1, 0, 7]
        assert back["l"].to_pylist() == [[1], None, [2, None]]
        assert back["v"].to_pylist() == [1, 2, 3]
    assert client.count("eager", "lazy", on="k") == 2, "they are keys like other numbers"
    for dtype in (pl.Int128, pl.UInt128):
        with pytest.raises(ValueError, match=r"column 'k' is of type U?Int128, .* a value of more than 38 digits"):
            client.put("t", pl.DataFrame({"k": pl.Series([10**38], dtype=dtype)}))


def test_objects_and_types_that_pyarrow_does_not_know_are_refused(client: dovetail.Client) -> None:
    with pytest.raises(TypeError, match=r"column 'o' holds Python objects \(type Object of Polars\)"):
        client.put("t", pl.DataFrame({"k": [1], "o": [object()]}))

    class Stream:
        def __arrow_c_stream__(self, requested_schema: object = None) -> object:
            return pl.DataFrame({"k": pl.Series([1], dtype=pl.Int128)}).__arrow_c_stream__(requested_schema)

    with pytest.raises(TypeError, match="an object of type Stream has a column of a type that pyarrow does not know"):
        client.put("t", Stream())
    assert len(client.tables()) == 0


def test_columns_and_the_first_rows_of_a_table_are_fetched(server: Server, client: dovetail.Client) -> None:
    rows = 400_000
    table = pa.table(
        {"k": np.arange(rows), "s": pa.array(["a", "b"] * (rows // 2)).dictionary_encode(), "v": [0.5] * rows}
    )
    table = table.replace_schema_metadata({"origin": "test"})
    client.put("t", table)
    assert len(client._table_info("t").endpoints) > 1, "the order and the limit hold over several endpoints"
    chosen = client.get("t", columns=["s", "k"])
    assert chosen.schema.equals(table.select(["s", "k"]).schema, check_metadata=True)
    assert chosen["k"].equals(table["k"]) and chosen["s"].cast(pa.string()).equals(table["s"].cast(pa.string()))
    before = pa.total_allocated_bytes()
    one = client.get("t", columns=["k"])
    # A message of the server is one buffer, and its other columns must not stay in memory.
    assert one.nbytes == 8 * rows and pa.total_allocated_bytes() - before < 12 * rows
    for limit in (1, 1000, rows - 1, rows, rows + 1):
        states = []
        first = client.get("t", states.append, limit=limit)
        assert first.equals(table.slice(0, limit)), limit
        assert (states[-1].rows, states[-1].rows_total) == (min(limit, rows), min(limit, rows))
    assert client.get("t", columns=["v"], limit=3).to_pydict() == {"v": [0.5] * 3}
    assert client.get("t").num_rows == rows, "connections of streams that were left early are usable"
    with pytest.raises(dovetail.InvalidRequest, match=r"no column 'K', .* it has k, s, v; did you mean \"k\"\?"):
        client.get("t", columns=["K"])
    with pytest.raises(ValueError, match="columns names 'k' twice"):
        client.get("t", columns=["k", "s", "k"])
    with pytest.raises(dovetail.NotFound):
        client.get("u", columns=["k"])


def test_the_metadata_of_tables_and_of_columns_of_results_is_kept(client: dovetail.Client) -> None:
    frame = pd.DataFrame({"k": [1, 2], "v": [0.5, 1.5]}, index=pd.Index(["x", "y"], name="row"))
    client.put("frame", frame, streams=2)
    pd.testing.assert_frame_equal(client.get("frame").to_pandas().sort_index(), frame)
    k = pa.field("k", pa.int64(), metadata={"unit": "m"})
    schema = pa.schema([k, pa.field("w", pa.int64(), metadata={"unit": "s"})], metadata={"origin": "test"})
    table = pa.table([[1, 2], [3, 4]], schema=schema)
    client.put("t", table)
    assert client.get("t").schema.equals(schema, check_metadata=True)
    assert client.schema("t").equals(schema, check_metadata=True)
    # What describes a whole table does not hold for a joined one.
    result = client.join("t", "frame", on="k", into="both").wait()
    for joined in (result.table().schema, client.get("both").schema):
        assert joined.metadata is None
        assert [joined.field(name).metadata for name in ("k", "w")] == [{b"unit": b"m"}, {b"unit": b"s"}]
    assert client.get("both").to_pandas()["v"].sum() == 2.0
    # Appended rows take the table's.
    client.put("t", pa.table({"k": [5], "w": [6]}).replace_schema_metadata({"other": "x"}), mode="append")
    assert client.get("t").schema.equals(schema, check_metadata=True)


def test_on_takes_names_pairs_and_mappings(client: dovetail.Client) -> None:
    client.put("a", {"x": [1, 2], "y": [1, 2], "a": [10, 20]})
    client.put("b", {"x": [1, 2], "z": [1, 9], "b": [30, 40]})
    for on, rows in (
        ("x", 2),
        (["x"], 2),
        (dovetail.On("x"), 2),
        ({"x": "x", "y": "z"}, 1),
        ([("y", "z"), "x"], 1),
        ([["y", "z"]], 1),
        (["x", dovetail.On("y", "z")], 1),
    ):
        with client.join("a", "b", on=on) as result:
            assert result.table().num_rows == rows, on
    for wrong in ([("x",)], [1], [("x", 1)]):
        with pytest.raises(TypeError, match="on"):
            client.join("a", "b", on=wrong)


def test_a_result_is_read_as_a_table_a_stream_or_a_frame(client: dovetail.Client) -> None:
    client.put("a", {"k": [1, 2, 3], "a": ["x", "y", "z"]})
    client.put("b", {"k": [2, 3, 4], "b": [2.5, 3.5, 4.5]})
    expected = {"k": [2, 3], "a": ["y", "z"], "b": [2.5, 3.5]}
    with client.join("a", "b", on="k") as result:
        assert result.schema.names == ["k", "a", "b"]
        assert result.wait().status().state == "complete"
        assert result.progress() == 1.0
        assert result.num_rows == 2
        assert result.status().rows == 2
        assert result.table().sort_by("k").to_pydict() == expected
        assert result.reader().read_all().sort_by("k").to_pydict() == expected
        assert result.to_pandas().sort_values("k").to_dict("list") == expected
        assert result.to_polars().sort("k").to_dict(as_series=False) == expected
        assert pl.DataFrame(result).sort("k").to_dict(as_series=False) == expected
        assert pa.table(result).sort_by("k").to_pydict() == expected
        job = result.job_id
    status = client.job(job).status() if job in [known.id for known in client.jobs()] else None
    assert status is None or status.state not in ("queued", "running")
    with pytest.raises(dovetail.Error):
        result.table()


def test_a_result_stored_under_a_name_is_a_table(client: dovetail.Client) -> None:
    client.put("a", {"k": [1, 2, 3]})
    client.join("a", "a", on="k", into="b", progress=lambda status: None)
    assert sorted(client.get("b")["k"].to_pylist()) == [1, 2, 3]
    client.join("b", "a", on="k", into="c").wait()
    assert client.get("c").num_rows == 3
    with pytest.raises(dovetail.AlreadyExists, match="into_mode replace"):
        client.join("b", "a", on="k", how="left_anti", into="c")
    client.join("c", "a", on="k", how="left_anti", into="c", into_mode="replace").wait()
    assert client.get("c").num_rows == 0


def test_a_result_is_joined_again_on_either_side(client: dovetail.Client) -> None:
    for name, value in (("a", 1), ("b", 2), ("c", 3)):
        client.put(name, {"k": [7], "v": [value]})
    client.join("a", "b", on="k", into="ab").wait()
    assert client.join("ab", "c", on="k").table().to_pylist() == [{"k": 7, "v": 1, "v_right": 2, "v_right_right": 3}]
    assert client.join("c", "ab", on="k").table().to_pylist() == [{"k": 7, "v": 3, "v_right_right": 1, "v_right": 2}]


def interrupt(status: dovetail.JobStatus) -> None:
    """As Ctrl-C between two looks at a job."""
    raise KeyboardInterrupt


def test_ctrl_c_ends_a_join_whose_result_can_no_longer_be_read(server: Server, client: dovetail.Client) -> None:
    # 400 million rows, which the memory of the server does not hold: it runs until somebody reads them.
    client.put("a", {"k": np.zeros(20_000, np.int64), "v": np.arange(20_000)})
    for result in (client.join("a", "a", on="k", retain_seconds=0), client.submit("a", "a", "k", retain_seconds=0)):
        with pytest.raises(KeyboardInterrupt):
            result.wait(progress=interrupt)
        server.wait_for(lambda: result.status().state == "cancelled", "the join to end")  # noqa: B023
    # Of this one the caller never had a handle.
    with pytest.raises(KeyboardInterrupt):
        client.join("a", "a", on="k", retain_seconds=0, progress=interrupt)
    server.wait_for(lambda: client.jobs()[-1].state == "cancelled", "the join to end")
    # What is kept can still be read.
    client.put("b", {"k": [1, 2, 3]})
    kept = client.join("b", "b", on="k")
    with pytest.raises(KeyboardInterrupt):
        kept.wait(progress=interrupt)
    assert kept.num_rows == 3


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C is an exception, also where the tests run in the background of a shell, which has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_the_fetching_of_a_table(server: Server, client: dovetail.Client) -> None:
    client.put("a", {"k": np.zeros(20_000, np.int64), "v": np.arange(20_000)})
    main = threading.main_thread().ident
    assert main is not None
    told = itertools.count()

    def press(progress: dovetail.FetchProgress) -> None:
        # By the thread that fetches, while the caller's waits for it.
        if next(told) == 0:
            signal.pthread_kill(main, signal.SIGINT)

    result = client.join("a", "a", on="k", retain_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        result.table(progress=press)
    server.wait_for(lambda: result.status().state == "cancelled", "the join to end")
    # What is kept can still be read.
    kept = client.join("a", "a", on="v")
    told = itertools.count()
    with pytest.raises(KeyboardInterrupt):
        kept.table(progress=press)
    assert kept.table().num_rows == 20_000


def outcome_of(read: Callable[[], object]) -> BaseException | None:
    """What a read ends with. It is done by a thread, so that one that does not end fails the test."""
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            read()
        except BaseException as error:
            ended.append(error)
        else:
            ended.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_SECONDS)
    assert ended, "the read does not end"
    return ended[0]


def by_another_thread(stop: Callable[[], None], reader: Iterator[pa.RecordBatch]) -> None:
    """Stops what this thread reads, while it does."""
    next(reader)
    stopping = threading.Thread(target=stop)
    stopping.start()
    try:
        for _ in reader:
            pass
    finally:
        stopping.join()


def exhaust(reader: Iterable[pa.RecordBatch], at_each: Callable[[], object] = lambda: None) -> None:
    for _ in reader:
        at_each()


READS: dict[str, Callable[[dovetail.Result, pa.RecordBatchReader], None]] = {
    "at each batch": lambda result, reader: exhaust(reader, result.cancel),
    "before the first batch": lambda result, reader: (result.cancel(), exhaust(reader))[-1],
    "behind the first batch": lambda result, reader: (next(reader), result.cancel(), exhaust(reader))[-1],
    "read_all": lambda result, reader: (result.cancel(), reader.read_all())[-1],
    "read_all of the rest": lambda result, reader: (next(reader), result.cancel(), reader.read_all())[-1],
    "closed": lambda result, reader: (result.close(), exhaust(reader))[-1],
    "closed behind the first batch": lambda result, reader: (next(reader), result.close(), exhaust(reader))[-1],
    "by its job": lambda result, reader: (next(reader), result.job.cancel(), exhaust(reader))[-1],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_reader_of_a_cancelled_join_ends(
    client: dovetail.Client, read: Callable[[dovetail.Result, pa.RecordBatchReader], None]
) -> None:
    # 400 million rows, which the memory of the server does not hold.
    client.put("a", {"k": np.zeros(20_000, np.int64), "v": np.arange(20_000)})
    result = client.join("a", "a", on="k", retain_seconds=0)
    ended = outcome_of(lambda: read(result, result.reader()))
    assert isinstance(ended, dovetail.Cancelled), ended
    assert ended.message == f"job {result.job_id} was cancelled"


@pytest.mark.parametrize("how", [how for how in READS if how != "by its job"])
def test_a_reader_of_a_complete_result_ends_when_it_is_cancelled(client: dovetail.Client, how: str) -> None:
    client.put("a", {"k": [1, 2, 3]})
    result = client.join("a", "a", on="k").wait()
    reader = result.reader()
    ended = outcome_of(lambda: READS[how](result, reader))
    assert isinstance(ended, dovetail.Cancelled), ended


def test_a_reader_ends_when_another_thread_cancels(client: dovetail.Client) -> None:
    client.put("a", {"k": np.zeros(20_000, np.int64), "v": np.arange(20_000)})
    for _ in range(3):
        result = client.join("a", "a", on="k", retain_seconds=0)
        ended = outcome_of(lambda: by_another_thread(result.cancel, result.reader()))  # noqa: B023
        assert isinstance(ended, dovetail.Cancelled), ended


def test_a_reader_that_waits_for_a_batch_ends_when_another_thread_cancels(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    # Over so slow a link a batch is long in coming.
    server = start(topology=slow_devices(tmp_path, "100KB/s"), host_memory="1GiB")
    with server.connect() as client:
        client.put("a", {"k": np.arange(500_000)})
        result = client.join("a", "a", on="k", retain_seconds=0)
        reader = result.reader()
        waiting = threading.Event()

        def read() -> None:
            waiting.set()
            exhaust(reader)

        stopping = threading.Thread(target=lambda: (waiting.wait(), result.cancel()))
        stopping.start()
        ended = outcome_of(read)
        stopping.join()
        assert isinstance(ended, dovetail.Cancelled), ended


def test_a_reader_ends_with_the_block_of_its_result(client: dovetail.Client) -> None:
    client.put("a", {"k": np.zeros(2_000, np.int64), "v": np.arange(2_000)})
    for begun in (False, True):
        with client.join("a", "a", on="k") as result:
            reader = result.reader()
            if begun:
                next(reader)
        ended = outcome_of(reader.read_all)
        assert isinstance(ended, dovetail.Cancelled), ended
    # One that makes a table goes on.
    with client.join("a", "a", on="k", into="b") as result:
        reader = result.reader()
    ended = outcome_of(reader.read_all)
    assert isinstance(ended, dovetail.Cancelled), ended
    assert ended.message == f"job {result.job_id} continues, and its result was closed"
    assert result.wait().num_rows == 4_000_000
    assert client.get("b").num_rows == 4_000_000
    client.drop("b")


def test_a_result_read_to_its_end_may_be_cancelled(client: dovetail.Client) -> None:
    client.put("a", {"k": [1, 2, 3]})
    result = client.join("a", "a", on="k")
    reader = result.reader()
    assert reader.read_all().num_rows == 3
    result.cancel()
    assert outcome_of(lambda: exhaust(reader)) is None


def test_jobs_are_found_again(server: Server, client: dovetail.Client) -> None:
    client.put("a", {"k": [1, 2, 3]})
    job = client.submit("a", "a", "k", "left_semi", priority=7)
    assert job.wait(timeout=60).rows == 3
    assert job.id in [status.id for status in client.jobs()]
    with server.connect() as other:
        again = other.job(job.id)
        assert again.result().table().num_rows == 3
        assert again.explain().text
        again.cancel()


def test_a_job_continues_after_the_timeout_of_a_wait(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start(topology=slow_devices(tmp_path, "4MB/s"), host_memory="1GiB")
    with server.connect() as client:
        client.put("a", {"k": np.arange(500_000)})
        job = client.submit("a", "a", "k")
        # Both an error of this package and Python's own.
        for kind in (dovetail.DeadlineExceeded, dovetail.Error, TimeoutError):
            with pytest.raises(
                kind, match=rf"^job {job.id} is .* after 0 s, the limit of wait\(timeout=\.\.\.\); the job continues$"
            ):
                job.wait(timeout=0)
        job.cancel()


def test_a_wait_leaves_the_asking_to_the_server(
    start: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(topology=slow_devices(tmp_path, "4MB/s"), host_memory="1GiB")
    with server.connect() as client:
        client.put("a", {"k": np.arange(500_000)})
        job = client.submit("a", "a", "k")
        asked: list[dict[str, float]] = []
        action = client._connections.action

        def count(kind: str, body: dict[str, float], *rest: object) -> list[object]:
            asked.append(body)
            return action(kind, body, *rest)

        monkeypatch.setattr(client._connections, "action", count)
        status = job.wait()
        seconds = status.raw["queue_seconds"] + status.raw["run_seconds"]
        assert status.state == "complete" and seconds > 0.5
        assert len(asked) <= 2 + seconds / 0.25, "the server answers after a quarter of a second, or at the end"
        assert all(body["wait_seconds"] == 0.25 for body in asked)
    # A call that waits ends before its own time limit.
    with dovetail.connect(server.uri, call_timeout=0.2) as client:
        monkeypatch.setattr(client._connections, "action", lambda kind, body: asked.append(body) or [status.raw])
        client.job(job.id).wait()
        assert asked[-1]["wait_seconds"] == 0.1


def test_a_result_and_its_explanation_say_what_the_transfer_took(client: dovetail.Client) -> None:
    rows = 1_000_000
    client.put("a", {"k": np.arange(rows)})
    with client.join("a", "a", on="k").wait() as result:
        assert result.transfer is None
        before = result.explain()
        assert before["transfer"] is None and "fetched" not in before.text
        result.table()
        took = result.transfer
        assert took is not None and took.done and took.seconds > 0
        assert took.rows == rows and took.bytes >= 8 * rows
        # The result has 8 MB, and a stream of its own for each 4 MiB.
        assert took.streams == 2 and took.summary.endswith("/s, 2 streams")
        after = result.explain()
        told = after["transfer"]
        assert told["streams"] == 2 and told["bytes"] > 8 * rows and told["seconds"] > 0
        times = [told[f"{part}_seconds"] for part in ("join", "encode", "write", "client")]
        assert 0 < sum(times) <= 2 * told["seconds"] + 1e-6, told
        assert told[f"{told['bound']}_seconds"] == max(times)
        assert "\nfetched: 7." in after.text and " by 2 streams" in after.text and "; bound by " in after.text


def test_a_counting_job_is_shown_as_a_count() -> None:
    said = {"job": 7, "state": "complete", "left": "a", "how": "inner", "right": "b", "strategy": "hash", "rows": 1}
    counts, makes = (dovetail.JobStatus.from_json({**said, "count": count}) for count in (True, False))
    assert counts.counts and not makes.counts
    assert (repr(counts), repr(makes)) == ("<JobStatus 7: complete>", "<JobStatus 7: complete, 1 row>")
    heading, counted, made = repr(Jobs([counts, makes])).splitlines()
    assert counted.split()[3:7] == ["count", "of", "a", "inner"] and not counted.endswith("1")
    assert made.split()[3:] == ["a", "inner", "b", "hash", "1"] and "rows" in heading


def test_count_returns_the_number_of_rows_of_a_join(client: dovetail.Client) -> None:
    client.put("few", {"k": [1, 2, 3, None], "a": ["x", "y", "z", "n"]})
    client.put("many", {"k": [2, 2, 3, 4, None], "b": [1, 2, 3, 4, 5]})
    for how, expected in {"inner": 3, "left": 5, "full": 7, "left_anti": 2, "right_semi": 3}.items():
        assert client.count("few", "many", on="k", how=how) == expected == client.join("few", "many", "k", how).num_rows
    assert client.count("few", "many", left_on="k", right_on="k", nulls_equal=True, strategy="sort-merge") == 4
    with pytest.raises(dovetail.NotFound):
        client.count("few", "none", on="k")
    with pytest.raises(TypeError, match="columns"):
        client.count("few", "many", on="k", columns=["a"])  # type: ignore[call-arg]


def test_explain_shows_the_plan_and_after_the_run_the_measurements(client: dovetail.Client) -> None:
    client.put("a", {"k": list(range(1000)), "a": list(range(1000))})
    before = client.explain("a", "a", on="k", strategy="sort-merge")
    assert "sort-merge" in str(before)
    assert len(before) > 0
    assert before._repr_html_().startswith("<pre>")
    with client.join("a", "a", on="k") as result:
        result.wait()
        after = str(result.explain())
    assert any(strategy in after for strategy in ("hash", "sort-merge"))


def test_explain_of_a_join_that_does_not_fit_shows_the_plan_and_the_reason(start: Callable[..., Server]) -> None:
    server = start(devices="host:1", device_memory="64KiB", host_memory="256MiB")
    with server.connect() as client:
        client.put("a", {"k": list(range(50_000))})
        plan = client.explain("a", "a", on="k")
        assert plan["strategy"] and plan["phases"]
        assert "needs at least" in plan["refusal"] and "--device-memory" in plan["refusal"]
        assert plan["refusal"] in repr(plan)
        with pytest.raises(dovetail.Exhausted, match="--device-memory"):
            client.join("a", "a", on="k").wait()
        client.put("b", {"k": [1]})
        assert client.explain("b", "b", on="k")["refusal"] is None


def test_objects_are_readable_in_a_notebook(client: dovetail.Client) -> None:
    assert repr(client.tables()) == "no tables"
    client.put("a<b>", {"k": [1, 2, 3]})
    client.put("wide", {f"column_{index}": [1] for index in range(100)})
    assert repr(client.tables()).splitlines()[:2] == [
        "table  rows  bytes  columns",
        "a<b>      3   24 B  k: int64",
    ]
    assert repr(client.tables()).splitlines()[2].endswith("column_3: int64, ... 96 more")
    assert "a&lt;b&gt;" in client.tables()._repr_html_() and "column_99" in client.tables()._repr_html_()
    assert repr(client.tables()[0]) == "<TableInfo a<b>: 3 rows, 24 B; k: int64>"
    assert "<td" in client.tables()[0]._repr_html_() and "a&lt;b&gt;: 3 rows" in client.tables()[0]._repr_html_()
    with client.join("a<b>", "a<b>", on="k") as result:
        result.wait()
        job = result.job_id
        assert repr(result) == f"<Result of job {job}: complete, 3 rows; k: int64>"
        assert f"Result of job {job}" in result._repr_html_() and "<table>" in result._repr_html_()
        assert repr(result.job) == f"<Job {job}: complete, 3 rows>"
        assert repr(result.status()) == f"<JobStatus {job}: complete, 3 rows>"
        shown = repr(client.jobs()[-1:]).splitlines()
        assert shown[0].split() == ["job", "state", "done", "join", "strategy", "rows"]
        assert shown[1].split()[:6] == [str(job), "complete", "100%", "a<b>", "inner", "a<b>"]
        assert "a&lt;b&gt; inner" in client.jobs()._repr_html_()
    assert client.uri in repr(client)


def test_topology_and_server_info_are_mappings_and_shown_as_text(client: dovetail.Client) -> None:
    topology, info = client.topology(), client.server_info()
    assert repr(topology) == topology["text"].rstrip() and "host:0" in repr(topology)
    assert "<pre>" in topology._repr_html_()
    lines = repr(info).splitlines()
    assert lines[0].split() == ["name", "dovetail"]
    assert any(line.split() == ["host", "memory", "bytes", "1.0", "GiB"] for line in lines), lines
    assert dict(info)["strategies"] == info["strategies"] and len(info) == len(list(info))


def test_results_of_a_closed_client_are_shown_as_closed(server: Server) -> None:
    with server.connect() as client:
        client.put("a", {"k": [1]})
        result = client.join("a", "a", on="k").wait()
        client.drop("a")
        result.close()
    assert "closed" in repr(result) and "closed" in repr(result.job)


def test_progress_bars_go_to_standard_error(client: dovetail.Client, capsys: pytest.CaptureFixture[str]) -> None:
    client.put("a", {"k": list(range(1000))}, progress=True)
    client.join("a", "a", on="k", progress=True).close()
    written = capsys.readouterr()
    assert written.out == ""
    assert "put a" in written.err and "1,000 rows" in written.err and "job" in written.err


def test_fetching_shows_the_fetched_rows_and_the_total(client: dovetail.Client) -> None:
    rows = 300_000
    client.put("a", {"k": np.arange(rows)})
    states: list[dovetail.FetchProgress] = []

    def check() -> None:
        assert states[-1].done and states[-1].rows == rows and states[-1].fraction == 1.0
        assert all(state.rows_total == rows for state in states)
        assert [state.rows for state in states] == sorted(state.rows for state in states)
        states.clear()

    client.get("a", progress=states.append)
    check()
    with client.join("a", "a", on="k") as result:
        result.wait().table(progress=states.append)
        check()


def test_progress_is_shown_with_rates_and_the_time_left() -> None:
    fetching = dovetail.FetchProgress(250, 1 << 20, 1000, 2.0)
    assert fetching.summary == "250 rows, 1.0 MiB, 512.0 KiB/s, 6 s left"
    assert dovetail.UploadProgress(250, 1 << 20, None, 2.0).fraction is None
    answer = {"job": 7, "state": "running", "progress": 0.25, "rows": 1000, "bytes": 3 << 20, "run_seconds": 1.5}
    running = dovetail.JobStatus.from_json(answer)
    assert repr(running) == "<JobStatus 7: running, 1,000 rows, 2.0 MiB/s, 5 s left, 25%>"
    just_begun = dovetail.JobStatus.from_json({"job": 7, "state": "running", "progress": 0, "run_seconds": 0.01})
    assert just_begun.summary == "running, 0 rows" and just_begun.seconds_left is None


def test_a_waiting_job_reports_the_reason_and_its_predicted_start(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start(topology=slow_devices(tmp_path, "4MB/s", "4MB/s"), host_memory="1GiB")
    client = server.connect()
    client.put("a", {"k": np.zeros(20_000, np.int64), "v": np.arange(20_000)})
    # Both devices are taken by joins of 400 million rows.
    running = [client.join("a", "a", on="k", devices=1, retain_seconds=0) for _ in range(2)]
    server.wait_for(lambda: all(result.status().state == "running" for result in running), "both joins to run")
    first, second = (client.join("a", "a", on="k", devices=1, retain_seconds=0) for _ in range(2))
    statuses = [first.status(), second.status()]
    assert [status.state for status in statuses] == ["queued", "queued"]
    assert [status.queue_position for status in statuses] == [0, 1]
    for status in statuses:
        assert "host:" in str(status.waiting_for)
        assert status.predicted_start is not None and status.start_in is not None
        assert f", waits for {status.waiting_for}, starts " in status.summary
    assert [status.summary.split(", ")[0] for status in statuses] == ["next in the queue", "queued behind 1"]
    heading, *lines = repr(client.jobs()).splitlines()
    assert heading.split("  ")[-1] == "waiting for" and "behind" in heading and "starts in" in heading
    assert "queued" in lines[-1] and "host" in lines[-1], lines
    for result in (first, second, *running):
        result.cancel()
    assert first.status().waiting_for is None
    client.close()


def test_server_info_has_name_and_version_and_the_topology_has_devices(client: dovetail.Client) -> None:
    info = client.server_info()
    assert info["name"] == "dovetail"
    assert info["version"]
    assert len(client.topology()["devices"]) == 2


def test_several_threads_share_a_client(client: dovetail.Client) -> None:
    client.put("a", {"k": list(range(1000))})
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            client.put(f"t{index}", {"k": list(range(index * 10, index * 10 + 100))})
            with client.join("a", f"t{index}", on="k") as result:
                assert result.table().num_rows == 100
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_closed_client_reports_that_it_is_closed(server: Server) -> None:
    client = server.connect()
    client.close()
    with pytest.raises(dovetail.Unavailable, match="closed"):
        client.tables()


def test_an_address_without_a_server_is_unavailable() -> None:
    with pytest.raises(dovetail.Unavailable):
        dovetail.connect("grpc://127.0.0.1:1")
    wrong = ["", " ", "ftp://somewhere", "grpc://", "somewhere:port", "grpc://somewhere:99999", "::1:8815", "a b:1"]
    wrong += ["grpc://ann:secret@somewhere", "grpc://somewhere/table", "grpc://somewhere?token=x"]
    for uri in wrong:
        with pytest.raises(ValueError, match="is not the address of a server; write one such as grpc://"):
            dovetail.connect(uri)


def test_an_address_is_shown_as_it_was_written(start: Callable[..., Server]) -> None:
    with pytest.raises(dovetail.Unavailable, match=r"cannot reach a server at \[::1\]:1: "):
        dovetail.connect("grpc://[::1]:1")
    port = start(listen="[::]:0", insecure=True, devices="host:1", host_memory="256MiB").address.rpartition(":")[2]
    for uri in (f"grpc://[::1]:{port}", f"[::1]:{port}", f"localhost:{port}", f"grpc://127.0.0.1:{port}/"):
        with dovetail.connect(uri, timeout=WAIT_SECONDS) as client:
            assert repr(client) == f"<Client of {uri}>"
            with dovetail.connect(client.uri, timeout=WAIT_SECONDS) as again:
                assert again.server_info()["name"] == "dovetail"


def test_tables_are_found_by_name(client: dovetail.Client) -> None:
    client.put("t", TABLE)
    tables = client.tables()
    assert tables["t"].rows == 4 and tables["t"] is tables[0]
    assert "t" in tables and tables[0] in tables and "u" not in tables and 3 not in tables
    with pytest.raises(dovetail.NotFound, match="there is no table 'u' in this list; there are t$"):
        tables["u"]
    client.put("a b,c", TABLE)
    with pytest.raises(dovetail.NotFound, match=r'there are "a b,c", t; did you mean "t"\?$'):
        client.tables()["T"]


def test_the_port_of_metrics_is_recognized(server: Server) -> None:
    assert server.admin is not None
    with pytest.raises(dovetail.Unavailable, match="no Flight server at .*; check the address .the port of metrics"):
        dovetail.connect(server.admin)


def test_a_web_server_is_recognized() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as web:
        thread = threading.Thread(target=web.serve_forever, daemon=True)
        thread.start()
        address = f"127.0.0.1:{web.server_port}"
        with pytest.raises(dovetail.Unavailable, match=f"^there is no Flight server at {address}; check"):
            dovetail.connect(f"grpc://{address}")
        web.shutdown()
        thread.join()


def test_an_unknown_host_is_named() -> None:
    for scheme in ("grpc", "grpc+tls"):
        with pytest.raises(
            dovetail.Unavailable, match=r"the host no-such-host\.invalid cannot be found; check"
        ) as failed:
            dovetail.connect(f"{scheme}://no-such-host.invalid:8815")
        assert "resolving" not in str(failed.value) and "field:" not in str(failed.value)


@pytest.mark.parametrize("status", ["internal", "unavailable"])
@pytest.mark.parametrize(
    "said",
    [
        "table orders has no column name=foo",
        "name=foo",
        "reading the part of name=foo: the lookup failed for bar: it is gone",
        "the upload met errors resolving foo: it is gone",
        "errors resolving",
        "the table of Domain name not found",
    ],
)
def test_a_server_error_about_names_is_not_taken_for_an_unknown_host(status: str, said: str) -> None:
    failed = pyarrow.flight.FlightServerError(f"Flight returned {status} error, with message: {said}")
    ours = dovetail.errors.from_arrow(failed)
    assert isinstance(ours, (dovetail.InternalError, dovetail.Unavailable)) and str(ours) == said


def test_a_reader_that_is_left_early_ends_its_streams(server: Server, client: dovetail.Client) -> None:
    client.put("a", {"k": np.zeros(2000, np.int64), "v": np.arange(2000)})
    result = client.join("a", "a", on="k", retain_seconds=0)
    reader = result.reader()
    assert reader.read_next_batch().num_rows > 0
    del reader
    result.close()
    server.wait_for(lambda: result.status().done, "the job to end")


def test_a_join_that_makes_a_table_is_not_stopped_by_leaving_its_with_block(client: dovetail.Client) -> None:
    client.put("a", {"k": list(range(200_000))})
    with client.join("a", "a", on="k", into="kept") as result:
        job = result.job
    assert job.wait().state == "complete"
    assert client.get("kept").num_rows == 200_000


def test_a_token_is_not_sent_from_tls_to_a_location_without_tls() -> None:
    connections = Connections("grpc+tls://127.0.0.1:1", "secret", None, None, None, None)
    plain = pyarrow.flight.Location("grpc+tcp://127.0.0.1:2")
    with pytest.raises(dovetail.Unavailable, match="a token unencrypted"), connections.stream([plain]):
        pass
    connections.close()


def test_a_given_option_is_sent_even_if_it_is_the_default() -> None:
    """A session's options once won over an option that was given and happened to be the default."""
    unsaid = join_command("a", "b", "k")["join"]
    assert not {"strategy", "nulls_equal", "priority", "retain_seconds"} & set(unsaid)
    said = {"strategy": "auto", "nulls_equal": False, "priority": 0, "retain_seconds": 0}
    assert join_command("a", "b", "k", **said)["join"].items() >= said.items()


def test_the_options_of_a_join_override_its_session(server: Server, client: dovetail.Client) -> None:
    client.put("t", {"k": [1, None, 2]}, mode="replace")
    # The client has no sessions of its own: this one is opened, and named in every call, as other clients do.
    action = pyarrow.flight.Action("SetSessionOptions", SESSION_WITH_NULLS_EQUAL)
    with pyarrow.flight.connect(server.uri, middleware=[factory := Cookies()]) as bare:
        list(bare.do_action(action))
        assert factory.cookie is not None

        def rows(**options: object) -> int:
            command = json.dumps(join_command("t", "t", "k", **options)).encode()
            info = bare.get_flight_info(pyarrow.flight.FlightDescriptor.for_command(command))
            return sum(bare.do_get(endpoint.ticket).read_all().num_rows for endpoint in info.endpoints)

        assert rows() == 3, "the session says that nulls are equal"
        assert rows(nulls_equal=False) == 2
    client.drop("t")


def field(tag: int, value: bytes) -> bytes:
    """One length-delimited field of a protobuf message, of less than 128 bytes."""
    return bytes([tag << 3 | 2, len(value)]) + value


SESSION_WITH_NULLS_EQUAL = field(1, field(1, b"nulls_equal") + field(2, bytes([2 << 3, 1])))
"""A SetSessionOptionsRequest: one entry of the map, with a truth value."""


class Cookies(pyarrow.flight.ClientMiddlewareFactory):
    """Keeps the cookie of a session."""

    cookie: str | None = None

    def start_call(self, info: object) -> pyarrow.flight.ClientMiddleware:
        return Cookie(self)


class Cookie(pyarrow.flight.ClientMiddleware):
    """Of one call."""

    def __init__(self, factory: Cookies) -> None:
        super().__init__()
        self.factory = factory

    def sending_headers(self) -> dict[str, str]:
        return {"cookie": self.factory.cookie} if self.factory.cookie else {}

    def received_headers(self, headers: dict[str, list[str]]) -> None:
        for cookie in headers.get("set-cookie", []):
            self.factory.cookie = cookie.split(";")[0]


def test_a_reader_that_stops_early_does_not_end_a_join_with_a_retained_result(client: dovetail.Client) -> None:
    # 9 million rows: the join still runs when the first of them are there.
    client.put("pairs", pa.table({"k": pa.array([1] * 3000, pa.int32()), "v": pa.array(range(3000), pa.int32())}))
    result = client.join("pairs", "pairs", on="k")
    for _ in result.reader():
        break
    assert result.table().num_rows == 9_000_000
    result.close()


def test_a_second_read_of_a_consumed_result_reports_that_it_was_released(client: dovetail.Client) -> None:
    client.put("once", pa.table({"k": range(1000)}))
    result = client.join("once", "once", on="k", retain_seconds=0)
    assert result.table().num_rows == 1000
    with pytest.raises(dovetail.FailedPrecondition, match="read already|was released"):
        result.table()
