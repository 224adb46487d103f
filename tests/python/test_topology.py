"""A server on the devices and links of a topology file."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from harness import Server

# Two devices behind a switch that moves so little that what crosses it is seen in the phases.
TOPOLOGY = """
name = "two behind a switch"
[[socket]]
name = "cpu0"
[[switch]]
name = "plx"
[[device]]
name = "host:0"
threads = 1
memory = "64MiB"
[[device]]
name = "host:1"
threads = 1
memory = "32MiB"
[[link]]
between = ["cpu0", "plx"]
rate = "200MB/s"
[[link]]
between = ["plx", "host:0"]
rate = "10GB/s"
[[link]]
between = ["plx", "host:1"]
rate = "10GB/s"
"""


def test_joins_run_on_the_devices_of_a_file_and_over_its_links(start: Callable[..., Server], tmp_path: Path) -> None:
    file = tmp_path / "topology.toml"
    file.write_text(TOPOLOGY)
    server = start(topology=file, host_memory="1GiB")
    rows = 200_000
    keys = np.random.default_rng(1).permutation(rows)
    with server.connect() as client:
        assert [device["device"] for device in client.topology()["devices"]] == ["host:0", "host:1"]
        client.put("l", pa.table({"k": keys, "a": np.arange(rows)}))
        client.put("r", pa.table({"k": keys[::-1], "b": np.arange(rows)}))
        for device in ["host:0", "host:1"]:
            for strategy in ["hash", "radix-hash", "sort-merge"]:
                started = time.monotonic()
                table = client.join("l", "r", on="k", strategy=strategy, devices=[device]).table()
                # Two columns of eight bytes of each side at 200 MB in a second: a link only ever adds time.
                assert time.monotonic() - started >= 4 * 8 * rows / 200e6
                assert table.num_rows == rows
                assert pc.sum(pc.add(table["a"], table["b"])).as_py() == rows * (rows - 1)
