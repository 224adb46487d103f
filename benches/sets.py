"""Whether a server with several devices joins on the set of them that is quickest.

    python benches/sets.py --devices host:2
    python benches/sets.py --devices cuda:2 --build-log2 16 26 --host-memory 48GiB

Joins are drawn at random: sizes, types of keys and columns, the share of rows with a match, and whether rows are only
counted. Each runs on every set: one device, and gangs of two, three, ... by each distribution, in an order that changes
at random. It also runs where the server puts it, and these runs count for the set that they were put on. What counts is
the run time in the server. The loss of a join is the median time of the set that the server chose most, divided by the
least median time of all sets.

With `--device-cache 0`, columns cross the link each time. Otherwise they may be on a device from an earlier run, as for
users whose joins share tables. The medians of a set are then those with its columns on the devices.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict
from random import Random

import dovetail
import drawn
from common import USED_BEFORE, Dovetail, Recorder, median, wait_until_prepared
from drawn import Join

CHOSEN = "chosen"


def ways(ranks_of_gangs: list[int]) -> dict[str, dict[str, object]]:
    """Every set, and the server's choice: a name, and the fields of the command that ask for it.

    Of equal sets there is one.
    """
    asked: dict[str, dict[str, object]] = {"1": {"devices": 1}}
    for ranks in ranks_of_gangs:
        for distribution in ("broadcast", "hash"):
            asked[f"{ranks} {distribution}"] = {"devices": ranks, "distribution": distribution}
    return {**asked, CHOSEN: {}}


def set_of(status: dict[str, object]) -> str:
    """The name of the set that a join ran on."""
    ranks = len(status["ranks"])
    return f"{ranks} {status['distribution']}" if ranks > 1 else "1"


def measure(client: dovetail.Client, join: Join, count: bool, gangs: list[int], repeat: int) -> dict[str, object]:
    build, probe, rows = join.tables()
    for name, table in (("build", build), ("probe", probe)):
        client.put(name, table, mode="replace")
    seconds: dict[str, list[float]] = {}
    chosen: Counter[str] = Counter()
    predicted: dict[str, float] = {}
    refused: dict[str, str] = {}
    turns = list(ways(gangs).items())
    random = Random(join.build_rows)
    # The first run of each is not timed.
    for again in range(repeat + 1):
        random.shuffle(turns)
        for name, asked in turns:
            if name in refused:
                continue
            command = {"left": "build", "right": "probe", "on": [{"left": "k", "right": "k"}], "count": count, **asked}
            try:
                with client.command({"join": command}) as result:
                    status = result.job.wait()
                    found = result.table()["count"][0].as_py() if count else status.rows
            except (dovetail.Unsupported, dovetail.InvalidRequest) as refusal:
                # A set may be unable to divide the join.
                refused[name] = str(refusal)
                continue
            if found != rows:
                raise SystemExit(f"{join}, {name}: the result has {found} rows, not {rows}")
            if again:
                ran_on = set_of(status.raw)
                seconds.setdefault(ran_on, []).append(status.seconds)
                predicted[ran_on] = status.raw["predicted_seconds"]
                if name == CHOSEN:
                    chosen[ran_on] += 1
    medians = {name: median(times) for name, times in seconds.items()}
    favourite = chosen.most_common(1)[0][0]
    return {
        **asdict(join),
        "rows": rows,
        "count": count,
        "repeat": repeat,
        "memory": USED_BEFORE,
        "seconds": medians,
        "predicted_seconds": predicted,
        "refused": refused,
        "chosen": favourite,
        "chosen_on": dict(chosen),
        "best": min(medians, key=medians.__getitem__),
        "loss": medians[favourite] / min(medians.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="host:2", help="as for `dovetail serve --devices`: cuda:N or host:N")
    parser.add_argument("--host-memory", default="8GiB", help="of the server")
    parser.add_argument("--device-cache", default="50%", help="as for `dovetail serve --device-cache`")
    parser.add_argument("--draw", type=int, default=60, help="joins")
    parser.add_argument("--build-log2", type=float, nargs=2, default=(10, 18), help="bounds of the build side's rows")
    parser.add_argument("--ranks", type=int, nargs="+", help="devices of a join (default: one, two, ... and all)")
    parser.add_argument("--seed", type=int, default=1, help="which ones are drawn")
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of each join on each set")
    options = parser.parse_args()
    recorder = Recorder("sets")
    random, losses = Random(options.seed), []
    devices = int(options.devices.partition(":")[2])
    gangs = [ranks for ranks in options.ranks or range(2, devices + 1) if ranks > 1]
    settings = {"host_memory": options.host_memory, "device_cache": options.device_cache}
    with Dovetail(devices=options.devices, **settings) as server:
        wait_until_prepared(server)
        with dovetail.connect(server.uri) as client:
            for join in drawn.joins(options.draw, options.seed, tuple(options.build_log2), ratio_log2=(-1, 3)):
                line = measure(client, join, random.random() < 0.5, gangs, options.repeat)
                recorder.write(benchmark="sets", devices=options.devices, device_cache=options.device_cache, **line)
                losses.append(line["loss"])
                times = ", ".join(f"{name} {1e3 * took:.2f}" for name, took in line["seconds"].items())
                counted = ", counted" if line["count"] else ""
                print(f"{join}{counted}: {times} ms, chosen {line['chosen']}: {line['loss']:.2f}", flush=True)
    print(f"loss against the best set: median {median(losses):.3f}, worst {max(losses):.2f}")


if __name__ == "__main__":
    main()
