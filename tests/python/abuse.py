"""Abuses: what a careless client or an attacker with a token does to make a server hold memory, work, or connections.

`test_abuse.py` holds a server to its bound under them, and `benches/abuse.py` measures each of them alone.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

import dovetail
from http2 import PREFACE, Connection, grpc_message
from raw import descriptor, field, messages, varint

KIB, MIB = 1 << 10, 1 << 20


class Abuse:
    """Abuses of one tenant, of the server at an address. Each method is one of them, for as long as a round lasts.

    ``admin`` is the address of the admin port, which only one of them needs. ``scale`` multiplies how many calls or
    connections there are. ``offered`` counts what was begun, and ``held`` what the server still held at the end of
    the round.
    """

    def __init__(
        self, address: str, round_seconds: float, token: str | None, scale: float = 1, *, admin: str | None = None
    ) -> None:
        self._address = address
        self._admin = admin
        self._seconds = round_seconds
        self._token = token
        self._scale = scale
        self.offered = self.held = 0

    def _count(self, count: int) -> int:
        return max(1, round(count * self._scale))

    @contextmanager
    def _connections(self, count: int, window: int = 65_535) -> Iterator[list[Connection]]:
        """Connections for the calls of a round, which begins when these have been made."""
        opened = [Connection(self._address, window=window, token=self._token) for _ in range(self._count(count))]
        try:
            yield opened
            time.sleep(self._seconds)
            self.offered += sum(connection.calls for connection in opened)
            self.held += sum(connection.calls - len(connection.ended) for connection in opened if connection.is_open)
        finally:
            for connection in opened:
                connection.close()

    def _stop(self, method: str, content: bytes, calls: int, encoding: str = "identity") -> None:
        """Calls that send this and nothing more, over several connections."""
        with self._connections(10) as connections:
            for connection in connections:
                for _ in range(calls):
                    connection.call(method, content, encoding=encoding)

    def actions_that_stop(self) -> None:
        self._stop("DoAction", grpc_message(bytes(4 * MIB), declared=15 * MIB), 4)

    def long_fields_before_the_descriptor(self) -> None:
        length = 15 * MIB
        unknown = varint(7 << 3 | 2) + varint(length) + bytes(4 * MIB)
        self._stop("DoPut", grpc_message(unknown, declared=length + 5), 4)

    def uploads_that_stop_in_a_header(self) -> None:
        length = 15 * MIB
        head = field(1, descriptor(path=["t"])) + varint(2 << 3 | 2) + varint(length) + bytes(4 * MIB)
        self._stop("DoPut", grpc_message(head, declared=length + 20), 4)
        self._stop("DoExchange", grpc_message(head, declared=length + 20), 4)

    def heads_alone(self) -> None:
        self._stop("DoAction", grpc_message(b"", declared=255 * MIB), 100)
        self._stop("DoAction", grpc_message(b"", declared=15 * MIB), 100)
        self._stop("DoPut", grpc_message(varint(1000 << 3 | 2) + varint(250 * MIB), declared=255 * MIB), 100)

    def messages_that_grow(self) -> None:
        bomb = grpc_message(pa.compress(bytes(250 * MIB), codec="zstd", asbytes=True), flag=1)
        self._stop("DoAction", bomb, 8, encoding="zstd")
        self._stop("DoPut", bomb, 8, encoding="zstd")
        self._stop("DoExchange", bomb, 8, encoding="zstd")
        metadata = grpc_message(
            pa.compress(field(1, descriptor(path=["t"])) + field(3, bytes(250 * MIB)), codec="zstd", asbytes=True),
            flag=1,
        )
        self._stop("DoPut", metadata, 8, encoding="zstd")

    def schemas_of_empty_tables(self) -> None:
        """Tables without rows, with long metadata, names, and zones."""
        long = "x" * (2 * MIB)
        schemas = [
            pa.schema([pa.field("k", pa.int64())], metadata={"m": long}),
            pa.schema([pa.field("k", pa.int64(), metadata={"m": long})]),
            pa.schema([pa.field(long, pa.int64())]),
            pa.schema([pa.field("k", pa.list_(pa.field("i", pa.int8(), metadata={"m": long})))]),
        ]
        with self._client() as client:
            self._fill(
                client,
                "empty",
                (pa.table({name: [] for name in schema.names}, schema=schema) for schema in schemas * 20),
            )

    def tiny_batches_of_many_columns(self) -> None:
        columns = 2000
        one = pa.table({f"c{at}": pa.array([True]) for at in range(columns)})
        rows = pa.table({f"c{at}": pa.array(np.zeros(8192, dtype=np.bool_)) for at in range(columns)})
        with self._client() as client:
            self._fill(client, "tiny", [pa.concat_tables([one] * 30)] * 3 + [rows] * 3)

    def lists_that_are_not_read(self) -> None:
        with self._client() as client:
            wide = pa.table({f"column {at} of a wide table": [1] for at in range(5000)})
            self._fill(client, "wide", [wide] * 4)
        for window in (0, 16 * KIB):
            with self._connections(4, window) as connections:
                for connection in connections:
                    for _ in range(50):
                        connection.call("ListFlights", grpc_message(b""), end=True)
                        connection.call("GetFlightInfo", grpc_message(descriptor(path=["wide0"])), end=True)
                        connection.call("GetSchema", grpc_message(descriptor(path=["wide0"])), end=True)

    def explanations_of_wide_tables(self) -> None:
        """Plans of joins of 5,000 columns with themselves. Half of the clients do not read them."""
        with self._client() as client:
            self._fill(client, "planned", [pa.table({f"column {at} of a wide table": [1] for at in range(5000)})])
        key = "column 0 of a wide table"
        join = {"left": "planned0", "right": "planned0", "on": [{"left": key, "right": key}]}
        request = grpc_message(field(1, b"explain") + field(2, json.dumps({"join": join}).encode()))
        for window in (0, MIB):
            with self._connections(4, window) as connections:
                for connection in connections:
                    for _ in range(50):
                        connection.call("DoAction", request, end=True)

    def rows_that_are_not_read(self) -> None:
        with self._client() as client:
            texts = pa.array([f"{at:>30}" for at in range(100_000)]).cast(pa.string_view())
            self._fill(
                client, "rows", [pa.table({"t": texts}), pa.table({f"c{at}": np.arange(4000) for at in range(400)})]
            )
        tickets = [ticket for name in ("rows0", "rows1") for ticket in self._tickets(name)]
        for window in (0, 16 * KIB):
            with self._connections(4, window) as connections:
                for connection in connections:
                    for ticket in tickets * 20:
                        connection.call("DoGet", grpc_message(ticket), end=True)

    def texts_that_views_share(self) -> None:
        """Uploads of views that all refer to one long text. The server's work is many times the bytes that are sent."""
        views, text = 100_000, 8 * MIB
        view = np.zeros(
            views, dtype=np.dtype([("length", "<i4"), ("prefix", "S4"), ("buffer", "<i4"), ("offset", "<i4")])
        )
        view["length"], view["prefix"] = text, b"xxxx"
        buffers = [None, pa.py_buffer(view.tobytes()), pa.py_buffer(b"x" * text)]
        table = pa.table({"t": pa.Array.from_buffers(pa.string_view(), views, buffers)})

        def put(at: int) -> None:
            with flight.connect(self._uri()) as client, suppress(pa.ArrowException, OSError):
                options = self._options(timeout=max(self._seconds, 1))
                writer, _ = client.do_put(flight.FlightDescriptor.for_path(f"views{at}"), table.schema, options)
                with writer:
                    writer.write_table(table)
                self.held += 1

        self._at_once(8, put)

    def uploads_that_only_begin(self) -> None:
        """Uploads whose schema is sent, and then nothing: each has a place among the server's uploads."""
        rows = pa.table({"k": [1]})
        with self._connections(4) as connections:
            for at, connection in enumerate(connections):
                for upload in range(64):
                    first = messages(rows, f"begun{at}_{upload}")[0]
                    connection.call("DoPut", grpc_message(first.encode()))

    def jobs_that_fill_the_queue(self) -> None:
        with self._client() as client:
            client.put("many", {"k": np.zeros(5_000, dtype=np.int64)}, mode="replace")
        command = {"left": "many", "right": "many", "on": [{"left": "k", "right": "k"}], "count": True}
        request = grpc_message(descriptor(command=json.dumps({"join": command}).encode()))
        with self._connections(4) as connections:
            for connection in connections:
                for _ in range(300):
                    connection.call("GetFlightInfo", request, end=True)
        with self._client() as client:
            self.held = sum(job.state in ("queued", "running") for job in client.jobs())
            self._cancel_jobs(client)

    def results_that_are_kept_for_ever(self) -> None:
        """Results of 8 MB whose client asks for a lease of 136 years."""
        with self._client() as client:
            client.put("half", {"k": np.arange(500_000)}, mode="replace")
            for _ in range(self._count(64)):
                self.offered += 1
                with suppress(dovetail.Error):
                    client.submit("half", "half", on="k", retain_seconds=2**32 - 1).wait()
                    self.held += 1
            time.sleep(self._seconds)
            self._cancel_jobs(client)

    def halves_of_prefaces(self) -> None:
        """Connections that send half of HTTP/2's first bytes."""
        self._send_half_prefaces(self._address)

    def halves_of_prefaces_to_admin(self) -> None:
        assert self._admin, "the address of the admin port is not known"
        self._send_half_prefaces(self._admin)

    def _send_half_prefaces(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        with ExitStack() as opened:
            sockets = []
            for _ in range(self._count(1000)):
                self.offered += 1
                with suppress(OSError):
                    connection = opened.enter_context(socket.create_connection((host, int(port)), timeout=1))
                    connection.sendall(PREFACE[: len(PREFACE) // 2])
                    sockets.append(connection)
            time.sleep(self._seconds)
            self.held += sum(_is_open(connection) for connection in sockets)

    def _at_once(self, count: int, work: Callable[[int], None]) -> None:
        threads = [threading.Thread(target=work, args=(at,)) for at in range(self._count(count))]
        self.offered += len(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @staticmethod
    def _cancel_jobs(client: dovetail.Client) -> None:
        for job in client.jobs():
            with suppress(dovetail.Error):
                client.job(job.id).cancel()

    def _client(self) -> dovetail.Client:
        return dovetail.connect(self._uri(), token=self._token, timeout=60)

    def _uri(self) -> str:
        return f"grpc://{self._address}"

    def _options(self, timeout: float | None = None) -> flight.FlightCallOptions:
        headers = [(b"authorization", f"Bearer {self._token}".encode())] if self._token else []
        return flight.FlightCallOptions(headers=headers, timeout=timeout)

    def _tickets(self, name: str) -> list[bytes]:
        """Tickets of a table as DoGet takes them; none if the table did not fit."""
        with flight.connect(self._uri()) as client, suppress(pa.ArrowException, OSError):
            info = client.get_flight_info(flight.FlightDescriptor.for_path(name), self._options())
            return [endpoint.ticket.serialize() for endpoint in info.endpoints]
        return []

    def _fill(self, client: dovetail.Client, prefix: str, tables: Iterable[pa.Table]) -> None:
        """Uploads those tables that fit."""
        for at, table in enumerate(tables):
            self.offered += 1
            with suppress(dovetail.Exhausted):
                client.put(f"{prefix}{at}", table, mode="replace")
                self.held += 1
        time.sleep(self._seconds)

    def clean_up(self, *, but: Iterable[str]) -> None:
        """Drops all tables except some, and the results that a round could not give back."""
        with self._client() as client:
            self._cancel_jobs(client)
            for table in client.tables():
                if table.name not in but:
                    client.drop(table.name)


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        # The server may have sent something before it closed the connection.
        while connection.recv(4096):
            pass
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False


# Those that take memory.
OF_MEMORY = [
    Abuse.actions_that_stop,
    Abuse.long_fields_before_the_descriptor,
    Abuse.uploads_that_stop_in_a_header,
    Abuse.heads_alone,
    Abuse.messages_that_grow,
    Abuse.schemas_of_empty_tables,
    Abuse.tiny_batches_of_many_columns,
    Abuse.lists_that_are_not_read,
    Abuse.rows_that_are_not_read,
]

# Those that take work, places, or connections.
OF_OTHERS = [
    Abuse.texts_that_views_share,
    Abuse.uploads_that_only_begin,
    Abuse.jobs_that_fill_the_queue,
    Abuse.results_that_are_kept_for_ever,
    Abuse.halves_of_prefaces,
    Abuse.halves_of_prefaces_to_admin,
    Abuse.explanations_of_wide_tables,
]
