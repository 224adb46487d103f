"""Commands and calls that the server cannot read, or does not serve."""

from __future__ import annotations

import json

import grpc
import pyarrow.flight as flight
import pytest

import dovetail
from harness import Server
from refusals import TABLE, refused, refused_raw


def command(server: Server, body: bytes) -> None:
    connection = flight.connect(server.uri)
    with dovetail.errors.translated():
        connection.get_flight_info(flight.FlightDescriptor.for_command(body))


@pytest.mark.parametrize("body", [b"SELECT 1", b"\xff\xfe\xfd", b"[]", b"", b"\x0a\x03abc"])
def test_a_command_that_is_neither_json_nor_protobuf_is_answered_with_an_example(
    server: Server, client: dovetail.Client, body: bytes
) -> None:
    with refused(dovetail.InvalidRequest, '{"join": {"left": "orders"'):
        command(server, body)


def test_truncated_json_is_reported_as_truncated(server: Server, client: dovetail.Client) -> None:
    with refused(dovetail.InvalidRequest, "JSON", "EOF"):
        command(server, b'{"join": {"left": "a"')


@pytest.mark.parametrize(
    ("body", "misspelt"),
    [
        ({"join": {"left": "a", "right": "b", "hwo": "left"}}, "hwo"),
        ({"jion": {}}, "jion"),
        ({"join": {"left": "a", "right": "b", "on": [{"left": "k", "rihgt": "k"}]}}, "rihgt"),
    ],
)
def test_json_with_an_unknown_field_names_it(
    server: Server, client: dovetail.Client, body: dict[str, object], misspelt: str
) -> None:
    with refused(dovetail.InvalidRequest, misspelt):
        command(server, json.dumps(body).encode())


def test_an_empty_list_of_columns_is_refused_by_every_call(server: Server, client: dovetail.Client) -> None:
    """Regression test: it stood for all columns, and the Python client refused it."""
    client.put("a", TABLE)
    join = {"left": "a", "right": "a", "on": [{"left": "k", "right": "k"}], "columns": []}
    sent = json.dumps({"join": join}).encode()
    connection = flight.connect(server.uri)
    descriptor = flight.FlightDescriptor.for_command(sent)
    for call in (
        lambda: connection.get_flight_info(descriptor),
        lambda: connection.get_schema(descriptor),
        lambda: list(connection.do_action(flight.Action("explain", sent))),
        lambda: client.command({"join": join}),
    ):
        words = '"columns" is empty; name at least one column, or leave it out for all columns'
        with refused(dovetail.InvalidRequest, words), dovetail.errors.translated():
            call()


def test_protobuf_with_an_unknown_field_or_of_an_unknown_message_is_refused(
    server: Server, client: dovetail.Client
) -> None:
    def packed(name: str, value: bytes) -> bytes:
        return _field(1, f"type.googleapis.com/{name}".encode()) + _field(2, value)

    join = _field(1, b"a") + _field(2, b"b")
    with refused(dovetail.InvalidRequest, "field number 99"):
        command(server, packed("dovetail.v1.Join", join + _field(99, b"x")))
    # Field 12 is "into"; the tables are not looked for.
    with refused(dovetail.InvalidRequest, '"into" is empty'):
        command(server, packed("dovetail.v1.Join", join + _field(12, b"")))
    with refused(dovetail.InvalidRequest, "some.Message"):
        command(server, packed("some.Message", b""))
    with refused(dovetail.Unsupported, "Flight SQL", "join command"):
        command(server, packed("arrow.flight.protocol.sql.CommandStatementQuery", _field(1, b"SELECT 1")))


def test_flight_sql_is_not_served_by_any_call(server: Server, client: dovetail.Client) -> None:
    connection = flight.connect(server.uri)
    message = b"type.googleapis.com/arrow.flight.protocol.sql.CommandStatementUpdate"
    any_message = bytes([1 << 3 | 2, len(message)]) + message
    calls = [
        lambda: list(connection.do_action(flight.Action("BeginTransaction", b""))),
        lambda: list(connection.do_action(flight.Action("CreatePreparedStatement", b""))),
        lambda: connection.do_get(flight.Ticket(any_message)).read_all(),
        lambda: put(flight.FlightDescriptor.for_command(any_message)),
    ]

    def put(descriptor: flight.FlightDescriptor) -> None:
        writer, _ = connection.do_put(descriptor, TABLE.schema)
        writer.write_table(TABLE)
        writer.close()

    calls += [lambda: connection.get_schema(flight.FlightDescriptor.for_command(any_message))]
    for call in calls:
        ways = ("Flight SQL", "dovetail join", "import dovetail", "join command")
        with refused(dovetail.Unsupported, *ways), dovetail.errors.translated():
            call()


def test_an_invalid_message_or_method_is_reported_as_the_callers_mistake(
    server: Server, client: dovetail.Client
) -> None:
    service = "/arrow.flight.protocol.FlightService"
    with grpc.insecure_channel(server.address) as channel:
        for rpc in ["GetFlightInfo", "PollFlightInfo", "GetSchema"]:
            with refused_raw(grpc.StatusCode.INVALID_ARGUMENT, f"the request is not a message of {rpc}"):
                channel.unary_unary(f"{service}/{rpc}")(b"\xff\xff\xff", timeout=60)
        with refused_raw(grpc.StatusCode.INVALID_ARGUMENT, "the request is not a message of DoAction"):
            list(channel.unary_stream(f"{service}/DoAction")(b"\xff\xff\xff", timeout=60))
        with refused_raw(grpc.StatusCode.UNIMPLEMENTED, "there is no method", "Fly", "FlightService"):
            channel.unary_unary(f"{service}/Fly")(b"", timeout=60)


def _field(tag: int, value: bytes) -> bytes:
    key = tag << 3 | 2
    head = [key] if key < 128 else [key & 127 | 128, key >> 7]
    return bytes([*head, len(value)]) + value


def test_flight_calls_that_are_not_served_say_what_to_use_instead(server: Server, client: dovetail.Client) -> None:
    connection = flight.connect(server.uri)
    with refused(dovetail.InvalidRequest, "a join such as"), dovetail.errors.translated():
        writer, reader = connection.do_exchange(flight.FlightDescriptor.for_command(b"{}"))
        writer.begin(TABLE.schema)
        reader.read_chunk()
    with refused(dovetail.InvalidRequest, '"fly"', "drop_table"), dovetail.errors.translated():
        list(connection.do_action(flight.Action("fly", b"")))
    with refused(dovetail.InvalidRequest, "drop_table", "tabel"), dovetail.errors.translated():
        list(connection.do_action(flight.Action("drop_table", b'{"tabel": "a"}')))
    with refused(dovetail.NotFound, "no job 123456"):
        client.job(123456)
    with refused(dovetail.InvalidRequest, "path"), dovetail.errors.translated():
        connection.get_flight_info(flight.FlightDescriptor.for_path("a", "b"))
