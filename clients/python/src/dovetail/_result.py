"""Jobs and their results."""

from __future__ import annotations

import html
import itertools
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.flight as flight

from . import _arguments
from ._command import length_delimited
from ._connection import Connections
from ._display import Described, columns, counted, html_schema
from ._jobs import JobStatus
from ._progress import ProgressArgument, Transfer, reporter
from .errors import (
    Cancelled,
    DeadlineExceeded,
    Error,
    FailedPrecondition,
    InternalError,
    InvalidRequest,
    NotFound,
)

if TYPE_CHECKING:
    import pandas
    import polars

_ARROW_FAILURES = (pa.ArrowException, flight.FlightError, KeyError, OSError)

_WAIT_SECONDS = 0.25
"""Seconds that a call waits for the end of a job. The server answers earlier if the job ends.

Ctrl-C is seen between two calls, and progress is reported after each."""


class Explanation(Described):
    """Explanation of a join: the plan, its predicted and measured times, and the rejected alternatives with reasons.

    Prints as the text of the server. It is also a mapping of the details.
    """


class Job:
    """Join that the server runs or has run.

    :meth:`dovetail.Client.submit` returns a job, and :meth:`dovetail.Client.jobs` lists all jobs.
    """

    def __init__(
        self,
        connections: Connections,
        identity: int,
        info: flight.FlightInfo | None = None,
        *,
        is_read_once: bool = False,
    ) -> None:
        self._connections = connections
        self._info = info
        self._is_read_once = is_read_once
        self.id = identity

    def status(self) -> JobStatus:
        """Returns the current status."""
        return JobStatus.from_json(_one(self._connections.action("job", {"job": self.id}), "job"))

    def _status_within(self, seconds: float) -> JobStatus:
        """Returns the status at the end of the job, or the current one after `seconds`."""
        limit = self._connections.call_timeout
        # The answer has to arrive within the time limit of a call.
        seconds = seconds if limit is None else min(seconds, limit / 2)
        body = {"job": self.id, "wait_seconds": seconds}
        return JobStatus.from_json(_one(self._connections.action("job", body), "job"))

    def progress(self) -> float:
        """Returns the share of the work that is done, 0 to 1."""
        return self.status().fraction

    def wait(self, timeout: float | None = None, progress: ProgressArgument = None) -> JobStatus:
        """Waits until the job has ended.

        Args:
            timeout: Maximum seconds to wait. Default: no limit.
            progress: ``True`` for a bar on standard error, or a function that is called with each :class:`JobStatus`.

        Raises:
            Error: The error of a failed job.
            Cancelled: If the job was cancelled.
            DeadlineExceeded: If the job does not end in time. This is also a ``TimeoutError``. The job continues.
            KeyboardInterrupt: If Ctrl-C ends the wait. The join continues, except with ``retain_seconds=0``: its result
                would have no reader, so the join is cancelled.
        """
        timeout = _arguments.seconds("timeout", timeout, zero=True)
        report = reporter(progress, f"job {self.id}")
        with self._of_use_while_read():
            return self._wait(timeout, report)

    @contextmanager
    def _of_use_while_read(self) -> Iterator[None]:
        """Cancels the job if Ctrl-C ends the work here and its result can no longer be read."""
        try:
            yield
        except KeyboardInterrupt:
            if self._is_read_once:
                with suppress(Error, *_ARROW_FAILURES):
                    self.cancel()
            raise

    def _wait(self, timeout: float | None, report: Callable[[JobStatus], None]) -> JobStatus:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            status = self._status_within(_WAIT_SECONDS if left is None else min(left, _WAIT_SECONDS))
            report(status)
            if status.done:
                break
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"job {self.id} is {status.summary} after {timeout:g} s, the limit of wait(timeout=...); the job "
                    "continues"
                )
        if status.state == "failed":
            raise _failure(status)
        if status.state == "cancelled":
            raise Cancelled(status.error or f"job {self.id} was cancelled")
        return status

    def explain(self) -> Explanation:
        """Returns the plan and the reasons for it, with predicted and measured times."""
        return Explanation(_one(self._connections.action("explain", {"job": self.id}), "explain"))

    def cancel(self) -> None:
        """Stops the job and releases its result. For a job that has ended, it only releases the result."""
        self._connections.action("cancel_job", {"job": self.id})

    def result(self) -> Result:
        """Returns the result of the job.

        Raises:
            NotFound: If the server has released the result.
        """
        return Result(self._connections, self._info or self._find_info(), self)

    def _find_info(self) -> flight.FlightInfo:
        """Finds the endpoints in the list of flights, for a job that this object did not submit."""
        with self._connections.calling(f"looking for the result of job {self.id} in the list of flights"):
            for info in self._connections.main.list_flights(options=self._connections.options()):
                if metadata(info).get("job") == self.id:
                    self._info = info
                    return info
        raise NotFound(f"job {self.id} has no result; it failed, was cancelled, or its result was released")

    def __repr__(self) -> str:
        return f"<Job {self.id}: {self._standing()}>"

    def _standing(self) -> str:
        """Returns the status, or the reason why it is unknown: showing a job must not fail."""
        try:
            status = self.status()
        except (Error, *_ARROW_FAILURES) as error:
            return str(error)
        return status.summary if status.done else f"{status.summary}, {status.fraction:.0%}"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def _failure(status: JobStatus) -> Error:
    error = status.raw.get("error")
    code = error.get("code") if isinstance(error, Mapping) else status.raw.get("code")
    kind = next((kind for kind in Error.__subclasses__() if kind.code == code), Error)
    return kind(status.error or f"job {status.id} failed")


class Result:
    """Result of a join, to fetch as a table or read batch by batch.

    The server keeps the result for its lease, so that it can be fetched several times. The lease is the
    ``--retain-seconds`` of the server or the ``retain_seconds`` of the join, and restarts with every read. Closing the
    result, or leaving its ``with`` block, releases it at once and stops a join that still runs. A join that makes a
    table (``into``) continues unless it is cancelled.

    It has the Arrow stream interface, so that ``pl.DataFrame(result)``, ``pa.table(result)`` and DuckDB read it
    directly.
    """

    def __init__(self, connections: Connections, info: flight.FlightInfo, job: Job | None) -> None:
        self._connections = connections
        self._info = info
        self._job = job
        self._readers: list[_ParallelReader] = []
        self._released = False
        self._transfer: FetchProgress | None = None

    @property
    def transfer(self) -> FetchProgress | None:
        """Rows, bytes, seconds and streams of the last :meth:`table`. ``None`` before it.

        :meth:`explain` says what bounded the transfer: the join, the server or the client.
        """
        return self._transfer

    @property
    def schema(self) -> pa.Schema:
        """Columns and their types."""
        return self._info.schema

    @property
    def job(self) -> Job:
        """Job that makes the result."""
        if self._job is None:
            raise InternalError("this result is the contents of a table, and has no job")
        return self._job

    @property
    def job_id(self) -> int:
        """Number of the job that makes the result."""
        return self.job.id

    @property
    def expiration_time(self) -> Any:
        """Time when the endpoints of the result expire, if the server has set it. Reading may extend it."""
        times = [endpoint.expiration_time for endpoint in self._info.endpoints if endpoint.expiration_time is not None]
        return min(times) if times else None

    def status(self) -> JobStatus:
        """Returns the current status of the job."""
        return self.job.status()

    def progress(self) -> float:
        """Returns the share of the work that is done, 0 to 1."""
        return self.job.progress()

    def wait(self, timeout: float | None = None, progress: ProgressArgument = None) -> Result:
        """Waits until the result is complete, like :meth:`Job.wait`, and returns the result itself."""
        self.job.wait(timeout, progress)
        return self

    @property
    def num_rows(self) -> int:
        """Number of rows. Waits until the join is done.

        With ``retain_seconds=0``, and a result that does not fit into the memory of the server, the number is known
        only after the read: count the rows of :meth:`reader`.
        """
        return self.job.wait().rows

    def explain(self) -> Explanation:
        """Explains how the join ran, and why."""
        return self.job.explain()

    def table(self, progress: ProgressArgument = None) -> pa.Table:
        """Fetches the whole result as a pyarrow Table, over one connection per endpoint.

        The order of the rows is undefined. :meth:`to_pandas` and :meth:`to_polars` return data frames.

        Args:
            progress: ``True`` for a bar on standard error, or a function that is called with each
                :class:`FetchProgress`. The total is known once the result is complete.
                ``result.wait(progress=True).table(progress=True)`` shows the progress of the join, then of the rows.

        Raises:
            KeyboardInterrupt: If Ctrl-C ends the fetch. With ``retain_seconds=0``, the join is also cancelled.
        """
        is_reported = bool(_arguments.progress(progress))
        report = reporter(progress, "fetch" if self._job is None else f"fetch job {self._job.id}")

        def tell(state: FetchProgress) -> None:
            if state.done:
                self._transfer = state
            report(state)

        if self._job is None:
            return fetch(self._connections, self._info, tell)
        with self._job._of_use_while_read():
            status = self._job.status() if is_reported else None
            total = status.rows if status is not None and status.state == "complete" else None
            return fetch(self._connections, self._info, tell, total)

    def reader(self) -> pa.RecordBatchReader:
        """Reads the result while it is made, batch by batch, over one connection per endpoint.

        The server keeps unread rows, so a reader may pause. With ``retain_seconds=0`` and full server memory, the join
        waits for its reader. It fails if nothing is read for 30 seconds, if it has waited five minutes in total, or
        sooner if other joins wait for its device. The order of the rows is undefined.
        """
        if self._job is not None:
            # A job that somebody asks about is not taken to be abandoned when a reader stops before the end.
            self._job.status()
        parallel = _ParallelReader(self._connections, self._info)
        self._readers.append(parallel)
        return pa.RecordBatchReader.from_batches(self.schema, parallel.batches())

    def to_pandas(self, **options: Any) -> pandas.DataFrame:
        """Fetches the whole result as a pandas DataFrame. Options are those of ``pyarrow.Table.to_pandas``."""
        return self.table().to_pandas(**options)

    def to_polars(self) -> polars.DataFrame:
        """Fetches the whole result as a Polars DataFrame."""
        import polars

        frame = polars.from_arrow(self.table())
        assert isinstance(frame, polars.DataFrame)
        return frame

    def cancel(self) -> None:
        """Stops the job and releases the result. Its readers get :class:`Cancelled`."""
        self._released = True
        self._stop_readers("was cancelled")
        body = length_delimited(1, self._info.serialize())
        self._connections.action("CancelFlightInfo", body)

    def close(self) -> None:
        """Releases the result. Does nothing if it is already closed or released."""
        if self._released:
            return
        if metadata(self._info).get("into"):
            # Its table is what was asked for, and what the join keeps for it is the table's own memory.
            self._released = True
            self._stop_readers("continues, and its result was closed")
            return
        with suppress(Error):
            self.cancel()

    def _stop_readers(self, why: str) -> None:
        whose = "the read" if self._job is None else f"job {self._job.id}"
        for reader in self._readers:
            reader.stop(Cancelled(f"{whose} {why}"))

    def __enter__(self) -> Result:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.reader().__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        return f"<{self._title()}; {columns(self.schema)}>"

    def _repr_html_(self) -> str:
        return html_schema(self._title(), self.schema)

    def _title(self) -> str:
        return "Result of a table" if self._job is None else f"Result of job {self._job.id}: {self._job._standing()}"


@dataclass(frozen=True)
class FetchProgress(Transfer):
    """Progress of fetching a table or a result.

    Attributes:
        rows: Rows received.
        bytes: Bytes of the buffers of these rows.
        rows_total: Total rows to fetch, if known. For a result, it is known once the join is complete.
        seconds: Seconds since the start of the fetch.
        done: True if all rows are received.
        streams: Streams that fetch the rows in parallel, each over its own connection.
    """

    streams: int = 1

    @property
    def summary(self) -> str:
        """Rows, bytes and rate in words, and the number of streams once all rows are received."""
        return super().summary + (f", {counted(self.streams, 'stream')}" if self.done else "")


def fetch(
    connections: Connections,
    info: flight.FlightInfo,
    report: Callable[[FetchProgress], None] | None = None,
    rows_total: int | None = None,
    columns: Sequence[str] | None = None,
    limit: int | None = None,
) -> pa.Table:
    """Fetches all endpoints in parallel, each over its own connection. Batches are in the order of the endpoints.

    With `columns`, only these are kept. With `limit`, the endpoints are read one after the other, up to this number of
    rows. The thread of the caller only waits, so that Ctrl-C or a failed endpoint ends the whole fetch.
    """
    start, lock, rows, size = time.monotonic(), threading.Lock(), 0, 0
    total = rows_total if info.total_records < 0 else info.total_records
    if limit is not None:
        total = limit if total is None else min(limit, total)
    schema = info.schema if columns is None else _chosen(info, columns)

    def tell(done: bool) -> None:
        if report is not None:
            report(FetchProgress(rows, size, total, time.monotonic() - start, done, len(info.endpoints)))

    readers: list[flight.FlightStreamReader] = []
    stopped = threading.Event()

    def one(endpoint: flight.FlightEndpoint) -> list[pa.RecordBatch]:
        nonlocal rows, size
        if rows == limit:
            return []
        with connections.stream(endpoint.locations) as client, connections.calling(_fetching(info)):
            reader = client.do_get(endpoint.ticket, connections.options())
            with lock:
                readers.append(reader)
            batches = []
            while (chunk := _next(reader)) is not None:
                if stopped.is_set():
                    reader.cancel()
                elif rows == limit:
                    _leave(reader)
                    break
                elif chunk.num_rows:
                    if limit is not None:
                        chunk = chunk.slice(0, limit - rows)
                    if columns is not None:
                        chunk = _alone(chunk.select(columns))
                    batches.append(chunk)
                    # Not `nbytes`: pyarrow 26 crashes on that of lists which hold no values of a dense union.
                    with lock:
                        rows, size = rows + chunk.num_rows, size + chunk.get_total_buffer_size()
                        tell(done=False)
            return batches

    streams = 1 if limit is not None else max(1, len(info.endpoints))
    with ThreadPoolExecutor(streams, thread_name_prefix="dovetail-get") as pool:
        try:
            fetching = [pool.submit(one, endpoint) for endpoint in info.endpoints]
            under_way = set(fetching)
            while under_way:
                done, under_way = wait(under_way, _LOOK_SECONDS, FIRST_EXCEPTION)
                for part in done:
                    part.result()
            parts = [part.result() for part in fetching]
        except BaseException:
            stopped.set()
            with lock:
                for reader in readers:
                    reader.cancel()
            raise
    tell(done=True)
    return pa.Table.from_batches([batch for part in parts for batch in part], schema=schema)


def _chosen(info: flight.FlightInfo, columns: Sequence[str]) -> pa.Schema:
    """Returns the schema with these columns only, in this order."""
    schema = info.schema
    for at, name in enumerate(columns):
        if name in columns[:at]:
            raise ValueError(f"columns names {name!r} twice; name it once")
        if name not in schema.names:
            known = f"it has {_arguments.listed(schema.names)}{_arguments.did_you_mean(name, schema.names)}"
            raise InvalidRequest(f"the table has no column {name!r}, which columns names; {known}")
    return pa.schema([schema.field(name) for name in columns], metadata=schema.metadata)


def _alone(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Copies a batch out of its message, whose one buffer would keep the columns that were left out in memory."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


def _leave(reader: flight.FlightStreamReader) -> None:
    """Ends a stream before its last batch, so that its connection can be used again."""
    reader.cancel()
    with suppress(*_ARROW_FAILURES):
        while _next(reader) is not None:
            pass


_LOOK_SECONDS = 0.1
"""Seconds that the thread of the caller waits at a time. With Polars imported, Ctrl-C is seen only after a wait."""

_TRIES = 5
"""Maximum number of attempts to fetch a table that is replaced during the fetch."""

# The end of the server's sentence on an endpoint of a table that is another one by now.
_CALL_AGAIN = "call GetFlightInfo again"


def fetch_table(
    connections: Connections,
    ask: Callable[[], flight.FlightInfo],
    report: Callable[[FetchProgress], None],
    columns: Sequence[str] | None = None,
    limit: int | None = None,
) -> pa.Table:
    """Fetches a table like :func:`fetch`. `ask` requests its endpoints.

    The endpoints are of one version of the table. If the table is replaced during the fetch, all endpoints are
    requested and fetched again.
    """
    for tries in itertools.count(1):
        try:
            return fetch(connections, ask(), report, columns=columns, limit=limit)
        except FailedPrecondition as error:
            if _CALL_AGAIN not in error.message or tries == _TRIES:
                raise _in_words_of("get", error) from None
    raise AssertionError("it is tried until it returns or raises")


def read_table(connections: Connections, ask: Callable[[], flight.FlightInfo]) -> pa.RecordBatchReader:
    """Reads a table like :meth:`Result.reader`. Starts again like :func:`fetch_table` if no batch was returned yet."""
    first = ask()

    def batches() -> Iterator[pa.RecordBatch]:
        info = first
        for tries in itertools.count(1):
            handed_out = False
            try:
                for batch in _ParallelReader(connections, info).batches():
                    handed_out = True
                    yield batch
                return
            except FailedPrecondition as error:
                if _CALL_AGAIN not in error.message or handed_out or tries == _TRIES:
                    raise _in_words_of("reader", error) from None
                info = ask()
                if info.schema != first.schema:
                    raise _in_words_of("reader", error) from None

    return pa.RecordBatchReader.from_batches(first.schema, batches())


def _in_words_of(call: str, error: FailedPrecondition) -> FailedPrecondition:
    """Returns the error with the name of the call that the caller made."""
    return FailedPrecondition(error.message.replace(_CALL_AGAIN, f"call {call} again"))


def _fetching(info: flight.FlightInfo) -> str:
    """Names the fetched object, for an error."""
    job = metadata(info).get("job")
    if job is not None:
        return f"fetching the result of job {job}"
    path = info.descriptor.path if info.descriptor.descriptor_type == flight.DescriptorType.PATH else None
    return f"fetching table {path[0].decode()!r}" if path else "fetching rows"


def _next(reader: flight.FlightStreamReader) -> pa.RecordBatch | None:
    try:
        return reader.read_chunk().data
    except StopIteration:
        return None


class _ParallelReader:
    """Reads all endpoints in parallel and returns batches as they arrive, a few batches ahead of the consumer.

    All endpoints must be read at the same time: a result that is released during the read continues only if none of its
    streams waits.
    """

    _AHEAD_PER_ENDPOINT = 2

    def __init__(self, connections: Connections, info: flight.FlightInfo) -> None:
        self._connections = connections
        self._endpoints: Sequence[flight.FlightEndpoint] = info.endpoints
        self._call = _fetching(info)
        ahead = max(1, len(self._endpoints)) * self._AHEAD_PER_ENDPOINT
        self._ready: queue.Queue[pa.RecordBatch | Exception | None] = queue.Queue(maxsize=ahead)
        self._stopped = threading.Event()
        self._why: Exception | None = None

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Returns the batches. Raises the error of a failed stream, or the error given to :meth:`stop`."""
        threads = [
            threading.Thread(target=self._read, args=(endpoint,), name="dovetail-read", daemon=True)
            for endpoint in self._endpoints
        ]
        running = len(threads)
        try:
            self._check_stopped()
            for thread in threads:
                thread.start()
            while running:
                self._check_stopped()
                try:
                    item = self._ready.get(timeout=_LOOK_SECONDS)
                except queue.Empty:
                    continue
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            self.stop()

    def stop(self, why: Exception | None = None) -> None:
        """Ends all streams. The consumer gets `why` on its next read.

        After this call, the streams pass on nothing, not even their ends.
        """
        self._why = self._why or why
        self._stopped.set()
        if why is not None:
            # Wakes a consumer who waits; who finds the queue full does not wait, and looks before the next batch.
            with suppress(queue.Full):
                self._ready.put_nowait(why)

    def _check_stopped(self) -> None:
        if self._stopped.is_set() and self._why is not None:
            raise self._why

    def _read(self, endpoint: flight.FlightEndpoint) -> None:
        try:
            calling = self._connections.calling(self._call)
            with self._connections.stream(endpoint.locations) as client, calling:
                reader = client.do_get(endpoint.ticket, self._connections.options())
                while not self._stopped.is_set() and (batch := _next(reader)) is not None:
                    if batch.num_rows:
                        self._hand_on(batch)
                if self._stopped.is_set():
                    _leave(reader)
        except Exception as error:
            self._hand_on(error)
        self._hand_on(None)

    def _hand_on(self, item: pa.RecordBatch | Exception | None) -> None:
        while not self._stopped.is_set():
            try:
                return self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue


def metadata(info: flight.FlightInfo) -> dict[str, Any]:
    """Returns the server's description of a table or job."""
    answer = json.loads(info.app_metadata or b"{}")
    return answer if isinstance(answer, dict) else {}


def _one(answers: Sequence[Any], action: str) -> Mapping[str, Any]:
    if not answers:
        raise InternalError(f"the server gave no answer to the action {action!r}")
    answer: Mapping[str, Any] = answers[0]
    return answer
