"""The independent answer: DuckDB says which rows match, and pyarrow puts the expected table together.

DuckDB gets the keys, in a form that it compares as Dovetail promises to, and row numbers; it answers with pairs of row
numbers. The expected rows are then taken from the uploaded tables themselves, so that payload of any type can be
compared exactly, and without either engine's idea of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

import dovetail
from tables import take

LEFT_ROW, RIGHT_ROW = "l_row", "r_row"

HOWS = ["inner", "left", "right", "full", "left_semi", "left_anti", "right_semi", "right_anti"]
STRATEGIES = ["hash", "radix-hash", "radix-hash-gfur", "sort-merge", "sort-merge-gfur"]


@dataclass
class Case:
    """A join to check. Both tables have a column of row numbers, `l_row` and `r_row`."""

    left: pa.Table
    right: pa.Table
    on: list[tuple[str, str]]
    how: str
    nulls_equal: bool = False
    """Whether nulls match nulls in the keys that do not say."""
    key_nulls_equal: list[bool | None] | None = None
    """The same for each key; ``None`` for one that does not say, or for all."""
    columns: list[str] | None = None
    story: dict[str, object] = field(default_factory=dict)

    def nulls_match(self, key: int) -> bool:
        """Whether a null matches a null in that key."""
        said = self.key_nulls_equal[key] if self.key_nulls_equal else None
        return self.nulls_equal if said is None else said

    def pairs(self) -> list[dovetail.On]:
        """The keys, as the client takes them."""
        said = self.key_nulls_equal or [None] * len(self.on)
        return [dovetail.On(left, right, equal) for (left, right), equal in zip(self.on, said, strict=True)]


def matching_rows(case: Case, limit: int = 1 << 62) -> tuple[pa.Array, pa.Array]:
    """Row numbers of left and right of each row of the result, null where a side has no row, in order.

    Raises:
        TooLarge: When there are more than `limit`.
    """
    with duckdb.connect(config={"threads": 2}) as db:
        db.register("l", _keys(case.left, LEFT_ROW, [left for left, _ in case.on]))
        db.register("r", _keys(case.right, RIGHT_ROW, [right for _, right in case.on]))
        equal = ["IS NOT DISTINCT FROM" if case.nulls_match(index) else "=" for index in range(len(case.on))]
        condition = " AND ".join(f"l.k{index} {operator} r.k{index}" for index, operator in enumerate(equal))
        kind = case.how.upper()
        match case.how:
            case "inner" | "left" | "right" | "full":
                select = f"SELECT l.n AS l, r.n AS r FROM l {kind} JOIN r ON {condition}"
            case "left_semi" | "left_anti":
                no = "NOT" if case.how == "left_anti" else ""
                select = (
                    f"SELECT l.n AS l, NULL::BIGINT AS r FROM l WHERE {no} EXISTS (SELECT 1 FROM r WHERE {condition})"
                )
            case "right_semi" | "right_anti":
                no = "NOT" if case.how == "right_anti" else ""
                select = (
                    f"SELECT NULL::BIGINT AS l, r.n AS r FROM r WHERE {no} EXISTS (SELECT 1 FROM l WHERE {condition})"
                )
            case other:
                raise ValueError(other)
        if limit < 1 << 62:
            [(count,)] = db.sql(f"SELECT count(*) FROM ({select})").fetchall()
            if count > limit:
                raise TooLarge(count)
        answer = db.sql(f"{select} ORDER BY l NULLS LAST, r NULLS LAST").to_arrow_table()
    return answer["l"].combine_chunks(), answer["r"].combine_chunks()


class TooLarge(Exception):
    """The result has more rows than a test wants to wait for."""


def _keys(table: pa.Table, row: str, names: list[str]) -> pa.Table:
    columns = {f"k{index}": _comparable(table[name]) for index, name in enumerate(names)}
    return pa.table({"n": table[row], **columns})


def _comparable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A key in a type whose equality DuckDB and the documentation of Dovetail agree on."""
    type_ = column.type
    if pa.types.is_dictionary(type_):
        return _comparable(column.cast(type_.value_type))
    if pa.types.is_float16(type_):
        return column.cast(pa.float32())
    if pa.types.is_decimal(type_) and type_.scale == 0:
        # The other side may be integers, which DuckDB compares with these.
        return column.cast(pa.decimal128(38, 0))
    if pa.types.is_decimal(type_):
        # Of one scale, so equal numbers have equal digits.
        return column.cast(pa.decimal256(76, type_.scale)).cast(pa.string())
    if pa.types.is_temporal(type_):
        if pa.types.is_date32(type_) or pa.types.is_time32(type_):
            return column.cast(pa.int32()).cast(pa.int64())
        return column.cast(pa.int64())
    if pa.types.is_fixed_size_binary(type_) or pa.types.is_binary_view(type_):
        return column.cast(pa.binary())
    if pa.types.is_string_view(type_):
        return column.cast(pa.string())
    return column


def expected_columns(case: Case) -> list[tuple[str, str, str]]:
    """The result's columns as (name, source, column); source is ``left``, ``right`` or ``key``."""
    lefts, rights = dict(case.on), {right: left for left, right in case.on}
    only = {"semi": True, "anti": True}.get(case.how.rpartition("_")[2], False)
    side = case.how.partition("_")[0] if only else None
    if case.columns is not None:
        found = []
        for column in case.columns:
            prefix, _, name = column.partition(".")
            if prefix in ("left", "right") and name:
                found.append((name, prefix, name))
            elif side:
                found.append((column, side, column))
            elif column in lefts and (lefts[column] == column or column not in case.right.column_names):
                found.append((column, "key", column))
            else:
                found.append((column, "left" if column in case.left.column_names else "right", column))
    elif side:
        table = case.left if side == "left" else case.right
        return [(name, side, name) for name in table.column_names]
    else:
        found = [(left, "key", left) for left, _ in case.on]
        found += [(name, "left", name) for name in case.left.column_names if name not in lefts]
        found += [(name, "right", name) for name in case.right.column_names if name not in rights]
    names = [name for name, _, _ in found]
    taken = list(names)
    for index, (name, source, column) in enumerate(found):
        if source == "right" and taken.count(name) > 1:
            found[index] = (f"{name}_right", source, column)
            taken[index] = f"{name}_right"
    return found


def check(case: Case, result: pa.Table, rows: tuple[pa.Array, pa.Array] | None = None) -> None:
    """Compares a result with the expected one, as multisets of rows: every value of every column, to the bit."""
    result.validate(full=True)
    left_rows, right_rows = rows or matching_rows(case)
    columns = expected_columns(case)
    names = [name for name, _, _ in columns]
    assert result.column_names == names, f"columns {result.column_names}, expected {names}"
    assert result.num_rows == len(left_rows), f"{result.num_rows} rows, expected {len(left_rows)}"

    order = [(name, "ascending") for name in (LEFT_ROW, RIGHT_ROW) if name in names]
    assert order, "a case keeps the row numbers, to tell its rows apart"
    by_row = pc.sort_indices(result.select([name for name, _ in order]), order)
    if order[0][0] == RIGHT_ROW:
        by_right = pc.sort_indices(right_rows)
        left_rows, right_rows = left_rows.take(by_right), right_rows.take(by_right)
    for name, rows_of_side in ((LEFT_ROW, left_rows), (RIGHT_ROW, right_rows)):
        if name in names:
            _same(result[name].take(by_row), pa.chunked_array([rows_of_side]), f"which rows match ({name})")

    right_of = dict(case.on)
    for name, source, column in columns:
        if source == "left":
            expected = take(case.left[column], left_rows)
        elif source == "right":
            expected = take(case.right[column], right_rows)
        else:
            expected = _key(case, column, right_of[column], left_rows, right_rows)
        found = take(result[name], by_row)
        if source == "key":
            # -0 and 0 are one key, and either may stand for it.
            found, expected = _without_negative_zeros(found), _without_negative_zeros(expected)
            if (
                case.how in ("right", "full")
                and case.left.schema.field(column).type != case.right.schema.field(right_of[column]).type
            ):
                # Keys of two types come in one that holds the values of both. The cast fails where this one does not.
                expected = expected.cast(found.type)
        _same(found, expected, f"column {name!r}")


def _key(case: Case, left: str, right: str, left_rows: pa.Array, right_rows: pa.Array) -> pa.ChunkedArray:
    """The left value where there is a left row, else the right value, as the left type; of decimals, as a wide one."""
    from_left = take(case.left[left], left_rows)
    if not left_rows.null_count:
        return from_left
    types = [case.left.schema.field(left).type, case.right.schema.field(right).type]
    values = [type_.value_type if pa.types.is_dictionary(type_) else type_ for type_ in types]
    plain = values[0]
    if values[0] != values[1] and any(pa.types.is_decimal(type_) for type_ in values):
        # One that holds the values of both, which the left one may not.
        plain = pa.decimal256(76, values[0].scale if pa.types.is_decimal(values[0]) else 0)
    from_right = _cast(take(case.right[right], right_rows), plain)
    from_left = _cast(from_left, plain)
    storage = plain
    if pa.types.is_string_view(plain):
        storage = pa.string()
    elif pa.types.is_binary_view(plain):
        storage = pa.binary()
    chosen = pc.if_else(
        pc.is_valid(left_rows), _one_chunk(from_left).cast(storage), _one_chunk(from_right).cast(storage)
    )
    return pa.chunked_array([chosen.cast(plain)])


def _without_negative_zeros(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if not pa.types.is_floating(column.type):
        return column
    wide = column.cast(pa.float64())
    return pc.if_else(pc.equal(wide, 0.0), 0.0, wide)


def _cast(column: pa.ChunkedArray, plain: pa.DataType) -> pa.ChunkedArray:
    if pa.types.is_dictionary(column.type):
        # In two steps: pyarrow does not cast from a dictionary to a string view.
        column = column.cast(column.type.value_type)
    return column if column.type == plain else column.cast(plain)


def _one_chunk(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _same(found: pa.ChunkedArray, expected: pa.ChunkedArray | pa.Array, what: str) -> None:
    if isinstance(expected, pa.Array):
        expected = pa.chunked_array([expected])
    if pa.types.is_dictionary(found.type):
        value_type = expected.type.value_type if pa.types.is_dictionary(expected.type) else expected.type
        assert found.type.value_type == value_type, f"{what} has type {found.type}, expected {expected.type}"
        found, expected = found.cast(value_type), expected.cast(value_type)
    elif pa.types.is_dictionary(expected.type):
        # A key of a right or full join whose two columns have no dictionary type in common.
        expected = expected.cast(expected.type.value_type)
    assert found.type == expected.type, f"{what} has type {found.type}, expected {expected.type}"
    if found.equals(expected) and not pa.types.is_floating(found.type):
        return
    # Floats to the bit (a payload of -0 stays -0, and NaN is no failure); nested values by what they print.
    for first in range(0, len(found), 50_000):
        theirs, ours = (repr_list(column.slice(first, 50_000)) for column in (found, expected))
        for index, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            assert one == other, f"{what}, row {first + index}: {one}, expected {other}"


def repr_list(column: pa.ChunkedArray) -> list[object]:
    """Values that compare equal when they are the same to the bit."""
    if pa.types.is_floating(column.type):
        bits = {16: pa.uint16(), 32: pa.uint32(), 64: pa.uint64()}[column.type.bit_width]
        # One NaN is as good as another.
        return [
            "NaN" if nan else value
            for nan, value in zip(pc.is_nan(column).to_pylist(), _one_chunk(column).view(bits).to_pylist(), strict=True)
        ]
    return [repr(value) for value in column.to_pylist()]
