"""Joins against DuckDB, Polars and DataFusion on the same cores, the result materialized.

Every engine runs in a process of its own that is kept to the same processors, with its tables loaded; they take
turns in a changing order, several times over. A join is timed from the request to the last column in memory, and
every result is checked: its number of rows, and the sum of a payload column of each side. The order of the rows is
nobody's promise here, DuckDB's neither.

Dovetail is timed twice: its engine, by the job's own record, and through the client, with the result fetched over
loopback. So is DuckDB: as an Arrow table (`to_arrow_table`), and as a table of its own (`CREATE TABLE AS`).

    python benches/joins_vs_peers.py --workloads int4 int8 string tpch --repeat 5

Dovetail runs on the CPU; ``--devices cuda:1`` gives it a GPU, and the others the cores that they have.

`tpch` needs Parquet files of orders and lineitem in ``--tpch DIR``, as ``tpchgen-cli -s 1 --format=parquet
--output-dir DIR`` writes them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common import Dovetail, Recorder, keep_to_cores, median, memory_max_bytes, metrics, reset_memory_max

ENGINES = ["dovetail", "duckdb", "polars", "datafusion"]
STOP_SECONDS = 120


@dataclass
class Workload:
    """Two tables and the columns that must be equal. Keys of `left` are distinct."""

    left: pa.Table
    right: pa.Table
    on: tuple[str, str]
    payload: tuple[str, str]
    """A column of integers of each side, to check results by."""

    def expected(self) -> Answer:
        """What is right, by other means than a join: a look-up of each right row in the left keys."""
        places = pc.index_in(self.right[self.on[1]], value_set=self.left[self.on[0]].combine_chunks())
        left = self.left[self.payload[0]].take(places.drop_null())
        right = self.right[self.payload[1]].filter(pc.is_valid(places))
        return Answer(len(left), pc.sum(left).as_py(), pc.sum(right).as_py())


@dataclass(frozen=True)
class Answer:
    """What of a result is compared with what is right."""

    rows: int
    left_sum: int
    right_sum: int

    @staticmethod
    def of(table: pa.Table, payload: tuple[str, str]) -> Answer:
        left, right = (pc.sum(table[name]).as_py() for name in payload)
        return Answer(table.num_rows, left, right)


def integers(bits: int, rows: int, seed: int = 1) -> Workload:
    """Dense keys in random order, foreign keys drawn uniformly, and a payload column of the same width on each side."""
    rng = np.random.default_rng(seed)
    type_ = {32: np.int32, 64: np.int64}[bits]
    left = {"k": rng.permutation(rows).astype(type_), "a": rng.integers(0, 1 << 31, rows).astype(type_)}
    right = {"k": rng.integers(0, rows, 2 * rows).astype(type_), "b": rng.integers(0, 1 << 31, 2 * rows).astype(type_)}
    return Workload(pa.table(left), pa.table(right), ("k", "k"), ("a", "b"))


def strings(rows: int, seed: int = 1) -> Workload:
    """Keys of 10 to 16 characters, for up to ten million rows."""
    rng = np.random.default_rng(seed)
    names = pa.array(np.char.add("customer-", rng.permutation(rows).astype(str)).tolist())
    left = pa.table({"k": names, "a": np.arange(rows)})
    places = rng.integers(0, rows, 2 * rows)
    right = pa.table({"k": names.take(pa.array(places)), "b": np.arange(2 * rows)})
    return Workload(left, right, ("k", "k"), ("a", "b"))


def tpch(folder: Path) -> Workload:
    """lineitem with its orders: four columns of each."""
    import pyarrow.parquet

    orders = pyarrow.parquet.read_table(
        next(folder.rglob("orders*.parquet")), columns=["o_orderkey", "o_custkey", "o_orderdate", "o_shippriority"]
    )
    lineitem = pyarrow.parquet.read_table(
        next(folder.rglob("lineitem*.parquet")), columns=["l_orderkey", "l_partkey", "l_quantity", "l_extendedprice"]
    )
    return Workload(orders, lineitem, ("o_orderkey", "l_orderkey"), ("o_custkey", "l_partkey"))


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


# The engines. Each loads the tables and gives a function that runs the join once, which answers with the seconds by
# what was timed and what of the result is to be checked. Each forgets the workload before it is measured: what only the
# loading needed is not the engine's memory.


@dataclass
class Engine:
    """What was loaded, and how to run the join on it."""

    version: str
    pid: int
    """The process whose memory counts."""
    run: Callable[[], tuple[dict[str, float], list[Answer]]]
    describe: Callable[[], dict[str, object]] = dict
    """More about the last run."""


def timed(join: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = join()
    return time.perf_counter() - start, result


def result_columns(work: Workload) -> str:
    _, right = work.on
    columns = [f"l.{name}" for name in work.left.column_names]
    return ", ".join(columns + [f"r.{name}" for name in work.right.column_names if name != right])


def inner_join(work: Workload) -> str:
    return f"SELECT {result_columns(work)} FROM l JOIN r ON l.{work.on[0]} = r.{work.on[1]}"


@contextmanager
def duckdb_engine(work: Workload, cores: int) -> Iterator[Engine]:
    import duckdb

    with duckdb.connect(config={"threads": cores}) as db:
        # As Dovetail, which promises no order either: keeping it costs DuckDB time.
        db.execute("SET preserve_insertion_order = false")
        db.register("left_table", work.left)
        db.register("right_table", work.right)
        db.execute("CREATE TABLE l AS SELECT * FROM left_table; CREATE TABLE r AS SELECT * FROM right_table")
        db.unregister("left_table")
        db.unregister("right_table")
        query, payload = inner_join(work), work.payload
        del work

        def run() -> tuple[dict[str, float], list[Answer]]:
            seconds = {}
            seconds["to Arrow"], table = timed(lambda: db.sql(query).to_arrow_table())
            answers = [Answer.of(table, payload)]
            del table
            seconds["CREATE TABLE AS"], _ = timed(lambda: db.execute(f"CREATE TABLE result AS {query}"))
            [(rows, left, right)] = db.execute(
                f"SELECT count(*), sum({payload[0]}), sum({payload[1]}) FROM result"
            ).fetchall()
            answers.append(Answer(rows, int(left), int(right)))
            db.execute("DROP TABLE result")
            return seconds, answers

        yield Engine(duckdb.__version__, os.getpid(), run)


@contextmanager
def polars_engine(work: Workload, cores: int) -> Iterator[Engine]:
    import polars

    if polars.thread_pool_size() != cores:
        raise SystemExit(f"Polars has {polars.thread_pool_size()} threads, not {cores}")
    left, right = polars.from_arrow(work.left), polars.from_arrow(work.right)
    on, payload = {"left_on": work.on[0], "right_on": work.on[1]}, work.payload
    del work

    def run() -> tuple[dict[str, float], list[Answer]]:
        seconds, result = timed(lambda: left.join(right, how="inner", **on))
        # Polars sums integers of four bytes in four bytes.
        sums = [result[name].cast(polars.Int64).sum() for name in payload]
        return {"join": seconds}, [Answer(result.height, *sums)]

    yield Engine(polars.__version__, os.getpid(), run)


@contextmanager
def datafusion_engine(work: Workload, cores: int) -> Iterator[Engine]:
    import datafusion

    context = datafusion.SessionContext(datafusion.SessionConfig().with_target_partitions(cores))
    for name, table in (("l", work.left), ("r", work.right)):
        batches = table.combine_chunks().to_batches(max_chunksize=-(-table.num_rows // (cores * 16)))
        parts = [batches[index::cores] for index in range(cores)]
        context.register_record_batches(name, [part for part in parts if part])
    query, payload = inner_join(work), work.payload
    del work, table, batches, parts

    def run() -> tuple[dict[str, float], list[Answer]]:
        seconds, batches = timed(lambda: context.sql(query).collect())
        return {"join": seconds}, [Answer.of(pa.Table.from_batches(batches), payload)]

    yield Engine(datafusion.__version__, os.getpid(), run)


@contextmanager
def dovetail_engine(work: Workload, cores: int, devices: str = "host:1") -> Iterator[Engine]:
    import dovetail

    memory = 4 * (work.left.nbytes + 2 * work.right.nbytes) + (1 << 30)
    settings = {"devices": devices, "host_memory": memory, "log": "warn"}
    if devices.startswith("host"):
        settings["device_memory"] = memory
    # The server is kept to this process's processors, and makes as many threads.
    with Dovetail(**settings) as server, dovetail.connect(server.uri) as client:
        client.put("l", work.left)
        client.put("r", work.right)
        on, payload = dict([work.on]), work.payload
        del work
        last: dict[str, object] = {}

        def run() -> tuple[dict[str, float], list[Answer]]:
            start = time.perf_counter()
            with client.join("l", "r", on=on) as result:
                table = result.table()
                through_client = time.perf_counter() - start
                status = result.status().raw
            last.update(strategy=status.get("strategy"), phases=status.get("phases"))
            seconds = {"join": float(status["run_seconds"]), "through the client": through_client}
            return seconds, [Answer.of(table, payload)]

        def describe() -> dict[str, object]:
            return {**last, "arena_max_bytes": metrics(server.admin)['dovetail_arena_bytes{kind="used_max"}']}

        yield Engine(str(client.server_info()["version"]), server.pid, run, describe)


def serve(name: str, workload: str, rows: int, folder: str | None, cores: int, devices: str) -> None:
    """A worker: loads, then runs once for every line on standard input."""
    keep_to_cores(cores)
    engines = {
        "dovetail": partial(dovetail_engine, devices=devices),
        "duckdb": duckdb_engine,
        "polars": polars_engine,
        "datafusion": datafusion_engine,
    }
    work = load(workload, rows, folder)
    expected, input_bytes = work.expected(), work.left.nbytes + work.right.nbytes
    with engines[name](work, cores) as engine:
        del work
        gc.collect()
        pa.default_memory_pool().release_unused()
        resident = reset_memory_max(engine.pid)
        about = {"bytes": input_bytes, "rows": expected.rows, "version": engine.version, "resident_bytes": resident}
        print(json.dumps(about), flush=True)
        for _ in sys.stdin:
            seconds, answers = engine.run()
            for answer in answers:
                if answer != expected:
                    raise SystemExit(f"{name} found {answer}, expected {expected}")
            peak = memory_max_bytes(engine.pid)
            answer = {"seconds": seconds, "memory_max_bytes": peak, "memory_increase_bytes": peak - resident}
            print(json.dumps({**answer, **engine.describe()}), flush=True)


class Worker:
    """An engine in a process of its own."""

    def __init__(self, engine: str, workload: str, rows: int, folder: str | None, cores: int, devices: str) -> None:
        environment = {**os.environ, "POLARS_MAX_THREADS": str(cores), "OMP_NUM_THREADS": str(cores)}
        command = [sys.executable, __file__, "--serve", engine, "--workloads", workload, "--rows", str(rows)]
        command += ["--cores", str(cores), "--devices", devices, *(["--tpch", folder] if folder else [])]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        try:
            self.about = self._read()
        except BaseException:
            self.stop()
            raise

    def run(self) -> dict[str, object]:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        """Lets it end its server, if it has one, and end."""
        self.process.stdin.close()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
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
    parser.add_argument("--devices", default="host:1", help="what Dovetail runs on: host:1, cuda:1")
    parser.add_argument("--tpch", help="folder with Parquet files of orders and lineitem")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(
            arguments.serve, arguments.workloads[0], arguments.rows, arguments.tpch, arguments.cores, arguments.devices
        )
        return
    recorder = Recorder("joins_vs_peers")
    for workload in arguments.workloads:
        compare(workload, arguments, recorder)
    print(f"appended to {recorder.path}")


def compare(workload: str, arguments: argparse.Namespace, recorder: Recorder) -> None:
    workers: dict[str, Worker] = {}
    answers: dict[str, list[dict[str, object]]] = {engine: [] for engine in arguments.engines}
    try:
        for engine in arguments.engines:
            workers[engine] = Worker(
                engine, workload, arguments.rows, arguments.tpch, arguments.cores, arguments.devices
            )
        for repeat in range(-1, arguments.repeat):
            # Each goes first, second, ... in turn; the first round warms up.
            first = repeat % len(arguments.engines)
            for engine in arguments.engines[first:] + arguments.engines[:first]:
                answer = workers[engine].run()
                if repeat >= 0:
                    answers[engine].append(answer)
    finally:
        for worker in workers.values():
            worker.stop()
    about = next(iter(workers.values())).about
    print(f"{workload}: {about['bytes'] / 1e6:,.0f} MB in, {about['rows']:,} rows out, {arguments.cores} cores")
    for engine, runs in answers.items():
        about = workers[engine].about
        timings = {what: median([run["seconds"][what] for run in runs]) for what in runs[0]["seconds"]}
        # Of the two ways to take DuckDB's result, the one to compare with; the others have one.
        faster = min(timings, key=timings.get) if engine == "duckdb" else None
        peak = max(run["memory_max_bytes"] for run in runs)
        grown = max(run["memory_increase_bytes"] for run in runs)
        shown = ", ".join(f"{what} {seconds:.3f} s" for what, seconds in timings.items())
        if faster:
            shown += f" (faster: {faster})"
        print(
            f"  {engine:10} {about['version']:8} {shown}; {peak / 1e6:,.0f} MB resident at most, "
            f"{grown / 1e6:,.0f} MB more than before the joins"
        )
        recorder.write(
            benchmark="joins_vs_peers", workload=workload, engine=engine, version=about["version"],
            cores=arguments.cores, devices=arguments.devices if engine == "dovetail" else None,
            input_bytes=about["bytes"], result_rows=about["rows"], median_seconds=timings,
            faster=faster, resident_bytes_before=about["resident_bytes"], memory_max_bytes=peak,
            memory_increase_bytes=grown, runs=runs,
        )  # fmt: skip


if __name__ == "__main__":
    main()
