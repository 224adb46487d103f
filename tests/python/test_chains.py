"""Rows that are sent and joined with several tables in one pass, against DuckDB."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import dovetail
import tables
from dovetail import Then
from harness import Server, clean

CASES = 30

# Kinds of join that keep rows of the right side alone, and their conditions in SQL.
HOWS = {"inner": "JOIN", "right": "LEFT JOIN", "right_semi": "SEMI JOIN", "right_anti": "ANTI JOIN"}


@pytest.fixture(scope="module", params=["64MiB", "8MiB"])
def small_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("chains")
    with Server(folder, devices="host:2", device_memory=request.param, host_memory="1GiB") as server:
        yield server


def key(rng: tables.Rng, kind: str, rows: int, distinct: int) -> pa.Array:
    """Keys of some type, with a few nulls. Equal numbers are equal values."""
    numbers = rng.integers(0, distinct, rows)
    mask = rng.random(rows) < rng.choice([0, 0.1])
    if kind == "string":
        values: list[str | None] = [
            None if null else f"key {number} " * (1 + number % 3) for number, null in zip(numbers, mask, strict=True)
        ]
        return pa.array(values, pa.string())
    return pa.array(numbers, mask=mask).cast(kind)


def sent_in_pieces(rng: tables.Rng, rows: pa.Table) -> Iterator[pa.RecordBatch]:
    first = 0
    while first < rows.num_rows:
        count = int(rng.choice([0, 1, 100, 5000]))
        yield from rows.slice(first, count).to_batches()
        first += count


@pytest.mark.parametrize("part", range(2))
def test_random_chains_agree_with_duckdb(small_server: Server, seed: int, part: int) -> None:
    with small_server.connect() as client:
        for number in range(CASES // 2):
            rng = np.random.default_rng([seed, 41, part, number])
            joins = int(rng.integers(2, 5))
            hows = [str(rng.choice(list(HOWS))) for _ in range(joins)]
            kinds = [str(rng.choice(["int32", "int64", "date32[day]", "string", "float64"])) for _ in range(joins)]
            kinds = ["int32" if kind.startswith("date") else kind for kind in kinds]
            rows = int(rng.choice([0, 1, 1000, 20_000]))
            facts = {f"f{at}": key(rng, kind, rows, 500) for at, kind in enumerate(kinds)}
            sent = pa.table({**facts, "amount": np.arange(rows), "note": pa.array(map(str, range(rows)), pa.string())})
            stream = str(rng.choice(["left", "right"]))
            database = duckdb.connect()
            database.register("sent", sent)
            shown = ["sent.*"]
            sources = "sent"
            for at, (how, kind) in enumerate(zip(hows, kinds, strict=True)):
                size = int(rng.choice([0, 10, 400, 3000]))
                # Few rows for each key, because every table multiplies the rows of the result.
                table = pa.table(
                    {
                        "id": key(rng, kind, size, max(size, 1)),
                        f"v{at}": rng.integers(0, 9, size),
                        f"t{at}": pa.array([f"text {row}" * (row % 4) for row in range(size)], pa.string()),
                    }
                )
                client.put(f"d{at}", table, mode="replace")
                database.register(f"d{at}", table)
                sources += f" {HOWS[how]} d{at} ON d{at}.id = sent.f{at}"
                if how in ("inner", "right"):
                    shown += [f"d{at}.v{at}", f"d{at}.t{at}"]
            expected = database.sql(f"SELECT {', '.join(shown)} FROM {sources}").to_arrow_table()
            if stream == "left":
                hows = [how.replace("right", "left") for how in hows]
            pairs = [{"id": f"f{at}"} if stream == "right" else {f"f{at}": "id"} for at in range(joins)]
            then = [Then(f"d{at}", on=pairs[at], how=hows[at]) for at in range(1, joins)]
            joined = client.stream_join(
                "d0",
                pa.RecordBatchReader.from_batches(sent.schema, sent_in_pieces(rng, sent)),
                on=pairs[0],
                how=hows[0],  # type: ignore[arg-type]
                stream=stream,  # type: ignore[arg-type]
                then=then,
            ).read_all()
            story = f"case {number}: {hows} on {kinds}, {rows} rows on the {stream}"
            assert joined.column_names == expected.column_names, story
            order = [(name, "ascending") for name in joined.column_names]
            assert joined.sort_by(order).to_pydict() == expected.sort_by(order).to_pydict(), story
        for name in [table.name for table in client.tables()]:
            client.drop(name)
        clean(small_server, client)


def put_star(client: dovetail.Client) -> None:
    client.put("customers", {"id": [1, 2, 3], "name": ["ann", "bob", "cid"]})
    client.put("parts", {"id": [7, 8], "name": ["nut", "bolt"]})


def drop_star(client: dovetail.Client) -> None:
    client.drop("customers")
    client.drop("parts")


SALES = {"customer": [1, 2, 2, 9], "part": [7, 8, 9, 7], "amount": [10, 20, 30, 40]}
PARTS = [Then("parts", on={"id": "part"})]


def test_columns_of_a_chain_have_the_names_of_their_tables(client: dovetail.Client) -> None:
    put_star(client)

    def joined(**options: object) -> dict[str, list[object]]:
        result = client.stream_join("customers", SALES, on={"id": "customer"}, then=PARTS, **options).read_all()  # type: ignore[arg-type]
        return result.sort_by("amount").to_pydict()  # type: ignore[no-any-return]

    everything = {"customer": [1, 2], "part": [7, 8], "amount": [10, 20], "name": ["ann", "bob"]}
    assert joined() == {**everything, "name_parts": ["nut", "bolt"]}
    assert joined(columns=["right.amount", "left.name"]) == {"amount": [10, 20], "name": ["ann", "bob"]}
    chosen = joined(columns=["parts.name", "amount", "customers.name", "parts.id"])
    assert chosen == {
        "name": ["nut", "bolt"],
        "amount": [10, 20],
        "name_customers": ["ann", "bob"],
        "id": [7, 8],
    }
    for columns, why in [
        (["name"], 'write "customers.name" or "parts.name"'),
        (["amount", "prize"], 'no input of the join has a column "prize"'),
        (["amount", "amount"], "twice"),
    ]:
        with pytest.raises(dovetail.InvalidRequest, match=why):
            joined(columns=columns)
    # One table for two keys.
    both = {"buyer": [1, 2], "seller": [3, 1]}
    sellers = [Then("customers", on={"id": "seller"}, label="sellers")]
    twice = client.stream_join("customers", both, on={"id": "buyer"}, then=sellers).read_all().sort_by("buyer")
    assert twice.to_pydict() == {
        "buyer": [1, 2],
        "seller": [3, 1],
        "name": ["ann", "bob"],
        "name_sellers": ["cid", "ann"],
    }
    drop_star(client)


def test_a_chain_that_cannot_run_is_refused(client: dovetail.Client) -> None:
    put_star(client)

    def refused(error: type[Exception], why: str, then: list[Then], **options: object) -> None:
        with pytest.raises(error, match=why):
            client.stream_join("customers", SALES, on={"id": "customer"}, then=then, **options).read_all()  # type: ignore[arg-type]

    refused(dovetail.NotFound, "absent", [Then("absent", on={"id": "part"})])
    refused(dovetail.InvalidRequest, 'table "parts"', [Then("parts", on={"id": "absent"})])
    refused(dovetail.InvalidRequest, '"label"', [Then("customers", on={"id": "part"})])
    refused(dovetail.InvalidRequest, "17 joins", PARTS * 16)
    for how in ("left", "full", "left_semi", "left_anti"):
        refused(dovetail.Unsupported, f'a {how} join keeps rows of table "parts"', [Then("parts", {"id": "part"}, how)])
        refused(dovetail.Unsupported, f'a {how} join keeps rows of table "customers"', PARTS, how=how)
    refused(dovetail.Unsupported, "strategy hash", PARTS, strategy="radix-hash")
    refused(TypeError, "dovetail.Then", ["parts"])  # type: ignore[list-item]
    command = {"left": "customers", "right": "parts", "on": [{"left": "id", "right": "id"}]}
    further = [{"table": "parts", "on": [{"left": "id", "right": "id"}]}]
    with pytest.raises(dovetail.InvalidRequest, match='no "stream"'):
        client.command({"join": {**command, "then": further}})
    drop_star(client)


def test_a_chain_answers_questions_and_shares_its_tables(tmp_path: Path) -> None:
    schema = pa.schema({"customer": pa.int64(), "part": pa.int64()})
    options = {"on": {"id": "customer"}, "then": PARTS}
    with Server(tmp_path, devices="host:1", device_memory="64MiB", host_memory="256MiB") as server:
        with server.connect() as client:
            put_star(client)
            client.prepare("customers", schema, keep_seconds=3600, **options)  # type: ignore[arg-type]
            (kept,) = client.prepared()
            assert (kept["table"], kept["streams"], kept["device"]) == ("customers, parts", 0, "host:0")
            with client.open_stream("customers", schema, **options) as stream:  # type: ignore[arg-type]
                answer = stream.ask({"customer": [1, 2, 5], "part": [7, 6, 7]})
                assert answer.to_pydict() == {"customer": [1], "part": [7], "name": ["ann"], "name_parts": ["nut"]}
                (used,) = client.prepared()
                assert (used["prepared"], used["streams"]) == (kept["prepared"], 1)
                # Other tables, and other columns.
                other = [Then("parts", on={"id": "part"}, how="right_semi")]
                with client.open_stream("customers", schema, on={"id": "customer"}, then=other) as semi:
                    assert semi.ask({"customer": [1, 1], "part": [7, 6]}).num_rows == 1
                    assert len(client.prepared()) == 2
            assert any('probe "customers" (inner), "parts" (inner)' in job.raw["reason"] for job in client.jobs())
            client.put("parts", {"id": [6], "name": ["cog"]}, mode="replace")
            server.wait_for(lambda: client.prepared() == [], "the chain of the old table to be given up")
            assert server.device_used() == 0
            drop_star(client)
            clean(server, client)


def test_explain_shows_the_joins_of_a_chain_and_why_their_order_changed(tmp_path: Path) -> None:
    with Server(tmp_path, devices="host:1", device_memory="64MiB", host_memory="256MiB") as server:
        with server.connect() as client:
            # From their statistics, each row has one partner in the first table, and two in the second.
            client.put("once", {"id": [*range(1000)], "v": [*range(1000)]})
            client.put("twice", {"id": [*range(1000)] * 2, "w": [*range(2000)]})
            client.put("rows", {"a": [0], "b": [0]})
            twice = [Then("twice", on={"id": "b"})]
            options = {"on": {"id": "a"}, "then": twice}
            planned = client.explain("once", "rows", stream="right", **options)  # type: ignore[arg-type]
            assert [(join["table"], join["how"], join["keys"]) for join in planned["chain"]] == [
                ("once", "inner", ["a"]),
                ("twice", "inner", ["b"]),
            ]
            once, second = planned["chain"]
            assert once["predicted_share"] < second["predicted_share"]
            assert planned["chain_order"] is None and once["rows"] is None
            assert "probe 2 tables in one pass" in planned["text"]
            # Every row has a partner in the first, and one of a hundred in the second.
            sent = pa.table({"a": np.arange(50_000) % 1000, "b": np.arange(50_000) * 10})

            def explained() -> dovetail.Explanation:
                return client.job(client.jobs()[-1].id).explain()

            schema = sent.schema
            client.prepare("once", schema, keep_seconds=3600, **options)  # type: ignore[arg-type]
            before = explained()
            assert before["chain_order"] is None and before["prepared"] is None
            with client.open_stream("once", schema, **options) as stream:  # type: ignore[arg-type]
                for first in range(0, sent.num_rows, 10_000):
                    stream.ask(sent.slice(first, 10_000))
                after = explained()
            ahead, behind = after["chain"]
            assert (ahead["table"], ahead["predicted_place"], behind["predicted_place"]) == ("twice", 2, 1)
            # A hundred rows have two partners each. After the change, the others do not reach the first table.
            assert (ahead["rows"], ahead["kept_rows"], ahead["measured_share"]) == (50_000, 200, 0.004)
            assert behind["rows"] == behind["kept_rows"] < 50_000 and behind["measured_share"] == 1.0
            story = after["chain_order"]
            assert '"twice" comes before "once", unlike predicted' in story, story
            assert re.search(r"it has kept 0\.4 % of its rows \([0-9.]+ % predicted\)", story), story
            assert re.search(r"changed (once|\d+ times) while rows arrived", story) and story in after["text"], story
            # Its tables were prepared before it began.
            (kept,) = client.prepared()
            assert after["prepared"] == kept["prepared"] == client.jobs()[-1].raw["prepared"]
            assert 0 < after["prepared_saves_seconds"] and "build table" in after["prepared_saves"]
            assert f"build side {kept['prepared']} is kept there since" in after["text"]
            assert "build table" not in {phase["name"] for phase in after["phases"]}
            # A later stream begins with the order that this one has shown.
            client.stream_join("once", sent.slice(0, 100), **options).read_all()  # type: ignore[arg-type]
            assert "earlier rows of other streams" in explained()["chain_order"]
            client.release_prepared(kept["prepared"])
            with pytest.raises(dovetail.NotFound, match="columns from the table of that name"):
                client.explain("once", "absent", stream="right", **options)  # type: ignore[arg-type]
            clean(server, client)


def test_rows_of_a_chain_come_before_the_rows_end(client: dovetail.Client) -> None:
    put_star(client)
    sent = threading.Event()

    def rows() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"customer": [1, 1], "part": [7, 0]})
        assert sent.wait(60)
        yield pa.record_batch({"customer": [3], "part": [8]})

    with client.stream_join("customers", rows(), on={"id": "customer"}, then=PARTS) as joined:
        first = joined.read_next_batch()
        assert first["name"].to_pylist() == ["ann"]
        sent.set()
        rest = pa.Table.from_batches(list(joined), joined.schema)
    assert rest["name_parts"].to_pylist() == ["bolt"]
    drop_star(client)


def test_many_joins_that_repeat_rows_share_little_memory(start: Callable[..., Server]) -> None:
    with start(devices="host:1", device_memory="64MiB", host_memory="512MiB").connect() as client:
        joins = 10
        for at in range(joins):
            client.put(f"t{at}", {"k": [*range(100)] * 2, f"v{at}": [*range(200)]})
        then = [Then(f"t{at}", on="k") for at in range(1, joins)]
        joined = client.stream_join("t0", {"k": [*range(100)]}, on="k", then=then).read_all()
        assert joined.num_rows == 100 * 2**joins
        assert all(int(pc.sum(joined[f"v{at}"]).as_py()) == 19900 * 2 ** (joins - 1) for at in range(joins))


def test_a_label_comes_before_a_side(start: Callable[..., Server]) -> None:
    with start(devices="host:1").connect() as client:
        client.put("d", {"k": [1], "w": [10]})
        client.put("e", {"k": [1], "w": [20], "x": [30]})
        rows = {"k": [1]}
        for then, column, value in [
            ([Then("e", on="k", label="left")], "left.w", 20),
            ([Then("e", on="k")], "left.w", 10),
            ([Then("e", on="k", label="left")], "d.w", 10),
        ]:
            joined = client.stream_join("d", rows, on="k", then=then, columns=[column]).read_all()
            assert joined.column(0).to_pylist() == [value], column
