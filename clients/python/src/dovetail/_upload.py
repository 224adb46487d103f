"""Uploads: one stream, or several into one table that appears when all of them are complete."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from ._connection import Connections
from ._progress import Transfer
from ._source import Source
from .errors import Error

OPTIONS_HEADER = b"dovetail-upload-options"
"""Header of the options. pyarrow cannot add metadata to the first message of an upload."""

_ARROW_FAILURES = (pa.ArrowException, flight.FlightError, KeyError, OSError)


class UploadProgress(Transfer):
    """Progress of an upload that the server has acknowledged.

    Attributes:
        rows: Rows that the server has received.
        bytes: Bytes of the buffers of these rows.
        rows_total: Total rows to upload, if known.
        seconds: Seconds since the start of the upload.
        done: True if the table exists.
    """


def upload(
    connections: Connections,
    name: str,
    data: Source,
    options: dict[str, Any],
    streams: int,
    report: Callable[[UploadProgress], None],
) -> UploadProgress:
    """Uploads `data` over `streams` connections and returns the rows and bytes that the server received.

    A stream that pyarrow aborts looks to the server like a complete one. So even a single stream has an upload ID, and
    the table appears when the client commits it.
    """
    identity = uuid.uuid4().hex
    options = {**options, "upload": identity}
    tally = _Tally(data.rows, report)
    batches = _Shared(data.batches)
    failures: list[Exception] = []

    def work() -> None:
        try:
            _send(connections, name, data.schema, batches, options, tally)
        except Exception as error:
            batches.stop()
            failures.append(error)

    threads = [threading.Thread(target=work, name=f"dovetail-put-{index}") for index in range(1, streams)]
    try:
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()
        if failures:
            raise _cause(failures)
        connections.action("commit_upload", {"upload": identity})
    except BaseException:
        # An interrupted or failed upload leaves nothing behind; the server forgets it by itself when we cannot say so.
        batches.stop()
        for thread in threads:
            if thread.is_alive():
                thread.join()
        with suppress(Error):
            connections.action("abort_upload", {"upload": identity})
        raise
    return tally.finish()


def _cause(failures: Sequence[Exception]) -> Exception:
    """Returns the failure with a reason from the server or the data, rather than its consequences."""
    return next((failure for failure in failures if isinstance(failure, Error)), failures[0])


def _send(
    connections: Connections,
    name: str,
    schema: pa.Schema,
    batches: Iterator[pa.RecordBatch],
    options: dict[str, Any],
    tally: _Tally,
) -> None:
    header = [(OPTIONS_HEADER, json.dumps(options).encode())]
    with connections.stream() as client, connections.calling(f"uploading table {name!r}"):
        descriptor = flight.FlightDescriptor.for_path(name)
        writer, acks = client.do_put(descriptor, schema, connections.options(headers=header))
        # Acknowledgements are read beside the writing, so that neither side waits for the other.
        listener = threading.Thread(target=_listen, args=(acks, tally.stream()), name="dovetail-acks")
        listener.start()
        try:
            for batch in batches:
                writer.write_batch(batch)
            writer.done_writing()
        except BaseException:
            with suppress(*_ARROW_FAILURES):
                writer.done_writing()
            listener.join()
            # The status of the call says why writing failed, where writing itself only says that it did.
            writer.close()
            raise
        listener.join()
        writer.close()


def _listen(acks: flight.FlightMetadataReader, stream: _Stream) -> None:
    # A failure here is the failure of the call, which closing the writer reports.
    with suppress(*_ARROW_FAILURES):
        while (ack := acks.read()) is not None:
            taken = json.loads(ack.to_pybytes() or b"{}")
            stream.taken(int(taken.get("rows", 0)), int(taken.get("bytes", 0)))


class _Tally:
    """Sums the acknowledgements of all streams of an upload."""

    def __init__(self, rows_total: int | None, report: Callable[[UploadProgress], None]) -> None:
        self._rows_total = rows_total
        self._report = report
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._streams: list[_Stream] = []

    def stream(self) -> _Stream:
        stream = _Stream(self)
        with self._lock:
            self._streams.append(stream)
        return stream

    def changed(self) -> None:
        with self._lock:
            self._report(self._now(done=False))

    def finish(self) -> UploadProgress:
        with self._lock:
            state = self._now(done=True)
            self._report(state)
            return state

    def _now(self, done: bool) -> UploadProgress:
        return UploadProgress(
            rows=sum(stream.rows for stream in self._streams),
            bytes=sum(stream.bytes for stream in self._streams),
            rows_total=self._rows_total,
            seconds=time.monotonic() - self._start,
            done=done,
        )


class _Stream:
    def __init__(self, tally: _Tally) -> None:
        self._tally = tally
        self.rows = 0
        self.bytes = 0

    def taken(self, rows: int, size_bytes: int) -> None:
        """Records the total rows and bytes of this stream that the server has received."""
        self.rows, self.bytes = max(self.rows, rows), max(self.bytes, size_bytes)
        self._tally.changed()


class _Shared(Iterator[pa.RecordBatch]):
    """Iterator that several threads share."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._lock = threading.Lock()
        self._stopped = False

    def __next__(self) -> pa.RecordBatch:
        with self._lock:
            if self._stopped:
                raise StopIteration
            return next(self._batches)

    def stop(self) -> None:
        """Ends the iteration."""
        self._stopped = True
