"""How long after the end of a join its client knows of the end: from the request to the answer of `wait`.

    python benches/waits.py --repeat 200

Joins of several sizes, one after the other, on a server with one CPU device. Of each: the time of the job itself, from
its start on the device to its end, and the time of the client, from the call of `submit` to the return of `wait`. The
difference is what asking costs: the plan, the queue, two calls, and how late the client learns of the end.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
import pyarrow as pa

import dovetail
from common import Dovetail, Recorder, median


def tables(rows: int, seed: int) -> tuple[pa.Table, pa.Table]:
    """A build side of distinct keys, and a probe side of as many rows that find one each."""
    generator = np.random.default_rng(seed)
    left = pa.table({"k": generator.permutation(rows).astype(np.int32), "a": generator.integers(0, 1 << 31, rows)})
    right = pa.table({"k": generator.integers(0, rows, rows).astype(np.int32), "b": generator.integers(0, 9, rows)})
    return left, right


def waited(client: dovetail.Client) -> dict[str, float]:
    """Milliseconds of one join."""
    start = time.perf_counter()
    job = client.submit("left", "right", on="k")
    status = job.wait()
    client_ms = 1000 * (time.perf_counter() - start)
    job.cancel()
    job_ms = 1000 * float(status.raw["run_seconds"])
    return {"job_ms": job_ms, "client_ms": client_ms, "on_top_ms": client_ms - job_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1 << 12, 1 << 18, 1 << 21], help="rows of each side")
    parser.add_argument("--repeat", type=int, default=200, help="joins of each size")
    parser.add_argument("--devices", default="host:1")
    parser.add_argument("--host-memory", default="4GiB")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    recorder = Recorder("waits")
    with Dovetail(devices=options.devices, host_memory=options.host_memory) as server:
        client = dovetail.connect(server.uri)
        for rows in options.rows:
            for name, table in zip(("left", "right"), tables(rows, options.seed), strict=True):
                client.put(name, table, mode="replace")
            for _ in range(5):
                waited(client)
            times = [waited(client) for _ in range(options.repeat)]
            measured: dict[str, object] = {"rows": rows, "repeat": options.repeat, "devices": options.devices}
            for name in times[0]:
                values = sorted(each[name] for each in times)
                measured[name] = round(median(values), 3)
                measured[f"{name}_p90"] = round(values[len(values) * 9 // 10], 3)
            recorder.write(**measured)
            print(", ".join(f"{name} {value}" for name, value in measured.items()))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
