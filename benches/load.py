"""Joins per second of many clients at once, beside one join after the other.

    python benches/load.py --devices host:2
    python benches/load.py --devices cuda:2 --sizes 14:16 20:22 23:25 25:26 --clients 1 4 16 64 --host-memory 48GiB
    python benches/load.py --devices cuda:2 --sizes 23:25 --columns build --clients 24 --host-memory 48GiB

A client is a process that asks for one join after the other, of sizes that it draws, for some seconds. It waits for the
end of each, and gives the result back without reading it. With `--columns`, a result has these columns; otherwise half
of the joins have all of them, and the other half only count.

Work is measured by what joins take when a single client asks for them one after the other: a join counts as the median
of its time there. So `times_alone` says how much faster the server works for many clients than for one. Beside it: the
joins per second, and the median and 99th percentile of the time from request to answer, by size.
"""

from __future__ import annotations

import argparse
import time
from multiprocessing.queues import Queue
from random import Random

import numpy as np
import pyarrow as pa

import dovetail
from common import USED_BEFORE, Dovetail, Recorder, at_once, median, wait_until_prepared

# Untimed rounds of all joins before those that count, for a single client.
WARM_UP = 2
TIMEOUT = 300

# What a join returns, and the fields of its command.
RETURNED: dict[str, dict[str, object]] = {
    "count": {"count": True},
    "all": {},
    "build": {"columns": ["a"]},
}
# A join: its size as text, and what it returns.
Kind = tuple[str, str]


def names(size: str) -> tuple[str, str]:
    return f"left_{size.replace(':', '_')}", f"right_{size.replace(':', '_')}"


def put(client: dovetail.Client, size: str, seed: int) -> None:
    """Uploads both tables of a size: distinct keys, and keys that each find one; a column of 8 bytes on both sides."""
    build, probe = (1 << int(bits) for bits in size.split(":"))
    generator = np.random.default_rng(seed)
    left, right = names(size)
    client.put(left, pa.table({"k": generator.permutation(build), "a": np.arange(build)}))
    client.put(right, pa.table({"k": generator.integers(0, build, probe), "b": np.arange(probe)}))


def join(client: dovetail.Client, kind: Kind) -> float:
    """Joins, and returns the seconds from the request to the answer."""
    size, returned = kind
    left, right = names(size)
    start = time.perf_counter()
    command = {"left": left, "right": right, "on": [{"left": "k", "right": "k"}], **RETURNED[returned]}
    with client.command({"join": command}) as result:
        result.job.wait()
        took = time.perf_counter() - start
        rows = result.table()["count"][0].as_py() if returned == "count" else result.job.status().rows
    expected = 1 << int(size.split(":")[1])
    assert rows == expected, f"{size}: {rows} rows, not {expected}"
    return took


def ask(uri: str, kinds: list[Kind], seconds: float, seed: int, go: object, found: Queue) -> None:
    """Joins for some seconds, and tells how long that took, with the kind and the seconds of each join."""
    random = Random(seed)
    with dovetail.connect(uri) as client:
        join(client, kinds[0])
        go.wait()
        start, times = time.perf_counter(), []
        while time.perf_counter() - start < seconds:
            kind = random.choice(kinds)
            times.append((kind, join(client, kind)))
        found.put((time.perf_counter() - start, times))


def alone(uri: str, kinds: list[Kind], repeat: int) -> dict[Kind, float]:
    """The median seconds of each join, of a single client."""
    random = Random(1)
    times: dict[Kind, list[float]] = {kind: [] for kind in kinds}
    turns = list(kinds)
    with dovetail.connect(uri) as client:
        for again in range(WARM_UP + repeat):
            random.shuffle(turns)
            for kind in turns:
                took = join(client, kind)
                if again >= WARM_UP:
                    times[kind].append(took)
    return {kind: median(of_kind) for kind, of_kind in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="host:2", help="as for `dovetail serve --devices`")
    parser.add_argument("--device-processes", default="auto", help="as for `dovetail serve --device-processes`")
    parser.add_argument("--device-cache", default="50%", help="as for `dovetail serve --device-cache`")
    parser.add_argument("--host-memory", default="4GiB", help="of the server")
    parser.add_argument("--job-trace", help="as for `dovetail serve --job-trace`")
    parser.add_argument("--sizes", nargs="+", default=["10:12", "16:18"], help="base-2 logarithms of rows, build:probe")
    parser.add_argument("--columns", choices=list(RETURNED), help="columns of all results")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seconds", type=float, default=5, help="for each number of clients")
    parser.add_argument("--repeat", type=int, default=7, help="timed joins of each kind by a single client")
    options = parser.parse_args()
    recorder = Recorder("load")
    kinds = [
        (size, of) for size in options.sizes for of in ([options.columns] if options.columns else ["count", "all"])
    ]
    settings = {name: getattr(options, name) for name in ("devices", "device_processes", "device_cache", "host_memory")}
    trace = {"job_trace": options.job_trace} if options.job_trace else {}
    with Dovetail(**settings, **trace) as server:
        with dovetail.connect(server.uri) as client:
            for seed, size in enumerate(options.sizes):
                put(client, size, seed)
        wait_until_prepared(server)
        of_one = alone(server.uri, kinds, options.repeat)
        for (size, returned), seconds in of_one.items():
            print(f"one after the other: {size} {returned} {1e3 * seconds:.2f} ms", flush=True)
        for count in options.clients:
            told = at_once(ask, [(server.uri, kinds, options.seconds, seed) for seed in range(count)], TIMEOUT)
            took = max(seconds for seconds, _ in told)
            times = [each for _, of_client in told for each in of_client]
            line: dict[str, object] = {
                "clients": count,
                "joins_per_second": len(times) / took,
                "times_alone": sum(of_one[kind] for kind, _ in times) / took,
            }
            of_kind = {}
            for kind in kinds:
                of_this = [seconds for each, seconds in times if each == kind]
                if of_this:
                    p50, p99 = np.percentile(of_this, [50, 99])
                    measured = {"joins": len(of_this), "p50_seconds": p50, "p99_seconds": p99}
                    of_kind[" ".join(kind)] = {**measured, "alone_seconds": of_one[kind]}
            recorder.write(benchmark="load", memory=USED_BEFORE, **settings, **line, kinds=of_kind)
            worst = max(each["p99_seconds"] / each["alone_seconds"] for each in of_kind.values())
            print(
                f"{count} clients: {line['joins_per_second']:.1f} joins/s, {line['times_alone']:.2f} times one after "
                f"the other, p99 at most {worst:.1f} times alone",
                flush=True,
            )


if __name__ == "__main__":
    main()
