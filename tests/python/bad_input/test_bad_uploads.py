"""Uploads that contradict a table, their own options, or themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dovetail
from harness import Server
from raw import Raw, messages
from refusals import TABLE, refused, refused_raw


def test_a_duplicate_upload_is_refused_and_changes_nothing(client: dovetail.Client) -> None:
    client.put("a", TABLE)
    with refused(dovetail.AlreadyExists, '"a"', "replace"):
        client.put("a", TABLE.slice(0, 1))
    assert client.get("a").num_rows == 3


def test_appending_to_a_missing_table_is_not_found(client: dovetail.Client) -> None:
    with refused(dovetail.NotFound, '"a"'):
        client.put("a", TABLE, mode="append")


def test_appending_another_schema_is_refused_and_changes_nothing(client: dovetail.Client) -> None:
    client.put("a", TABLE)
    with refused(dovetail.InvalidRequest, 'do not fit table "a"', "int64", "string", "mode replace"):
        client.put("a", {"k": ["x"]}, mode="append")
    assert client.get("a").equals(TABLE)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("", "names no table; a path has one part, the table's name"),
        ("x" * 256, "has 256 bytes; a name has 1 to 255 bytes and no control characters"),
        ("two\nlines", "has a control character in it; a name has 1 to 255 bytes and no control characters"),
        ("bell\a", "has a control character in it; a name has 1 to 255 bytes and no control characters"),
    ],
)
def test_an_invalid_table_name_is_refused(client: dovetail.Client, name: str, sentence: str) -> None:
    with refused(dovetail.InvalidRequest, sentence):
        client.put(name, TABLE)


@pytest.mark.parametrize(
    ("options", "word"), [(b'{"mode": "overwrite"}', "overwrite"), (b'{"mood": "replace"}', "mood")]
)
def test_unknown_options_are_refused(server: Server, client: dovetail.Client, options: bytes, word: str) -> None:
    sent = messages(TABLE, "a")
    with Raw(server.address) as raw, refused_raw(grpc.StatusCode.INVALID_ARGUMENT, word):
        raw.put([replace(sent[0], app_metadata=options), *sent[1:]])
    assert len(client.tables()) == 0


def test_options_that_come_too_late_are_refused(server: Server, client: dovetail.Client) -> None:
    """Regression test: they were ignored, and the table was created instead of replaced."""
    client.put("a", TABLE)
    sent, late = messages(TABLE, "b", max_chunksize=1), b'{"mode": "replace"}'
    with Raw(server.address) as raw:
        for at in range(1, len(sent)):
            with refused_raw(grpc.StatusCode.INVALID_ARGUMENT, 'table "b"', "app_metadata of the first message"):
                raw.put([*sent[:at], replace(sent[at], app_metadata=late), *sent[at + 1 :]])
    writer, _ = flight.connect(server.uri).do_put(flight.FlightDescriptor.for_path("b"), TABLE.schema)
    with refused(dovetail.InvalidRequest, "the header dovetail-upload-options"), dovetail.errors.translated():
        writer.write_with_metadata(TABLE.to_batches()[0], late)
        writer.close()
    assert [table.name for table in client.tables()] == ["a"]


def test_rows_that_are_not_sorted_as_declared_are_refused(client: dovetail.Client) -> None:
    with refused(dovetail.InvalidRequest, "not sorted by k", "row 3"):
        client.put("a", {"k": [1, 3, 2]}, sorted_by="k")


def test_a_column_that_is_declared_twice_is_refused(client: dovetail.Client) -> None:
    for declared in ({"sorted_by": ["k", "k"]}, {"unique": [["k", "s", "k"]]}):
        with refused(dovetail.InvalidRequest, next(iter(declared)), 'column "k" is named twice'):
            client.put("a", TABLE, **declared)
    assert len(client.tables()) == 0


def test_duplicate_column_names_are_refused(client: dovetail.Client) -> None:
    with refused(dovetail.InvalidRequest, '"k"'):
        client.put("a", pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["k", "k"]))


def test_a_failed_source_leaves_no_table(client: dovetail.Client) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        for _ in range(10):
            yield pa.record_batch({"k": np.arange(100_000)})
        raise RuntimeError("the disk is on fire")

    for streams in (1, 3):
        with pytest.raises(RuntimeError, match="on fire"):
            client.put("a", batches(), streams=streams)
        assert len(client.tables()) == 0


def test_committing_or_aborting_an_unknown_upload_is_not_found(server: Server, client: dovetail.Client) -> None:
    connection = flight.connect(server.uri)
    for action in ("commit_upload", "abort_upload"):
        with refused(dovetail.NotFound, '"no such upload"'), dovetail.errors.translated():
            list(connection.do_action(flight.Action(action, b'{"upload": "no such upload"}')))


def test_a_schema_that_changes_in_mid_stream_is_refused(server: Server, client: dovetail.Client) -> None:
    first, second = messages(TABLE, "a"), messages(pa.table({"k": ["x"]}), "a")
    with Raw(server.address) as raw:
        with refused_raw(grpc.StatusCode.INVALID_ARGUMENT, "schema changed", "k string", "k int64"):
            raw.put([*first, replace(second[0], descriptor=b""), *second[1:]])
        # A batch of another schema without its schema: two buffers too few.
        with refused_raw(grpc.StatusCode.INVALID_ARGUMENT, '"s"', "fewer arrays"):
            raw.put([*first, *second[1:]])
    assert len(client.tables()) == 0
