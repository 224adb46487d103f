"""How long a device is held by a join after somebody cancels it.

    python benches/cancel.py --repeat 12

Each time a new server, whose arena has no memory yet, joins 2^24 with 2^25 rows, one payload column of text among them.
The join is cancelled at a random time while it runs. Two times are taken, from the client's call: until the call is
answered, and until the server's metrics say that no job runs.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time

import numpy as np
import pyarrow as pa

import dovetail
from common import VIRGIN, Dovetail, Recorder, median, metrics

RUNNING = 'dovetail_jobs{state="running"}'

# Joins that are complete before they are cancelled, one after the other, after which all would be.
COMPLETE_MAX = 10


def tables(rows: int, seed: int) -> tuple[pa.Table, pa.Table]:
    """A build side of distinct keys, and a probe side of twice as many rows that find one each."""
    generator = np.random.default_rng(seed)
    numbers = generator.integers(0, 1 << 31, 2 * rows)
    left = pa.table({"k": generator.permutation(rows).astype(np.int32), "a": numbers[:rows]})
    keys = generator.integers(0, rows, 2 * rows).astype(np.int32)
    return left, pa.table({"k": keys, "b": numbers, "text": pa.array(numbers).cast(pa.string())})


def wait_until_none_runs(admin: str) -> None:
    while metrics(admin).get(RUNNING, 0.0) > 0:
        time.sleep(0.001)


def cancelled(left: pa.Table, right: pa.Table, after: float, host_memory: str) -> dict[str, float] | None:
    """One join that is cancelled `after` seconds; `None` where it was complete by then."""
    with Dovetail(devices="host:1", host_memory=host_memory) as server:
        client = dovetail.connect(server.uri)
        client.put("left", left)
        client.put("right", right)
        job = client.submit("left", "right", on="k")
        while job.status().state == "queued":
            time.sleep(0.001)
        time.sleep(after)
        if job.status().state != "running":
            return None
        start = time.perf_counter()
        job.cancel()
        answered = time.perf_counter()
        wait_until_none_runs(server.admin)
        ended = time.perf_counter()
        with contextlib.suppress(dovetail.Error):
            job.wait()
        return {
            "after_seconds": round(after, 3),
            "answered_seconds": round(answered - start, 4),
            "ended_seconds": round(ended - start, 4),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1 << 24, help="rows of the smaller side")
    parser.add_argument("--repeat", type=int, default=12, help="joins that are cancelled")
    parser.add_argument(
        "--longest", type=float, default=1.5, help="seconds after which a join is cancelled at the latest"
    )
    parser.add_argument("--host-memory", default="10GiB")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    left, right = tables(options.rows, options.seed)
    times = random.Random(options.seed)
    runs: list[dict[str, float]] = []
    complete = 0
    while len(runs) < options.repeat:
        run = cancelled(left, right, times.uniform(0.0, options.longest), options.host_memory)
        if run:
            complete = 0
            runs.append(run)
            print(run, flush=True)
            continue
        complete += 1
        print("a join was complete before it was cancelled", file=sys.stderr, flush=True)
        if complete == COMPLETE_MAX:
            sys.exit(f"{complete} joins in a row were; take more --rows")
    ended = [run["ended_seconds"] for run in runs]
    recorder = Recorder("cancel")
    recorder.write(
        benchmark="cancel",
        memory=VIRGIN,
        rows=options.rows,
        median_seconds=median(ended),
        seconds_max=max(ended),
        runs=runs,
    )
    print(f"median {median(ended) * 1e3:.0f} ms, at most {max(ended) * 1e3:.0f} ms; appended to {recorder.path}")


if __name__ == "__main__":
    main()
