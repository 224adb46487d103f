"""What it costs a join that its device has a process of its own.

    python benches/own_process.py --device cuda:1

Two servers, one of them with `--device-processes on`, have the same tables and join them in turn, every result with all
its columns. What is taken is the time of the run on the device's thread in the server, as `explain` tells it, without
queue and client.
"""

from __future__ import annotations

import argparse

import numpy as np
import pyarrow as pa

import dovetail
from common import USED_BEFORE, Dovetail, Recorder, median

# Rows of the build and of the probe side, and timed joins.
SIZES = [(43_000, 205_000, 60), (1_200_000, 1_200_000, 60), (1 << 24, 1 << 24, 9), (1 << 26, 1 << 26, 9)]


def tables(build: int, probe: int, seed: int) -> tuple[pa.Table, pa.Table]:
    """A build side of distinct keys, and a probe side of which a row finds one where both sides have as many rows."""
    generator = np.random.default_rng(seed)
    keys = generator.permutation(probe).astype(np.int32)
    left = pa.table({"k": keys[:build], "a": np.arange(build, dtype=np.int32)})
    keys = generator.integers(0, probe, probe).astype(np.int32)
    return left, pa.table({"k": keys, "b": np.arange(probe, dtype=np.int32)})


def run_seconds(client: dovetail.Client, rows: int | None) -> tuple[float, int]:
    """One join: its time, and its rows, which must be those of the join before."""
    job = client.submit("left", "right", on="k")
    found = job.wait().rows
    assert rows in (None, found), f"{found} rows, and {rows} before"
    seconds = job.explain()["measured_seconds"]
    job.cancel()
    return seconds, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="host:1", help="as for `dovetail serve --devices`: one device")
    parser.add_argument("--host-memory", default="8GiB", help="of each of both servers")
    parser.add_argument("--rows-max", type=int, default=1 << 24, help="sizes with more rows are left out")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.rows_max < max(SIZES[0][:2]):
        parser.error(f"--rows-max {options.rows_max} leaves out all sizes; the smallest has {max(SIZES[0][:2])} rows")
    recorder = Recorder("own_process")
    shared = {"devices": options.device, "host_memory": options.host_memory, "device_cache": "0"}
    with Dovetail(device_processes="off", **shared) as one, Dovetail(device_processes="on", **shared) as own:
        clients = {"off": dovetail.connect(one.uri), "on": dovetail.connect(own.uri)}
        for build, probe, runs in SIZES:
            if max(build, probe) > options.rows_max:
                continue
            left, right = tables(build, probe, options.seed)
            rows: int | None = None
            seconds: dict[str, list[float]] = {"off": [], "on": []}
            for client in clients.values():
                client.put("left", left, mode="replace")
                client.put("right", right, mode="replace")
                # Memory that was never used is not what is measured.
                _, rows = run_seconds(client, rows)
            for _ in range(runs):
                for processes, client in clients.items():
                    seconds[processes].append(run_seconds(client, rows)[0])
            for processes, times in seconds.items():
                recorder.write(
                    benchmark="own_process",
                    device=options.device,
                    device_processes=processes,
                    memory=USED_BEFORE,
                    build_rows=build,
                    probe_rows=probe,
                    result_rows=rows,
                    runs=runs,
                    seconds=median(times),
                    seconds_min=min(times),
                    seconds_max=max(times),
                )
                print(f"{build} x {probe}, processes {processes}: {median(times) * 1e3:.2f} ms", flush=True)
        for client in clients.values():
            client.close()


if __name__ == "__main__":
    main()
