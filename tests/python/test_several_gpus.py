"""What is measured on several GPUs: parts that go on where they were left, and what only they use of the benchmarks."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from harness import ROOT, binary
from test_benches import lines_of_benchmark


def several(folder: Path, *arguments: str, code: int = 0) -> str:
    script = [sys.executable, str(ROOT / "benches" / "several_gpus.py"), "--devices", "host:2", "--scale", "1e-5"]
    env = {**os.environ, "DOVETAIL_BIN": str(binary())}
    command = [*script, "--folder", str(folder), *arguments]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == code, ran.stdout + ran.stderr
    return ran.stdout


def lines_of(folder: Path, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_parts_go_on_where_they_were_left(tmp_path: Path) -> None:
    parts = ["--parts", "gangs-1+1", "b-1"]
    # A part that is late stops no other, and one that lacks memory says how much.
    said = several(tmp_path, *parts, "--minutes", "0.002", "--host-memory", "0.5", code=1)
    assert "of host memory, and lacks " in said and "1 out of time, 1 skipped, 0 to do" in said, said
    outcomes = [(line["part"], line["outcome"]) for line in lines_of(tmp_path, "several_gpus")]
    assert outcomes == [("gangs-1+1", "out of time"), ("b-1", "skipped")]

    said = several(tmp_path, *parts, code=1)
    assert "gangs-1+1: out of time before" in said and "b-1: passed after" in said, said
    joins = lines_of(tmp_path, "gangs")
    assert {(line["workload"], line["build_rows"]) for line in joins} == {("hmg-b", 10_000)}
    assert {line["ranks"] for line in joins} == {1, 2} and {line["count"] for line in joins} == {True, False}
    assert not (tmp_path / "gang_clients.jsonl").exists()

    said = several(tmp_path, *parts, "--again")
    assert "gangs-1+1: passed after" in said and "b-1: passed before" in said, said
    assert [line["case"] for line in lines_of(tmp_path, "gang_clients")] == ["gang of 1 alone", "gangs alone"]

    shown = several(tmp_path, "--list").splitlines()
    ended = dict(line.split()[:2] for line in shown)
    assert (ended["gangs-1+1"], ended["b-1"], ended["b-2"]) == ("passed", "passed", "to")
    assert all(len(line.split()) > 4 for line in shown), "each part says what it is for"


def test_a_total_time_begins_no_part_after_its_end(tmp_path: Path) -> None:
    said = several(tmp_path, "--parts", "b-1", "--total", "0.1")
    assert "b-1: not begun" in said and "1 to do" in said, said
    assert not (tmp_path / "several_gpus.jsonl").exists()


@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_simulated_machine_has_as_many_devices_as_were_measured(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benches"))
    machine = tomllib.loads(importlib.import_module("several_gpus").topology_of(count))
    names = [device["name"] for device in machine["device"]]
    assert names == [f"host:{index}" for index in range(count)]
    ends = {end for link in machine["link"] for end in link["between"]}
    nodes = {node["name"] for kind in ("device", "switch", "socket") for node in machine[kind]}
    assert set(names) <= ends <= nodes


def test_gangs_of_other_sizes_are_measured_alone_and_at_once(tmp_path: Path) -> None:
    size = ["--host-memory", "256MiB", "--gang-rows-log2", "10", "--seconds", "0.2"]
    clients = ["--devices", "host:3", "--gang-devices", "2", "1", "--small-clients", "0"]
    lines = lines_of_benchmark("gang_clients", tmp_path, *size, *clients)
    kinds = ["gang of 2", "gang of 1"]
    assert [line["case"] for line in lines] == [*(f"{kind} alone" for kind in kinds), "gangs alone"]
    assert [[kind for kind in kinds if kind in line] for line in lines] == [*([kind] for kind in kinds), kinds]
    assert all(line[kind]["joins"] > 0 for line in lines for kind in kinds if kind in line)


def test_joins_on_some_numbers_of_devices_only(tmp_path: Path) -> None:
    options = ["--devices", "host:3", "--host-memory", "256MiB", "--runs", "1", "--no-floors", "--counted-only"]
    join = ["--workloads", "narrow", "--sizes", "8:10", "--ranks", "1", "3", "--distributions", "hash"]
    lines = lines_of_benchmark("gangs", tmp_path, *options, *join)
    asked = [(line["ranks"], line["distribution"]) for line in lines if not line["is_chosen"]]
    assert asked == [(1, "alone"), (3, "hash")]
    drawn = ["--devices", "host:3", "--host-memory", "256MiB", "--draw", "1", "--repeat", "1", "--build-log2", "6", "7"]
    [line] = lines_of_benchmark("sets", tmp_path, *drawn, "--ranks", "1", "3")
    assert {"1", "3 broadcast", "3 hash"} <= line["seconds"].keys() | line["refused"].keys()
    assert not any(name.startswith("2") for name in line["refused"])


def test_a_device_that_is_killed_is_back_and_takes_part_in_gangs(tmp_path: Path) -> None:
    clients = ["--devices", "host:2", "--gang-clients", "1", "--small-clients", "1", "--before", "1", "--after", "20"]
    size = ["--host-memory", "256MiB", "--gang-rows-log2", "14", "--small-rows-log2", "6"]
    [line] = lines_of_benchmark("lost_device", tmp_path, *clients, *size)
    assert line["lost"] == "host:1" and 0 < line["back_seconds"] <= line["gang"]["all_devices_seconds"]
    for kind in ("gang", "small"):
        assert line[kind]["right_before"] > 0 and line[kind]["right_after"] > 0
    # Both devices are asked for, and one of them is gone for a second at least.
    assert line["gang"]["failed"]["Unavailable"] > 0
