"""DoPut and DoGet against pyarrow's C++ Flight server, and against a server that discards what it gets.

The same client (bare pyarrow, one connection per stream) talks to all three in a changing order, several times over, so
that a noisy machine is equally unkind to each: in every round, the uploads to the three follow on each other, and then
the downloads. For every combination: GB/s as the client sees it, processor seconds of the server per GB, with their
range, the most memory that the server had, in all and more than before the transfer, and how many times the processor
time of the discarding server an upload took in the same round: the median of the rounds, and their range.

    python benches/flight_vs_pyarrow.py --gigabytes 4 --streams 1 2 4 --repeat 10
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from common import Dovetail, Recorder, cpu_seconds, median, memory_max_bytes, reset_memory_max

BATCH_ROWS = 1 << 18
"""Two columns of 8 bytes: 4 MiB."""

DOVETAIL = "dovetail"
KEEPING = "pyarrow, keeps the table"
DISCARDING = "pyarrow, DISCARDS all (not a store)"


class PyarrowServer(flight.FlightServerBase):
    """Keeps tables in memory, or, when it discards, nothing."""

    def __init__(self, discards: bool) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._discards = discards
        self._tables: dict[bytes, pa.Table] = {}

    def do_put(self, context, descriptor, reader, writer) -> None:  # noqa: ANN001
        if self._discards:
            for _ in reader:
                pass
            return
        self._tables[descriptor.path[0]] = reader.read_all()

    def get_flight_info(self, context, descriptor) -> flight.FlightInfo:  # noqa: ANN001
        table = self._tables[descriptor.path[0]]
        endpoint = flight.FlightEndpoint(flight.Ticket(descriptor.path[0]), [])
        return flight.FlightInfo(table.schema, descriptor, [endpoint], table.num_rows, table.nbytes)

    def do_get(self, context, ticket) -> flight.RecordBatchStream:  # noqa: ANN001
        return flight.RecordBatchStream(self._tables[ticket.ticket])

    def do_action(self, context, action) -> list[flight.Result]:  # noqa: ANN001
        self._tables.pop(json.loads(action.body.to_pybytes())["name"].encode(), None)
        return []


class Peer:
    """A pyarrow server in a process of its own."""

    def __init__(self, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", kind], stdout=subprocess.PIPE, text=True, stdin=subprocess.PIPE
        )
        said = self.process.stdout.readline()
        if not said:
            raise RuntimeError(f"the {kind} pyarrow server did not start")
        self.uri = f"grpc://127.0.0.1:{int(said)}"
        self.pid = self.process.pid

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


def connect(uri: str) -> flight.FlightClient:
    return flight.FlightClient(uri, generic_options=[("grpc.use_local_subchannel_pool", 1)])


def put(client: flight.FlightClient, name: str, batches: list[pa.RecordBatch]) -> None:
    writer, _ = client.do_put(flight.FlightDescriptor.for_path(name), batches[0].schema)
    for batch in batches:
        writer.write_batch(batch)
    writer.close()


def get(client: flight.FlightClient, name: str, rows: int) -> None:
    info = client.get_flight_info(flight.FlightDescriptor.for_path(name))
    read = 0
    for endpoint in info.endpoints:
        reader = client.do_get(endpoint.ticket)
        try:
            while True:
                read += reader.read_chunk().data.num_rows
        except StopIteration:
            pass
    if read != rows:
        raise RuntimeError(f"{name} has {read} rows, expected {rows}")


def side_by_side(works: list[Callable[[], None]]) -> float:
    """Seconds until all are done."""
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4, help="bytes of each transfer, all streams together")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        server = PyarrowServer(discards=arguments.serve == "discarding")
        print(server.port, flush=True)
        server.serve()
        return

    rng = np.random.default_rng(1)
    columns = {name: pa.array(rng.integers(0, 1 << 62, BATCH_ROWS)) for name in ("k", "v")}
    batch = pa.record_batch(columns)
    count = max(4, round(arguments.gigabytes * 1e9 / batch.nbytes))
    recorder = Recorder("flight_vs_pyarrow")
    measured: dict[tuple[str, str, int], list[Transfer]] = {}
    with ExitStack() as stack:
        memory = int(arguments.gigabytes * 2e9)
        servers: dict[str, Dovetail | Peer] = {
            DOVETAIL: stack.enter_context(Dovetail(host_memory=memory, devices="host:1", log="warn")),
            KEEPING: stack.enter_context(Peer("keeping")),
            DISCARDING: stack.enter_context(Peer("discarding")),
        }
        names = list(servers)
        for repeat in range(-1, arguments.repeat):
            for streams in arguments.streams:
                first = repeat % len(names)
                turns = names[first:] + names[:first]
                for rpc, name in [("DoPut", name) for name in turns] + [("DoGet", name) for name in turns]:
                    if (rpc, name) == ("DoGet", DISCARDING):
                        continue
                    transfer = measure(servers[name], rpc, streams, count, batch)
                    # The first round warms up: pages are touched, connections tried.
                    if repeat >= 0:
                        measured.setdefault((rpc, name, streams), []).append(transfer)
    heading = f"{'':6} {'streams':>7}  {'server':36} {'GB/s':>6} {'server CPU s/GB, and range':>27}"
    print(f"{heading} {'x discarding':>20} {'MB at most':>11} {'MB more':>9}")
    for (rpc, name, streams), transfers in sorted(measured.items()):
        rate, cpus = median([one.gb_per_second for one in transfers]), [one.cpu_per_gb for one in transfers]
        cpu = median(cpus)
        discarding = [one.cpu_per_gb for one in measured["DoPut", DISCARDING, streams]]
        # A download has nothing to do with it.
        times = [mine / theirs for mine, theirs in zip(cpus, discarding, strict=True)] if rpc == "DoPut" else []
        compared = f"{median(times):.2f} ({min(times):.2f} to {max(times):.2f})" if times else ""
        peak = max(one.memory_max_bytes for one in transfers)
        grown = max(one.memory_increase_bytes for one in transfers)
        took = f"{cpu:.3f} ({min(cpus):.3f} to {max(cpus):.3f})"
        what = f"{rpc:6} {streams:7}  {name:36} {rate:6.2f} {took:>27} {compared:>20}"
        print(f"{what} {peak / 1e6:11,.0f} {grown / 1e6:9,.0f}")
        recorder.write(
            benchmark="flight_vs_pyarrow", rpc=rpc, server=name, streams=streams, bytes=count * batch.nbytes,
            batch_bytes=batch.nbytes, gb_per_second=round(rate, 3), server_cpu_seconds_per_gb=round(cpu, 4),
            memory_max_bytes=peak, memory_increase_bytes=grown,
            all_gb_per_second=[round(one.gb_per_second, 3) for one in transfers],
            all_server_cpu_seconds_per_gb=[round(cpu, 4) for cpu in cpus],
            times_discarding=round(median(times), 3) if times else None,
            all_times_discarding=[round(one, 3) for one in times], pyarrow=pa.__version__,
        )  # fmt: skip
    print(f"appended to {recorder.path}")


@dataclass
class Transfer:
    """What one transfer took."""

    gb_per_second: float
    cpu_per_gb: float
    memory_max_bytes: int
    memory_increase_bytes: int


def measure(server: Dovetail | Peer, rpc: str, streams: int, count: int, batch: pa.RecordBatch) -> Transfer:
    """One transfer. Tables go once they were read."""
    clients = [connect(server.uri) for _ in range(streams)]
    shares = [len(range(index, count, streams)) for index in range(streams)]
    gigabytes = count * batch.nbytes / 1e9

    def work(index: int, client: flight.FlightClient) -> Callable[[], None]:
        if rpc == "DoPut":
            return lambda: put(client, f"t{index}", [batch] * shares[index])
        return lambda: get(client, f"t{index}", shares[index] * batch.num_rows)

    works = [work(index, client) for index, client in enumerate(clients)]
    resident, before = reset_memory_max(server.pid), cpu_seconds(server.pid)
    seconds = side_by_side(works)
    cpu, peak = cpu_seconds(server.pid) - before, memory_max_bytes(server.pid)
    if rpc == "DoGet":
        for index in range(streams):
            list(clients[0].do_action(flight.Action("drop_table", f'{{"name": "t{index}"}}'.encode())))
    for client in clients:
        client.close()
    return Transfer(gigabytes / seconds, cpu / gigabytes, peak, peak - resident)


if __name__ == "__main__":
    main()
