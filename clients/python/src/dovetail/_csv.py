"""CSV. pyarrow splits the text into columns of text, and its casts convert each column to its type.

The command line reads CSV by the same rules (``src/cli/files/csv/mod.rs``); ``tests/csv/cases.json`` tests both.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import re
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from . import _arguments
from ._types import INFERRED, NOT_READ, form, name_of, named

EMPTY = "it is empty, and a table needs columns"
"""Error for an empty file."""

INFER_ROWS = 10_000
"""Default number of rows from which types are inferred."""

GZIP_MAGIC = b"\x1f\x8b"
"""First bytes of a gzip file."""

_BLOCK_BYTES = 8 << 20
"""Bytes read at a time. A row must fit."""


@dataclass(frozen=True)
class CsvOptions:
    """Options for reading CSV."""

    types: Mapping[str, pa.DataType] = field(default_factory=dict)
    delimiter: str | None = None
    header: bool = True
    infer_rows: int = INFER_ROWS
    null_values: Sequence[str] = ()
    given: Sequence[str] = ()
    """Names of the arguments that the caller gave."""

    @classmethod
    def of_arguments(
        cls, types: object, delimiter: object, header: object, infer_rows: object, null_values: object
    ) -> CsvOptions:
        """Checks the arguments of a caller. ``None``: not given."""
        said: dict[str, Any] = {}
        if types is not None:
            said["types"] = _types(types)
        if delimiter is not None:
            said["delimiter"] = _delimiter(_arguments.text("delimiter", delimiter, "a character"))
        if header is not None:
            said["header"] = _arguments.truth("header", header)
        if infer_rows is not None:
            said["infer_rows"] = _arguments.whole("infer_rows", infer_rows, least=0)
        if null_values is not None:
            said["null_values"] = _words(null_values)
        return cls(**said, given=list(said))


def _delimiter(given: str) -> str:
    r"""Checks the character between fields.

    >>> _delimiter(";"), _delimiter("\\t")
    (';', '\t')
    """
    character = "\t" if given == r"\t" else given
    if len(character) != 1 or not character.isascii() or character in '"\n\r':
        raise ValueError(
            f"delimiter is {given!r}; it takes one ASCII character, such as ';', that is not a quote or a line end"
        )
    return character


def _words(words: object) -> list[str]:
    """Returns the words for null. One string may have several with commas, as on the command line.

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
        data_type = given if isinstance(given, pa.DataType) else named(str(given))
        if data_type is None or form(data_type) is None:
            raise ValueError(f"types gives {given!r} for column {name!r}, which {NOT_READ}")
        found[name] = data_type
    return found


def read(path: str, options: CsvOptions) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Returns the columns and the rows of a file."""
    file = _File(path, options)
    schema, batches = file.open()
    return schema, file.typed(schema, batches)


class _File:
    """File that is being read."""

    def __init__(self, path: str, options: CsvOptions) -> None:
        self._path = path
        self._options = options
        with open(path, "rb") as start:
            self._is_gzip = start.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        name = path.lower().removesuffix(".gz")
        self._delimiter = options.delimiter or ("\t" if name.endswith(".tsv") else ",")

    def open(self) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """Returns the columns, and the batches of their text."""
        names = self._names()
        said = self._options.types
        if unknown := [name for name in said if name not in names]:
            meant = _arguments.did_you_mean(unknown[0], names)
            raise self._error(
                f"types names a column {unknown[0]!r}, but the columns are {_arguments.listed(names)}{meant}"
            )
        text = pa.schema([(name, pa.string()) for name in names])
        batches = self._batches(text)
        first: list[pa.RecordBatch] = []
        rows = 0
        batches = self._with_closed_quotes(batches, names[-1] if self._options.header else "")
        while rows < self._options.infer_rows and (batch := next(batches, None)) is not None:
            first.append(batch)
            rows += batch.num_rows
        looked_at = pa.Table.from_batches(first, text).slice(0, self._options.infer_rows)
        types = [said[name] if name in said else _inferred(looked_at[name]) for name in names]
        return pa.schema(zip(names, types, strict=True)), itertools.chain(first, batches)

    def typed(self, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Converts the batches to the types of the schema."""
        done = 0
        for batch in batches:
            try:
                columns = [_converted(batch.column(index), column.type) for index, column in enumerate(schema)]
            except pa.ArrowInvalid:
                raise self._unfit(schema, batch, done) from None
            yield pa.record_batch(columns, schema=schema)
            done += batch.num_rows

    def _names(self) -> list[str]:
        try:
            _, names = next(self._records(), (0, []))
        except csv.Error as error:
            raise self._error(f"its first line cannot be read: {error}") from None
        if not names:
            with self._bytes() as file:
                raise self._error("the file has no columns" if file.read(1) else EMPTY)
        if not self._options.header:
            return [f"column_{index + 1}" for index in range(len(names))]
        # What is not UTF-8 was replaced by this mark.
        if any("\ufffd" in name for name in names) and (other := self._not_utf8()):
            raise other
        for twice in (name for index, name in enumerate(names) if name in names[:index]):
            raise self._error(f"two columns are named {twice!r}; rename one, because joins refer to columns by name")
        return names

    def _batches(self, text: pa.Schema) -> Iterator[pa.RecordBatch]:
        # A heading is read as a row: where no line end follows it, pyarrow does not take it for one.
        headings = int(self._options.header)
        try:
            reader = pacsv.open_csv(
                pa.input_stream(self._path, compression="gzip" if self._is_gzip else None),
                pacsv.ReadOptions(block_size=_BLOCK_BYTES, column_names=text.names),
                pacsv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True),
                pacsv.ConvertOptions(
                    column_types=text, strings_can_be_null=True, null_values=["", *self._options.null_values]
                ),
            )
            for batch in reader:
                yield batch.slice(headings)
                headings = max(0, headings - batch.num_rows)
        except pa.ArrowInvalid as error:
            raise self._malformed(len(text), error) from None
        except OSError as error:
            raise self._unread(error) from None

    def _with_closed_quotes(self, batches: Iterator[pa.RecordBatch], heading: str) -> Iterator[pa.RecordBatch]:
        """Returns the batches. Refuses an open quote, after which pyarrow reads the rest as one value."""
        rows, last = 0, heading
        for batch in batches:
            if batch.num_rows:
                rows, last = rows + batch.num_rows, batch.column(batch.num_columns - 1)[-1].as_py() or ""
            yield batch
        # Only a quoted value has a line end in it, and a quote within it is doubled.
        if ("\n" in last or "\r" in last) and self._last_quotes() % 2 == 0:
            line = self._line_of(max(0, rows - 1 + int(self._options.header)))
            place = f"line {line}" if line else f"row {rows}"
            raise self._error(
                f"a quote opens on {place} or after it and does not close before the end of the file; close it, or "
                "double the quotes within quoted values"
            )

    # What is wrong

    def _error(self, sentence: str) -> ValueError:
        return ValueError(f"reading {self._path}: {sentence}")

    def _unread(self, error: Exception) -> ValueError:
        """Returns the error for input that cannot be read further."""
        if getattr(error, "errno", None) is not None or not self._is_gzip:
            return self._error(_arguments.file_failure(self._path, error))
        return self._error(
            f"its gzip data is damaged or cut short ({error}); check that it was written and copied in full"
        )

    def _unfit(self, schema: pa.Schema, batch: pa.RecordBatch, done: int) -> ValueError:
        """Returns the error for the first value that does not fit its column. `done` rows precede the batch."""
        row, index = min((_first_unfit(batch.column(index), field.type), index) for index, field in enumerate(schema))
        name, value = schema.field(index).name, batch.column(index)[row].as_py()
        line = self._line_of(done + row + int(self._options.header))
        return self._error(
            f"{f'line {line}' if line else f'row {done + row + 1}'}, column {name!r}: {value!r} is not a valid "
            f"{name_of(schema.field(index).type)}; use types={ {name: 'string'} } to read the column as text, or "
            f"null_values={[value]} if the value means null"
        )

    def _malformed(self, columns: int, error: Exception) -> ValueError:
        """Returns the error for text that pyarrow cannot split into fields. pyarrow does not name the line."""
        if other := self._not_utf8():
            return other
        try:
            for number, record in self._records():
                if len(record) != columns:
                    return self._error(
                        f"line {number} has {len(record)} fields, but there are {columns} columns; quote the fields "
                        "that contain a delimiter or a quote, or correct the line"
                    )
        except csv.Error:
            pass
        return self._error(f"{error}; check for a quote that does not close")

    def _not_utf8(self) -> ValueError | None:
        try:
            with self._bytes() as file:
                number = 1
                for line in file:
                    try:
                        line.decode()
                    except UnicodeDecodeError as error:
                        number += _line_ends(line[: error.start])
                        return self._error(
                            f"line {number} is not UTF-8; convert the file first, for example with: iconv "
                            "-f LATIN1 -t UTF-8 FILE"
                        )
                    number += _line_ends(line)
        except (OSError, EOFError, zlib.error) as error:
            return self._unread(error)
        return None

    def _line_of(self, index: int) -> int | None:
        """The line on which a record begins, counted from 1, by the number of records before it."""
        try:
            return next((line for line, _ in itertools.islice(self._records(), index, None)), None)
        except csv.Error:
            # A field is longer than this module takes.
            return None

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        """The records by Python's own reader, slowly, each with the line on which it begins."""
        opened: Any = gzip.open if self._is_gzip else open
        limit = csv.field_size_limit(_BLOCK_BYTES)
        try:
            with opened(self._path, "rt", encoding="utf-8-sig", errors="replace", newline="") as file:
                reader = csv.reader(file, delimiter=self._delimiter)
                line = 1
                for record in reader:
                    if record:
                        yield line, record
                    line = reader.line_num + 1
        except (OSError, EOFError, zlib.error) as error:
            raise self._unread(error) from None
        finally:
            csv.field_size_limit(limit)

    def _last_quotes(self) -> int:
        """The quotes at the end of the file, before white space."""
        end = b""
        with self._bytes() as file:
            while block := file.read(_BLOCK_BYTES):
                text = (end + block).rstrip()
                end = (end + block)[len(text.rstrip(b'"')) :]
        return len(end.rstrip())

    def _bytes(self) -> Any:
        return gzip.open(self._path, "rb") if self._is_gzip else open(self._path, "rb")


def _line_ends(text: bytes) -> int:
    r"""Counts the line ends of all systems.

    >>> _line_ends(b"a\nb\rc\r\n")
    3
    """
    return len(re.findall(rb"\r\n|\r|\n", text))


def _inferred(text: pa.ChunkedArray) -> pa.DataType:
    """The type that all values of a column have."""
    if text.null_count == len(text):
        return pa.string()
    # A float has not all digits of a whole number beyond int64.
    has_long = pc.any(pc.match_substring_regex(text, "^-?[0-9]{19,}$")).as_py()
    for data_type in INFERRED:
        if _fits(text, data_type) and not (has_long and pa.types.is_floating(data_type)):
            return data_type
    return pa.string()


def _converted(text: Any, data_type: pa.DataType) -> Any:
    """Text as values of a type; raises pyarrow's ``ArrowInvalid`` for text that is none."""
    if not pc.all(pc.match_substring_regex(text, form(data_type)), min_count=0).as_py():
        raise pa.ArrowInvalid("another form")
    if pa.types.is_time(data_type):
        # pyarrow casts no text to a time of day.
        stamps = pc.binary_join_element_wise("1970-01-01", text, " ")
        return stamps.cast(pa.timestamp(data_type.unit)).cast(data_type)
    return text.cast(data_type)


def _fits(text: Any, data_type: pa.DataType) -> bool:
    try:
        _converted(text, data_type)
    except pa.ArrowInvalid:
        return False
    return True


def _first_unfit(text: Any, data_type: pa.DataType) -> int:
    """The place of the first value that is not of a type; the length where all are."""
    if _fits(text, data_type):
        return len(text)
    return bisect_left(range(len(text)), True, key=lambda row: not _fits(text.slice(0, row + 1), data_type))
