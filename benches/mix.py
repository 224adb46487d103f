"""Whether a server with a GPU and the CPU runs each join on the one that is quicker with it.

    python benches/mix.py --repeat 15

One server with `--devices cuda:1,host:1` joins tables of 2^10 to 2^22 rows with tables of twice as many, of a
dense key and one payload column of 8 bytes each. Each join runs on the GPU, on the CPU, and where the server
puts it, one after the other in an order that changes at random, because each finds caches, clocks and threads as
the one before has left them; what counts is the job's run time as its status tells it. The tables' columns are
not kept on the GPU, so that they cross its link each time. One JSON line per size, with medians, what was
predicted, and whether the choice was within 10 % of the better one.
"""

from __future__ import annotations

import argparse
from random import Random

import numpy as np
import pyarrow as pa

import dovetail
from common import Dovetail, Recorder, median

DEVICES = {"gpu": ["cuda:0"], "cpu": ["host:0"], "chosen": None}
TOLERANCE = 1.1


def upload(client: dovetail.Client, rows: int) -> tuple[str, str]:
    generator = np.random.default_rng(rows)
    left, right = f"left{rows}", f"right{rows}"
    client.put(left, pa.table({"k": generator.permutation(rows), "a": generator.integers(0, 1 << 40, rows)}))
    keys = generator.integers(0, rows, 2 * rows)
    client.put(right, pa.table({"k": keys, "b": generator.integers(0, 1 << 40, 2 * rows)}))
    return left, right


def measure(client: dovetail.Client, tables: tuple[str, str], rows: int, repeat: int) -> dict[str, object]:
    seconds: dict[str, list[float]] = {name: [] for name in DEVICES}
    chosen: list[str] = []
    turns = list(DEVICES.items())
    random = Random(rows)
    for _ in range(repeat):
        random.shuffle(turns)
        for name, devices in turns:
            job = client.submit(*tables, on="k", devices=devices)
            status = job.wait()
            if status.rows != 2 * rows:
                raise SystemExit(f"{rows} rows: the result has {status.rows} rows, not {2 * rows}")
            seconds[name].append(status.seconds)
            if devices is None:
                chosen.append(status.raw["device"])
            job.cancel()
    medians = {f"{name}_seconds": median(values) for name, values in seconds.items()}
    explained = {
        name: client.explain(*tables, on="k", devices=DEVICES[name])["predicted_seconds"] for name in ("gpu", "cpu")
    }
    best = min(medians["gpu_seconds"], medians["cpu_seconds"])
    return {
        "build_rows": rows,
        "probe_rows": 2 * rows,
        "repeat": repeat,
        **medians,
        **{f"{name}_predicted_seconds": value for name, value in explained.items()},
        "chosen": max(set(chosen), key=chosen.count),
        "chosen_on": {device: chosen.count(device) for device in sorted(set(chosen))},
        "within": medians["chosen_seconds"] <= TOLERANCE * best,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=15, help="joins of each size on each device")
    parser.add_argument("--devices", default="cuda:1,host:1", help="as `dovetail serve` takes them")
    parser.add_argument("--host-memory", default="4GiB")
    options = parser.parse_args()
    recorder = Recorder("mix")
    with Dovetail(devices=options.devices, host_memory=options.host_memory, device_cache=0) as server:
        client = dovetail.connect(server.uri)
        for bits in range(10, 23):
            line = measure(client, upload(client, 1 << bits), 1 << bits, options.repeat)
            recorder.write(**line)
            print(
                f"2^{bits}: GPU {1e3 * line['gpu_seconds']:.2f} ms, CPU {1e3 * line['cpu_seconds']:.2f} ms, "
                f"chosen {1e3 * line['chosen_seconds']:.2f} ms on {line['chosen_on']}"
            )


if __name__ == "__main__":
    main()
