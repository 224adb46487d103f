"""Several clients on several devices: a stream of large joins on gangs beside small joins on single devices.

    python benches/gang_clients.py --devices host:2
    python benches/gang_clients.py --devices host:4 --gang-devices 3 1 --small-clients 0

Each client is a process that asks for one join after the other for some seconds. Clients of gangs count a join of two
large tables on all devices, clients of small joins count a join of two small ones on any device. Measured are the joins
per second of each kind, and the median and the 99th percentile of a small join's time from request to answer: with the
gangs alone, with the small joins alone, and with both. Every count must be right.

With `--gang-devices`, there is a client of gangs for each of these numbers of devices. They are measured by that
number, each number alone as well.
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


# A client: the name of what it is measured with, and the devices of its joins; any, without a number.
Asking = tuple[str, int | None]


def client(uri: str, asking: Asking, rows: dict[str, int], seconds: float, go: object, found: Queue) -> None:
    """Joins for some seconds. Tells the kind, the seconds that it took, and those of each join."""
    kind, devices = asking
    tables = "small" if devices is None else "gang"
    expected = rows[tables]
    command = {"left": f"{tables}_l", "right": f"{tables}_r", "on": [{"left": "k", "right": "k"}], "count": True}
    if devices is not None:
        command["devices"] = devices
    with dovetail.connect(uri) as connection:

        def join() -> float:
            start = time.perf_counter()
            with connection.command({"join": command}) as result:
                count = result.table()["count"][0].as_py()
            assert count == expected, f"{count} rows, not {expected}"
            return time.perf_counter() - start

        [join() for _ in range(WARM_UP)]
        go.wait()
        start, times = time.perf_counter(), []
        while time.perf_counter() - start < seconds:
            times.append(join())
        found.put((kind, time.perf_counter() - start, times))


def together(uri: str, asking: list[Asking], rows: dict[str, int], seconds: float) -> dict[str, object]:
    """Runs these clients at once, and returns what is measured by kind."""
    told = at_once(client, [(uri, each, rows, seconds) for each in asking], timeout=120 + seconds)
    measured: dict[str, object] = {}
    for kind in dict(asking):
        of_kind = [(took, of_client) for told_kind, took, of_client in told if told_kind == kind]
        times = [each for _, of_client in of_kind for each in of_client]
        per_second = sum(len(of_client) / took for took, of_client in of_kind)
        p50, p99 = np.percentile(times, [50, 99])
        measured[kind] = {
            "clients": len(of_kind),
            "joins": len(times),
            "per_second": per_second,
            "p50_seconds": p50,
            "p99_seconds": p99,
        }
    return measured


def cases(options: argparse.Namespace, devices: int) -> dict[str, list[Asking]]:
    """The clients of each case, by its name."""
    small: list[Asking] = [("small", None)] * options.small_clients
    gangs: list[Asking] = [("gang", devices)] * options.gang_clients
    found: dict[str, list[Asking]] = {}
    if options.gang_devices:
        gangs = [(f"gang of {ranks}", ranks) for ranks in options.gang_devices]
        found = {f"{kind} alone": [(kind, ranks)] for kind, ranks in gangs}
    found["gangs alone"] = gangs
    if small:
        found |= {"small alone": small, "both": [*gangs, *small]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="host:2", help="as for `dovetail serve --devices`: cuda:N or host:N")
    parser.add_argument("--host-memory", default="8GiB", help="of the server")
    parser.add_argument("--gang-clients", type=int, default=2)
    parser.add_argument("--gang-devices", type=int, nargs="+", help="devices of each client of gangs (default: all)")
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
        for case, asking in cases(options, devices).items():
            measured = together(server.uri, asking, rows, options.seconds)
            recorder.write(benchmark="gang_clients", case=case, devices=options.devices, rows=rows, **measured)
            for kind, of_kind in measured.items():
                times = f"median {of_kind['p50_seconds'] * 1e3:.2f} ms, p99 {of_kind['p99_seconds'] * 1e3:.2f} ms"
                clients = of_kind["clients"]
                print(f"{case}: {kind}, {clients} clients: {of_kind['per_second']:.1f} joins/s, {times}", flush=True)


if __name__ == "__main__":
    main()
