"""Payload of every Arrow type, through every kind of join.

DuckDB says which rows match (:mod:`oracle`); what is in them is compared as Python values, by index, so that no other
engine has to know the type. Of Arrow's types pyarrow has no intervals of months or of days, only those of months, days
and nanoseconds.
"""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dovetail
import oracle
from harness import GPUS, Server
from oracle import HOWS, LEFT_ROW, RIGHT_ROW, STRATEGIES, Case
from tables import Rng


def _required(name: str, type_: pa.DataType) -> pa.Field:
    return pa.field(name, type_, nullable=False)


DICTIONARY_KEYS = [pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]

TYPES: list[pa.DataType] = [
    pa.null(),
    pa.bool_(),
    *(pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()),
    *(pa.float16(), pa.float32(), pa.float64()),
    *(pa.decimal32(7, 2), pa.decimal64(15, 3), pa.decimal128(38, 10), pa.decimal128(5, -2), pa.decimal256(70, 5)),
    *(pa.date32(), pa.date64()),
    *(pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
    *(pa.timestamp(unit, zone) for unit in ("s", "ms", "us", "ns") for zone in (None, "Europe/Vienna")),
    *(pa.duration(unit) for unit in ("s", "ms", "us", "ns")),
    pa.month_day_nano_interval(),
    *(pa.string(), pa.large_string(), pa.string_view()),
    *(pa.binary(), pa.large_binary(), pa.binary_view()),
    *(pa.binary(width) for width in (0, 1, 16, 17)),
    *(pa.dictionary(keys, pa.string()) for keys in DICTIONARY_KEYS),
    *(
        pa.dictionary(pa.int16(), values)
        for values in (
            pa.large_string(),
            pa.string_view(),
            pa.binary_view(),
            pa.binary(3),
            pa.bool_(),
            pa.int64(),
            pa.decimal128(20, 2),
            pa.timestamp("us", "UTC"),
            pa.list_(pa.int32()),
            pa.struct([("a", pa.string()), ("b", pa.int8())]),
        )
    ),
    *(make(pa.string()) for make in (pa.list_, pa.large_list, pa.list_view, pa.large_list_view)),
    *(
        pa.list_(pa.int32(), 3),
        pa.list_(pa.string(), 2),
        pa.list_(pa.int8(), 0),
        pa.list_(_required("item", pa.int8()), 2),
    ),
    pa.list_(pa.list_(pa.float64())),
    pa.list_(pa.dictionary(pa.int8(), pa.string())),
    pa.list_(pa.list_view(pa.int64())),
    pa.list_view(pa.dictionary(pa.int8(), pa.string())),
    pa.list_view(pa.run_end_encoded(pa.int32(), pa.bool_())),
    pa.list_view(pa.list_view(pa.string())),
    pa.large_list_view(pa.struct([("a", pa.list_(pa.int8()))])),
    pa.list_(pa.bool_()),
    pa.list_(pa.null()),
    pa.list_(pa.string_view(), 2),
    pa.list_(pa.run_end_encoded(pa.int32(), pa.string())),
    pa.struct([]),
    pa.struct([("a", pa.int32()), ("b", pa.string())]),
    pa.struct([("a", pa.struct([("b", pa.struct([("c", pa.int64())])), ("d", pa.string_view())])), ("e", pa.bool_())]),
    pa.struct([_required("a", pa.int32()), _required("b", pa.string()), _required("c", pa.list_(pa.int8()))]),
    pa.struct([_required("a", pa.struct([_required("b", pa.list_(_required("item", pa.int16()), 2))]))]),
    pa.struct([("a", pa.dictionary(pa.int32(), pa.string())), ("b", pa.dictionary(pa.int8(), pa.int64()))]),
    pa.struct([("a", pa.dense_union([pa.field("i", pa.int32()), pa.field("s", pa.string())]))]),
    pa.struct([("a", pa.run_end_encoded(pa.int16(), pa.int64())), ("b", pa.null())]),
    pa.map_(pa.string(), pa.int32()),
    pa.map_(pa.int32(), pa.list_(pa.string()), keys_sorted=True),
    pa.map_(pa.string(), pa.struct([("a", pa.map_(pa.int8(), pa.float32()))])),
    *(
        make(fields)
        for make in (pa.sparse_union, pa.dense_union)
        for fields in (
            [pa.field("i", pa.int32()), pa.field("s", pa.string()), pa.field("l", pa.list_(pa.float64()))],
            [_required("i", pa.int32()), _required("s", pa.string())],
            [pa.field("d", pa.dictionary(pa.int8(), pa.string())), pa.field("n", pa.null())],
        )
    ),
    pa.dense_union([pa.field("i", pa.int32()), pa.field("s", pa.string())], type_codes=[5, 100]),
    pa.dense_union([pa.field("u", pa.sparse_union([pa.field("i", pa.int32()), pa.field("b", pa.bool_())]))]),
    pa.list_(pa.dense_union([pa.field("d", pa.dictionary(pa.int8(), pa.string())), pa.field("i", pa.int8())])),
    *(pa.run_end_encoded(ends, pa.string()) for ends in (pa.int16(), pa.int32(), pa.int64())),
    pa.run_end_encoded(pa.int32(), pa.int64()),
    pa.run_end_encoded(pa.int32(), pa.list_(pa.int16())),
    pa.run_end_encoded(pa.int32(), pa.dictionary(pa.int8(), pa.string())),
    pa.uuid(),
    pa.json_(),
    pa.bool8(),
    pa.fixed_shape_tensor(pa.float32(), (2, 2)),
]

NAMES = [f"{index}: {type_}".replace("\n", " ") for index, type_ in enumerate(TYPES)]

_DAY = datetime.date(1970, 1, 1)

# A value of each type that is not made of others, from a number of 0 to 999.
_VALUES: list[tuple[Callable[[pa.DataType], bool], Callable[[int], object]]] = [
    (pa.types.is_boolean, lambda n: n % 2 == 0),
    (pa.types.is_signed_integer, lambda n: n % 256 - 128),
    (pa.types.is_unsigned_integer, lambda n: n % 256),
    (pa.types.is_floating, lambda n: [float("nan"), -0.0, float("-inf"), 0.5, 5e-8][n] if n < 5 else n * 0.25),
    (pa.types.is_decimal, lambda n: decimal.Decimal((n - 500) * 100)),
    (pa.types.is_date, lambda n: _DAY + datetime.timedelta(days=n - 500)),
    (pa.types.is_time32, lambda n: datetime.time(n % 24, n % 60, n % 59)),
    (pa.types.is_time64, lambda n: datetime.time(n % 24, n % 60, n % 59, n)),
    (pa.types.is_timestamp, lambda n: (n - 500) * 1_000_003),
    (pa.types.is_duration, lambda n: (n - 500) * 1_000_003),
    (pa.types.is_interval, lambda n: (n % 13, n - 500, n * 1_000_003)),
    (lambda t: pa.types.is_string(t) or pa.types.is_large_string(t) or pa.types.is_string_view(t), lambda n: _text(n)),
    (
        lambda t: pa.types.is_binary(t) or pa.types.is_large_binary(t) or pa.types.is_binary_view(t),
        lambda n: _text(n).encode() + b"\xff\0",
    ),
]


def _text(number: int) -> str:
    # Empty, within a view, and beyond it.
    return ["", "a", "ß", "🦀 twelve"][number % 4] * (number % 6) + str(number) * (number % 3)


def values(rng: Rng, type_: pa.DataType, rows: int, nullable: bool = True) -> pa.Array:
    """An array of that type and length, with nulls at every level that may have some."""
    children = [type_.field(index) for index in range(type_.num_fields)] if pa.types.is_nested(type_) else []
    if isinstance(type_, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(type_, values(rng, type_.storage_type, rows, nullable))
    if pa.types.is_null(type_):
        return pa.nulls(rows)
    if pa.types.is_dictionary(type_):
        # Some values are in it twice, some are null, and some are used by no row.
        dictionary = values(rng, type_.value_type, 60)
        return pa.DictionaryArray.from_arrays(
            pa.array(rng.integers(0, 50, rows), type_.index_type, mask=_mask(rng, rows, nullable)), dictionary
        )
    if pa.types.is_run_end_encoded(type_):
        ends = np.unique(np.append(rng.integers(1, max(rows, 2), rows // 3), rows)) if rows else np.zeros(0, np.int64)
        inner = values(rng, type_.value_type, len(ends))
        return pa.RunEndEncodedArray.from_arrays(pa.array(ends, type_.run_end_type), inner, type_)
    if pa.types.is_union(type_):
        return _union(rng, type_, rows)
    mask = _mask(rng, rows, nullable)
    nulls = pa.array(mask)
    if pa.types.is_struct(type_):
        if not children:
            return pa.array([None if null else {} for null in mask], type_)
        columns = [values(rng, field.type, rows, field.nullable) for field in children]
        return pa.StructArray.from_arrays(columns, fields=children, mask=nulls)
    if pa.types.is_fixed_size_list(type_):
        items = values(rng, type_.value_type, rows * type_.list_size, type_.value_field.nullable)
        if type_.list_size == 0:
            return pa.array([None if null else [] for null in mask], type_)
        return pa.FixedSizeListArray.from_arrays(items, type=type_, mask=nulls)
    if pa.types.is_list_view(type_) or pa.types.is_large_list_view(type_):
        # In any order, and sharing values.
        offset_type = pa.int64() if pa.types.is_large_list_view(type_) else pa.int32()
        items = values(rng, type_.value_type, rows + 3)
        sizes = rng.integers(0, 4, rows)
        offsets = rng.integers(0, rows + 1, rows)
        make = pa.LargeListViewArray if pa.types.is_large_list_view(type_) else pa.ListViewArray
        return make.from_arrays(
            pa.array(offsets, offset_type), pa.array(sizes, offset_type), items, type=type_, mask=nulls
        )
    if pa.types.is_map(type_) or pa.types.is_list(type_) or pa.types.is_large_list(type_):
        # Not from the beginning of the values, and some behind nulls.
        offset_type = pa.int64() if pa.types.is_large_list(type_) else pa.int32()
        offsets = pa.array(2 + np.append(0, np.cumsum(rng.integers(0, 4, rows))), offset_type)
        count = offsets[-1].as_py() + 2
        if pa.types.is_map(type_):
            keys = values(rng, type_.key_type, count, nullable=False)
            return pa.MapArray.from_arrays(offsets, keys, values(rng, type_.item_type, count), type=type_, mask=nulls)
        make = pa.LargeListArray if pa.types.is_large_list(type_) else pa.ListArray
        return make.from_arrays(offsets, values(rng, type_.value_type, count), type=type_, mask=nulls)
    if pa.types.is_fixed_size_binary(type_) and not pa.types.is_decimal(type_):
        made = [rng.bytes(type_.byte_width) for _ in range(rows)]
    else:
        value = next(value for is_it, value in _VALUES if is_it(type_))
        made = [value(int(number)) for number in rng.integers(0, 1000, rows)]
    return pa.array([None if null else one for null, one in zip(mask, made, strict=True)], type_)


def _mask(rng: Rng, rows: int, nullable: bool) -> np.ndarray:
    return rng.random(rows) < (0.2 if nullable else 0)


def _union(rng: Rng, type_: pa.UnionType, rows: int) -> pa.Array:
    fields = [type_.field(index) for index in range(type_.num_fields)]
    names = [field.name for field in fields]
    which = rng.integers(0, len(fields), rows)
    codes = pa.array(np.array(type_.type_codes)[which] if rows else [], pa.int8())
    if type_.mode == "sparse":
        children = [values(rng, field.type, rows, field.nullable) for field in fields]
        made = pa.UnionArray.from_sparse(codes, children, names, type_.type_codes)
    else:
        children = [values(rng, field.type, rows + 1, field.nullable) for field in fields]
        # Of each child a part, in order.
        offsets = np.zeros(rows, np.int32)
        for child in range(len(fields)):
            offsets[which == child] = np.arange(np.count_nonzero(which == child))
        made = pa.UnionArray.from_dense(codes, pa.array(offsets), children, names, type_.type_codes)
    # pyarrow takes names of the children, and not whether they may be null; what the array is sent as does.
    return made if made.type == type_ else _as_type(made, type_)


def _as_type(array: pa.Array, type_: pa.DataType) -> pa.Array:
    """The same buffers under a type that differs in what fields may be null only."""
    return pa.Array._import_from_c_capsule(type_.__arrow_c_schema__(), array.__arrow_c_array__()[1])


def side(rng: Rng, types: list[pa.DataType], row: str, prefix: str, rows: int, keys: int) -> pa.Table:
    """Keys with duplicates and nulls, row numbers, and payload of these types, in batches that are slices."""
    sizes = [rows // 2, 0, rows // 3, rows - rows // 2 - rows // 3]
    columns = {
        "k": pa.array(rng.integers(0, keys, rows), pa.int32(), mask=_mask(rng, rows, True)),
        row: pa.array(range(rows), pa.int64()),
    }
    for index, type_ in enumerate(types):
        batches = [values(rng, type_, size + 5).slice(3, size) for size in sizes]
        columns[f"{prefix}{index}"] = pa.chunked_array(batches, type_)
    return pa.table(columns)


def send(client: dovetail.Client, name: str, table: pa.Table) -> None:
    """In the batches that it has; our client would put small ones together."""
    writer, _ = flight.connect(client.uri).do_put(flight.FlightDescriptor.for_path(name), table.schema)
    for batch in table.to_batches():
        writer.write_batch(batch)
    writer.close()


def check(case: Case, result: pa.Table) -> None:
    """Every row that DuckDB finds is there, with the values that were uploaded."""
    result.validate(full=True)
    sides = [(case.left, LEFT_ROW), (case.right, RIGHT_ROW)]
    asked = [(table, row, rows) for (table, row), rows in zip(sides, oracle.matching_rows(case), strict=True)]
    asked = [(table, row, rows) for table, row, rows in asked if row in result.column_names]
    # Rows come in no order; their numbers tell them apart, and None has no place among numbers.
    found = list(zip(*(result[row].to_pylist() for _, row, _ in asked), strict=True))
    expected = list(zip(*(rows.to_pylist() for _, _, rows in asked), strict=True))
    by_row = [
        sorted(range(len(places)), key=lambda at, places=places: repr(places[at])) for places in (found, expected)
    ]
    assert [found[at] for at in by_row[0]] == [expected[at] for at in by_row[1]]
    for table, row, rows in asked:
        places = rows.to_pylist()
        for name in table.column_names:
            if name in ("k", row):
                continue
            type_ = table.schema.field(name).type
            assert _plain(result.schema.field(name).type) == _plain(type_)
            uploaded, fetched = table[name].to_pylist(), result[name].to_pylist()
            wanted = [None if places[at] is None else uploaded[places[at]] for at in by_row[1]]
            # NaN is not equal to itself, and 0 is to -0.
            assert [repr(fetched[at]) for at in by_row[0]] == [repr(value) for value in wanted], f"{type_}, {case.how}"


def _plain(type_: pa.DataType) -> pa.DataType:
    """A dictionary's values: keys are as wide as the result needs them."""
    return type_.value_type if pa.types.is_dictionary(type_) else type_


@pytest.mark.parametrize("number", range(len(TYPES)), ids=NAMES)
def test_payload_of_every_type_is_in_the_result_of_every_join(client: dovetail.Client, seed: int, number: int) -> None:
    rng = np.random.default_rng([seed, number])
    left = side(rng, [TYPES[number]], LEFT_ROW, "v", rows=90, keys=40)
    right = side(rng, [TYPES[number]], RIGHT_ROW, "w", rows=60, keys=50)
    send(client, "l", left)
    assert client.put("r", right) == 60
    for table, name in ((left, "l"), (right, "r")):
        assert repr(client.get(name).to_pylist()) == repr(table.to_pylist())
    for index, how in enumerate(HOWS):
        # Over all types, each strategy meets each kind of join.
        strategy = STRATEGIES[(number + index) % len(STRATEGIES)]
        with client.join("l", "r", on="k", how=how, strategy=strategy, batch_rows=[None, 7][number % 2]) as result:
            check(Case(left, right, [("k", "k")], how), result.table())


def check_joins(client: dovetail.Client, left: pa.Table, right: pa.Table, *hows: str) -> None:
    for how in hows:
        with client.join("l", "r", on="k", how=how) as result:
            check(Case(left, right, [("k", "k")], how), result.table())


def test_payload_is_shared_with_the_table_if_each_of_its_rows_occurs_once(client: dovetail.Client, seed: int) -> None:
    rng = np.random.default_rng(seed)
    left = side(rng, TYPES, LEFT_ROW, "v", rows=90, keys=40)
    right = side(rng, TYPES, RIGHT_ROW, "w", rows=41, keys=1)
    right = right.set_column(0, "k", pa.array([*range(39), None, None], pa.int32()))
    send(client, "l", left)
    send(client, "r", right)
    check_joins(client, left, right, "left", "inner")


def test_payload_of_joins_without_a_match_is_right(client: dovetail.Client, seed: int) -> None:
    rng = np.random.default_rng(seed)
    left = side(rng, TYPES, LEFT_ROW, "v", rows=9, keys=40)
    right = side(rng, TYPES, RIGHT_ROW, "w", rows=0, keys=1)
    client.put("l", left)
    client.put("r", right)
    check_joins(client, left, right, "inner", "full", "right")


def test_payload_becomes_a_table_that_can_be_fetched_and_joined(client: dovetail.Client, seed: int) -> None:
    rng = np.random.default_rng(seed)
    left = side(rng, TYPES, LEFT_ROW, "v", rows=90, keys=40)
    right = side(rng, TYPES, RIGHT_ROW, "w", rows=60, keys=50)
    send(client, "l", left)
    send(client, "r", right)
    client.submit("l", "r", on="k", how="full", into="both").wait()
    both = client.get("both")
    check(Case(left, right, [("k", "k")], "full"), both)
    # A table as any other, whose rows are where they were when it was fetched.
    again = both.select(["k", *right.column_names[2:]]).append_column(
        RIGHT_ROW, pa.array(range(both.num_rows), pa.int64())
    )
    columns = ["k", "left.l_row", *(f"right.{name}" for name in right.column_names[2:])]
    with client.join("l", "both", on="k", columns=columns) as result:
        found = result.table()
    _, rows = oracle.matching_rows(Case(left, again, [("k", "k")], "inner"))
    for name in right.column_names[2:]:
        uploaded = both[name].to_pylist()
        wanted = sorted(repr(uploaded[row]) for row in rows.to_pylist())
        assert sorted(map(repr, found[name].to_pylist())) == wanted, both.schema.field(name).type


@pytest.mark.skipif(GPUS == 0, reason="a GPU gathers text")
def test_text_gathered_by_a_gpu_equals_the_uploaded_text(
    start: Callable[..., Server], seed: int, tmp_path: Path
) -> None:
    # For so few rows the CPU is the quicker one, unless rates say that it is slow.
    rates = tmp_path / "rates.json"
    settings = {"devices": "cuda:1", "device_memory": "512MiB", "host_memory": "1GiB", "rates_file": rates}
    start(**settings).stop()
    kept = json.loads(rates.read_text())
    for device in kept["devices"]:
        device["rates"] |= {"host_values": 1e3}
    rates.write_text(json.dumps(kept))
    client = start(**settings).connect()

    rng = np.random.default_rng(seed)
    types = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]
    left = side(rng, types, LEFT_ROW, "v", rows=900, keys=400)
    right = side(rng, types, RIGHT_ROW, "w", rows=600, keys=500)
    send(client, "l", left)
    send(client, "r", right)
    for on in [("k", "k"), ("v0", "w0"), ("v2", "w2")]:
        for how in HOWS:
            sides = [(left, "left"), (right, "right")]
            if how.endswith(("_semi", "_anti")):
                sides = [(table, name) for table, name in sides if how.startswith(name)]
            columns = [f"{name}.{column}" for table, name in sides for column in table.column_names if column != "k"]
            for strategy in STRATEGIES:
                with client.join("l", "r", on={on[0]: on[1]}, how=how, strategy=strategy, columns=columns) as result:
                    assert "text also by the GPU" in str(result.explain()), f"{how} by {strategy}"
                    check(Case(left, right, [on], how), result.table())


def test_batches_of_runs_fit_the_range_of_their_16_bit_ends(client: dovetail.Client) -> None:
    rows = 30_000
    ends = pa.array(range(2, rows + 1, 2), pa.int16())
    runs = pa.RunEndEncodedArray.from_arrays(ends, pa.array(range(rows // 2)))
    client.put("l", {"k": [*range(rows)], "v": runs})
    client.put("r", {"k": [*range(rows)] * 3})
    with client.join("l", "r", on="k") as result:
        found = result.table()
    found.validate(full=True)
    assert found.num_rows == 3 * rows
    assert found["v"].to_pylist() == [key // 2 for key in found["k"].to_pylist()]
