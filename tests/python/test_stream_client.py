"""The Python client's readers and questions of joins whose rows arrive: their end, threads and limits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import polars as pl
import pyarrow as pa
import pytest

import dovetail
from harness import Server

KEYS = {"k": "int64"}


@pytest.fixture(autouse=True)
def kept(client: dovetail.Client) -> None:
    client.put("kept", {"k": list(range(100)), "v": list(range(100))}, mode="replace")


class Endless:
    """Batches without end, and whether their source is still asked for them."""

    def __init__(self) -> None:
        self.taken = 0
        self.is_ended = threading.Event()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        try:
            while True:
                self.taken += 1
                yield pa.record_batch({"k": [1, 2, 1000]})
        finally:
            self.is_ended.set()


def running(client: dovetail.Client) -> list[int]:
    return [job.id for job in client.jobs() if job.state == "running"]


def close(reader: dovetail.JoinReader, client: dovetail.Client) -> None:
    reader.close()


def leave(reader: dovetail.JoinReader, client: dovetail.Client) -> None:
    with reader as same:
        assert same.read_next_batch().num_rows > 0


def close_client(reader: dovetail.JoinReader, client: dovetail.Client) -> None:
    client.close()


@pytest.mark.parametrize("end", [close, leave, close_client])
@pytest.mark.parametrize("reads", [0, 3])
def test_what_closes_a_reader_ends_its_join(
    server: Server, client: dovetail.Client, end: Callable[..., None], reads: int
) -> None:
    rows = Endless()
    other = server.connect()
    reader = other.stream_join("kept", iter(rows), on="k")
    assert running(client) == [reader.job.id]
    for _ in range(reads):
        assert reader.read_next_batch().num_rows > 0
    end(reader, other)
    for read in (reader.read_next_batch, reader.read_all, lambda: next(reader)):
        with pytest.raises(dovetail.Cancelled, match="the stream is closed"):
            read()
    server.wait_for(lambda: not running(client), "the join to end")
    if reads:
        assert rows.is_ended.wait(60), "its rows are asked for after its end"
    reader.close()
    other.close()


def test_a_reader_that_is_dropped_ends_its_join(server: Server, client: dovetail.Client) -> None:
    rows = Endless()
    for batch in client.stream_join("kept", iter(rows), on="k"):
        assert batch.num_rows > 0
        break
    server.wait_for(lambda: not running(client), "the join to end")
    assert rows.is_ended.wait(60)
    stream = client.open_stream("kept", KEYS, on="k")
    assert running(client) == [stream.job.id]
    del stream
    server.wait_for(lambda: not running(client), "the stream to end")


def test_a_thread_may_close_what_another_reads(server: Server, client: dovetail.Client) -> None:
    held = threading.Event()

    def quiet() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"k": [1]})
        held.wait()

    reader = client.stream_join("kept", quiet(), on="k")
    assert reader.read_next_batch().num_rows == 1
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(reader.read_next_batch)
        reader.close()
        with pytest.raises(dovetail.Cancelled, match="the stream is closed"):
            read.result(60)
    held.set()
    server.wait_for(lambda: not running(client), "the join to end")


def test_a_reader_that_has_read_all_stays_at_its_end(client: dovetail.Client) -> None:
    reader = client.stream_join("kept", {"k": [1, 2]}, on="k")
    assert pa.table(reader).num_rows == 2
    reader.close()
    assert reader.read_all().num_rows == 0
    assert client.stream_join("kept", {"k": [1, 2]}, on="k").read_pandas()["v"].sum() == 3
    assert pl.DataFrame(client.stream_join("kept", {"k": [1, 2]}, on="k")).height == 2
    strings = pa.schema({"k": pa.string(), "v": pa.int64()})
    assert client.stream_join("kept", {"k": [7]}, on="k").cast(strings).read_all()["k"].to_pylist() == ["7"]


def test_ctrl_c_ends_a_wait_for_rows(server: Server, client: dovetail.Client) -> None:
    is_reading, held = threading.Event(), threading.Event()

    def quiet() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"k": [1]})
        is_reading.wait()
        os.kill(os.getpid(), signal.SIGINT)
        held.wait()

    reader = client.stream_join("kept", quiet(), on="k")
    assert reader.read_next_batch().num_rows == 1
    with pytest.raises(KeyboardInterrupt):
        is_reading.set()
        reader.read_next_batch()
        pytest.fail("there are no further rows")
    with pytest.raises(dovetail.Cancelled):
        reader.read_next_batch()
    held.set()
    server.wait_for(lambda: not running(client), "the join to end")


def test_threads_that_share_a_stream_get_their_own_answers(client: dovetail.Client) -> None:
    with client.open_stream("kept", KEYS, on="k") as stream, ThreadPoolExecutor(8) as pool:
        keys = [number % 200 for number in range(800)]
        answers = list(pool.map(lambda key: stream.ask({"k": [key]})["v"].to_pylist(), keys))
        assert answers == [[key] if key < 100 else [] for key in keys]


def test_readers_and_streams_name_their_job(client: dovetail.Client) -> None:
    with client.open_stream("kept", KEYS, on="k") as stream:
        assert stream.job.status().state == "running"
        with client.stream_join("kept", iter(Endless()), on="k") as reader:
            assert reader.job.id != stream.job.id
            assert sorted(running(client)) == sorted([reader.job.id, stream.job.id])
            assert "hash" in str(reader.job.explain())
    assert stream.job.status().state != "running"


def test_the_limit_of_a_call_is_none_of_a_stream(start: Callable[..., Server]) -> None:
    limit = 3.0
    with (server := start(devices="host:1")).connect(call_timeout=limit) as client:
        client.put("kept", {"k": [1, 2]})
        pause = threading.Event()

        def slow() -> Iterator[pa.RecordBatch]:
            yield pa.record_batch({"k": [1]})
            pause.wait(limit + 0.5)
            yield pa.record_batch({"k": [2]})

        with client.open_stream("kept", KEYS, on="k") as stream:
            assert stream.ask({"k": [1]}).num_rows == 1
            assert client.stream_join("kept", slow(), on="k").read_all().num_rows == 2
            assert stream.ask({"k": [2]}).num_rows == 1, "it is older than the limit"
            server.process.send_signal(signal.SIGSTOP)
            try:
                with pytest.raises(dovetail.DeadlineExceeded, match="the answer to a question took longer than 3 s"):
                    stream.ask({"k": [2]})
                with pytest.raises(dovetail.DeadlineExceeded, match="opening the stream took longer than 3 s"):
                    client.open_stream("kept", KEYS, on="k")
            finally:
                server.process.send_signal(signal.SIGCONT)
            with pytest.raises(dovetail.Cancelled):
                stream.ask({"k": [2]})


def test_a_reader_is_the_rows_of_another_stream(server: Server, client: dovetail.Client) -> None:
    def rows(error: Exception | None) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"k": [1, 2]})
        if error is not None:
            raise error

    def chained(error: Exception | None) -> dovetail.JoinReader:
        return client.stream_join("kept", client.stream_join("kept", rows(error), on="k"), on="k")

    assert chained(None).read_all().num_rows == 2
    with pytest.raises(RuntimeError, match="no more rows"):
        chained(RuntimeError("no more rows")).read_all()
    with chained(None) as reader:
        assert reader.read_next_batch().num_rows > 0
    server.wait_for(lambda: not running(client), "both joins to end")


def test_all_names_of_the_package_exist() -> None:
    assert [name for name in dovetail.__all__ if not hasattr(dovetail, name)] == []
