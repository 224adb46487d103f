"""Join commands in their JSON form, and the few protobuf messages of Flight that pyarrow has no call for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

On: TypeAlias = "str | Mapping[str, str] | Sequence[str | tuple[str, str]]"
"""Which columns must be equal: ``"k"``, ``["a", "b"]``, ``{"left_name": "right_name"}`` or ``[("l1", "r1"), "b"]``."""


def key_pairs(on: On) -> list[dict[str, str]]:
    """The key pairs of a join, as the wire wants them.

    >>> key_pairs("k")
    [{'left': 'k', 'right': 'k'}]
    >>> key_pairs(["a", ("b", "c")])
    [{'left': 'a', 'right': 'a'}, {'left': 'b', 'right': 'c'}]
    >>> key_pairs({"o_orderkey": "l_orderkey"})
    [{'left': 'o_orderkey', 'right': 'l_orderkey'}]
    """
    if isinstance(on, str):
        return [{"left": on, "right": on}]
    if isinstance(on, Mapping):
        return [{"left": left, "right": right} for left, right in on.items()]
    pairs = []
    for item in on:
        if isinstance(item, str):
            pairs.append({"left": item, "right": item})
        elif isinstance(item, (tuple, list)) and len(item) == 2 and all(isinstance(name, str) for name in item):
            pairs.append({"left": item[0], "right": item[1]})
        else:
            raise TypeError(f'"on" holds {item!r}; it takes names of columns, or pairs of them: ["a", ("b", "c")]')
    return pairs


def join_command(
    left: str,
    right: str,
    on: On,
    how: str = "inner",
    columns: Sequence[str] | None = None,
    strategy: str | None = None,
    nulls_equal: bool | None = None,
    into: str | None = None,
    devices: int | Sequence[str] | None = None,
    priority: int | None = None,
    retain_seconds: int | None = None,
    batch_rows: int | None = None,
) -> dict[str, Any]:
    """The command of a join.

    What is not said is left out: the session's option holds then, or the server's default. What is said overrides the
    session's, also where it is what the default would be.

    >>> join_command("a", "b", "k", how="left")
    {'join': {'left': 'a', 'right': 'b', 'on': [{'left': 'k', 'right': 'k'}], 'how': 'left'}}
    >>> said = join_command("a", "b", "k", strategy="auto", nulls_equal=False, priority=0, retain_seconds=0)["join"]
    >>> {name: said[name] for name in ("strategy", "nulls_equal", "priority", "retain_seconds")}
    {'strategy': 'auto', 'nulls_equal': False, 'priority': 0, 'retain_seconds': 0}
    """
    join: dict[str, Any] = {"left": left, "right": right, "on": key_pairs(on), "how": how}
    if columns is not None:
        if isinstance(columns, str):
            raise TypeError(f'"columns" is {columns!r}; it takes a list of names')
        join["columns"] = list(columns)
    if strategy is not None:
        join["strategy"] = strategy
    if nulls_equal is not None:
        join["nulls_equal"] = nulls_equal
    if into is not None:
        join["into"] = into
    if devices is not None:
        join["devices"] = devices if isinstance(devices, int) else list(devices)
    if priority is not None:
        join["priority"] = priority
    if retain_seconds is not None:
        join["retain_seconds"] = retain_seconds
    if batch_rows is not None:
        join["batch_rows"] = batch_rows
    return {"join": join}


def encode(command: Mapping[str, Any]) -> bytes:
    """The bytes of a command."""
    return json.dumps(command, ensure_ascii=False).encode()


def length_delimited(tag: int, value: bytes) -> bytes:
    """One field of a protobuf message: its tag, its length, its bytes."""
    return _varint(tag << 3 | 2) + _varint(len(value)) + value


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
