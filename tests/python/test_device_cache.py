"""Columns that stay on a device: what a second join of the same tables brings in, as the metrics tell it.

On the CPU over an emulated link, and with ``DOVETAIL_TEST_DEVICE=cuda`` on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from harness import DEVICE_KIND as KIND
from harness import Server, slow_devices

ROWS = 100_000


def columns(server: Server, outcome: str) -> float:
    return server.metric(rf'^dovetail_device_cache_columns_total\{{device="{KIND}:0",outcome="{outcome}"\}}')


def kept_bytes(server: Server) -> float:
    return server.metric(r'^dovetail_device_memory_bytes\{.*kind="kept"')


def hit_bytes(server: Server) -> float:
    return server.metric(r"^dovetail_device_cache_hit_bytes_total")


def test_a_second_join_of_the_same_tables_copies_in_no_column(start: Callable[..., Server], tmp_path: Path) -> None:
    devices = {"devices": "cuda:1"} if KIND == "cuda" else {"topology": slow_devices(tmp_path, "1GB/s")}
    server = start(host_memory="1GiB", device_cache="64MiB", **devices)
    with server.connect() as client:
        keys = np.random.default_rng(2).permutation(ROWS)
        # A row without a match keeps the result from sharing columns that would then not be brought in at all.
        client.put("l", pa.table({"k": keys, "a": np.arange(ROWS)}))
        client.put("r", pa.table({"k": keys + 1, "b": np.arange(ROWS)}))
        assert kept_bytes(server) == 0
        first = client.join("l", "r", on="k", strategy="hash").table()
        missed, kept = columns(server, "miss"), kept_bytes(server)
        assert (missed > 0, columns(server, "hit"), hit_bytes(server)) == (True, 0, 0)
        assert kept >= 3 * 8 * ROWS
        second = client.join("l", "r", on="k", strategy="hash").table()
        assert (columns(server, "miss"), columns(server, "hit")) == (missed, missed)
        assert (kept_bytes(server), hit_bytes(server)) == (kept, kept)
        assert first.sort_by("k").equals(second.sort_by("k"))
        assert first.num_rows == ROWS - 1
        # A table that takes the place of another is another.
        client.put("r", pa.table({"k": keys, "b": np.arange(ROWS)}), mode="replace")
        assert client.join("l", "r", on="k", strategy="hash").table().num_rows == ROWS
        assert columns(server, "miss") > missed
        assert columns(server, "evicted") == 0
