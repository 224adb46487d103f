"""What joining rows on arrival gains: the figures of the papers on streams of rows, scaled to a host.

    python benches/arrivals.py
    python benches/arrivals.py --devices cuda:1,host:1 --build-log2 26 --rows-log2 28 --cases pipelined chunks helped

A table of distinct keys stays on a device, and rows of a key and a column are joined with it. Each row has a match, and
the result has one column more. Results are checked by their number of rows and a sum.

* pipelined: the rows are joined while they arrive, and the result is read meanwhile. Beside it, phase by phase: the
  same rows uploaded as a table, then the join of both tables, then its result read. One client process does all.
* built: the table is uploaded, and a stream without rows then has it indexed. The seconds of both tell what indexing
  keys as they arrive could gain.
* chunks: the rows arrive in batches of several sizes. Beside it, for the same batches, a join of tables for each batch,
  which is uploaded, joined and read alone, so that the build side is indexed anew for each.
* skew: the keys of the rows follow Zipf's law with several exponents.
* chains: rows of a star probe one to four dimensions, of the sizes and with the shares of query 3.1 of the Star Schema
  Benchmark (a fifth of the customers and of the suppliers, six of seven years), and then all parts. In one pass, and
  beside it with a stream for each join, where the joined rows of one are the rows of the next.
* helped: joins of tables that are only counted, or read, on a GPU, on the CPU, and on both (`"devices": ["cuda:0",
  "host:0"]`). The line has the share of the rows that each took. Needs a GPU and a host device.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import dovetail
from common import Dovetail, Recorder, median, wait_until_prepared

BATCH_ROWS = 1 << 20
SCHEMA = pa.schema({"k": pa.int64(), "v": pa.int64()})


def drawn(keys: int, rows: int, exponent: float = 0.0, seed: int = 2) -> pa.RecordBatch:
    """Rows whose keys follow Zipf's law, each key with the same rank in all batches."""
    random = np.random.default_rng(seed)
    if exponent == 0:
        ranks = random.integers(0, keys, rows)
    else:
        weights = np.cumsum(np.arange(1, keys + 1, dtype=np.float64) ** -exponent)
        ranks = np.searchsorted(weights, random.random(rows) * weights[-1])
    return pa.record_batch({"k": ranks, "v": np.arange(rows)}, SCHEMA)


def check(parts: Iterator[pa.RecordBatch], rows: int, total: int) -> None:
    """Reads a result, and fails if it has other rows than expected."""
    found, found_total = 0, 0
    for part in parts:
        found += part.num_rows
        found_total += pc.sum(part["w"]).as_py() or 0
    assert (found, found_total) == (rows, total), (found, rows, found_total, total)


class Arrivals:
    """One server, the table `kept` of distinct keys, and rows that arrive."""

    def __init__(self, server: Dovetail, client: dovetail.Client, options: argparse.Namespace) -> None:
        self.server, self.client, self.options = server, client, options
        self.keys, self.rows = 1 << options.build_log2, 1 << options.rows_log2
        self.device = options.devices.split(",")[0].split(":")[0] + ":0"
        self.recorder = Recorder("arrivals")

    def write(self, case: str, **measured: object) -> None:
        of_all = {"devices": self.options.devices, "build_rows": self.keys}
        self.recorder.write(benchmark="arrivals", case=case, **of_all, **measured)
        shown = (f"{value:.4g}" if isinstance(value, float) else value for value in measured.values())
        print(case, *(f"{name}={value}" for name, value in zip(measured, shown, strict=True)), flush=True)

    def repeated(self, batch: pa.RecordBatch, rows: int) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(SCHEMA, (batch for _ in range(rows // batch.num_rows)))

    def streamed_seconds(self, batch: pa.RecordBatch, rows: int) -> float:
        total = int(batch["k"].to_numpy().sum()) * (rows // batch.num_rows)
        start = time.perf_counter()
        parts = self.client.stream_join("kept", self.repeated(batch, rows), on="k", devices=self.device)
        check(parts, rows, total)
        return time.perf_counter() - start

    def tables_seconds(self, batch: pa.RecordBatch, rows: int) -> dict[str, float]:
        """Uploads the rows as a table, joins both tables, and reads the result."""
        total = int(batch["k"].to_numpy().sum()) * (rows // batch.num_rows)
        start = time.perf_counter()
        self.client.put("arrived", self.repeated(batch, rows), mode="replace", streams=1)
        uploaded = time.perf_counter()
        with self.client.join("kept", "arrived", on="k", devices=self.device) as result:
            result.wait()
            joined = time.perf_counter()
            check(iter(result.reader()), rows, total)
        read = time.perf_counter()
        return {"upload": uploaded - start, "join": joined - uploaded, "read": read - joined}

    def pipelined(self) -> None:
        batch = drawn(self.keys, min(BATCH_ROWS, self.rows))
        for _ in range(self.options.runs):
            tables = self.tables_seconds(batch, self.rows)
            streamed = self.streamed_seconds(batch, self.rows)
            by_phase = {f"{name}_seconds": seconds for name, seconds in tables.items()}
            self.write("pipelined", rows=self.rows, streamed_seconds=streamed, **by_phase)
        self.client.drop("arrived")

    def built(self) -> None:
        order = np.random.default_rng(1).permutation(self.keys)
        table = pa.table({"k": order, "w": order})
        for _ in range(self.options.runs):
            start = time.perf_counter()
            self.client.put("built", table, mode="replace", streams=1)
            uploaded = time.perf_counter() - start
            nothing = pa.RecordBatchReader.from_batches(SCHEMA, [])
            check(iter(self.client.stream_join("built", nothing, on="k", devices=self.device)), 0, 0)
            indexed = sum(phase["seconds"] for phase in self.client.jobs()[-1].raw["phases"])
            self.write("built", upload_seconds=uploaded, index_seconds=indexed)
        self.client.drop("built")

    def chunks(self) -> None:
        for log2 in self.options.chunks_log2:
            # Many small batches take long, and fewer tell as much.
            rows = min(self.rows, 1 << (log2 + self.options.batches_log2))
            batch = drawn(self.keys, 1 << log2)
            streamed = median([self.streamed_seconds(batch, rows) for _ in range(self.options.runs)])
            # A few joins tell what each costs.
            of_tables = [sum(self.tables_seconds(batch, batch.num_rows).values()) for _ in range(3 * self.options.runs)]
            alone = batch.num_rows / median(of_tables)
            self.write(
                "chunks", rows=rows, chunk_rows=1 << log2, rows_per_second=rows / streamed, tables_rows_per_second=alone
            )
        self.client.drop("arrived")

    def skew(self) -> None:
        for exponent in self.options.zipf:
            batch = drawn(self.keys, min(BATCH_ROWS, self.rows), exponent)
            seconds = median([self.streamed_seconds(batch, self.rows) for _ in range(self.options.runs)])
            self.write("skew", rows=self.rows, zipf=exponent, rows_per_second=self.rows / seconds)

    def chains(self) -> None:
        scale = max(1, self.rows // 6_000_000)
        sizes = {"customer": 30_000 * scale, "supplier": 2_000 * scale, "date": 2_556, "part": 200_000 * scale}
        kept = {"customer": 1 / 5, "supplier": 1 / 5, "date": 6 / 7, "part": 1.0}
        random = np.random.default_rng(3)
        for name, size in sizes.items():
            keys = random.permutation(size)[: round(size * kept[name])].astype(np.int32)
            self.client.put(name, {f"{name}_key": keys, name: keys.astype(np.int64)}, mode="replace")
        rows = min(BATCH_ROWS, self.rows)
        keys = {f"lo_{name}": random.integers(0, size, rows, dtype=np.int32) for name, size in sizes.items()}
        batch = pa.record_batch({**keys, "revenue": random.integers(0, 1 << 20, rows)})
        of_all = {name: set(self.client.get(name)[f"{name}_key"].to_pylist()) for name in sizes}
        count = self.rows // rows
        for joins in range(1, len(sizes) + 1):
            names = list(sizes)[:joins]
            matched = np.ones(rows, dtype=bool)
            for name in names:
                matched &= np.isin(keys[f"lo_{name}"], np.fromiter(of_all[name], dtype=np.int32))
            expected = (count * int(matched.sum()), count * int(batch["revenue"].to_numpy()[matched].sum()))
            for in_one in (True, False):
                times = [self.star_seconds(names, batch, count, in_one, expected) for _ in range(self.options.runs)]
                self.write("chains", rows=self.rows, joins=joins, in_one=in_one, seconds=median(times))
        for name in sizes:
            self.client.drop(name)

    def star_seconds(
        self, names: list[str], batch: pa.RecordBatch, count: int, in_one: bool, expected: tuple[int, int]
    ) -> float:
        on = [{f"{name}_key": f"lo_{name}"} for name in names]
        start = time.perf_counter()
        reader = pa.RecordBatchReader.from_batches(batch.schema, (batch for _ in range(count)))
        if in_one:
            then = [dovetail.Then(name, on=pair) for name, pair in zip(names[1:], on[1:], strict=True)]
            reader = self.client.stream_join(names[0], reader, on=on[0], then=then, devices=self.device)
        else:
            for name, pair in zip(names, on, strict=True):
                reader = self.client.stream_join(name, reader, on=pair, devices=self.device)
        found, revenue = 0, 0
        for part in reader:
            found += part.num_rows
            revenue += pc.sum(part["revenue"]).as_py() or 0
        assert (found, revenue) == expected, (found, revenue, expected)
        return time.perf_counter() - start

    def helped(self) -> None:
        batch = drawn(self.keys, min(BATCH_ROWS, self.rows))
        self.client.put("arrived", self.repeated(batch, self.rows), mode="replace")
        for is_counted in (True, False):
            for devices in (["cuda:0"], ["host:0"], ["cuda:0", "host:0"]):
                for _ in range(self.options.runs):
                    self.write("helped", rows=self.rows, is_counted=is_counted, **self.joined_on(devices, is_counted))
        self.client.drop("arrived")

    def joined_on(self, devices: list[str], is_counted: bool) -> dict[str, object]:
        join = {"left": "kept", "right": "arrived", "on": [{"left": "k", "right": "k"}], "devices": devices}
        start = time.perf_counter()
        with self.client.command({"join": {**join, "count": is_counted}}) as result:
            result.job.wait()
            seconds = time.perf_counter() - start
            rows = result.table()["count"][0].as_py() if is_counted else result.job.status().rows
            assert rows == self.rows, (rows, self.rows)
            ranks = result.job.status().raw.get("ranks") or []
        taken = {rank["device"]: rank["probe_rows"] / self.rows for rank in ranks}
        return {"on": " ".join(devices), "seconds": seconds, "shares": taken}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="host:1", help="as for `dovetail serve --devices`; the first is the one")
    parser.add_argument("--host-memory", default="4GiB", help="of the server")
    parser.add_argument("--build-log2", type=int, default=20, help="base-2 logarithm of the table's rows")
    parser.add_argument("--rows-log2", type=int, default=24, help="base-2 logarithm of the rows that arrive")
    parser.add_argument("--chunks-log2", type=int, nargs="+", default=[10, 14, 18, 20], help="rows of a batch")
    parser.add_argument("--batches-log2", type=int, default=11, help="and of the most batches of a stream of `chunks`")
    parser.add_argument("--zipf", type=float, nargs="+", default=[0, 0.5, 1, 1.5])
    parser.add_argument("--runs", type=int, default=3)
    cases = ["pipelined", "built", "chunks", "skew", "chains", "helped"]
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases[:-1])
    options = parser.parse_args()
    with (
        Dovetail(devices=options.devices, host_memory=options.host_memory) as server,
        dovetail.connect(server.uri) as client,
    ):
        arrivals = Arrivals(server, client, options)
        order = np.random.default_rng(1).permutation(arrivals.keys)
        client.put("kept", {"k": order, "w": order})
        wait_until_prepared(server)
        for case in options.cases:
            getattr(arrivals, case)()


if __name__ == "__main__":
    main()
