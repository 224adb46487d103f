"""What callers give, checked before anything is sent: the error names the argument, what it was, and what it takes.

A value of the wrong type is a :class:`TypeError`, a number out of range a :class:`ValueError`. Whether a name or
a word exists is the server's to say.
"""

from __future__ import annotations

import json
import math
import operator
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def text(argument: str, value: object, takes: str = "a name") -> str:
    """A string.

    >>> text("name", 5)
    Traceback (most recent call last):
    TypeError: name is 5 (int); it takes a name, as a str
    """
    if not isinstance(value, str):
        raise _type_error(argument, value, f"{takes}, as a str")
    return value


def one_of(argument: str, value: object, takes: Iterable[str]) -> str:
    """One of some words.

    >>> one_of("mode", "overwrite", ["create", "replace"])
    Traceback (most recent call last):
    ValueError: mode is 'overwrite'; it takes 'create' or 'replace'
    """
    words = list(takes)
    listed = " or ".join(filter(None, [", ".join(map(repr, words[:-1])), repr(words[-1])]))
    if text(argument, value, f"{listed}") not in words:
        raise ValueError(f"{argument} is {value!r}; it takes {listed}")
    return str(value)


def optional_text(argument: str, value: object, takes: str = "a name") -> str | None:
    """A string, or ``None``."""
    return None if value is None else text(argument, value, takes)


def whole(
    argument: str, value: object, least: int | None = None, takes: str | None = None, most: int | None = None
) -> int:
    """A whole number, also one of NumPy's.

    >>> whole("streams", "4", least=1)
    Traceback (most recent call last):
    TypeError: streams is '4' (str); it takes a whole number of at least 1
    >>> whole("streams", 0, least=1)
    Traceback (most recent call last):
    ValueError: streams is 0; it takes a whole number of at least 1
    >>> whole("streams", 1000, least=1, most=64)
    Traceback (most recent call last):
    ValueError: streams is 1000; it takes a whole number from 1 to 64
    """
    if takes is None:
        takes = "a whole number" if least is None else f"a whole number of at least {least}"
        if least is not None and most is not None:
            takes = f"a whole number from {least} to {most}"
    if isinstance(value, bool):
        raise _type_error(argument, value, takes)
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise _type_error(argument, value, takes) from None
    if (least is not None and number < least) or (most is not None and number > most):
        raise ValueError(f"{argument} is {number}; it takes {takes}")
    return number


def optional_whole(argument: str, value: object, least: int | None = None) -> int | None:
    """A whole number, or ``None``."""
    return None if value is None else whole(argument, value, least)


def seconds(argument: str, value: object, *, zero: bool = False) -> float | None:
    """A span of time; ``None``: without a limit.

    >>> seconds("timeout", -1)
    Traceback (most recent call last):
    ValueError: timeout is -1; it takes a number of seconds above 0, or None for no limit
    """
    takes = f"a number of seconds {'of at least' if zero else 'above'} 0, or None for no limit"
    if value is None:
        return None
    if isinstance(value, (bool, str, bytes)):
        raise _type_error(argument, value, takes)
    try:
        span = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise _type_error(argument, value, takes) from None
    if not math.isfinite(span) or span < 0 or (span == 0 and not zero):
        raise ValueError(f"{argument} is {value}; it takes {takes}")
    return span


def truth(argument: str, value: object) -> bool | None:
    """``True``, ``False``, also NumPy's, or ``None``."""
    if value is None or isinstance(value, bool):
        return value
    if type(value).__name__ in ("bool", "bool_") and type(value).__module__ == "numpy":
        return bool(value)
    raise _type_error(argument, value, "True or False, or None for what holds by default")


def names(argument: str, value: object, takes: str = 'a list of names, such as ["a", "b"]') -> list[str]:
    """Several strings; one string is none of that kind, since its letters would pass for names.

    >>> names("columns", "a")
    Traceback (most recent call last):
    TypeError: columns is 'a' (str); it takes a list of names, such as ["a", "b"]
    """
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise _type_error(argument, value, takes)
    found = list(value)
    for name in found:
        if not isinstance(name, str):
            raise TypeError(f"{argument} holds {_shown(name)}; it takes {takes}")
    return found


def name_or_names(argument: str, value: object) -> list[str]:
    """One string, or several."""
    return (
        [value] if isinstance(value, str) else names(argument, value, 'a name, or a list of names such as ["a", "b"]')
    )


def sets_of_names(argument: str, value: object) -> list[list[str]]:
    """One string, several, or several sets of them."""
    takes = 'a name, or a list of names and of lists of names, such as ["a", ["b", "c"]]'
    if isinstance(value, str):
        return [[value]]
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        raise _type_error(argument, value, takes)
    return [[item] if isinstance(item, str) else names(argument, item, takes) for item in value]


def progress(value: object) -> Any:
    """What :data:`dovetail._progress.ProgressArgument` describes."""
    if value is None or isinstance(value, bool) or callable(value):
        return value
    raise _type_error("progress", value, "True for a bar on standard error, or a function to call with each state")


def mapping(argument: str, value: object, takes: str) -> Mapping[str, Any]:
    """A mapping that JSON can say."""
    if not isinstance(value, Mapping):
        raise _type_error(argument, value, takes)
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{argument} cannot be sent as JSON: {error}; it takes {takes}") from None
    return value


def mapping_of(argument: str, value: object, takes: str) -> Mapping[str, Any]:
    """A mapping whose keys are strings."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _type_error(argument, value, takes)
    return value


def pem(argument: str, value: object) -> bytes | None:
    """The bytes of a certificate or key: given as they are, or as the path of a file."""
    takes = "PEM, as bytes or str, or the path of a file of it"
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str) and is_pem(value):
        return value.encode()
    if not isinstance(value, (str, os.PathLike)):
        raise _type_error(argument, value, takes)
    try:
        return Path(value).read_bytes()
    except OSError as error:
        raise type(error)(
            f"{argument} names the file {value}, which cannot be read: {file_failure(value, error)}; it takes {takes}"
        ) from None


def is_pem(value: object) -> bool:
    """Whether it is a certificate or key itself, and not the path of one."""
    return isinstance(value, bytes) or (isinstance(value, str) and value.lstrip().startswith("-----BEGIN"))


def private_key(argument: str, value: object) -> bytes | None:
    """As :func:`pem`, of what holds a private key.

    >>> private_key("key", b"-----BEGIN CERTIFICATE-----")
    Traceback (most recent call last):
    ValueError: there is no private key in key; it takes PEM, where a key begins with "-----BEGIN PRIVATE KEY-----"
    """
    found = pem(argument, value)
    if found is not None and b"PRIVATE KEY-----" not in found:
        file = "" if is_pem(value) else f" ({value})"
        raise ValueError(
            f"there is no private key in {argument}{file}; it takes PEM, where a key begins with "
            '"-----BEGIN PRIVATE KEY-----"'
        )
    return found


def certificates(argument: str, value: object) -> bytes | None:
    """As :func:`pem`, of what holds a certificate. TLS takes a file without any for a list of none.

    >>> certificates("cert", b"hello")
    Traceback (most recent call last):
    ValueError: there is no certificate in cert; it takes PEM, where a certificate begins with ...
    """
    found = pem(argument, value)
    begin = "-----BEGIN CERTIFICATE-----"
    if found is not None and begin.encode() not in found:
        file = "" if found == value or (isinstance(value, str) and "-----" in value) else f" ({value})"
        raise ValueError(
            f'there is no certificate in {argument}{file}; it takes PEM, where a certificate begins with "{begin}" '
            "(to convert DER: openssl x509 -inform DER -in FILE)"
        )
    return found


def in_file(argument: str, value: str | None) -> str | None:
    """The text itself, or that of the file that follows an ``@``, without the spaces around it."""
    if value is None or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = file_failure(value[1:], error)
        raise ValueError(f"{argument} names the file {value[1:]}, which cannot be read: {why}") from None


def file_failure(path: str | os.PathLike[str], error: Exception) -> str:
    """Why the system refuses a file, in plain words and without its numbers.

    >>> file_failure("/proc/none/such", FileNotFoundError(2, "No such file or directory"))
    'there is no folder /proc/none'
    >>> file_failure("/proc/none", FileNotFoundError(2, "No such file or directory"))
    'there is no such file'
    >>> file_failure("/proc/version/x", NotADirectoryError(20, "Not a directory"))
    '/proc/version is a file, not a folder'
    >>> file_failure("/proc/1/mem", PermissionError(13, "Permission denied"))
    'permission denied: the user of this process may not open it'
    """
    above = list(Path(path).parents)
    match error:
        case FileNotFoundError():
            missing = [folder for folder in above if not folder.exists()]
            return f"there is no folder {missing[-1]}" if missing else "there is no such file"
        case NotADirectoryError():
            file = next((folder for folder in above if folder.is_file()), None)
            return "a part of its path is not a folder" if file is None else f"{file} is a file, not a folder"
        case IsADirectoryError():
            return "it is a folder, not a file"
        case PermissionError():
            return "permission denied: the user of this process may not open it"
        case UnicodeDecodeError():
            return "it is not UTF-8 text"
    return getattr(error, "strerror", None) or str(error)


def quoted(name: str) -> str:
    """A name as it is written among others: with quotes around it where it would be taken for several, or for none.

    It is the server's rule, and that of the command line.

    >>> print(*map(quoted, ["a", "it's", "b,c", "d e", 'say "x" now', "f(x", ""]))
    a it's "b,c" "d e" "say ""x"" now" "f(x" ""
    """
    if name and not re.search(r'[\s,=()"]', name):
        return name
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


# Names that a sentence has room for.
_LISTED_MAX = 20


def listed(names: Iterable[str]) -> str:
    """The first of some names, for a sentence.

    >>> listed(["a", "b,c"]), listed(map(str, range(1000)))[-19:]
    ('a, "b,c"', '18, 19 and 980 more')
    """
    names = list(names)
    more = f" and {len(names) - _LISTED_MAX} more" if len(names) > _LISTED_MAX else ""
    return ", ".join(map(quoted, names[:_LISTED_MAX])) + more


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about a name that is not known, where exactly one of those that are is close to it.

    >>> did_you_mean("odrers", ["orders", "items"]), did_you_mean("G", ["a", "g"]), did_you_mean("q", ["a"])
    ('; did you mean "orders"?', '; did you mean "g"?', '')
    >>> did_you_mean("keys", ["key", "keyz"])
    ''
    """
    distances = {other: _distance(name.lower(), other.lower()) for other in known}
    most = min(2, max(len(name), 3) // 3, len(name) - 1)
    near = [other for other, distance in distances.items() if distance <= max(most, 0)]
    same = [other for other in near if not distances[other]]
    meant = same or near
    return f"; did you mean {json.dumps(meant[0], ensure_ascii=False)}?" if len(meant) == 1 else ""


def _distance(one: str, other: str) -> int:
    """Letters that are put in, left out, written for another, or in the other order."""
    before, last, row = [0], [0], list(range(len(other) + 1))
    for at, letter in enumerate(one):
        before, last, row = last, row, [at + 1]
        for place, wanted in enumerate(other):
            row.append(min(last[place + 1] + 1, row[place] + 1, last[place] + (letter != wanted)))
            if at and place and letter == other[place - 1] and one[at - 1] == wanted:
                row[-1] = min(row[-1], before[place - 1] + 1)
    return row[-1]


def known(function: str, options: Mapping[str, Any], takes: Iterable[str]) -> None:
    """Refuses options that a function does not have."""
    takes = list(takes)
    for option in options:
        if option not in takes:
            raise TypeError(f"{function}() has no argument {option!r}; besides the tables it takes {', '.join(takes)}")


def _type_error(argument: str, value: object, takes: str) -> TypeError:
    return TypeError(f"{argument} is {_shown(value)}; it takes {takes}")


def _shown(value: object) -> str:
    """A value and its type, on one line of bearable length."""
    if value is None:
        return "None"
    shown = repr(value).split("\n", 1)[0]
    return f"{shown if len(shown) <= 60 else shown[:57] + '...'} ({type(value).__name__})"
