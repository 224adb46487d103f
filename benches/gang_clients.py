"""Several clients on several devices: a stream of large joins on gangs beside small joins on single devices.

    python benches/gang_clients.py --devices host:2

Each client is a process that asks for one join after the other for some seconds. Clients of gangs count a join of two
large tables on all devices, clients of small joins count a join of two small ones on any device. Measured are the joins
per second of each kind, and the median and the 99th percentile of a small join's time from request to answer: with the
gangs alone, with the small joins alone, and with both. Every count must be right.
"""

from __future__ import annotations

import argparse
import time
from multiprocessing.queues import Queue

import numpy as np
import pyarrow as pa

import dovetail
from common import Dovetail, Recorder, at_once

# Joins before those that count, for each client.
WARM_UP = 2


def side(name: str, rows: int, seed: int) -> pa.Table:
    """Distinct keys in no order, and a column."""
    return pa.table({"k": np.random.default_rng(seed).permutation(rows), name: np.arange(rows)})


def client(uri: str, kind: str, rows: int, devices: int, seconds: float, go: object, found: Queue) -> None:
    """Joins for some seconds. Tells the kind, the seconds that it took, and those of each join."""
    command = {"left": f"{kind}_l", "right": f"{kind}_r", "on": [{"left": "k", "right": "k"}], "count": True}
    if kind == "gang":
        command["devices"] = devices
    with dovetail.connect(uri) as connection:

        def join() -> float:
            start = time.perf_counter()
            with connection.command({"join": command}) as result:
                count = result.table()["count"][0].as_py()
            assert count == rows, f"{count} rows, not {rows}"
            return time.perf_counter() - start

        [join() for _ in range(WARM_UP)]
        go.wait()
        start, times = time.perf_counter(), []
        while time.perf_counter() - start < seconds:
            times.append(join())
        found.put((kind, time.perf_counter() - start, times))


def together(uri: str, counts: dict[str, int], rows: dict[str, int], devices: int, seconds: float) -> dict[str, object]:
    """Runs that many clients of each kind at once."""
    of_kind = [kind for kind, count in counts.items() for _ in range(count)]
    clients = [(uri, kind, rows[kind], devices, seconds) for kind in of_kind]
    told = at_once(client, clients, timeout=120 + seconds)
    measured: dict[str, object] = {}
    for kind in counts:
        times = [each for told_kind, _, of_client in told if told_kind == kind for each in of_client]
        if times:
            per_second = sum(len(of_client) / took for told_kind, took, of_client in told if told_kind == kind)
            p50, p99 = np.percentile(times, [50, 99])
            measured[kind] = {"joins": len(times), "per_second": per_second, "p50_seconds": p50, "p99_seconds": p99}
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="host:2", help="as for `dovetail serve --devices`: cuda:N or host:N")
    parser.add_argument("--host-memory", default="8GiB", help="of the server")
    parser.add_argument("--gang-clients", type=int, default=2)
    parser.add_argument("--small-clients", type=int, default=4)
    parser.add_argument("--gang-rows-log2", type=int, default=20, help="rows of each side of a large join")
    parser.add_argument("--small-rows-log2", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    recorder = Recorder("gang_clients")
    rows = {"gang": 1 << options.gang_rows_log2, "small": 1 << options.small_rows_log2}
    devices = int(options.devices.partition(":")[2])
    with Dovetail(devices=options.devices, host_memory=options.host_memory) as server:
        with dovetail.connect(server.uri) as connection:
            for kind, count in rows.items():
                connection.put(f"{kind}_l", side("a", count, 1))
                connection.put(f"{kind}_r", side("b", count, 2))
        both = {"gang": options.gang_clients, "small": options.small_clients}
        for case, counts in {
            "gangs alone": {**both, "small": 0},
            "small alone": {**both, "gang": 0},
            "both": both,
        }.items():
            measured = together(server.uri, counts, rows, devices, options.seconds)
            recorder.write(benchmark="gang_clients", case=case, devices=options.devices, rows=rows, **measured)
            for kind, of_kind in measured.items():
                times = f"median {of_kind['p50_seconds'] * 1e3:.2f} ms, p99 {of_kind['p99_seconds'] * 1e3:.2f} ms"
                print(
                    f"{case}: {kind}, {counts[kind]} clients: {of_kind['per_second']:.1f} joins/s, {times}", flush=True
                )


if __name__ == "__main__":
    main()
