"""Devices with processes of their own: joins on them, and what becomes of everything else when one ends.

On the CPU; with ``DOVETAIL_TEST_DEVICE=cuda`` also on GPUs. With ``DOVETAIL_TEST_PROCESSES=on`` the servers of all
other suites have such processes too.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import dovetail
from harness import GPUS, WAIT_SECONDS, Server, binary, slow_devices

DEVICES = "cuda:1,host:1" if GPUS else "host:2"
FIRST = "cuda:0" if GPUS else "host:0"
SECOND = "host:0" if GPUS else "host:1"

ROWS = 1_000_000
# Rows of a table of which each has a tenth of them as partners: the result is larger than the server's memory.
REPEATED_ROWS = 15_000
REPEATED_KEYS = 10
HOST_MEMORY = "384MiB"


def children(server: Server) -> dict[str, int]:
    """The processes of the server's devices, by the names of these, which their threads have."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(process.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == server.process.pid:
                device = device_of(process)
                if device:
                    found[device] = int(process.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def device_of(process: Path) -> str | None:
    """The device whose threads a process has; those of a driver come and go meanwhile."""
    for comm in process.glob("task/*/comm"):
        try:
            name = comm.read_text().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if "/" in name:
            return name.split("/")[0]
    return None


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is more than an entry that nobody has taken away yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def upload(client: dovetail.Client) -> None:
    keys = np.random.default_rng(1).permutation(ROWS)
    client.put("l", pa.table({"k": keys, "a": np.arange(ROWS)}))
    client.put("r", pa.table({"k": keys[::-1], "b": np.arange(ROWS)}))
    rows = np.arange(REPEATED_ROWS)
    client.put("many", pa.table({"k": rows % REPEATED_KEYS, "v": rows}))


def assert_right(joined: pa.Table) -> None:
    """Every row of both tables is there once, beside the one that has its key."""
    keys = np.random.default_rng(1).permutation(ROWS)
    k, a, b = (joined[name].to_numpy() for name in ("k", "a", "b"))
    assert np.array_equal(np.sort(a), np.arange(ROWS))
    assert np.array_equal(keys[a], k) and np.array_equal(keys[::-1][b], k)


def submit(client: dovetail.Client, device: str) -> dovetail.Job:
    """A join that waits for its reader in the middle: its result does not fit in memory."""
    job = client.submit("many", "many", on="k", strategy="hash", devices=[device], retain_seconds=0)
    while job.status().rows == 0:
        pass
    return job


def assert_all_read(job: dovetail.Job) -> None:
    """The rest of such a join comes, and all of it is right."""
    rows, left, right = 0, 0, 0
    for batch in job.result().reader():
        rows += batch.num_rows
        left += int(batch["v"].to_numpy().sum())
        right += int(batch["v_right"].to_numpy().sum())
    each = REPEATED_ROWS // REPEATED_KEYS
    assert rows == REPEATED_ROWS * each
    assert left == right == each * sum(range(REPEATED_ROWS))


def start_apart(start: Callable[..., Server], restart_seconds: int, **more: object) -> Server:
    return start(
        devices=DEVICES,
        device_processes="on",
        device_restart_seconds=restart_seconds,
        host_memory=HOST_MEMORY,
        device_memory="512MiB",
        device_cache="0",
        **more,
    )


@pytest.fixture
def apart(start: Callable[..., Server]) -> Server:
    """A server whose devices have processes, which are not started again."""
    return start_apart(start, 0)


def device_up(server: Server, device: str) -> float:
    return server.metric(rf'^dovetail_device_up\{{device="{device}"\}}')


def test_each_device_has_a_process_and_joins_correctly(apart: Server) -> None:
    with apart.connect() as client:
        assert sorted(children(apart)) == sorted([FIRST, SECOND])
        upload(client)
        used = apart.arena_used()
        for device in (FIRST, SECOND):
            for strategy in ("hash", "radix-hash", "radix-hash-gfur", "sort-merge", "sort-merge-gfur"):
                job = client.submit("l", "r", on="k", strategy=strategy, devices=[device])
                assert_right(job.result().table())
                status = job.status().raw
                assert status["device"] == device
                assert any(phase["name"] in ("gather", "join") for phase in job.explain()["phases"])
                job.cancel()
        apart.wait_for(lambda: apart.arena_used() == used, "the memory of the results to be free again")


def test_a_killed_process_fails_only_its_own_joins(apart: Server) -> None:
    with apart.connect() as client:
        upload(client)
        used = apart.arena_used()
        harmed, unharmed = submit(client, FIRST), submit(client, SECOND)
        os.kill(children(apart)[FIRST], signal.SIGKILL)
        with pytest.raises(dovetail.Unavailable, match=rf"the process of {FIRST} has ended \(signal: 9"):
            harmed.wait()
        assert_all_read(unharmed)
        assert (device_up(apart, FIRST), device_up(apart, SECOND)) == (0, 1)
        assert apart.is_ready()
        lost = next(device["lost"] for device in client.topology()["devices"] if device["device"] == FIRST)
        assert "it is not started again (--device-restart-seconds is 0); restart the server to use the device" in lost
        assert sorted(children(apart)) == [SECOND], "no process is left that nobody buries"
        # What may go to any device goes to the one that is left.
        with client.join("l", "r", on="k", strategy="radix-hash") as joined:
            assert_right(joined.table())
        apart.wait_for(lambda: apart.arena_used() == used, "what the process had borrowed to be free again")


def test_a_lost_device_loses_no_other_device(start: Callable[..., Server], tmp_path: Path) -> None:
    trigger = tmp_path / "fault"
    server = start_apart(start, 0, env={"DOVETAIL_TEST_FAULT": str(trigger)})
    with server.connect() as client:
        upload(client)
        unharmed = submit(client, SECOND)
        trigger.write_text(f"{FIRST} {'illegal-access' if GPUS else 'lost'}")
        with pytest.raises(dovetail.Unavailable):
            client.join("l", "r", on="k", devices=[FIRST]).table()
        assert not trigger.exists(), "the fault was injected"
        assert_all_read(unharmed)
        assert (device_up(server, FIRST), device_up(server, SECOND)) == (0, 1)
        assert server.is_ready()


def restarts(server: Server, device: str) -> float:
    return server.metric(rf'^dovetail_device_restarts_total\{{device="{device}"\}}')


def wait_until_restarted(server: Server, device: str, times: int) -> None:
    server.wait_for(lambda: restarts(server, device) == times and device_up(server, device) == 1, "another process")


def test_a_device_is_reopened_when_its_process_has_ended(start: Callable[..., Server]) -> None:
    server = start_apart(start, 1)
    with server.connect() as client:
        upload(client)
        used = server.arena_used()
        for count in (1, 2):
            before = children(server)
            harmed = submit(client, FIRST)
            os.kill(before[FIRST], signal.SIGKILL)
            with pytest.raises(dovetail.Unavailable, match=rf"the process of {FIRST} has ended \(signal: 9"):
                harmed.wait()
            assert server.is_ready()
            wait_until_restarted(server, FIRST, count)
            after = children(server)
            assert sorted(after) == sorted([FIRST, SECOND])
            assert after[FIRST] != before[FIRST] and after[SECOND] == before[SECOND]
            # Tables are where they were, and the new process is told of them.
            for strategy in ("hash", "radix-hash", "sort-merge"):
                job = client.submit("l", "r", on="k", strategy=strategy, devices=[FIRST])
                assert_right(job.result().table())
                assert job.status().raw["device"] == FIRST
                job.cancel()
            server.wait_for(lambda: server.arena_used() == used, "the memory of the results to be free again")
        assert restarts(server, SECOND) == 0


def test_a_lost_device_is_reopened_in_another_process(start: Callable[..., Server], tmp_path: Path) -> None:
    trigger = tmp_path / "fault"
    server = start_apart(start, 1, env={"DOVETAIL_TEST_FAULT": str(trigger)})
    with server.connect() as client:
        upload(client)
        trigger.write_text(f"{FIRST} {'illegal-access' if GPUS else 'lost'}")
        with pytest.raises(dovetail.Unavailable, match=f"{FIRST} was lost.*its process is ended"):
            client.join("l", "r", on="k", devices=[FIRST]).table()
        wait_until_restarted(server, FIRST, 1)
        job = client.submit("l", "r", on="k", devices=[FIRST])
        assert_right(job.result().table())


def test_processes_end_with_their_server(start: Callable[..., Server]) -> None:
    server = start(devices="host:2", device_processes="on", host_memory="256MiB")
    pids = children(server).values()
    assert len(pids) == 2
    server.process.kill()
    server.process.wait()
    deadline = time.monotonic() + WAIT_SECONDS
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a device's process outlives its server"
        time.sleep(0.02)


def test_device_processes_are_refused_with_emulated_links(tmp_path: Path) -> None:
    def refusal(*flags: object) -> str:
        said = subprocess.run(
            [binary(), "serve", "--check-config", *flags], capture_output=True, text=True, check=False
        )
        assert said.returncode == 2, said
        return said.stderr

    links = refusal("--device-processes", "on", "--topology", slow_devices(tmp_path, "1MB/s", "1MB/s"))
    assert "--device-processes on: the topology file emulates links" in links
    assert "write on (a process for each device), off, or auto" in refusal("--device-processes", "maybe")


def test_tables_are_joined_in_a_directory_that_the_operator_names(tmp_path: Path) -> None:
    settings = {"devices": DEVICES, "device_processes": "on", "host_memory": HOST_MEMORY}
    with Server(tmp_path, arena_directory="/dev/shm", **settings) as server, server.connect() as client:
        assert "host memory is files in /dev/shm (tmpfs), in pages of " in server.log()
        upload(client)
        for device in (FIRST, SECOND):
            assert_right(client.join("l", "r", on="k", devices=[device]).table())
        assert [name for name in os.listdir("/dev/shm") if "dovetail" in name] == [], "the files have no names"


def test_the_process_that_mounts_a_tmpfs_hands_it_to_the_server() -> None:
    """A message is its length in 8 bytes, and 0 for a success, which comes with the root of the mount."""
    here, there = socket.socketpair()
    with here, there:
        process = subprocess.run([binary(), "arena-tmpfs"], stdin=there, check=False, timeout=WAIT_SECONDS)
        assert process.returncode == 0
        message, [*files], _, _ = socket.recv_fds(here, 4096, 1)
    if not files:
        assert b"tmpfs" in message or b"user namespace" in message
        pytest.skip(f"this system allows no mount: {message!r}")
    assert message == (1).to_bytes(8, "little") + b"\0"
    [mount] = files
    file = os.open(".", os.O_TMPFILE | os.O_RDWR, dir_fd=mount)
    os.close(mount)
    # The process and its namespaces are gone, and the file is not.
    assert os.pwrite(file, b"rows", 1 << 20) == 4
    assert os.pread(file, 4, 1 << 20) == b"rows"
    os.close(file)


def test_the_process_that_mounts_a_tmpfs_is_only_for_the_server() -> None:
    process = subprocess.run(
        [binary(), "arena-tmpfs"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert process.returncode == 2
    assert "only for the server" in process.stderr, process.stderr


@pytest.mark.parametrize("restart_seconds", [0, 1])
def test_streams_go_on_when_their_device_is_lost(start: Callable[..., Server], restart_seconds: int) -> None:
    server = start_apart(start, restart_seconds)
    schema = pa.schema({"k": pa.int64()})
    with server.connect() as client:
        client.put("kept", pa.table({"k": np.arange(1000), "v": np.arange(1000)}))
        streams = [client.open_stream("kept", schema, on="k") for _ in range(2)]
        assert all(stream.ask({"k": [1, 2000]}).num_rows == 1 for stream in streams)
        (lost,) = {job.raw["device"] for job in client.jobs() if job.state == "running"}
        # This one marks the rows of the table on its device.
        is_lost = threading.Event()

        def rows() -> Iterator[pa.RecordBatch]:
            yield pa.record_batch({"k": [1, 2000]})
            assert is_lost.wait(60)
            yield pa.record_batch({"k": [1]})

        marking = client.stream_join("kept", rows(), on="k", how="full", devices=[lost])
        assert marking.read_next_batch().num_rows == 2
        os.kill(children(server)[lost], signal.SIGKILL)
        for number in range(20):
            assert all(stream.ask({"k": [number, 2000]}).num_rows == 1 for stream in streams)
        for stream in streams:
            stream.close()
        with pytest.raises(dovetail.Unavailable, match=f"{lost} has lost the marks .* start the stream again"):
            is_lost.set()
            marking.read_all()
        client.drop("kept")
