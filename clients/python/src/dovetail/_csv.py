"""CSV, read by the rules of the command line (``src/cli/files/csv``); ``tests/csv/cases.json`` holds both to them.

pyarrow takes the text apart, and every column of it as text; what it would make of the fields by itself is not what
other clients make of them. The types come from the caller or from the first rows, and pyarrow's casts bring the text to
them.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from . import _arguments
from ._display import counted
from ._quotes import Quotes, first_wrong
from ._types import NAMES, can_be_read, name_of, named, taking

EMPTY = "it is empty, and a table needs columns"
"""What is wrong with a file that has nothing in it."""

INFER_ROWS = 10_000
"""Rows that are looked at where nobody says how many."""

GZIP_MAGIC = b"\x1f\x8b"
"""What a file that gzip has compressed begins with."""

_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
"""What UTF-16 begins with."""

_BLOCK_BYTES = 8 << 20
"""Read at a time; a row must fit."""

_STAMP = r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d"

# What the values of a type look like, each value being of the first that it matches. All stamps of up to six digits
# have one type, so that those of two files match.
_PATTERNS = [
    ("bool", r"(?i)^(?:true|false)$"),
    ("int64", r"^-?\d+$"),
    ("float64", r"^-?(?:(?:\d*\.\d+|\d+\.\d*)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+)$|^(?:NaN|nan|inf|-inf)$"),
    ("date", r"^\d{4}-\d\d-\d\d$"),
    ("timestamp", _STAMP + r"(?:[^\d.].*)?$"),
    ("timestamp", _STAMP + r"\.\d{1,6}(?:[^\d].*)?$"),
    ("timestamp(ns)", _STAMP + r"\.\d{7,9}(?:[^\d].*)?$"),
]

# What is read as a timestamp. pyarrow reads more, and other readers read other things.
_ZONE = r"(?:[zZ]| ?[+-](?:[01]\d|2[0-3])(?::?[0-5]\d)?)"
_TIMESTAMP = rf"^\d{{4}}-\d\d-\d\d(?:[T ]\d\d:\d\d:[0-5]\d(?:\.\d{{1,9}})?{_ZONE}?)?$"

# What is read as a time of day, by its unit; its seconds may be left out.
_TIME = {
    unit: rf"^(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d{fraction})?$"
    for unit, fraction in {"s": "", "ms": r"(?:\.\d{1,3})?", "us": r"(?:\.\d{1,6})?", "ns": r"(?:\.\d{1,9})?"}.items()
}

# A time that says how far it is from UTC.
_ZONED = rf":\d\d(?:\.\d+)?{_ZONE}$"

# Floats that are no numbers. pyarrow reads more, and takes numbers that are too large for infinity.
_NOT_FINITE = r"(?i)^\s*[-+]?(?:nan|inf|infinity)\s*$"

# Zero with an exponent, of which pyarrow reads some.
_ZERO = r"^-?(?:0+\.?0*|\.0+)[eE][-+]?\d+$"

# What people write for a value that is missing.
_MISSING = {"NA", "N/A", "NULL", "NONE", "NIL", "NAN", "-", "\\N"}


@dataclass(frozen=True)
class CsvOptions:
    """How CSV is read."""

    types: Mapping[str, pa.DataType] = field(default_factory=dict)
    delimiter: str | None = None
    header: bool = True
    infer_rows: int = INFER_ROWS
    null_values: Sequence[str] = ()
    given: Sequence[str] = ()
    """The arguments that somebody gave."""

    @classmethod
    def of_arguments(
        cls, types: object, delimiter: object, header: object, infer_rows: object, null_values: object
    ) -> CsvOptions:
        """Checks what a caller gave; ``None`` is what was not given."""
        arguments = {
            "types": types,
            "delimiter": delimiter,
            "header": header,
            "infer_rows": infer_rows,
            "null_values": null_values,
        }
        said: dict[str, Any] = {name: value for name, value in arguments.items() if value is not None}
        if "types" in said:
            said["types"] = _types(types)
        if "delimiter" in said:
            said["delimiter"] = _delimiter(_arguments.text("delimiter", delimiter, "a character"))
        if "header" in said:
            said["header"] = _arguments.truth("header", header)
        if "infer_rows" in said:
            said["infer_rows"] = _arguments.whole("infer_rows", infer_rows, least=0)
        if "null_values" in said:
            said["null_values"] = _words(null_values)
        return cls(**said, given=list(said))


def _delimiter(given: str) -> str:
    r"""The character between fields.

    >>> _delimiter(";"), _delimiter("\\t")
    (';', '\t')
    """
    character = "\t" if given == r"\t" else given
    if len(character) != 1 or not character.isascii() or character in '"\n\r':
        raise ValueError(
            f"delimiter is {given!r}; it takes one ASCII character, such as ';', that is no quote and no line end"
        )
    return character


def _words(words: object) -> list[str]:
    """Words for null: several in one string stand with commas between them, as on the command line.

    >>> _words("NA,NULL"), _words(["N,A"]), _words(("NA", "NULL"))
    (['NA', 'NULL'], ['N,A'], ['NA', 'NULL'])
    """
    if isinstance(words, str):
        return words.split(",")
    return _arguments.names("null_values", words, 'words, as in "NA,NULL" or ["NA", "NULL"]')


def _types(types: object) -> dict[str, pa.DataType]:
    takes = 'a mapping of names of columns to types, such as {"id": "int64", "price": "decimal(9,2)"}'
    found = {}
    for name, given in _arguments.mapping_of("types", types, takes).items():
        try:
            data_type = given if isinstance(given, pa.DataType) else named(str(given))
        except ValueError as error:
            raise ValueError(f"types says {given!r} of column {name!r}: {error}") from None
        if data_type is None or not can_be_read(data_type):
            raise ValueError(
                f"types says {given!r} of column {name!r}, which is no type that CSV is read as; write one such as "
                "int64, float64, decimal(15,2), bool, string, date or timestamp"
            )
        found[name] = data_type
    return found


def read(path: str, options: CsvOptions) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """The columns of a file, and its rows."""
    file = _File(path, options)
    schema, batches = file.open()
    return schema, file.typed(schema, batches)


class _File:
    """One file while it is read."""

    def __init__(self, path: str, options: CsvOptions) -> None:
        self._path = path
        self._options = options
        with open(path, "rb") as start:
            self._is_gzip = start.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        name = path.lower().removesuffix(".gz")
        self._delimiter = options.delimiter or ("\t" if name.endswith(".tsv") else ",")
        self._inferred_rows = 0

    def open(self) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """The columns, and the batches of their text."""
        names = self._columns()
        texts = {name: pa.string() for name in names}
        batches = self._batches(names, texts)
        first: list[pa.RecordBatch] = []
        rows = 0
        while rows < self._options.infer_rows and (batch := next(batches, None)) is not None:
            first.append(batch)
            rows += batch.num_rows
        self._inferred_rows = min(rows, self._options.infer_rows)
        looked_at = pa.Table.from_batches(first, pa.schema(texts)).slice(0, self._inferred_rows)
        said = self._options.types
        if unknown := [name for name in said if name not in names]:
            meant = _arguments.did_you_mean(unknown[0], names)
            raise self._error(
                f"types names a column {unknown[0]!r}, and the columns are {_arguments.listed(names)}{meant}"
            )
        fields = [
            pa.field(name, said[name] if name in said else _inferred(looked_at.column(index)))
            for index, name in enumerate(names)
        ]
        return pa.schema(fields), itertools.chain(first, batches)

    def typed(self, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The batches, with the types of the schema."""
        done = 0
        # The first time of each column, which tells whether those that follow have a zone.
        times: dict[int, pa.Array] = {}
        for batch in batches:
            columns = []
            for index, column in enumerate(schema):
                values = batch.column(index)
                try:
                    columns.append(_converted(values, column.type, times.get(index)))
                except pa.ArrowInvalid:
                    raise self._unfit(schema, batch, done, times) from None
                if pa.types.is_timestamp(column.type) and index not in times and values.null_count < len(values):
                    times[index] = values.drop_null().slice(0, 1)
            yield pa.record_batch(columns, schema=schema)
            done += batch.num_rows

    def _columns(self) -> list[str]:
        with self._reading():
            self._check_start()
            names: list[str] = self._reader(None, None).schema.names
        if not self._options.header:
            return [f"column_{index + 1}" for index in range(len(names))]
        blank = next((place for place, name in enumerate(names, 1) if not name.strip()), None)
        if blank is not None:
            raise self._error(
                f"column {blank} has no name in the heading; write one there, or say header=False if the first line is "
                "a row"
            )
        twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
        if twice is not None:
            raise self._error(f"two columns are named {twice!r}; rename one, since joins refer to columns by name")
        return names

    def _check_start(self) -> None:
        """Refuses another encoding, and what is likely to have several columns and comes out as one."""
        with self._bytes() as file:
            start = file.readline()
        if not start:
            raise self._error(EMPTY)
        if start.startswith(_UTF16_MARKS):
            raise self._error("its text is UTF-16; convert the file first, as with: iconv -f UTF-16 -t UTF-8 FILE")
        _, record = next(self._records(), (1, []))
        if self._options.delimiter is not None or len(record) != 1:
            return
        line = start.decode(errors="replace")
        found = next((other for other in ",;\t|" if other in line), None)
        if found is not None and self._delimiter not in line:
            raise self._error(
                f"its first line has no {self._delimiter!r} and is one column, but has {found!r}; if that is between "
                f"the fields, say delimiter={found!r}, and if it is one column indeed, delimiter={self._delimiter!r}"
            )

    def _reader(self, names: list[str] | None, types: Mapping[str, pa.DataType] | None) -> pacsv.CSVStreamingReader:
        has_header = self._options.header
        file = pa.input_stream(self._path, compression="gzip" if self._is_gzip else None)
        return pacsv.open_csv(
            pa.PythonFile(Quotes(file, self._delimiter), mode="r"),
            pacsv.ReadOptions(
                block_size=_BLOCK_BYTES,
                autogenerate_column_names=not has_header and names is None,
                column_names=None if has_header else names,
            ),
            pacsv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True),
            pacsv.ConvertOptions(
                column_types=types, strings_can_be_null=True, null_values=["", *self._options.null_values]
            ),
        )

    def _batches(self, names: list[str], types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        with self._reading():
            yield from self._reader(names, types)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Says what is wrong with the file where pyarrow fails to read it."""
        try:
            try:
                yield
            except (pa.ArrowInvalid, UnicodeDecodeError) as error:
                raise self._malformed(error) from None
        except (OSError, EOFError, zlib.error) as error:
            raise self._error(self._unread(error)) from None

    # What is wrong

    def _unread(self, error: Exception) -> str:
        """Why no more can be read."""
        if getattr(error, "errno", None) is not None:
            return _arguments.file_failure(self._path, error)
        if not self._is_gzip:
            return f"cannot read on: {error}"
        # The words of pyarrow.
        if "Truncated" in str(error):
            error = self._gunzip_failure() or error
        if isinstance(error, EOFError):
            return (
                "its gzip data ends too early: the file is cut short; see whether whatever wrote or copied it was done"
            )
        return f"its gzip data is damaged, or some of it is none ({error}); see whether it was copied as it is"

    def _gunzip_failure(self) -> Exception | None:
        """What Python has against the gzip data: pyarrow takes a byte behind its end for more that is cut short."""
        try:
            with gzip.open(self._path) as file:
                while file.read(_BLOCK_BYTES):
                    pass
        except (OSError, EOFError, zlib.error) as error:
            return error
        return None

    def _error(self, sentence: str) -> ValueError:
        return ValueError(f"reading {self._path}: {sentence}")

    def _unfit(self, schema: pa.Schema, batch: pa.RecordBatch, done: int, times: Mapping[int, pa.Array]) -> ValueError:
        """The first value of a batch that is not of its column's type; `done` rows are before the batch."""
        wrong = [
            (row, index)
            for index, column in enumerate(schema)
            if (row := _first_unfit(batch.column(index), column.type, times.get(index))) is not None
        ]
        row, index = min(wrong)
        column, value = schema.field(index), batch.column(index)[row].as_py()
        line = self._line_of(done + row + int(self._options.header))
        where = f"line {line}" if line else f"row {done + row + 1}"
        said = _said(column.name, pa.string())
        if pa.types.is_timestamp(column.type) and _first_unfit(batch.column(index).slice(row, 1), column.type) is None:
            has, had = ("a zone", "none") if re.search(_ZONED, value) else ("no zone", "one")
            return self._error(
                f"{where}, column {column.name!r}: {value!r} has {has}, and those before it in the column have {had}; "
                f"write all of them with a zone or all without, or say {said}"
            )
        wider = " or ".join(
            _said(column.name, other)
            for other in taking(column.type, value)
            if _first_unfit(pa.array([value]), other) is None
        )
        advice = (
            f"which types says; correct it, or say another type: "
            f"{f'{wider} takes it, and ' if wider else ''}{said} takes all values"
            if column.name in self._options.types
            else f"which the column is by its first {counted(self._inferred_rows, 'row')}; say "
            f"{f'{wider}, or for any text ' if wider else ''}{said}, or have more rows looked at with infer_rows"
        )
        missing = f"; if it stands for a null, say null_values=[{value!r}]" if value.strip().upper() in _MISSING else ""
        forms = ""
        if pa.types.is_timestamp(column.type) and not missing and not re.match(_TIMESTAMP, value, re.ASCII):
            forms = "; a timestamp is written with its seconds, as in 2026-01-31 10:11:12.5, or is a date alone"
        return self._error(
            f"{where}, column {column.name!r}: {value!r} is no {name_of(column.type)}, {advice}{missing}{forms}"
        )

    def _malformed(self, error: Exception) -> ValueError:
        """What pyarrow cannot take apart: it says what, and seldom where."""
        with self._bytes() as file:
            for number, line in enumerate(file, 1):
                try:
                    line.decode()
                except UnicodeDecodeError:
                    return self._error(
                        f"line {number} is not UTF-8; convert the file first, as with: iconv -f LATIN1 -t UTF-8 FILE"
                    )
        with self._bytes() as file:
            if wrong := first_wrong(file, self._delimiter):
                return self._error(wrong)
        columns = 0
        for line_number, record in self._records():
            columns = columns or len(record)
            if len(record) != columns:
                return self._error(
                    f"line {line_number} has {len(record)} fields where there are {columns} columns; quote the fields "
                    "that have a delimiter or a quote of their own, or correct the line"
                )
        return self._error("the file has no columns" if "Empty CSV file" in str(error) else str(error))

    def _line_of(self, index: int) -> int | None:
        """The line on which a record begins, counted from 1, by the number of records before it."""
        return next((line for line, _ in itertools.islice(self._records(), index, None)), None)

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """The records once more, slowly, each with the line on which it begins."""
        opened = gzip.open if self._is_gzip else open
        with opened(self._path, "rt", encoding="utf-8-sig", errors="replace", newline="") as file:
            reader = csv.reader(file, delimiter=self._delimiter)
            line = 1
            # A field that is longer than this module takes leaves the line unknown.
            try:
                for record in reader:
                    if record:
                        yield line, record
                    line = reader.line_num + 1
            except csv.Error:
                return

    def _bytes(self) -> Any:
        return gzip.open(self._path, "rb") if self._is_gzip else open(self._path, "rb")


def _said(column: str, data_type: pa.DataType) -> str:
    """The argument that gives a column a type."""
    return f"types={{{column!r}: {name_of(data_type)!r}}}"


def _inferred(column: pa.ChunkedArray) -> pa.DataType:
    """The type that all values of a column have."""
    rest, kinds = column.drop_null(), set()
    for kind, pattern in _PATTERNS:
        matches = pc.match_substring_regex(rest, pattern)
        if not pc.any(matches).as_py():
            continue
        kinds.add(kind)
        if kind == "int64" and _first_unfit(rest.filter(matches), pa.int64()) is not None:
            return pa.string()
        rest = rest.filter(pc.invert(matches))
    if len(rest) or not kinds:
        return pa.string()
    # From the narrower to the wider.
    for together in (["bool"], ["int64", "float64"], ["date", "timestamp", "timestamp(ns)"]):
        if kinds <= set(together):
            inferred = NAMES[next(kind for kind in reversed(together) if kind in kinds)]
            # What only looks like one, as 2026-02-30 does, makes a text of its column.
            return inferred if _first_unfit(column, inferred) is None else pa.string()
    return pa.string()


def _converted(values: Any, data_type: pa.DataType, time: pa.Array | None = None) -> Any:
    """Text as values of a type; raises pyarrow's ``ArrowInvalid`` for text that is none.

    `time` is a time that stands before them in their column, if one does.
    """
    if pa.types.is_boolean(data_type):
        words = pc.utf8_lower(values)
        if not pc.all(pc.is_in(words, pa.array(["true", "false", None]))).as_py():
            raise pa.ArrowInvalid("neither true nor false")
        return pc.equal(words, "true")
    if pa.types.is_timestamp(data_type):
        if not pc.all(pc.match_substring_regex(values, _TIMESTAMP), min_count=0).as_py():
            raise pa.ArrowInvalid("no timestamp")
        zoned = [pc.match_substring_regex(times, _ZONED) for times in (values, time) if times is not None]
        if len({has_zone for each in zoned for has_zone in pc.unique(each.drop_null()).to_pylist()}) > 1:
            raise pa.ArrowInvalid("some have a zone, and some have none")
    if pa.types.is_time(data_type):
        return _times_of_day(values, data_type)
    if pa.types.is_integer(data_type) and pc.any(pc.match_substring_regex(values, "[xX]")).as_py():
        raise pa.ArrowInvalid("pyarrow reads 0x10, too")
    if pa.types.is_floating(data_type):
        return _floats(values, data_type)
    try:
        return values.cast(data_type)
    except pa.ArrowInvalid:
        if pa.types.is_timestamp(data_type):
            zoned = pc.match_substring_regex(values, _ZONED)
            plain = pc.if_else(zoned, None, values).cast(pa.timestamp(data_type.unit))
            # pyarrow takes a capital Z, and no space before a zone.
            strict = pc.ascii_upper(pc.replace_substring_regex(pc.if_else(zoned, values, None), r" ([+-])", r"\1"))
            utc = strict.cast(pa.timestamp(data_type.unit, "UTC")).cast(data_type)
            return pc.coalesce(plain if data_type.tz is None else pc.assume_timezone(plain, data_type.tz), utc)
        if pa.types.is_integer(data_type) or pa.types.is_decimal(data_type):
            bare = _bare(values)
            if pa.types.is_decimal(data_type):
                bare = pc.replace_substring_regex(bare, _ZERO, "0")
            if pa.types.is_unsigned_integer(data_type):
                bare = pc.replace_substring_regex(bare, "^-(0+)$", r"\1")
            return bare.cast(data_type)
        raise


def _times_of_day(values: Any, data_type: pa.DataType) -> Any:
    if not pc.all(pc.match_substring_regex(values, _TIME[data_type.unit]), min_count=0).as_py():
        raise pa.ArrowInvalid("no time of day")
    # pyarrow makes them of no text, but of the first day's timestamps.
    seconds = pc.replace_substring_regex(values, r"^(\d\d:\d\d)$", r"\1:00")
    stamps = pc.binary_join_element_wise("1970-01-01", seconds, " ")
    return stamps.cast(pa.timestamp(data_type.unit)).cast(data_type)


def _floats(values: Any, data_type: pa.DataType) -> Any:
    try:
        floats = values.cast(data_type)
    except pa.ArrowInvalid:
        floats = _bare(values).cast(data_type)
    # Of floats of two bytes pyarrow does not tell.
    finite = pc.is_finite(floats.cast(pa.float32()) if pa.types.is_float16(data_type) else floats)
    if not pc.all(finite, min_count=0).as_py():
        words = values.filter(pc.invert(finite))
        if not pc.all(pc.match_substring_regex(words, _NOT_FINITE), min_count=0).as_py():
            raise pa.ArrowInvalid("a number has no room")
    return floats


def _bare(numbers: Any) -> Any:
    """Numbers without the spaces around them, and without a plus, which pyarrow takes for no part of a number."""
    return pc.replace_substring_regex(pc.ascii_trim_whitespace(numbers), r"^\+([^+-])", r"\1")


def _first_unfit(values: Any, data_type: pa.DataType, time: pa.Array | None = None) -> int | None:
    """The place of the first value that is not of a type, or not beside those before it."""

    def fit(count: int) -> bool:
        try:
            _converted(values.slice(0, count), data_type, time)
        except pa.ArrowInvalid:
            return False
        return True

    fitting, more = 0, len(values)
    if fit(more):
        return None
    while more - fitting > 1:
        middle = (fitting + more) // 2
        fitting, more = (middle, more) if fit(middle) else (fitting, middle)
    return fitting
