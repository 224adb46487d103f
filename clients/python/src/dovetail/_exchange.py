"""Joins with rows that are sent while their results arrive."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from ._command import encode
from ._connection import Connections
from ._source import Source

_FAILURES = (pa.ArrowException, flight.FlightError, OSError)


def exchange(connections: Connections, command: Mapping[str, Any], rows: Source) -> pa.RecordBatchReader:
    """Sends rows to a join, and returns the reader of its result.

    A thread sends, so that neither side waits for the other. It ends when the rows end, when the result is closed, or
    when the call fails.
    """
    call = _Call(connections, command, rows)
    return pa.RecordBatchReader.from_batches(call.schema, call.batches())


class _Call:
    def __init__(self, connections: Connections, command: Mapping[str, Any], rows: Source) -> None:
        self._connections = connections
        self._rows = rows
        self._failure: BaseException | None = None
        self._has_ended = False
        with ExitStack() as stack, connections.calling("stream_join"):
            client = stack.enter_context(connections.stream())
            descriptor = flight.FlightDescriptor.for_command(encode(command))
            self._writer, self._reader = client.do_exchange(descriptor, connections.options())
            try:
                self._writer.begin(rows.schema)
                self.schema: pa.Schema = self._reader.schema
            except BaseException:
                # The status of the call says why, and closing the writer tells it.
                self._end()
                raise
            self._stack = stack.pop_all()

    def batches(self) -> Iterator[pa.RecordBatch]:
        sender = threading.Thread(target=self._send, name="dovetail-stream", daemon=True)
        sender.start()
        with self._stack:
            try:
                with self._connections.calling("stream_join"):
                    while True:
                        try:
                            chunk = self._reader.read_chunk()
                        except StopIteration:
                            break
                        # The server sends batches without rows while there is no result.
                        if chunk.data is not None and chunk.data.num_rows:
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

    def _send(self) -> None:
        try:
            for batch in self._rows.batches:
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
