"""Names of types, the same as those of the command line (``src/cli/files/csv/types.rs``)."""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.compute as pc

NOT_READ = (
    "is not a type that CSV is read as; write one such as int64, float64, bool, string, date, timestamp, "
    '"timestamp(us, UTC)" with a known zone, or decimal(15,2) with at most 38 digits'
)
"""End of the error for a type that CSV does not have."""

INFERRED = [pa.bool_(), pa.int64(), pa.float64(), pa.date32()]
INFERRED += [pa.timestamp(unit, zone) for zone in (None, "UTC") for unit in ("us", "ns")]
"""Inferred types, narrower types first. A column that fits none of them is text."""

_SPELLED = {
    "halffloat": "float16",
    "float": "float32",
    "double": "float64",
    "date32[day]": "date",
    "date64[ms]": "date64",
    "timestamp[us]": "timestamp",
}
"""Names that differ from those of pyarrow, by the names of pyarrow."""

_DATE = "[0-9]{4}-[0-9]{2}-[0-9]{2}"
_NEAR_DATE = "(1(6(7[89]|[89][0-9])|[7-9][0-9]{2})|2([01][0-9]{2}|2([0-5][0-9]|6[01])))-[0-9]{2}-[0-9]{2}"
"""Dates in the years that nanoseconds cover completely. pyarrow before 23 wraps around beyond them."""
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_FRACTION = {"s": "", "ms": r"(\.[0-9]{1,3})?", "us": r"(\.[0-9]{1,6})?", "ns": r"(\.[0-9]{1,9})?"}
_ZONE = "(Z|[+-]([01][0-9]|2[0-3])(:?[0-5][0-9])?)"


def named(name: str) -> pa.DataType | None:
    """Returns the type with a name of :func:`name_of`, if CSV is read as this type.

    >>> named("decimal(15, 2)"), named("timestamp"), named("integerish"), named("decimal(40,2)")
    (Decimal128Type(decimal128(15, 2)), TimestampType(timestamp[us]), None, None)
    >>> named("timestamp(us, Europe/Berlin)"), named("timestamp(us, Nowhere)"), named("timestamp(ns)")
    (TimestampType(timestamp[us, tz=Europe/Berlin]), None, TimestampType(timestamp[ns]))
    """
    if numbers := re.fullmatch(r"decimal\(\s*(\d+)\s*,\s*(\d+)\s*\)", name, re.ASCII):
        precision, scale = map(int, numbers.groups())
        return pa.decimal128(precision, scale) if 1 <= precision <= 38 and scale <= precision else None
    if stamp := re.fullmatch(r"timestamp\(\s*(s|ms|us|ns)\s*(?:,\s*(.*?)\s*)?\)", name):
        try:
            pc.assume_timezone(pa.array([0], pa.timestamp("s")), stamp[2] or "UTC")
        except pa.ArrowInvalid:
            return None
        return pa.timestamp(stamp[1], stamp[2])
    return _SIMPLE.get(name)


def form(data_type: pa.DataType) -> str | None:
    """The form of a type's values, a regular expression; ``None`` for a type that CSV is not read as.

    The command line has the same (``form`` in ``src/cli/files/csv/types.rs``).
    """
    known = pa.types
    if data_type in (pa.string(), pa.large_string(), pa.string_view()):
        return ""
    if known.is_boolean(data_type):
        return "^(?i:true|false)$"
    if known.is_decimal128(data_type) and data_type.scale >= 0:
        # pyarrow makes another number of one with more than 38 digits.
        whole = data_type.precision - data_type.scale
        return rf"^-?0*[0-9]{{0,{whole}}}(\.[0-9]{{0,{data_type.scale}}})?$"
    if known.is_date(data_type):
        return f"^{_DATE}$"
    if known.is_time(data_type):
        return f"^{_TIME}{_FRACTION[data_type.unit]}$"
    if known.is_timestamp(data_type):
        time = f"[T ]{_TIME}{_FRACTION[data_type.unit]}"
        date = _NEAR_DATE if data_type.unit == "ns" else _DATE
        return f"^{date}({time})?$" if data_type.tz is None else f"^{date}{time}{_ZONE}$"
    if known.is_integer(data_type):
        return "^[0-9]+$" if known.is_unsigned_integer(data_type) else "^-?[0-9]+$"
    return "^-?([0-9.]+([eE][-+]?[0-9]+)?|(?i:nan|inf|infinity))$" if known.is_floating(data_type) else None


def name_of(data_type: pa.DataType) -> str:
    """Returns the name of a type. For a type that CSV is read as, ``types`` accepts this name.

    >>> name_of(pa.timestamp("us")), name_of(pa.timestamp("ns", "UTC")), name_of(pa.decimal256(40, 2))
    ('timestamp', 'timestamp(ns, UTC)', 'decimal256(40,2)')
    >>> [name_of(of) for of in (pa.decimal128(9, -2), pa.decimal64(9, 2), pa.time32("s"), pa.binary(3), pa.float16())]
    ['decimal(9,-2)', 'decimal64(9,2)', 'time32(s)', 'fixed_size_binary(3)', 'float16']
    >>> name_of(pa.list_(pa.struct([("a", pa.date32())]))), name_of(pa.dictionary(pa.int32(), pa.string()))
    ('list(struct(a: date))', 'dictionary(int32, string)')
    >>> name_of(pa.map_(pa.string(), pa.decimal128(9, 2))), name_of(pa.list_view(pa.int8()))
    ('map(string, decimal(9,2))', 'list_view(int8)')
    >>> name_of(pa.dense_union([pa.field("a", pa.int32()), pa.field("b", pa.date32())])), name_of(pa.duration("s"))
    ('dense_union(a: int32, b: date)', 'duration(s)')
    >>> name_of(pa.run_end_encoded(pa.int32(), pa.string())), name_of(pa.month_day_nano_interval())
    ('run_end_encoded(int32, string)', 'month_day_nano_interval')
    """
    known = pa.types
    if (spelled := _SPELLED.get(str(data_type))) is not None:
        return spelled
    if known.is_decimal(data_type):
        width = "" if known.is_decimal128(data_type) else data_type.bit_width
        return f"decimal{width}({data_type.precision},{data_type.scale})"
    if known.is_timestamp(data_type) and data_type.tz is not None:
        return f"timestamp({data_type.unit}, {data_type.tz})"
    if known.is_temporal(data_type):
        return str(data_type).replace("[", "(").replace("]", ")")
    if known.is_dictionary(data_type):
        return f"dictionary({name_of(data_type.index_type)}, {name_of(data_type.value_type)})"
    if known.is_fixed_size_binary(data_type):
        return f"fixed_size_binary({data_type.byte_width})"
    if known.is_fixed_size_list(data_type):
        return f"fixed_size_list({name_of(data_type.value_type)}, {data_type.list_size})"
    lists = (
        (known.is_list, "list"),
        (known.is_large_list, "large_list"),
        (known.is_list_view, "list_view"),
        (known.is_large_list_view, "large_list_view"),
    )
    for is_of_kind, kind in lists:
        if is_of_kind(data_type):
            return f"{kind}({name_of(data_type.value_type)})"
    if known.is_map(data_type):
        return f"map({name_of(data_type.key_type)}, {name_of(data_type.item_type)})"
    if known.is_run_end_encoded(data_type):
        return f"run_end_encoded({name_of(data_type.run_end_type)}, {name_of(data_type.value_type)})"
    if known.is_struct(data_type) or known.is_union(data_type):
        kind = f"{data_type.mode}_union" if known.is_union(data_type) else "struct"
        return f"{kind}({', '.join(f'{field.name}: {name_of(field.type)}' for field in data_type)})"
    return str(data_type)


def wider(one: pa.DataType, other: pa.DataType) -> str:
    """Returns the name of a CSV type that fits the values of both types.

    >>> wider(pa.float64(), pa.int64()), wider(pa.int64(), pa.date32())
    ('float64', 'string')
    """
    names = {name_of(one), name_of(other)}
    both = ({"int64", "float64"}, "float64"), ({"date", "timestamp"}, "timestamp")
    return next((name for pair, name in both if pair == names), "string")


_SIMPLE = {
    name_of(of): of
    for of in (
        *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
        *(pa.float16(), pa.float32(), pa.float64(), pa.bool_(), pa.string(), pa.large_string(), pa.string_view()),
        *(pa.date32(), pa.date64(), pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")),
        pa.timestamp("us"),
    )
}
"""Types without parameters, by their names."""
