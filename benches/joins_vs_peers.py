"""Joins against DuckDB, Polars and DataFusion on the same cores, the result materialized.

Every engine runs in a process of its own that is kept to the same processors, with its tables loaded; they take
turns in a changing order, several times over. A join is timed from the request to the last column in memory, and
every result is checked: its number of rows, and the sum of a payload column of each side. The order of the rows is
nobody's promise here, DuckDB's neither.

Dovetail is timed twice: its engine, by the job's own record, and through the client, with the result fetched over
loopback. So is DuckDB: as an Arrow table (`to_arrow_table`), and as a table of its own (`CREATE TABLE AS`).

    python benches/joins_vs_peers.py --workloads int4 int8 string tpch --repeat 5

Dovetail runs on the CPU; ``--devices cuda:1`` gives it a GPU, and the others the cores that they have. Its time through
the client is recorded with its shares: the request and planning, the queue, the join, and the rest of the way back;
with the bytes that cross each boundary, and how long each would take them alone. ``--streams`` measures it with so many
streams of the result, by a server for each number, and ``--device-cache 0`` has the tables cross the GPU's link in
every join:

    python benches/joins_vs_peers.py --devices cuda:1 --workloads wide --rows 134217728 --engines dovetail duckdb \
        --streams 1 2 4 --device-cache 0 --repeat 5

``--timeline`` adds when the link and the kernels of the GPU were at work. Its events cost some microseconds a call, so
it is for a run of its own.

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
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common import USED_BEFORE, Dovetail, Recorder, keep_to_cores, median, memory_max_bytes, metrics, reset_memory_max

ENGINES = ["dovetail", "duckdb", "polars", "datafusion"]
STOP_SECONDS = 120

STREAMS = 4
"""Streams that fetch a result, if no other number is given."""


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
        return Answer.of(pa.table([left, right], ["left", "right"]), ("left", "right"))


class DenseWorkload(Workload):
    """Left keys are the numbers from 0 on, each once, and every right key is one of them.

    What is right is then known from an array, where a hash table of so many keys would take minutes and gigabytes.
    """

    def expected(self) -> Answer:
        left_keys, left_payload = (self.left[name].chunk(0).to_numpy() for name in (self.on[0], self.payload[0]))
        by_key = np.empty_like(left_payload)
        by_key[left_keys] = left_payload
        right = self.right.select([self.on[1], self.payload[1]])
        # In parts, so that what is looked up does not take the memory of a column.
        parts = (batch.columns for batch in right.to_batches(max_chunksize=1 << 24))
        return Answer.of_parts((by_key[keys.to_numpy()], payload.to_numpy()) for keys, payload in parts)


@dataclass(frozen=True)
class Answer:
    """What of a result is compared with what is right."""

    rows: int
    left_sum: int
    right_sum: int
    products: int
    """The sum of left times right, modulo 2^64: rows that are paired wrongly have another."""

    @staticmethod
    def of(table: pa.Table, payload: tuple[str, str]) -> Answer:
        # In parts, without a copy: what it takes would count as the engine's memory.
        batches = table.select(payload).to_batches(max_chunksize=1 << 20)
        return Answer.of_parts([column.to_numpy() for column in batch.columns] for batch in batches)

    @staticmethod
    def of_parts(parts: Iterable[Sequence[np.ndarray]]) -> Answer:
        rows = left_sum = right_sum = products = 0
        for left, right in parts:
            rows += len(left)
            left_sum += int(left.sum(dtype=np.int64))
            right_sum += int(right.sum(dtype=np.int64))
            products += int(np.dot(left.astype(np.uint64), right.astype(np.uint64)))
        return Answer(rows, left_sum, right_sum, products % (1 << 64))


def integers(bits: int, rows: int, seed: int = 1) -> Workload:
    """Dense keys in random order, foreign keys drawn uniformly, and a payload column of the same width on each side."""
    rng = np.random.default_rng(seed)
    type_ = {32: np.int32, 64: np.int64}[bits]
    left = {"k": rng.permutation(rows).astype(type_), "a": rng.integers(0, 1 << 31, rows).astype(type_)}
    right = {"k": rng.integers(0, rows, 2 * rows).astype(type_), "b": rng.integers(0, 1 << 31, 2 * rows).astype(type_)}
    return Workload(pa.table(left), pa.table(right), ("k", "k"), ("a", "b"))


def wide(rows: int, seed: int = 1) -> Workload:
    """As many rows on each side, of a key and two payloads of four bytes each; every right row finds its one match."""
    rng = np.random.default_rng(seed)

    def payload() -> np.ndarray:
        return rng.integers(0, 1 << 31, rows, dtype=np.int32)

    left = {"k": rng.permutation(np.arange(rows, dtype=np.int32)), "a1": payload(), "a2": payload()}
    right = {"k": rng.integers(0, rows, rows, dtype=np.int32), "b1": payload(), "b2": payload()}
    return DenseWorkload(pa.table(left), pa.table(right), ("k", "k"), ("a2", "b2"))


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
        case "wide":
            return wide(rows)
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
            left, right = payload
            products = f"sum({left}::HUGEINT * {right}) % {1 << 64}::HUGEINT"
            [sums] = db.execute(f"SELECT count(*), sum({left}), sum({right}), {products} FROM result").fetchall()
            answers.append(Answer(*map(int, sums)))
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
        parts = result.select(payload).iter_slices(1 << 20)
        return {"join": seconds}, [Answer.of_parts([column.to_numpy() for column in part] for part in parts)]

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


class Arrivals:
    """When the batches of a result came, by the clock of the request. The client calls it with each, one at a time."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self.bytes = 0

    def __call__(self, progress: object) -> None:
        # The last call only says that these were all.
        if not progress.done:
            self.last = time.perf_counter()
            self.first = self.first or self.last
            self.bytes = progress.bytes


@dataclass
class Timing:
    """One join, by the client's clock."""

    asked_at: float
    """When it was asked for, by the clock that the server's `submitted` is told by, too: it is the same machine."""
    info_seconds: float
    first_batch_seconds: float | None
    stream_seconds: float | None
    total_seconds: float
    received_bytes: int


def shares_of(
    timing: Timing,
    status: Mapping[str, object],
    again_seconds: float,
    key_bytes: int | None,
    key_hit_bytes: float,
    rates: Mapping[str, object],
) -> dict[str, object]:
    """Where the time of a join through the client went, what crossed each boundary, and how long that takes alone.

    The first four add up to the total. The result is on its way while the join runs, so that what comes after the join
    is the part of its way that nothing hides. `again_seconds`: what the same result takes to be fetched once more, when
    all of it is there. `key_bytes`: of both tables' key columns, `None` where the host packs them, and how many bytes
    cross the link is not known from here. `key_hit_bytes`: what of them the GPU had kept.
    """  # fmt: skip
    submitted = datetime.fromisoformat(str(status["submitted"]).replace("Z", "+00:00")).timestamp()
    # The server tells it to the millisecond, rounded down.
    before = max(0.0, submitted - timing.asked_at)
    queue, run = float(status["queue_seconds"]), float(status["run_seconds"])
    phases = {phase["name"]: phase for phase in status["phases"]}
    copied, gathered = phases.get("copy in", {}), phases.get("gather", {})
    has_link = not rates["reads_host_memory"]
    link_in = link_out = None
    if has_link and key_bytes is not None:
        # Keys cross it to be packed, which is another phase, and counts what packing reads and writes.
        link_in = int(copied.get("bytes", 0) + key_bytes - key_hit_bytes)
        # Half of what gathering counts is read on the GPU; the other half crosses to the host.
        link_out = gathered.get("bytes", 0) // 2

    def alone(crossing: int | None, direction: str) -> float | None:
        return None if crossing is None else crossing / rates[direction]

    return {
        "total_seconds": timing.total_seconds,
        "request_and_planning_seconds": before,
        "queue_seconds": queue,
        "join_seconds": run,
        "after_join_seconds": timing.total_seconds - before - queue - run,
        "client": {
            "flight_info_seconds": timing.info_seconds,
            "first_batch_seconds": timing.first_batch_seconds,
            "stream_seconds": timing.stream_seconds,
        },
        "bytes": {
            "link_in": link_in,
            "link_out": link_out,
            "kept_on_device": int(copied.get("kept_bytes", 0) + key_hit_bytes),
            "shared_with_table": gathered.get("in_place_bytes", 0),
            "result": status["bytes"],
            "received": timing.received_bytes,
        },
        "bytes_per_second": {
            "link_in": rates["copy_in"] if has_link else None,
            "link_out": rates["copy_out"] if has_link else None,
            "loopback": timing.received_bytes / again_seconds,
        },
        "floor_seconds": {
            "link_in": alone(link_in, "copy_in"),
            "link_out": alone(link_out, "copy_out"),
            "loopback": again_seconds,
        },
    }


# Names of copies in a timeline, as `src/device/cuda` gives them.
LINK_IN = {"copying a column to the device"}
LINK_OUT = {
    "gathering a column of the result", "copying a column from the device", "copying row positions to host memory",
}  # fmt: skip


class Timeline:
    """What a GPU has done, as the server writes it with ``DOVETAIL_GPU_OBSERVER=timeline:FILE``."""

    SETTLE_SECONDS = 0.2
    """A job's last lines may be written a moment after its client has its rows."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read = 0

    def news(self) -> list[dict[str, object]]:
        """Work that was not told before."""
        time.sleep(self.SETTLE_SECONDS)
        with self._file.open() as lines:
            lines.seek(self._read)
            text = lines.read()
        whole = text[: text.rfind("\n") + 1]
        self._read += len(whole.encode())
        return [json.loads(line.rstrip(",")) for line in whole.splitlines() if line != "["]

    @staticmethod
    def shares(work: list[dict[str, object]]) -> dict[str, object]:
        """For how long the link and the kernels were at work, which overlap; and from the first of it to the last."""
        parts: dict[str, list[dict[str, object]]] = {"link_in": [], "kernels": [], "link_out": []}
        for piece in work:
            link = "link_in" if piece["name"] in LINK_IN else "link_out" if piece["name"] in LINK_OUT else "kernels"
            parts[link].append(piece)
        if not parts["link_in"] and not parts["link_out"]:
            names = ", ".join(sorted({str(piece["name"]) for piece in work})) or "nothing"
            raise SystemExit(f"the timeline has no copy over the link, only {names}; have names of copies changed?")
        first = min(piece["ts"] for piece in work)
        shares: dict[str, object] = {"seconds": (max(piece["ts"] + piece["dur"] for piece in work) - first) / 1e6}
        for name, pieces in parts.items():
            shares[f"{name}_busy_seconds"] = busy(pieces) / 1e6
            if name != "kernels":
                shares[f"{name}_bytes"] = sum(piece["args"]["bytes"] for piece in pieces)
        return shares


def busy(pieces: Iterable[dict[str, object]]) -> float:
    """The time in which any of these was under way, on whichever stream."""
    total, until = 0.0, float("-inf")
    for start, end in sorted((piece["ts"], piece["ts"] + piece["dur"]) for piece in pieces):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


@contextmanager
def dovetail_engine(
    work: Workload,
    cores: int,
    devices: str = "host:1",
    streams: int = STREAMS,
    device_cache: str | None = None,
    timeline: bool = False,
) -> Iterator[Engine]:
    import dovetail

    memory = 4 * (work.left.nbytes + 2 * work.right.nbytes) + (1 << 30)
    settings = {"devices": devices, "host_memory": memory, "endpoints": streams, "log": "warn"}
    if devices.startswith("host"):
        settings["device_memory"] = memory
    if device_cache is not None:
        settings["device_cache"] = device_cache
    folder = tempfile.TemporaryDirectory(prefix="dovetail-timeline-")
    file = Path(folder.name) / "timeline.json"
    environment = {"DOVETAIL_GPU_OBSERVER": f"timeline:{file}"} if timeline else {}
    # The server is kept to this process's processors, and makes as many threads.
    with (
        folder,
        Dovetail(environment=environment, **settings) as server,
        dovetail.connect(server.uri) as client,
    ):
        client.put("l", work.left)
        client.put("r", work.right)
        on, payload = dict([work.on]), work.payload
        keys = [work.left[work.on[0]], work.right[work.on[1]]]
        # Others than numbers are packed by the host, or only in part.
        key_bytes = sum(key.nbytes for key in keys) if all(pa.types.is_integer(key.type) for key in keys) else None
        del work, keys
        rates = {one["device"]: one["rates"]["values"] for one in client.server_info()["devices"]}
        watched = Timeline(file) if timeline else None
        last: dict[str, object] = {}

        def hit_bytes() -> float:
            found = metrics(server.admin).items()
            return sum(value for name, value in found if name.startswith("dovetail_device_cache_hit_bytes_total"))

        def run() -> tuple[dict[str, float], list[Answer]]:
            hits = hit_bytes()
            if watched:
                watched.news()
            arrivals = Arrivals()
            asked_at, start = time.time(), time.perf_counter()
            with client.join("l", "r", on=on) as result:
                info_seconds = time.perf_counter() - start
                table = result.table(progress=arrivals)
                through_client = time.perf_counter() - start
                status = result.status().raw
                hits = hit_bytes() - hits
                gpu = Timeline.shares(watched.news()) if watched else None
                answer = Answer.of(table, payload)
                # Its memory, before the same rows come once more.
                del table
                again_seconds, _ = timed(result.table)
            first, end = arrivals.first, arrivals.last
            timing = Timing(
                asked_at, info_seconds, first and first - start, first and end - first, through_client, arrivals.bytes
            )
            kept = next((phase["kept_bytes"] for phase in status["phases"] if phase["name"] == "copy in"), 0)
            shares = shares_of(timing, status, again_seconds, key_bytes, max(0.0, hits - kept), rates[status["device"]])
            last.update(strategy=status["strategy"], phases=status["phases"], shares={**shares, "gpu": gpu})
            seconds = {"join": float(status["run_seconds"]), "through the client": through_client}
            return seconds, [answer]

        def describe() -> dict[str, object]:
            return {**last, "arena_max_bytes": metrics(server.admin)['dovetail_arena_bytes{kind="used_max"}']}

        yield Engine(str(client.server_info()["version"]), server.pid, run, describe)


def serve(name: str, workload: str, streams: int, arguments: argparse.Namespace) -> None:
    """A worker: loads, then runs once for every line on standard input."""
    keep_to_cores(arguments.cores)
    engines = {
        "dovetail": partial(
            dovetail_engine,
            devices=arguments.devices,
            streams=streams,
            device_cache=arguments.device_cache,
            timeline=arguments.timeline,
        ),
        "duckdb": duckdb_engine,
        "polars": polars_engine,
        "datafusion": datafusion_engine,
    }
    work = load(workload, arguments.rows, arguments.tpch)
    expected, input_bytes = work.expected(), work.left.nbytes + work.right.nbytes
    with engines[name](work, arguments.cores) as engine:
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


@dataclass(frozen=True)
class Contender:
    """An engine, and of Dovetail the number of its streams."""

    engine: str
    streams: int | None = None

    def __str__(self) -> str:
        if self.streams is None:
            return self.engine
        return f"{self.engine}, {self.streams} {'stream' if self.streams == 1 else 'streams'}"


class Worker:
    """An engine in a process of its own."""

    def __init__(self, contender: Contender, workload: str, arguments: argparse.Namespace) -> None:
        cores = str(arguments.cores)
        environment = {**os.environ, "POLARS_MAX_THREADS": cores, "OMP_NUM_THREADS": cores}
        command = [sys.executable, __file__, "--serve", contender.engine, "--workloads", workload]
        command += ["--rows", str(arguments.rows), "--cores", cores, "--devices", arguments.devices]
        command += ["--streams", str(contender.streams or STREAMS)]
        command += ["--device-cache", arguments.device_cache] if arguments.device_cache is not None else []
        command += ["--timeline"] if arguments.timeline else []
        command += ["--tpch", arguments.tpch] if arguments.tpch else []
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
    parser.add_argument(
        "--workloads", nargs="+", default=["int4", "int8", "string"], help="of int4, int8, string, wide and tpch"
    )
    parser.add_argument("--engines", nargs="+", default=ENGINES, choices=ENGINES)
    parser.add_argument(
        "--rows",
        type=int,
        default=1 << 24,
        help="rows of the left table; the right one has twice as many, and in `wide` as many",
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--devices", default="host:1", help="what Dovetail runs on: host:1, cuda:1")
    parser.add_argument(
        "--streams",
        type=int,
        nargs="+",
        default=[STREAMS],
        help="over how many streams Dovetail's result is fetched; a server for each number",
    )
    parser.add_argument(
        "--device-cache", help="the server's setting; 0: no column stays on a GPU, and all cross its link in every join"
    )
    parser.add_argument(
        "--timeline", action="store_true", help="record when the GPU's link and kernels were at work, which slows it"
    )
    parser.add_argument("--tpch", help="folder with Parquet files of orders and lineitem")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if min(arguments.streams) < 1 or arguments.repeat < 1:
        parser.error("--streams and --repeat take numbers of at least 1")
    if arguments.timeline and arguments.devices != "cuda:1":
        parser.error("--timeline is of one GPU: it needs --devices cuda:1")
    if arguments.serve:
        serve(arguments.serve, arguments.workloads[0], arguments.streams[0], arguments)
        return
    recorder = Recorder("joins_vs_peers")
    for workload in arguments.workloads:
        compare(workload, arguments, recorder)
    print(f"appended to {recorder.path}")


def compare(workload: str, arguments: argparse.Namespace, recorder: Recorder) -> None:
    contenders = [
        contender
        for engine in arguments.engines
        for contender in (
            [Contender(engine, streams) for streams in arguments.streams]
            if engine == "dovetail"
            else [Contender(engine)]
        )
    ]
    workers: dict[Contender, Worker] = {}
    answers: dict[Contender, list[dict[str, object]]] = {contender: [] for contender in contenders}
    try:
        for contender in contenders:
            workers[contender] = Worker(contender, workload, arguments)
        for repeat in range(-1, arguments.repeat):
            # Each goes first, second, ... in turn; the first round warms up.
            first = repeat % len(contenders)
            for contender in contenders[first:] + contenders[:first]:
                answer = workers[contender].run()
                if repeat >= 0:
                    answers[contender].append(answer)
    finally:
        for worker in workers.values():
            worker.stop()
    about = next(iter(workers.values())).about
    print(f"{workload}: {about['bytes'] / 1e6:,.0f} MB in, {about['rows']:,} rows out, {arguments.cores} cores")
    for contender, runs in answers.items():
        engine, about = contender.engine, workers[contender].about
        timings = {what: median([run["seconds"][what] for run in runs]) for what in runs[0]["seconds"]}
        # Of the two ways to take DuckDB's result, the one to compare with; the others have one.
        faster = min(timings, key=timings.get) if engine == "duckdb" else None
        peak = max(run["memory_max_bytes"] for run in runs)
        grown = max(run["memory_increase_bytes"] for run in runs)
        shown = ", ".join(f"{what} {seconds:.3f} s" for what, seconds in timings.items())
        if faster:
            shown += f" (faster: {faster})"
        print(
            f"  {contender!s:19} {about['version']:8} {shown}; {peak / 1e6:,.0f} MB resident at most, "
            f"{grown / 1e6:,.0f} MB more than before the joins"
        )
        shares = middle_shares(runs)
        if shares:
            print("".join(f"    {line}\n" for line in in_words(shares)), end="")
        of_dovetail = engine == "dovetail"
        recorder.write(
            benchmark="joins_vs_peers", workload=workload, engine=engine, version=about["version"],
            cores=arguments.cores, devices=arguments.devices if of_dovetail else None,
            device_cache=arguments.device_cache if of_dovetail else None,
            memory=USED_BEFORE if of_dovetail else None, streams=contender.streams,
            input_bytes=about["bytes"], result_rows=about["rows"], median_seconds=timings,
            faster=faster, shares=shares, resident_bytes_before=about["resident_bytes"], memory_max_bytes=peak,
            memory_increase_bytes=grown, runs=runs,
        )  # fmt: skip


def middle_shares(runs: list[dict[str, object]]) -> dict[str, object] | None:
    """The shares of the run whose total is the median, or the one below: of one run, so that they add up."""
    shares = sorted((run["shares"] for run in runs if "shares" in run), key=lambda shares: shares["total_seconds"])
    return shares[(len(shares) - 1) // 2] if shares else None


def in_words(shares: Mapping[str, object]) -> list[str]:
    def milliseconds(names: Iterable[str], of: Mapping[str, object]) -> str:
        known = [name for name in names if of[name] is not None]
        return ", ".join(f"{name.removesuffix('_seconds').replace('_', ' ')} {of[name] * 1e3:.1f} ms" for name in known)

    parts = ["request_and_planning_seconds", "queue_seconds", "join_seconds", "after_join_seconds"]
    crossed = [f"{name.replace('_', ' ')} {size / 1e6:,.1f}" for name, size in shares["bytes"].items() if size]
    lines = [
        f"of {shares['total_seconds'] * 1e3:.1f} ms: {milliseconds(parts, shares)}",
        f"at the client: {milliseconds(shares['client'], shares['client'])}",
        f"MB: {', '.join(crossed)}",
        f"alone: {milliseconds(shares['floor_seconds'], shares['floor_seconds'])}",
    ]
    if gpu := shares.get("gpu"):
        lines.append(f"GPU: {milliseconds([name for name in gpu if name.endswith('seconds')], gpu)}")
    return lines


if __name__ == "__main__":
    main()
