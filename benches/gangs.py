"""Joins on one device and on several together.

    python benches/gangs.py --devices host:2

One server has all devices. The same join runs on one of them and on gangs of two, three, ... in turn, once counted and
once with all its columns. What is taken is the time of the run in the server, as `explain` tells it, without queue and
client. Every result must have as many rows as on one device.
"""

from __future__ import annotations

import argparse

import numpy as np
import pyarrow as pa

import dovetail
from common import Dovetail, Recorder, median

# Base-2 logarithms of the rows of the build side and of the probe side.
SIZES = [(16, 24), (22, 22), (24, 24), (16, 27), (25, 27), (27, 27)]

# What is recorded of each phase.
PHASE = ("name", "predicted_seconds", "measured_seconds", "measured_bytes")


def tables(build: int, probe: int, seed: int) -> tuple[pa.Table, pa.Table]:
    """Rows of 16 bytes. Build keys are distinct, and every probe row finds one."""
    generator = np.random.default_rng(seed)
    left = pa.table({"k": generator.permutation(build), "a": np.arange(build)})
    return left, pa.table({"k": generator.integers(0, build, probe), "b": np.arange(probe)})


def run(client: dovetail.Client, count: bool, devices: int) -> tuple[float, int, dict[str, object]]:
    """One join: its time, its rows, and the devices that it ran on."""
    command = {
        "left": "left",
        "right": "right",
        "on": [{"left": "k", "right": "k"}],
        "devices": devices,
        "count": count,
    }
    with client.command({"join": command}) as result:
        rows = result.job.wait().rows
        if count:
            rows = result.table()["count"][0].as_py()
        explained = result.job.explain()
    return explained["measured_seconds"], rows, explained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="host:2", help="as for `dovetail serve --devices`")
    parser.add_argument("--host-memory", default="8GiB", help="of the server")
    parser.add_argument("--rows-max-log2", type=int, default=22, help="sizes with more rows are left out")
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each join, after one that is not timed")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    recorder = Recorder("gangs")
    with Dovetail(devices=options.devices, host_memory=options.host_memory, device_cache="0") as server:
        client = dovetail.connect(server.uri)
        devices = len(client.topology()["devices"])
        for build, probe in SIZES:
            if probe > options.rows_max_log2:
                continue
            left, right = tables(1 << build, 1 << probe, options.seed)
            client.put("left", left, mode="replace")
            client.put("right", right, mode="replace")
            for count in (True, False):
                expected: int | None = None
                times: dict[int, list[float]] = {}
                told: dict[int, dict[str, object]] = {}
                for timed in range(options.runs + 1):
                    for ranks in range(1, devices + 1):
                        seconds, rows, told[ranks] = run(client, count, ranks)
                        assert rows == (expected := rows if expected is None else expected), f"{rows} rows"
                        if timed:
                            times.setdefault(ranks, []).append(seconds)
                for ranks, seconds_of in times.items():
                    recorder.write(
                        benchmark="gangs",
                        devices=options.devices,
                        ranks=ranks,
                        distribution=told[ranks]["device"]["distribution"],
                        strategy=told[ranks]["strategy"],
                        build_rows=1 << build,
                        probe_rows=1 << probe,
                        count=count,
                        result_rows=expected,
                        runs=options.runs,
                        seconds=median(seconds_of),
                        seconds_min=min(seconds_of),
                        seconds_max=max(seconds_of),
                        predicted_seconds=told[ranks]["predicted_seconds"],
                        phases=[{key: phase[key] for key in PHASE} for phase in told[ranks]["phases"]],
                    )
                    how = f"{told[ranks]['strategy']}, {told[ranks]['device']['distribution']}"
                    what = "counted" if count else "all columns"
                    milliseconds = median(seconds_of) * 1e3
                    print(f"2^{build} x 2^{probe}, {what}, {ranks} ranks ({how}): {milliseconds:.2f} ms", flush=True)
        client.close()


if __name__ == "__main__":
    main()
