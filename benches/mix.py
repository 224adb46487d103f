"""Whether a server with a GPU and the CPU runs each join on the one that is quicker with it.

    python benches/mix.py --repeat 15
    python benches/mix.py --repeat 15 --draw 60 --seed 1

One server with `--devices cuda:1,host:1` joins tables of 2^10 to 2^22 rows with tables of twice as many, of a
dense key and one payload column of 8 bytes each; with `--draw`, small joins drawn at random instead: 2^8 to 2^18
build rows, a quarter to sixteen times as many probe rows, keys of 4 or 8 bytes or of text, up to three payload
columns on each side, and all probe rows with a partner or few. Each join runs on the GPU, on the CPU, and where the
server puts it, one after the other in an order that changes at random, because each finds caches, clocks and
threads as the one before has left them; what counts is the job's run time as its status tells it. The tables'
columns are not kept on the GPU, so that they cross its link each time. One JSON line per join, with medians, what
was predicted, and whether the device that the server chose is within 10 % of the better one: the plan on a device is
the same whoever chose the device, so that all runs on it tell what it takes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from random import Random

import dovetail
import drawn
from common import USED_BEFORE, Dovetail, Recorder, median
from drawn import Join

DEVICES = {"gpu": ["cuda:0"], "cpu": ["host:0"], "chosen": None}
TOLERANCE = 1.1


def in_turn() -> Iterator[Join]:
    """Joins of sizes that follow on each other."""
    return (Join(1 << bits, 2 << bits) for bits in range(10, 23))


def drawn_small(count: int, seed: int) -> Iterator[Join]:
    """Small joins, which follow from the seed."""
    return drawn.joins(count, seed, build_log2=(8, 18), ratio_log2=(-2, 4))


def measure(client: dovetail.Client, join: Join, repeat: int) -> dict[str, object]:
    build, probe, rows = join.tables()
    tables = "build", "probe"
    for name, table in zip(tables, (build, probe), strict=True):
        client.put(name, table, mode="replace")
    seconds: dict[str, list[float]] = {name: [] for name in DEVICES}
    chosen: list[str] = []
    turns = list(DEVICES.items())
    random = Random(join.build_rows)
    for _ in range(repeat):
        random.shuffle(turns)
        for name, devices in turns:
            job = client.submit(*tables, on="k", devices=devices)
            status = job.wait()
            if status.rows != rows:
                raise SystemExit(f"{join}: the result has {status.rows} rows, not {rows}")
            seconds[name].append(status.seconds)
            if devices is None:
                chosen.append(status.raw["device"])
            job.cancel()
    medians = {f"{name}_seconds": median(values) for name, values in seconds.items()}
    names = {devices[0]: name for name, devices in DEVICES.items() if devices}
    on_device = {name: list(seconds[name]) for name in names.values()}
    for device, value in zip(chosen, seconds["chosen"], strict=True):
        on_device[names[device]].append(value)
    of_device = {name: median(values) for name, values in on_device.items()}
    favourite = max(set(chosen), key=chosen.count)
    times_best = of_device[names[favourite]] / min(of_device.values())
    explained = {
        name: client.explain(*tables, on="k", devices=DEVICES[name])["predicted_seconds"] for name in of_device
    }
    return {
        **asdict(join),
        "rows": rows,
        "repeat": repeat,
        "memory": USED_BEFORE,
        **medians,
        **{f"{name}_predicted_seconds": value for name, value in explained.items()},
        "all_seconds": of_device,
        "chosen": favourite,
        "chosen_on": {device: chosen.count(device) for device in sorted(set(chosen))},
        "times_best": times_best,
        "within": times_best <= TOLERANCE,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=15, help="runs of each join on each device")
    parser.add_argument(
        "--draw", type=int, metavar="N", help="so many joins drawn at random, in the place of sizes in turn"
    )
    parser.add_argument("--seed", type=int, default=1, help="which ones are drawn")
    parser.add_argument("--devices", default="cuda:1,host:1", help="as `dovetail serve` takes them")
    parser.add_argument("--host-memory", default="4GiB")
    options = parser.parse_args()
    joins = drawn_small(options.draw, options.seed) if options.draw else in_turn()
    recorder = Recorder("mix")
    within = []
    with Dovetail(devices=options.devices, host_memory=options.host_memory, device_cache=0) as server:
        client = dovetail.connect(server.uri)
        for join in joins:
            line = measure(client, join, options.repeat)
            recorder.write(**line)
            within.append(line["within"])
            print(
                f"{join}: GPU {1e3 * line['gpu_seconds']:.2f} ms, CPU {1e3 * line['cpu_seconds']:.2f} ms, "
                f"chosen {1e3 * line['chosen_seconds']:.2f} ms on {line['chosen_on']}"
                + ("" if line["within"] else f", missed: {line['times_best']:.2f} times the other")
            )
    print(f"within {(TOLERANCE - 1) * 100:.0f} % of the better device: {sum(within)} of {len(within)}")


if __name__ == "__main__":
    main()
