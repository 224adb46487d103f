"""DoPut and DoGet against pyarrow's C++ Flight server, and against a server that discards what it gets.

The same client (bare pyarrow, one connection per stream) talks to all three in turn, several times over, so that a
noisy machine is equally unkind to each. For every combination: GB/s as the client sees it, and processor seconds of the
server per GB.

    python benches/flight_vs_pyarrow.py --gigabytes 1 --streams 1 2 4 --repeat 5
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from common import Dovetail, Recorder, cpu_seconds, median

BATCH_ROWS = 1 << 18
"""Two columns of 8 bytes: 4 MiB."""


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
        import json

        self._tables.pop(json.loads(action.body.to_pybytes())["name"].encode(), None)
        return []


class Peer:
    """A pyarrow server in a process of its own."""

    def __init__(self, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", kind], stdout=subprocess.PIPE, text=True, stdin=subprocess.PIPE
        )
        self.uri = f"grpc://127.0.0.1:{int(self.process.stdout.readline())}"
        self.pid = self.process.pid

    def stop(self) -> None:
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
    parser.add_argument("--gigabytes", type=float, default=1, help="bytes of each transfer, all streams together")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeat", type=int, default=5)
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
    with tempfile.TemporaryDirectory() as folder:
        servers = {
            "dovetail": Dovetail(
                Path(folder), host_memory=f"{int(arguments.gigabytes * 2e9)}", devices="host:1", log="warn"
            ),
            "pyarrow": Peer("keeping"),
            "pyarrow, discarding": Peer("discarding"),
        }
        measured: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
        try:
            for repeat in range(-1, arguments.repeat):
                for streams in arguments.streams:
                    for name, server in servers.items():
                        for what, rate, cpu in measure(server, streams, count, batch):
                            # The first round warms up: pages are touched, connections tried.
                            if repeat >= 0:
                                measured.setdefault((what, name, streams), []).append((rate, cpu))
        finally:
            for server in servers.values():
                server.stop()
    print(f"{'':6} {'streams':>7}  {'server':22} {'GB/s':>6} {'server CPU s/GB':>16}")
    for (what, name, streams), values in sorted(measured.items()):
        if what == "DoGet" and name == "pyarrow, discarding":
            continue
        rate, cpu = median([value[0] for value in values]), median([value[1] for value in values])
        print(f"{what:6} {streams:7}  {name:22} {rate:6.2f} {cpu:16.3f}")
        recorder.write(
            benchmark="flight_vs_pyarrow", rpc=what, server=name, streams=streams, bytes=count * batch.nbytes,
            batch_bytes=batch.nbytes, gb_per_second=round(rate, 3), server_cpu_seconds_per_gb=round(cpu, 4),
            all_gb_per_second=[round(value[0], 3) for value in values],
            all_server_cpu_seconds_per_gb=[round(value[1], 4) for value in values], pyarrow=pa.__version__,
        )  # fmt: skip
    print(f"appended to {recorder.path}")


def measure(server: Dovetail | Peer, streams: int, count: int, batch: pa.RecordBatch) -> list[tuple[str, float, float]]:
    """One transfer each way: what, GB/s, server CPU seconds per GB."""
    clients = [connect(server.uri) for _ in range(streams)]
    shares = [len(range(index, count, streams)) for index in range(streams)]
    gigabytes = count * batch.nbytes / 1e9
    found = []
    for what in ("DoPut", "DoGet"):
        before = cpu_seconds(server.pid)
        if what == "DoPut":
            works = [
                lambda client=client, index=index: put(client, f"t{index}", [batch] * shares[index])
                for index, client in enumerate(clients)
            ]
        elif isinstance(server, Peer) and "discarding" in server.process.args:
            continue
        else:
            works = [
                lambda client=client, index=index: get(client, f"t{index}", shares[index] * batch.num_rows)
                for index, client in enumerate(clients)
            ]
        seconds = side_by_side(works)
        found.append((what, gigabytes / seconds, (cpu_seconds(server.pid) - before) / gigabytes))
    if not (isinstance(server, Peer) and "discarding" in server.process.args):
        for index in range(streams):
            list(clients[0].do_action(flight.Action("drop_table", f'{{"name": "t{index}"}}'.encode())))
    for client in clients:
        client.close()
    return found


if __name__ == "__main__":
    main()
