"""The client: uploads tables, requests joins and fetches results."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.flight as flight

from . import _arguments
from ._command import OPTIONS, IntoMode, OnArgument, Then, encode, further_joins, join_command
from ._connection import Connections, Pem
from ._csv import CsvOptions
from ._exchange import JoinReader, JoinStream, exchange
from ._jobs import Jobs, JobStatus
from ._progress import ProgressArgument, reporter
from ._result import Explanation, Job, Result, fetch_table, metadata, read_table
from ._source import arriving, columns_of, source
from ._tables import ServerInfo, TableInfo, Tables, Topology
from ._upload import UploadProgress, upload
from .errors import Error, InternalError

How = Literal["inner", "left", "right", "full", "left_semi", "left_anti", "right_semi", "right_anti"]
"""Kind of a join."""

Strategy = Literal["auto", "hash", "radix-hash", "radix-hash-gfur", "sort-merge", "sort-merge-gfur"]
"""Strategy of a join. With ``"auto"``, the planner chooses. The server may know other strategies."""

Distribution = Literal["auto", "broadcast", "hash"]
"""Division of a join among several devices. With ``"auto"``, the planner chooses."""

Mode = Literal["create", "replace", "append", "create_if_missing"]
"""Action of an upload if a table of that name exists."""

DEFAULT_URI = "grpc://127.0.0.1:8815"

STREAMS_MAX = 64
"""Maximum number of connections of an upload, as for ``dovetail put --streams``."""

_BUILD_SECONDS = 60
"""Life of the temporary table of a stream. The client drops it sooner, as soon as the stream is open."""

CONNECT_TIMEOUT = 10.0
"""Default time limit for connecting, in seconds: far longer than a server needs, and no longer than a person waits."""


def connect(
    uri: str | None = None,
    *,
    token: str | None = None,
    tls_root_certs: Pem | None = None,
    cert: Pem | None = None,
    key: Pem | None = None,
    timeout: float | None = CONNECT_TIMEOUT,
    call_timeout: float | None = None,
) -> Client:
    """Connects to a server, and checks that it answers.

    Args:
        uri: Address of the server, such as ``"grpc://127.0.0.1:8815"``, or ``"grpc+tls://host:8815"`` with TLS.
            Default: the environment variable ``DOVETAIL_SERVER``, or else ``"grpc://127.0.0.1:8815"``.
        token: Bearer token, or ``@FILE`` to read it from a file. Default: the environment variable ``DOVETAIL_TOKEN``.
        tls_root_certs: Certificates of the trusted authorities (PEM, or the path of a file). Default: those of the
            system.
        cert: Certificate chain of the client, for mutual TLS (PEM, or the path of a file).
        key: Private key of the client (PEM, or the path of a file).
        timeout: Seconds for the server to accept a connection and answer. ``None``: no limit.
        call_timeout: Maximum seconds of each later call, including transfers. For a stream of rows, it bounds the
            opening and each question, and not the stream. Default: no limit, because a join may take long. The client
            still notices a lost server.

    Raises:
        Unavailable: If no server answers there in time.
        Unauthenticated: If the server needs a token or does not accept this one.

    Example:
        >>> import dovetail
        >>> client = dovetail.connect(server)
        >>> client
        <Client of grpc://...>
    """
    uri = _arguments.optional_text("uri", uri, "the address of a server")
    if uri is None:
        uri = os.environ.get("DOVETAIL_SERVER") or DEFAULT_URI
    token = _arguments.optional_text("token", token, "a bearer token") or os.environ.get("DOVETAIL_TOKEN") or None
    token = _arguments.in_file("token", token)
    timeout = _arguments.seconds("timeout", timeout)
    client = Client(uri, Connections(uri, token, tls_root_certs, cert, key, call_timeout))
    try:
        client._connections.greet(timeout)
    except BaseException:
        client.close()
        raise
    return client


class Client:
    """Connection to a Dovetail server. :func:`connect` creates one.

    Several threads may use it at once. Example:

        >>> import pyarrow as pa
        >>> client.put("orders", pa.table({"id": [1, 2, 3], "customer": ["ann", "bob", "ann"]}))
        3
        >>> client.put("items", pa.table({"order": [1, 1, 3, 4], "price": [5, 7, 9, 11]}))
        4
        >>> result = client.join("orders", "items", on={"id": "order"})
        >>> result.table().sort_by("price").to_pydict()
        {'id': [1, 1, 3], 'customer': ['ann', 'ann', 'ann'], 'price': [5, 7, 9]}
        >>> client.drop("orders"), client.drop("items")
        (3, 4)
    """

    def __init__(self, uri: str, connections: Connections) -> None:
        self.uri = uri
        self._connections = connections

    # Tables

    def put(
        self,
        name: str,
        data: Any,
        mode: Mode = "create",
        *,
        sorted_by: str | Sequence[str] = (),
        unique: str | Sequence[str | Sequence[str]] = (),
        streams: int = 1,
        progress: ProgressArgument = None,
        types: Mapping[str, str | pa.DataType] | None = None,
        delimiter: str | None = None,
        header: bool | None = None,
        infer_rows: int | None = None,
        null_values: str | Sequence[str] | None = None,
    ) -> int:
        """Uploads a table. The table appears when the upload is complete, or not at all.

        Args:
            name: Name of the table.
            data: A pyarrow Table, RecordBatch, RecordBatchReader, Dataset or Scanner; a pandas or Polars DataFrame, or
                another object with the Arrow stream interface; a sequence of record batches, tables or data frames,
                also one that ``pandas.read_csv(..., chunksize=...)`` gives; a dictionary of columns; or a list of
                rows as dictionaries, where a missing value is null. 128-bit integers of Polars become
                ``decimal128(38, 0)``. Or the path of a file (Parquet, Arrow IPC file
                or stream, ORC, CSV, CSV compressed by gzip) or of a folder of such files, in the order of their names;
                a pattern such as ``"parts/*.parquet"``; or a list of paths. Several files must have the same columns,
                and their rows become one table in this order.
            mode: ``"create"`` (the table must not exist), ``"replace"``, ``"append"`` (the table must exist) or
                ``"create_if_missing"`` (append, or create).
            sorted_by: Columns by which the rows are sorted, ascending, nulls first. The server checks the order, and
                joins need not sort.
            unique: Columns (or sets of columns) whose values are distinct. The planner predicts with it. The server
                does not check it, and results are correct even if it is wrong.
            streams: Number of connections to send over in parallel, up to 64. One reaches about 3 GB/s. With more than
                one, the order of the rows is lost.
            progress: ``True`` for a bar on standard error, or a function that is called with each
                :class:`UploadProgress`.
            types: For CSV: types of columns, instead of inferred ones, such as
                ``{"id": "int64", "price": "decimal(9,2)"}``. Names are those of ``dovetail put --types``. ``pyarrow``
                types also work.
            delimiter: For CSV: ASCII character between fields. The default is a comma, and a tab in files named .tsv.
            header: For CSV: true if the first line names the columns, which is the default. Otherwise they are
                column_1, ...
            infer_rows: For CSV: number of rows from which types are inferred, 10,000 by default.
            null_values: For CSV: words that mean null, in addition to the empty field: a sequence such as
                ``["NA", "NULL"]``, or a string with commas, ``"NA,NULL"``, as for ``--null-values``.

        Returns:
            The number of rows that the server accepted.

        Raises:
            AlreadyExists: In mode ``"create"``, if a table of that name exists.
            NotFound: In mode ``"append"``, if no table of that name exists.
            InvalidRequest: For a type or option that the server does not accept.
            Exhausted: If the server has too little memory for the table.
            ValueError: If a file is not valid, with the line number if it is known.

        Example:
            >>> client.put("letters", {"letter": ["a", "b"], "n": [1, 2]}, mode="replace", sorted_by="letter")
            2
            >>> client.put("letters", {"letter": ["c"], "n": [3]}, mode="append")
            1
            >>> client.drop("letters")
            3
        """
        name = _arguments.text("name", name, "the name of a table")
        streams = _arguments.whole("streams", streams, least=1, most=STREAMS_MAX)
        options: dict[str, Any] = {"mode": _arguments.one_of("mode", mode, get_args(Mode))}
        if order := _arguments.name_or_names("sorted_by", sorted_by):
            options["sorted_by"] = order
        if sets := _arguments.sets_of_names("unique", unique):
            options["unique"] = sets
        if order and streams > 1:
            raise ValueError(
                f"sorted_by needs streams=1, not {streams}: several streams do not keep the order of the rows"
            )
        csv = CsvOptions.of_arguments(types, delimiter, header, infer_rows, null_values)
        report = reporter(progress, f"put {name}")
        rows = source(data, csv, self._connections.message_limit)
        return upload(self._connections, name, rows, options, streams, report).rows

    def get(
        self,
        name: str,
        progress: ProgressArgument = None,
        *,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
    ) -> pa.Table:
        """Fetches a table over several connections. The rows are in the order of the upload.

        Args:
            name: Name of the table.
            columns: Columns to keep, in this order. Default: all. The server sends all columns.
            limit: Maximum number of rows. The fetch ends after the first ``limit`` rows of the table. Default: all.
            progress: ``True`` for a bar on standard error, or a function that is called with each
                :class:`FetchProgress`.

        Returns:
            A pyarrow Table. ``.to_pandas()`` converts it to a pandas DataFrame, and ``polars.from_arrow(table)`` to a
            Polars one without copying. If the table is replaced during the fetch, the client fetches it again from the
            start, so that all rows are of one version.

        Raises:
            NotFound: If no table of that name exists.
            InvalidRequest: If the table has no column of a name in ``columns``.

        Example:
            >>> client.put("letters", {"letter": ["a", "b"], "n": [1, 2]}, mode="replace")
            2
            >>> client.get("letters").to_pydict()
            {'letter': ['a', 'b'], 'n': [1, 2]}
            >>> client.get("letters", columns=["n"], limit=1).to_pydict()
            {'n': [1]}
            >>> client.drop("letters")
            2
        """
        report = reporter(progress, f"get {name}")
        columns = None if columns is None else _arguments.some_names("columns", columns)
        limit = _arguments.optional_whole("limit", limit, least=1)
        return fetch_table(self._connections, lambda: self._table_info(name), report, columns, limit)

    def reader(self, name: str) -> pa.RecordBatchReader:
        """Reads a table batch by batch, over several connections. The order of the batches is lost.

        Raises:
            FailedPrecondition: If the table is replaced after some of its batches were returned.
        """
        return read_table(self._connections, lambda: self._table_info(name))

    def schema(self, name: str) -> pa.Schema:
        """Returns the columns of a table."""
        descriptor = flight.FlightDescriptor.for_path(_arguments.text("name", name, "the name of a table"))
        with self._connections.calling(f"asking for the columns of table {name!r}"):
            return self._connections.main.get_schema(descriptor, self._connections.options()).schema

    def tables(self) -> Tables:
        """Lists all tables, by name.

        Example:
            >>> client.put("letters", {"letter": ["a", "b"]}, mode="replace")
            2
            >>> [(table.name, table.rows) for table in client.tables() if table.name == "letters"]
            [('letters', 2)]
            >>> client.drop("letters")
            2
        """
        found = []
        with self._connections.calling("listing the tables"):
            for info in self._connections.main.list_flights(options=self._connections.options()):
                path = info.descriptor.path
                if info.descriptor.descriptor_type == flight.DescriptorType.PATH and path:
                    details = metadata(info)
                    table = TableInfo(path[0].decode(), info.total_records, info.total_bytes, info.schema, details)
                    found.append(table)
        return Tables(sorted(found, key=lambda table: table.name))

    def drop(self, name: str) -> int:
        """Drops a table and returns its number of rows. Running reads of the table finish."""
        answer = self._answer("drop_table", {"name": _arguments.text("name", name, "the name of a table")})
        return int(answer.get("rows", 0))

    # Joins

    def join(
        self,
        left: str,
        right: str,
        on: OnArgument | None = None,
        how: How = "inner",
        columns: Sequence[str] | None = None,
        strategy: Strategy | str | None = None,
        *,
        left_on: str | Sequence[str] | None = None,
        right_on: str | Sequence[str] | None = None,
        nulls_equal: bool | None = None,
        into: str | None = None,
        into_mode: IntoMode | None = None,
        temporary_seconds: int | None = None,
        devices: int | str | Sequence[str] | None = None,
        distribution: Distribution | str | None = None,
        priority: int | None = None,
        retain_seconds: int | None = None,
        batch_rows: int | None = None,
        progress: ProgressArgument = None,
    ) -> Result:
        """Joins two tables of the server. Returns when the join is queued. Fetching the result waits for the join.

        The options strategy, priority, retain_seconds and nulls_equal may also be set on the session. A value given
        here overrides the session, even if it equals the default.

        Args:
            left: Name of the left table.
            right: Name of the right table.
            on: Columns that must be equal: ``"k"``, ``["a", "b"]``, ``{"left_name": "right_name"}``, or a list of
                names, pairs and :class:`On`. :class:`On` sets for one pair whether nulls match.
            left_on: Instead of ``on``: one or several columns of the left table.
            right_on: Columns of the right table, paired with ``left_on``.
            how: Kind of join: ``"inner"``, ``"left"``, ``"right"``, ``"full"``, ``"left_semi"``, ``"left_anti"``,
                ``"right_semi"`` or ``"right_anti"``.
            columns: Columns of the result, in this order: ``"column"``, ``"left.column"`` or ``"right.column"``.
                Default: the keys once, the rest of left, then the rest of right, with the suffix ``_right`` for a name
                that is taken.
            strategy: Strategy of the join. With ``"auto"``, the default, the planner chooses. :meth:`explain` shows the
                choice.
            nulls_equal: ``True`` to match null keys with null keys, in all pairs that do not set it themselves.
                Default: ``False``.
            into: Name of a table to keep the result in.
            into_mode: Action if a table of that name exists: ``"create"``, the default, fails. ``"replace"`` replaces
                it when the result is complete.
            temporary_seconds: Seconds after which the server drops the table ``into``, counted from its appearance, at
                most a day. By default, the table stays.
            devices: Devices that run the join together: their number, the name of one, a list of names, or ``"all"``.
                By default, the server chooses: one, or several that end the join sooner.
            distribution: Division of the join among several devices. With ``"broadcast"``, each has the whole build
                side, and they share out the rows of the other side. With ``"hash"``, each joins all rows of its own
                keys. With ``"auto"``, the default, the planner chooses.
            priority: Priority of the job, -100 to 100, 0 by default. Jobs of higher priority start first.
            retain_seconds: Seconds that the server keeps the complete result. 0: the server releases rows as one reader
                reads them, so the result may be larger than its memory.
            batch_rows: Maximum number of rows per batch of the result.
            progress: ``True`` for a bar on standard error, or a function that is called with each :class:`JobStatus`.
                With either, the call waits until the result is complete.

        Raises:
            NotFound: If a table does not exist.
            AlreadyExists: If a table named ``into`` exists and ``into_mode`` is not ``"replace"``.
            InvalidRequest: If a column is missing, key types do not match, or an option has an invalid value.
            Exhausted: If the queue is full, or no strategy fits into the memory of the devices.
        """
        progress = _arguments.progress(progress)
        command = join_command(
            left,
            right,
            on,
            how,
            columns,
            strategy,
            nulls_equal,
            into,
            devices,
            priority,
            retain_seconds,
            batch_rows,
            into_mode,
            left_on,
            right_on,
            distribution,
            temporary_seconds,
        )
        result = self._submit(command).result()
        if progress:
            try:
                result.wait(progress=progress)
            except BaseException:
                # The caller has nothing to come back with.
                with suppress(Error):
                    result.cancel()
                raise
        return result

    def submit(self, left: str, right: str, on: OnArgument | None = None, how: How = "inner", **options: Any) -> Job:
        """Submits a join like :meth:`join`, and returns its job, to wait for, inspect or cancel.

        Example:
            >>> client.put("a", {"k": [1, 2]}), client.put("b", {"k": [2, 3]})
            (2, 2)
            >>> job = client.submit("a", "b", on="k", into="both")
            >>> job.wait().rows
            1
            >>> client.get("both").to_pydict()
            {'k': [2]}
            >>> [client.drop(name) for name in ("a", "b", "both")]
            [2, 2, 1]
        """
        _arguments.known("submit", options, OPTIONS)
        return self._submit(join_command(left, right, on, how, **options))

    def stream_join(
        self,
        table: Any,
        rows: Any,
        on: OnArgument | None = None,
        how: How = "inner",
        *,
        stream: Literal["left", "right"] = "right",
        columns: Sequence[str] | None = None,
        left_on: str | Sequence[str] | None = None,
        right_on: str | Sequence[str] | None = None,
        nulls_equal: bool | None = None,
        strategy: Strategy | str | None = None,
        devices: int | str | Sequence[str] | None = None,
        priority: int | None = None,
        batch_rows: int | None = None,
        keep_seconds: int | None = None,
        then: Sequence[Then] | None = None,
        schema: pa.Schema | Mapping[str, str | pa.DataType] | None = None,
    ) -> JoinReader:
        """Joins a table with rows while they are sent, without keeping them on the server.

        The table stays on a device. It may be the result of a join: ``join(..., into="x", temporary_seconds=60)``
        keeps it for a minute. It may be rows, too, which are sent first and are gone with the stream. Each batch
        of rows is sent as soon as it is read, and its joined rows come back while further rows are sent. The rows may
        be of any number. The server holds a client back that reads its result more slowly than it sends. The order of
        the rows is undefined.

        Args:
            table: Name of the table; or its rows, in the forms of :meth:`put`, paths as ``pathlib.Path``. They may
                take half of the memory of a device, and sending them takes the right to upload.
            rows: Rows to join with it, in the forms of :meth:`put`: a RecordBatchReader, or a generator of record
                batches, tables, pandas or Polars data frames or paths of files, gives rows that are made meanwhile.
            on: Columns that must be equal, as in :meth:`join`.
            how: Kind of the join. The rows are the right side, so ``"right"`` keeps all of them, also those without a
                match; with ``stream="left"`` it is ``"left"``. Kinds that keep rows of the table without a match send
                them at the end.
            stream: Side of the join that has the rows: ``"right"`` if the table is left, or ``"left"``.
            columns: Columns of the result, as in :meth:`join`.
            left_on: Columns of the left side, instead of ``on``.
            right_on: Columns of the right side, instead of ``on``.
            nulls_equal: True if null keys match null keys.
            strategy: Name of a strategy.
            devices: Name of the device.
            priority: Priority among the jobs of the tenant.
            batch_rows: Maximum rows per batch of the result.
            keep_seconds: Time for which the table stays on its device after the last stream that shares it, as the
                last stream that sets it wants. Only for the name of a table.
            then: Further tables that the same rows are joined with, in one pass. The server chooses the order of the
                joins. ``columns`` then names a column of several inputs as ``"parts.name"``. By default, the result has
                the columns of the rows, then those columns of each table that are no keys.
            schema: Columns of the rows, as a schema, or as types by name such as ``{"id": "int64"}``. The rows are
                converted to it. It is needed for a generator that may give no rows. Default: the columns of the first
                rows.

        Returns:
            A reader of the result. Closing it, leaving its ``with`` block or dropping it ends the join.

        Raises:
            NotFound: If there is no such table.
            InvalidRequest: For columns that do not exist or types that cannot be joined.
            Exhausted: If the table takes too much of every device.

        Example:
            >>> import pyarrow as pa
            >>> client.put("customers", {"id": [1, 2], "name": ["ann", "bob"]})
            2
            >>> def orders():
            ...     for number in range(3):
            ...         yield pa.record_batch({"customer": [1, number], "amount": [number, 10 * number]})
            >>> joined = client.stream_join("customers", orders(), on={"id": "customer"})
            >>> joined.read_all().sort_by([("name", "ascending"), ("amount", "ascending")]).to_pydict()
            {'id': [1, 1, 1, 1, 2], 'name': ['ann', 'ann', 'ann', 'ann', 'bob'], 'amount': [0, 1, 2, 10, 20]}
            >>> client.drop("customers")
            2
        """
        with self._build_side(table, keep_seconds) as name:
            command = _streamed(
                name,
                stream,
                on,
                how,
                columns=columns,
                left_on=left_on,
                right_on=right_on,
                nulls_equal=nulls_equal,
                strategy=strategy,
                devices=devices,
                priority=priority,
                batch_rows=batch_rows,
                keep_seconds=keep_seconds,
                then=then,
            )
            columns_sent = None if schema is None else columns_of("schema", schema)
            found = arriving(rows, self._connections.message_limit, columns_sent)
            return exchange(self._connections, command, found)

    @contextmanager
    def _build_side(self, table: Any, keep_seconds: int | None) -> Iterator[str]:
        """Name of the table of a stream. Rows become a temporary table, which the server keeps for an open stream."""
        if isinstance(table, str):
            yield _arguments.text("table", table, "the name of a table, or rows")
            return
        if keep_seconds:
            raise ValueError(
                "keep_seconds keeps a table for other streams, and rows have no name to find them by; put them"
            )
        rows = arriving(table, self._connections.message_limit)
        name = f"stream_{uuid.uuid4().hex}"
        options = {"mode": "create", "temporary_seconds": _BUILD_SECONDS}
        upload(self._connections, name, rows, options, 1, reporter(None, name))
        try:
            yield name
        finally:
            # The server drops it later if this fails.
            with suppress(Error):
                self.drop(name)

    def open_stream(
        self,
        table: Any,
        schema: pa.Schema | Mapping[str, str | pa.DataType],
        on: OnArgument | None = None,
        how: How = "inner",
        *,
        stream: Literal["left", "right"] = "right",
        **options: Any,
    ) -> JoinStream:
        """Opens a join that answers questions: rows are sent, and the rows that they join with come back.

        The table stays on a device, once for all streams that agree in their tenant, table and options, except
        ``priority`` and ``keep_seconds``, and in the names and types of their columns. The stream joins with the table
        as it was when the stream was opened: rows that are appended later, and a replacement of the table, show in
        streams that are opened afterwards.

        Several threads may share a stream, and then wait for one another. A stream for each of them is faster.

        Args:
            table: Name of the table, or its rows, as in :meth:`stream_join`.
            schema: Columns of the rows that will be sent, as a schema, or as types by name such as
                ``{"id": "int64"}``.
            on: Columns that must be equal, as in :meth:`join`.
            how: Kind of the join: ``"inner"``, or one that keeps rows of the side ``stream`` only. Others keep rows
                of the table for the end, which no question asks for; :meth:`stream_join` takes them.
            stream: Side of the join that has the rows: ``"right"`` if the table is left, or ``"left"``.
            **options: The other options of :meth:`stream_join`.

        Raises:
            NotFound: If there is no such table.
            InvalidRequest: For columns that do not exist or types that cannot be joined.
            ValueError: For a kind of join that keeps rows of the table.

        Example:
            >>> import pyarrow as pa
            >>> client.put("customers", {"id": [1, 2], "name": ["ann", "bob"]})
            2
            >>> with client.open_stream("customers", pa.schema({"id": pa.int64()}), on="id") as customers:
            ...     [customers.ask({"id": [id]})["name"].to_pylist() for id in (2, 3)]
            [['bob'], []]
            >>> client.drop("customers")
            2
        """
        _arguments.known("open_stream", options, STREAM_OPTIONS)
        _arguments.one_of("how", how, ("inner", stream, f"{stream}_semi", f"{stream}_anti"))
        sent = columns_of("schema", schema)
        with self._build_side(table, options.get("keep_seconds")) as name:
            return JoinStream(self._connections, _streamed(name, stream, on, how, **options), sent)

    def prepare(
        self,
        table: str,
        schema: pa.Schema | Mapping[str, str | pa.DataType],
        on: OnArgument | None = None,
        how: How = "inner",
        *,
        keep_seconds: int,
        **options: Any,
    ) -> None:
        """Prepares a table on a device, for streams with this schema and these options.

        It stays there for `keep_seconds` after the last of them. The last call, or stream, that sets the time decides.
        Other joins may take its memory meanwhile; the next stream then prepares it again. Streams use it that agree in
        their tenant, table and options, except ``priority``, and in the names and types of their columns. A join of the
        table with another one of this schema probes it, too, with the same kind, keys, result and ``batch_rows``. See
        :meth:`prepared`.

        Args:
            table: Name of the table.
            schema: Columns of the rows that these streams will send, as in :meth:`open_stream`.
            on: Columns that must be equal, as in :meth:`join`.
            how: Kind of the join: ``"inner"``, or one that keeps rows of the side ``stream`` only.
            keep_seconds: Time for which the table is kept, from a second to a day.
            **options: The other options of :meth:`stream_join`.

        Raises:
            Exhausted: If the table takes too much of every device.

        Example:
            >>> import pyarrow as pa
            >>> client.put("customers", {"id": [1, 2], "name": ["ann", "bob"]})
            2
            >>> schema = pa.schema({"id": pa.int64()})
            >>> client.prepare("customers", schema, on="id", keep_seconds=600)
            >>> [kept] = client.prepared()
            >>> kept["table"], kept["streams"]
            ('customers', 0)
            >>> client.release_prepared(kept["prepared"])
            >>> client.drop("customers")
            2
        """
        _arguments.known("prepare", options, ("stream", *STREAM_OPTIONS))
        takes = "a number of seconds, at most a day; release_prepared gives a table up"
        _arguments.whole("keep_seconds", keep_seconds, least=1, takes=takes)
        rows = columns_of("schema", schema).empty_table()
        self.stream_join(table, rows, on, how, keep_seconds=keep_seconds, **options).read_all()

    def prepared(self) -> list[dict[str, Any]]:
        """The tables that are prepared for streams, as the message ``PreparedBuild`` describes them.

        Each has its number (``prepared``), and what streams must have in common to share it: ``table``, ``how``,
        ``stream``, ``on``, ``then``, ``columns``, ``arriving``, ``batch_rows`` and ``strategy``. ``device``,
        ``prepared_since`` and ``bytes`` say where it is, and ``streams`` how many streams and joins use it. One that is
        not ``shared`` is of an open stream that keeps rows of the table for the end.
        """
        return self._connections.action("list_prepared")

    def release_prepared(self, prepared: int) -> None:
        """Frees a prepared table, with its last stream, by its number in :meth:`prepared`.

        Raises:
            NotFound: If there is no such table.
        """
        self._answer("release_prepared", {"prepared": _arguments.whole("prepared", prepared, least=1)})

    def command(self, command: Mapping[str, Any]) -> Result:
        """Runs a command in its JSON form, such as ``{"join": {"left": "a", ...}}``."""
        takes = 'a mapping such as {"join": {"left": "a", "right": "b", "on": [{"left": "k", "right": "k"}]}}'
        return self._submit(_arguments.mapping("command", command, takes)).result()

    def count(
        self,
        left: str,
        right: str,
        on: OnArgument | None = None,
        how: How = "inner",
        strategy: Strategy | str | None = None,
        *,
        left_on: str | Sequence[str] | None = None,
        right_on: str | Sequence[str] | None = None,
        nulls_equal: bool | None = None,
        devices: int | str | Sequence[str] | None = None,
        distribution: Distribution | str | None = None,
        priority: int | None = None,
    ) -> int:
        """Counts the rows of a join. The server makes no rows and reads the key columns only.

        Takes the arguments and raises the errors of :meth:`join`. Waits for the number.

        Example:
            >>> client.put("a", {"k": [1, 2, 3]})
            3
            >>> client.put("b", {"k": [2, 2, 4]})
            3
            >>> client.count("a", "b", on="k"), client.count("a", "b", on="k", how="left_anti")
            (2, 2)
            >>> client.drop("a"), client.drop("b")
            (3, 3)
        """
        command = join_command(
            left,
            right,
            on,
            how,
            strategy=strategy,
            nulls_equal=nulls_equal,
            devices=devices,
            distribution=distribution,
            priority=priority,
            left_on=left_on,
            right_on=right_on,
        )
        command["join"]["count"] = True
        with self._submit(command).result() as result:
            return int(result.table().column("count")[0].as_py())

    def explain(
        self,
        left: str,
        right: str,
        on: OnArgument | None = None,
        how: How = "inner",
        *,
        stream: Literal["left", "right"] | None = None,
        then: Sequence[Then] | None = None,
        **options: Any,
    ) -> Explanation:
        """Explains how a join would run, and why, without running it. Takes the arguments of :meth:`join`.

        With ``stream``, it explains :meth:`stream_join`. The table of that side then stands for the rows: they have its
        columns. ``then`` has the further tables of such a join. The detail ``chain`` has the joins in the order in
        which the rows probe them, and the share of its rows that each is predicted to keep. The job of a stream that
        runs or has run explains the measured shares, too (:meth:`Job.explain`), and why the order differs from the
        predicted one.

        For a join that fits on no device, the detail ``refusal`` says what is too small and what would help. It is
        ``None`` for a join that may run.
        """
        _arguments.known("explain", options, OPTIONS)
        command = join_command(left, right, on, how, **options)
        if stream is not None:
            command["join"]["stream"] = _arguments.one_of("stream", stream, ("left", "right"))
        if then is not None:
            command["join"]["then"] = further_joins(then)
        return Explanation(self._answer("explain", command))

    def jobs(self) -> Jobs:
        """Lists jobs that run, wait or have ended and are still known, oldest first.

        An admin gets all jobs, others theirs.
        """
        return Jobs([JobStatus.from_json(answer) for answer in self._connections.action("list_jobs")])

    def job(self, identity: int) -> Job:
        """Returns the job with this number.

        Raises:
            NotFound: If the server does not know the job, or no longer.
        """
        job = Job(self._connections, _arguments.whole("identity", identity, least=0))
        job.status()
        return job

    # The server

    def topology(self) -> Topology:
        """Returns the devices of the server, their memory, and the links between them."""
        return Topology(self._answer("topology"))

    def server_info(self) -> ServerInfo:
        """Returns version, devices, memory and client limits of the server.

        Example:
            >>> client.server_info()["name"]
            'dovetail'
        """
        return ServerInfo(self._answer("server_info"))

    def close(self) -> None:
        """Closes all connections and ends all open streams.

        Results that were not closed stay on the server for their lease.
        """
        self._connections.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client of {self.uri}>"

    def _table_info(self, name: str) -> flight.FlightInfo:
        descriptor = flight.FlightDescriptor.for_path(_arguments.text("name", name, "the name of a table"))
        return self._info(descriptor, f"asking for table {name!r}")

    def _info(self, descriptor: flight.FlightDescriptor, call: str) -> flight.FlightInfo:
        with self._connections.calling(call):
            return self._connections.main.get_flight_info(descriptor, self._connections.options())

    def _submit(self, command: Mapping[str, Any]) -> Job:
        info = self._info(flight.FlightDescriptor.for_command(encode(command)), "submitting a join")
        details = metadata(info)
        if "job" not in details:
            raise InternalError("the server answered a join without naming its job")
        join = command.get("join")
        is_read_once = isinstance(join, Mapping) and join.get("retain_seconds") == 0 and not join.get("into")
        return Job(self._connections, int(details["job"]), info, is_read_once=is_read_once)

    def _answer(self, action: str, body: Any = None) -> Mapping[str, Any]:
        answers = self._connections.action(action, body)
        if not answers:
            raise InternalError(f"the server gave no answer to the action {action!r}")
        answer: Mapping[str, Any] = answers[0]
        return answer


__all__ = [
    "Client",
    "Distribution",
    "How",
    "IntoMode",
    "Mode",
    "ServerInfo",
    "Strategy",
    "TableInfo",
    "Tables",
    "Topology",
    "UploadProgress",
    "connect",
]


STREAM_OPTIONS = (
    "columns",
    "left_on",
    "right_on",
    "nulls_equal",
    "strategy",
    "devices",
    "priority",
    "batch_rows",
    "keep_seconds",
    "then",
)


def _streamed(
    table: str,
    stream: str,
    on: OnArgument | None,
    how: str,
    keep_seconds: int | None = None,
    then: Sequence[Then] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The command of a join of a table with rows that arrive on the side `stream`."""
    _arguments.text("table", table, "the name of a table")
    side = _arguments.one_of("stream", stream, ("left", "right"))
    joins = [] if then is None else further_joins(then)
    named = {table, *(join.get("label", join["table"]) for join in joins)}
    labels = itertools.chain(("stream", "rows"), (f"rows_{number}" for number in itertools.count()))
    label = next(label for label in labels if label not in named)
    command = join_command(*((table, label) if side == "right" else (label, table)), on, how, **options)
    command["join"]["stream"] = side
    if keep_seconds is not None:
        takes = "a number of seconds, at most a day"
        command["join"]["keep_seconds"] = _arguments.whole("keep_seconds", keep_seconds, least=0, takes=takes)
    if joins:
        command["join"]["then"] = joins
    return command
