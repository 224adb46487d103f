"""Joins with rows that are sent while their results arrive."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from ._command import encode
from ._connection import Connections
from ._source import Source, arriving
from .errors import Cancelled

_QUESTION_BYTES = 8 << 20
"""Rows that are sent before their answer is read. The server takes this many before it joins any of them."""

_FAILURES = (pa.ArrowException, flight.FlightError, OSError)


class JoinStream:
    """Join of a table with rows that are sent one question at a time (:meth:`Client.open_stream`).

    Closing it, or leaving its ``with`` block, ends the join. One thread may use it at a time.
    """

    def __init__(self, connections: Connections, command: Mapping[str, Any], schema: pa.Schema) -> None:
        self._call: _Call | None = _Call(connections, command, schema)
        self._message_limit = connections.message_limit
        self._questions = 0
        self.sent_schema = schema
        """Columns of the rows to send."""
        self.schema = self._call.schema
        """Columns of the joined rows."""

    def ask(self, rows: Any) -> pa.Table:
        """Sends rows, and returns the rows that they join with.

        Args:
            rows: Rows in the forms of :meth:`Client.stream_join`. They have the columns of :attr:`sent_schema`, in any
                order, and are converted to their types.

        Raises:
            InvalidRequest: For rows with other columns, and for values that do not fit the types.
            Cancelled: If the stream is closed.
        """
        call = self._open_call()
        found = arriving(rows, self._message_limit, self.sent_schema)
        answer: list[pa.RecordBatch] = []
        for batches in _questions(found.batches):
            self._questions += 1
            try:
                answer += call.answer(batches, str(self._questions).encode())
            except BaseException:
                # The rest of this answer would be read as the next.
                self._end(failed=True)
                raise
        return pa.Table.from_batches(answer, self.schema)

    def close(self) -> None:
        """Ends the join. Does nothing the second time."""
        if self._call is not None:
            self._end(failed=False)

    def _open_call(self) -> _Call:
        if self._call is None:
            raise Cancelled("the stream is closed; open another")
        return self._call

    def _end(self, failed: bool) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.end(failed)

    def __enter__(self) -> JoinStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def exchange(connections: Connections, command: Mapping[str, Any], rows: Source) -> pa.RecordBatchReader:
    """Sends rows to a join, and returns the reader of its result.

    A thread sends, so that neither side waits for the other. It ends when the rows end, when the result is closed, or
    when the call fails.
    """
    call = _Call(connections, command, rows.schema)
    return pa.RecordBatchReader.from_batches(call.schema, call.batches(rows))


def _questions(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Batches in groups of about `_QUESTION_BYTES`."""
    group: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        group.append(batch)
        size += batch.nbytes
        if size >= _QUESTION_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _has_rows(chunk: flight.FlightStreamChunk) -> bool:
    """Whether a chunk has rows. The server sends batches without rows while there is no result."""
    return chunk.data is not None and bool(chunk.data.num_rows)


class _Call:
    def __init__(self, connections: Connections, command: Mapping[str, Any], schema: pa.Schema) -> None:
        self._connections = connections
        self._failure: BaseException | None = None
        self._has_ended = False
        with ExitStack() as stack, connections.calling("stream_join"):
            client = stack.enter_context(connections.stream())
            descriptor = flight.FlightDescriptor.for_command(encode(command))
            self._writer, self._reader = client.do_exchange(descriptor, connections.options())
            try:
                self._writer.begin(schema)
                self.schema: pa.Schema = self._reader.schema
            except BaseException:
                # The status of the call says why, and closing the writer tells it.
                self._end()
                raise
            arrays = [pa.nulls(0, field.type) for field in schema]
            self._rowless = pa.RecordBatch.from_arrays(arrays, schema=schema)
            self._stack = stack.pop_all()

    def answer(self, batches: Iterable[pa.RecordBatch], note: bytes) -> Iterator[pa.RecordBatch]:
        """Sends batches and a note, and returns their joined rows. The note comes back after them."""
        with self._connections.calling("stream_join"):
            for batch in batches:
                self._writer.write_batch(batch)
            self._writer.write_with_metadata(self._rowless, pa.py_buffer(note))
            while True:
                chunk = self._reader.read_chunk()
                if chunk.app_metadata is not None and chunk.app_metadata.to_pybytes() == note:
                    return
                if _has_rows(chunk):
                    yield chunk.data

    def end(self, failed: bool) -> None:
        """Ends the call: the rows end, or the join is cancelled."""
        with self._stack, suppress(*_FAILURES):
            if failed:
                self._reader.cancel()
            else:
                self._writer.done_writing()
                self._reader.read_all()
            self._writer.close()

    def batches(self, rows: Source) -> Iterator[pa.RecordBatch]:
        sender = threading.Thread(target=self._send, args=[rows], name="dovetail-stream", daemon=True)
        sender.start()
        with self._stack:
            try:
                with self._connections.calling("stream_join"):
                    while True:
                        try:
                            chunk = self._reader.read_chunk()
                        except StopIteration:
                            break
                        if _has_rows(chunk):
                            yield chunk.data
            except Exception:
                if self._failure is not None:
                    raise self._failure from None
                raise
            finally:
                self._has_ended = True
                self._reader.cancel()
                with suppress(*_FAILURES):
                    self._writer.close()
        if self._failure is not None:
            raise self._failure

    def _send(self, rows: Source) -> None:
        try:
            for batch in rows.batches:
                if self._has_ended:
                    return
                self._writer.write_batch(batch)
            self._writer.done_writing()
        except _FAILURES as error:
            # Reading tells why the call failed. The rows themselves may fail like this, too.
            self._failure = self._failure or (None if isinstance(error, flight.FlightError) else error)
            self._reader.cancel()
        except BaseException as error:
            self._failure = error
            self._reader.cancel()

    def _end(self) -> None:
        with suppress(StopIteration):
            self._writer.close()
