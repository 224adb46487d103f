"""Dictionary columns: they come back as such, whatever dictionaries their batches were sent with."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dovetail
from harness import Server

Values = Sequence[object]


def column(
    key_type: pa.DataType, *chunks: Values, value_type: pa.DataType | None = None, ordered: bool = False
) -> pa.ChunkedArray:
    """A chunk for each of the sequences, with its values, once each and in their order, as its dictionary."""

    def chunk(values: Values) -> pa.DictionaryArray:
        distinct = [value for at, value in enumerate(values) if value is not None and value not in values[:at]]
        keys = [None if value is None else distinct.index(value) for value in values]
        return pa.DictionaryArray.from_arrays(pa.array(keys, key_type), pa.array(distinct, value_type), ordered=ordered)

    return pa.chunked_array([chunk(values) for values in chunks])


def keyed(values: pa.ChunkedArray, name: str) -> pa.Table:
    """Rows numbered from 0, in the batches of the column."""
    return pa.table({"k": pa.array(range(len(values))), name: values})


def sorted_values(table: pa.Table, name: str) -> list[object]:
    return [row[name] for row in sorted(table.to_pylist(), key=lambda row: row["k"])]


def names(start: int, end: int) -> list[str]:
    return [f"name {number}" for number in range(start, end)]


def put(server: Server, name: str, table: pa.Table) -> None:
    """Uploads every chunk with the dictionary that it has, where our own client puts small ones together."""
    options = flight.FlightCallOptions(headers=[(b"dovetail-upload-options", b'{"mode": "replace"}')])
    with flight.connect(server.uri) as client:
        writer, _ = client.do_put(flight.FlightDescriptor.for_path(name), table.schema, options)
        writer.write_table(table)
        writer.close()


def joined(server: Server, client: dovetail.Client, values: pa.ChunkedArray) -> pa.Table:
    """The rows of the column with their numbers, as payload of both sides of a join."""
    put(server, "l", keyed(values, "v"))
    put(server, "r", keyed(values, "w"))
    return client.join("l", "r", on="k", how="left").table()


def test_a_table_is_fetched_with_the_dictionaries_that_were_uploaded(server: Server, client: dovetail.Client) -> None:
    values = column(pa.int8(), ["a", "b", None], ["b", "c", "a"], names(0, 100), names(100, 200))
    put(server, "t", keyed(values, "v"))
    # Our own client cannot put these together, and sends them as they are.
    client.put("u", keyed(values, "v"))
    for name in ["t", "u"]:
        back = client.get(name)
        assert back["v"].type == values.type
        assert sorted_values(back, "v") == values.to_pylist()
        # As a stream that replaces its dictionary, too.
        reader = client.reader(name)
        assert reader.schema.field("v").type == values.type
        assert sorted_values(pa.Table.from_batches(list(reader)), "v") == values.to_pylist()


@pytest.mark.parametrize("key_type", [pa.int8(), pa.uint8(), pa.int16(), pa.int32(), pa.uint64()], ids=str)
def test_dictionaries_with_the_same_values_in_every_batch_are_unchanged(
    server: Server, client: dovetail.Client, key_type: pa.DataType
) -> None:
    # As an upload over several streams brings them, or several appends: 40 values each, 200 in all.
    chunks = [names(0, 40), [*names(20, 40), None, *names(0, 20)], names(0, 40)[::-1], names(10, 40), names(0, 40)]
    values = column(key_type, *chunks)
    table = joined(server, client, values)
    for name in ["v", "w"]:
        assert table[name].type == values.type
        assert sorted_values(table, name) == values.to_pylist()


def test_keys_are_widened_if_all_values_together_exceed_their_range(server: Server, client: dovetail.Client) -> None:
    values = column(pa.int8(), names(0, 100), names(100, 200), names(200, 300))
    table = joined(server, client, values)
    for name in ["v", "w"]:
        assert table[name].type == pa.dictionary(pa.int16(), pa.string())
        assert sorted_values(table, name) == values.to_pylist()


@pytest.mark.parametrize(
    ("value_type", "one", "other"),
    [
        (pa.bool_(), [True, None, True], [False, True, None]),
        (pa.duration("s"), [datetime.timedelta(seconds=1)], [datetime.timedelta(seconds=2), None]),
        (pa.list_(pa.int32()), [[1, 2], [3], [1, 2]], [[3], None, []]),
        (pa.binary(2), [b"ab", None, b"cd"], [b"cd", b"ef"]),
        (pa.float64(), [1.5, -0.0, None], [0.0, 1.5]),
    ],
    ids=str,
)
def test_dictionaries_of_any_value_type_are_merged(
    server: Server, client: dovetail.Client, value_type: pa.DataType, one: Values, other: Values
) -> None:
    values = column(pa.int8(), one, other, value_type=value_type)
    table = joined(server, client, values)
    for name in ["v", "w"]:
        assert table[name].type == values.type
        assert [repr(value) for value in sorted_values(table, name)] == [repr(value) for value in values.to_pylist()]


@pytest.mark.parametrize("key_type", [pa.int8(), pa.int16()], ids=str)
def test_batches_with_nested_dictionaries_fit_the_range_of_their_keys(
    server: Server, client: dovetail.Client, key_type: pa.DataType
) -> None:
    # 300 values in all, of which keys of eight bits can number 128: the server then makes smaller batches.
    chunks = column(key_type, names(0, 100), names(100, 200), names(200, 300)).chunks
    values = pa.chunked_array([pa.StructArray.from_arrays([chunk], ["d"]) for chunk in chunks])
    table = joined(server, client, values)
    for name in ["v", "w"]:
        assert table[name].type == values.type
        assert sorted_values(table, name) == values.to_pylist()


def test_an_ordered_dictionary_stays_ordered_unless_it_is_merged(server: Server, client: dovetail.Client) -> None:
    order = ["low", "middle", "high"]
    one = column(pa.int8(), [*order, "middle"], ordered=True)
    assert one.type.ordered
    table = joined(server, client, one)
    assert table["v"].type == table["w"].type == one.type
    assert table["v"].chunk(0).dictionary.to_pylist() == order
    # Nobody knows the order of the values of two dictionaries.
    two = column(pa.int8(), order, ["high", "highest"], ordered=True)
    table = joined(server, client, two)
    assert not table["v"].type.ordered and table["v"].type.value_type == pa.string()
    assert sorted_values(table, "v") == two.to_pylist()
    put(server, "t", keyed(two, "v"))
    assert client.get("t")["v"].type.ordered, "a table comes back as it was sent"


@pytest.mark.parametrize("how", ["inner", "left", "right", "full", "left_semi", "right_anti"])
@pytest.mark.parametrize(
    "key_types", [(pa.int8(), pa.int8()), (pa.int16(), pa.int8()), (pa.int8(), pa.uint32())], ids=str
)
@pytest.mark.parametrize("ordered", [False, True], ids=["", "ordered"])
def test_keys_of_both_sides_become_one_dictionary(
    client: dovetail.Client, how: str, key_types: tuple[pa.DataType, pa.DataType], ordered: bool
) -> None:
    # 100 values on either side, 150 together: more than keys of eight bits can number.
    lefts, rights = names(0, 100), names(50, 150)
    client.put("l", pa.table({"k": column(key_types[0], lefts, ordered=ordered)}))
    client.put("r", pa.table({"k": column(key_types[1], rights)}))
    table = client.join("l", "r", on="k", how=how).table()
    expected = {
        "inner": names(50, 100),
        "left": lefts,
        "right": rights,
        "full": names(0, 150),
        "left_semi": names(50, 100),
        "right_anti": names(100, 150),
    }[how]
    assert pa.types.is_dictionary(table["k"].type), table["k"].type
    assert table["k"].type.value_type == pa.string()
    assert sorted(table["k"].to_pylist()) == sorted(expected)
