"""The examples in Go, Java, Node and Rust, run against the real server: what they read is what pyarrow reads.

``DOVETAIL_OTHER_CLIENTS`` says what to do with those in Go, Java and Node, whose libraries come from the network:
``off``, the default, skips them; ``auto`` runs those whose tool chain and libraries can be had; ``require`` runs all,
and fails when something is missing. The example in Rust is built with the server, from the same libraries, and always
run.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.flight as flight
import pytest

import dovetail
from harness import ROOT, Server, binary

MODES = ("off", "auto", "require")
MODE = os.environ.get("DOVETAIL_OTHER_CLIENTS", "off")

ORDERS = "example_orders"
LINES = "example_lineitem"

# The first build fetches the libraries, and compiles gRPC and Arrow.
BUILD_SECONDS = 900
RUN_SECONDS = 120

# The example in Rust sends no rows to joins.
STREAMING = pytest.mark.parametrize("example", ["go", "java", "node"], indirect=True)

# What the tools say when a library is neither in their caches nor to be had.
NO_NETWORK = re.compile(r"Could not (resolve|transfer)|could not be resolved|Unknown host|offline mode", re.IGNORECASE)


@pytest.fixture(params=["go", "java", "node", "rust"])
def example(request: pytest.FixtureRequest) -> list[str]:
    """The command that runs an example; the server's address is to be added."""
    assert MODE in MODES, f"DOVETAIL_OTHER_CLIENTS is {MODE!r}; it may be {', '.join(MODES)}"
    if MODE == "off" and request.param != "rust":
        pytest.skip("downloads libraries; DOVETAIL_OTHER_CLIENTS=auto or require runs it")
    command = BUILDERS[request.param]()
    if isinstance(command, Missing):
        _missing(str(command))
    return command


def test_an_example_joins_as_pyarrow_does(server: Server, client: dovetail.Client, example: list[str]) -> None:
    # Twice, because examples are: the second run replaces the tables of the first.
    for _ in range(2):
        outcome = _run(example, server.uri)
        assert outcome.returncode == 0, outcome.stderr
        assert outcome.stderr == ""
    said = re.fullmatch(r"rows=(\d+) checksum=(\d+)\n", outcome.stdout)
    assert said, outcome.stdout

    # From what the example uploaded, by another engine.
    orders, lines = _read(server, ORDERS), _read(server, LINES)
    assert _types(orders) == {"o_orderkey": pa.int64(), "o_orderpriority": pa.string()}
    assert _types(lines) == {"l_orderkey": pa.int64(), "l_quantity": pa.int64()}
    assert (orders.num_rows, lines.num_rows) == (10_000, 100_000)
    assert (int(said[1]), int(said[2])) == _totals(orders, lines)


@STREAMING
def test_an_example_joins_rows_that_it_sends(server: Server, client: dovetail.Client, example: list[str]) -> None:
    earlier = {job.id for job in client.jobs()}
    outcome = _run(example, "stream", server.uri)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stderr == ""
    said = re.fullmatch(r"answer rows=(\d+) checksum=(\d+)\nrows=(\d+) checksum=(\d+)\n", outcome.stdout)
    assert said, outcome.stdout

    # The lines are in no table.
    assert [table.name for table in client.tables()] == [ORDERS]
    orders = _read(server, ORDERS)
    numbers = range(100_000)
    lines = pa.table(
        {"l_orderkey": [line * 8_111 % 12_000 for line in numbers], "l_quantity": [line % 50 + 1 for line in numbers]}
    )
    assert (int(said[1]), int(said[2])) == _totals(orders, lines[:20])
    assert (int(said[3]), int(said[4])) == _totals(orders, lines)
    # The question and all lines, in one call that ended well.
    (job,) = (job for job in client.jobs() if job.id not in earlier)
    assert (job.state, job.rows) == ("complete", int(said[1]) + int(said[3]))


@STREAMING
def test_an_example_reports_a_refusal_of_the_rows_that_it_sends(
    start: Callable[..., Server], example: list[str]
) -> None:
    # Enough host memory for the table, and too little on the device.
    server = start(host_memory="64MiB", devices="host:1", device_memory="256KiB")
    outcome = _run(example, "stream", server.uri)
    assert outcome.returncode == 1
    assert outcome.stdout == ""
    assert f"streaming lines to {server.uri}" in outcome.stderr
    assert re.search(r"needs .+ of device memory, .+ raise the server's --device-memory", outcome.stderr), (
        outcome.stderr
    )


def test_an_example_reports_a_refusal_of_the_server(start: Callable[..., Server], example: list[str]) -> None:
    # Enough for the smaller table only: the server refuses while the example sends the other.
    server = start(host_memory="1MiB", devices="host:1", device_memory="1MiB")
    outcome = _run(example, server.uri)
    assert outcome.returncode == 1
    assert outcome.stdout == ""
    assert f"uploading {LINES}" in outcome.stderr
    assert re.search(r"needs .+ of host memory, .+ raise the server's --host-memory", outcome.stderr), outcome.stderr


def test_an_example_reports_that_no_server_listens(example: list[str]) -> None:
    with socket.socket() as taken:
        # Bound and not listening: nobody else gets the port, and who connects to it is refused.
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        outcome = _run(example, f"grpc://{address}")
    assert outcome.returncode == 1
    assert outcome.stdout == ""
    assert address in outcome.stderr
    assert "refused" in outcome.stderr.lower()


def test_an_example_prints_its_usage(example: list[str]) -> None:
    outcome = _run(example)
    assert outcome.returncode == 2
    assert outcome.stderr.startswith("usage: ")


class Missing(str):
    """What this machine lacks, and so why an example cannot be built."""


def _missing(what: str) -> NoReturn:
    if MODE == "require":
        pytest.fail(f"DOVETAIL_OTHER_CLIENTS=require, but {what}")
    pytest.skip(what)


@cache
def _go() -> list[str] | Missing:
    folder = ROOT / "clients" / "go"
    if not shutil.which("go"):
        return Missing("there is no `go`")
    fetched = _tool(["go", "mod", "download"], folder)
    if fetched.returncode:
        return Missing(f"`go mod download` failed: {_output(fetched)}")
    built = _tool(["go", "build", "-o", "join"], folder)
    assert built.returncode == 0, _output(built)
    vetted = _tool(["go", "vet", "."], folder)
    assert vetted.returncode == 0, _output(vetted)
    return [str(folder / "join")]


@cache
def _java() -> list[str] | Missing:
    folder = ROOT / "clients" / "java"
    for tool in ("java", "mvn"):
        if not shutil.which(tool):
            return Missing(f"there is no `{tool}`")
    # Without the network first: when all is in the cache, that is all there is to do.
    maven = ["mvn", "--batch-mode", "--no-transfer-progress", "--quiet"]
    built = _tool([*maven, "--offline", "package"], folder)
    if built.returncode and NO_NETWORK.search(_output(built)):
        built = _tool([*maven, "package"], folder)
        if built.returncode and NO_NETWORK.search(_output(built)):
            return Missing(f"`mvn package` cannot fetch what it needs: {_output(built)}")
    assert built.returncode == 0, _output(built)
    return ["java", "-jar", str(folder / "target" / "join.jar")]


@cache
def _node() -> list[str] | Missing:
    folder = ROOT / "clients" / "node"
    for tool in ("node", "npm"):
        if not shutil.which(tool):
            return Missing(f"there is no `{tool}`")
    fetched = _tool(["npm", "ci", "--no-audit", "--no-fund", "--prefer-offline"], folder)
    if fetched.returncode:
        return Missing(f"`npm ci` failed: {_output(fetched)}")
    return ["node", str(folder / "join.mjs")]


@cache
def _rust() -> list[str] | Missing:
    path = binary().parent / "join"
    if not path.exists():
        return Missing(f"{path} is not there; build it with `cargo build -p dovetail-example`")
    return [str(path)]


BUILDERS: dict[str, Callable[[], list[str] | Missing]] = {"go": _go, "java": _java, "node": _node, "rust": _rust}


def _tool(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=BUILD_SECONDS)


def _output(outcome: subprocess.CompletedProcess[str]) -> str:
    return (outcome.stdout + outcome.stderr).strip()


def _run(example: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*example, *arguments], capture_output=True, text=True, timeout=RUN_SECONDS)


def _read(server: Server, table: str) -> pa.Table:
    with flight.connect(server.uri) as client:
        info = client.get_flight_info(flight.FlightDescriptor.for_path(table))
        return pa.concat_tables(client.do_get(endpoint.ticket).read_all() for endpoint in info.endpoints)


def _totals(orders: pa.Table, lines: pa.Table) -> tuple[int, int]:
    """Rows and checksum of the join, by pyarrow."""
    joined = lines.join(orders, "l_orderkey", "o_orderkey", join_type="inner")
    assert 0 < joined.num_rows < lines.num_rows
    return joined.num_rows, pc.sum(pc.multiply(joined["l_orderkey"], joined["l_quantity"])).as_py()


def _types(table: pa.Table) -> dict[str, pa.DataType]:
    return {field.name: field.type for field in table.schema}
