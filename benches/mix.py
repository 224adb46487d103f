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
from dataclasses import asdict, dataclass
from random import Random

import numpy as np
import pyarrow as pa

import dovetail
from common import USED_BEFORE, Dovetail, Recorder, median

DEVICES = {"gpu": ["cuda:0"], "cpu": ["host:0"], "chosen": None}
TOLERANCE = 1.1


@dataclass(frozen=True)
class Join:
    """A join of a table of unique keys with one of keys drawn from `build_rows / match_ratio` of them.

    `key` and the payload columns are "int32", "int64" or "text", which has 20 bytes.
    """

    build_rows: int
    probe_rows: int
    key: str = "int64"
    build_payload: tuple[str, ...] = ("int64",)
    probe_payload: tuple[str, ...] = ("int64",)
    match_ratio: float = 1.0

    def tables(self) -> tuple[pa.Table, pa.Table, int]:
        """The build side, the probe side, and how many rows their join has."""
        generator = np.random.default_rng(self.build_rows)
        drawn = generator.integers(0, round(self.build_rows / self.match_ratio), self.probe_rows)
        build = self._table(generator, "b", generator.permutation(self.build_rows), self.build_payload)
        probe = self._table(generator, "p", drawn, self.probe_payload)
        return build, probe, int((drawn < self.build_rows).sum())

    def _table(self, generator: np.random.Generator, name: str, keys: np.ndarray, payload: tuple[str, ...]) -> pa.Table:
        drawn = (generator.integers(0, 1 << 31, len(keys)) for _ in payload)
        columns = (column(kind, values) for kind, values in zip(payload, drawn, strict=True))
        return pa.table({"k": column(self.key, keys), **{f"{name}{at}": values for at, values in enumerate(columns)}})

    def __str__(self) -> str:
        build = f"{self.build_rows} rows of {len(self.build_payload)}"
        probe = f"{self.probe_rows} rows of {len(self.probe_payload)}"
        return f"{build} and {probe} columns by {self.key}, {self.match_ratio:g} of them with a partner"


def column(kind: str, values: np.ndarray) -> pa.Array:
    if kind == "text":
        return pa.array([f"{value:020d}" for value in values])
    return pa.array(values.astype(kind))


def in_turn() -> Iterator[Join]:
    """Joins of sizes that follow on each other."""
    return (Join(1 << bits, 2 << bits) for bits in range(10, 23))


def drawn(count: int, seed: int) -> Iterator[Join]:
    """So many joins, which follow from the seed."""
    random = Random(seed)

    def payload() -> tuple[str, ...]:
        return tuple(random.choices(["int32", "int64", "text"], [4, 4, 1], k=random.randint(0, 3)))

    for _ in range(count):
        rows = round(2 ** random.uniform(8, 18))
        yield Join(
            build_rows=rows,
            probe_rows=round(rows * 2 ** random.uniform(-2, 4)),
            key=random.choices(["int32", "int64", "text"], [4, 4, 1])[0],
            build_payload=payload(),
            probe_payload=payload(),
            match_ratio=random.choice([1.0, 1.0, 0.5, 0.125, 0.01]),
        )


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
    joins = drawn(options.draw, options.seed) if options.draw else in_turn()
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
