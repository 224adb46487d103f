"""Tickets that are forged, outlived by their table, or expired."""

from __future__ import annotations

import time
from collections.abc import Callable

import pyarrow.flight as flight

import dovetail
from harness import Server
from refusals import TABLE, patched, refused

Start = Callable[..., Server]


def test_a_wrong_ticket_is_refused(server: Server, client: dovetail.Client) -> None:
    client.put("a", TABLE)
    connection = flight.connect(server.uri)
    ticket = connection.get_flight_info(flight.FlightDescriptor.for_path("a")).endpoints[0].ticket.ticket
    forged = [
        b"",
        b"a",
        ticket[:-1],
        ticket + b"x",
        *(patched(ticket, at, bytes([ticket[at] ^ 0x55])) for at in (0, 4, 20, len(ticket) - 2)),
    ]
    for bad in forged:
        with refused(dovetail.InvalidRequest, "ticket", "GetFlightInfo"), dovetail.errors.translated():
            connection.do_get(flight.Ticket(bad)).read_all()
    assert connection.do_get(flight.Ticket(ticket)).read_all().num_rows == 3


def test_a_ticket_of_a_table_that_was_replaced_or_dropped_is_refused(server: Server, client: dovetail.Client) -> None:
    client.put("a", TABLE)
    connection = flight.connect(server.uri)
    ticket = connection.get_flight_info(flight.FlightDescriptor.for_path("a")).endpoints[0].ticket
    client.put("a", TABLE, mode="replace")
    with refused(dovetail.FailedPrecondition, '"a" was replaced', "GetFlightInfo"), dovetail.errors.translated():
        connection.do_get(ticket).read_all()
    client.drop("a")
    with refused(dovetail.NotFound, 'no table "a"'), dovetail.errors.translated():
        connection.do_get(ticket).read_all()


def test_a_ticket_that_has_expired_is_not_found(start: Start) -> None:
    server = start(devices="host:1", ticket_seconds=1, host_memory="256MiB")
    with server.connect() as client:
        client.put("a", TABLE)
        used = server.arena_used()
        connection = flight.connect(server.uri)
        info = connection.get_flight_info(flight.FlightDescriptor.for_path("a"))
        time.sleep(1.5)
        with refused(dovetail.NotFound, "expired", "GetFlightInfo"), dovetail.errors.translated():
            connection.do_get(info.endpoints[0].ticket).read_all()
        # No fetch here: with tickets of a second, a slow machine could not make use of a good one.
        assert server.arena_used() == used
        assert [table.rows for table in client.tables()] == [3]
        assert client.put("next", TABLE) == 3 == client.drop("next")
        server.wait_for(lambda: server.arena_used() == used, f"host memory to be back at {used} bytes")
