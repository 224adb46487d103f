"""Conversion of Polars columns that have no type in Arrow."""

from __future__ import annotations

from typing import Any

# 128-bit integers of up to 38 digits, which is almost all of them.
_DECIMAL_DIGITS = 38


def for_arrow(frame: Any) -> Any:
    """Returns the frame with 128-bit integers as decimals.

    Raises:
        ValueError: If an integer has more than 38 digits.
        TypeError: If a column holds Python objects. Polars would export their addresses.

    >>> import polars as pl
    >>> for_arrow(pl.DataFrame({"a": pl.Series([1, 2], dtype=pl.Int128)})).schema["a"]
    Decimal(precision=38, scale=0)
    >>> for_arrow(pl.DataFrame({"a": [object()]}))
    Traceback (most recent call last):
    TypeError: column 'a' holds Python objects (type Object of Polars), which ...
    """
    import polars

    wanted = {}
    for name, of_column in dict(getattr(frame, "schema", {})).items():
        if _holds(of_column, {"Object"}):
            raise TypeError(
                f"column {name!r} holds Python objects (type Object of Polars), which have no type in Arrow; convert "
                "them first, for example to text with map_elements(str, return_dtype=polars.String), or drop the column"
            )
        if _holds(of_column, {"Int128", "UInt128"}):
            wanted[name] = _converted(of_column, polars)
    for name, decimal in wanted.items():
        try:
            frame = frame.with_columns(polars.col(name).cast(decimal))
        except polars.exceptions.PolarsError:
            raise ValueError(
                f"column {name!r} is of type {frame.schema[name]}, which is uploaded as decimal({_DECIMAL_DIGITS},0), "
                f"and has a value of more than {_DECIMAL_DIGITS} digits; convert it first, for example to text with "
                "cast(polars.String)"
            ) from None
    return frame


def _holds(of_column: Any, names: set[str]) -> bool:
    """True if a type is one of these, or has one of them inside."""
    if type(of_column).__name__ in names or getattr(of_column, "__name__", "") in names:
        return True
    inside = [field.dtype for field in getattr(of_column, "fields", [])]
    inside += [of_column.inner] if getattr(of_column, "inner", None) is not None else []
    return any(_holds(part, names) for part in inside)


def _converted(of_column: Any, polars: Any) -> Any:
    """Returns the type with decimals instead of 128-bit integers."""
    if not _holds(of_column, {"Int128", "UInt128"}):
        return of_column
    match of_column:
        case polars.List():
            return polars.List(_converted(of_column.inner, polars))
        case polars.Array():
            return polars.Array(_converted(of_column.inner, polars), of_column.size)
        case polars.Struct():
            return polars.Struct({field.name: _converted(field.dtype, polars) for field in of_column.fields})
    return polars.Decimal(_DECIMAL_DIGITS, 0)
