"""Joins with rows that arrive: how long a question takes, and how many rows a second pass.

    python benches/streams.py
    python benches/streams.py --device cuda:1 --build-log2 26 --rows-log2 30

A table of distinct keys is joined with rows of a key and a column, and the result has one column more. Each row has a
match. Clients are processes.

* questions: one client, or several, send a batch and wait for all of its joined rows, again and again. Measured are the
  median and the 99th percentile of that time, for batches of 1, 1,000 and 1,000,000 rows.
* rate: one stream, or several, send batches of a million rows without waiting, until all rows are joined. Beside it, in
  the same run: the same bytes uploaded as a table (DoPut), and the bytes of the result read (DoGet). The memory of the
  server is the most that it has resident while the streams run.

Every answer must have as many rows as were sent, and the sums of a stream must be right.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from multiprocessing.queues import Queue

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import dovetail
from common import Dovetail, Recorder, at_once, median, memory_max_bytes, reset_memory_max, wait_until_prepared

BATCH_ROWS = 1_000_000
SCHEMA = pa.schema({"k": pa.int64(), "v": pa.int64()})
# Questions of a client at least, whatever they take.
QUESTIONS_MIN = 5
# Seconds within which a client must be done, also with the largest tables.
TIMEOUT = 600


def batch(keys: int, rows: int, seed: int) -> pa.RecordBatch:
    random = np.random.default_rng(seed)
    return pa.record_batch({"k": random.integers(0, keys, rows), "v": np.arange(rows)}, SCHEMA)


def asker(uri: str, keys: int, rows: int, seconds: float, seed: int, go: object, found: Queue) -> None:
    """Asks for some seconds, and tells the time of each question."""
    question = batch(keys, rows, seed)
    with dovetail.connect(uri) as client, client.open_stream("kept", SCHEMA, on="k") as stream:
        stream.ask(question)
        go.wait()
        start, times = time.perf_counter(), []
        while time.perf_counter() - start < seconds or len(times) < QUESTIONS_MIN:
            asked = time.perf_counter()
            answer = stream.ask(question)
            times.append(time.perf_counter() - asked)
            assert answer.num_rows == rows, f"{answer.num_rows} rows, not {rows}"
        found.put(times)


def streamer(uri: str, keys: int, rows: int, seed: int, go: object, found: Queue) -> None:
    """Sends all rows, and tells when the first batch was sent and the last row had come."""
    # One batch again and again, so that making rows takes no time.
    sent = batch(keys, min(rows, BATCH_ROWS), seed)
    count = rows // sent.num_rows
    with dovetail.connect(uri) as client:

        def batches() -> Iterator[pa.RecordBatch]:
            for _ in range(count):
                yield sent

        reader = pa.RecordBatchReader.from_batches(SCHEMA, batches())
        go.wait()
        start = time.time()
        joined, total = 0, 0
        for part in client.stream_join("kept", reader, on="k"):
            joined += part.num_rows
            total += pc.sum(part["w"]).as_py() or 0
        end = time.time()
    expected = count * int(sent["k"].to_numpy().sum())
    assert (joined, total) == (count * sent.num_rows, expected), (joined, total, expected)
    found.put((start, end))


def plain(client: dovetail.Client, keys: int, rows: int) -> dict[str, float]:
    """Seconds to upload the rows of a stream as a table, and to read the rows of its result from a table."""
    sent = batch(keys, min(rows, BATCH_ROWS), 0)
    table = pa.Table.from_batches([sent] * (rows // sent.num_rows))
    start = time.perf_counter()
    client.put("uploaded", table, mode="replace")
    uploaded = time.perf_counter() - start
    client.put("uploaded", table.append_column("w", table["k"]), mode="replace")
    start = time.perf_counter()
    assert client.get("uploaded").num_rows == table.num_rows
    read = time.perf_counter() - start
    client.drop("uploaded")
    return {"put_seconds": uploaded, "get_seconds": read}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="host:1", help="as for `dovetail serve --devices`")
    parser.add_argument("--host-memory", default="4GiB", help="of the server")
    parser.add_argument("--build-log2", type=int, default=20, help="base-2 logarithm of the table's rows")
    parser.add_argument(
        "--rows-log2", type=int, default=26, help="base-2 logarithm of the rows of all streams together"
    )
    parser.add_argument("--plain-log2", type=int, default=24, help="and of those of DoPut and DoGet")
    parser.add_argument("--questions", type=int, nargs="+", default=[1, 1000, 1_000_000], help="rows of a question")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seconds", type=float, default=5, help="of questions")
    options = parser.parse_args()
    recorder = Recorder("streams")
    keys = 1 << options.build_log2
    of_all = {"device": options.device, "build_rows": keys}
    with (
        Dovetail(devices=options.device, host_memory=options.host_memory) as server,
        dovetail.connect(server.uri) as client,
    ):
        order = np.random.default_rng(1).permutation(keys)
        client.put("kept", {"k": order, "w": order})
        wait_until_prepared(server)
        for clients in options.clients:
            for rows in options.questions:
                told = at_once(
                    asker, [(server.uri, keys, rows, options.seconds, seed) for seed in range(clients)], TIMEOUT
                )
                times = sorted(seconds for of_client in told for seconds in of_client)
                late = times[min(len(times) - 1, int(0.99 * len(times)))]
                line = {"clients": clients, "rows": rows, "questions": len(times)}
                recorder.write(
                    benchmark="streams", case="questions", **of_all, **line,
                    median_seconds=median(times), p99_seconds=late,
                )  # fmt: skip
                print(f"{clients} clients, {rows:,} rows: median {1e3 * median(times):.2f} ms, p99 {1e3 * late:.2f} ms")
        found = plain(client, keys, 1 << options.plain_log2)
        for clients in options.clients:
            rows = (1 << options.rows_log2) // clients // BATCH_ROWS * BATCH_ROWS
            before = reset_memory_max(server.pid)
            told = at_once(streamer, [(server.uri, keys, rows, seed) for seed in range(clients)], TIMEOUT)
            seconds = max(end for _, end in told) - min(start for start, _ in told)
            rate = clients * rows / seconds
            put_rate, get_rate = ((1 << options.plain_log2) / found[name] for name in ("put_seconds", "get_seconds"))
            memory = memory_max_bytes(server.pid)
            recorder.write(
                benchmark="streams", case="rate", **of_all, clients=clients, rows=clients * rows, seconds=seconds,
                rows_per_second=rate, put_rows_per_second=put_rate, get_rows_per_second=get_rate,
                memory_before_bytes=before, memory_max_bytes=memory,
            )  # fmt: skip
            print(
                f"{clients} streams: {rate / 1e6:.1f} million rows/s, beside {put_rate / 1e6:.1f} uploaded and "
                f"{get_rate / 1e6:.1f} read; {memory / 2**20:.0f} MiB, {before / 2**20:.0f} before"
            )


if __name__ == "__main__":
    main()
