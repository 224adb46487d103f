"""Compares the times of two versions of the server for the same work, in alternating rounds.

    python benches/versions.py --before OLD/dovetail --after NEW/dovetail --device cuda:1
    python benches/versions.py --before OLD/dovetail --after NEW/dovetail --device host:1 --cores 0,1

Each round starts a server of one version and then one of the other, in an order that alternates, with the same
tables. The seconds of a join are those of its run on the device, as `explain` tells them; those of uploads and
downloads are the client's. A round's number is the median of its runs; a line of results has both versions' numbers
of all rounds, and the ratio of their medians.

    python benches/versions.py --before OLD/dovetail --after NEW/dovetail --memory virgin "used before" prepared

Each work that writes rows to host memory can be measured in three states of that memory. `virgin` and `prepared` time
one run of each server. A join that only counts rows comes first, so that the device's own first steps are not timed. A
version without `--prefault` has no numbers for `prepared`.
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
from common import PREPARED, USED_BEFORE, VIRGIN, Dovetail, Recorder, can_prepare, median, wait_until_prepared

# Timed runs of each work, of a small join, and joins at once.
RUNS = 7
SMALL_RUNS = 60
AT_ONCE = 8

POLL_SECONDS = 1e-3

# Measures in memory of that state, one of `virgin`, `used before` and `prepared`.
Measure = Callable[[dovetail.Client, str], float]

# Works that write no rows to host memory.
WITHOUT_ROWS = {"counted", "DoGet"}


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


def status_at_end(job: dovetail.Job) -> dovetail.JobStatus:
    """Asks until a job has ended, because a server of an earlier version answers no wait."""
    while not (status := job.status()).done:
        time.sleep(POLL_SECONDS)
    return status


def run_seconds(client: dovetail.Client, rows: int, **options: object) -> float:
    """One join on the device. Its result must have `rows` rows."""
    command = {"left": "left", "right": "right", "on": [{"left": "k", "right": "k"}], **options}
    with client.command({"join": command}) as result:
        found = status_at_end(result.job).rows
        assert found == (1 if options.get("count") else rows), f"{found} rows"
        return result.job.explain()["measured_seconds"]


def into_seconds(client: dovetail.Client, rows: int) -> float:
    """One join whose result becomes a table, which is dropped. The run ends when the table is there."""
    seconds = run_seconds(client, rows, into="kept", into_mode="replace")
    client.drop("kept")
    return seconds


Run = Callable[[dovetail.Client, int], float]


def joins(rows: int, runs: int, run: Run = run_seconds) -> Measure:
    """The median of joins one after the other, without a first one that finds memory cold; or one in fresh memory."""

    def measure(client: dovetail.Client, memory: str) -> float:
        if memory != USED_BEFORE:
            run_seconds(client, rows, count=True)
            return run(client, rows)
        run(client, rows)
        return median([run(client, rows) for _ in range(runs)])

    return measure


def counted(client: dovetail.Client, rows: int) -> float:
    """One join whose rows are counted."""
    return run_seconds(client, rows, count=True)


def timed(work: Callable[[], object], runs: int = RUNS) -> float:
    """The median time of several runs, by the client's clock."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def at_once(rows: int) -> Measure:
    """The time from the first request to the last answer of several joins at once, divided by their number."""

    def measure(client: dovetail.Client, memory: str) -> float:
        run_seconds(client, rows, count=memory != USED_BEFORE)
        runs = RUNS if memory == USED_BEFORE else 1
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return timed(lambda: list(pool.map(lambda _: run_seconds(client, rows), range(AT_ONCE))), runs) / AT_ONCE

    return measure


def download(client: dovetail.Client, _: str) -> float:
    """Reading a table."""
    return timed(lambda: client.get("left"))


def upload(left: pa.Table) -> Measure:
    """Replacing a table."""

    def measure(client: dovetail.Client, memory: str) -> float:
        return timed(lambda: client.put("left", left, mode="replace"), RUNS if memory == USED_BEFORE else 1)

    return measure


Work = tuple[str, dict[str, object], tuple[pa.Table, pa.Table], Measure]


def works(device: str, scale: int) -> Iterator[Work]:
    """What is measured: its name, settings of its servers, tables, and how."""
    wide = {name: "int64" for name in "abcd"}
    settings = {"devices": device, "device_cache": "0"}
    rows = (1 << 24) // scale
    of_wide = pair(rows, lambda n, seed: keys(n, seed, "int32"), **wide)
    yield "wide", settings, of_wide, joins(rows, RUNS)
    yield "wide, into a table", settings, of_wide, joins(rows, RUNS, into_seconds)
    narrow = pair(2 * rows, lambda n, seed: keys(n, seed, "int64"), a="int64")
    yield "16-byte", settings, narrow, joins(2 * rows, RUNS)
    yield "counted", settings, narrow, joins(2 * rows, RUNS, counted)
    yield "text keys", settings, pair(rows // 4, texts, a="int64"), joins(rows // 4, RUNS)
    few = pair(100_000, lambda n, seed: keys(n, seed, "int32"), a="int32")
    for processes in ["off", "on"]:
        own = {**settings, "device_processes": processes}
        yield f"small, processes {processes}", own, few, joins(100_000, SMALL_RUNS)
    eight = pair(rows // 8, lambda n, seed: keys(n, seed, "int64"), a="int64")
    yield "eight at once", settings, eight, at_once(rows // 8)
    yield "DoGet", settings, narrow, download
    yield "DoPut", settings, narrow, upload(narrow[0])


def measured(
    binary: str, settings: dict[str, object], tables: tuple[pa.Table, pa.Table], measure: Measure, memory: str
) -> float:
    """What a fresh server of one version takes."""
    os.environ["DOVETAIL_BIN"] = binary
    if memory == PREPARED:
        settings = {**settings, "prefault": "all"}
    with Dovetail(**settings) as server, dovetail.connect(server.uri) as client:
        if memory == PREPARED:
            wait_until_prepared(server)
        client.put("left", tables[0], mode="replace")
        client.put("right", tables[1], mode="replace")
        return measure(client, memory)


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
    parser.add_argument(
        "--memory",
        nargs="+",
        choices=[VIRGIN, USED_BEFORE, PREPARED],
        default=[USED_BEFORE],
        help="states of the memory for the rows that a work writes; a server for each",
    )
    options = parser.parse_args()
    if options.cores:
        os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
    recorder = Recorder("versions")
    folder = tempfile.TemporaryDirectory(prefix="dovetail-versions-")
    for work in works(options.device, options.scale):
        for memory in options.memory:
            is_asked_for = any(part in work[0] for part in options.only)
            if is_asked_for and (memory == USED_BEFORE or work[0] not in WITHOUT_ROWS):
                compare(work, memory, options, Path(folder.name), recorder)


def compare(work: Work, memory: str, options: argparse.Namespace, folder: Path, recorder: Recorder) -> None:
    """Measures and records one work in memory of one state."""
    name, settings, tables, measure = work
    seconds: dict[str, list[float]] = {"before": [], "after": []}
    able = [version for version in seconds if memory != PREPARED or can_prepare(getattr(options, version))]
    for turn in range(options.rounds):
        for version in able if turn % 2 == 0 else reversed(able):
            # Each version measures its rates once.
            rates = folder / f"{version}.json"
            of_server = {"host_memory": options.host_memory, "rates_file": rates, **settings}
            seconds[version].append(measured(getattr(options, version), of_server, tables, measure, memory))
    medians = {version: median(seconds[version]) if version in able else None for version in seconds}
    recorder.write(
        benchmark="versions",
        work=name,
        memory=memory,
        device=options.device,
        scale=options.scale,
        before=options.before_name,
        before_seconds=seconds["before"],
        after_seconds=seconds["after"],
        ratio=medians["after"] / medians["before"] if len(able) == 2 else None,
    )
    told = ", ".join(
        f"{version} {medians[version] * 1e3:.2f} ms ({min(of) * 1e3:.2f} to {max(of) * 1e3:.2f})"
        for version, of in seconds.items()
        if of
    )
    print(f"{name}, memory {memory}: {told or 'no version can prepare memory'}", flush=True)


if __name__ == "__main__":
    main()
