"""A file is the same table to the command line and to the Python client: each of the corpus goes through both."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import corpus
import dovetail
from harness import Server, command_line, csv_flags

GROUPS: dict[str, Callable[[Path], Iterator[corpus.File]]] = {
    "types in Parquet": lambda _: corpus.types_in_parquet(),
    "types in Arrow": lambda _: corpus.types_in_arrow(),
    "encodings": lambda _: corpus.encodings(),
    "Arrow schemas in Parquet": lambda _: corpus.arrow_schemas(),
    "INT96": lambda _: corpus.int96(),
    "batches": lambda _: corpus.batches(),
    "names": lambda _: corpus.names(),
    "damaged": lambda _: corpus.damaged(),
    "other writers": lambda folder: corpus.other_writers(str(folder)),
    "CSV": lambda _: corpus.random_csv(0, 150),
}

# Random CSV often has several faults, and the clients may meet different ones first. `tests/csv` has single ones.
MANY_FAULTS = {"CSV"}


@pytest.mark.parametrize("group", GROUPS)
def test_both_clients_read_the_same_table_or_refuse_the_file_for_the_same_reason(
    server: Server, client: dovetail.Client, tmp_path: Path, group: str
) -> None:
    files = {}
    for number, file in enumerate(GROUPS[group](tmp_path)):
        path = tmp_path / f"f{number}{file.extension}"
        path.write_bytes(file.content)
        files[path] = file
    assert len(files) > 10
    by_python = {path: read_by_python(client, path, file.options) for path, file in files.items()}
    different = {}
    for options, paths in itertools.groupby(files, lambda path: files[path].options):
        different |= compared(server, client, list(paths), options, by_python, group not in MANY_FAULTS)
    assert not different, "\n".join(f"{files[path].about}{path.suffix}: {what}" for path, what in different.items())


def read_by_python(client: dovetail.Client, path: Path, options: dict[str, Any]) -> pa.Table | str:
    """Returns the table that a file becomes, or the error."""
    try:
        client.put(table_of(path), path, **options)
    except (ValueError, dovetail.Error) as error:
        return str(error)
    return taken(client, path)


def taken(client: dovetail.Client, path: Path) -> pa.Table:
    """Returns the table of a file, and drops it."""
    table = client.get(table_of(path))
    client.drop(table_of(path))
    return table


def table_of(path: Path) -> str:
    """The name that the command line gives the table of a file."""
    return path.name.split(".")[0]


def compared(
    server: Server,
    client: dovetail.Client,
    paths: list[Path],
    options: dict[str, Any],
    by_python: dict[Path, pa.Table | str],
    has_reasons: bool,
) -> dict[Path, str]:
    """Reads files by the command line, and returns the differences to what Python read.

    `has_reasons`: errors must be for the same reason.
    """
    different = {}
    # One command uploads all tables; commands of their own show which failed.
    all_read = [path for path in paths if isinstance(by_python[path], pa.Table)]
    together = len(all_read) > 1 and command_line(server, "put", *all_read, *csv_flags(options)).returncode == 0
    for path in paths:
        mode = () if together and path in all_read else ("put", path, "--mode", "replace", *csv_flags(options))
        failed = command_line(server, *mode) if mode else None
        python = by_python[path]
        if failed is None or failed.returncode == 0:
            table = taken(client, path)
            what = f"refused by Python: {python}" if isinstance(python, str) else difference(table, python)
        elif isinstance(python, str):
            ours, theirs = meaning(failed.stderr.removeprefix("error: ")), meaning(python)
            what = None if ours == theirs or not has_reasons else f"two reasons:\n  {ours}\n  {theirs}"
        else:
            what = f"refused by the command line: {failed.stderr}"
        if what is not None:
            different[path] = what
    return different


def difference(ours: pa.Table, theirs: pa.Table) -> str | None:
    """Says how two tables differ; the order of rows and all types, names and metadata count."""
    if not ours.schema.equals(theirs.schema, check_metadata=True):
        return f"two schemas:\n{ours.schema}\n{theirs.schema}"
    if ours.num_rows != theirs.num_rows:
        return f"{ours.num_rows} and {theirs.num_rows} rows"
    for name, one, other in zip(ours.column_names, ours.columns, theirs.columns, strict=True):
        # NaN is not equal to itself, and dictionaries of batches may be put together in other ways.
        by_text = re.search("float|double|dictionary", str(one.type)) is not None
        if not one.equals(other) and not (by_text and repr(one.to_pylist()) == repr(other.to_pylist())):
            return f"two columns {name!r}:\n{one.combine_chunks()}\n{other.combine_chunks()}"
    return None


def meaning(sentence: str) -> str:
    """Returns what an error says first, without advice, in which options have other names, and a library's words."""
    first = re.split(r"; | \(|damaged: ", sentence.strip())[0]
    # Rust and Python escape characters and quote words in other ways.
    first = re.sub(
        r"\\u\{([0-9a-f]+)\}|\\x([0-9a-f]{2})|\\u([0-9a-f]{4})", lambda code: chr(int(code[code.lastindex], 16)), first
    )
    return re.sub(r"""["'\\]|--(no-)?""", "", first.replace("\\0", "\0")).replace("_", "-")


def test_values_without_text_are_shown_and_no_library_panics(
    server: Server, client: dovetail.Client, tmp_path: Path
) -> None:
    far, seconds = 1 << 62, pa.timestamp("s")
    columns = {
        "far": corpus.numbers_as(seconds, 0, far),
        "zone": corpus.numbers_as(pa.timestamp("s", "Nowhere/There"), 0, None),
        "taken": corpus.numbers_as(pa.duration("s"), 1, far),
        "nothing": pa.array([b"", None], pa.binary(0)),
        "lists": pa.array([[far], []], pa.list_(pa.int64())).cast(pa.list_(seconds)),
    }
    client.put("t", pa.table(columns))
    shown = command_line(server, "get", "t")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert [line.split() for line in shown.stdout.splitlines()[1:]] == [
        ["1970-01-01T00:00:00", "1970-01-01T00:00:00Z", "PT1S", f"[{far}", "s]"],
        [str(far), "s", "null", str(far), "s", "null", "[]"],
    ]
    advice = "write Arrow instead, for example with -o FILE.arrow, or select other columns with --columns"
    no_text = f"has a value without text, {far} s, in row 2 of a batch of 2 rows; {advice}"
    no_unit = f"which cannot hold {far} s, in row 2 of a batch of 2 rows; {advice}"
    for column, extension, what in (
        *(("far", ".csv", no_text), ("far", ".json", no_text), ("far", ".parquet", no_unit), ("far", ".arrow", None)),
        *(("zone", ".csv", "which cannot be written as CSV; write Parquet or Arrow"), ("zone", ".parquet", None)),
        *(("taken", ".csv", no_text), ("taken", ".json", no_text), ("taken", ".parquet", None)),
        *(
            ("nothing", ".parquet", "which cannot be written as Parquet; write Arrow or JSON instead"),
            ("nothing", ".csv", None),
        ),
        *(
            ("lists", ".parquet", "which cannot hold "),
            ("lists", ".json", f"without text, [{far} s], in row 1"),
            ("lists", ".arrows", None),
        ),
    ):
        path = tmp_path / f"{column}{extension}"
        written = command_line(server, "get", "t", "--columns", column, "-o", path)
        if what is None:
            assert written.returncode == 0, written.stderr
            continue
        assert written.returncode == 1 and not path.exists()
        assert written.stderr.startswith(f'error: writing {path}: column "{column}" '), written.stderr
        assert what in written.stderr and written.stderr.count("\n") == 1, written.stderr
