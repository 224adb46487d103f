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


def test_a_server_with_few_open_files_keeps_some_for_its_health_and_its_work(start: Start) -> None:
    server = start(devices="host:1", host_memory="256MiB", open_files=256)
    with server.connect() as client, ExitStack() as opened:
        client.put("t", {"k": [1, 2, 3]})
        for _ in range(300):
            opened.enter_context(connect(server.address))
        refused = r'^dovetail_connections_closed_total\{reason="limit"\}'
        server.wait_for(
            lambda: any(name.startswith("dovetail_connections_closed") for name in server.metrics()), "a refusal"
        )
        server.wait_for(lambda: server.metric(refused) >= 100, "the limit to be reached")
        assert is_alive(server)
        assert server.metric("^dovetail_connections$") < 256
        with client.join("t", "t", on="k") as result:
            assert result.table().num_rows == 3
        [line] = [line for line in server.log().splitlines() if "(--connection-limit)" in line]
        assert "a connection is refused, because all clients may have " in line
    server.wait_for(lambda: server.metric("^dovetail_connections$") == 0, "the connections to be closed")
    with server.connect() as client:
        assert client.get("t").num_rows == 3


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
