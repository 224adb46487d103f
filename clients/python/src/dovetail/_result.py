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
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.flight as flight

from . import _arguments
from ._command import length_delimited
from ._connection import Connections
from ._display import Described, columns, html_schema
from ._jobs import JobStatus
from ._progress import ProgressArgument, Transfer, reporter
from .errors import Cancelled, DeadlineExceeded, Error, FailedPrecondition, InternalError, NotFound

if TYPE_CHECKING:
    import pandas
    import polars

_ARROW_FAILURES = (pa.ArrowException, flight.FlightError, KeyError, OSError)


class Explanation(Described):
    """How a join runs, and why: the plan, its predicted and measured times, the alternatives and why they lost.

    Printing it gives the server's text; it also is a mapping of the details.
    """


class Job:
    """A join that the server runs, or has run.

    :meth:`dovetail.Client.submit` gives one, and :meth:`dovetail.Client.jobs` all of them.
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
        """Where it stands now."""
        return JobStatus.from_json(_one(self._connections.action("job", {"job": self.id}), "job"))

    def progress(self) -> float:
        """The share of its work that is done, 0 to 1."""
        return self.status().fraction

    def wait(self, timeout: float | None = None, progress: ProgressArgument = None) -> JobStatus:
        """Waits until it has ended.

        Args:
            timeout: Seconds to wait at most.
            progress: ``True`` for a bar on standard error, or a function that is called with each :class:`JobStatus`.

        Raises:
            Error: What the job failed with.
            Cancelled: When somebody stopped it.
            DeadlineExceeded: When it is not done in time, which is a ``TimeoutError``. The job goes on.
            KeyboardInterrupt: When Ctrl-C ends the waiting. The join goes on, except with ``retain_seconds=0``: nobody
                would read its result, so it is cancelled.
        """
        timeout = _arguments.seconds("timeout", timeout, zero=True)
        report = reporter(progress, f"job {self.id}")
        with self._of_use_while_read():
            return self._wait(timeout, report)

    @contextmanager
    def _of_use_while_read(self) -> Iterator[None]:
        """Cancels the job when Ctrl-C ends what is done here, and nobody could read its result any more."""
        try:
            yield
        except KeyboardInterrupt:
            if self._is_read_once:
                with suppress(Error, *_ARROW_FAILURES):
                    self.cancel()
            raise

    def _wait(self, timeout: float | None, report: Callable[[JobStatus], None]) -> JobStatus:
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = 0.005
        while True:
            status = self.status()
            report(status)
            if status.done:
                break
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"job {self.id} is {status.summary} after {timeout:g} s, as wait(timeout=...) says; it goes on"
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.25)
        if status.state == "failed":
            raise _failure(status)
        if status.state == "cancelled":
            raise Cancelled(status.error or f"job {self.id} was cancelled")
        return status

    def explain(self) -> Explanation:
        """The plan and why it won, with what was measured so far beside what was predicted."""
        return Explanation(_one(self._connections.action("explain", {"job": self.id}), "explain"))

    def cancel(self) -> None:
        """Stops it and releases its result. Cancelling a job that has ended only releases the result."""
        self._connections.action("cancel_job", {"job": self.id})

    def result(self) -> Result:
        """Its result.

        Raises:
            NotFound: When the server has released it.
        """
        return Result(self._connections, self._info or self._find_info(), self)

    def _find_info(self) -> flight.FlightInfo:
        """A job that somebody else submitted, or this client earlier: the listing has its endpoints."""
        with self._connections.calling(f"looking for the result of job {self.id} in the list of flights"):
            for info in self._connections.main.list_flights(options=self._connections.options()):
                if metadata(info).get("job") == self.id:
                    self._info = info
                    return info
        raise NotFound(f"job {self.id} has no result; it failed, was cancelled, or its result was released")

    def __repr__(self) -> str:
        return f"<Job {self.id}: {self._standing()}>"

    def _standing(self) -> str:
        """Where it stands, or why that is not known: showing a job must not fail."""
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
    """The result of a join: fetched as a table, or read as it comes.

    The server keeps it for its lease, so it can be fetched more than once. The lease is as long as the server's
    ``--retain-seconds`` says, or the join's own ``retain_seconds``, and begins again with every read. Closing it, or
    leaving its ``with`` block, releases it at once, and stops a join that still runs; but not one that makes a table
    (``into``), which goes on unless it is cancelled.

    It speaks the Arrow stream interface, so ``pl.DataFrame(result)``, ``pa.table(result)`` and DuckDB read it directly.
    """

    def __init__(self, connections: Connections, info: flight.FlightInfo, job: Job | None) -> None:
        self._connections = connections
        self._info = info
        self._job = job
        self._readers: list[_ParallelReader] = []
        self._released = False

    @property
    def schema(self) -> pa.Schema:
        """Columns and their types."""
        return self._info.schema

    @property
    def job(self) -> Job:
        """The job that makes it."""
        if self._job is None:
            raise InternalError("this is the contents of a table, which no job makes")
        return self._job

    @property
    def job_id(self) -> int:
        """The number of the job that makes it."""
        return self.job.id

    @property
    def expiration_time(self) -> Any:
        """When the endpoints of the result expire, as far as the server has said; it may be extended by reading."""
        times = [endpoint.expiration_time for endpoint in self._info.endpoints if endpoint.expiration_time is not None]
        return min(times) if times else None

    def status(self) -> JobStatus:
        """Where the job stands now."""
        return self.job.status()

    def progress(self) -> float:
        """The share of the job's work that is done, 0 to 1."""
        return self.job.progress()

    def wait(self, timeout: float | None = None, progress: ProgressArgument = None) -> Result:
        """Waits until the result is complete, as :meth:`Job.wait`, and returns itself."""
        self.job.wait(timeout, progress)
        return self

    @property
    def num_rows(self) -> int:
        """How many rows it has; waits until the join is done.

        Of a result with ``retain_seconds=0`` that does not fit into the server's memory it is known only when it was
        read: count the rows of :meth:`reader`.
        """
        return self.job.wait().rows

    def explain(self) -> Explanation:
        """How the join ran, and why."""
        return self.job.explain()

    def table(self, progress: ProgressArgument = None) -> pa.Table:
        """The whole result as a pyarrow Table, fetched over one connection per endpoint.

        The order of its rows is not defined. :meth:`to_pandas` and :meth:`to_polars` give data frames.

        Args:
            progress: ``True`` for a bar on standard error, or a function that is called with each
                :class:`FetchProgress`. How many rows there will be is known of a result that is complete; so
                ``result.wait(progress=True).table(progress=True)`` shows first how far the join is, then the rows.

        Raises:
            KeyboardInterrupt: When Ctrl-C ends the fetching. With ``retain_seconds=0`` the join is cancelled, too.
        """
        if self._job is None:
            return fetch(self._connections, self._info)
        with self._job._of_use_while_read():
            if not _arguments.progress(progress):
                return fetch(self._connections, self._info)
            status = self._job.status()
            report = reporter(progress, f"fetch job {self._job.id}")
            return fetch(self._connections, self._info, report, status.rows if status.state == "complete" else None)

    def reader(self) -> pa.RecordBatchReader:
        """The result as it is made, batch by batch, over one connection per endpoint.

        The server keeps what was not read yet, so a reader may pause. Only with ``retain_seconds=0`` and a result that
        has filled the server's memory does the join wait for its reader; it fails when nothing is read for half a
        minute, or when it has waited for five minutes in all; sooner when other joins wait for its device. The order of
        the rows is not defined.
        """
        if self._job is not None:
            # A job that somebody asks about is not taken to be abandoned when a reader stops before the end.
            self._job.status()
        parallel = _ParallelReader(self._connections, self._info)
        self._readers.append(parallel)
        return pa.RecordBatchReader.from_batches(self.schema, parallel.batches())

    def to_pandas(self, **options: Any) -> pandas.DataFrame:
        """The whole result as a pandas DataFrame; options are those of ``pyarrow.Table.to_pandas``."""
        return self.table().to_pandas(**options)

    def to_polars(self) -> polars.DataFrame:
        """The whole result as a Polars DataFrame."""
        import polars

        frame = polars.from_arrow(self.table())
        assert isinstance(frame, polars.DataFrame)
        return frame

    def cancel(self) -> None:
        """Stops the job and releases the result; who reads it gets :class:`Cancelled`."""
        self._released = True
        self._stop_readers("was cancelled")
        body = length_delimited(1, self._info.serialize())
        self._connections.action("CancelFlightInfo", body)

    def close(self) -> None:
        """Releases the result. Closing twice does nothing, nor does closing what the server has released already."""
        if self._released:
            return
        if metadata(self._info).get("into"):
            # Its table is what was asked for, and what the join keeps for it is the table's own memory.
            self._released = True
            self._stop_readers("goes on, and its result was closed")
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


class FetchProgress(Transfer):
    """How far the fetching of a table or a result is.

    Attributes:
        rows: Rows that are here.
        bytes: Bytes of their buffers.
        rows_total: Rows to fetch, when that is known: of a result, once its join is complete.
        seconds: Since the fetching began.
        done: Whether these are all.
    """


def fetch(
    connections: Connections,
    info: flight.FlightInfo,
    report: Callable[[FetchProgress], None] | None = None,
    rows_total: int | None = None,
) -> pa.Table:
    """All endpoints at once, each on its own connection; their batches in the order of the endpoints.

    The caller's thread only waits, so that Ctrl-C ends all of it, as a failure of one endpoint does.
    """
    start, lock, rows, size = time.monotonic(), threading.Lock(), 0, 0
    total = rows_total if info.total_records < 0 else info.total_records

    def tell(done: bool) -> None:
        if report is not None:
            report(FetchProgress(rows, size, total, time.monotonic() - start, done))

    readers: list[flight.FlightStreamReader] = []
    stopped = threading.Event()

    def one(endpoint: flight.FlightEndpoint) -> list[pa.RecordBatch]:
        nonlocal rows, size
        with connections.stream(endpoint.locations) as client, connections.calling(_fetching(info)):
            reader = client.do_get(endpoint.ticket, connections.options())
            with lock:
                readers.append(reader)
            batches = []
            while (chunk := _next(reader)) is not None:
                if stopped.is_set():
                    reader.cancel()
                elif chunk.num_rows:
                    batches.append(chunk)
                    # Not `nbytes`: pyarrow 26 crashes on that of lists which hold no values of a dense union.
                    with lock:
                        rows, size = rows + chunk.num_rows, size + chunk.get_total_buffer_size()
                        tell(done=False)
            return batches

    with ThreadPoolExecutor(max(1, len(info.endpoints)), thread_name_prefix="dovetail-get") as pool:
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
    return pa.Table.from_batches([batch for part in parts for batch in part], schema=info.schema)


_LOOK_SECONDS = 0.1
"""How long the caller's thread waits at a time: with Polars imported, Ctrl-C is seen at a wait's end."""

_TRIES = 5
"""How often a table is begun again that somebody else replaces while it is fetched."""

# The end of the server's sentence on an endpoint of a table that is another one by now.
_CALL_AGAIN = "call GetFlightInfo again"


def fetch_table(
    connections: Connections, ask: Callable[[], flight.FlightInfo], report: Callable[[FetchProgress], None]
) -> pa.Table:
    """As :func:`fetch`, of a table, whose endpoints `ask` asks for.

    They are of one version of it, so where somebody replaces it meanwhile, all of them are asked for and fetched again.
    """
    for tries in itertools.count(1):
        try:
            return fetch(connections, ask(), report)
        except FailedPrecondition as error:
            if _CALL_AGAIN not in error.message or tries == _TRIES:
                raise _in_words_of("get", error) from None
    raise AssertionError("it is tried until it returns or raises")


def read_table(connections: Connections, ask: Callable[[], flight.FlightInfo]) -> pa.RecordBatchReader:
    """As :meth:`Result.reader`, of a table; as :func:`fetch_table`, as long as no batch was handed out."""
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
    """The error as the caller of this client's call takes it."""
    return FailedPrecondition(error.message.replace(_CALL_AGAIN, f"call {call} again"))


def _fetching(info: flight.FlightInfo) -> str:
    """What is being fetched, for an error."""
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
    """Reads all endpoints side by side and hands on whatever comes first, a few batches ahead of its consumer.

    All endpoints must be read at the same time: a result that is released while it is read goes on only when none of
    its streams is left waiting.
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
        """The batches; raises what a stream failed with, or what somebody else has stopped it with."""
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
        """Ends the streams, wherever they are; a consumer who wants more gets `why`.

        From here on the streams hand on nothing, not even their ends.
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
                    reader.cancel()
                    with suppress(*_ARROW_FAILURES):
                        while _next(reader) is not None:
                            pass
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
    """What the server says about a table or job beside its endpoints."""
    answer = json.loads(info.app_metadata or b"{}")
    return answer if isinstance(answer, dict) else {}


def _one(answers: Sequence[Any], action: str) -> Mapping[str, Any]:
    if not answers:
        raise InternalError(f"the server gave no answer to the action {action!r}")
    answer: Mapping[str, Any] = answers[0]
    return answer
