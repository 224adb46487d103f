"""CSV means the same to the command line and to the Python client: the cases of ``tests/csv`` go through both."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dovetail
from harness import ROOT, Server, command_line, csv_flags

CASES: list[dict[str, Any]] = json.loads((ROOT / "tests" / "csv" / "cases.json").read_text())

TYPES = {
    "int64": pa.int64(),
    "uint8": pa.uint8(),
    "float16": pa.float16(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "string": pa.string(),
    "large_string": pa.large_string(),
    "string_view": pa.string_view(),
    "date": pa.date32(),
    "date64": pa.date64(),
    "time32(s)": pa.time32("s"),
    "time32(ms)": pa.time32("ms"),
    "time64(us)": pa.time64("us"),
    "time64(ns)": pa.time64("ns"),
    "timestamp": pa.timestamp("us"),
    "timestamp(ns)": pa.timestamp("ns"),
    "timestamp(us, UTC)": pa.timestamp("us", "UTC"),
    "timestamp(ns, UTC)": pa.timestamp("ns", "UTC"),
    "timestamp(ms, Europe/Berlin)": pa.timestamp("ms", "Europe/Berlin"),
    "timestamp(s, +02:00)": pa.timestamp("s", "+02:00"),
    "decimal(9,2)": pa.decimal128(9, 2),
    "decimal(9,3)": pa.decimal128(9, 3),
    "decimal(38,0)": pa.decimal128(38, 0),
    "decimal(38,38)": pa.decimal128(38, 38),
}


@pytest.fixture(params=CASES, ids=[case["name"] for case in CASES])
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


def write(case: dict[str, Any], folder: Path) -> Path:
    path = folder / case.get("file", "t.csv")
    data = case["text"].encode(case.get("encoding", "utf-8"))
    data = gzip.compress(data) if path.suffix == ".gz" and not case.get("plain") else data
    if place := case.get("damage"):
        data = data[:place] + b"\xff" * 4 + data[place + 4 :]
    path.write_bytes(data[: case.get("cut")] + case.get("more", "").encode("latin-1"))
    return path


def test_csv_becomes_the_same_table_by_command_line_and_python(
    server: Server, client: dovetail.Client, tmp_path: Path, case: dict[str, Any]
) -> None:
    path = write(case, tmp_path)
    by_cli = command_line(server, "put", path, "--table", "cli", *csv_flags(case))
    options = {
        name: case[name] for name in ("types", "delimiter", "header", "infer_rows", "null_values") if name in case
    }
    if "error" in case:
        with pytest.raises(ValueError) as refused:
            client.put("python", path, **options)
        assert type(refused.value) is ValueError, "it is said by this client and not by pyarrow"
        # What is wrong with the arguments is wrong with any file.
        is_of_types = case.get("is_of_types", False)
        assert by_cli.returncode == (2 if is_of_types else 1)
        # The one quotes values as Rust does, the other as Python does.
        sentences = (str(refused.value), by_cli.stderr.strip().removeprefix("error: "))
        for said in (sentence.replace('"', "'") for sentence in sentences):
            assert is_of_types or (said.startswith(f"reading {path}: ") and "\n" not in said)
            assert [words for words in case["error"] if words not in said] == [], said
            assert [words for words in case.get("not", []) if words in said] == [], said
        assert len(client.tables()) == 0
        return
    assert by_cli.returncode == 0, by_cli.stderr
    client.put("python", path, **options)
    expected = {name: (TYPES[kind], values) for name, (kind, values) in case["columns"].items()}
    for table in (client.get("cli"), client.get("python")):
        assert {field.name: field.type for field in table.schema} == {
            name: kind for name, (kind, _) in expected.items()
        }
        for name, (kind, values) in expected.items():
            # By their text, since NaN is not equal to itself.
            assert list(map(str, whole(table[name]).to_pylist())) == list(map(str, shown(kind, values))), name


def whole(values: Any) -> Any:
    """Values that Python has all digits of: its times have six."""
    return values.cast(pa.int64()) if pa.types.is_time64(values.type) else values


def shown(kind: pa.DataType, values: list[str | None]) -> list[Any]:
    """The values of a case, as pyarrow's own types show them."""
    if pa.types.is_boolean(kind):
        return [value and value == "True" for value in values]
    if pa.types.is_time(kind):
        # pyarrow makes them of no text.
        stamps = pa.array([value and f"1970-01-01 {value}" for value in values]).cast(pa.timestamp(kind.unit))
        return whole(stamps.cast(kind)).to_pylist()
    return [None if value is None else pa.scalar(value).cast(kind).as_py() for value in values]
