"""`--stream-limit`: how many calls one connection may have under way at once."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from harness import Server
from raw import SERVICE, Raw

Start = Callable[..., Server]


def test_calls_over_the_limit_wait_for_their_turn_and_other_connections_do_not(start: Start) -> None:
    server = start(devices="host:1", host_memory="1GiB", stream_limit=1, endpoints=1)
    with server.connect() as client:
        client.put("many", pa.table({"k": np.zeros(20_000, np.int64), "v": np.arange(20_000)}))
        result = client.join("many", "many", on="k", retain_seconds=0)
        ticket = result._info.endpoints[0].ticket.serialize()
        with Raw(server.address) as one, Raw(server.address) as other:
            # A stream of 400 million rows, of which one message is read: it takes the connection.
            stream = one.stream("DoGet", ticket)
            assert next(stream)
            with pytest.raises(grpc.RpcError) as waited:
                one.unary("GetFlightInfo", flight.FlightDescriptor.for_path("many").serialize(), timeout=2)
            assert waited.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert other.unary("GetFlightInfo", flight.FlightDescriptor.for_path("many").serialize())
            stream.cancel()
            assert one.unary("GetFlightInfo", flight.FlightDescriptor.for_path("many").serialize())
        result.close()


def test_the_client_works_with_one_stream_per_connection(start: Start) -> None:
    server = start(devices="host:1", host_memory="1GiB", stream_limit=1, endpoints=4)
    table = {"k": np.arange(300_000)}
    with server.connect() as client:
        assert client.put("a", table, streams=3) == 300_000
        with client.join("a", "a", on="k") as result:
            assert result.table().num_rows == 300_000
            assert result.reader().read_all().num_rows == 300_000


def test_many_calls_on_one_connection_are_answered_one_after_another(start: Start) -> None:
    server = start(devices="host:1", host_memory="256MiB", stream_limit=2)
    with Raw(server.address) as raw:
        call = raw._channel.unary_stream(f"{SERVICE}ListFlights")
        answers = [call(b"", timeout=60) for _ in range(50)]
        assert [list(answer) for answer in answers] == [[]] * 50
