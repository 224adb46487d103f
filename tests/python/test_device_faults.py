"""A device that fails: what jobs, tables, other devices and the server make of it.

The failures are deliberate: ``DOVETAIL_TEST_FAULT`` names a file, and when that is there, the next primitive, copy or
allocation fails in the way that the file says. Runs on the CPU, and with ``DOVETAIL_TEST_DEVICE=cuda`` on a GPU;
what needs two, with ``DOVETAIL_TEST_GPUS=2``, and where there is one only, ``DOVETAIL_TEST_GPUS_OF_ONE=2`` as well.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import dovetail
from harness import DEVICE_KIND as KIND
from harness import GPUS, Server, slow_devices

# What loses each kind of device in earnest.
LOSS = {"cuda": "illegal-access", "host": "lost"}[KIND]

ROWS = 300_000

gpu_only = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")


@pytest.fixture
def trigger(tmp_path: Path) -> Path:
    return tmp_path / "fault"


@pytest.fixture
def failing(start: Callable[..., Server], trigger: Path) -> tuple[Server, Path]:
    server = start(devices=f"{KIND}:1", host_memory="2GiB", device_cache="0", env={"DOVETAIL_TEST_FAULT": str(trigger)})
    return server, trigger


def upload(client: dovetail.Client, rows: int = ROWS) -> None:
    keys = np.random.default_rng(1).permutation(rows)
    client.put("l", pa.table({"k": keys, "a": np.arange(rows)}))
    client.put("r", pa.table({"k": keys[::-1], "b": np.arange(rows)}))


def assert_right(joined: pa.Table, rows: int = ROWS) -> None:
    """Every row of both tables is there once, beside the one that has its key."""
    keys = np.random.default_rng(1).permutation(rows)
    k, a, b = (joined[name].to_numpy() for name in ("k", "a", "b"))
    assert joined.num_rows == rows
    assert np.array_equal(np.sort(a), np.arange(rows))
    assert np.array_equal(keys[a], k) and np.array_equal(keys[::-1][b], k)


def join(client: dovetail.Client, **options: object) -> pa.Table:
    return client.join("l", "r", on="k", strategy="radix-hash", **options).table()


def submit(client: dovetail.Client, *devices: str) -> dovetail.Job:
    return client.submit("l", "r", on="k", strategy="radix-hash", devices=list(devices) or None)


def fail_after_the_first_rows(
    client: dovetail.Client, trigger: Path, fault: str, error: type[Exception], said: str, *devices: str
) -> None:
    """Injects a fault into a join that has delivered rows. One that is over before the fault is due is tried again."""
    for _ in range(20):
        job = submit(client, *devices)
        while job.status().rows == 0:
            pass
        trigger.write_text(fault)
        try:
            job.wait()
        except error as raised:
            assert said in str(raised)
            break
        job.cancel()
        trigger.unlink()
    else:
        pytest.fail("no fault was in time")
    assert not trigger.exists(), "the fault was injected"


# Takes all of the first GPU's memory in a process of its own, says so, and keeps it until its input ends.
TAKE_ALL_MEMORY = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
for failed in (cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), 0),
               cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), cuda.cuCtxSetCurrent(context)):
    assert not failed, failed
size = 1 << 36
while size >= 1 << 20:
    if cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)):
        size //= 2
print("taken", flush=True)
sys.stdin.read()
"""


@contextmanager
def all_memory_taken() -> Iterator[None]:
    taker = subprocess.Popen([sys.executable, "-c", TAKE_ALL_MEMORY], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert taker.stdout.readline() == b"taken\n"
        yield
    finally:
        taker.kill()
        taker.communicate()


def device_up(server: Server, device: str) -> float:
    return server.metric(rf'^dovetail_device_up\{{device="{device}"\}}')


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("launch-error", dovetail.InternalError),
        ("copy-error", dovetail.InternalError),
        ("copy-out-error", dovetail.InternalError),
        # The CPU's primitives have their numbers where they are wanted.
        pytest.param("read-back-error", dovetail.InternalError, marks=gpu_only),
        ("out-of-memory", dovetail.Exhausted),
    ],
)
def test_a_passing_failure_fails_one_job(failing: tuple[Server, Path], fault: str, error: type[Exception]) -> None:
    server, trigger = failing
    with server.connect() as client:
        upload(client)
        assert_right(join(client))
        used = server.arena_used()
        trigger.write_text(fault)
        with pytest.raises(error, match=f"{KIND}:0"):
            join(client)
        assert not trigger.exists(), "the fault was injected"
        server.wait_for(lambda: server.device_used() == 0, "device memory to be free again")
        server.wait_for(lambda: server.arena_used() <= used, "the failed result to be gone")
        assert_right(join(client))
        assert server.is_ready()
        assert client.topology()["devices"][0]["lost"] is None
        assert device_up(server, f"{KIND}:0") == 1


@gpu_only
def test_a_copy_out_that_fails_after_the_first_rows_fails_one_job(failing: tuple[Server, Path]) -> None:
    server, trigger = failing
    rows = 16_000_000
    with server.connect() as client:
        upload(client, rows)
        assert_right(join(client), rows)
        used = server.arena_used()
        # Other copies are under way then.
        fail_after_the_first_rows(client, trigger, "copy-out-error", dovetail.InternalError, "cuda:0")
        server.wait_for(lambda: server.device_used() == 0, "device memory to be free again")
        server.wait_for(lambda: server.arena_used() <= used, "the failed result to be gone")
        assert_right(join(client), rows)
        assert server.is_ready()
        assert client.topology()["devices"][0]["lost"] is None
        assert device_up(server, "cuda:0") == 1


def test_a_transient_failure_is_retried_once(failing: tuple[Server, Path]) -> None:
    server, trigger = failing
    with server.connect() as client:
        upload(client)
        trigger.write_text("transient")
        assert join(client).num_rows == ROWS
        assert not trigger.exists(), "the fault was injected"
        assert client.topology()["devices"][0]["lost"] is None
        assert device_up(server, f"{KIND}:0") == 1
        assert server.is_ready()


def test_a_lost_device_is_out_of_service_and_the_server_continues(failing: tuple[Server, Path]) -> None:
    server, trigger = failing
    with server.connect() as client:
        upload(client)
        assert join(client).num_rows == ROWS
        used = server.arena_used()
        trigger.write_text(LOSS)
        with pytest.raises(dovetail.Unavailable, match=f"{KIND}:0"):
            join(client)
        assert not trigger.exists(), "the fault was injected"
        # Later joins are refused at once, with what is to be done.
        with pytest.raises(dovetail.Unavailable):
            join(client)
        assert device_up(server, f"{KIND}:0") == 0
        assert f"{KIND}:0 was lost" in client.topology()["devices"][0]["lost"]
        # There is no other device, so that no new work should come here.
        assert not server.is_ready()
        server.wait_for(lambda: server.arena_used() <= used, "what the lost join had to be free again")
        # Tables are there, and more can be uploaded.
        assert client.get("l").num_rows == ROWS
        client.put("more", pa.table({"x": [1, 2, 3]}))
        assert client.get("more").num_rows == 3
        server.wait_for(lambda: server.device_used() == 0, "device memory to be free again")


host_only = pytest.mark.skipif(KIND != "host", reason="slow links are emulated")
two_devices = pytest.mark.skipif(KIND == "cuda" and GPUS < 2, reason="needs two GPUs")


@two_devices
def test_a_join_that_has_delivered_nothing_moves_to_another_device(start: Callable[..., Server], trigger: Path) -> None:
    server = start(devices=f"{KIND}:2", host_memory="1GiB", env={"DOVETAIL_TEST_FAULT": str(trigger)})
    with server.connect() as client:
        upload(client)
        trigger.write_text("lost")
        job = submit(client)
        status = job.wait()
        assert not trigger.exists(), "the fault was injected"
        assert job.result().table().num_rows == ROWS
        lost = [device["device"] for device in client.topology()["devices"] if device["lost"]]
        assert len(lost) == 1 and status.raw["device"] not in lost
        assert device_up(server, lost[0]) == 0 and device_up(server, status.raw["device"]) == 1
        assert server.is_ready()


@two_devices
def test_a_device_that_is_lost_alone_fails_no_job_of_another_device(
    start: Callable[..., Server], trigger: Path
) -> None:
    server = start(devices=f"{KIND}:2", host_memory="2GiB", env={"DOVETAIL_TEST_FAULT": str(trigger)})
    with server.connect() as client:
        upload(client)
        unharmed = [submit(client, f"{KIND}:1") for _ in range(10)]
        trigger.write_text(f"{KIND}:0 lost")
        doomed = submit(client, f"{KIND}:0")
        moving = [submit(client) for _ in range(10)]
        with pytest.raises(dovetail.Unavailable, match=f"{KIND}:0"):
            doomed.wait()
        assert not trigger.exists(), "the fault was injected"
        for job in unharmed + moving:
            job.wait()
            assert job.result().table().num_rows == ROWS
        assert [device_up(server, f"{KIND}:{device}") for device in (0, 1)] == [0, 1]
        assert server.is_ready()


@host_only
def test_a_lost_device_fails_only_its_own_jobs(start: Callable[..., Server], trigger: Path, tmp_path: Path) -> None:
    # A join of ROWS moves 17 MB: some seconds on the device that will fail, and half a second on the other.
    topology = slow_devices(tmp_path, "3MB/s", "40MB/s")
    server = start(topology=topology, host_memory="1GiB", device_cache="0", env={"DOVETAIL_TEST_FAULT": str(trigger)})
    with server.connect() as client:
        upload(client)
        doomed, unharmed = submit(client, "host:0"), submit(client, "host:1")
        stranded, moving = submit(client, "host:0"), submit(client)
        server.wait_for(lambda: doomed.status().rows > 0, "the join to deliver its first rows")
        trigger.write_text("host:0 lost")
        with pytest.raises(dovetail.Unavailable, match="host:0 was lost"):
            doomed.wait()
        assert not trigger.exists(), "the fault was injected"
        with pytest.raises(dovetail.Unavailable, match="out of service"):
            stranded.wait()
        for job in [unharmed, moving]:
            assert job.wait().raw["device"] == "host:1"
            assert job.result().table().num_rows == ROWS
        assert (device_up(server, "host:0"), device_up(server, "host:1")) == (0, 1)
        assert server.is_ready()
        assert client.get("l").num_rows == ROWS
        with pytest.raises(dovetail.Unavailable):
            join(client, devices=["host:0"])
        assert join(client).num_rows == ROWS
        # Without any device there is nothing to be ready for; tables stay all the same.
        trigger.write_text("lost")
        with pytest.raises(dovetail.Unavailable, match="host:1 was lost"):
            join(client)
        assert not server.is_ready()
        assert client.get("r").num_rows == ROWS


@gpu_only
def test_memory_taken_by_another_process_fails_one_job(start: Callable[..., Server]) -> None:
    rows = 16_000_000
    server = start(devices="cuda:1", host_memory="4GiB", device_cache="0")
    with server.connect() as client:
        upload(client, rows)
        with all_memory_taken():
            with pytest.raises(dovetail.Exhausted, match="cuda:0.*another process uses it"):
                join(client)
            assert server.is_ready()
            assert client.topology()["devices"][0]["lost"] is None
            server.wait_for(lambda: server.device_used() == 0, "device memory to be free again")
        assert join(client).num_rows == rows


@gpu_only
def test_a_gpu_that_is_lost_after_the_first_rows_ends_the_join(failing: tuple[Server, Path]) -> None:
    server, trigger = failing
    with server.connect() as client:
        upload(client, 16_000_000)
        used = server.arena_used()
        fail_after_the_first_rows(client, trigger, "lost", dovetail.Unavailable, "cuda:0 was lost")
        server.wait_for(lambda: server.arena_used() <= used, "what the lost join had to be free again")
        assert not server.is_ready()
        assert device_up(server, "cuda:0") == 0
        assert client.get("l").num_rows == 16_000_000
        server.wait_for(lambda: server.device_used() == 0, "device memory to be free again")


@gpu_only
def test_an_illegal_access_fails_no_job_on_the_cpu(start: Callable[..., Server], trigger: Path) -> None:
    rows = 16_000_000
    server = start(
        devices="cuda:1,host:1", host_memory="8GiB", device_cache="0", env={"DOVETAIL_TEST_FAULT": str(trigger)}
    )
    with server.connect() as client:
        upload(client, rows)
        assert_right(join(client, devices=["cuda:0"]), rows)
        used = server.arena_used()
        # One after the other, half a second each on sixteen cores.
        unharmed = [submit(client, "host:0") for _ in range(5)]
        fault = "cuda:0 illegal-access"
        fail_after_the_first_rows(client, trigger, fault, dovetail.Unavailable, "cuda:0 was lost", "cuda:0")
        assert unharmed[-1].status().rows < rows, "the CPU was at work when the GPU was lost"
        moving = submit(client)
        for job in [*unharmed, moving]:
            assert job.wait().raw["device"] == "host:0"
        for job in [*unharmed, moving]:
            assert_right(job.result().table(), rows)
            job.cancel()
        assert (device_up(server, "cuda:0"), device_up(server, "host:0")) == (0, 1)
        server.wait_for(lambda: server.arena_used() <= used, "what all joins had to be free again")
        server.wait_for(lambda: server.device_used() == 0, "device memory to be free again")
        assert server.is_ready()


two_gpus_only = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs, or one that is shown as two")


@two_gpus_only
def test_an_illegal_access_fails_no_job_on_another_gpu(start: Callable[..., Server], trigger: Path) -> None:
    rows, matches, jobs = 16_000_000, 1000, 200
    server = start(
        devices=f"cuda:{GPUS}", host_memory="8GiB", device_cache="0", env={"DOVETAIL_TEST_FAULT": str(trigger)}
    )
    with server.connect() as client:
        upload(client, rows)
        client.put("few", pa.table({"k": np.arange(rows) + rows - matches, "c": np.arange(rows)}))
        used = server.arena_used()
        # Some milliseconds each, most of which their keys cross the link for.
        few = [client.submit("l", "few", on="k", strategy="radix-hash", devices=["cuda:1"]) for _ in range(jobs)]
        fault = "cuda:0 illegal-access"
        fail_after_the_first_rows(client, trigger, fault, dovetail.Unavailable, "cuda:0 was lost", "cuda:0")
        assert few[0].wait().state == "complete"
        assert few[-1].status().state == "queued", "the other GPU was at work when this one was lost"
        moving = submit(client)
        for job in few:
            assert job.wait().raw["device"] == "cuda:1"
            joined = job.result().table()
            assert np.array_equal(np.sort(joined["c"].to_numpy()), np.arange(matches))
            job.cancel()
        assert_right(moving.result().table(), rows)
        moving.cancel()
        assert [device_up(server, f"cuda:{gpu}") for gpu in range(GPUS)] == [0] + [1] * (GPUS - 1)
        assert server.is_ready()
        server.wait_for(lambda: server.arena_used() <= used, "what all joins had to be free again")
        server.wait_for(lambda: server.device_used() == 0, "device memory to be free again")


@two_gpus_only
def test_an_illegal_access_loses_no_gpu_of_another_process(start: Callable[..., Server], trigger: Path) -> None:
    server = start(
        devices=f"cuda:{GPUS}", host_memory="2GiB", device_cache="0", env={"DOVETAIL_TEST_FAULT": str(trigger)}
    )
    with server.connect() as client:
        upload(client)
        for gpu in range(GPUS):
            assert join(client, devices=[f"cuda:{gpu}"]).num_rows == ROWS
        trigger.write_text("cuda:0 illegal-access")
        # Nothing was delivered yet: the join goes to the next GPU.
        assert_right(join(client))
        assert not trigger.exists(), "the fault was injected"
        assert [device_up(server, f"cuda:{gpu}") for gpu in range(GPUS)] == [0] + [1] * (GPUS - 1)
        assert server.is_ready()


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_an_illegal_access_loses_all_gpus_of_the_process(start: Callable[..., Server], trigger: Path) -> None:
    server = start(
        devices=f"cuda:{GPUS}",
        device_processes="off",
        host_memory="2GiB",
        device_cache="0",
        env={"DOVETAIL_TEST_FAULT": str(trigger)},
    )
    gpus = [f"cuda:{gpu}" for gpu in range(GPUS)]
    with server.connect() as client:
        upload(client)
        for gpu in gpus:
            assert join(client, devices=[gpu]).num_rows == ROWS
        used = server.arena_used()
        trigger.write_text("cuda:0 illegal-access")
        with pytest.raises(dovetail.Unavailable, match="cuda:0 was lost.*restart the server"):
            join(client, devices=["cuda:0"])
        assert not trigger.exists(), "the fault was injected"
        # Nobody has to find out about the others by a join of theirs.
        assert [device_up(server, gpu) for gpu in gpus] == [0] * GPUS
        assert all("restart the server" in device["lost"] for device in client.topology()["devices"])
        assert not server.is_ready()
        with pytest.raises(dovetail.Unavailable):
            join(client)
        assert client.get("l").num_rows == ROWS
        server.wait_for(lambda: server.device_used() == 0, "device memory to be free again")
        server.wait_for(lambda: server.arena_used() <= used, "the failed results to be gone")
