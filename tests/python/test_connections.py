"""Many connections, few open files, and tokens that are replaced: what the operator of a server meets."""

from __future__ import annotations

import resource
import signal
import socket
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dovetail
from harness import WAIT_SECONDS, Server

Start = Callable[..., Server]


def connect(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=WAIT_SECONDS)


def is_alive(server: Server) -> bool:
    with urllib.request.urlopen(f"{server.admin}/healthz", timeout=WAIT_SECONDS) as answer:
        return answer.read() == b"alive\n"


def closed(server: Server, reason: str) -> float:
    """How many connections the server has closed for a reason."""
    name = f'dovetail_connections_closed_total{{reason="{reason}"}}'
    return server.metrics().get(name, 0)


def test_a_server_with_few_open_files_keeps_some_for_its_health_and_its_work(start: Start) -> None:
    server = start(devices="host:1", host_memory="256MiB", open_files=256)
    with server.connect() as client, ExitStack() as opened:
        client.put("t", {"k": [1, 2, 3]})
        for _ in range(300):
            opened.enter_context(connect(server.address))
        server.wait_for(lambda: closed(server, "replaced") >= 100, "the limit to be reached")
        assert is_alive(server)
        assert server.metric("^dovetail_connections$") < 256
        with client.join("t", "t", on="k") as result:
            assert result.table().num_rows == 3
        [line] = [line for line in server.log().splitlines() if "(--connection-limit)" in line]
        assert "a connection takes the place of an older one without a call, because all clients may have " in line
    server.wait_for(lambda: server.metric("^dovetail_connections$") == 0, "the connections to be closed")
    with server.connect() as client:
        assert client.get("t").num_rows == 3


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    tokens = tmp_path / "tokens"
    tokens.write_text("ann-writes ann writer\nbob-writes bob writer\n")
    tokens.chmod(0o600)
    return tokens


def test_neither_strangers_nor_a_tenant_keep_another_tenant_out(start: Start, tenants: Path) -> None:
    """Regression test: clients without a token held every place for 15 minutes, and so did those of one tenant."""
    server = start(devices="host:1", host_memory="256MiB", token_file=tenants, connection_limit=40)
    own = [("grpc.use_local_subchannel_pool", 1)]
    ann_has = r'^dovetail_tenant_connections\{tenant="ann"\}'
    with ExitStack() as opened:
        clients = [
            opened.enter_context(flight.connect(f"grpc://{server.address}", generic_options=own)) for _ in range(120)
        ]
        strangers, of_ann = clients[:60], clients[60:]
        for client in strangers:
            with pytest.raises(flight.FlightUnauthenticatedError):
                list(client.list_flights())
        assert closed(server, "replaced") >= 60 - 40
        with server.connect(token="bob-writes") as bob:
            bob.put("t", {"k": [1, 2, 3]})
        # The tenant takes its half of the places, those of strangers among them.
        options = flight.FlightCallOptions(headers=[(b"authorization", b"Bearer ann-writes")])
        for at, client in enumerate(of_ann):
            try:
                assert len(list(client.list_flights(options=options))) == 1
                assert at < 20
            except flight.FlightUnavailableError:
                raise
            except pa.ArrowException as refusal:
                assert at >= 20 and 'tenant "ann" has 20 connections, and may have no more' in str(refusal), refusal
                assert "--tenant-connections" in str(refusal)
        assert server.metric(ann_has) == 20
        with server.connect(token="bob-writes") as bob, bob.join("t", "t", on="k") as result:
            assert result.table().num_rows == 3
        for client in of_ann[:20]:
            assert len(list(client.list_flights(options=options))) == 1
        assert is_alive(server)
    server.wait_for(lambda: server.metric("^dovetail_connections$") == 0, "the connections to be closed")
    with server.connect(token="ann-writes") as ann:
        assert ann.get("t").num_rows == 3


def test_a_server_without_open_files_waits_for_them(start: Start) -> None:
    """Regression test: it tried again without a pause, which took a core."""
    server = start(devices="host:1", host_memory="256MiB")
    pid = server.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    with connect(server.address):
        server.wait_for(lambda: "connections to --listen wait" in server.log(), "a line of the log")
        before = server.cpu_seconds()
        time.sleep(2)
        # Without pauses it would be two seconds, or as much of them as the machine gives.
        assert server.cpu_seconds() - before < 0.5
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        with server.connect() as client:
            assert len(client.tables()) == 0


def test_sighup_replaces_the_tokens_and_keeps_the_tables(start: Start, tmp_path: Path) -> None:
    """Regression test: it ended the server, and so did each change of a token."""
    tokens = tmp_path / "tokens"
    tokens.write_text("t0ken-one ann writer\nt0ken-two bob reader\n")
    tokens.chmod(0o600)
    server = start(devices="host:1", host_memory="256MiB", token_file=tokens)
    with server.connect(token="t0ken-one") as ann:
        ann.put("t", {"k": [1, 2, 3]})
        tokens.write_text("t0ken-new ann writer\nt0ken-two bob writer\n")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for(lambda: 'a token of tenant "ann" (writer, weight 1) is added' in server.log(), "the reload")
        with pytest.raises(dovetail.Unauthenticated, match="not known"):
            ann.tables()
    with server.connect(token="t0ken-new") as ann, server.connect(token="t0ken-two") as bob:
        assert ann.get("t").num_rows == 3
        bob.put("u", {"k": [1]})
        tokens.write_text("t0ken-three carl king\n")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for(lambda: 'unknown role "king"' in server.log(), "the reload to fail")
        assert server.metric("^dovetail_last_reload_failed$") == 1
        assert {table.name for table in ann.tables()} == {"t", "u"}
    log = server.log()
    assert 'a token of tenant "bob" (reader, weight 1) is now of tenant "bob" (writer, weight 1)' in log
    assert "t0ken" not in log, log
