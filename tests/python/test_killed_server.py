"""A server that is killed, stuck, or none at all: the client soon says what happened and what to do."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import dovetail
from dovetail import _connection, _result
from harness import WAIT_SECONDS, Server, binary
from proxy import Proxy

Start = Callable[..., Server]

BROKE = ["the connection to the server broke", "the server has ended", "a proxy", "start again"]


@contextmanager
def unavailable(words: list[str], seconds: float = WAIT_SECONDS) -> Iterator[None]:
    """Expects the error of a server that is gone, with these words, and no later than that."""
    start = time.monotonic()
    with pytest.raises(dovetail.Unavailable) as caught:
        yield
    assert time.monotonic() - start < seconds
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {str(caught.value)!r}"
    for noise in ("Flight returned", "gRPC", "debug context"):
        assert noise not in str(caught.value), str(caught.value)


def is_gone(client: dovetail.Client) -> None:
    """What is asked later is answered at once: nothing is there any more."""
    # The first to ask on each connection may be the one to find that it broke.
    for _ in range(10):
        with pytest.raises(dovetail.Unavailable) as caught:
            client.tables()
        if "cannot reach a server" in str(caught.value):
            break
    with unavailable(["cannot reach a server at 127.0.0.1:", "Connection refused", "`dovetail serve` starts one"]):
        client.tables()


def many(client: dovetail.Client, rows: int) -> None:
    """A table whose join with itself has rows * rows rows."""
    client.put("many", pa.table({"k": np.zeros(rows, np.int64), "v": np.arange(rows)}))


@pytest.mark.parametrize("streams", [1, 3])
def test_a_server_killed_during_an_upload_is_distinguished_from_a_refusal(start: Start, streams: int) -> None:
    server = start(devices="host:1", host_memory="1GiB")
    batch = pa.record_batch({"k": np.arange(1000)})

    def batches() -> Iterator[pa.RecordBatch]:
        while True:
            yield batch
            # The memory must not be full before the first acknowledgements are here.
            time.sleep(0.001)

    def progress(state: dovetail.UploadProgress) -> None:
        if state.rows > 20 * batch.num_rows:
            server.kill()

    with server.connect() as client:
        # Of several streams one may still have been connecting.
        with unavailable(BROKE if streams == 1 else []):
            client.put("half", batches(), streams=streams, progress=progress)
        is_gone(client)


@pytest.mark.parametrize("endpoints", [1, 4])
def test_a_server_killed_while_a_result_is_read_is_an_error_and_not_the_end_of_rows(
    start: Start, endpoints: int
) -> None:
    server = start(devices="host:1", host_memory="1GiB", endpoints=endpoints)
    with server.connect() as client:
        many(client, 20_000)
        reader = client.join("many", "many", on="k", retain_seconds=0).reader()
        assert reader.read_next_batch().num_rows > 0
        server.kill()
        # Of several endpoints one may still have been connected to.
        with unavailable(BROKE if endpoints == 1 else []):
            for _ in reader:
                pass
        is_gone(client)


def test_a_server_killed_while_a_table_is_fetched_is_an_error(start: Start) -> None:
    server = start(devices="host:1", host_memory="1GiB", endpoints=1)
    with server.connect() as client:
        many(client, 20_000)
        # 400 million rows, more than can be fetched before the server is dead.
        result = client.join("many", "many", on="k", retain_seconds=0)

        def progress(state: dovetail.FetchProgress) -> None:
            if state.rows > 0:
                server.kill()

        with unavailable(BROKE):
            result.table(progress=progress)


def test_a_server_killed_while_a_job_is_waited_for_is_an_error(start: Start) -> None:
    server = start(devices="host:1", host_memory="1GiB")
    with server.connect() as client:
        many(client, 20_000)
        result = client.join("many", "many", on="k", retain_seconds=0)
        with unavailable([]):
            # Between two questions the connection is seen to be gone before anything is asked on it.
            result.wait(progress=lambda _: server.kill())
        is_gone(client)


def test_a_waiting_call_notices_a_stuck_server(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    # As a host without power: the connection is there, and nothing ever comes.
    monkeypatch.setattr(_connection, "KEEPALIVE_SECONDS", 1)
    # A server that is alive may take a moment on a busy machine.
    monkeypatch.setattr(_connection, "KEEPALIVE_TIMEOUT_SECONDS", 5)
    server = start(devices="host:1", host_memory="1GiB")
    with server.connect() as client:
        server.process.send_signal(signal.SIGSTOP)
        try:
            stat = Path(f"/proc/{server.process.pid}/stat")
            server.wait_for(lambda: stat.read_text().rpartition(") ")[2].startswith("T"), "the server to stand still")
            with unavailable(BROKE):
                client.tables()
        finally:
            server.process.send_signal(signal.SIGCONT)

        def answers() -> bool:
            try:
                return len(client.tables()) == 0
            except dovetail.Unavailable:
                # gRPC tries again to connect after a while, and says so in the meantime.
                return False

        server.wait_for(answers, "the server to answer again")


def test_a_server_that_never_answers_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"grpc://127.0.0.1:{silent.getsockname()[1]}"
        expected = [uri.removeprefix("grpc"), "within 0.5 s", "is not Dovetail", "connect(timeout=...)"]
        with unavailable(expected):
            dovetail.connect(uri, timeout=0.5)


def test_pings_of_a_waiting_call_are_tolerated(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's own servers end a connection that pings more often than every five minutes, unless told otherwise."""
    monkeypatch.setattr(_connection, "KEEPALIVE_SECONDS", 1)
    server = start(devices="host:1", host_memory="1GiB")
    batch = pa.record_batch({"k": np.arange(3)})

    def batches() -> Iterator[pa.RecordBatch]:
        yield batch
        # Pings go out after each second of silence; five of them are more than a strict server would take.
        time.sleep(6)
        yield batch

    with server.connect() as client:
        assert client.put("slow", batches()) == 2 * batch.num_rows


def test_a_stream_that_a_proxy_cuts_is_not_blamed_on_the_server_alone(start: Start, tmp_path: Path) -> None:
    """Regression test: the sentence was about the server only, or gRPC's own."""
    server = start(devices="host:1", host_memory="256MiB")
    both = ["the server has ended", "a proxy between client and server"]
    with server.connect() as direct:
        direct.put("t", pa.table({"k": np.arange(1_000_000)}))
    cuts: dict[str | int, list[str]] = {cut: both for cut in ("close", "end", 0, 2, 7, 8, 11)}
    for cut, words in (cuts | {f"http:{status}": [*both, f"HTTP status {status}"] for status in (413, 504)}).items():
        with Proxy(server.address) as proxy, dovetail.connect(proxy.uri, timeout=WAIT_SECONDS) as client:
            info = client._table_info("t")
            proxy.cut = cut
            with unavailable(words):
                _result.fetch(client._connections, info)
            # pyarrow takes a cancelled ListFlights (8) for Ctrl-C, and raises KeyboardInterrupt.
            if cut != 8:
                with unavailable(words):
                    client.tables()
    for cut, words in cuts.items():
        with Proxy(server.address, cut, after_bytes=1 << 20) as proxy:
            command = [binary(), "get", "t", "-o", tmp_path / "t.arrow", "--server", proxy.uri]
            done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, f"{cut}: {done.stderr}"
        assert all(word in done.stderr for word in words), f"{cut}: {done.stderr}"
        assert list(tmp_path.glob("t.arrow*")) == []
