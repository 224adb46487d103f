"""Forms of the rows that the Python client sends to a join, and their types."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dovetail

KEYS = {"k": "int64"}


@pytest.fixture(autouse=True)
def kept(client: dovetail.Client) -> None:
    client.put("kept", {"k": list(range(100)), "v": list(range(100))}, mode="replace")


def chunks(tmp_path: Path) -> dict[str, Callable[[], object]]:
    """Forms of the keys 1, 2 and 300 in chunks."""
    (tmp_path / "keys.csv").write_text("k\n1\n2\n300\n")
    for number, keys in enumerate([[1, 2], [300]]):
        pq.write_table(pa.table({"k": keys}), tmp_path / f"{number}.parquet")
    files = [tmp_path / "0.parquet", str(tmp_path / "1.parquet")]
    halves = [{"k": [1, 2]}, {"k": [300]}]
    return {
        "tables": lambda: [pa.table(half) for half in halves],
        "tables of a generator": lambda: (pa.table(half) for half in halves),
        "pandas": lambda: (pd.DataFrame(half) for half in halves),
        "pandas of one file": lambda: pd.read_csv(tmp_path / "keys.csv", chunksize=1),
        # The types of a data frame are those of its values.
        "pandas of other types": lambda: [pd.DataFrame({"k": [1, 2]}), pd.DataFrame({"k": [300.0, None]})],
        "polars": lambda: [pl.DataFrame(half) for half in halves],
        "polars of a generator": lambda: pl.DataFrame({"k": [1, 2, 300]}).iter_slices(1),
        "files": lambda: files,
        "files of a generator": lambda: iter(files),
        "batches and a table": lambda: iter([pa.record_batch(halves[0]), pa.table(halves[1])]),
    }


def test_frames_tables_and_files_in_chunks_are_streamed_and_uploaded(client: dovetail.Client, tmp_path: Path) -> None:
    for name, rows in chunks(tmp_path).items():
        joined = client.stream_join("kept", rows(), on="k").read_all()
        assert sorted(joined["v"].to_pylist()) == [1, 2], name
        assert sorted(client.stream_join("kept", rows(), on="k", schema=KEYS).read_all()["v"].to_pylist()) == [1, 2]
        client.put("sent", rows(), mode="replace")
        assert client.get("sent")["k"].drop_null().to_pylist() == [1, 2, 300], name


def test_a_frame_is_joined_before_the_next_is_made(client: dovetail.Client) -> None:
    is_answered = threading.Event()

    def frames() -> Iterator[pd.DataFrame]:
        yield pd.DataFrame({"k": [1, 2]})
        assert is_answered.wait(60)
        yield pd.DataFrame({"k": [3]})

    with client.stream_join("kept", frames(), on="k") as reader:
        assert reader.read_next_batch().num_rows == 2
        is_answered.set()
        assert reader.read_all().num_rows == 1


def test_categories_are_streamed(client: dovetail.Client) -> None:
    client.put("names", {"name": ["a", "b"], "n": [1, 2]})
    text = pl.Series("name", ["a", "b", "x"])
    for frame in (text.cast(pl.Categorical).to_frame(), pd.DataFrame({"name": pd.Categorical(["a", "b", "x"])})):
        assert client.stream_join("names", frame, on="name").read_all().num_rows == 2
        schema = pa.RecordBatchReader.from_stream(pl.DataFrame(frame)).schema
        with client.open_stream("names", schema, on="name") as stream:
            assert stream.ask(pl.DataFrame(frame)).num_rows == 2


def test_rows_that_may_be_none_need_a_schema(client: dovetail.Client) -> None:
    for none in ([], iter(())):
        with pytest.raises(TypeError, match="is empty, and shows no columns; give .* schema="):
            client.stream_join("kept", none, on="k")
    for none in ([], iter(()), {"k": []}, pd.DataFrame({"k": []})):
        joined = client.stream_join("kept", none, on="k", how="left_anti", schema=KEYS)
        assert joined.read_all().num_rows == 100


def test_items_that_are_no_rows_are_refused_by_their_number(client: dovetail.Client) -> None:
    batch = pa.record_batch({"k": [1]})
    for wrong, what in ((None, "None"), (5, "an object of type int")):
        with pytest.raises(TypeError, match=f"item 1 of this one is {what}"):
            client.stream_join("kept", iter([wrong, batch]), on="k")
    for wrong, what in ((None, "None"), ({"k": 1}, "an object of type dict")):
        with pytest.raises(TypeError, match=f"item 2 of this one is {what}"):
            client.stream_join("kept", iter([batch, wrong]), on="k").read_all()
    with pytest.raises(TypeError, match="item 2 of this one is None"):
        client.stream_join("kept", [{"k": 1}, None], on="k", schema=KEYS)


def test_rows_of_a_question_take_the_types_of_the_stream(client: dovetail.Client) -> None:
    schema = pa.schema({"k": pa.int64(), "w": pa.float64()})
    narrow = pa.schema({"w": pa.float32(), "k": pa.int32()})
    with client.open_stream("kept", schema, on="k", how="right") as stream:
        for rows, expected in [
            ({"k": [], "w": []}, []),
            ([], []),
            ({"k": [None], "w": [None]}, [(None, None)]),
            ({"w": [1], "k": [7]}, [(7, 1.0)]),
            ([{"k": 7}, {"k": 8, "w": 2}], [(7, None), (8, 2.0)]),
            (pa.table({"w": [1.5], "k": [7]}, schema=narrow), [(7, 1.5)]),
            (pd.DataFrame({"k": [7.0, None], "w": [1, 2]}), [(7, 1.0), (None, 2.0)]),
            (pd.DataFrame({"k": [7], "w": [1]}, index=["x"]), [(7, 1.0)]),
            (pl.DataFrame({"k": [7], "w": [None]}), [(7, None)]),
        ]:
            found = stream.ask(rows)
            pairs = list(zip(found["k"].to_pylist(), found["w"].to_pylist(), strict=True))
            assert sorted(pairs, key=str) == expected, rows
            assert found.schema == stream.schema
        for rows, words in [
            ({"k": [1]}, "the rows have other columns: k instead of k, w"),
            ({"k": [1], "w": [1], "x": [1]}, "other columns: k, w, x instead of k, w"),
            ([{"k": 1, "x": 1}], "other columns: k, x instead of k, w"),
            (pa.table({"k": [1]}), "other columns: k instead of k, w"),
            ({"k": ["a"], "w": [1]}, "column 'k' has values that cannot be converted to int64"),
            ({"k": [1.5], "w": [1]}, "column 'k' has values that cannot be converted to int64"),
            (pa.table({"k": [1.5], "w": [1]}), "column 'k' has values that cannot be converted to int64"),
        ]:
            with pytest.raises(dovetail.InvalidRequest, match=words):
                stream.ask(rows)
        with pytest.raises(TypeError, match="None is not a table"):
            stream.ask(None)
        assert stream.ask({"k": [1], "w": [1]}).num_rows == 1, "none of these ends the stream"


@pytest.mark.parametrize("wrong", ["k", ["k"], pa.table({"k": [1]}), None])
def test_a_schema_that_is_none_is_refused(client: dovetail.Client, wrong: object) -> None:
    with pytest.raises(TypeError, match=r"schema is .* it takes a pyarrow schema, or a mapping of names to types"):
        client.open_stream("kept", wrong, on="k")
    with pytest.raises(TypeError, match=r"schema is .* it takes a pyarrow schema"):
        client.prepare("kept", wrong, on="k", keep_seconds=9)


def test_a_mapping_of_types_is_a_schema(client: dovetail.Client) -> None:
    with pytest.raises(ValueError, match="schema gives 'integer' for column 'k'"):
        client.open_stream("kept", {"k": "integer"}, on="k")
    client.prepare("kept", {"k": pa.int64()}, on="k", keep_seconds=60)
    with client.open_stream("kept", {"k": "int64"}, on="k") as stream:
        assert stream.sent_schema == pa.schema({"k": pa.int64()})
        assert [kept["streams"] for kept in client.prepared()] == [1]
    client.release_prepared(client.prepared()[0]["prepared"])
