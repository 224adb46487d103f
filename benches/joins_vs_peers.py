"""Joins on the CPU engine against DuckDB, Polars and DataFusion on the same cores, the result materialized.

Every engine runs in a process of its own with its tables loaded; they take turns, several times over. A join is timed
from the request to the last column of the result in memory. Dovetail is timed twice: its engine, by the job's own
record, and through the client, with the result fetched over loopback.

    python benches/joins_vs_peers.py --workloads int4 int8 string tpch --repeat 5

`tpch` needs Parquet files of orders and lineitem in ``--tpch DIR``, as ``tpchgen-cli -s 1 --format=parquet
--output-dir DIR`` writes them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from common import Dovetail, Recorder, median, memory_max_bytes, metrics, reset_memory_max

ENGINES = ["dovetail", "duckdb", "polars", "datafusion"]


@dataclass
class Workload:
    """Two tables and the columns that must be equal; every row of `right` matches one of `left`, or as `rows` says."""

    left: pa.Table
    right: pa.Table
    on: tuple[str, str]
    rows: int


def integers(bits: int, rows: int, seed: int = 1) -> Workload:
    """Dense keys in random order, foreign keys drawn uniformly, and a payload column of the same width on each side."""
    rng = np.random.default_rng(seed)
    type_ = {32: np.int32, 64: np.int64}[bits]
    left = {"k": rng.permutation(rows).astype(type_), "a": rng.integers(0, 1 << 31, rows).astype(type_)}
    right = {"k": rng.integers(0, rows, 2 * rows).astype(type_), "b": rng.integers(0, 1 << 31, 2 * rows).astype(type_)}
    return Workload(pa.table(left), pa.table(right), ("k", "k"), 2 * rows)


def strings(rows: int, seed: int = 1) -> Workload:
    """Keys of 9 to 20 characters."""
    rng = np.random.default_rng(seed)
    names = pa.array(np.char.add("customer-", rng.permutation(rows).astype(str)).tolist())
    left = pa.table({"k": names, "a": np.arange(rows)})
    places = rng.integers(0, rows, 2 * rows)
    right = pa.table({"k": names.take(pa.array(places)), "b": np.arange(2 * rows)})
    return Workload(left, right, ("k", "k"), 2 * rows)


def tpch(folder: Path) -> Workload:
    """lineitem with its orders: four columns of each."""
    import pyarrow.parquet

    orders = pyarrow.parquet.read_table(
        next(folder.rglob("orders*.parquet")), columns=["o_orderkey", "o_custkey", "o_orderdate", "o_shippriority"]
    )
    lineitem = pyarrow.parquet.read_table(
        next(folder.rglob("lineitem*.parquet")), columns=["l_orderkey", "l_partkey", "l_quantity", "l_extendedprice"]
    )
    return Workload(orders, lineitem, ("o_orderkey", "l_orderkey"), lineitem.num_rows)


def load(name: str, rows: int, folder: str | None) -> Workload:
    match name:
        case "int4":
            return integers(32, rows)
        case "int8":
            return integers(64, rows)
        case "string":
            return strings(rows // 4)
        case "tpch":
            if not folder:
                raise SystemExit("tpch needs --tpch DIR with Parquet files of orders and lineitem")
            return tpch(Path(folder))
    raise SystemExit(f"there is no workload {name!r}")


# The engines. Each returns a function that runs the join once and answers with rows, and seconds by what was timed.

Run = Callable[[], dict[str, float]]


def timed(join: Callable[[], int]) -> dict[str, float]:
    start = time.perf_counter()
    rows = join()
    return {"rows": rows, "join": time.perf_counter() - start}


def result_columns(work: Workload) -> list[str]:
    left, right = work.on
    columns = [f"l.{name}" for name in work.left.column_names]
    return columns + [f"r.{name}" for name in work.right.column_names if name != right]


def duckdb_engine(work: Workload, cores: int) -> Run:
    import duckdb

    db = duckdb.connect(config={"threads": cores})
    db.register("left_table", work.left)
    db.register("right_table", work.right)
    db.execute("CREATE TABLE l AS SELECT * FROM left_table; CREATE TABLE r AS SELECT * FROM right_table")
    db.unregister("left_table")
    db.unregister("right_table")
    columns = ", ".join(result_columns(work))
    condition = f"l.{work.on[0]} = r.{work.on[1]}"

    def run() -> dict[str, float]:
        def into_table() -> int:
            db.execute(f"CREATE OR REPLACE TABLE result AS SELECT {columns} FROM l JOIN r ON {condition}")
            return 0

        into = timed(into_table)
        (rows,) = db.execute("SELECT count(*) FROM result").fetchone()
        db.execute("DROP TABLE result")
        # And as Arrow, which is what a client of Dovetail gets.
        arrow = timed(lambda: db.execute(f"SELECT {columns} FROM l JOIN r ON {condition}").to_arrow_table().num_rows)
        return {"rows": rows, "join": into["join"], "join to Arrow": arrow["join"]}

    return run


def polars_engine(work: Workload, cores: int) -> Run:
    import polars

    left, right = polars.from_arrow(work.left), polars.from_arrow(work.right)
    on = {"left_on": work.on[0], "right_on": work.on[1]}
    return lambda: timed(lambda: left.join(right, how="inner", **on).height)


def datafusion_engine(work: Workload, cores: int) -> Run:
    import datafusion

    context = datafusion.SessionContext(datafusion.SessionConfig().with_target_partitions(cores))
    for name, table in (("l", work.left), ("r", work.right)):
        batches = table.combine_chunks().to_batches(max_chunksize=-(-table.num_rows // (cores * 16)))
        parts = [batches[index::cores] for index in range(cores)]
        context.register_record_batches(name, [part for part in parts if part])
    columns = ", ".join(result_columns(work))
    query = f"SELECT {columns} FROM l JOIN r ON l.{work.on[0]} = r.{work.on[1]}"
    return lambda: timed(lambda: sum(batch.num_rows for batch in context.sql(query).collect()))


def dovetail_engine(work: Workload, cores: int) -> Run:
    import dovetail

    folder = tempfile.mkdtemp()
    memory = 4 * (work.left.nbytes + 2 * work.right.nbytes) + (1 << 30)
    server = Dovetail(Path(folder), devices="host:1", host_memory=str(memory), device_memory=str(memory), log="warn")
    client = dovetail.connect(server.uri)
    client.put("l", work.left)
    client.put("r", work.right)
    reset_memory_max(server.pid)
    dovetail_engine.server = server  # type: ignore[attr-defined]

    def run() -> dict[str, float]:
        start = time.perf_counter()
        with client.join("l", "r", on=dict([work.on])) as result:
            rows = result.table().num_rows
            through_client = time.perf_counter() - start
            status = result.status()
        return {
            "rows": rows,
            "join": float(status.raw["run_seconds"]),
            "through the client": through_client,
            "strategy": status.raw.get("strategy"),
            "phases": status.raw.get("phases"),
        }

    return run


def serve(engine: str, workload: str, rows: int, folder: str | None, cores: int) -> None:
    """A worker: loads, then runs once for every line on standard input."""
    work = load(workload, rows, folder)
    run = {
        "dovetail": dovetail_engine,
        "duckdb": duckdb_engine,
        "polars": polars_engine,
        "datafusion": datafusion_engine,
    }[engine](work, cores)
    server = getattr(dovetail_engine, "server", None)
    if server is None:
        reset_memory_max(os.getpid())
    print(json.dumps({"ready": True, "bytes": work.left.nbytes + work.right.nbytes, "rows": work.rows}), flush=True)
    for _ in sys.stdin:
        answer = run()
        if answer["rows"] != work.rows:
            raise SystemExit(f"{engine} found {answer['rows']} rows, expected {work.rows}")
        answer["memory_max_bytes"] = memory_max_bytes(server.pid if server else os.getpid())
        if server:
            found = metrics(server.admin)
            answer["arena_max_bytes"] = found['dovetail_arena_bytes{kind="used_max"}']
        print(json.dumps(answer), flush=True)
    if server:
        server.stop()


class Worker:
    """An engine in a process of its own."""

    def __init__(self, engine: str, workload: str, rows: int, folder: str | None, cores: int) -> None:
        environment = {**os.environ, "POLARS_MAX_THREADS": str(cores), "OMP_NUM_THREADS": str(cores)}
        command = [sys.executable, __file__, "--serve", engine, "--workloads", workload, "--rows", str(rows)]
        command += ["--cores", str(cores), *(["--tpch", folder] if folder else [])]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.about = self._read()

    def run(self) -> dict[str, object]:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        self.process.stdin.close()
        self.process.wait()

    def _read(self) -> dict[str, object]:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the worker {self.process.args} ended")
        return json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", default=["int4", "int8", "string"])
    parser.add_argument("--engines", nargs="+", default=ENGINES, choices=ENGINES)
    parser.add_argument(
        "--rows", type=int, default=1 << 24, help="rows of the left table; the right one has twice as many"
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tpch", help="folder with Parquet files of orders and lineitem")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.workloads[0], arguments.rows, arguments.tpch, arguments.cores)
        return
    recorder = Recorder("joins_vs_peers")
    for workload in arguments.workloads:
        compare(workload, arguments, recorder)
    print(f"appended to {recorder.path}")


def compare(workload: str, arguments: argparse.Namespace, recorder: Recorder) -> None:
    workers = {
        engine: Worker(engine, workload, arguments.rows, arguments.tpch, arguments.cores)
        for engine in arguments.engines
    }
    answers: dict[str, list[dict[str, object]]] = {engine: [] for engine in workers}
    try:
        for repeat in range(-1, arguments.repeat):
            for engine, worker in workers.items():
                answer = worker.run()
                if repeat >= 0:
                    answers[engine].append(answer)
    finally:
        for worker in workers.values():
            worker.stop()
    about = next(iter(workers.values())).about
    print(f"{workload}: {about['bytes'] / 1e6:,.0f} MB in, {about['rows']:,} rows out, {arguments.cores} cores")
    for engine, runs in answers.items():
        timings = {
            key: median([float(run[key]) for run in runs])
            for key, value in runs[0].items()
            if isinstance(value, float) and not key.endswith("_bytes")
        }
        peak = max(float(run["memory_max_bytes"]) for run in runs)
        shown = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in timings.items())
        print(f"  {engine:11} {shown}; {peak / 1e6:,.0f} MB resident at most")
        recorder.write(
            benchmark="joins_vs_peers", workload=workload, engine=engine, cores=arguments.cores,
            input_bytes=about["bytes"], result_rows=about["rows"], median_seconds=timings, memory_max_bytes=peak,
            runs=runs,
        )  # fmt: skip


if __name__ == "__main__":
    main()
