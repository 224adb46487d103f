"""Joins with rows that are sent while their results arrive, against DuckDB."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import dovetail
import oracle
import tables
from harness import Server, clean
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
            case = random_case(rng)
            try:
                rows = oracle.matching_rows(case, RESULT_ROWS_MAX)
            except oracle.TooLarge:
                continue
            stream = "right" if rng.random() < 0.5 else "left"
            kept, sent = (case.left, case.right) if stream == "right" else (case.right, case.left)
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
    client.drop("kept")
    clean(server, client)


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
