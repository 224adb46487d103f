"""Joins with rows that are sent while their results arrive."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pyarrow as pa
import pyarrow.flight as flight

from ._command import encode
from ._connection import Connections
from ._result import Job
from ._source import Source, arriving
from .errors import Cancelled, DeadlineExceeded, InternalError, Unavailable, translated

if TYPE_CHECKING:
    import pandas

_QUESTION_BYTES = 8 << 20
"""Rows of a question. More are asked in several, so that an answer does not grow without bound before the next."""

_FAILURES = (pa.ArrowException, flight.FlightError, OSError)

_SIGNAL_SECONDS = 0.25
"""Maximum time after which the main thread sees Ctrl-C."""

_JOB_HEADER = "dovetail-job"
"""Header of the answer with the number of the job."""

_Value = TypeVar("_Value")


class JoinReader:
    """Reader of the joined rows of :meth:`Client.stream_join`.

    It is used as a ``pyarrow.RecordBatchReader``: it is an iterator of record batches, and has the Arrow stream
    interface, so that ``pl.DataFrame(reader)``, ``pa.table(reader)`` and DuckDB read it directly.

    Closing it, leaving its ``with`` block or dropping it ends the join: no further rows are taken from their source,
    and a later read raises :class:`Cancelled`.
    """

    def __init__(self, call: _Call, rows: Source) -> None:
        self._call = call
        self._rows: Source | None = rows
        self.schema: pa.Schema = call.schema
        """Columns of the joined rows."""

    @property
    def job(self) -> Job:
        """Job that joins the rows."""
        return self._call.job

    def read_next_batch(self) -> pa.RecordBatch:
        """Returns the next batch. Waits until there are joined rows.

        Raises:
            StopIteration: After the last batch.
            Cancelled: If the reader was closed.
        """
        batch = self._call.next_batch(self._take_rows)
        if batch is None:
            raise StopIteration
        return batch

    def read_all(self) -> pa.Table:
        """Reads all remaining batches into a table."""
        return self._as_arrow().read_all()

    def read_pandas(self, **options: Any) -> pandas.DataFrame:
        """Reads all remaining batches into a data frame. Options are those of ``pyarrow.Table.to_pandas``."""
        return self._as_arrow().read_pandas(**options)

    def cast(self, target_schema: pa.Schema) -> pa.RecordBatchReader:
        """Returns a reader of the same rows in other types."""
        return self._as_arrow().cast(target_schema)

    def close(self) -> None:
        """Ends the join. Does nothing the second time, or after the last batch. Any thread may call it."""
        self._call.cancel()

    def _take_rows(self) -> Source | None:
        rows, self._rows = self._rows, None
        return rows

    def _as_arrow(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self.schema, self)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return self

    def __next__(self) -> pa.RecordBatch:
        return self.read_next_batch()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._as_arrow().__arrow_c_stream__(requested_schema)

    def __enter__(self) -> JoinReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()


class JoinStream:
    """Join of a table with rows that are sent one question at a time (:meth:`Client.open_stream`).

    Closing it, leaving its ``with`` block or dropping it ends the join. Several threads may use it. Their questions are
    asked one after the other. Threads that shall not wait for one another open a stream each: the streams share the
    table on its device.
    """

    def __init__(self, connections: Connections, command: Mapping[str, Any], schema: pa.Schema) -> None:
        self._call: _Call | None = None
        self._call = call = _Call(connections, command, schema)
        self._job = call.job_or_none
        self._message_limit = connections.message_limit
        self._questions = 0
        self._asking = threading.Lock()
        self.sent_schema = schema
        """Columns of the rows to send."""
        self.schema: pa.Schema = call.schema
        """Columns of the joined rows."""

    @property
    def job(self) -> Job:
        """Job that joins the rows."""
        return _known(self._job)

    def ask(self, rows: Any) -> pa.Table:
        """Sends rows, and returns the rows that they join with.

        Args:
            rows: Rows in the forms of :meth:`Client.stream_join`. They have the columns of :attr:`sent_schema`, in any
                order, and are converted to their types.

        Raises:
            InvalidRequest: For rows with other columns, and for values that do not fit the types.
            Cancelled: If the stream is closed.
            DeadlineExceeded: If the answer takes longer than the `call_timeout` of :func:`connect`. The stream is then
                closed.
        """
        self._open_call()
        found = arriving(rows, self._message_limit, self.sent_schema)
        answer: list[pa.RecordBatch] = []
        with self._asking:
            for batches in _questions(found.batches):
                call = self._open_call()
                self._questions += 1
                try:
                    answer += call.answer(batches, str(self._questions).encode())
                except BaseException:
                    # The rest of this answer would be read as the next.
                    self._call = None
                    call.cancel()
                    raise
        return pa.Table.from_batches(answer, self.schema)

    def close(self) -> None:
        """Ends the join. Does nothing the second time. The question of another thread fails with :class:`Cancelled`."""
        if not self._asking.acquire(blocking=False):
            if (asked := self._call) is not None:
                asked.cancel()
            return
        try:
            call, self._call = self._call, None
            if call is not None:
                call.finish()
        finally:
            self._asking.release()

    def _open_call(self) -> _Call:
        call = self._call
        if call is None or call.is_over:
            raise _closed()
        return call

    def __enter__(self) -> JoinStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):
            if self._call is not None:
                self._call.cancel()


def exchange(connections: Connections, command: Mapping[str, Any], rows: Source) -> JoinReader:
    """Sends rows to a join, and returns the reader of its result.

    A thread sends, so that neither side waits for the other. It ends when the rows end, when the result is closed, or
    when the call fails.
    """
    return JoinReader(_Call(connections, command, rows.schema), rows)


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


def _closed() -> Cancelled:
    return Cancelled("the stream is closed; open another")


def _known(job: Job | None) -> Job:
    if job is None:
        raise InternalError("the server answered a stream without naming its job")
    return job


class _Call:
    """Call of DoExchange. One thread at a time reads and one writes, and any thread may end it."""

    def __init__(self, connections: Connections, command: Mapping[str, Any], schema: pa.Schema) -> None:
        self._connections = connections
        self._failure: BaseException | None = None
        self._outcome: BaseException | None = None
        self.is_over = False
        # gRPC aborts the process if two threads read, or write, or if one closes a call that another uses. The garbage
        # collector may end a call from within the thread that holds its lock.
        self._reading, self._writing, self._ending = threading.RLock(), threading.RLock(), threading.RLock()
        self._helper = _Helper()
        with ExitStack() as stack:
            client = stack.enter_context(connections.stream())
            stack.callback(self._helper.stop)
            descriptor = flight.FlightDescriptor.for_command(encode(command))
            with translated("opening the stream"):
                self._writer, self._reader = client.do_exchange(descriptor, connections.stream_options())
            headers = connections.headers_of_exchange()
            with self._limited("opening the stream"), translated("opening the stream"):
                self._open(schema)
            number = headers.get(_JOB_HEADER)
            self.job_or_none = None if number is None else Job(connections, int(number))
            arrays = [pa.nulls(0, field.type) for field in schema]
            self._rowless = pa.RecordBatch.from_arrays(arrays, schema=schema)
            self._stack = stack.pop_all()
        connections.opened(self)

    def _open(self, schema: pa.Schema) -> None:
        try:
            self._writer.begin(schema)
            self.schema: pa.Schema = self._waiting(self._schema_of_result)
        except Exception:
            # The status of the call says why, and closing the writer tells it.
            with suppress(StopIteration):
                self._writer.close()
            raise
        except BaseException:
            with suppress(*_FAILURES):
                self._writer.close()
            raise

    @property
    def job(self) -> Job:
        return _known(self.job_or_none)

    def answer(self, batches: Sequence[pa.RecordBatch], note: bytes) -> list[pa.RecordBatch]:
        """Sends batches and a note, and returns their joined rows. The note comes back after them."""
        with self._reading, self._writing, self._limited("the answer to a question"), self._translated():
            if len(batches) <= 1:
                self._write_question(batches, note)
                return self._read_answer(note)
            # The server may take no further message before its joined rows are read.
            with self._meanwhile(lambda: self._write_question(batches, note)):
                return self._read_answer(note)

    def _write_question(self, batches: Sequence[pa.RecordBatch], note: bytes) -> None:
        for batch in batches:
            self._writer.write_batch(batch)
        self._writer.write_with_metadata(self._rowless, pa.py_buffer(note))

    def _read_answer(self, note: bytes) -> list[pa.RecordBatch]:
        rows: list[pa.RecordBatch] = []
        while True:
            try:
                chunk = self._waiting(self._reader.read_chunk)
            except StopIteration:
                raise Unavailable("the server has ended the stream; open another") from None
            if chunk.app_metadata is not None and chunk.app_metadata.to_pybytes() == note:
                return rows
            if _has_rows(chunk):
                rows.append(chunk.data)

    @contextmanager
    def _meanwhile(self, write: Callable[[], None]) -> Iterator[None]:
        """Writes in another thread. Cancels the call if that fails."""
        failures: list[BaseException] = []

        def run() -> None:
            try:
                write()
            except BaseException as error:
                failures.append(error)
                self._reader.cancel()

        thread = threading.Thread(target=run, name="dovetail-question", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            self._reader.cancel()
            thread.join()
            # Reading tells why the call failed, unless the rows could not be written.
            if failures and not isinstance(failures[0], flight.FlightError):
                raise failures[0] from None
            raise
        thread.join()

    def next_batch(self, rows: Callable[[], Source | None]) -> pa.RecordBatch | None:
        """Returns the next joined rows; ``None`` after the last. The first call begins to send `rows`."""
        with self._reading:
            if self._outcome is not None:
                raise self._outcome
            if self.is_over:
                return None
            if (source := rows()) is not None:
                threading.Thread(target=self._send, args=[source], name="dovetail-stream", daemon=True).start()
                # Else it would hold the rows for as long as the caller has no next batch.
                del source
            try:
                with self._translated():
                    while True:
                        chunk = self._waiting(self._reader.read_chunk)
                        if _has_rows(chunk):
                            return chunk.data
            except StopIteration:
                self._outcome = self._failure
            except Exception as error:
                self._outcome = self._failure or error
            except BaseException:
                self.cancel()
                raise
            self._end()
            if self._outcome is not None:
                raise self._outcome from None
            return None

    def finish(self) -> None:
        """Ends the rows, and waits for the end of the join."""
        with self._reading, self._writing, suppress(*_FAILURES, DeadlineExceeded):
            if self.is_over:
                return
            try:
                with self._limited("the end of the stream"):
                    self._writer.done_writing()
                    with suppress(StopIteration):
                        while True:
                            self._waiting(self._reader.read_chunk)
            finally:
                self._end()

    def cancel(self) -> None:
        """Cancels the join, also while other threads read and write."""
        with self._ending:
            if self.is_over:
                return
            self.is_over = True
            self._outcome = _closed()
        self._reader.cancel()
        with self._reading, self._writing:
            self._close()

    def _end(self) -> None:
        """Ends the call after its last row, or its failure."""
        with self._ending:
            if self.is_over:
                return
            self.is_over = True
        self._reader.cancel()
        with self._writing:
            self._close()

    def _close(self) -> None:
        with self._stack, suppress(*_FAILURES):
            self._writer.close()

    def _send(self, rows: Source) -> None:
        try:
            for batch in rows.batches:
                with self._writing:
                    if self.is_over:
                        return
                    self._writer.write_batch(batch)
            with self._writing:
                if not self.is_over:
                    self._writer.done_writing()
        except _FAILURES as error:
            # Reading tells why the call failed. The rows themselves may fail like this, too.
            self._failure = self._failure or (None if isinstance(error, flight.FlightError) else error)
            self._reader.cancel()
        except BaseException as error:
            self._failure = error
            self._reader.cancel()

    def _schema_of_result(self) -> pa.Schema:
        return self._reader.schema

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Converts exceptions of the call to those of the client."""
        try:
            with translated("the stream"):
                yield
        except Exception:
            if self._outcome is not None:
                # Another thread has closed it.
                raise self._outcome from None
            raise

    @contextmanager
    def _limited(self, what: str) -> Iterator[None]:
        """Cancels the call if the work takes longer than a call of this client may.

        A time limit of the call itself would be one of the whole stream.
        """
        limit = self._connections.call_timeout
        if limit is None:
            yield
            return
        lock = threading.Lock()
        state = {"done": False, "late": False}

        def expire() -> None:
            with lock:
                if not state["done"]:
                    state["late"] = True
                    self._reader.cancel()

        timer = threading.Timer(limit, expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        except Exception:
            if not state["late"]:
                raise
        finally:
            with lock:
                state["done"] = True
            timer.cancel()
        if state["late"]:
            raise DeadlineExceeded(
                f"{what} took longer than {limit:g} s, the limit of each call of this client; set a longer limit "
                "with dovetail.connect(call_timeout=...), or None for no limit"
            )

    def _waiting(self, work: Callable[[], _Value]) -> _Value:
        """Calls pyarrow, and lets Ctrl-C through."""
        if threading.current_thread() is not threading.main_thread():
            return work()
        return self._helper.run(work, self._reader.cancel)


class _Helper:
    """Thread that waits in pyarrow for the main thread. Ctrl-C reaches only the main thread, and not within pyarrow."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._is_started = False

    def run(self, work: Callable[[], _Value], cancel: Callable[[], None]) -> _Value:
        """Returns the outcome of `work`. After Ctrl-C, calls `cancel`, which must end `work`."""
        if not self._is_started:
            self._is_started = True
            # It has no reference to the stream, which may be dropped.
            queues = [self._work, self._done]
            threading.Thread(target=_help, args=queues, name="dovetail-wait", daemon=True).start()
        self._work.put(work)
        try:
            value, error = self._outcome()
        except BaseException:
            cancel()
            self._done.get()
            raise
        if error is not None:
            raise error
        return cast("_Value", value)

    def _outcome(self) -> tuple[Any, BaseException | None]:
        # A signal that arrives right before the wait, or in another thread, does not end it.
        while True:
            with suppress(queue.Empty):
                return self._done.get(timeout=_SIGNAL_SECONDS)

    def stop(self) -> None:
        """Ends the thread."""
        if self._is_started:
            self._work.put(None)


def _help(
    work: queue.SimpleQueue[Callable[[], Any] | None], done: queue.SimpleQueue[tuple[Any, BaseException | None]]
) -> None:
    outcome: tuple[Any, BaseException | None]
    while (call := work.get()) is not None:
        try:
            outcome = (call(), None)
        except BaseException as error:
            outcome = (None, error)
        del call
        done.put(outcome)
        del outcome
