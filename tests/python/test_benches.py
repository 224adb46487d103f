"""What the benchmarks draw and work out of what was measured; they themselves take too long for a test."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow as pa
import pytest

from harness import ROOT, binary

RESULTS = ROOT / "benches" / "results" / "bench.jsonl"


def lines_of(suite: str, *asked: str) -> list[str]:
    """Of the recorded results, those of a suite's first join that was measured by these strategies."""
    found: dict[str, dict[str, str]] = {}
    with RESULTS.open() as lines:
        for line in lines:
            measured = json.loads(line)
            if measured["suite"] == suite and "seconds" in measured and measured["asked"] in asked:
                axis = measured["axis"]["field"]
                join = found.setdefault(f"{measured['device']} {measured['seed']} {measured[axis]}", {})
                join[measured["asked"]] = line
                if len(join) == len(asked):
                    return list(join.values())
    raise AssertionError(f"{RESULTS} has no join of suite {suite!r} by {', '.join(asked)}")


def plot(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benches" / "plot.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_plot_draws_each_suite_of_a_file(tmp_path: Path) -> None:
    results, into, strategies = tmp_path / "results.jsonl", tmp_path / "figures", ("hash", "radix-hash")
    results.write_text("".join(lines_of("wu-13", *strategies) + lines_of("choices", *strategies, "auto")))
    drawn = plot(results, "--into", into)
    assert drawn.returncode == 0, drawn.stderr
    expected = {"choices.svg", "wu-13.svg", "wu-13-phases.svg", "wu-13-memory.svg"}
    assert {path.name for path in into.iterdir()} == expected
    assert {Path(line).name for line in drawn.stdout.splitlines()} == expected
    for path in into.iterdir():
        root = ElementTree.parse(path).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg", path
        # Axes and what is drawn in them, not an empty page.
        assert len(root.findall(".//{http://www.w3.org/2000/svg}path")) > 10, path

    # Lines without a floor, and without memory of their own, as beside columns that were kept.
    bare = [
        json.loads(line) | {"floor_seconds": None, "device_memory_max_bytes": None}
        for line in lines_of("wu-13", *strategies)
    ]
    results.write_text("".join(json.dumps(line) + "\n" for line in bare))
    drawn = plot(results, "--into", tmp_path / "bare")
    assert drawn.returncode == 0, drawn.stderr
    assert {path.name for path in (tmp_path / "bare").iterdir()} == {"wu-13.svg", "wu-13-phases.svg"}

    results.write_text("".join(lines_of("wu-13", *strategies) + lines_of("choices", *strategies, "auto")))
    refused = plot(results, "--suite", "wu-99", "--into", into)
    assert refused.returncode != 0
    assert "'wu-99'; it has wu-13, choices" in refused.stderr

    # As a run that was cut off leaves it.
    results.write_text("".join(lines_of("choices", *strategies)))
    refused = plot(results, "--into", into)
    assert refused.returncode != 0
    assert "no join of suite 'choices' as the planner would run it" in refused.stderr


@pytest.fixture
def joins_vs_peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benches"))
    return importlib.import_module("joins_vs_peers")


def test_lines_of_an_archive_name_the_commit_that_it_was_made_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benches"))
    common = importlib.import_module("common")
    (tmp_path / "commit").write_text("0123456789ab-dirty\n")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    recorder = common.Recorder("some", directory=tmp_path / "results", command="a command")
    recorder.write(seconds=1.5)
    line = json.loads((tmp_path / "results" / "some.jsonl").read_text())
    assert (line["commit"], line["command"], line["seconds"]) == ("0123456789ab-dirty", "a command", 1.5)
    assert line["machine"]["cores"] > 0


def test_the_workload_wide_has_one_match_for_every_right_row(joins_vs_peers: ModuleType) -> None:
    work = joins_vs_peers.wide(10_000)
    joined = work.left.join(work.right, "k", join_type="inner")
    assert joined.num_rows == 10_000
    assert joined.column_names == ["k", "a1", "a2", "b1", "b2"]
    assert work.expected() == joins_vs_peers.Answer.of(joined, work.payload)
    # What is worked out by another look-up is the same.
    assert work.expected() == joins_vs_peers.Workload.expected(work)
    paired_wrongly = joined.set_column(4, "b2", joined["b2"].take(pa.array([9_999, *range(9_999)])))
    assert work.expected() != joins_vs_peers.Answer.of(paired_wrongly, work.payload)


def test_shares_of_a_join_add_up_and_count_what_crosses_the_link(joins_vs_peers: ModuleType) -> None:
    asked_at = time.time()
    submitted = datetime.fromtimestamp(asked_at + 0.010, UTC).isoformat(timespec="milliseconds")
    phase = {"seconds": 0.1, "kept_bytes": 0, "in_place_bytes": 0}
    status = {
        "submitted": submitted.replace("+00:00", "Z"),
        "queue_seconds": 0.002,
        "run_seconds": 0.3,
        "bytes": 2000,
        "phases": [
            {**phase, "name": "pack keys", "bytes": 1600},
            {**phase, "name": "copy in", "bytes": 600, "kept_bytes": 200},
            {**phase, "name": "gather", "bytes": 2400, "in_place_bytes": 800},
        ],
    }
    rates = {"reads_host_memory": False, "copy_in": 1e3, "copy_out": 2e3}
    timing = joins_vs_peers.Timing(asked_at, 0.011, 0.1, 0.35, 0.5, 2000)
    shares = joins_vs_peers.shares_of(timing, status, 0.25, 800, 100, rates)
    parts = ("request_and_planning_seconds", "queue_seconds", "join_seconds", "after_join_seconds")
    assert sum(shares[name] for name in parts) == pytest.approx(shares["total_seconds"]) == 0.5
    assert shares["request_and_planning_seconds"] == pytest.approx(0.010, abs=0.0011)
    assert shares["bytes"] == {
        "link_in": 600 + 800 - 100,
        "link_out": 1200,
        "kept_on_device": 300,
        "shared_with_table": 800,
        "result": 2000,
        "received": 2000,
    }
    assert shares["floor_seconds"] == pytest.approx({"link_in": 1.3, "link_out": 0.6, "loopback": 0.25})

    # A CPU has no link.
    on_host = joins_vs_peers.shares_of(timing, status, 0.25, 800, 0, {**rates, "reads_host_memory": True})
    assert on_host["bytes"]["link_in"] is None and on_host["floor_seconds"]["link_out"] is None


def test_a_timeline_gives_the_busy_times_of_link_and_kernels(joins_vs_peers: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    timeline = joins_vs_peers.Timeline(file)

    def line(name: str, start: float, duration: float, size: int = 0) -> str:
        work = {"name": name, "ph": "X", "tid": 1, "ts": start, "dur": duration, "args": {"bytes": size}}
        return json.dumps(work) + ",\n"

    file.write_text("[\n" + line("what measured the device", 0, 9))
    assert len(timeline.news()) == 1
    (link_in,), link_out = joins_vs_peers.LINK_IN, "gathering a column of the result"
    assert link_out in joins_vs_peers.LINK_OUT
    with file.open("a") as lines:
        lines.write(line(link_in, 100, 50, 7) + line(link_in, 120, 80, 8) + line("probe_table", 150, 100))
        lines.write(line("gathering values", 400, 100) + line(link_out, 450, 150, 9) + '{"name": "not wri')
    shares = timeline.shares(timeline.news())
    assert shares == pytest.approx({
        "seconds": 500e-6,
        "link_in_busy_seconds": 100e-6,
        "link_in_bytes": 15,
        "kernels_busy_seconds": 200e-6,
        "link_out_busy_seconds": 150e-6,
        "link_out_bytes": 9,
    })  # fmt: skip

    # The names of copies are those of the server's source.
    device = "".join(path.read_text() for path in (ROOT / "src" / "device" / "cuda").glob("*.rs"))
    for name in joins_vs_peers.LINK_IN | joins_vs_peers.LINK_OUT:
        assert f'"{name}"' in device, name


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT / "benches"))
    return importlib.import_module("plot")


def drawn_lines(drawing: ModuleType, draw: str, lines: list[dict[str, object]]) -> tuple[dict[str, list[float]], float]:
    """What a panel shows by the labels of its lines, and how far up it reaches."""
    figure, panel = drawing.plt.subplots()
    getattr(drawing, draw)(panel, lines, "")
    found = {line.get_label(): list(line.get_ydata()) for line in panel.get_lines()}
    top = panel.get_ylim()[1]
    drawing.plt.close(figure)
    return found, top


def measured(rows: int, asked: str, seconds: float, **more: object) -> dict[str, object]:
    return {
        "axis": {"field": "build_rows", "label": "rows"}, "build_rows": rows, "asked": asked, "seconds": seconds,
        "rows_per_second": rows / seconds, "floor_seconds": 0.5, "bytes_in": 2 << 30, "bytes_out": 1 << 30,
        "device_memory_max_bytes": 3 << 29, **more,
    }  # fmt: skip


def test_plot_draws_the_floor_and_memory_with_the_strategies(drawing: ModuleType) -> None:
    lines = [measured(rows, asked, 1.0) for rows in (2_000_000, 1_000_000) for asked in ("hash", "auto")]
    shown, _ = drawn_lines(drawing, "draw_rates", lines)
    assert shown == {"hash": [1.0, 2.0], "auto": [1.0, 2.0], "floor": [2.0, 4.0]}
    shown, _ = drawn_lines(drawing, "draw_memory", lines)
    assert shown == {"hash": [1.5, 1.5], "auto": [1.5, 1.5], "tables and result": [3.0, 3.0]}
    # Where the floor is far away, strategies are still told apart.
    far = [line | {"floor_seconds": 0.001} for line in lines]
    shown, top = drawn_lines(drawing, "draw_rates", far)
    assert shown["floor"] == [1000.0, 2000.0] and top == 6.0
    # Results of other programs that have none.
    shown, _ = drawn_lines(drawing, "draw_rates", [line | {"floor_seconds": None} for line in lines])
    assert "floor" not in shown


def test_plot_takes_the_last_of_repeated_measurements(drawing: ModuleType, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    first = measured(1_000_000, "hash", 2.0, suite="wu-13", nulls=0.0)
    # A later build tells more of the same case.
    again, kept = first | {"seconds": 1.0, "kept": False, "forced": None}, first | {"kept": True}
    results.write_text("".join(json.dumps(line) + "\n" for line in (first, again, kept)))
    assert drawing.read(results) == {"wu-13": [again, kept]}


def test_plot_draws_phases_by_gpu_events_if_all_lines_have_them(drawing: ModuleType) -> None:
    events = {"copy in": {"copying": 0.25, "filling": 0.25}, "join": {"joining": 1.0}}
    lines = [measured(rows, "hash", 1.0, phase_seconds={"join": 2.0}, device_seconds=events) for rows in (1, 2)]

    def shown(lines: list[dict[str, object]]) -> tuple[str, dict[str, list[float]]]:
        figure, panel = drawing.plt.subplots()
        drawing.draw_phases(panel, lines, "")
        colors = {bars.get_label(): bars.patches[0].get_facecolor() for bars in panel.containers}
        heights: dict[str, list[float]] = {}
        for name, color in colors.items():
            drawn = [bar.get_height() for bars in panel.containers for bar in bars if bar.get_facecolor() == color]
            if not name.startswith("_"):
                heights[name] = [height for height in drawn if height > 0]
        drawing.plt.close(figure)
        return panel.get_ylabel(), heights

    assert shown(lines) == ("milliseconds of the GPU", {"copy in": [500.0, 500.0], "join": [1000.0, 1000.0]})
    # Those of one kind are not beside those of the other.
    one_without = [lines[0], lines[1] | {"device_seconds": None}]
    assert shown(one_without) == ("milliseconds of the host", {"join": [2000.0, 2000.0]})


@pytest.fixture
def gangs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benches"))
    return importlib.import_module("gangs")


def lines_of_benchmark(name: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Runs a benchmark, and returns the lines that it writes to the folder."""
    script = [sys.executable, str(ROOT / "benches" / f"{name}.py"), *arguments]
    env = {**os.environ, "DOVETAIL_BIN": str(binary()), "DOVETAIL_RESULTS": str(folder)}
    ran = subprocess.run(script, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_gangs_measures_every_way_to_divide_a_join(tmp_path: Path) -> None:
    options = ["--devices", "host:2", "--host-memory", "256MiB"]
    workloads = ["narrow", "wide", "text", "zipf-0.5", "zipf-1.0", "zipf-1.5", "match-0.5", "hmg-a"]
    size = ["--workloads", *workloads, "--sizes", "10:14", "--factors", "1e-5", "--runs", "1", "--no-floors"]
    lines = lines_of_benchmark("gangs", tmp_path, *options, *size)
    by_choice = [line for line in lines if line["is_chosen"]]
    assert len(by_choice) == 2 * len(workloads) and all(line["best_seconds"] > 0 for line in by_choice)
    asked = [line for line in lines if not line["is_chosen"]]
    measured = {(line["workload"], line["ranks"], line["distribution"], line["count"]) for line in asked}
    assert len(asked) == len(measured)
    for workload in workloads:
        found = {(ranks, how) for of, ranks, how, _ in measured if of == workload}
        exchanged = set() if workload == "text" else {(2, "hash")}
        assert found == {(1, "alone"), (2, "broadcast"), *exchanged}
    for line in lines:
        rows = 10_000 if line["workload"] == "hmg-a" else 1 << 14
        if line["workload"] == "match-0.5":
            assert 0.45 * rows < line["result_rows"] < 0.55 * rows
        else:
            assert line["result_rows"] == rows
        assert line["memory"] == "used before"
        assert (line["exchange"] is not None) == (line["distribution"] == "hash")
        assert len(line["of_ranks"]) == (line["ranks"] if line["ranks"] > 1 else 0)


def test_keys_of_hmg_workloads_are_distinct_and_spread_over_the_range_of_their_type(gangs: ModuleType) -> None:
    for key_bytes, bits in ((4, 32), (8, 64)):
        keys = gangs.scattered(np.arange(100_000), key_bytes)
        assert keys.dtype.itemsize == key_bytes and len(np.unique(keys)) == len(keys)
        assert keys.min() < -0.99 * 2 ** (bits - 1) and keys.max() > 0.99 * 2 ** (bits - 1)
    left, right = (gangs.hmg_batch(name, 0, rows, 500, 8, 1) for name, rows in (("a", 500), ("b", 3000)))
    assert len(set(left["k"].to_pylist())) == 500
    assert set(right["k"].to_pylist()) <= set(left["k"].to_pylist())
    # Batches of one side continue each other.
    whole, rest = gangs.hmg_batch("a", 0, 500, 500, 8, 1), gangs.hmg_batch("a", 200, 300, 500, 8, 1)
    assert whole.slice(200).equals(rest)


def test_clients_of_gangs_and_of_small_joins_are_measured_alone_and_together(tmp_path: Path) -> None:
    options = ["--devices", "host:2"]
    size = ["--host-memory", "256MiB", "--gang-rows-log2", "12", "--small-rows-log2", "6", "--seconds", "0.2"]
    clients = ["--gang-clients", "1", "--small-clients", "1"]
    lines = lines_of_benchmark("gang_clients", tmp_path, *options, *size, *clients)
    assert [line["case"] for line in lines] == ["gangs alone", "small alone", "both"]
    assert [{"gang", "small"} & line.keys() for line in lines] == [{"gang"}, {"small"}, {"gang", "small"}]
    for of_kind in (line[kind] for line in lines for kind in ("gang", "small") if kind in line):
        assert of_kind["joins"] > 0 and 0 < of_kind["p50_seconds"] <= of_kind["p99_seconds"]


def test_sets_of_devices_are_compared_with_the_choice_of_the_server(tmp_path: Path) -> None:
    options = ["--devices", "host:2", "--draw", "2", "--repeat", "1"]
    size = ["--host-memory", "256MiB", "--build-log2", "6", "9"]
    lines = lines_of_benchmark("sets", tmp_path, *options, *size)
    assert len(lines) == 2
    for line in lines:
        assert line["seconds"].keys() | line["refused"].keys() == {"1", "2 broadcast", "2 hash"}
        assert line["chosen"] in line["seconds"] and line["loss"] >= 1
        assert line["seconds"][line["best"]] == min(line["seconds"].values())


def test_many_clients_are_compared_with_one_after_the_other(tmp_path: Path) -> None:
    options = ["--devices", "host:2", "--seconds", "0.2"]
    size = ["--host-memory", "256MiB", "--sizes", "4:6", "8:9", "--clients", "1", "2", "--repeat", "1"]
    trace = tmp_path / "trace.jsonl"
    lines = lines_of_benchmark("load", tmp_path, *options, *size, "--job-trace", str(trace))
    assert [line["clients"] for line in lines] == [1, 2]
    joins = sum(kind["joins"] for line in lines for kind in line["kinds"].values())
    assert all(line["times_alone"] > 0 and line["kinds"] for line in lines)
    assert len(trace.read_text().splitlines()) > joins > 0


def test_versions_measures_a_join_in_memory_of_each_state(tmp_path: Path) -> None:
    server = str(binary())
    script = [sys.executable, str(ROOT / "benches" / "versions.py"), "--before", server, "--after", server]
    size = ["--scale", "4096", "--rounds", "2", "--host-memory", "256MiB", "--only", "into", "counted"]
    states = ["virgin", "used before", "prepared"]
    env = {**os.environ, "DOVETAIL_RESULTS": str(tmp_path)}
    ran = subprocess.run(
        [*script, *size, "--memory", *states], env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in (tmp_path / "versions.jsonl").read_text().splitlines()]
    measured = [(line["work"], line["memory"]) for line in lines]
    # A join that is counted writes no rows to memory.
    assert measured == [("wide, into a table", state) for state in states] + [("counted", "used before")]
    options = subprocess.run([server, "serve", "--help"], capture_output=True, text=True, check=True).stdout
    for line in lines:
        is_measured = line["memory"] != "prepared" or "--prefault" in options
        for seconds in (line["before_seconds"], line["after_seconds"]):
            assert len(seconds) == (2 if is_measured else 0) and all(second > 0 for second in seconds)
        assert (line["ratio"] is not None) == is_measured


def test_fresh_memory_measures_memory_that_is_not_there_prepared_and_used(tmp_path: Path) -> None:
    options = ["--host-memory", "256MiB"]
    size = ["--build", "1000", "--probe", "2000", "--runs", "2", "--prefault", "none", "128MiB"]
    lines = lines_of_benchmark("fresh_memory", tmp_path, *options, *size)
    # There may be no time for joins while so little memory is prepared.
    preparing = [line for line in lines if line["memory"] == "preparing"]
    assert all(line["prefault"] == "128MiB" and line["engine_seconds"] for line in preparing)
    lines = [line for line in lines if line not in preparing]
    measured = [(line["prefault"], line["memory"], line["kind"]) for line in lines]
    of = [("none", "fresh"), ("none", "used"), ("128MiB", "prepared"), ("128MiB", "used")]
    assert measured == [(*memory, kind) for memory in of for kind in ("result", "table")]
    for line in lines:
        assert line["result_rows"] == 2000
        assert len(line["engine_seconds"]) == len(line["seconds"]) == 2
        assert line["host_memory_is"].startswith("host memory is ")


def test_the_floor_of_a_gang_is_the_slowest_boundary(gangs: ModuleType) -> None:
    phases = [{"name": "copy in", "measured_bytes": 100}, {"name": "gather", "measured_bytes": 80}]
    explained = {"phases": phases, "exchange": {"measured_bytes": 30}}
    rates = {"in": 10.0, "out": 20.0, "both": 10.0, "push": 1.0}
    assert gangs.floor_seconds(explained, rates) == {"in": 10.0, "out": 2.0, "both": 14.0, "push": 30.0}
    assert gangs.floor_seconds({**explained, "exchange": None}, {"push": 1.0}) == {"push": 0.0}


def test_the_keys_of_gangs_follow_zipf_s_law_and_text_keys_stay_distinct(gangs: ModuleType) -> None:
    drawn = gangs.zipf(np.random.default_rng(1), 1000, 100_000, 1.0)
    shares = np.bincount(drawn, minlength=1000) / len(drawn)
    weights = 1 / np.arange(1, 1001)
    assert np.allclose(shares[:5], weights[:5] / weights.sum(), rtol=0.1)
    assert drawn.max() < 1000
    text = gangs.text_of(np.array([0, 7, 123_456_789]))
    assert text.to_pylist() == ["0" * 24, "0" * 23 + "7", "0" * 15 + "123456789"]


def test_rows_that_arrive_are_compared_with_tables(tmp_path: Path) -> None:
    options = ["--host-memory", "512MiB", "--runs", "1"]
    sizes = [
        "--build-log2",
        "10",
        "--rows-log2",
        "16",
        "--chunks-log2",
        "10",
        "--batches-log2",
        "2",
        "--zipf",
        "0",
        "1",
    ]
    lines = lines_of_benchmark("arrivals", tmp_path, *options, *sizes)
    assert [line["case"] for line in lines] == ["pipelined", "built", "chunks", "skew", "skew", *["chains"] * 8]
    pipelined, built, chunks, *skew = lines[:5]
    assert [(line["joins"], line["in_one"]) for line in lines[5:]] == [
        (n, one) for n in range(1, 5) for one in (True, False)
    ]
    assert min(line["seconds"] for line in lines[5:]) > 0
    assert min(built["upload_seconds"], built["index_seconds"]) > 0
    assert min(value for name, value in pipelined.items() if name.endswith("_seconds")) > 0
    assert min(chunks["rows_per_second"], chunks["tables_rows_per_second"]) > 0
    assert [line["zipf"] for line in skew] == [0, 1] and min(line["rows_per_second"] for line in skew) > 0


def test_streams_are_measured(tmp_path: Path) -> None:
    options = ["--seconds", "0.1", "--questions", "1", "1000"]
    sizes = [
        "--build-log2",
        "10",
        "--rows-log2",
        "21",
        "--plain-log2",
        "20",
        "--clients",
        "1",
        "2",
        "--host-memory",
        "512MiB",
    ]
    lines = lines_of_benchmark("streams", tmp_path, *options, *sizes)
    assert [(line["case"], line["clients"]) for line in lines] == [
        *[("questions", 1)] * 2, *[("questions", 2)] * 2, ("rate", 1), ("rate", 2),
    ]  # fmt: skip
    for line in lines:
        if line["case"] == "questions":
            assert 0 < line["median_seconds"] <= line["p99_seconds"]
        else:
            assert line["rows"] == 2_000_000
            assert min(line["rows_per_second"], line["put_rows_per_second"], line["get_rows_per_second"]) > 0
