"""Requests that are right, and too much: for a quota, the queue, the memory, a deadline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dovetail
from harness import Server, slow_devices
from refusals import TABLE, is_unharmed, refused, slow_join

Start = Callable[..., Server]


def test_a_quota_that_is_exceeded_is_named_with_its_setting(start: Start, token_file: Path) -> None:
    server = start(devices="host:1", token_file=token_file, tenant_memory="1MiB", tenant_tables=2, host_memory="256MiB")
    with server.connect(token="ann-writes") as ann, server.connect(token="bob-writes") as bob:
        with refused(dovetail.Exhausted, "ann", "tenant-memory"):
            ann.put("large", pa.table({"k": np.arange(1_000_000)}))
        ann.put("one", TABLE)
        ann.put("two", TABLE)
        with refused(dovetail.Exhausted, "ann", "tenant-tables"):
            ann.put("three", TABLE)
        bob.put("three", TABLE)
        for name in ("one", "two"):
            ann.drop(name)
        bob.drop("three")
        is_unharmed(server, ann)


def test_a_full_queue_is_exhausted(start: Start, tmp_path: Path) -> None:
    server = start(topology=slow_devices(tmp_path, "4MB/s"), queue_limit=2, host_memory="512MiB")
    with server.connect() as client:
        slow_join(client)
        # Released while it is read, and of more rows than the device can move in hours: it takes as long as we like.
        results = [client.join("slow", "slow", on="k", retain_seconds=0, strategy="hash")]
        server.wait_for(lambda: results[0].status().state == "running", "the first job to run")
        results += [client.join("slow", "slow", on="k", retain_seconds=0) for _ in range(2)]
        assert [result.status().state for result in results[1:]] == ["queued", "queued"]
        assert [result.status().queue_position for result in results[1:]] == [0, 1]
        with refused(dovetail.Exhausted, "2", "queue-limit"):
            client.join("slow", "slow", on="k", retain_seconds=0)
        for result in results:
            result.cancel()
        client.drop("slow")
        is_unharmed(server, client)


def test_a_tenant_with_too_many_jobs_is_exhausted(start: Start, token_file: Path, tmp_path: Path) -> None:
    slow = slow_devices(tmp_path, "4MB/s")
    server = start(topology=slow, token_file=token_file, tenant_jobs=1, host_memory="512MiB")
    with server.connect(token="ann-writes") as ann, server.connect(token="bob-writes") as bob:
        slow_join(ann)
        first = ann.join("slow", "slow", on="k", retain_seconds=0)
        with refused(dovetail.Exhausted, "ann", "tenant-jobs"):
            ann.join("slow", "slow", on="k", retain_seconds=0)
        second = bob.join("slow", "slow", on="k", retain_seconds=0)
        first.cancel()
        # One that was cancelled does not count, however long its device takes to notice.
        ann.join("slow", "slow", on="k", retain_seconds=0).cancel()
        ann.join("slow", "slow", on="k", retain_seconds=0).cancel()
        second.cancel()
        ann.drop("slow")
        server.wait_for(lambda: first.status().done and second.status().done, "both jobs to end")
        with server.connect(token="root") as root:
            is_unharmed(server, root)


def test_a_result_too_large_for_the_memory_says_what_would_help(start: Start) -> None:
    server = start(devices="host:1", host_memory="96MiB", device_memory="64MiB")
    with server.connect() as client:
        slow_join(client, 5000)
        used = server.arena_used()
        # 25 million rows: the join runs until the memory is full.
        with refused(dovetail.Exhausted, "host-memory", "retain_seconds"):
            result = client.join("slow", "slow", on="k")
            with pytest.raises(dovetail.Exhausted):
                result.wait()
            assert result.status().state == "failed"
            result.table()
        # The same join, released as it is read, passes through.
        with client.join("slow", "slow", on="k", retain_seconds=0) as streamed:
            assert sum(batch.num_rows for batch in streamed.reader()) == 5000 * 5000
        is_unharmed(server, client, used)


def test_a_table_too_large_for_the_memory_is_exhausted(start: Start) -> None:
    server = start(devices="host:1", host_memory="32MiB", device_memory="8MiB")
    with server.connect() as client:
        for streams in (1, 3):
            with refused(dovetail.Exhausted, "host-memory"):
                client.put("a", pa.table({"k": np.arange(8_000_000)}), streams=streams)
            assert len(client.tables()) == 0
            is_unharmed(server, client)


def test_a_build_side_that_fits_no_device_is_refused_with_the_numbers(start: Start) -> None:
    server = start(devices="host:2", host_memory="512MiB", device_memory="1MiB")
    with server.connect() as client:
        client.put("a", pa.table({"k": np.arange(4_000_000)}))
        used = server.arena_used()
        # One hash table over four million keys, where a device has room for a thirtieth of the keys alone.
        with refused(dovetail.Exhausted, "device-memory", "MiB"):
            client.join("a", "a", on="k", strategy="hash").table()
        is_unharmed(server, client, used)


def test_a_passed_deadline_is_distinguished_from_a_cancel(start: Start, tmp_path: Path) -> None:
    server = start(topology=slow_devices(tmp_path, "4MB/s"), host_memory="512MiB")
    with server.connect() as client:
        slow_join(client)
        result = client.join("slow", "slow", on="k", retain_seconds=0)
        waiting = client.join("slow", "slow", on="k", retain_seconds=0)
        options = flight.FlightCallOptions(timeout=0.5)
        with refused(dovetail.DeadlineExceeded), dovetail.errors.translated():
            flight.connect(server.uri).do_get(waiting._info.endpoints[0].ticket, options).read_all()
        result.cancel()
        with refused(dovetail.Cancelled, "cancelled"):
            result.wait()
        waiting.cancel()
        client.drop("slow")
        is_unharmed(server, client)
