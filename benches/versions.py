"""Compares the times of two versions of the server for the same work, in alternating rounds.

    python benches/versions.py --before OLD/dovetail --after NEW/dovetail --device cuda:1
    python benches/versions.py --before OLD/dovetail --after NEW/dovetail --device host:1 --cores 0,1

Each round starts a server of one version and then one of the other, in an order that alternates, with the same
tables. The seconds of a join are those of its run on the device, as `explain` tells them; those of uploads and
downloads are the client's. A round's number is the median of its runs; a line of results has both versions' numbers
of all rounds, and the ratio of their medians.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa

import dovetail
from common import Dovetail, Recorder, median

# Timed runs of each work, of a small join, and joins at once.
RUNS = 7
SMALL_RUNS = 60
AT_ONCE = 8

Measure = Callable[[dovetail.Client], float]


def table(rows: int, key: pa.Array, **columns: str) -> pa.Table:
    """A table of a key and of payload columns of these types."""
    values = {name: pa.array(np.arange(rows, dtype=of)) for name, of in columns.items()}
    return pa.table({"k": key, **values})


def keys(rows: int, seed: int, of: str) -> pa.Array:
    """Distinct keys in no order."""
    return pa.array(np.random.default_rng(seed).permutation(rows).astype(of))


def texts(rows: int, seed: int) -> pa.Array:
    """Distinct keys of text of 20 bytes, in no order."""
    numbers = np.random.default_rng(seed).permutation(rows)
    return pa.array([f"{number:020d}" for number in numbers])


def pair(rows: int, make: Callable[[int, int], pa.Array], **columns: str) -> tuple[pa.Table, pa.Table]:
    """Two tables with the same keys in two orders."""
    right = {f"r_{name}": of for name, of in columns.items()}
    return table(rows, make(rows, 1), **columns), table(rows, make(rows, 2), **right)


def run_seconds(client: dovetail.Client, rows: int, **options: object) -> float:
    """One join on the device. Its result must have `rows` rows."""
    command = {"left": "left", "right": "right", "on": [{"left": "k", "right": "k"}], **options}
    with client.command({"join": command}) as result:
        found = result.job.wait().rows
        assert found == (1 if options.get("count") else rows), f"{found} rows"
        return result.job.explain()["measured_seconds"]


def joins(rows: int, runs: int, **options: object) -> Measure:
    """The median of joins one after the other, without a first one that finds memory cold."""

    def measure(client: dovetail.Client) -> float:
        run_seconds(client, rows, **options)
        return median([run_seconds(client, rows, **options) for _ in range(runs)])

    return measure


def timed(work: Callable[[], object]) -> float:
    """The median time of several runs, by the client's clock."""
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def at_once(rows: int) -> Measure:
    """The time from the first request to the last answer of several joins at once, divided by their number."""

    def measure(client: dovetail.Client) -> float:
        run_seconds(client, rows)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return timed(lambda: list(pool.map(lambda _: run_seconds(client, rows), range(AT_ONCE)))) / AT_ONCE

    return measure


def download(client: dovetail.Client) -> float:
    """Reading a table."""
    return timed(lambda: client.get("left"))


def upload(left: pa.Table) -> Measure:
    """Replacing a table."""
    return lambda client: timed(lambda: client.put("left", left, mode="replace"))


Work = tuple[str, dict[str, object], tuple[pa.Table, pa.Table], Measure]


def works(device: str, scale: int) -> Iterator[Work]:
    """What is measured: its name, settings of its servers, tables, and how."""
    wide = {name: "int64" for name in "abcd"}
    settings = {"devices": device, "device_cache": "0"}
    rows = (1 << 24) // scale
    yield "wide", settings, pair(rows, lambda n, seed: keys(n, seed, "int32"), **wide), joins(rows, RUNS)
    narrow = pair(2 * rows, lambda n, seed: keys(n, seed, "int64"), a="int64")
    yield "16-byte", settings, narrow, joins(2 * rows, RUNS)
    yield "counted", settings, narrow, joins(2 * rows, RUNS, count=True)
    yield "text keys", settings, pair(rows // 4, texts, a="int64"), joins(rows // 4, RUNS)
    few = pair(100_000, lambda n, seed: keys(n, seed, "int32"), a="int32")
    for processes in ["off", "on"]:
        own = {**settings, "device_processes": processes}
        yield f"small, processes {processes}", own, few, joins(100_000, SMALL_RUNS)
    eight = pair(rows // 8, lambda n, seed: keys(n, seed, "int64"), a="int64")
    yield "eight at once", settings, eight, at_once(rows // 8)
    yield "DoGet", settings, narrow, download
    yield "DoPut", settings, narrow, upload(narrow[0])


def measured(binary: str, settings: dict[str, object], tables: tuple[pa.Table, pa.Table], measure: Measure) -> float:
    """What a fresh server of one version takes."""
    os.environ["DOVETAIL_BIN"] = binary
    with Dovetail(**settings) as server, dovetail.connect(server.uri) as client:
        client.put("left", tables[0], mode="replace")
        client.put("right", tables[1], mode="replace")
        return measure(client)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, help="the server's binary of one version")
    parser.add_argument("--after", required=True, help="of the other")
    parser.add_argument("--before-name", default="before", help="in results, such as its commit")
    parser.add_argument("--device", default="host:1", help="as for `dovetail serve --devices`: one device")
    parser.add_argument("--host-memory", default="8GiB", help="of each server")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=int, default=1, help="divides the rows of all tables")
    parser.add_argument("--cores", help="CPUs of this process and of its servers, such as 0,1")
    parser.add_argument("--only", nargs="+", default=[""], help="works whose names have one of these in them")
    options = parser.parse_args()
    if options.cores:
        os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
    recorder = Recorder("versions")
    folder = tempfile.TemporaryDirectory(prefix="dovetail-versions-")
    for name, settings, tables, measure in works(options.device, options.scale):
        if not any(part in name for part in options.only):
            continue
        seconds: dict[str, list[float]] = {"before": [], "after": []}
        for turn in range(options.rounds):
            versions = ["before", "after"] if turn % 2 == 0 else ["after", "before"]
            for version in versions:
                # Each version measures its rates once.
                rates = Path(folder.name) / f"{version}.json"
                of_server = {"host_memory": options.host_memory, "rates_file": rates, **settings}
                seconds[version].append(measured(getattr(options, version), of_server, tables, measure))
        before, after = median(seconds["before"]), median(seconds["after"])
        recorder.write(
            benchmark="versions",
            work=name,
            device=options.device,
            scale=options.scale,
            before=options.before_name,
            before_seconds=seconds["before"],
            after_seconds=seconds["after"],
            ratio=after / before,
        )
        spread = [f"{min(of) * 1e3:.2f} to {max(of) * 1e3:.2f}" for of in seconds.values()]
        print(f"{name}: {before * 1e3:.2f} ms ({spread[0]}), now {after * 1e3:.2f} ms ({spread[1]})", flush=True)


if __name__ == "__main__":
    main()
