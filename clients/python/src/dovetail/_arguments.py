"""Checks of arguments before anything is sent. An error names the argument, its value, and the accepted values.

A value of the wrong type is a :class:`TypeError`, a number out of range a :class:`ValueError`. The server checks
whether a name or a word exists.
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
    """Checks a string.

    >>> text("name", 5)
    Traceback (most recent call last):
    TypeError: name is 5 (int); it takes a name, as a str
    """
    if not isinstance(value, str):
        raise _type_error(argument, value, f"{takes}, as a str")
    return value


def one_of(argument: str, value: object, takes: Iterable[str]) -> str:
    """Checks one of several words.

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
    """Checks a string or ``None``."""
    return None if value is None else text(argument, value, takes)


def whole(
    argument: str, value: object, least: int | None = None, takes: str | None = None, most: int | None = None
) -> int:
    """Checks a whole number, also of NumPy.

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
    """Checks a whole number or ``None``."""
    return None if value is None else whole(argument, value, least)


def seconds(argument: str, value: object, *, zero: bool = False) -> float | None:
    """Checks a duration. ``None`` is no limit.

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
    """Checks ``True``, ``False``, also of NumPy, or ``None``."""
    if value is None or isinstance(value, bool):
        return value
    if type(value).__name__ in ("bool", "bool_") and type(value).__module__ == "numpy":
        return bool(value)
    raise _type_error(argument, value, "True or False, or None for the default")


def names(argument: str, value: object, takes: str = 'a list of names, such as ["a", "b"]') -> list[str]:
    """Checks several strings. Refuses a single string, because its letters would pass for names.

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


def some_names(argument: str, value: object) -> list[str]:
    """Checks at least one string.

    >>> some_names("columns", [])
    Traceback (most recent call last):
    ValueError: columns is empty; name at least one, or omit it for all columns
    """
    found = names(argument, value)
    if not found:
        raise ValueError(f"{argument} is empty; name at least one, or omit it for all columns")
    return found


def name_or_names(argument: str, value: object) -> list[str]:
    """Checks one string or several."""
    return (
        [value] if isinstance(value, str) else names(argument, value, 'a name, or a list of names such as ["a", "b"]')
    )


def sets_of_names(argument: str, value: object) -> list[list[str]]:
    """Checks one string, several, or several sets of strings."""
    takes = 'a name, or a list of names and of lists of names, such as ["a", ["b", "c"]]'
    if isinstance(value, str):
        return [[value]]
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        raise _type_error(argument, value, takes)
    return [[item] if isinstance(item, str) else names(argument, item, takes) for item in value]


def progress(value: object) -> Any:
    """Checks a :data:`dovetail._progress.ProgressArgument`."""
    if value is None or isinstance(value, bool) or callable(value):
        return value
    raise _type_error("progress", value, "True for a bar on standard error, or a function to call with each state")


def mapping(argument: str, value: object, takes: str) -> Mapping[str, Any]:
    """Checks a mapping that can be written as JSON."""
    if not isinstance(value, Mapping):
        raise _type_error(argument, value, takes)
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{argument} cannot be sent as JSON: {error}; it takes {takes}") from None
    return value


def mapping_of(argument: str, value: object, takes: str) -> Mapping[str, Any]:
    """Checks a mapping whose keys are strings."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _type_error(argument, value, takes)
    return value


def pem(argument: str, value: object) -> bytes | None:
    """Returns the bytes of a certificate or key, given directly or as the path of a file."""
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
    """True for a certificate or key itself, false for a path."""
    return isinstance(value, bytes) or (isinstance(value, str) and value.lstrip().startswith("-----BEGIN"))


def private_key(argument: str, value: object) -> bytes | None:
    """Returns the bytes like :func:`pem`, and checks that they contain a private key.

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
    """Returns the bytes like :func:`pem`, and checks for a certificate. TLS would accept a file without any.

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
    """Returns the text, or the stripped text of the file after an ``@``."""
    if value is None or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = file_failure(value[1:], error)
        raise ValueError(f"{argument} names the file {value[1:]}, which cannot be read: {why}") from None


def file_failure(path: str | os.PathLike[str], error: Exception) -> str:
    """Returns in words why the system refuses a file.

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
    """Returns a name as written in a list, in quotes if it could be read as several names or none.

    The server and the command line have the same rule.

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
    """Lists the first names, for a sentence.

    >>> listed(["a", "b,c"]), listed(map(str, range(1000)))[-19:]
    ('a, "b,c"', '18, 19 and 980 more')
    """
    names = list(names)
    more = f" and {len(names) - _LISTED_MAX} more" if len(names) > _LISTED_MAX else ""
    return ", ".join(map(quoted, names[:_LISTED_MAX])) + more


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of a sentence about an unknown name, if exactly one known name is similar.

    >>> did_you_mean("odrers", ["orders", "items"]), did_you_mean("G", ["a", "g"]), did_you_mean("q", ["a"])
    ('; did you mean "orders"?', '; did you mean "g"?', '')
    >>> did_you_mean("keys", ["key", "keyz"])
    ''

    A name that is known by now is no suggestion for itself.

    >>> did_you_mean("key", ["key"])
    ''
    """
    known = list(known)
    if name in known:
        return ""
    distances = {other: _distance(name.lower(), other.lower()) for other in known}
    most = min(2, max(len(name), 3) // 3, len(name) - 1)
    near = [other for other, distance in distances.items() if distance <= max(most, 0)]
    same = [other for other in near if not distances[other]]
    meant = same or near
    return f"; did you mean {json.dumps(meant[0], ensure_ascii=False)}?" if len(meant) == 1 else ""


def _distance(one: str, other: str) -> int:
    """Returns the number of inserted, deleted, replaced and swapped letters."""
    before, last, row = [0], [0], list(range(len(other) + 1))
    for at, letter in enumerate(one):
        before, last, row = last, row, [at + 1]
        for place, wanted in enumerate(other):
            row.append(min(last[place + 1] + 1, row[place] + 1, last[place] + (letter != wanted)))
            if at and place and letter == other[place - 1] and one[at - 1] == wanted:
                row[-1] = min(row[-1], before[place - 1] + 1)
    return row[-1]


def known(function: str, options: Mapping[str, Any], takes: Iterable[str]) -> None:
    """Refuses unknown options of a function."""
    takes = list(takes)
    for option in options:
        if option not in takes:
            raise TypeError(f"{function}() has no argument {option!r}; it takes tables and {', '.join(takes)}")


def _type_error(argument: str, value: object, takes: str) -> TypeError:
    return TypeError(f"{argument} is {_shown(value)}; it takes {takes}")


def _shown(value: object) -> str:
    """Formats a value and its type on one line of limited length."""
    if value is None:
        return "None"
    shown = repr(value).split("\n", 1)[0]
    return f"{shown if len(shown) <= 60 else shown[:57] + '...'} ({type(value).__name__})"
