"""Joins of random tables through a real server, against DuckDB.

Every failure prints the seed of its case; ``pytest tests/python/test_oracle.py --seed N`` repeats the run, and
``DOVETAIL_CASE=N`` repeats one case of the random ones. With ``DOVETAIL_TEST_GANG=N``, N devices run each join
together.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dovetail
import oracle
import tables
from harness import GANG, GPUS, Server, clean
from oracle import HOWS, LEFT_ROW, RIGHT_ROW, STRATEGIES, Case

RESULT_ROWS_MAX = 400_000

# Devices and their memory: from one with plenty to eight with so little that every join goes in pieces. Two MiB are
# what the tables of keys of sixteen bytes take at the least.
HOSTS = [("host:1", "64MiB"), ("host:2", "16MiB"), ("host:3", "4MiB"), ("host:4", "2MiB"), ("host:8", "2MiB")]
HOSTS += [("host:5", "4MiB"), ("host:6", "4MiB"), ("host:7", "4MiB")]

# The random tables have up to 131,073 rows; what does not fit must be refused before it starts.
RANDOM_HOSTS = [("host:1", "64MiB"), ("host:2", "16MiB"), ("host:3", "8MiB"), ("host:8", "4MiB")]
RANDOM_HOSTS += [("host:4", "64MiB"), ("host:5", "24MiB"), ("host:6", "16MiB"), ("host:7", "32MiB")]

if GPUS:
    # With all of their memory, and with so little that large joins go in pieces.
    HOSTS = RANDOM_HOSTS = [(f"cuda:{GPUS}", "auto"), (f"cuda:{GPUS}", "64MiB")]
elif GANG:
    # A rank of a gang takes more than a device alone for its windows.
    HOSTS = RANDOM_HOSTS = [(f"host:{GANG}", "64MiB"), (f"host:{GANG}", "8MiB")]

# Cases in a row that one server is asked.
GROUP = 25

# Cases of an ordinary run: the same on every machine, fast or slow, and each of the hosts twice.
CASES = 2 * GROUP * len(RANDOM_HOSTS)


def send(client: dovetail.Client, name: str, table: pa.Table, rng: tables.Rng) -> None:
    """Uploads a table in one of the ways that there are."""
    match rng.integers(0, 4):
        case 0:
            client.put(name, table)
        case 1:
            client.put(name, table, streams=3)
        case 2:
            cut = int(rng.integers(0, table.num_rows + 1))
            client.put(name, table.slice(0, cut))
            client.put(name, table.slice(cut), mode="append")
        case _:
            # Bare pyarrow, with batches of all sizes, empty ones too.
            writer, _ = flight.connect(client.uri).do_put(flight.FlightDescriptor.for_path(name), table.schema)
            first = 0
            while first < table.num_rows:
                rows = int(rng.choice([0, 1, 100, 1000, 8192, 100_000]))
                writer.write_table(table.slice(first, rows))
                first += rows
            writer.close()


def run(client: dovetail.Client, case: Case, strategy: str, rng: tables.Rng, **options: object) -> pa.Table:
    """Runs the join and fetches the result in one of the ways that there are."""
    retain = 0 if rng.random() < 0.3 else None
    if GANG:
        options["devices"] = GANG
    result = client.join(
        "l",
        "r",
        on=case.pairs(),
        how=case.how,
        columns=case.columns,
        strategy=strategy,
        nulls_equal=case.nulls_equal,
        retain_seconds=retain,
        **options,
    )
    with result:
        if rng.random() < 0.5 or retain == 0:
            return result.reader().read_all()
        return result.table()


def side(rng: tables.Rng, keys: list[tuple[str, pa.Array]], row: str, payloads: list[str], prefix: str) -> pa.Table:
    """A table of those keys, a row number, and payload, in an order of columns that tells nothing."""
    rows = len(keys[0][1])
    columns = [*keys, (row, pa.array(np.arange(rows), pa.int64()))]
    columns += [(f"{prefix}{index} {kind}", tables.payload(rng, kind, rows)) for index, kind in enumerate(payloads)]
    rng.shuffle(columns)
    return pa.table(dict(columns))


def key_column(rng: tables.Rng, key: tables.KeyType, distribution: str, rows: int, nulls: float) -> pa.Array:
    values = key.values(tables.numbers(rng, distribution, rows, key.domain))
    return tables.with_nulls(rng, tables.negative_zeros(rng, values), nulls)


def random_case(rng: tables.Rng) -> Case:
    """Tables and a join that nobody thought of."""
    large = rng.random() < 0.08
    sizes = [int(rng.choice(tables.LARGE_SIZES if large else tables.SIZES)) for _ in range(2)]
    keys = int(rng.choice([1, 1, 1, 2, 3]))
    nulls = float(rng.choice([0, 0, 0.05, 0.5, 1.0], p=[0.4, 0.2, 0.25, 0.13, 0.02]))
    lefts, rights, on, story = [], [], [], []
    for index in range(keys):
        left_type = tables.KEY_TYPES[rng.integers(0, len(tables.KEY_TYPES))]
        partners = tables.partners(left_type)
        right_type = left_type if rng.random() < 0.6 else partners[rng.integers(0, len(partners))]
        # Types that are cut short wrap around; what differs on one side must differ on the other.
        domain = min(left_type.domain, right_type.domain)
        left_type, right_type = (tables.KeyType(t.name, t.type, t.values, domain) for t in (left_type, right_type))
        distributions = rng.choice(tables.DISTRIBUTIONS, 2)
        names = [f"k{index}", f"k{index}" if rng.random() < 0.6 else f"key {index}, right"]
        lefts.append((names[0], key_column(rng, left_type, distributions[0], sizes[0], nulls)))
        rights.append((names[1], key_column(rng, right_type, distributions[1], sizes[1], nulls)))
        on.append((names[0], names[1]))
        story.append((left_type.name, right_type.name, *map(str, distributions)))
    kinds = list(tables.PAYLOADS)
    payloads = [[str(kind) for kind in rng.choice(kinds, rng.integers(0, 4))] for _ in range(2)]
    left = side(rng, lefts, LEFT_ROW, payloads[0], "p")
    right = side(rng, rights, RIGHT_ROW, payloads[1], "p" if rng.random() < 0.5 else "q")
    how = str(rng.choice(HOWS))
    columns = None
    if rng.random() < 0.3:
        columns = some_columns(rng, left, right, how, on)
    case = Case(left, right, on, how, nulls_equal=bool(rng.random() < 0.3), columns=columns)
    if rng.random() < 0.4:
        case.key_nulls_equal = [[None, False, True][rng.integers(0, 3)] for _ in on]
    case.story = {
        "rows": sizes, "keys": story, "nulls": nulls, "payloads": payloads, "how": how,
        "nulls_equal": case.nulls_equal, "key_nulls_equal": case.key_nulls_equal, "columns": columns,
    }  # fmt: skip
    return case


def some_columns(rng: tables.Rng, left: pa.Table, right: pa.Table, how: str, on: list[tuple[str, str]]) -> list[str]:
    """A choice of columns of the result, the row numbers among them; keys by their bare names, too."""
    only = how.partition("_")[0] if "_" in how else None
    bare = {f"left.{one}": one for one, other in on if one == other or one not in right.column_names}
    chosen = []
    for name, table, row in (("left", left, LEFT_ROW), ("right", right, RIGHT_ROW)):
        if only in (None, name):
            others = [f"{name}.{column}" for column in table.column_names if column != row]
            rng.shuffle(others)
            some = others[: rng.integers(0, len(others) + 1)]
            chosen += [row, *(bare[column] if column in bare and rng.random() < 0.5 else column for column in some)]
    return chosen


def drop_all(client: dovetail.Client) -> None:
    for table in client.tables():
        client.drop(table.name)


@pytest.fixture(scope="module", params=HOSTS, ids=lambda host: "-".join(host))
def host_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    devices, memory = request.param
    folder = tmp_path_factory.mktemp("oracle")
    with Server(folder, devices=devices, device_memory=memory, host_memory="2GiB") as server:
        yield server


@pytest.fixture
def host(host_server: Server) -> Iterator[dovetail.Client]:
    with host_server.connect() as client:
        yield client
        clean(host_server, client)


@pytest.mark.parametrize("how", HOWS)
def test_every_kind_and_strategy_agrees_with_duckdb(host: dovetail.Client, seed: int, how: str) -> None:
    rng = np.random.default_rng([seed, HOWS.index(how)])
    key, text = tables.KEY_TYPES[7], next(key for key in tables.KEY_TYPES if key.name == "string")
    lefts = [("k", key_column(rng, key, "uniform", 6000, 0.05)), ("s", key_column(rng, text, "few", 6000, 0.05))]
    rights = [("k", key_column(rng, key, "zipf", 9000, 0.05)), ("t", key_column(rng, text, "few", 9000, 0.05))]
    left = side(rng, lefts, LEFT_ROW, ["int32", "string", "list"], "p")
    right = side(rng, rights, RIGHT_ROW, ["float64", "dictionary"], "p")
    host.put("l", left)
    host.put("r", right)
    one, both = [("k", "k")], [("k", "k"), ("s", "t")]
    cases = [Case(left, right, on, how, nulls_equal) for on in (one, both) for nulls_equal in (False, True)]
    # Of two keys, one whose nulls match and one whose nulls do not, whatever the join says.
    cases += [Case(left, right, both, how, False, [None, True]), Case(left, right, both, how, True, [None, False])]
    for case in cases:
        rows = oracle.matching_rows(case)
        for strategy in [*STRATEGIES, "auto"]:
            try:
                oracle.check(case, run(host, case, strategy, rng), rows)
            except AssertionError as error:
                story = f"nulls_equal {case.nulls_equal}, by key {case.key_nulls_equal}"
                raise AssertionError(f"{strategy}, {how}, on {case.on}, {story}: {error}") from error


@pytest.mark.parametrize("key", tables.KEY_TYPES, ids=lambda key: key.name)
def test_every_key_type_agrees_with_duckdb(client: dovetail.Client, seed: int, key: tables.KeyType) -> None:
    rng = np.random.default_rng([seed, tables.KEY_TYPES.index(key)])
    left = side(rng, [("k", key_column(rng, key, "uniform", 1500, 0.1))], LEFT_ROW, [], "p")
    right = side(rng, [("k", key_column(rng, key, "uniform", 1025, 0.1))], RIGHT_ROW, [], "p")
    client.put("l", left)
    client.put("r", right)
    for index, how in enumerate(HOWS):
        # Both meanings of null with about half of the kinds each; which half depends on the type.
        nulls_equal = (index + tables.KEY_TYPES.index(key)) % 2 == 0
        case = Case(left, right, [("k", "k")], how, nulls_equal)
        rows = oracle.matching_rows(case)
        for strategy in [*STRATEGIES, "auto"]:
            try:
                oracle.check(case, run(client, case, strategy, rng), rows)
            except AssertionError as error:
                raise AssertionError(f"{strategy}, {how}, nulls_equal {nulls_equal}: {error}") from error


INTEGERS = [key for key in tables.KEY_TYPES if key.group == "int"]
DECIMALS = [key for key in INTEGERS if pa.types.is_decimal(key.type)]
# Integers of two types are among the random cases.
PAIRS_WITH_DECIMALS = [pair for pair in itertools.product(INTEGERS, repeat=2) if any(key in DECIMALS for key in pair)]


@pytest.mark.parametrize(("left_key", "right_key"), PAIRS_WITH_DECIMALS, ids=lambda key: key.name)
def test_integers_and_decimals_of_scale_0_agree_with_duckdb(
    client: dovetail.Client, seed: int, left_key: tables.KeyType, right_key: tables.KeyType
) -> None:
    pair = [INTEGERS.index(left_key), INTEGERS.index(right_key)]
    rng = np.random.default_rng([seed, *pair])
    domain = min(left_key.domain, right_key.domain)
    left_numbers, right_numbers = (tables.numbers(rng, "uniform", rows, domain) for rows in (300, 200))
    keys = [
        tables.with_nulls(rng, key.values(numbers), 0.1)
        for key, numbers in ((left_key, left_numbers), (right_key, right_numbers))
    ]
    left, right = side(rng, [("k", keys[0])], LEFT_ROW, [], "p"), side(rng, [("k", keys[1])], RIGHT_ROW, [], "p")
    client.put("l", left)
    client.put("r", right)
    for index, how in enumerate(HOWS):
        case = Case(left, right, [("k", "k")], how, nulls_equal=index % 2 == 0)
        strategy = [*STRATEGIES, "auto"][(index + sum(pair)) % 6]
        try:
            oracle.check(case, run(client, case, strategy, rng))
        except AssertionError as error:
            raise AssertionError(f"{strategy}, {how}: {error}") from error


def test_a_result_key_of_signed_and_unsigned_integers_can_be_joined_again(client: dovetail.Client, seed: int) -> None:
    rng = np.random.default_rng(seed)
    signed = pa.array([-(1 << 63), -5, -1, 0, 7, (1 << 63) - 1, None], pa.int64())
    unsigned = pa.array([0, 7, 8, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, None], pa.uint64())
    left, right = side(rng, [("k", signed)], "a", [], "p"), side(rng, [("k", unsigned)], "b", [], "q")
    client.put("signed", left)
    client.put("unsigned", right)
    client.join("signed", "unsigned", on="k", how="full", into="both").wait()
    both = client.get("both")
    assert both.schema.field("k").type == pa.decimal128(20, 0)
    assert both.num_rows == 11
    both = both.select(["k"]).append_column(LEFT_ROW, pa.array(np.arange(both.num_rows)))
    client.put("l", both)
    for table, row in ((left, "a"), (right, "b")):
        table = table.rename_columns([RIGHT_ROW if name == row else name for name in table.column_names])
        client.put("r", table, mode="replace")
        for how in HOWS:
            for strategy in [*STRATEGIES, "auto"]:
                case = Case(both, table, [("k", "k")], how)
                try:
                    oracle.check(case, run(client, case, strategy, rng))
                except AssertionError as error:
                    raise AssertionError(f"{strategy}, {how}, {table.schema.field('k').type}: {error}") from error


@pytest.mark.parametrize("kind", tables.PAYLOADS)
def test_every_payload_type_is_joined_unchanged(client: dovetail.Client, seed: int, kind: str) -> None:
    rng = np.random.default_rng([seed, list(tables.PAYLOADS).index(kind)])
    key = tables.KEY_TYPES[7]
    left = side(rng, [("k", key_column(rng, key, "uniform", 1300, 0))], LEFT_ROW, [kind], "p")
    right = side(rng, [("k", key_column(rng, key, "uniform", 700, 0))], RIGHT_ROW, [kind, kind], "q")
    client.put("l", left)
    client.put("r", right)
    for name, table in (("l", left), ("r", right)):
        back = client.get(name)
        assert back.schema == table.schema
        for column in table.column_names:
            assert oracle.repr_list(back[column]) == oracle.repr_list(table[column]), column
    for how in ("inner", "full"):
        case = Case(left, right, [("k", "k")], how)
        rows = oracle.matching_rows(case)
        for strategy in STRATEGIES:
            try:
                oracle.check(case, run(client, case, strategy, rng), rows)
            except AssertionError as error:
                raise AssertionError(f"{strategy}, {how}: {error}") from error


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("empty", ["left", "right", "both"])
def test_empty_sides_join(client: dovetail.Client, seed: int, strategy: str, empty: str) -> None:
    rng = np.random.default_rng(seed)
    key = tables.KEY_TYPES[7]
    rows = {"left": (0, 500), "right": (500, 0), "both": (0, 0)}[empty]
    left = side(rng, [("k", key_column(rng, key, "uniform", rows[0], 0.1))], LEFT_ROW, ["string", "list"], "p")
    right = side(rng, [("k", key_column(rng, key, "uniform", rows[1], 0.1))], RIGHT_ROW, ["dictionary", "struct"], "q")
    client.put("l", left)
    client.put("r", right)
    for how in HOWS:
        case = Case(left, right, [("k", "k")], how)
        oracle.check(case, run(client, case, strategy, rng))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_results_much_larger_than_the_inputs_stream(host: dovetail.Client, long_run: bool, strategy: str) -> None:
    count = 3000 if long_run else 1000
    # Each of three keys, `count` times on both sides; the result is 3 * count * count rows.
    keys = pa.array(np.repeat(np.arange(3), count) << 16)
    left = pa.table({"k": keys, "a": pa.array(np.arange(3 * count))})
    right = pa.table({"k": keys, "b": pa.array(np.arange(3 * count) * 7)})
    host.put("l", left, mode="replace")
    host.put("r", right, mode="replace")
    with host.join("l", "r", on="k", strategy=strategy, retain_seconds=0) as result:
        rows, sum_a, sum_b, products = 0, 0, 0, 0
        for batch in result.reader():
            a, b = batch["a"].to_numpy(), batch["b"].to_numpy()
            rows += batch.num_rows
            sum_a, sum_b, products = sum_a + int(a.sum()), sum_b + int(b.sum()), products + int((a * b).sum())
    a, b = left["a"].to_numpy(), right["b"].to_numpy()
    assert rows == 3 * count * count
    assert (sum_a, sum_b) == (count * int(a.sum()), count * int(b.sum()))
    groups = (slice(index * count, (index + 1) * count) for index in range(3))
    assert products == sum(int(a[group].sum()) * int(b[group].sum()) for group in groups)


def test_random_joins_agree_with_duckdb(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    """A fixed number of random cases, or as many as fit into the time; each with a strategy, or all of them."""
    only = os.environ.get("DOVETAIL_CASE")
    seconds = request.config.getoption("--oracle-seconds")
    if only:
        numbers, deadline = iter([int(only)]), math.inf
    elif seconds is None:
        numbers, deadline = iter(range(CASES)), math.inf
    else:
        numbers, deadline = itertools.count(), time.monotonic() + seconds
    done = skipped = refusals = rows_out = 0
    number = next(numbers, None)
    while number is not None and time.monotonic() < deadline:
        devices, memory = RANDOM_HOSTS[(number // GROUP) % len(RANDOM_HOSTS)]
        folder = tmp_path_factory.mktemp("random")
        with Server(folder, devices=devices, device_memory=memory, host_memory="2GiB") as server:
            with server.connect() as client:
                group = number // GROUP
                while number is not None and number // GROUP == group and time.monotonic() < deadline:
                    try:
                        rows, checked, refused = one_random_case(client, seed, number)
                        rows_out, done, refusals = rows_out + rows, done + checked, refusals + refused
                    except oracle.TooLarge:
                        skipped += 1
                    drop_all(client)
                    number = next(numbers, None)
                clean(server, client)
    print(
        f"seed {seed}: {done} random joins right, {rows_out:,} rows; {refusals} refused for want of device memory, "
        f"{skipped} too large for a test"
    )
    assert only or done > 5 * refusals, f"{done} joins were run, and {refusals} refused: the devices are too small"


def one_random_case(client: dovetail.Client, seed: int, number: int) -> tuple[int, int, int]:
    """Rows that were compared, joins that were right, and joins that were refused for want of device memory."""
    rng = np.random.default_rng([seed, number])
    case = random_case(rng)
    rows = oracle.matching_rows(case, RESULT_ROWS_MAX)
    strategies = STRATEGIES if rng.random() < 0.2 else [str(rng.choice([*STRATEGIES, "auto"]))]
    options = {"batch_rows": int(rng.choice([1, 100, 5000]))} if rng.random() < 0.2 and len(rows[0]) < 2000 else {}
    strategy, checked, refused = "none yet", 0, 0
    try:
        send(client, "l", case.left, rng)
        send(client, "r", case.right, rng)
        for strategy in strategies:
            try:
                result = run(client, case, strategy, rng, **options)
            except dovetail.Exhausted as error:
                # A strategy that does not fit into so little memory says so, before it starts.
                if "of device memory, with table" not in str(error):
                    raise
                refused += 1
                continue
            oracle.check(case, result, rows)
            checked += 1
    except (AssertionError, dovetail.Error, pa.ArrowException) as error:
        raise AssertionError(
            f"seed {seed}, case {number} (repeat with DOVETAIL_CASE={number} --seed {seed}), strategy {strategy}, "
            f"{case.story}: {type(error).__name__}: {error}"
        ) from error
    return len(rows[0]) * checked, checked, refused


@pytest.mark.parametrize("how", HOWS)
def test_the_oracle_accepts_right_results_and_rejects_wrong_ones(how: str) -> None:
    """A join by two loops passes; the same with a row missing, doubled, or a value changed does not."""
    left = pa.table({"k": [1, 2, 2, None, 5], LEFT_ROW: range(5), "p": ["a", "b", None, "d", "e"]})
    right = pa.table({"j": [2, 2, 3, None], RIGHT_ROW: range(4), "p": [0.5, float("nan"), -0.0, None]})
    for nulls_equal in (False, True):
        case = Case(left, right, [("k", "j")], how, nulls_equal)
        result = loops(case)
        oracle.check(case, result)
        wrong = [result.slice(1), pa.concat_tables([result, result.slice(0, 1)])]
        name = next(name for name in result.column_names if name.startswith("p"))
        values = result[name].to_pylist()
        changed = next(index for index, value in enumerate(values) if value is not None)
        values[changed] = {"b": "c"}.get(values[changed], "z") if isinstance(values[changed], str) else 7.25
        wrong.append(result.set_column(result.column_names.index(name), name, pa.array(values, result[name].type)))
        for table in wrong:
            with pytest.raises(AssertionError):
                oracle.check(case, table)


def loops(case: Case) -> pa.Table:
    lefts, rights = case.left.to_pylist(), case.right.to_pylist()

    def match(left: dict[str, object], right: dict[str, object]) -> bool:
        return left["k"] == right["j"] if left["k"] is not None else case.nulls_equal and right["j"] is None

    pairs = [(one, other) for one in lefts for other in rights if match(one, other)]
    alone_left = [one for one in lefts if not any(match(one, other) for other in rights)]
    alone_right = [other for other in rights if not any(match(one, other) for one in lefts)]
    if case.how in ("left_semi", "left_anti"):
        kept = alone_left if case.how == "left_anti" else [one for one in lefts if one not in alone_left]
        return pa.Table.from_pylist(kept, case.left.schema)
    if case.how in ("right_semi", "right_anti"):
        kept = alone_right if case.how == "right_anti" else [other for other in rights if other not in alone_right]
        return pa.Table.from_pylist(kept, case.right.schema)
    rows = list(pairs)
    if case.how in ("left", "full"):
        rows += [(one, None) for one in alone_left]
    if case.how in ("right", "full"):
        rows += [(None, other) for other in alone_right]
    columns = [("k", "k", pa.int64()), (LEFT_ROW, LEFT_ROW, pa.int64()), ("p", "p", pa.string())]
    made = {name: pa.array([one[column] if one else None for one, _ in rows], type_) for name, column, type_ in columns}
    made["k"] = pa.array([one["k"] if one else other["j"] for one, other in rows], pa.int64())
    made[RIGHT_ROW] = pa.array([other[RIGHT_ROW] if other else None for _, other in rows], pa.int64())
    made["p_right"] = pa.array([other["p"] if other else None for _, other in rows], pa.float64())
    return pa.table(made)
