"""Clients that die, stall or come in crowds, and a server that is told to stop."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import dovetail
from harness import ROOT, Server, binary, slow_devices

Start = Callable[..., Server]


@contextmanager
def program(text: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program of its own, which prints a line when it is where the test wants it."""
    process = subprocess.Popen([sys.executable, "-c", text, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def said(process: subprocess.Popen[str], seconds: float = 60) -> str:
    """The line that a program prints; it must come."""
    ready, _, _ = select.select([process.stdout], [], [], seconds)
    assert ready, f"the program said nothing within {seconds} s"
    return process.stdout.readline()


def is_free(server: Server, used: int = 0) -> None:
    server.wait_for(lambda: server.arena_used() == used, f"host memory to be back at {used} bytes")
    server.wait_for(lambda: server.device_used() == 0, "device memory to be free again")


UPLOAD_FOR_EVER = """
import sys, time, numpy, pyarrow as pa, dovetail
uri, streams, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
batch = pa.record_batch({"k": numpy.arange(size)})
shown = []
def batches():
    while True:
        yield batch
        # Slowly, once the test looks: it may take its time, and the server's memory must not be full by then.
        time.sleep(0.02 if shown else 0.001)
def progress(state):
    if state.rows > 20 * size and not shown:
        shown.append(print("under way", flush=True))
dovetail.connect(uri).put("half", batches(), streams=streams, progress=progress)
"""


@pytest.mark.parametrize("streams", [1, 3])
def test_a_client_killed_during_an_upload_leaves_nothing(start: Start, streams: int) -> None:
    server = start(devices="host:1", host_memory="1GiB", upload_idle_seconds=5)
    with server.connect() as client:
        with program(UPLOAD_FOR_EVER, server.uri, str(streams), "1000") as uploader:
            assert said(uploader) == "under way\n"
            assert server.arena_used() > 0
            assert len(client.tables()) == 0
            uploader.send_signal(signal.SIGKILL)
        is_free(server)
        assert len(client.tables()) == 0

        def name_is_free() -> bool:
            # The upload stays open for streams that may follow, until it has been idle for long enough.
            with suppress(dovetail.AlreadyExists):
                return client.put("half", {"k": [1]}) == 1
            return False

        server.wait_for(name_is_free, "the name to be free again")


READ_AND_STALL = """
import sys, time, dovetail
uri, retain = sys.argv[1], sys.argv[2]
client = dovetail.connect(uri)
result = client.join("many", "many", on="k", retain_seconds=None if retain == "default" else int(retain))
reader = result.reader()
reader.read_next_batch()
print(result.job_id, flush=True)
time.sleep(1000)
"""


def many(client: dovetail.Client, rows: int) -> None:
    """A table whose join with itself has rows * rows rows."""
    client.put("many", pa.table({"k": np.zeros(rows, np.int64), "v": np.arange(rows)}))


def held(folder: Path) -> dict[str, object]:
    """Settings of a server whose only device is taken for minutes by a join of hundreds of millions of rows."""
    return {"topology": slow_devices(folder, "4MB/s"), "host_memory": "1GiB"}


def test_a_client_killed_during_a_fetch_frees_its_memory(start: Start, tmp_path: Path) -> None:
    server = start(**held(tmp_path))
    with server.connect() as client:
        many(client, 20_000)
        used = server.arena_used()
        with program(READ_AND_STALL, server.uri, "0") as reader:
            job = int(said(reader))
            assert client.job(job).status().state == "running"
            reader.send_signal(signal.SIGKILL)
        # 400 million rows that nobody will read: the job ends with its reader.
        server.wait_for(lambda: client.job(job).status().done, "the job to end")
        assert client.job(job).status().state == "cancelled"
        is_free(server, used)


def test_an_unfetched_result_is_released_at_the_end_of_its_lease(start: Start) -> None:
    server = start(devices="host:1", host_memory="1GiB")
    with server.connect() as client:
        many(client, 1000)
        used = server.arena_used()
        with program(READ_AND_STALL, server.uri, "5") as reader:
            job = int(said(reader))
            reader.send_signal(signal.SIGKILL)
        result = client.join("many", "many", on="k", retain_seconds=5).wait()
        is_free(server, used)
        with pytest.raises(dovetail.NotFound):
            result.table()
        assert all(status.state != "running" for status in client.jobs() if status.id == job)


def test_results_that_were_read_are_evicted_unless_their_lease_was_requested(start: Start) -> None:
    server = start(devices="host:1", host_memory="256MiB")
    with server.connect(call_timeout=120) as client:
        # 96 MB of result: two fit.
        many(client, 2000)
        results = []
        for _ in range(5):
            results.append(client.join("many", "many", on="k"))
            assert results[-1].table().num_rows == 4_000_000
        assert results[-1].table().num_rows == 4_000_000, "what was read last is still there"
        with pytest.raises(dovetail.NotFound, match="its memory was needed"):
            results[0].table()
        # So does a table.
        client.put("large", {"x": np.zeros(20_000_000)})
        client.drop("large")

        promised = [client.join("many", "many", on="k", retain_seconds=100) for _ in range(2)]
        assert all(result.table().num_rows == 4_000_000 for result in promised)
        waiting = client.submit("many", "many", on="k")
        jobs = f"the results of jobs {promised[1].job_id}, {promised[0].job_id} hold"
        server.wait_for(lambda: jobs in (waiting.status().waiting_for or ""), "the job to wait and to say for what")
        promised[0].close()
        assert waiting.wait().rows == 4_000_000
        assert promised[1].table().num_rows == 4_000_000


def test_a_result_that_is_read_as_it_is_made_needs_little_memory(start: Start) -> None:
    # What readers have taken stays until it is sent: 24 MB are less than the batches on their way to four endpoints.
    server = start(devices="host:1", host_memory="64MiB", endpoints=4)
    with server.connect(call_timeout=120) as client:
        client.put("filler", {"x": np.zeros(5_000_000)})
        many(client, 4000)
        for _ in range(3):
            reader = client.join("many", "many", on="k", retain_seconds=0).reader()
            assert sum(batch.num_rows for batch in reader) == 16_000_000


@pytest.mark.parametrize("retain", ["0", "default"])
def test_a_reader_that_stops_does_not_stop_other_jobs(start: Start, retain: str) -> None:
    server = start(devices="host:1", host_memory="3GiB")
    # A call that waits for a device which the stalled reader holds fails at its deadline.
    with server.connect(call_timeout=120) as client:
        # 864 MB of result: more than connections or a window before the reader take in, and no more than the server has
        # room for. The only device is free again without a byte of it being read.
        many(client, 6000)
        with program(READ_AND_STALL, server.uri, retain) as reader:
            job = int(said(reader))
            client.put("small", {"k": [1, 2, 3]})
            for _ in range(20):
                with client.join("small", "small", on="k") as result:
                    assert result.table().num_rows == 3
            # The reader is there, and so is what it has not read.
            assert reader.poll() is None
            assert server.arena_used() > 256 << 20
            client.job(job).cancel()


def checksum(table: pa.Table) -> tuple[int, int]:
    columns = (table[name].to_numpy().astype(np.uint64) for name in table.column_names)
    with np.errstate(over="ignore"):
        mixed = sum(column * np.uint64(2 * index + 3) for index, column in enumerate(columns))
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return table.num_rows, int(mixed.sum(dtype=np.uint64))


def record(long_run: bool, **totals: object) -> None:
    """Appends a line to benches/results/life.jsonl, as the benchmarks do to theirs."""
    sys.path.insert(0, str(ROOT / "benches"))
    from common import Recorder

    command = "./test long life" if long_run else "DOVETAIL_RECORD=1 ./test python -k 64_clients"
    Recorder("life", command=command).write(benchmark="life", build=binary().parent.name, **totals)


def test_64_clients_upload_join_and_fetch_with_right_checksums(start: Start, seed: int, long_run: bool) -> None:
    # Ten seconds of rounds, or a minute in `./test long life`; on a slow machine at least one round by each client.
    server = start(devices="host:4", host_memory="3GiB", device_memory="32MiB")
    deadline = time.monotonic() + (60 if long_run else 10)
    failures: list[str] = []
    rounds = [0] * 64
    moved = [0] * 64
    started = time.monotonic()

    def live(index: int) -> None:
        rng = np.random.default_rng([seed, index])
        choose = random.Random(seed + index)
        try:
            with server.connect() as client:
                while (rounds[index] == 0 or time.monotonic() < deadline) and not failures:
                    rows, keys = int(rng.integers(1, 20_000)), int(rng.integers(1, 20_000))
                    left = pa.table({"k": rng.permutation(keys).astype(np.int64), "a": rng.integers(0, 1 << 40, keys)})
                    right = pa.table({"k": rng.integers(0, 2 * keys, rows), "b": rng.integers(0, 1 << 40, rows)})
                    names = (f"left {index}", f"right {index}")
                    client.put(names[0], left, streams=choose.choice([1, 2]))
                    client.put(names[1], right)
                    assert checksum(client.get(names[1])) == checksum(right), "the table changed on its way"
                    matched = right.filter(pa.compute.less(right["k"], keys))
                    by_key = np.empty(keys, np.int64)
                    by_key[left["k"].to_numpy()] = left["a"].to_numpy()
                    found = pa.array(by_key[matched["k"].to_numpy()])
                    expected = checksum(pa.table({"k": matched["k"], "a": found, "b": matched["b"]}))
                    strategy = choose.choice(["auto", "hash", "radix-hash", "sort-merge"])
                    with client.join(*names, on="k", strategy=strategy, columns=["k", "a", "b"]) as result:
                        got = result.table() if choose.random() < 0.5 else result.reader().read_all()
                    assert checksum(got) == expected, f"{strategy}: the result is wrong"
                    for name in names:
                        client.drop(name)
                    moved[index] += left.nbytes + 2 * right.nbytes + got.nbytes
                    rounds[index] += 1
        except Exception as error:
            failures.append(f"client {index}, round {rounds[index]}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=live, args=(index,)) for index in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # A round has one join. The last ones go on beyond the deadline, and count with their time.
    totals = {"clients": 64, "joins": sum(rounds), "bytes": sum(moved), "seconds": time.monotonic() - started}
    print(f"seed {seed}: {totals}")
    assert failures == [], f"seed {seed}: {failures[:5]}"
    assert min(rounds) >= 1, rounds
    if os.environ.get("DOVETAIL_RECORD"):
        record(long_run, seed=seed, **totals)
    is_free(server)


def test_a_job_is_cancelled_soon_in_every_state(start: Start, tmp_path: Path) -> None:
    server = start(**held(tmp_path))
    with server.connect() as client:
        many(client, 20_000)
        used = server.arena_used()
        for _ in range(3):
            running = client.join("many", "many", on="k", retain_seconds=0)
            queued = client.join("many", "many", on="k", retain_seconds=0)
            server.wait_for(lambda running=running: running.status().state == "running", "the job to run")
            assert queued.status().state == "queued"
            queued.cancel()
            assert queued.status().state == "cancelled"
            running.cancel()
            server.wait_for(lambda running=running: running.status().done, "the job to end")
            with pytest.raises(dovetail.Cancelled):
                running.wait()
        is_free(server, used)


def test_sigterm_lets_running_jobs_finish_and_refuses_new_ones(start: Start) -> None:
    # One endpoint, so that all that will be read is being read when the signal comes.
    server = start(devices="host:1", host_memory="1GiB", drain_seconds=600, endpoints=1)
    client = server.connect()
    many(client, 4000)  # a result far larger than what the connection buffers
    result = client.join("many", "many", on="k", retain_seconds=0)
    reader = result.reader()
    rows = reader.read_next_batch().num_rows
    server.terminate()
    server.wait_for(lambda: not server.is_ready(), "the drain")
    # Whoever comes now may watch and fetch what there is, and begins nothing.
    with pytest.raises(dovetail.Unavailable):
        with server.connect() as late:
            late.put("late", pa.table({"k": [1]}))
    with pytest.raises(dovetail.Unavailable):
        with server.connect() as late:
            late.join("many", "many", on="k").table()
    rows += sum(batch.num_rows for batch in reader)
    assert rows == 16_000_000, "nothing of what was under way is lost"
    client.close()
    server.stop()


def test_a_second_sigterm_ends_the_server_at_once(start: Start, tmp_path: Path) -> None:
    server = start(**held(tmp_path), drain_seconds=600)
    client = server.connect()
    many(client, 20_000)
    reader = client.join("many", "many", on="k", retain_seconds=0).reader()
    reader.read_next_batch()
    server.terminate()
    server.wait_for(lambda: not server.is_ready(), "the drain")
    assert server.process.poll() is None, "the server waits for the stream"
    server.terminate()
    # The drain could last ten minutes.
    assert server.process.wait(60) == 0, server.tail()
    assert not server.panics(), server.tail()
    with pytest.raises(dovetail.Error):
        for _ in reader:
            pass
    client.close()


def test_a_drain_that_takes_too_long_is_ended(start: Start, tmp_path: Path) -> None:
    server = start(**held(tmp_path), drain_seconds=1)
    client = server.connect()
    many(client, 20_000)
    reader = client.join("many", "many", on="k", retain_seconds=0).reader()
    reader.read_next_batch()
    server.terminate()
    assert server.process.wait(60) == 0, server.tail()
    assert not server.panics(), server.tail()
    # The log tells whose doing it was.
    ended = [line for line in server.log().splitlines() if 'rpc="DoGet"' in line]
    assert ended and all('status="UNAVAILABLE"' in line for line in ended), ended
    client.close()


@pytest.mark.parametrize("processes", ["off", "on"])
def test_memory_is_prepared_after_the_start_and_joins_use_it(start: Start, processes: str) -> None:
    server = start(devices="host:1", host_memory="512MiB", prefault="50%", device_processes=processes)
    mapped = r'^dovetail_arena_bytes\{kind="mapped"\}'
    server.wait_for(lambda: server.metric(mapped) >= 256 << 20, "memory to be prepared")
    assert server.metric(r'^dovetail_arena_bytes\{kind="prefault"\}') == 256 << 20
    assert server.metric(r"^dovetail_arena_info\{") == 1
    assert server.arena_used() == 0
    with urllib.request.urlopen(f"{server.admin}/readyz", timeout=60) as answer:
        first, second = answer.read().decode().splitlines()
    assert first == "ready"
    assert second.startswith("host memory is ")
    assert second.endswith("; 256.0 MiB of 256.0 MiB are prepared")
    server.wait_for(lambda: "prepared 256.0 MiB of host memory in " in server.log(), "the log to tell of it")
    with server.connect() as client:
        client.put("t", pa.table({"k": np.arange(1 << 20), "v": np.arange(1 << 20)}))
        assert client.join("t", "t", on="k").table().num_rows == 1 << 20
    assert server.metric(r"^dovetail_arena_wait_seconds_total") == 0


def test_a_server_that_prepares_memory_ends_at_once(start: Start) -> None:
    server = start(devices="host:1", host_memory="4GiB", prefault="all")
    server.stop()
    assert "prepared 4.0 GiB" not in server.log()
