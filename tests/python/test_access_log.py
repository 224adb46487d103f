"""The log, as an operator reads it: a line for each call, and in it who asked for what, and how it went."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import dovetail
from harness import Server


def test_each_call_has_one_line_that_describes_it(start: Callable[..., Server], tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("secret ann writer\n")
    server = start(devices="host:1", host_memory="256MiB", log_format="json", token_file=tmp_path / "tokens")
    with server.connect(token="secret") as client:
        client.put("a", {"k": [1, 2, 3]})
        with client.join("a", "a", on="k") as result:
            assert result.table().num_rows == 3
            first = result.job.id
        second = client.submit("a", "a", on="k", into="b")
        second.wait()
        assert client.count("a", "b", on="k") == 3
        client.explain("a", "b", on="k")
        client.drop("b")
        with pytest.raises(dovetail.NotFound):
            client.get("b")
    with pytest.raises(dovetail.Unauthenticated):
        server.connect(token="guess")
    server.stop()
    lines = [json.loads(line) for line in server.log().splitlines() if line.startswith("{")]
    calls = [line for line in lines if line.get("target") == "dovetail::access"]
    told = [(call["rpc"], call["command"], call["status"]) for call in calls if call["rpc"] != "DoGet"]
    # A line is written when the call's last byte is, which may be after the next call has begun.
    assert sorted(told) == sorted(
        [
            ("DoAction", "server_info", "OK"),
            ("DoPut", "a", "OK"),
            ("DoAction", "commit_upload a", "OK"),
            ("GetFlightInfo", f"join a a: job {first}", "OK"),
            ("DoAction", f"CancelFlightInfo job {first}", "OK"),
            ("GetFlightInfo", f"join a a into b: job {second.id}", "OK"),
            ("GetFlightInfo", f"count a b: job {second.id + 1}", "OK"),
            ("DoAction", f"CancelFlightInfo job {second.id + 1}", "OK"),
            ("DoAction", "explain join a b", "OK"),
            ("DoAction", "drop_table b", "OK"),
            ("GetFlightInfo", "b", "NOT_FOUND"),
            ("DoAction", "", "UNAUTHENTICATED"),
        ]
    )
    for call in calls:
        assert call["tenant"] == ("" if call["status"] == "UNAUTHENTICATED" else "ann"), call
        assert call["peer"].startswith("127.0.0.1:") and call["duration_ms"] >= 0, call
    assert sum(call["rows"] for call in calls if call["command"] == f"job {first}") == 3
    polls = {line["command"] for line in lines if line.get("target") == "dovetail::access::poll"}
    assert polls == {f"job {second.id}"}
