"""A GPU that fails: what jobs, tables and the server make of it.

Runs with ``DOVETAIL_TEST_DEVICE=cuda`` only. The failures are deliberate: ``DOVETAIL_TEST_FAULT`` names a file, and
when that is there, the next kernel, copy or allocation fails in the way that the file says.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import dovetail
from harness import Server

pytestmark = pytest.mark.skipif(
    os.environ.get("DOVETAIL_TEST_DEVICE") != "cuda", reason="needs a GPU: DOVETAIL_TEST_DEVICE=cuda"
)

ROWS = 300_000


@pytest.fixture
def failing(start: Callable[..., Server], tmp_path: Path) -> tuple[Server, Path]:
    trigger = tmp_path / "fault"
    server = start(devices="cuda:1", host_memory="2GiB", env={"DOVETAIL_TEST_FAULT": str(trigger)})
    return server, trigger


def upload(client: dovetail.Client) -> None:
    keys = np.random.default_rng(1).permutation(ROWS)
    client.put("l", pa.table({"k": keys, "a": np.arange(ROWS)}))
    client.put("r", pa.table({"k": keys[::-1], "b": np.arange(ROWS)}))


def join(client: dovetail.Client) -> pa.Table:
    return client.join("l", "r", on="k", strategy="radix-hash").table()


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("launch-error", dovetail.InternalError),
        ("copy-error", dovetail.InternalError),
        ("out-of-memory", dovetail.Exhausted),
    ],
)
def test_a_failure_that_passes_costs_one_job(failing: tuple[Server, Path], fault: str, error: type[Exception]) -> None:
    server, trigger = failing
    with server.connect() as client:
        upload(client)
        assert join(client).num_rows == ROWS
        used = server.arena_used()
        trigger.write_text(fault)
        with pytest.raises(error, match="cuda:0"):
            join(client)
        assert not trigger.exists(), "the fault was injected"
        server.wait_for(lambda: server.device_used() == 0, "device memory to be free again")
        server.wait_for(lambda: server.arena_used() <= used, "the failed result to be gone")
        assert join(client).num_rows == ROWS
        assert server.is_ready()


def test_a_lost_gpu_is_out_of_service_and_the_server_lives(failing: tuple[Server, Path]) -> None:
    server, trigger = failing
    with server.connect() as client:
        upload(client)
        assert join(client).num_rows == ROWS
        trigger.write_text("illegal-access")
        with pytest.raises(dovetail.Unavailable, match="cuda:0"):
            join(client)
        assert not trigger.exists(), "the fault was injected"
        # Later joins are refused at once, with what is to be done.
        with pytest.raises(dovetail.Unavailable):
            join(client)
        assert server.metric(r'^dovetail_device_up\{device="cuda:0"\}') == 0
        # Tables are there, and more can be uploaded.
        assert client.get("l").num_rows == ROWS
        client.put("more", pa.table({"x": [1, 2, 3]}))
        assert client.get("more").num_rows == 3
        server.wait_for(lambda: server.device_used() == 0, "device memory to be free again")
