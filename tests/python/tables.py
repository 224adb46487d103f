"""Random tables: every type, distribution and size that has ever broken a join.

A key column is made from numbers by :data:`KEY_TYPES`: equal numbers give equal keys on both sides, whatever the type.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

Rng = np.random.Generator


@dataclass(frozen=True)
class KeyType:
    """A type of key: its columns' type, and the value of each number."""

    name: str
    type: pa.DataType
    values: Callable[[np.ndarray], pa.Array]
    domain: int = 1 << 40
    """Numbers below this give different keys."""
    group: str = ""
    """Types of one group compare with each other, and give equal keys for equal numbers."""


def _ints(name: str, bits: int, signed: bool, scramble: Callable[[np.ndarray], np.ndarray], group: str = "") -> KeyType:
    type_ = getattr(pa, f"{'' if signed else 'u'}int{bits}")()

    def values(numbers: np.ndarray) -> pa.Array:
        return pa.array(scramble(numbers).astype(type_.to_pandas_dtype()), type_)

    return KeyType(f"{type_}-{name}", type_, values, 1 << min(bits, 40), group)


def _sparse(numbers: np.ndarray) -> np.ndarray:
    # A bijection of 64-bit numbers, so that different numbers stay different, spread over the whole range.
    with np.errstate(over="ignore"):
        return numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def _mapped(
    name: str, type_: pa.DataType, one: Callable[[int], object], domain: int = 1 << 40, group: str = ""
) -> KeyType:
    def values(numbers: np.ndarray) -> pa.Array:
        unique, inverse = np.unique(numbers, return_inverse=True)
        base = pa.array([one(int(number)) for number in unique], _plain(type_))
        return as_type(base.take(pa.array(inverse.ravel())), type_)

    return KeyType(name, type_, values, domain, group)


def _plain(type_: pa.DataType) -> pa.DataType:
    """A type that pyarrow can take from and cast to `type_`."""
    if pa.types.is_dictionary(type_):
        return type_.value_type
    if pa.types.is_string_view(type_):
        return pa.string()
    if pa.types.is_binary_view(type_):
        return pa.binary()
    return type_


def as_type(values: pa.Array, type_: pa.DataType) -> pa.Array:
    """The same values in another layout."""
    if not pa.types.is_dictionary(type_):
        return values.cast(type_)
    encoded = values.dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    dictionary = encoded.dictionary.cast(type_.value_type)
    return pa.DictionaryArray.from_arrays(encoded.indices.cast(type_.index_type), dictionary)


def take(values: pa.Array | pa.ChunkedArray, index: pa.Array) -> pa.Array | pa.ChunkedArray:
    """The values at those places, null where the place is null. pyarrow has no such kernel for views."""
    plain = _plain(values.type) if not pa.types.is_dictionary(values.type) else values.type
    if plain == values.type:
        return values.take(index)
    return values.cast(plain).take(index).cast(values.type)


def _float(number: int) -> float:
    # The first few are the values that floats get wrong.
    special = [float("nan"), 0.0, float("inf"), float("-inf"), 5e-324, -1.5]
    return special[number] if number < len(special) else number * 0.25


def _text(number: int) -> str:
    alphabet = ["", "a", "ß", "日本", "🦀", "\0", "é" * 10, "same prefix, much longer than sixteen bytes: "]
    return alphabet[number % len(alphabet)] + (str(number // len(alphabet)) if number >= len(alphabet) else "")


_DAY = datetime.date(1970, 1, 1)

KEY_TYPES: list[KeyType] = [
    _ints("small", 8, True, lambda n: n.astype(np.int64) - 128),
    _ints("small", 8, False, lambda n: n),
    _ints("dense", 16, True, lambda n: n.astype(np.int64) - (1 << 15)),
    _ints("dense", 16, False, lambda n: n),
    _ints("dense", 32, True, lambda n: n, group="int"),
    _ints("negative", 32, True, lambda n: -n.astype(np.int64)),
    _ints("high", 32, False, lambda n: 0xFFFFFFFF - n),
    _ints("dense", 64, True, lambda n: n, group="int"),
    _ints("dense", 64, False, lambda n: n, group="int"),
    _ints("multiples of 2^16", 64, True, lambda n: n << 16),
    _ints("sparse", 64, True, _sparse),
    _ints("sparse", 64, False, _sparse),
    KeyType(
        "int32-multiples of 2^16",
        pa.int32(),
        lambda n: pa.array(((n << 16) - (1 << 31)).astype(np.int32)),
        domain=1 << 16,
    ),
    _mapped("float16", pa.float16(), lambda n: np.float16(_float(n)), domain=512),
    _mapped("float32", pa.float32(), _float, domain=1 << 20),
    _mapped("float64", pa.float64(), _float),
    _mapped("decimal32(7,2)", pa.decimal32(7, 2), lambda n: decimal.Decimal(n - 5000).scaleb(-2), domain=90000),
    _mapped("decimal64(15,3)", pa.decimal64(15, 3), lambda n: decimal.Decimal(n).scaleb(-3)),
    _mapped(
        "decimal128(38,10)", pa.decimal128(38, 10), lambda n: decimal.Decimal(10**27 - n).scaleb(-10), group="dec10"
    ),
    _mapped(
        "decimal128(30,10)", pa.decimal128(30, 10), lambda n: decimal.Decimal(10**27 - n).scaleb(-10), group="dec10"
    ),
    _mapped(
        "decimal256(60,10)", pa.decimal256(60, 10), lambda n: decimal.Decimal(10**27 - n).scaleb(-10), group="dec10"
    ),
    _mapped("bool", pa.bool_(), bool, domain=2),
    _mapped("date32", pa.date32(), lambda n: _DAY + datetime.timedelta(days=n - 1000), domain=1 << 20),
    _mapped("date64", pa.date64(), lambda n: _DAY + datetime.timedelta(days=n - 1000), domain=1 << 20),
    KeyType("time32[s]", pa.time32("s"), lambda n: pa.array(n.astype(np.int32)).cast(pa.time32("s")), domain=86400),
    KeyType(
        "time32[ms]", pa.time32("ms"), lambda n: pa.array(n.astype(np.int32)).cast(pa.time32("ms")), domain=86_400_000
    ),
    KeyType(
        "time64[us]", pa.time64("us"), lambda n: pa.array(n.astype(np.int64)).cast(pa.time64("us")), domain=1 << 36
    ),
    KeyType(
        "time64[ns]", pa.time64("ns"), lambda n: pa.array(n.astype(np.int64)).cast(pa.time64("ns")), domain=1 << 36
    ),
    *(
        KeyType(
            f"timestamp[{unit}{zone and ', '}{zone}]", type_, lambda n, t=type_: pa.array(n.astype(np.int64)).cast(t)
        )
        for unit in ("s", "ms", "us", "ns")
        for zone in ("", "Europe/Vienna")
        for type_ in [pa.timestamp(unit, zone or None)]
    ),
    KeyType("duration[us]", pa.duration("us"), lambda n: pa.array(n.astype(np.int64)).cast(pa.duration("us"))),
    _mapped("string", pa.string(), _text, group="string"),
    _mapped("large_string", pa.large_string(), _text, group="string"),
    _mapped("string_view", pa.string_view(), _text, group="string"),
    _mapped("dictionary of string", pa.dictionary(pa.int32(), pa.string()), _text, group="string"),
    _mapped(
        "dictionary16 of large_string",
        pa.dictionary(pa.int16(), pa.large_string()),
        _text,
        domain=30000,
        group="string",
    ),
    _mapped("dictionary of int64", pa.dictionary(pa.int8(), pa.int64()), lambda n: n, domain=120, group="int"),
    _mapped("binary", pa.binary(), lambda n: n.to_bytes(1 + n % 7 + 5, "little") if n else b"", group="binary"),
    _mapped(
        "large_binary", pa.large_binary(), lambda n: n.to_bytes(1 + n % 7 + 5, "little") if n else b"", group="binary"
    ),
    _mapped(
        "binary_view", pa.binary_view(), lambda n: n.to_bytes(1 + n % 7 + 5, "little") if n else b"", group="binary"
    ),
    _mapped("fixed_size_binary[5]", pa.binary(5), lambda n: n.to_bytes(5, "big")),
    _mapped("fixed_size_binary[40]", pa.binary(40), lambda n: n.to_bytes(40, "little")),
    _mapped("decimal64(18,0)", pa.decimal64(18, 0), decimal.Decimal, group="int"),
    _mapped("decimal128(20,0)", pa.decimal128(20, 0), decimal.Decimal, group="int"),
    _mapped("decimal256(40,0)", pa.decimal256(40, 0), decimal.Decimal, group="int"),
]


def partners(key: KeyType) -> list[KeyType]:
    """The key types that the other side may have."""
    return [key] if not key.group else [other for other in KEY_TYPES if other.group == key.group]


# Sizes around the places where loops, blocks and pages end.
SIZES = [0, 1, 2, 3, 63, 64, 65, 255, 256, 257, 1000, 1023, 1024, 1025, 4095, 4096, 4097, 10_000, 20_000]
LARGE_SIZES = [65_535, 65_536, 65_537, 100_000, 131_073]

DISTRIBUTIONS = ["unique", "sorted", "reversed", "uniform", "few", "zipf", "constant", "runs"]


def numbers(rng: Rng, distribution: str, rows: int, domain: int) -> np.ndarray:
    """`rows` numbers below `domain`."""
    if rows == 0:
        return np.zeros(0, np.int64)
    match distribution:
        case "unique":
            return rng.permutation(rows).astype(np.int64) % domain
        case "sorted":
            return np.sort(rng.integers(0, min(domain, max(1, rows)), rows))
        case "reversed":
            return np.sort(rng.integers(0, min(domain, 2 * rows), rows))[::-1].copy()
        case "uniform":
            return rng.integers(0, min(domain, 2 * rows), rows)
        case "few":
            return rng.integers(0, min(domain, 50), rows)
        case "zipf":
            return (rng.zipf(1.3, rows).astype(np.uint64) % np.uint64(min(domain, 4 * rows))).astype(np.int64)
        case "constant":
            return np.full(rows, rng.integers(0, min(domain, 100)), np.int64)
        case "runs":
            return (np.arange(rows, dtype=np.int64) // 7) % domain
    raise ValueError(distribution)


def with_nulls(rng: Rng, values: pa.Array, share: float) -> pa.Array:
    """The values with about that share of nulls."""
    if share == 0 or len(values) == 0:
        return values
    index = np.arange(len(values), dtype=np.float64)
    index[rng.random(len(values)) < share] = np.nan
    return take(values, pa.array(index, from_pandas=True).cast(pa.int64()))


def negative_zeros(rng: Rng, values: pa.Array) -> pa.Array:
    """Half of the zeros of a float column with their sign turned: they are the same key."""
    if not (pa.types.is_float32(values.type) or pa.types.is_float64(values.type)) or values.null_count:
        return values
    floats = values.to_numpy(zero_copy_only=False).copy()
    floats[(floats == 0) & (rng.random(len(floats)) < 0.5)] = -0.0
    return pa.array(floats, values.type)


def _nested(rng: Rng, rows: int) -> pa.Array:
    lengths = rng.integers(0, 4, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), _strings(rng, int(offsets[-1])))


def _strings(rng: Rng, rows: int) -> pa.Array:
    words = pa.array([_text(number) * (1 + number % 3) for number in range(300)])
    return words.take(pa.array(rng.integers(0, 300, rows)))


PAYLOADS: dict[str, Callable[[Rng, int], pa.Array]] = {
    "int8": lambda rng, n: pa.array(rng.integers(-128, 128, n), pa.int8()),
    "uint16": lambda rng, n: pa.array(rng.integers(0, 1 << 16, n), pa.uint16()),
    "int32": lambda rng, n: pa.array(rng.integers(-(1 << 31), 1 << 31, n), pa.int32()),
    "int64": lambda rng, n: pa.array(rng.integers(-(1 << 63), (1 << 63) - 1, n), pa.int64()),
    "uint64": lambda rng, n: pa.array(rng.integers(0, 1 << 63, n, dtype=np.uint64) * np.uint64(2), pa.uint64()),
    "float16": lambda rng, n: pa.array(rng.standard_normal(n).astype(np.float16)),
    "float32": lambda rng, n: pa.array(
        np.where(rng.random(n) < 0.1, np.nan, rng.standard_normal(n)).astype(np.float32)
    ),
    "float64": lambda rng, n: pa.array(np.where(rng.random(n) < 0.1, -0.0, rng.standard_normal(n))),
    "bool": lambda rng, n: pa.array(rng.random(n) < 0.5),
    "decimal128": lambda rng, n: (
        pa.array(rng.integers(0, 1 << 40, n)).cast(pa.decimal128(20, 0)).cast(pa.decimal128(30, 4))
    ),
    "decimal256": lambda rng, n: pa.array(rng.integers(0, 1 << 40, n)).cast(pa.decimal256(50, 3)),
    "date32": lambda rng, n: pa.array(rng.integers(0, 20000, n).astype(np.int32)).cast(pa.date32()),
    "time64": lambda rng, n: pa.array(rng.integers(0, 1 << 36, n)).cast(pa.time64("ns")),
    "timestamp": lambda rng, n: pa.array(rng.integers(0, 1 << 50, n)).cast(pa.timestamp("us", "UTC")),
    "duration": lambda rng, n: pa.array(rng.integers(0, 1 << 50, n)).cast(pa.duration("ns")),
    "interval": lambda rng, n: pa.array(
        [(int(m), int(d), int(t)) for m, d, t in rng.integers(0, 100, (n, 3))], pa.month_day_nano_interval()
    ),
    "string": _strings,
    "large_string": lambda rng, n: _strings(rng, n).cast(pa.large_string()),
    "string_view": lambda rng, n: _strings(rng, n).cast(pa.string_view()),
    "binary": lambda rng, n: _strings(rng, n).cast(pa.binary()),
    "fixed_size_binary": lambda rng, n: pa.array(
        [bytes(row) for row in rng.integers(0, 256, (n, 3), np.uint8)], pa.binary(3)
    ),
    "dictionary": lambda rng, n: _strings(rng, n).dictionary_encode(),
    "dictionary of int": lambda rng, n: pa.array(rng.integers(0, 100, n)).dictionary_encode(),
    "list": _nested,
    "large_list": lambda rng, n: _nested(rng, n).cast(pa.large_list(pa.string())),
    "fixed_size_list": lambda rng, n: pa.FixedSizeListArray.from_arrays(pa.array(rng.integers(0, 100, 3 * n)), 3),
    "struct": lambda rng, n: pa.StructArray.from_arrays(
        [_strings(rng, n), pa.array(rng.integers(0, 9, n))], ["s", "i"]
    ),
    "list of struct": lambda rng, n: _list_of_struct(rng, n),
    "map": lambda rng, n: _map(rng, n),
    "null": lambda rng, n: pa.nulls(n),
}


def _list_of_struct(rng: Rng, rows: int) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 3, rows))]).astype(np.int32)
    inner = PAYLOADS["struct"](rng, int(offsets[-1]))
    return pa.ListArray.from_arrays(pa.array(offsets), inner)


def _map(rng: Rng, rows: int) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 3, rows))]).astype(np.int32)
    count = int(offsets[-1])
    return pa.MapArray.from_arrays(pa.array(offsets), _strings(rng, count), pa.array(rng.integers(0, 9, count)))


def payload(rng: Rng, kind: str, rows: int) -> pa.Array:
    """A payload column of that kind, some with nulls."""
    values = PAYLOADS[kind](rng, rows)
    share = float(rng.choice([0, 0, 0.1, 0.6]))
    return values if kind == "null" else with_nulls(rng, values, share)
