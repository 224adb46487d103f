"""Joins with rows that are sent while their results arrive, against DuckDB."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.flight as flight
import pytest

import dovetail
import oracle
import tables
from harness import Server, clean, command_line, slow_devices
from oracle import HOWS, STRATEGIES
from test_oracle import RESULT_ROWS_MAX, random_case

CASES = 60


def cut(rng: tables.Rng, table: pa.Table) -> Iterator[pa.RecordBatch]:
    """The rows in batches of all sizes, empty ones too."""
    first = 0
    while first < table.num_rows:
        rows = int(rng.choice([0, 1, 100, 1000, 8192, 100_000]))
        yield from table.slice(first, rows).to_batches()
        first += rows


class Drawn(NamedTuple):
    """A random join, with its matching rows. The side ``stream`` is sent while it is joined with the other one."""

    case: oracle.Case
    rows: tuple[pa.Array, pa.Array]
    stream: Literal["left", "right"]
    kept: pa.Table
    sent: pa.Table


def drawn(rng: tables.Rng) -> Drawn | None:
    """A random join; none if its result is too large for a test."""
    case = random_case(rng)
    try:
        rows = oracle.matching_rows(case, RESULT_ROWS_MAX)
    except oracle.TooLarge:
        return None
    if rng.random() < 0.5:
        return Drawn(case, rows, "right", case.left, case.right)
    return Drawn(case, rows, "left", case.right, case.left)


@pytest.fixture(scope="module", params=["64MiB", "8MiB"])
def small_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("streams")
    with Server(folder, devices="host:2", device_memory=request.param, host_memory="1GiB") as server:
        yield server


@pytest.mark.parametrize("part", range(3))
def test_random_streams_agree_with_duckdb(small_server: Server, seed: int, part: int) -> None:
    checked = 0
    with small_server.connect() as client:
        for number in itertools.count():
            if number == CASES // 3:
                break
            rng = np.random.default_rng([seed, 40, part, number])
            if (join := drawn(rng)) is None:
                continue
            case, rows, stream, kept, sent = join
            client.put("kept", kept, mode="replace")
            strategy = str(rng.choice([*STRATEGIES, "auto"]))
            try:
                joined = client.stream_join(
                    "kept",
                    pa.RecordBatchReader.from_batches(sent.schema, cut(rng, sent)),
                    on=case.pairs(),
                    how=case.how,
                    stream=stream,
                    columns=case.columns,
                    nulls_equal=case.nulls_equal,
                    strategy=strategy,
                )
                oracle.check(case, joined.read_all(), rows)
            except dovetail.Exhausted as refused:
                # The build side may be too large for its part of a small device.
                assert "--device-memory" in str(refused), refused
                continue
            except Exception as error:
                raise AssertionError(f"case {number}, {stream} side, {strategy}: {case.story}: {error}") from error
            checked += 1
        clean(small_server, client)
    assert checked > CASES // 3 // 2


def numbers(rows: int) -> pa.Table:
    return pa.table({"k": np.arange(rows), "v": np.arange(rows) * 2})


@pytest.mark.parametrize("how", HOWS)
def test_a_result_comes_before_the_rows_end(client: dovetail.Client, how: str) -> None:
    client.put("kept", numbers(100))
    sent = threading.Event()

    def rows() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"k": [1, 1000], "w": [5, 6]})
        # The result of the first batch arrives while the second is not sent yet.
        assert sent.wait(60)
        yield pa.record_batch({"k": [2, 1001], "w": [7, 8]})

    with client.stream_join("kept", rows(), on="k", how=how) as joined:
        batches = []
        if how not in ("left_semi", "left_anti"):
            batches.append(joined.read_next_batch())
        sent.set()
        result = pa.Table.from_batches([*batches, *joined], joined.schema)
    expected = {"inner": 2, "left": 100, "right": 4, "full": 102, "left_semi": 2, "left_anti": 98}
    assert result.num_rows == expected.get(how, 2)
    client.drop("kept")


def test_every_form_of_rows_can_be_streamed(server: Server, client: dovetail.Client) -> None:
    client.put("kept", numbers(10))
    sent = pa.table({"k": [3, 4, 40], "w": [1.0, 2.0, 3.0]})
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    forms = [sent, sent.to_batches(), sent.to_reader(), {"k": [3, 4, 40], "w": [1.0, 2.0, 3.0]}, sent.to_pylist()]
    for rows in [*forms, pandas.DataFrame(sent.to_pydict()), polars.from_arrow(sent)]:
        joined = client.stream_join("kept", rows, on="k", columns=["k", "w"]).read_all()
        assert joined.sort_by("k").to_pydict() == {"k": [3, 4], "w": [1.0, 2.0]}, type(rows)
    counted = client.stream_join("kept", numbers(300_000), on="k").read_all()
    assert pc.sum(counted["k"]).as_py() == 45
    client.drop("kept")
    clean(server, client)


def test_rows_that_fail_end_the_join_with_their_error(server: Server, client: dovetail.Client) -> None:
    client.put("kept", numbers(10))

    def rows() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"k": [1]})
        raise RuntimeError("no more rows today")

    with pytest.raises(RuntimeError, match="no more rows today"):
        client.stream_join("kept", rows(), on="k").read_all()

    def other() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"k": [1]})
        yield pa.record_batch({"j": [1]})

    with pytest.raises(ValueError, match="schema of the batches changes"):
        client.stream_join("kept", other(), on="k").read_all()
    client.drop("kept")
    clean(server, client)


def test_a_reader_that_stops_early_ends_the_join(server: Server, client: dovetail.Client) -> None:
    client.put("kept", numbers(1000))
    endless = itertools.repeat(numbers(1000).to_batches()[0])
    joined = client.stream_join("kept", endless, on="k", columns=["k"])
    for _ in range(3):
        assert joined.read_next_batch().num_rows > 0
    assert [job.state for job in client.jobs() if job.state == "running"] == ["running"]
    joined.close()
    server.wait_for(lambda: not [job for job in client.jobs() if job.state == "running"], "the join to end")
    client.drop("kept")
    clean(server, client)


@pytest.mark.parametrize("how", ["inner", "right", "right_semi", "right_anti"])
def test_questions_are_answered_one_by_one(server: Server, client: dovetail.Client, how: str) -> None:
    client.put("kept", numbers(1000))
    schema = pa.schema({"k": pa.int64(), "w": pa.int64()})
    columns = ["right.k", "w"] if how in ("inner", "right") else None
    with client.open_stream("kept", schema, on="k", how=how, columns=columns) as stream:
        for first in (0, 990, 995, 2000, 5):
            keys = list(range(first, first + 10))
            answer = stream.ask({"k": keys, "w": keys})
            known = [key for key in keys if key < 1000]
            expected = {"right": keys, "right_anti": [key for key in keys if key >= 1000]}.get(how, known)
            assert answer.schema == stream.schema
            assert sorted(answer["w"].to_pylist()) == expected
        assert stream.ask(schema.empty_table()).num_rows == 0
        # A question of many megabytes.
        many = pa.table({"k": np.arange(2_000_000) % 2000, "w": np.arange(2_000_000)})
        assert stream.ask(many).num_rows == {"right": 2_000_000}.get(how, 1_000_000)
        with pytest.raises(dovetail.InvalidRequest, match="other columns"):
            stream.ask({"k": [1]})
        assert stream.ask({"k": [1001], "w": [3]}).num_rows == (how in ("right", "right_anti"))
    with pytest.raises(dovetail.Cancelled, match="closed"):
        stream.ask({"k": [1], "w": [1]})
    client.drop("kept")
    clean(server, client)


def test_metadata_comes_back_after_the_rows_of_its_batch(server: Server, client: dovetail.Client) -> None:
    client.put("kept", numbers(100))
    command = {"join": {"left": "kept", "right": "sent", "on": [{"left": "k", "right": "k"}], "stream": "right"}}
    descriptor = flight.FlightDescriptor.for_command(json.dumps(command).encode())
    raw = flight.connect(server.uri)
    writer, reader = raw.do_exchange(descriptor)
    with writer:
        writer.begin(pa.schema({"k": pa.int64()}))
        for number in range(20):
            batch = pa.record_batch({"k": [number, number + 1000]})
            if number % 3 == 0:
                writer.write_with_metadata(batch, pa.py_buffer(f"note {number}".encode()))
            else:
                writer.write_batch(batch)
        writer.done_writing()
        seen: list[int] = []
        notes = 0
        for chunk in reader:
            if chunk.app_metadata is None:
                seen += chunk.data["k"].to_pylist()
                continue
            assert chunk.data.num_rows == 0
            number = int(chunk.app_metadata.to_pybytes().split()[1])
            assert sorted(seen) == list(range(number + 1)), "all rows before the note, and no others"
            notes += 1
        assert (notes, len(seen)) == (7, 20)
    raw.close()
    client.drop("kept")
    clean(server, client)


def test_streams_of_one_join_share_its_build_side(tmp_path: Path) -> None:
    """Twelve of these build sides would need more memory than the device has, and there are 64 streams."""
    with Server(tmp_path, processors=2, devices="host:1", device_memory="48MiB", host_memory="1GiB") as server:
        with server.connect() as client, ExitStack() as stack:
            kept = numbers(100_000)
            client.put("kept", kept)
            schema = pa.schema({"k": pa.int64()})
            streams = [stack.enter_context(client.open_stream("kept", schema, on="k")) for _ in range(64)]
            for stream in streams:
                assert stream.ask({"k": [7, 99_999, 100_000]}).num_rows == 2
            held = server.device_used()
            assert 0 < held < 24 << 20, held
            # All at once, and again in turn.
            keys = [pa.table({"k": np.arange(at, 200_000, 64)}) for at in range(len(streams))]
            with ThreadPoolExecutor(len(streams)) as pool:
                answers = list(pool.map(lambda stream, of_stream: stream.ask(of_stream), streams, keys))
            for of_stream, answer in zip(keys, answers, strict=True):
                connection = duckdb.connect()
                connection.register("kept", kept)
                connection.register("rows", of_stream)
                expected = connection.sql("select kept.* from kept join rows using (k) order by k").to_arrow_table()
                assert answer.sort_by("k").equals(expected.cast(answer.schema)), answer
            # A join that needs the memory gets it, and the streams go on.
            sparse = np.arange(2_300_000) * 7_919_000_000_033 % (1 << 60)
            client.put("large", {"k": sparse, "v": np.arange(len(sparse))})
            with client.join("large", "large", on="k", columns=["k", "left.v"]) as joined:
                assert joined.table().num_rows == len(sparse)
            assert "leaves its device" in server.log()
            assert all(stream.ask({"k": [1, 2]}).num_rows == 2 for stream in streams)
            streams.pop().close()
            assert all(stream.ask({"k": [3]}).num_rows == 1 for stream in streams)
        with server.connect() as client:
            clean(server, client)


def test_a_prepared_table_is_kept_and_given_up(tmp_path: Path) -> None:
    schema = pa.schema({"k": pa.int64()})
    with Server(tmp_path, devices="host:1", device_memory="64MiB", host_memory="256MiB") as server:
        with server.connect() as client:
            client.put("kept", numbers(1000))
            client.prepare("kept", schema, on="k", keep_seconds=3600)
            (kept,) = client.prepared()
            assert (kept["table"], kept["how"], kept["streams"], kept["device"]) == ("kept", "inner", 0, "host:0")
            assert kept["bytes"] > 0 and kept["expires"]
            assert (kept["stream"], kept["columns"], kept["arriving"]) == ("right", ["k", "v"], ["k: int64"])
            assert kept["on"] == [{"left": "k", "right": "k", "nulls_equal": False}]
            assert kept["created"] <= kept["prepared_since"] < kept["expires"]
            assert (kept["shared"], kept["uses"], kept["keep_seconds"]) == (True, 1, 3600)
            with client.open_stream("kept", schema, on="k") as stream:
                assert stream.ask({"k": [1, 1000]}).num_rows == 1
                (used,) = client.prepared()
                assert (used["prepared"], used["streams"], used["expires"]) == (kept["prepared"], 1, None)
                # A build side on another column, and one of a stream that marks its rows.
                client.prepare("kept", schema, on={"v": "k"}, keep_seconds=3600)
                with marking_stream(client) as marking:
                    one, by_value, marked = client.prepared()
                    assert by_value["on"] == [{"left": "v", "right": "k", "nulls_equal": False}]
                    assert (one["how"], marked["how"], marked["shared"]) == ("inner", "full", False)
                    assert (marked["streams"], marked["device"], marked["table"]) == (1, "host:0", "kept")
                    marking.close()
                client.release_prepared(by_value["prepared"])
            server.wait_for(lambda: client.prepared()[0]["streams"] == 0, "the end of the stream")
            assert server.device_used() > 0
            client.release_prepared(kept["prepared"])
            assert client.prepared() == []
            assert server.device_used() == 0
            # A stream that is over leaves no entry.
            client.stream_join("kept", {"k": [1]}, on="k").read_all()
            assert client.prepared() == []
            with pytest.raises(dovetail.NotFound, match="no prepared build side"):
                client.release_prepared(kept["prepared"])
            # What is over, and what is of a table that is gone.
            client.prepare("kept", schema, on="k", keep_seconds=3600)
            client.prepare("kept", schema, on="k", keep_seconds=1)
            server.wait_for(lambda: client.prepared() == [], "its time to be over")
            with pytest.raises(ValueError, match="keep_seconds is 0"):
                client.prepare("kept", schema, on="k", keep_seconds=0)
            client.prepare("kept", schema, on="k", keep_seconds=3600)
            client.put("kept", numbers(10), mode="replace")
            server.wait_for(lambda: client.prepared() == [], "the old table to be given up")
            with pytest.raises(dovetail.Unsupported, match="marks rows"):
                client.prepare("kept", schema, on="k", how="left", keep_seconds=1)
            with pytest.raises(dovetail.InvalidRequest, match="keep_seconds"):
                client.command(
                    {"join": {"left": "kept", "right": "kept", "on": [{"left": "k", "right": "k"}], "keep_seconds": 9}}
                )
            for number in range(64):
                client.prepare("kept", schema, on="k", batch_rows=number + 1, keep_seconds=3600)
            with pytest.raises(dovetail.Exhausted, match="keeps 64 build sides"):
                client.prepare("kept", schema, on="k", keep_seconds=3600)
            client.drop("kept")
            clean(server, client)


@contextmanager
def marking_stream(client: dovetail.Client) -> Iterator[pa.RecordBatchReader]:
    """A stream that keeps rows of the table for its end, after its first batch."""
    may_end = threading.Event()

    def rows() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"k": [1]})
        assert may_end.wait(60)

    joined = client.stream_join("kept", rows(), on="k", how="full")
    try:
        assert joined.read_next_batch().num_rows == 1
        yield joined
    finally:
        may_end.set()


def test_streams_share_a_build_side_if_their_options_come_to_the_same(tmp_path: Path) -> None:
    schema = pa.schema({"k": pa.int64()})
    with Server(tmp_path, devices="host:1", device_memory="64MiB", host_memory="256MiB") as server:
        with server.connect() as client:
            client.put("kept", numbers(1000))
            client.prepare("kept", schema, on="k", keep_seconds=3600)
            (kept,) = client.prepared()
            for options in ({"strategy": kept["strategy"]}, {"devices": ["host:0"]}, {"priority": 3}):
                with client.open_stream("kept", schema, on="k", **options) as stream:
                    assert stream.ask({"k": [1]}).num_rows == 1
                    assert [build["prepared"] for build in client.prepared()] == [kept["prepared"]], options
            client.put("facts", {"k": [1, 2000]})
            with client.join("kept", "facts", on="k", strategy=kept["strategy"], devices=["host:0"]) as joined:
                assert joined.table().num_rows == 1
                assert joined.status().raw["prepared"] == kept["prepared"]
            for options in ({"strategy": "sort-merge"}, {"batch_rows": 7}, {"columns": ["k"]}, {"nulls_equal": True}):
                with client.open_stream("kept", schema, on="k", **options) as stream:
                    assert stream.ask({"k": [1]}).num_rows == 1
                    assert len(client.prepared()) == 2, options
            client.drop("kept")
            client.drop("facts")
            clean(server, client)


def test_a_stream_is_explained_as_rows_that_arrive(client: dovetail.Client) -> None:
    client.put("kept", numbers(1000))
    with client.open_stream("kept", pa.schema({"k": pa.int64()}), on="k") as stream:
        stream.ask({"k": [1]})
        (job,) = [job for job in client.jobs() if job.state == "running"]
        assert "asked for" not in job.raw["reason"], job.raw["reason"]
        assert job.raw["progress"] == 0
        text = client.job(job.id).explain()["text"]
        assert 'rows "stream", as they arrive; times are predicted for 1,048,576 of them' in text, text
        assert "asked for" not in text, text
    with client.open_stream("kept", pa.schema({"k": pa.int64()}), on="k", strategy="sort-merge") as stream:
        stream.ask({"k": [1]})
        (job,) = [job for job in client.jobs() if job.state == "running"]
        assert "asked for" in job.raw["reason"], job.raw["reason"]
    client.drop("kept")


def test_a_question_may_be_larger_than_the_memory_of_a_stream(tmp_path: Path) -> None:
    """The server takes a part of the rows before the joined ones are read."""
    rows = 2_000_000
    with Server(tmp_path, devices="host:1", device_memory="64MiB", host_memory="48MiB") as server:
        with server.connect(call_timeout=120) as client:
            client.put("kept", numbers(1000))
            with client.open_stream("kept", pa.schema({"k": pa.int64()}), on="k") as stream:
                answer = stream.ask({"k": np.arange(rows) % 1000})
                assert answer.num_rows == rows
                assert pc.sum(answer["v"]).as_py() == 2 * sum(range(1000)) * (rows // 1000)
            clean(server, client)


@pytest.mark.parametrize("stream", ["left", "right"])
def test_a_question_keeps_no_rows_of_the_table(client: dovetail.Client, stream: Literal["left", "right"]) -> None:
    client.put("kept", numbers(10))
    table = {"left": "right", "right": "left"}[stream]
    for how in ("full", table, f"{table}_semi", f"{table}_anti"):
        with pytest.raises(ValueError, match=f"how is '{how}'"):
            client.open_stream("kept", pa.schema({"k": pa.int64()}), on="k", how=how, stream=stream)  # type: ignore[arg-type]
    client.drop("kept")


def phases(result: dovetail.Result) -> set[str]:
    return {phase["name"] for phase in result.status().raw["phases"]}


def test_joins_of_tables_probe_a_prepared_table(tmp_path: Path, seed: int) -> None:
    with Server(tmp_path, devices="host:1", device_memory="64MiB", host_memory="1GiB") as server:
        with server.connect() as client:
            rng = np.random.default_rng([seed, 40, 4])
            checked = 0
            for _ in range(60):
                if (join := drawn(rng)) is None:
                    continue
                case, rows, stream, _, sent = join
                client.put("left", case.left, mode="replace")
                client.put("right", case.right, mode="replace")
                kept = "left" if stream == "right" else "right"
                how = {"on": case.pairs(), "how": case.how, "nulls_equal": case.nulls_equal, "columns": case.columns}
                try:
                    client.prepare(kept, sent.schema, stream=stream, keep_seconds=3600, **how)
                except (dovetail.Unsupported, dovetail.Exhausted):
                    continue
                (prepared,) = client.prepared()
                with client.join("left", "right", **how) as joined:
                    oracle.check(case, joined.table(), rows)
                    # A result of another type, as for text of several dictionaries, is made as usual.
                    checked += joined.status().raw["prepared"] == prepared["prepared"]
                client.release_prepared(prepared["prepared"])
            assert checked >= 10
            clean(server, client)


def test_a_prepared_table_serves_streams_and_joins_at_once(tmp_path: Path) -> None:
    with Server(tmp_path, processors=2, devices="host:1", device_memory="48MiB", host_memory="1GiB") as server:
        with server.connect() as client:
            client.put("kept", numbers(100_000))
            client.put("facts", {"k": np.arange(0, 200_000, 2), "w": np.arange(100_000)})
            schema = pa.schema({"k": pa.int64(), "w": pa.int64()})
            client.prepare("kept", schema, on="k", keep_seconds=3600)
            (prepared,) = client.prepared()

            def join(_: int) -> bool:
                with client.join("kept", "facts", on="k") as joined:
                    assert joined.table().num_rows == 50_000
                    used = joined.status().raw["prepared"]
                    assert used in (None, prepared["prepared"])
                    assert used is None or "build table" not in phases(joined), phases(joined)
                    return used is not None

            with client.open_stream("kept", schema, on="k") as stream, ThreadPoolExecutor(4) as pool:
                joins = [pool.submit(join, number) for number in range(12)]
                for number in range(40):
                    assert stream.ask({"k": [number, 100_000], "w": [1, 2]}).num_rows == 1
                # Those that would wait for many turns may index the table again.
                assert len([done.result() for done in joins]) == 12
                assert join(0)
            explained = client.explain("kept", "facts", on="k")
            assert explained["prepared"] == prepared["prepared"], explained
            assert f"prepared {prepared['prepared']}" in explained["text"]
            assert explained["prepared_saves_seconds"] > 0 and "build table" in explained["prepared_saves"]
            assert "build table" not in {phase["name"] for phase in explained["phases"]}
            assert f"build side {prepared['prepared']} is kept there since {explained['prepared_since']}" in str(
                explained
            )
            # A join that needs the memory takes it, and the next join prepares its own.
            sparse = np.arange(2_300_000) * 7_919_000_000_033 % (1 << 60)
            client.put("large", {"k": sparse, "v": np.arange(len(sparse))})
            with client.join("large", "large", on="k", columns=["k", "left.v"]) as joined:
                assert joined.table().num_rows == len(sparse)
            assert client.prepared()[0]["device"] is None
            with client.join("kept", "facts", on="k") as joined:
                assert joined.table().num_rows == 50_000
                assert joined.status().raw["prepared"] is None
                assert "build table" in phases(joined)
            client.release_prepared(prepared["prepared"])
            clean(server, client)


def temporary(client: dovetail.Client) -> list[str]:
    return [table.name for table in client.tables() if table.name.startswith("stream_")]


def test_both_sides_of_a_join_are_streamed(small_server: Server, seed: int) -> None:
    checked = 0
    with small_server.connect() as client:
        for number in range(CASES // 2):
            rng = np.random.default_rng([seed, 40, 5, number])
            if (join := drawn(rng)) is None:
                continue
            case, rows, stream, first, second = join
            first_reader = pa.RecordBatchReader.from_batches(first.schema, cut(rng, first))
            try:
                joined = client.stream_join(
                    first if rng.random() < 0.2 else first_reader,
                    pa.RecordBatchReader.from_batches(second.schema, cut(rng, second)),
                    on=case.pairs(),
                    how=case.how,
                    stream=stream,
                    columns=case.columns,
                    nulls_equal=case.nulls_equal,
                )
                assert temporary(client) == []
                oracle.check(case, joined.read_all(), rows)
            except dovetail.Exhausted as refused:
                assert "--device-memory" in str(refused), refused
                continue
            checked += 1
        clean(small_server, client)
    assert checked > CASES // 4


@pytest.mark.parametrize("how", HOWS)
def test_a_streamed_table_may_have_no_rows_one_or_repeated_ones(client: dovetail.Client, how: str) -> None:
    sent = pa.table({"k": pa.array([1, None, 3], pa.int64()), "w": ["x", "y", None], "r_row": [0, 1, 2]})
    for keys in ([], [1], [1, 1, None, None, 7]):
        build = pa.table(
            {
                "k": pa.array(keys, pa.int64()),
                "t": pa.array([f"text {key}" for key in keys], pa.string()),
                "l_row": pa.array(range(len(keys)), pa.int64()),
            }
        )
        case = oracle.Case(build, sent, [("k", "k")], how)
        oracle.check(case, client.stream_join(build, sent, on="k", how=how).read_all())
    with client.open_stream({"k": [5], "t": ["five"]}, pa.schema({"k": pa.int64()}), on="k") as stream:
        assert temporary(client) == []
        assert stream.ask({"k": [5, 6]}).to_pydict() == {"k": [5], "t": ["five"]}
    with pytest.raises(ValueError, match="keep_seconds"):
        client.stream_join(build, sent, on="k", keep_seconds=60)


def test_a_streamed_table_that_is_too_large_is_refused_before_its_end(tmp_path: Path) -> None:
    with Server(tmp_path, devices="host:1", device_memory="16MiB", host_memory="256MiB") as server:
        with server.connect() as client:
            sent = 0

            def endless() -> Iterator[pa.RecordBatch]:
                nonlocal sent
                while sent < 1000:
                    sent += 1
                    yield pa.record_batch({"k": np.arange(100_000) + sent * 100_000})

            with pytest.raises(dovetail.Exhausted, match="8.0 MiB.*build side.*--device-memory"):
                client.stream_join(endless(), numbers(3), on="k")
            assert sent < 200, "all rows were sent before the refusal"
            clean(server, client)

            def broken() -> Iterator[pa.RecordBatch]:
                yield pa.record_batch({"k": np.arange(100_000)})
                raise RuntimeError("no more rows today")

            with pytest.raises(RuntimeError, match="no more rows today"):
                client.stream_join(broken(), numbers(3), on="k")
            clean(server, client)
            # A client that vanishes after its upload, before it opens the stream.
            options = [(b"dovetail-upload-options", b'{"temporary_seconds": 1}')]
            raw = flight.connect(server.uri)
            writer, _ = raw.do_put(
                flight.FlightDescriptor.for_path("left_behind"),
                pa.schema({"k": pa.int64()}),
                flight.FlightCallOptions(headers=options),
            )
            writer.write_batch(pa.record_batch({"k": np.arange(1000)}))
            writer.close()
            raw.close()
            server.wait_for(lambda: len(client.tables()) == 0, "the end of the temporary table")
            clean(server, client)


def test_a_result_is_the_build_side_of_streams(tmp_path: Path) -> None:
    with Server(tmp_path, devices="host:1", device_memory="64MiB", host_memory="256MiB") as server:
        with server.connect() as client:
            client.put("orders", {"id": [1, 2, 3], "customer": [7, 8, 9]})
            client.put("customers", {"customer": [7, 8], "name": ["ann", "bob"]})
            for used in (1, 2):
                job = client.submit(
                    "orders", "customers", on="customer", into="named", temporary_seconds=2, into_mode="replace"
                )
                assert job.wait().rows == 2
                (table,) = [table for table in client.tables() if table.name == "named"]
                assert table.details["expires"] is not None
                with client.open_stream("named", pa.schema({"id": pa.int64()}), on="id") as stream:
                    assert stream.ask({"id": [2, 3]})["name"].to_pylist() == ["bob"]
                    server.wait_for(lambda: len(client.tables()) == 2, "the end of the result's time")
                    # The stream goes on without the name.
                    assert stream.ask({"id": [1, 1]})["name"].to_pylist() == ["ann", "ann"], used
                with pytest.raises(dovetail.NotFound, match="there is no table"):
                    client.stream_join("named", numbers(1), on={"id": "k"})
                with pytest.raises(dovetail.NotFound):
                    job.result().table()
            # From the command line, too.
            words = ["join", "orders", "customers", "--on", "customer", "--into", "named", "--temporary-seconds"]
            assert command_line(server, *words, 0).returncode == 2
            assert command_line(server, *words, 2).returncode == 0
            assert client.get("named").num_rows == 2
            server.wait_for(lambda: len(client.tables()) == 2, "the end of the result's time")
            join = {"left": "orders", "right": "customers", "on": [{"left": "customer", "right": "customer"}]}
            with pytest.raises(dovetail.InvalidRequest, match='"into" names none'):
                client.command({"join": {**join, "temporary_seconds": 9}})
            with pytest.raises(dovetail.InvalidRequest, match="from 1 to 86400"):
                client.command({"join": {**join, "into": "named", "temporary_seconds": 86_401}})
            assert len(client.tables()) == 2
            clean(server, client)


def test_a_stream_of_a_result_that_is_not_complete_says_so(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start(topology=slow_devices(tmp_path, "4MB/s"), host_memory="1GiB")
    with server.connect() as client:
        client.put("many", {"k": np.zeros(20_000, np.int64)})
        job = client.submit("many", "many", on="k", into="made", temporary_seconds=60)

        def refusal() -> str:
            with pytest.raises(dovetail.NotFound) as caught:
                client.stream_join("made", numbers(1), on="k")
            return str(caught.value)

        assert 'there is no table "made" yet: it is being made; wait for the end of' in refusal()
        job.cancel()
        server.wait_for(lambda: refusal().endswith('there is no table "made"'), "the end of the job")


def test_a_stream_that_is_refused_says_why(server: Server, client: dovetail.Client) -> None:
    client.put("kept", numbers(10))
    with pytest.raises(dovetail.NotFound, match="there is no table"):
        client.stream_join("absent", numbers(3), on="k")
    with pytest.raises(dovetail.InvalidRequest, match="column"):
        client.stream_join("kept", numbers(3), on="absent")
    with pytest.raises(dovetail.Unsupported, match="one device"):
        client.stream_join("kept", numbers(3), on="k", devices=["host:0", "host:1"])
    with pytest.raises(ValueError, match="stream"):
        client.stream_join("kept", numbers(3), on="k", stream="both")  # type: ignore[arg-type]
    # A table may have the name that stands for the rows.
    client.put("stream", numbers(10))
    assert client.stream_join("stream", numbers(3), on="k").read_all().num_rows == 3
    for name in ("kept", "stream"):
        client.drop(name)
    clean(server, client)
