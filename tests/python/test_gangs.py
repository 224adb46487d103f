"""Gangs: one join on several devices together, in the server's process and in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest

import dovetail
import oracle
import tables
from harness import GPUS, LONG, Server, clean, command_line, slow_devices
from oracle import HOWS, LEFT_ROW, RIGHT_ROW, Case
from refusals import refused
from test_device_processes import (
    REPEATED_KEYS,
    REPEATED_ROWS,
    ROWS,
    assert_all_read,
    assert_right,
    children,
    device_up,
    upload,
    wait_until_restarted,
)

DEVICES = ["host:0", "host:1", "host:2"]

# Each way to ask for a gang, with the number of its devices.
REQUESTS: list[tuple[object, int]] = [(2, 2), ("all", 3), (["host:0", "host:2"], 2)]

# Strategies of three layouts. Rust tests run gangs by all.
STRATEGIES = ["hash", "radix-hash-gfur", "sort-merge"]

# Several chunks for each rank on the side that is divided.
LEFT_ROWS, RIGHT_ROWS = 30_000, 250_000


@pytest.fixture(scope="module")
def start_gangs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Server]:
    """Starts servers with three devices, whose rates are measured once."""
    rates = tmp_path_factory.mktemp("rates") / "rates.json"
    equal = {"devices": "host:3", "device_memory": "256MiB", "device_cache": "0", "rates_file": rates}

    def start(**settings: object) -> Server:
        return Server(tmp_path_factory.mktemp("gangs"), **equal, **settings)

    return start


@pytest.fixture(scope="module", params=["off", "on"], ids=["threads", "processes"])
def gangs_server(request: pytest.FixtureRequest, start_gangs: Callable[..., Server]) -> Iterator[Server]:
    with start_gangs(device_processes=request.param, host_memory="1GiB") as server:
        yield server


@pytest.fixture
def gangs(gangs_server: Server) -> Iterator[dovetail.Client]:
    with gangs_server.connect() as client:
        yield client
        clean(gangs_server, client)


def case_of(seed: int, how: str) -> Case:
    rng = np.random.default_rng([seed, HOWS.index(how)])

    def side(row: str, rows: int, name: str, domain: int) -> pa.Table:
        keys = tables.with_nulls(rng, pa.array(rng.integers(0, domain, rows)), 0.03)
        words = pa.array([None if at % 11 == 0 else f"{name} {at}" for at in range(rows)])
        return pa.table({"k": keys, row: np.arange(rows), f"{name}_words": words})

    # Some keys of either side have no match on the other.
    left, right = side(LEFT_ROW, LEFT_ROWS, "l", 30_000), side(RIGHT_ROW, RIGHT_ROWS, "r", 40_000)
    return Case(left, right, [("k", "k")], how)


@pytest.mark.parametrize("how", HOWS)
def test_gangs_agree_with_duckdb(gangs: dovetail.Client, seed: int, how: str) -> None:
    case = case_of(seed, how)
    gangs.put("l", case.left)
    gangs.put("r", case.right)
    rows = oracle.matching_rows(case)
    for strategy, (devices, ranks) in zip(STRATEGIES, REQUESTS, strict=True):
        job = gangs.submit("l", "r", on="k", how=how, strategy=strategy, devices=devices)
        oracle.check(case, job.result().table(), rows)
        assert job.explain()["device"]["ranks"] == ranks, f"{devices}, {strategy}"
        assert gangs.count("l", "r", on="k", how=how, strategy=strategy, devices=devices) == len(rows[0])
        job.cancel()


@pytest.mark.parametrize("ranks", [4, 5, 8] if LONG else [5])
def test_gangs_of_many_processes_cross_every_boundary_of_small_windows(
    start: Callable[..., Server], seed: int, ranks: int
) -> None:
    # A window has a sixteenth of its device's memory, in which each of the other ranks has a few slots.
    device_memory = 4 << 20
    with (
        start(
            devices=f"host:{ranks}", device_processes="on", device_memory=device_memory, host_memory="512MiB"
        ) as server,
        server.connect() as client,
    ):
        for how in ("inner", "full", "right_anti"):
            case = case_of(seed, how)
            client.put("l", case.left, mode="replace")
            client.put("r", case.right, mode="replace")
            job = client.submit("l", "r", on="k", how=how, devices="all", distribution="hash")
            oracle.check(case, job.result().table(), oracle.matching_rows(case))
            sent = [rank["sent_bytes"] for rank in job.status().raw["ranks"]]
            assert len(sent) == ranks and sum(sent) > 2 * ranks * device_memory / 16, "all windows were full twice"
            job.cancel()
        server.wait_for(lambda: server.device_used() == 0, "device memory to be free again")


def test_a_result_has_an_endpoint_for_each_device_at_least(gangs: dovetail.Client) -> None:
    gangs.put("t", {"k": np.arange(1000)})
    for ranks in (1, 2, 3):
        job = gangs.submit("t", "t", on="k", devices=ranks, retain_seconds=300)
        assert len(job.result()._info.endpoints) == ranks, "so few rows are worth one endpoint alone"
        assert job.result().table().num_rows == 1000
        job.cancel()


def test_results_of_gangs_are_inputs_of_the_next(gangs: dovetail.Client) -> None:
    rng = np.random.default_rng(3)
    a = pa.table({"k": rng.integers(0, 5_000, 20_000), "a": np.arange(20_000)})
    b = pa.table({"k": rng.integers(0, 5_000, 20_000), "b": np.arange(20_000)})
    c = pa.table({"b": rng.integers(0, 20_000, 30_000), "c": np.arange(30_000)})
    for name, table in (("a", a), ("b", b), ("c", c)):
        gangs.put(name, table)
    gangs.join("a", "b", on="k", devices=2, into="ab").wait()
    gangs.join("ab", "c", on="b", devices="all", into="abc").wait()
    gangs.join(
        "abc", "a", on="k", how="left_semi", devices=["host:1", "host:2"], into="abc", into_mode="replace"
    ).wait()
    with duckdb.connect() as db:
        for name, table in (("a", a), ("b", b), ("c", c)):
            db.register(name, table)
        expected = db.sql(
            "SELECT k, a, b, c FROM a JOIN b USING (k) JOIN c USING (b) ORDER BY a, b, c"
        ).to_arrow_table()
    found = gangs.get("abc").select(["k", "a", "b", "c"]).sort_by([(name, "ascending") for name in ("a", "b", "c")])
    assert found.num_rows > 100_000
    assert found.combine_chunks().equals(expected.combine_chunks())


@pytest.mark.parametrize("distribution", ["broadcast", "hash"])
def test_a_distribution_that_is_asked_for_is_taken(
    gangs_server: Server, gangs: dovetail.Client, seed: int, distribution: str
) -> None:
    case = case_of(seed, "left")
    gangs.put("l", case.left)
    gangs.put("r", case.right)
    options = {"on": "k", "how": "left", "devices": 2, "distribution": distribution}
    job = gangs.submit("l", "r", **options)
    oracle.check(case, job.result().table())
    told, status = job.explain(), job.status().raw
    assert told["device"]["distribution"] == status["distribution"] == distribution
    assert [rank["device"] for rank in status["ranks"]] == status["devices"]
    assert told["ranks"] == status["ranks"] and min(told["skew"].values()) >= 1.0
    sent = sum(rank["sent_bytes"] for rank in status["ranks"])
    if distribution == "hash":
        exchange = told["exchange"]
        assert 0 < exchange["measured_bytes"] <= sent and exchange["measured_bytes_per_second"] > 0
        assert "sent by each device: " in str(told)
    else:
        assert sent == 0 and told["exchange"] is None
    assert "largest / mean" in str(told)
    explained = gangs.explain("l", "r", **options)
    assert {other["distribution"] for other in explained["alternatives"]} == {distribution}
    assert explained["device"]["name"] == "host:0, host:1"
    named = gangs.explain("l", "r", **{**options, "devices": ["host:0", "host:2"]})["device"]
    assert (named["name"], named["reason"]) == ("host:0, host:2", "the only devices that may run it together")
    words = ["explain", "l", "r", "--on", "k", "--devices", "2", "--distribution", distribution]
    shown = command_line(gangs_server, *words)
    divided = {"broadcast": "all of it to each of 2 devices", "hash": "exchanged by key among 2 devices"}
    assert divided[distribution] in shown.stdout, shown


IMPOSSIBLE: dict[str, tuple[dict[str, object], str]] = {
    "one device": ({"on": "k", "distribution": "hash"}, 'ask for several with "devices", as in "devices": 2'),
    "text": ({"on": "t", "distribution": "hash", "devices": 2}, 'these keys are wider; ask for "broadcast"'),
    "full": ({"on": "k", "how": "full", "distribution": "broadcast", "devices": 2}, 'ask for "hash" or "auto"'),
    "unknown": ({"on": "k", "distribution": "hsah"}, 'one of auto, broadcast, hash; did you mean "hash"?'),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_distribution_that_is_impossible_is_refused(gangs: dovetail.Client, name: str) -> None:
    options, sentence = IMPOSSIBLE[name]
    gangs.put("t", {"k": [1, 2, 3], "t": ["a", "b", "more than sixteen bytes"]})
    for call in (gangs.join, gangs.count, gangs.explain):
        with refused(dovetail.InvalidRequest, sentence):
            call("t", "t", **options)


def test_the_server_chooses_how_many_devices_join_and_tells_of_the_others(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    rows = 1 << 18
    server = start(topology=slow_devices(tmp_path, "40MB/s", "40MB/s"), host_memory="1GiB")
    with server.connect() as client:
        client.put("few", {"k": np.arange(1000), "a": np.arange(1000)})
        client.put("many", {"k": np.arange(rows), "b": np.arange(rows)})
        told = client.explain("few", "many", on="k", how="right")
        assert [(each["devices"], each["ranks"], each["sets"]) for each in told["sets"]] == [
            ("host:0", 1, 2),
            ("host:0, host:1", 2, 1),
        ]
        alone, both = (each["predicted_seconds"] for each in told["sets"])
        assert both < 0.7 * alone
        assert "devices that could run it" in str(told) and "host:0 (2 such sets)" in str(told)
        # Each has a link of its own, and together they copy twice as fast.
        job = client.submit("few", "many", on="k", how="right")
        assert job.wait().rows == rows
        assert job.status().raw["devices"] == ["host:0", "host:1"]


def test_all_devices_of_a_gang_are_shown(gangs_server: Server, gangs: dovetail.Client) -> None:
    gangs.put("l", pa.table({"k": np.arange(200_000), "a": np.arange(200_000)}))
    gangs.put("r", pa.table({"k": np.arange(1000), "b": np.arange(1000)}))
    planned = gangs.explain("l", "r", on="k", devices=2)
    assert planned["device"]["ranks"] == 2
    divided = {
        "broadcast": ["all of it to each of 2 devices", "divided among 2 devices"],
        "hash": ["exchanged by key among 2 devices"],
    }
    assert all(words in str(planned) for words in divided[planned["device"]["distribution"]]), planned
    alone = gangs.explain("l", "r", on="k", devices=1)
    assert (alone["device"]["ranks"], alone["device"]["distribution"]) == (1, "alone")

    job = gangs.submit("l", "r", on="k", devices=["host:2", "host:0"], retain_seconds=300)
    assert job.wait().rows == 1000
    status = job.status().raw
    assert (status["device"], status["devices"]) == ("host:0", ["host:0", "host:2"])
    assert job.explain()["device"]["name"] == "host:0, host:2"
    assert gangs.job(gangs.submit("l", "r", on="k", devices="host:1").id).wait().raw["devices"] == ["host:1"]

    title, *listed = command_line(gangs_server, "jobs").stdout.splitlines()
    [line] = [line for line in listed if line.split()[0] == str(job.id)]
    assert " devices " in title and " host:0, host:2 " in line, (title, line)
    [shown] = [
        line for line in command_line(gangs_server, "jobs", str(job.id)).stdout.splitlines() if "devices" in line
    ]
    assert shown.split(None, 1)[1] == "host:0, host:2"
    answered = json.loads(command_line(gangs_server, "--json", "jobs", str(job.id)).stdout)
    assert answered["devices"] == ["host:0", "host:2"]
    said = command_line(gangs_server, "join", "l", "r", "--on", "k", "--devices", "all", "--into", "j")
    assert said.returncode == 0 and " on host:0, host:1, host:2)" in said.stdout, said


# What a client asks for, what the command line is told (None where it has no way to say so), and words of the refusal.
REFUSED: dict[str, tuple[object, str | None, str]] = {
    "more than there are": (4, "4", "the server has 3 devices of one kind at most: host:0, host:1, host:2"),
    "an empty list": ([], None, '"devices" is an empty list; name some of host:0, host:1, host:2'),
    "a device that is not there": ("host:7", "host:7", 'there is no device "host:7"; name some of host:0'),
    "a list with one that is not there": (["host:0", "gpu"], "host:0,gpu", 'there is no device "gpu"'),
    "all in a list": (["all", "host:0"], "all,host:0", 'there is no device "all"'),
    "a kind that is not there": (["cuda:0", "host:0"], "cuda:0,host:0", 'there is no device "cuda:0"'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_devices_that_cannot_run_a_join_together_are_refused(
    gangs_server: Server, gangs: dovetail.Client, name: str
) -> None:
    devices, words, sentence = REFUSED[name]
    gangs.put("t", {"k": [1, 2, 3]})
    jobs = len(gangs.jobs())
    for call in (gangs.join, gangs.count, gangs.explain):
        with refused(dovetail.InvalidRequest, sentence):
            call("t", "t", on="k", devices=devices)
    assert len(gangs.jobs()) == jobs, "no refused join became a job"
    if words is not None:
        said = command_line(gangs_server, "join", "t", "t", "--on", "k", "--devices", words, "--into", "u")
        assert said.returncode != 0 and sentence in said.stderr, said


@pytest.mark.parametrize(
    ("devices", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), ([1], TypeError), ({"a": 1}, TypeError)]
)
def test_the_client_refuses_what_is_no_request_for_devices(
    gangs: dovetail.Client, devices: object, error: type[Exception]
) -> None:
    with pytest.raises(error, match="devices"):
        gangs.join("t", "t", on="k", devices=devices)


def test_the_command_line_is_told_that_a_join_needs_a_device(gangs_server: Server, gangs: dovetail.Client) -> None:
    gangs.put("t", {"k": [1, 2, 3]})
    said = command_line(gangs_server, "explain", "t", "t", "--on", "k", "--devices", "0")
    assert said.returncode != 0 and '"devices" is 0, and a join needs one; name some of host:0' in said.stderr, said


def test_gangs_and_small_joins_run_beside_each_other(gangs_server: Server, gangs: dovetail.Client) -> None:
    rows = 150_000
    gangs.put("l", pa.table({"k": np.arange(rows), "a": np.arange(rows)}))
    gangs.put("r", pa.table({"k": np.arange(rows) * 2, "b": np.arange(rows)}))
    gangs.put("few", pa.table({"k": np.arange(500), "c": np.arange(500)}))
    used = gangs_server.arena_used()
    jobs = []
    for number in range(12):
        devices = [2, "all", ["host:1", "host:2"]][number % 3]
        jobs.append((gangs.submit("l", "r", on="k", devices=devices), rows // 2))
        jobs += [(gangs.submit("few", "r", on="k", devices=device), 250) for device in (DEVICES[number % 3], None)]
    for job, expected in jobs:
        joined = job.result().table()
        assert joined.num_rows == expected
        assert joined["a" if expected > 250 else "c"].to_numpy().sum() == sum(range(0, 2 * expected, 2))
    assert all(job.status().raw["state"] == "complete" for job, _ in jobs)
    for job, _ in jobs:
        job.cancel()
    gangs_server.wait_for(lambda: gangs_server.arena_used() == used, "the memory of the results to be free again")
    gangs_server.wait_for(lambda: gangs_server.device_used() == 0, "device memory to be free again")


@pytest.fixture(scope="module")
def mortal_server(start_gangs: Callable[..., Server]) -> Iterator[Server]:
    """A server whose devices have processes, which are started again after they have ended.

    A process may stand still for as long as a test needs. So no missing heartbeat tells of a process that has ended,
    and its jobs fail without one.
    """
    settings = {"device_restart_seconds": 1, "device_stall_seconds": 0}
    with start_gangs(device_processes="on", host_memory="512MiB", **settings) as server:
        yield server


@pytest.fixture
def mortals(mortal_server: Server) -> Iterator[dovetail.Client]:
    with mortal_server.connect() as client:
        upload(client)
        yield client
        clean(mortal_server, client)


@pytest.fixture
def watched_server(start_gangs: Callable[..., Server]) -> Iterator[Server]:
    """A server that soon kills a process that stands still."""
    settings = {"device_restart_seconds": 1, "device_stall_seconds": 3}
    with start_gangs(device_processes="on", host_memory="512MiB", **settings) as server:
        yield server


def kill(server: Server, device: str) -> None:
    os.kill(children(server)[device], signal.SIGKILL)


@contextmanager
def standing_still(server: Server) -> Iterator[None]:
    """Stops the processes of all devices for a while."""
    pids = children(server).values()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            # A process that has been killed is not there any more.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def restarts(server: Server, device: str) -> int:
    return int(server.metric(rf'^dovetail_device_restarts_total\{{device="{device}"\}}'))


def assert_as_before(server: Server, client: dovetail.Client, used: int) -> None:
    """All devices take part in gangs, and no memory is missing."""
    assert sorted(children(server)) == DEVICES
    assert [device["lost"] for device in client.topology()["devices"]] == [None, None, None]
    job = client.submit("l", "r", on="k", devices="all")
    assert_right(job.result().table())
    assert job.status().raw["devices"] == DEVICES
    job.cancel()
    server.wait_for(lambda: server.arena_used() == used, "host memory to be free again")
    server.wait_for(lambda: server.device_used() == 0, "device memory to be free again")


@pytest.mark.parametrize("lost", ["host:0", "host:1"])
def test_a_gang_that_has_delivered_rows_fails_with_its_device_and_harms_no_other_job(
    mortal_server: Server, mortals: dovetail.Client, lost: str
) -> None:
    # Enough rows that the kill meets each rank in the middle of a chunk.
    mortals.put("more", pa.table({"k": np.arange(250_000) % REPEATED_KEYS, "w": np.arange(250_000)}))
    used, before = mortal_server.arena_used(), restarts(mortal_server, lost)
    # Results that do not fit in memory, so that the joins wait for their readers in the middle.
    options = {"on": "k", "strategy": "hash", "retain_seconds": 0}
    unharmed = mortals.submit("many", "many", devices=["host:2"], **options)
    harmed = mortals.submit("many", "more", devices=["host:0", "host:1"], **options)
    batches = iter(harmed.result().reader())
    assert next(batches).num_rows > 0
    kill(mortal_server, lost)
    with pytest.raises(dovetail.Unavailable, match=rf"the process of {lost} has ended \(signal: 9"):
        for _ in batches:
            pass
    assert harmed.status().raw["devices"] == ["host:0", "host:1"]
    assert_all_read(unharmed)
    wait_until_restarted(mortal_server, lost, before + 1)
    assert_as_before(mortal_server, mortals, used)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gang_that_has_delivered_nothing_is_tried_again_without_the_lost_device(
    mortal_server: Server, mortals: dovetail.Client, rank: int
) -> None:
    used = mortal_server.arena_used()
    keys = {"on": {"v": "k"}, "how": "right_anti", "strategy": "sort-merge"}
    counted: list[int] = []

    def count() -> None:
        counted.append(mortals.count("many", "l", devices=2, **keys))

    known = {job.id for job in mortals.jobs()}
    # Processes that stand still keep the job from delivering anything before one of them ends.
    with standing_still(mortal_server):
        caller = threading.Thread(target=count)
        caller.start()

        def started() -> list[dovetail.JobStatus]:
            return [job for job in mortals.jobs() if job.id not in known and job.state == "running"]

        mortal_server.wait_for(lambda: bool(started()), "the gang to run")
        [job] = started()
        lost = job.raw["devices"][rank]
        before = restarts(mortal_server, lost)
        kill(mortal_server, lost)
    caller.join()
    after = mortals.job(job.id).status().raw
    wait_until_restarted(mortal_server, lost, before + 1)
    assert lost not in after["devices"]
    assert counted == [ROWS - REPEATED_ROWS]
    assert after["state"] == "complete" and len(after["devices"]) == 2
    assert_as_before(mortal_server, mortals, used)


@pytest.mark.parametrize("stalled", ["host:0", "host:1"])
def test_a_stalled_process_is_killed_and_harms_no_other_job(watched_server: Server, stalled: str) -> None:
    server = watched_server
    with server.connect() as client:
        upload(client)
        client.put("more", pa.table({"k": np.arange(250_000) % REPEATED_KEYS, "w": np.arange(250_000)}))
        used, before = server.arena_used(), children(server)
        options = {"on": "k", "strategy": "hash", "retain_seconds": 0}
        unharmed = client.submit("many", "many", devices=["host:2"], **options)
        harmed = client.submit("many", "more", devices=["host:0", "host:1"], **options)
        batches = iter(harmed.result().reader())
        assert next(batches).num_rows > 0
        os.kill(before[stalled], signal.SIGSTOP)
        seen = f"the process of {stalled} has not answered for 3 s, and was killed"
        with pytest.raises(dovetail.Unavailable, match=seen):
            for _ in batches:
                pass
        server.wait_for(lambda: seen in server.log(), "the log to say so")
        assert_all_read(unharmed)
        wait_until_restarted(server, stalled, 1)
        after = children(server)
        assert [device for device in DEVICES if after[device] != before[device]] == [stalled]
        assert_as_before(server, client, used)


@pytest.mark.parametrize("stalled", ["host:0", "host:1"])
def test_a_gang_that_has_delivered_nothing_is_tried_again_without_a_stalled_device(
    watched_server: Server, stalled: str
) -> None:
    server = watched_server
    with server.connect() as client:
        upload(client)
        used = server.arena_used()
        os.kill(children(server)[stalled], signal.SIGSTOP)
        # By hash, no rank joins a row before all have counted theirs.
        job = client.submit("l", "r", on="k", devices=2, distribution="hash")
        assert_right(job.result().table())
        assert job.status().raw["devices"] == [device for device in DEVICES if device != stalled]
        job.cancel()
        wait_until_restarted(server, stalled, 1)
        assert_as_before(server, client, used)


def test_a_suspended_machine_loses_no_device(watched_server: Server) -> None:
    server = watched_server
    with server.connect() as client:
        upload(client)
        used, before = server.arena_used(), children(server)
        # As when a laptop sleeps: all processes stand still for longer than a process alone may.
        pids = [server.process.pid, *before.values()]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(4)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert_as_before(server, client, used)
        assert children(server) == before


def ways(client: dovetail.Client) -> dict[tuple[str, str], tuple[str | None, str | None]]:
    return {(pair["from"], pair["to"]): (pair["through"], pair["why"]) for pair in client.topology()["pairs"]}


def test_a_pair_whose_bytes_do_not_arrive_exchanges_rows_through_host_memory(
    start_gangs: Callable[..., Server], tmp_path: Path
) -> None:
    trigger = tmp_path / "fault"
    settings = {"device_processes": "on", "device_restart_seconds": 1, "host_memory": "512MiB"}
    unknown = (None, "not known before they first exchange rows")
    trigger.write_text("host:2 lost-push")
    with (
        start_gangs(**settings, env={"DOVETAIL_TEST_FAULT": str(trigger)}) as server,
        server.connect() as client,
    ):
        case = case_of(1, "full")
        client.put("l", case.left)
        client.put("r", case.right)
        rows = oracle.matching_rows(case)

        def join(devices: list[str]) -> None:
            job = client.submit("l", "r", on="k", how="full", devices=devices)
            oracle.check(case, job.result().table(), rows)
            assert job.explain()["device"]["distribution"] == "hash"
            job.cancel()

        assert not trigger.exists(), "the fault was injected"
        for _ in range(2):
            join(["host:0", "host:2"])
        found = ways(client)
        through, why = found.pop(("host:2", "host:0"))
        assert through == "host memory" and "bytes that host:2 writes to host:0 do not arrive" in str(why)
        assert set(found.values()) == {("peer memory", None)} and len(found) == 5
        assert all(pair["bytes_per_second"] > 1e6 for pair in client.topology()["pairs"])
        shown = command_line(server, "topology").stdout
        assert "host memory" in shown and "do not arrive" in shown, shown

        # A process that is started again is checked again.
        before = restarts(server, "host:2")
        kill(server, "host:2")
        wait_until_restarted(server, "host:2", before + 1)
        assert {pair for pair, way in ways(client).items() if way == unknown} == {
            (a, b) for a in DEVICES for b in DEVICES if a != b and "host:2" in (a, b)
        }
        join(DEVICES)
        assert set(ways(client).values()) == {("peer memory", None)}


two_gpus_only = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs, or one that is shown as two")


@two_gpus_only
def test_gpus_of_one_process_run_no_join_together_and_explain_says_so(start: Callable[..., Server]) -> None:
    server = start(devices="cuda:2", device_memory="512MiB", device_processes="off", host_memory="1GiB")
    with server.connect() as client:
        case = case_of(1, "inner")
        client.put("l", case.left)
        client.put("r", case.right)
        device = client.explain("l", "r", on="k", devices=2)["device"]
        assert (device["ranks"], device["distribution"]) == (1, "alone")
        assert "one device runs it, because GPUs run a join together only if each has a process" in device["reason"]
        oracle.check(case, client.join("l", "r", on="k", devices=2).table(), oracle.matching_rows(case))
        for through, why in ways(client).values():
            assert through is None and "shares no memory with other devices; GPUs do if each has a process" in str(why)


@two_gpus_only
def test_gpus_whose_bytes_do_not_arrive_exchange_rows_through_host_memory(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    trigger = tmp_path / "fault"
    settings = {"devices": "cuda:2", "device_memory": "512MiB", "device_processes": "on", "host_memory": "1GiB"}
    trigger.write_text("cuda:0 lost-push")
    server = start(**settings, env={"DOVETAIL_TEST_FAULT": str(trigger)})
    with server.connect() as client:
        case = case_of(1, "full")
        client.put("l", case.left)
        client.put("r", case.right)
        assert not trigger.exists(), "the fault was injected"
        job = client.submit("l", "r", on="k", how="full", devices=2)
        oracle.check(case, job.result().table(), oracle.matching_rows(case))
        assert job.explain()["device"]["distribution"] == "hash"
        assert [ways(client)[pair][0] for pair in [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")]] == [
            "host memory",
            "peer memory",
        ]


@two_gpus_only
def test_an_illegal_access_in_an_exchange_fails_its_gang_and_no_other_job(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    trigger = tmp_path / "fault"
    settings = {"devices": "cuda:2", "device_memory": "512MiB", "device_restart_seconds": 1, "host_memory": "1GiB"}
    server = start(**settings, env={"DOVETAIL_TEST_FAULT": str(trigger)})
    with server.connect() as client:
        upload(client)
        gang = {"on": "k", "devices": 2, "distribution": "hash"}
        first = client.submit("l", "r", **gang)
        assert_right(first.result().table())
        first.cancel()
        # The gang runs after this job, and another job after the gang.
        unharmed = client.submit("l", "r", on="k", devices=["cuda:0"])
        trigger.write_text("cuda:1 illegal-access")
        with pytest.raises(dovetail.Unavailable, match="cuda:1"):
            client.count("l", "r", **gang)
        assert not trigger.exists(), "the fault was injected"
        later = client.submit("l", "r", on="k", devices=["cuda:0"])
        for job in (unharmed, later):
            assert_right(job.result().table())
            job.cancel()
        wait_until_restarted(server, "cuda:1", 1)
        again = client.submit("l", "r", **gang)
        assert_right(again.result().table())
        again.cancel()
        server.wait_for(lambda: server.device_used() == 0, "device memory to be free again")


def test_a_gang_with_a_lost_device_is_refused_and_gangs_of_the_others_go_on(start_gangs: Callable[..., Server]) -> None:
    with start_gangs(device_processes="on", host_memory="512MiB") as server, server.connect() as client:
        upload(client)
        kill(server, "host:0")
        server.wait_for(lambda: device_up(server, "host:0") == 0, "the loss to be noticed")
        for devices in (["host:0", "host:1"], 3):
            with refused(dovetail.Unavailable, "host:0 is out of service, and this join runs on several devices"):
                client.join("l", "r", on="k", devices=devices)
        for rest in (2, "all"):
            job = client.submit("l", "r", on="k", devices=rest)
            assert_right(job.result().table())
            assert job.status().raw["devices"] == ["host:1", "host:2"]
