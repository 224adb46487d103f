"""The client: tables up, joins asked for, results down."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.flight as flight

from . import _arguments
from ._command import OPTIONS, IntoMode, OnArgument, encode, join_command
from ._connection import Connections, Pem
from ._csv import CsvOptions
from ._jobs import Jobs, JobStatus
from ._progress import ProgressArgument, reporter
from ._result import Explanation, Job, Result, fetch_table, metadata, read_table
from ._source import source
from ._tables import ServerInfo, TableInfo, Tables, Topology
from ._upload import UploadProgress, upload
from .errors import Error, InternalError

How = Literal["inner", "left", "right", "full", "left_semi", "left_anti", "right_semi", "right_anti"]
"""Which rows of a join survive."""

Strategy = Literal["auto", "hash", "radix-hash", "radix-hash-gfur", "sort-merge", "sort-merge-gfur"]
"""How a join is composed; ``"auto"`` lets the planner choose. The server may know more than these."""

Mode = Literal["create", "replace", "append", "create_if_missing"]
"""What an upload does with a table of that name."""

DEFAULT_URI = "grpc://127.0.0.1:8815"

STREAMS_MAX = 64
"""Connections that an upload may go over, as ``dovetail put --streams`` has it."""

CONNECT_TIMEOUT = 10.0
"""Seconds that connecting may take where nobody says: far longer than a server needs, no longer than a person waits."""


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
    """Connects to a server, and makes sure that it answers.

    Args:
        uri: Its address, such as ``"grpc://127.0.0.1:8815"``, or ``"grpc+tls://host:8815"`` with TLS. Default: the
            environment variable ``DOVETAIL_SERVER``, else the address on which a server listens by default.
        token: The bearer token, or ``@FILE`` for the one that a file holds. Default: the environment variable
            ``DOVETAIL_TOKEN``.
        tls_root_certs: Certificates of the authorities to trust (PEM, or the path of a file). Default: the system's.
        cert: The client's certificate chain, for mutual TLS.
        key: Its private key.
        timeout: Seconds within which the server must be reached and must answer. ``None``: as long as it takes.
        call_timeout: Seconds that each later call may take, transfers included. Default: no limit, since a join may
            take long; a server that is gone is noticed all the same.

    Raises:
        Unavailable: When nothing answers there, or not in time.
        Unauthenticated: When the server wants a token, or another one.

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
    """A connection to a Dovetail server. :func:`connect` makes one.

    It may be used from several threads at once. Example:

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
        """Uploads a table, which appears in whole when all of it is there, or not at all.

        Args:
            name: The table's name.
            data: A pyarrow Table, RecordBatch, RecordBatchReader or Dataset; a pandas or Polars DataFrame, or anything
                else with the Arrow stream interface; a sequence of record batches; a dictionary of columns, or a list
                of rows that are dictionaries, with a null where one has no value for a column. Or the path
                of a file (Parquet, Arrow IPC file or stream, ORC, CSV, CSV that gzip has compressed) or of a folder
                of such files, in the order of their names; a pattern such as ``"parts/*.parquet"``, or a list of paths:
                files with the same columns, whose rows become one table in this order.
            mode: ``"create"`` (the name must be free), ``"replace"``, ``"append"`` (the table must be there) or
                ``"create_if_missing"`` (append, or create).
            sorted_by: Columns by which the rows are sorted, ascending, nulls first. The server checks it, and saves the
                sorting in joins.
            unique: Columns (or sets of columns) whose values are distinct. Nobody checks: the planner predicts by it,
                and where it does not hold, results are right all the same.
            streams: How many connections to send over at once, up to 64. One tops out near 3 GB/s; with more, the
                order of the rows is not kept.
            progress: ``True`` for a bar on standard error, or a function that is called with each
                :class:`UploadProgress`.
            types: Of CSV: types of columns, in place of those that are inferred, such as
                ``{"id": "int64", "price": "decimal(9,2)"}``; names as ``dovetail put --types`` takes them, or
                ``pyarrow`` types.
            delimiter: Of CSV: the ASCII character between fields; by default a comma, and a tab in files named .tsv.
            header: Of CSV: whether the first line names the columns, as it does by default; else they are column_1, ...
            infer_rows: Of CSV: rows from which types are inferred; 10,000 by default.
            null_values: Of CSV: words that stand for null, in addition to the empty field: a sequence of them such as
                ``["NA", "NULL"]``, or a string with commas between them, ``"NA,NULL"``, as ``--null-values`` takes it.

        Returns:
            The number of rows that the server took.

        Raises:
            AlreadyExists: In mode ``"create"``, when there is a table of that name.
            NotFound: In mode ``"append"``, when there is none.
            InvalidRequest: For a type or option that the server does not accept.
            Exhausted: When the server has no room for it.
            ValueError: When a file is not what it seems, with the line where that is known.

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

    def get(self, name: str, progress: ProgressArgument = None) -> pa.Table:
        """A whole table, fetched over several connections; rows in the order in which they were uploaded.

        Args:
            name: The table's name.
            progress: ``True`` for a bar on standard error, or a function that is called with each
                :class:`FetchProgress`.

        Returns:
            A pyarrow Table: ``.to_pandas()`` makes a pandas DataFrame of it, and ``polars.from_arrow(table)`` a Polars
            one without copying. Where somebody replaces the table meanwhile, it is fetched again from its beginning, so
            that all rows are of one version.

        Example:
            >>> client.put("letters", {"letter": ["a", "b"]}, mode="replace")
            2
            >>> client.get("letters").to_pydict()
            {'letter': ['a', 'b']}
            >>> client.drop("letters")
            2
        """
        report = reporter(progress, f"get {name}")
        return fetch_table(self._connections, lambda: self._table_info(name), report)

    def reader(self, name: str) -> pa.RecordBatchReader:
        """A table batch by batch, over several connections; the order of the batches is not kept.

        Raises:
            FailedPrecondition: When somebody replaces the table meanwhile, and some of its batches were handed out.
        """
        return read_table(self._connections, lambda: self._table_info(name))

    def schema(self, name: str) -> pa.Schema:
        """The columns of a table."""
        descriptor = flight.FlightDescriptor.for_path(_arguments.text("name", name, "the name of a table"))
        with self._connections.calling(f"asking for the columns of table {name!r}"):
            return self._connections.main.get_schema(descriptor, self._connections.options()).schema

    def tables(self) -> Tables:
        """All tables, by name.

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
        """Removes a table and returns how many rows it had. Whoever reads it at the moment finishes."""
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
        devices: int | str | Sequence[str] | None = None,
        priority: int | None = None,
        retain_seconds: int | None = None,
        batch_rows: int | None = None,
        progress: ProgressArgument = None,
    ) -> Result:
        """Joins two tables of the server. Returns as soon as the join is queued; fetching the result waits for it.

        Strategy, priority, retain_seconds and nulls_equal may be options of the session too: what is given here holds,
        also when it is what the default would be.

        Args:
            left: Name of the left table.
            right: Name of the right table.
            on: Columns that must be equal: ``"k"``, ``["a", "b"]``, ``{"left_name": "right_name"}``, or a list of
                names, pairs, and :class:`On`, which says for one pair whether its nulls are equal.
            left_on: In place of ``on``: a column of the left table, or several.
            right_on: The columns of the right table that go with ``left_on``.
            how: Which rows survive: ``"inner"``, ``"left"``, ``"right"``, ``"full"``, ``"left_semi"``, ``"left_anti"``,
                ``"right_semi"`` or ``"right_anti"``.
            columns: Columns of the result, in order: ``"column"``, ``"left.column"`` or ``"right.column"``. Default:
                the keys once, the rest of left, the rest of right, with the suffix ``_right`` where a name clashes.
            strategy: How it is done; ``"auto"``, the default, lets the planner choose. :meth:`explain` shows what
                it chose.
            nulls_equal: Whether a null key matches a null key, in all pairs that do not say; by default it does not.
            into: Keeps the result as a table of this name.
            into_mode: What to do with a table of that name: ``"create"``, the default, refuses to touch it;
                ``"replace"`` puts the result in its place once it is complete, in whole.
            devices: How many devices may run it, the name of one, or a list of names.
            priority: -100 to 100, by default 0; jobs of higher priority start first.
            retain_seconds: How long the result is kept once it is complete. 0: released as it is read, by one reader,
                so that it may be larger than the server's memory.
            batch_rows: Rows per batch of the result, at most.
            progress: ``True`` for a bar on standard error, or a function that is called with each :class:`JobStatus`;
                waits until the result is complete.

        Raises:
            NotFound: When there is no such table.
            AlreadyExists: When there is a table named ``into``, unless it is to be replaced.
            InvalidRequest: When a column is missing, types do not fit, or an option has no such value.
            Exhausted: When the queue is full, or no strategy fits into the devices' memory.
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
        """As :meth:`join`, for those who come back later: the job, to wait for, look at or cancel.

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
        priority: int | None = None,
    ) -> int:
        """How many rows a join has. No row of it is made, and no column beyond the keys is read.

        Takes and raises what :meth:`join` does; waits for the number.

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
            priority=priority,
            left_on=left_on,
            right_on=right_on,
        )
        command["join"]["count"] = True
        with self._submit(command).result() as result:
            return int(result.table().column("count")[0].as_py())

    def explain(
        self, left: str, right: str, on: OnArgument | None = None, how: How = "inner", **options: Any
    ) -> Explanation:
        """How a join would run, and why, without running it. Takes what :meth:`join` takes.

        Of a join that would be refused because it fits on no device, it tells that too: the detail ``refusal`` says
        what is too small and what would help, and is ``None`` for a join that may run.
        """
        _arguments.known("explain", options, OPTIONS)
        return Explanation(self._answer("explain", join_command(left, right, on, how, **options)))

    def jobs(self) -> Jobs:
        """What runs, waits, or has ended and is remembered: yours, or everybody's for an admin; oldest first."""
        return Jobs([JobStatus.from_json(answer) for answer in self._connections.action("list_jobs")])

    def job(self, identity: int) -> Job:
        """The job of that number.

        Raises:
            NotFound: When the server does not know it (any more).
        """
        job = Job(self._connections, _arguments.whole("identity", identity, least=0))
        job.status()
        return job

    # The server

    def topology(self) -> Topology:
        """The devices of the server, their memory, and the links between them."""
        return Topology(self._answer("topology"))

    def server_info(self) -> ServerInfo:
        """Version, devices, memory and the limits that a client meets.

        Example:
            >>> client.server_info()["name"]
            'dovetail'
        """
        return ServerInfo(self._answer("server_info"))

    def close(self) -> None:
        """Closes all connections. Results that were not closed stay on the server for their lease."""
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
