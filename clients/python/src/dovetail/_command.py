"""Join commands in their JSON form, and the few protobuf messages of Flight that pyarrow has no call for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from . import _arguments

IntoMode = Literal["create", "replace"]
"""Action of a join if a table with the name of its result exists."""


@dataclass(frozen=True)
class On:
    """Pair of columns that must be equal, with its own null equality.

    Attributes:
        left: Column of the left table.
        right: Column of the right table. ``None`` if it has the same name.
        nulls_equal: True if a null matches a null in this pair. ``None``: as set for the join.

    Example:
        >>> import dovetail
        >>> client.put("a", {"k": [1, 1, None], "s": ["x", None, None]})
        3
        >>> client.put("b", {"k": [1, 1, None], "t": ["x", None, None]})
        3
        >>> on = ["k", dovetail.On("s", "t", nulls_equal=True)]
        >>> client.join("a", "b", on=on).table().sort_by("s").to_pydict()
        {'k': [1, 1], 's': ['x', None]}
        >>> client.drop("a"), client.drop("b")
        (3, 3)
    """

    left: str
    right: str | None = None
    nulls_equal: bool | None = None


OnArgument: TypeAlias = "str | On | Mapping[str, str] | Sequence[str | tuple[str, str] | On]"
"""Columns that must be equal: ``"k"``, ``["a", "b"]``, ``{"left_name": "right_name"}`` or ``[("l1", "r1"), "b"]``. An
:class:`On` may stand for a name or pair."""


@dataclass(frozen=True)
class Then:
    """Further table that the rows of a stream are joined with.

    Attributes:
        table: Name of the table.
        on: Columns that must be equal, as in :meth:`~dovetail.Client.join`, with the sides of the first join.
        how: Kind of the join, with the sides of the first join. It may not keep rows of the table without a match.
        label: Name of the table among the columns of the result. ``None``: its own name.

    Example:
        >>> import dovetail
        >>> client.put("customers", {"id": [1, 2], "name": ["ann", "bob"]})
        2
        >>> client.put("parts", {"id": [7, 8], "part": ["nut", "bolt"]})
        2
        >>> sales = {"customer": [1, 2, 3], "sold": [7, 8, 7]}
        >>> then = [dovetail.Then("parts", on={"id": "sold"})]
        >>> joined = client.stream_join("customers", sales, on={"id": "customer"}, then=then)
        >>> joined.read_all().sort_by("name").to_pydict()
        {'customer': [1, 2], 'sold': [7, 8], 'name': ['ann', 'bob'], 'part': ['nut', 'bolt']}
        >>> client.drop("customers"), client.drop("parts")
        (2, 2)
    """

    table: str
    on: OnArgument
    how: str = "inner"
    label: str | None = None


def further_joins(then: Iterable[Then]) -> list[dict[str, Any]]:
    """The further joins of a stream, as the wire wants them.

    >>> further_joins([Then("parts", on={"id": "part"})])
    [{'table': 'parts', 'on': [{'left': 'id', 'right': 'part'}], 'how': 'inner'}]
    >>> further_joins(["parts"])
    Traceback (most recent call last):
    TypeError: then holds 'parts' (str); it takes a list of dovetail.Then: [Then("parts", on={"id": "part"})]
    """
    takes = 'it takes a list of dovetail.Then: [Then("parts", on={"id": "part"})]'
    if isinstance(then, (str, bytes, Mapping)) or not isinstance(then, Iterable):
        raise TypeError(f"then is {then!r} ({type(then).__name__}); {takes}")
    joins = []
    for join in then:
        if not isinstance(join, Then):
            raise TypeError(f"then holds {join!r} ({type(join).__name__}); {takes}")
        said = {
            "table": _arguments.text("Then.table", join.table, "the name of a table"),
            "on": key_pairs(join.on),
            "how": _arguments.text("Then.how", join.how, "a kind of join"),
            "label": _arguments.optional_text("Then.label", join.label, "the name of an input"),
        }
        joins.append({name: value for name, value in said.items() if value is not None})
    return joins


def key_pairs(on: OnArgument) -> list[dict[str, Any]]:
    """The key pairs of a join, as the wire wants them.

    >>> key_pairs("k")
    [{'left': 'k', 'right': 'k'}]
    >>> key_pairs(["a", ("b", "c")])
    [{'left': 'a', 'right': 'a'}, {'left': 'b', 'right': 'c'}]
    >>> key_pairs({"o_orderkey": "l_orderkey"})
    [{'left': 'o_orderkey', 'right': 'l_orderkey'}]
    >>> key_pairs(["a", On("b", nulls_equal=True)])
    [{'left': 'a', 'right': 'a'}, {'left': 'b', 'right': 'b', 'nulls_equal': True}]
    """
    if isinstance(on, (str, On)):
        return [_key_pair(on)]
    if isinstance(on, Mapping):
        return [_key_pair(pair) for pair in on.items()]
    if isinstance(on, bytes) or not isinstance(on, Iterable):
        raise TypeError(
            f"on is {on!r} ({type(on).__name__}); it takes the name of a column, a list of names or pairs of names, "
            'or a mapping from names of the left table to names of the right: {"o_orderkey": "l_orderkey"}'
        )
    return [_key_pair(item) for item in on]


def _key_pair(item: object) -> dict[str, Any]:
    if isinstance(item, On):
        _arguments.text("On.left", item.left, "the name of a column")
        _arguments.optional_text("On.right", item.right, "the name of a column")
        item = On(item.left, item.right, _arguments.truth("On.nulls_equal", item.nulls_equal))
    match item:
        case str():
            return {"left": item, "right": item}
        case On(left, right, None):
            return {"left": left, "right": left if right is None else right}
        case On(left, right, nulls_equal):
            return {"left": left, "right": left if right is None else right, "nulls_equal": nulls_equal}
        case (str(left), str(right)):
            return {"left": left, "right": right}
    raise TypeError(
        f"on holds {item!r} ({type(item).__name__}); it takes names of columns, pairs of them, or On: "
        '["a", ("b", "c"), On("d", nulls_equal=True)]'
    )


def keys_of(on: OnArgument | None, left_on: object, right_on: object) -> list[dict[str, Any]]:
    """The key pairs of a join, from ``on``, or from ``left_on`` and ``right_on`` as pandas and Polars have them.

    >>> keys_of(None, ["a", "b"], ["c", "d"])
    [{'left': 'a', 'right': 'c'}, {'left': 'b', 'right': 'd'}]
    >>> keys_of("k", "a", None)
    Traceback (most recent call last):
    TypeError: a join takes either on, or left_on with right_on
    """
    if (on is None) == (left_on is None) or (left_on is None) != (right_on is None):
        raise TypeError("a join takes either on, or left_on with right_on")
    if on is not None:
        return key_pairs(on)
    lefts, rights = (_arguments.name_or_names(*said) for said in (("left_on", left_on), ("right_on", right_on)))
    if len(lefts) != len(rights):
        raise ValueError(f"left_on names {len(lefts)} columns, and right_on {len(rights)}; name equally many")
    return [{"left": left, "right": right} for left, right in zip(lefts, rights, strict=True)]


def join_command(
    left: str,
    right: str,
    on: OnArgument | None,
    how: str = "inner",
    columns: Sequence[str] | None = None,
    strategy: str | None = None,
    nulls_equal: bool | None = None,
    into: str | None = None,
    devices: int | str | Sequence[str] | None = None,
    priority: int | None = None,
    retain_seconds: int | None = None,
    batch_rows: int | None = None,
    into_mode: str | None = None,
    left_on: str | Sequence[str] | None = None,
    right_on: str | Sequence[str] | None = None,
    distribution: str | None = None,
    temporary_seconds: int | None = None,
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
    join: dict[str, Any] = {
        "left": _arguments.text("left", left, "the name of a table"),
        "right": _arguments.text("right", right, "the name of a table"),
        "on": keys_of(on, left_on, right_on),
        "how": _arguments.text("how", how, "a kind of join"),
    }
    said = {
        "columns": None if columns is None else _arguments.some_names("columns", columns),
        "strategy": _arguments.optional_text("strategy", strategy, "the name of a strategy"),
        "distribution": _arguments.optional_text("distribution", distribution, "the name of a distribution"),
        "nulls_equal": _arguments.truth("nulls_equal", nulls_equal),
        "into": _arguments.optional_text("into", into, "the name of a table to make"),
        "into_mode": None if into_mode is None else _arguments.one_of("into_mode", into_mode, get_args(IntoMode)),
        "temporary_seconds": _arguments.optional_whole("temporary_seconds", temporary_seconds, least=1),
        "devices": _devices(devices),
        "priority": _arguments.optional_whole("priority", priority),
        "retain_seconds": _arguments.optional_whole("retain_seconds", retain_seconds, least=0),
        "batch_rows": _arguments.optional_whole("batch_rows", batch_rows, least=1),
    }
    join.update({name: value for name, value in said.items() if value is not None})
    return {"join": join}


def _devices(devices: object) -> int | str | list[str] | None:
    takes = 'a number of devices of at least 1, the name of one, a list of names such as ["host:0"], or "all"'
    if devices is None or isinstance(devices, str):
        return devices
    if isinstance(devices, Iterable):
        return _arguments.names("devices", devices, takes)
    return _arguments.whole("devices", devices, least=1, takes=takes)


OPTIONS = (
    "how", "columns", "strategy", "nulls_equal", "into", "into_mode", "devices", "priority", "retain_seconds",
    "batch_rows", "left_on", "right_on", "distribution",
    "temporary_seconds",
)  # fmt: skip
"""Options of a join, in addition to its tables and keys."""


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
