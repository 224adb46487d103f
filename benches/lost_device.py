"""One process of a device is killed while it takes part in gangs: what fails, and how soon all is well again.

    python benches/lost_device.py --devices host:4
    python benches/lost_device.py --devices cuda:4 --gang-rows-log2 25 --host-memory 40GiB

Clients ask for one join after the other: clients of gangs count two large tables on all devices by hash, clients of
small joins count two small ones on any device. After some seconds the process of one device is killed. Measured are the
seconds until the next gang and the next small join were right, until the device had a process again, and until the next
gang on all devices. `failed` has the joins that failed, by their error. Before the device is back, gangs are refused,
because they ask for all devices. Every count of a join that is answered must be right.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections import Counter
from multiprocessing.queues import Queue
from pathlib import Path

import dovetail
from common import Dovetail, Recorder, at_once, metrics
from gang_clients import side

# Seconds after the kill within which the device must be back.
BACK_SECONDS = 120

# Pause after a join that failed.
PAUSE_SECONDS = 0.01


def process_of(server: int, device: str) -> int:
    """The process of a device: the child of the server whose threads have the device's name."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(process.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1])
            names = [comm.read_text() for comm in process.glob("task/*/comm")] if parent == server else []
        except (FileNotFoundError, ProcessLookupError):
            continue
        if any(name.startswith(f"{device}/") for name in names):
            return int(process.name)
    raise SystemExit(f"{device} has no process of its own")


def ask(uri: str, kind: str, rows: int, devices: int, until: float, go: object, found: Queue) -> None:
    """Joins until a time, and tells of each join: when it ended, the devices that ran it, and its error."""
    command = {"left": f"{kind}_l", "right": f"{kind}_r", "on": [{"left": "k", "right": "k"}], "count": True}
    if kind == "gang":
        command |= {"devices": devices, "distribution": "hash"}
    told: list[tuple[float, int, str]] = []
    with dovetail.connect(uri) as client:
        go.wait()
        since = time.time()
        while time.time() - since < until:
            try:
                with client.command({"join": command}) as result:
                    count = result.table()["count"][0].as_py()
                    ran_on = len(result.job.status().raw["devices"])
                assert count == rows, f"{count} rows, not {rows}"
                told.append((time.time(), ran_on, ""))
            except dovetail.Error as error:
                told.append((time.time(), 0, type(error).__name__))
                time.sleep(PAUSE_SECONDS)
    found.put((kind, told))


def kill(admin: str, pid: int, device: str, after: float, go: object, found: Queue) -> None:
    """Kills the process of a device after some seconds, and tells when, and when the device was up again."""
    go.wait()
    time.sleep(after)
    killed, restarts = time.time(), f'dovetail_device_restarts_total{{device="{device}"}}'
    before = metrics(admin).get(restarts, 0)
    os.kill(pid, signal.SIGKILL)
    while time.time() - killed < BACK_SECONDS:
        seen = metrics(admin)
        if seen.get(restarts, 0) > before and seen[f'dovetail_device_up{{device="{device}"}}'] == 1:
            found.put(("killed", (killed, time.time() - killed)))
            return
        time.sleep(0.02)
    found.put(("killed", (killed, None)))


def work(what: str, *arguments: object) -> None:
    """A client, or the process that kills."""
    {"ask": ask, "kill": kill}[what](*arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="host:2", help="as for `dovetail serve --devices`: cuda:N or host:N")
    parser.add_argument("--host-memory", default="8GiB", help="of the server")
    parser.add_argument("--gang-clients", type=int, default=2)
    parser.add_argument("--small-clients", type=int, default=4)
    parser.add_argument("--gang-rows-log2", type=int, default=20, help="rows of each side of a large join")
    parser.add_argument("--small-rows-log2", type=int, default=10)
    parser.add_argument("--before", type=float, default=3, help="seconds before the kill")
    parser.add_argument("--after", type=float, default=30, help="seconds after the kill")
    options = parser.parse_args()
    recorder = Recorder("lost_device")
    kind_of_device, _, count = options.devices.partition(":")
    devices, lost = int(count), f"{kind_of_device}:{int(count) - 1}"
    rows = {"gang": 1 << options.gang_rows_log2, "small": 1 << options.small_rows_log2}
    settings = {"host_memory": options.host_memory, "device_processes": "on", "device_restart_seconds": 1}
    with Dovetail(devices=options.devices, **settings) as server:
        with dovetail.connect(server.uri) as client:
            for kind, of_kind in rows.items():
                client.put(f"{kind}_l", side("a", of_kind, 1))
                client.put(f"{kind}_r", side("b", of_kind, 2))
        pid = process_of(server.pid, lost)
        until = options.before + options.after
        numbers = {"gang": options.gang_clients, "small": options.small_clients}
        clients: list[tuple[object, ...]] = [
            ("ask", server.uri, kind, rows[kind], devices, until)
            for kind, number in numbers.items()
            for _ in range(number)
        ]
        clients.append(("kill", server.admin, pid, lost, options.before))
        told = at_once(work, clients, timeout=until + BACK_SECONDS + 60)
    [(killed, back_seconds)] = [of_one for what, of_one in told if what == "killed"]
    measured: dict[str, dict[str, object]] = {}
    for kind in rows:
        joins = sorted(each for what, of_one in told if what == kind for each in of_one)
        right = [(at - killed, ran_on) for at, ran_on, error in joins if not error]
        after = [(at, ran_on) for at, ran_on in right if at > 0]
        measured[kind] = {
            "right_before": len(right) - len(after),
            "right_after": len(after),
            "failed": Counter(error for *_, error in joins if error),
            "right_again_seconds": after[0][0] if after else None,
        }
        if kind == "gang" and back_seconds is not None:
            whole = (at for at, ran_on in after if ran_on == devices and at > back_seconds)
            measured[kind]["all_devices_seconds"] = next(whole, None)
        print(f"{kind}: {measured[kind]}", flush=True)
    print(f"{lost} was back after {back_seconds} s")
    recorder.write(
        benchmark="lost_device",
        devices=options.devices,
        lost=lost,
        rows=rows,
        clients=numbers,
        back_seconds=back_seconds,
        **measured,
    )
    if measured["gang"].get("all_devices_seconds") is None:
        raise SystemExit(f"no gang ran on all devices within {options.after} s after the kill")


if __name__ == "__main__":
    main()
