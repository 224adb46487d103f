"""The configurations of proxies in docker/proxies, in front of a server that speaks TLS.

A test of a proxy that is not installed is skipped, except in `./test long proxies`.
"""

from __future__ import annotations

import re
import shutil
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
from harness import LONG, ROOT, WAIT_SECONDS, Server, binary, slow_devices
from test_tls import Authority

# An archive made by ./bundle has tests/python, and neither these files nor the library.
yaml = pytest.importorskip("yaml")

PROXIES = ROOT / "docker" / "proxies"

pytestmark = pytest.mark.skipif(not PROXIES.exists(), reason="this is no clone of the repository")

Start = Callable[..., Server]

# Seconds that a proxy waits for an answer in its usual setting: nginx and Envoy by their manuals (grpc_read_timeout;
# stream_idle_timeout), HAProxy by the file of Debian's package, since it has no default of its own.
DEFAULT_SECONDS = {"nginx": 60, "haproxy": 50, "envoy": 300}

# What the configurations name, and what is found in its place in a test.
PLACES = {
    "nginx": {
        "8443": "{port}",
        "/etc/nginx/proxy.crt": "{folder}/proxy.pem",
        "/etc/nginx/proxy.key": "{folder}/proxy-key.pem",
        "/etc/nginx/authority.crt": "{folder}/ca.pem",
        "dovetail.example.org:8815": "{server}",
        "dovetail.example.org": "localhost",
        "grpc_read_timeout 60s": "grpc_read_timeout {seconds}s",
    },
    "haproxy": {
        ":8443": "127.0.0.1:{port}",
        "/etc/haproxy/proxy.pem": "{folder}/both.pem",
        "/etc/haproxy/authority.crt": "{folder}/ca.pem",
        "dovetail.example.org:8815": "{server}",
        "dovetail.example.org": "localhost",
        "timeout server 60s": "timeout server {seconds}s",
    },
}
COMMANDS = {
    "nginx": ["nginx", "-p", "{folder}", "-c", "{file}", "-e", "stderr"],
    "haproxy": ["haproxy", "-f", "{file}"],
}
MAIN = {
    "nginx": "daemon off;\npid {folder}/nginx.pid;\nevents {{}}\nhttp {{\naccess_log off;\n{text}}}\n",
    "haproxy": "{text}",
}


def configuration(name: str) -> str:
    [file] = PROXIES.glob(f"{name}.*")
    return file.read_text()


@contextmanager
def proxy(name: str, server: Server, authority: Authority, folder: Path, seconds: int = 60) -> Iterator[str]:
    """Runs a proxy in front of a server, with another time-out for answers. Gives the address of the proxy."""
    program = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if not program:
        assert not LONG, f"{name} is not installed"
        pytest.skip(f"{name} is not installed")
    cert, key = authority.issue("proxy")
    (folder / "both.pem").write_bytes(cert.read_bytes() + key.read_bytes())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    values = {"port": port, "folder": folder, "server": server.address, "seconds": seconds}
    text = configuration(name)
    for place, other in PLACES[name].items():
        assert place in text, f"{name}: {place} is not in its configuration"
        text = text.replace(place, other.format(**values))
    file = folder / f"{name}.conf"
    file.write_text(MAIN[name].format(text=text, **values))
    command = [word.format(folder=folder, file=file) for word in COMMANDS[name]]
    log_path = folder / f"{name}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen([program, *command[1:]], stdout=log, stderr=log, cwd=folder)
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, log_path.read_text()
                time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"), "ca")


def tls(authority: Authority) -> dict[str, Path]:
    cert, key = authority.issue("server")
    return {"tls_cert": cert, "tls_key": key}


def folder_of(authority: Authority) -> Path:
    return authority.pem.parent


@pytest.mark.parametrize("name", sorted(PLACES))
def test_uploads_of_any_size_joins_and_streams_pass_a_proxy(start: Start, authority: Authority, name: str) -> None:
    server = start(devices="host:1", host_memory="512MiB", **tls(authority))
    rows = 1 << 20
    table = pa.table({"k": np.arange(rows), "v": np.random.default_rng(1).integers(0, 1 << 60, rows)})
    with (
        proxy(name, server, authority, folder_of(authority)) as address,
        dovetail.connect(f"grpc+tls://{address}", tls_root_certs=authority.pem, timeout=WAIT_SECONDS) as client,
    ):
        # 16 MiB, on one connection and on three.
        client.put("one", table)
        client.put("three", table, streams=3)
        assert client.get("one").equals(table)
        with client.join("one", "three", on="k") as result:
            assert result.table().num_rows == rows
        batches = table.slice(0, 10_000).to_batches(max_chunksize=1000)
        with client.stream_join("one", iter(batches), on="k") as streamed:
            assert streamed.read_all().num_rows == 10_000
        with pytest.raises(dovetail.NotFound, match="no table"):
            client.get("other")


@pytest.mark.parametrize("name", sorted(PLACES))
def test_a_reader_whose_join_is_queued_outlasts_the_time_out_of_a_proxy(
    start: Start, authority: Authority, tmp_path: Path, name: str
) -> None:
    def queued(keep_alive_seconds: int) -> int:
        server = start(
            topology=slow_devices(tmp_path, "1MB/s"),
            jobs_per_device=1,
            keep_alive_seconds=keep_alive_seconds,
            host_memory="256MiB",
            device_memory="64MiB",
            **tls(authority),
        )
        # Keys of 6 MB cross the link of 1 MB/s for the first join, while the second is queued.
        with server.connect(tls_root_certs=authority.pem) as client:
            client.put("slow", pa.table({"k": np.arange(700_000)}))
            client.put("small", pa.table({"k": [1, 2, 3]}))
            first = client.submit("slow", "slow", on="k", how="left_semi")
            uri = f"grpc+tls://{address_of(server)}"
            with dovetail.connect(uri, tls_root_certs=authority.pem, timeout=WAIT_SECONDS) as other:
                try:
                    return other.join("small", "small", on="k").table().num_rows
                finally:
                    first.cancel()

    stack: list[Iterator[str]] = []

    def address_of(server: Server) -> str:
        running = proxy(name, server, authority, folder_of(authority), seconds=3)
        stack.append(running)
        return running.__enter__()

    try:
        assert queued(keep_alive_seconds=1) == 3
        # Without batches in time, the proxy ends the call: it is not by luck that the reader is kept.
        with pytest.raises(dovetail.Error):
            queued(keep_alive_seconds=60)
    finally:
        for running in stack:
            running.__exit__(None, None, None)


def test_keep_alive_batches_come_within_half_of_the_usual_time_outs_of_proxies() -> None:
    text = subprocess.run([binary(), "serve", "--help"], check=True, capture_output=True, text=True).stdout
    [interval] = re.findall(r"--keep-alive-seconds.*?\[default: (\d+)\]", text, re.DOTALL)
    debian = Path("/etc/haproxy/haproxy.cfg")
    if debian.exists():
        [milliseconds] = re.findall(r"timeout server\s+(\d+)$", debian.read_text(), re.MULTILINE)
        assert int(milliseconds) == 1000 * DEFAULT_SECONDS["haproxy"]
    configured = {
        "nginx": re.findall(r"grpc_read_timeout (\d+)s", configuration("nginx")),
        "haproxy": re.findall(r"timeout server (\d+)s", configuration("haproxy")),
        "envoy": re.findall(r"stream_idle_timeout: (\d+)s", configuration("envoy")),
    }
    for name, [seconds] in configured.items():
        assert int(interval) < DEFAULT_SECONDS[name] / 2 and int(interval) < int(seconds) / 2, name


def test_the_configuration_of_envoy_has_no_limit_of_a_whole_answer_and_verifies_the_server() -> None:
    # No package has Envoy, so it is not run.
    resources = yaml.safe_load(configuration("envoy"))["static_resources"]
    [listener], [cluster] = resources["listeners"], resources["clusters"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    [host] = manager["route_config"]["virtual_hosts"]
    assert host["routes"][0]["route"] == {"cluster": cluster["name"], "timeout": "0s"}
    upstream = cluster["transport_socket"]["typed_config"]
    assert upstream["common_tls_context"]["alpn_protocols"] == ["h2"]
    assert upstream["common_tls_context"]["validation_context"]["trusted_ca"]
