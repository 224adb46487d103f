"""Callers without a token, with a wrong one, and with one that does not allow what they ask."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pyarrow.flight as flight

import dovetail
from harness import Server
from raw import Raw, messages
from refusals import TABLE, is_unharmed, refused, refused_raw

Start = Callable[..., Server]


def test_a_missing_or_wrong_token_is_unauthenticated(start: Start, token_file: Path) -> None:
    server = start(devices="host:1", token_file=token_file, host_memory="256MiB")
    with refused(dovetail.Unauthenticated, "token"):
        server.connect()
    for wrong in ("ann", "ann-writes-more", "ROOT", ""):
        with refused(dovetail.Unauthenticated, "token"):
            server.connect(token=wrong)
    connection = flight.connect(server.uri)
    with refused(dovetail.Unauthenticated, "Bearer"), dovetail.errors.translated():
        connection.get_flight_info(flight.FlightDescriptor.for_path("a"))
    with Raw(server.address) as raw, refused_raw(grpc.StatusCode.UNAUTHENTICATED, "Bearer"):
        raw.put(messages(TABLE, "a"))
    with server.connect(token="ann-writes") as client:
        is_unharmed(server, client)


def test_a_reader_may_not_write_and_a_tenant_may_not_use_foreign_tickets(start: Start, token_file: Path) -> None:
    server = start(devices="host:1", token_file=token_file, host_memory="256MiB")
    with (
        server.connect(token="ann-writes") as ann,
        server.connect(token="ann-reads") as reader,
        server.connect(token="bob-writes") as bob,
        server.connect(token="root") as root,
    ):
        ann.put("a", TABLE)
        used = server.arena_used()
        assert reader.get("a").num_rows == 3
        with refused(dovetail.PermissionDenied, "writer", '"b"'):
            reader.put("b", TABLE)
        with refused(dovetail.PermissionDenied, "writer", '"a"'):
            reader.drop("a")
        with refused(dovetail.PermissionDenied, "writer", '"b"'):
            reader.join("a", "a", on="k", into="b")
        job = ann.submit("a", "a", on="k", columns=["k"])
        job.wait()
        # A job of another tenant is not to be seen, nor is its ticket good for anybody else.
        with refused(dovetail.NotFound, f"no job {job.id}"):
            bob.job(job.id)
        assert job.id not in [status.id for status in bob.jobs()]
        assert job.id in [status.id for status in root.jobs()]
        ticket = job.result()._info.endpoints[0].ticket
        headers = flight.FlightCallOptions(headers=[(b"authorization", b"Bearer bob-writes")])
        with refused(dovetail.NotFound, f"no job {job.id}"), dovetail.errors.translated():
            flight.connect(server.uri).do_get(ticket, headers).read_all()
        job.cancel()
        is_unharmed(server, ann, used)


class Password(flight.ClientAuthHandler):
    """A handshake with a user name and a password, as older clients make it."""

    def __init__(self, password: str) -> None:
        super().__init__()
        self._password, self._token = password, b""

    def authenticate(self, outgoing: flight.ClientAuthSender, incoming: flight.ClientAuthReader) -> None:
        outgoing.write(flight.BasicAuth("anyone", self._password).serialize())
        self._token = incoming.read()

    def get_token(self) -> bytes:
        return self._token


def test_a_handshake_takes_the_token_as_the_password(start: Start, token_file: Path) -> None:
    server = start(devices="host:1", token_file=token_file, host_memory="256MiB")
    connection = flight.connect(server.uri)
    header = connection.authenticate_basic_token("anyone", "ann-reads")
    assert header == (b"authorization", b"Bearer ann-reads")
    assert list(connection.list_flights(options=flight.FlightCallOptions(headers=[header]))) == []
    with refused(dovetail.Unauthenticated, "the token is not known"), dovetail.errors.translated():
        connection.authenticate_basic_token("ann-reads", "anyone")
    connection = flight.connect(server.uri)
    connection.authenticate(Password("ann-reads"))
    assert list(connection.list_flights()) == []
    with refused(dovetail.Unauthenticated, "the token is not known"), dovetail.errors.translated():
        flight.connect(server.uri).authenticate(Password("anyone"))
    # Without credentials, nothing but the handshake is served.
    with refused(dovetail.Unauthenticated, "any user name with the token"), dovetail.errors.translated():
        list(flight.connect(server.uri).list_flights())


def test_a_server_without_tokens_accepts_any_password(start: Start) -> None:
    server = start(devices="host:1", host_memory="256MiB")
    for password in ("", "x", "größe"):
        connection = flight.connect(server.uri)
        connection.authenticate(Password(password))
        assert list(connection.list_flights()) == []
        header = connection.authenticate_basic_token("anyone", password)
        assert header[0] == b"authorization" and len(header[1]) > len(b"Bearer ")
        assert list(flight.connect(server.uri).list_flights(options=flight.FlightCallOptions(headers=[header]))) == []
