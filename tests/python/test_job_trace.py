"""The trace that a server writes of its joins (`--job-trace`)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import dovetail
from harness import Server


def test_a_server_appends_a_line_for_each_join_that_it_accepts(start: Callable[..., Server], tmp_path: Path) -> None:
    trace = tmp_path / "jobs.jsonl"
    trace.write_text('{"an": "earlier line"}\n')
    began = time.time()
    server = start(devices="host:1", job_trace=trace)
    with server.connect() as client:
        keys = pa.array(range(1000), pa.int32())
        client.put("build", pa.table({"k": keys, "unread": keys, "b": pa.array(range(1000), pa.int64())}))
        client.put("probe", pa.table({"k": keys, "name": ["four"] * 1000}))
        client.join("build", "probe", on="k", columns=["k", "b", "name"], priority=3).table()
        with pytest.raises(dovetail.NotFound):
            client.join("build", "nothing", on="k")
    server.stop()
    earlier, line = map(json.loads, trace.read_text().splitlines())
    assert earlier == {"an": "earlier line"}
    assert began <= line.pop("at") <= time.time()
    measured = line.pop("measured")
    assert line.pop("client") >= 1
    assert measured["waited"] >= 0 and 0 < measured["ran"] < time.time() - began
    name_bytes = line["right"]["payload_bytes"].pop()
    assert 4 <= name_bytes < 9, "text with its offset"
    assert line == {
        "tenant": "",
        "weight": 1.0,
        "priority": 3,
        "how": "inner",
        "left": {"rows": 1000, "key_bytes": [4.0], "payload_bytes": [8.0], "distinct": 1000.0},
        "right": {"rows": 1000, "key_bytes": [4.0], "payload_bytes": [], "distinct": 1000.0},
        "count": False,
        "devices": "any",
    }


def test_lines_tell_which_joins_are_of_one_client(start: Callable[..., Server], tmp_path: Path) -> None:
    trace = tmp_path / "jobs.jsonl"
    server = start(devices="host:1", job_trace=trace)
    keys = pa.table({"k": pa.array(range(100), pa.int32())})

    def join(priority: int) -> None:
        client.join("build", "probe", on="k", priority=priority).table()

    with server.connect() as client:
        client.put("build", keys)
        client.put("probe", keys)
        join(1)
        join(2)
    with server.connect() as client:
        join(3)
    server.stop()
    lines = sorted(map(json.loads, trace.read_text().splitlines()), key=lambda line: line["priority"])
    first, second, other = (line["client"] for line in lines)
    assert first == second != other
