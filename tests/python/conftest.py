"""Fixtures: real servers, and clients of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import dovetail
from harness import GANG, GPUS, LONG, Server, clean

# The same random tables in every run, so that nobody's change fails by chance.
SEED = 20261121


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed",
        type=int,
        default=int(os.environ.get("DOVETAIL_SEED") or SEED),
        help="seed of the random tests (default: DOVETAIL_SEED, or a fixed one)",
    )
    seconds = os.environ.get("DOVETAIL_ORACLE_SECONDS") or ("1800" if LONG else None)
    parser.addoption(
        "--oracle-seconds",
        type=float,
        default=float(seconds) if seconds else None,
        help="how long the random joins go on (default: as long as a fixed number of cases takes)",
    )


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.getoption('--seed')} (repeat with --seed, or DOVETAIL_SEED)"


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--seed")


@pytest.fixture(scope="session")
def long_run() -> bool:
    return LONG


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers with settings of the test's own; all must end well."""
    servers: list[Server] = []

    def start_one(**settings: object) -> Server:
        server = Server(tmp_path / f"server-{len(servers)}", **settings)
        servers.append(server)
        return server

    yield start_one
    for server in servers:
        if server.process.returncode is None:
            server.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two small devices, or GPUs, shared by the tests of a file, which must leave it as they found it."""
    devices = {"devices": f"host:{max(GANG, 2)}", "device_memory": "64MiB"}
    if GPUS:
        devices = {"devices": f"cuda:{GPUS}", "device_memory": "512MiB", "device_cache": "0"}
    server = Server(tmp_path_factory.mktemp("server"), host_memory="1GiB", **devices)
    yield server
    server.stop()


@pytest.fixture
def client(server: Server) -> Iterator[dovetail.Client]:
    """A client of the shared server. When the test is over, so are its tables and jobs, and the memory is free."""
    with server.connect() as client:
        yield client
        clean(server, client)
