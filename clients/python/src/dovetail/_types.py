"""Types by the names that people give them and are told: those of the command line (``src/cli/files/csv/types.rs``)."""

from __future__ import annotations

import decimal
import math
import re

import pyarrow as pa
import pyarrow.compute as pc

NAMES = {
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int": pa.int32(),
    "int64": pa.int64(),
    "bigint": pa.int64(),
    "uint8": pa.uint8(),
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "float16": pa.float16(),
    "float32": pa.float32(),
    "float": pa.float32(),
    "float64": pa.float64(),
    "double": pa.float64(),
    "bool": pa.bool_(),
    "boolean": pa.bool_(),
    "string": pa.string(),
    "utf8": pa.string(),
    "text": pa.string(),
    "large_string": pa.large_string(),
    "largeutf8": pa.large_string(),
    "string_view": pa.string_view(),
    "utf8view": pa.string_view(),
    "date": pa.date32(),
    "date32": pa.date32(),
    "date64": pa.date64(),
    "time32(s)": pa.time32("s"),
    "time32(ms)": pa.time32("ms"),
    "time64(us)": pa.time64("us"),
    "time64(ns)": pa.time64("ns"),
    "timestamp": pa.timestamp("us"),
    "timestamp(s)": pa.timestamp("s"),
    "timestamp(ms)": pa.timestamp("ms"),
    "timestamp(us)": pa.timestamp("us"),
    "timestamp(ns)": pa.timestamp("ns"),
}
"""The types by the names that the command line takes too; of several names for one, people are told the first."""

UNITS = ("s", "ms", "us", "ns")
"""The units of times."""

DECIMALS = "a decimal(PRECISION,SCALE) has a precision of 1 to 38, and a scale of 0 to that"
"""Which decimals CSV is read as."""


def named(name: str) -> pa.DataType | None:
    """A type by its name, of those that CSV is read as.

    >>> named("decimal(15, 2)"), named("Timestamp"), named("integerish")
    (Decimal128Type(decimal128(15, 2)), TimestampType(timestamp[us]), None)
    >>> named("timestamp(us, Europe/Berlin)"), named("timestamp(ns, +02)")
    (TimestampType(timestamp[us, tz=Europe/Berlin]), TimestampType(timestamp[ns, tz=+02:00]))
    >>> named("time32(s)"), named("Time64(µs)"), named("time32(us)"), named("Utf8View"), named("Timestamp(s, None)")
    (Time32Type(time32[s]), Time64Type(time64[us]), None, DataType(string_view), TimestampType(timestamp[s]))
    >>> named("decimal(40,2)")
    Traceback (most recent call last):
    ValueError: a decimal(PRECISION,SCALE) has a precision of 1 to 38, and a scale of 0 to that
    """
    name = name.strip()
    parts = re.fullmatch(r"([^(]*)\((.*)\)", name, re.DOTALL)
    if parts is None:
        return NAMES.get(name.lower())
    kind, inside = parts[1].strip().lower(), parts[2].strip()
    if kind in ("decimal", "decimal128"):
        numbers = re.fullmatch(r"(\d+)\s*,\s*(\d+)", inside, re.ASCII)
        precision, scale = map(int, numbers.groups()) if numbers else (0, 0)
        if not 1 <= precision <= 38 or scale > precision:
            raise ValueError(DECIMALS)
        return pa.decimal128(precision, scale)
    unit, comma, zone = inside.partition(",")
    unit = unit.strip().lower().replace("µs", "us")
    if kind == "timestamp" and comma and unit in UNITS:
        return pa.timestamp(unit, _time_zone(zone))
    return None if comma else NAMES.get(f"{kind}({unit})")


def _time_zone(name: str) -> str | None:
    """A zone as Arrow knows it, by its name or its hours and minutes; ``None`` for Arrow's word for no zone."""
    zone = name.strip().strip('"')
    if zone.lower() == "none":
        return None
    if zone.lower() in ("utc", "z"):
        zone = "UTC"
    elif offset := re.fullmatch(r"([+-])(\d\d)(?::?(\d\d))?", zone):
        zone = f"{offset[1]}{offset[2]}:{offset[3] or '00'}"
    try:
        pc.assume_timezone(pa.array([0], pa.timestamp("s")), zone)
    except pa.ArrowInvalid:
        raise ValueError(f"there is no time zone {zone!r}; write one such as UTC, Europe/Berlin or +02:00") from None
    return zone


def can_be_read(data_type: pa.DataType) -> bool:
    """Whether CSV is read as a type."""
    if pa.types.is_decimal128(data_type):
        return bool(data_type.scale >= 0)
    return pa.types.is_timestamp(data_type) or data_type in NAMES.values()


def name_of(data_type: pa.DataType) -> str:
    """The name by which people are told a type: the one by which ``types`` knows it, if CSV is read as it.

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
    if (found := next((name for name, of in NAMES.items() if of == data_type), None)) is not None:
        return found
    if known.is_decimal(data_type):
        width = "" if known.is_decimal128(data_type) else data_type.bit_width
        return f"decimal{width}({data_type.precision},{data_type.scale})"
    if known.is_timestamp(data_type):
        return f"timestamp({data_type.unit}, {data_type.tz})"
    if known.is_duration(data_type):
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


def taking(data_type: pa.DataType, value: str) -> list[pa.DataType]:
    """Types that may have a value, and have those of another type: none where only text has both.

    The command line advises the same (``taking`` in ``src/cli/files/csv/types.rs``).

    >>> taking(pa.int64(), "9223372036854775808"), taking(pa.int8(), "300"), taking(pa.int64(), "2.5")
    ([DataType(uint64), Decimal128Type(decimal128(38, 0))], [DataType(int64)], [DataType(double)])
    >>> taking(pa.decimal128(9, 2), "12345678.125"), taking(pa.date32(), "2026-01-31 10:11:12")
    ([Decimal128Type(decimal128(11, 3))], [TimestampType(timestamp[us])])
    >>> taking(pa.int64(), "x"), taking(pa.bool_(), "2")
    ([], [])
    """
    known = pa.types
    number = None
    if known.is_integer(data_type) or known.is_floating(data_type) or known.is_decimal(data_type):
        number = _number(value.strip(" \t"))
    if known.is_integer(data_type):
        if number is None:
            return []
        if not re.fullmatch(r"[+-]?\d+", value.strip(" \t"), re.ASCII) or abs(number) >= 10**38:
            return _float(number)
        if -(2**63) <= number < 2**63:
            return [pa.int64()]
        if known.is_uint64(data_type):
            return [pa.decimal128(38, 0)]
        return [pa.uint64(), pa.decimal128(38, 0)] if 0 <= number < 2**64 else [pa.decimal128(38, 0), pa.float64()]
    if known.is_decimal(data_type):
        if number is None:
            return []
        _, digits, exponent = number.normalize(_ALL_DIGITS).as_tuple()
        places = max(-int(exponent), data_type.scale)
        before = max(len(digits) + int(exponent) if number else 0, data_type.precision - data_type.scale)
        return [pa.decimal128(before + places, places)] if before + places <= 38 else _float(number)
    if known.is_floating(data_type):
        return [] if number is None else _float(number)
    fraction = re.search(r"\.(\d*)", value)
    is_fine = fraction is not None and len(fraction[1]) > 6
    if known.is_date(data_type):
        if len(value) <= len("2026-01-31") or re.search("[zZ+-]", value[len("2026-01-31") :]):
            return []
        return [pa.timestamp("ns" if is_fine else "us")]
    if known.is_timestamp(data_type):
        unit = "us" if data_type.unit in ("s", "ms") and not is_fine else "ns"
        return [] if data_type.unit == "ns" else [pa.timestamp(unit, data_type.tz)]
    if known.is_time(data_type) and data_type.unit != "ns":
        return [pa.time64("us" if known.is_time32(data_type) and not is_fine else "ns")]
    return []


_ALL_DIGITS = decimal.Context(prec=10_000, Emax=decimal.MAX_EMAX, Emin=decimal.MIN_EMIN)
"""In which no digit of a field is lost."""


def _number(text: str) -> decimal.Decimal | None:
    """A finite number; ``None`` for what is none."""
    if re.fullmatch(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", text, re.ASCII) is None:
        return None
    try:
        return _ALL_DIGITS.create_decimal(text)
    except decimal.InvalidOperation:
        return None


def _float(number: decimal.Decimal) -> list[pa.DataType]:
    return [pa.float64()] if math.isfinite(float(number)) else []


def wider(one: pa.DataType, other: pa.DataType) -> str:
    """A type of CSV, by its name, that has the values of both.

    >>> wider(pa.float64(), pa.int64()), wider(pa.int64(), pa.date32())
    ('float64', 'string')
    """
    names = {name_of(one), name_of(other)}
    both = ({"int64", "float64"}, "float64"), ({"date", "timestamp"}, "timestamp")
    return next((name for pair, name in both if pair == names), "string")
