"""Joins on one device and on several together, by each distribution, beside the least time that their bytes take.

    python benches/gangs.py --devices host:2

One server has all devices. The same join runs on one of them and on gangs of two, three, ... in turn, divided by each
distribution that can divide it, and on the devices that the server chooses, once counted and once with all its columns.
What is taken is the time of the run in the server, as `explain` tells it, without queue and client. Every result must
be that of one device: as many rows, and the same sums up to `--check-rows-max-log2`.

The workloads:

* narrow: rows of 16 bytes, a key and a column.
* wide: four columns beside the key on both sides.
* text: keys of 24 characters, which are too wide to be exchanged.
* zipf-0.5, zipf-1.0, zipf-1.5: narrow, where keys of the probe side follow Zipf's law. (narrow is zipf-0.0.)
* match-0.0, match-0.1, match-0.5: narrow, where this share of the probe rows finds a match. (narrow is match-1.0.)
* hmg-a, hmg-b: workloads A and B of the HMG sort-merge join, for each factor f of `--factors`. A
  joins f/10 with f billion rows of a 4-byte key and a 4-byte column, B joins f with f billion rows of 8 and 8 bytes.
  Keys spread over the whole range of their type, and every probe row finds one.

The tables of HMG are made and uploaded by several processes (`--processes`). A join that does not fit has a line with
the server's reason.

The floor of a join is the time of the slowest boundary: its bytes on the way in, out, or to other devices, as the
server counted them, at the rate of plain copies of as many devices at once. `peers.rs` measures these rates in the same
run. Host devices work in host memory, so that their floor is only that of the exchange.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

import dovetail
from common import ROOT, USED_BEFORE, Dovetail, Recorder, median, wait_until_prepared

# Base-2 logarithms of the rows of the build side and of the probe side.
SIZES = [(16, 24), (22, 22), (24, 24), (16, 27), (25, 27), (27, 27)]

WORKLOADS = ["narrow", "wide", "text", "zipf-0.5", "zipf-1.0", "zipf-1.5", "match-0.0", "match-0.1", "match-0.5"]

# Rows of each side for a factor of 1, and bytes of a key.
HMG = {"hmg-a": (100_000_000, 1_000_000_000, 4), "hmg-b": (1_000_000_000, 1_000_000_000, 8)}

# Rows that are made at once.
CHUNK_ROWS = 1 << 22

DISTRIBUTIONS = ["broadcast", "hash"]

# What is recorded of each phase.
PHASE = ("name", "predicted_seconds", "measured_seconds", "measured_bytes")

TEXT_BYTES = 24


def zipf(generator: np.random.Generator, count: int, draws: int, exponent: float) -> np.ndarray:
    """Numbers below `count`. The number k comes in proportion to (k + 1)^-exponent."""
    sums = np.cumsum(np.arange(1, count + 1, dtype=np.float64) ** -exponent)
    return np.searchsorted(sums, generator.random(draws) * sums[-1])


def text_of(keys: np.ndarray) -> pa.Array:
    """Each key as text of TEXT_BYTES characters."""
    digits = TEXT_BYTES - 1 - np.arange(TEXT_BYTES)
    parts = []
    for start in range(0, len(keys), 1 << 22):
        part = keys[start : start + (1 << 22), None] // 10 ** np.minimum(digits, 18) % 10
        part[:, digits > 18] = 0
        parts.append((part + ord("0")).astype(np.uint8).ravel())
    values = np.concatenate(parts)
    offsets = np.arange(len(keys) + 1, dtype=np.int64) * TEXT_BYTES
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.large_string(), len(keys), buffers)


def scattered(values: np.ndarray, key_bytes: int) -> np.ndarray:
    """Distinct numbers for distinct values, over the whole range of a type (the finalizers of MurmurHash3)."""
    steps = {4: (16, 0x85EBCA6B, 13, 0xC2B2AE35, 16), 8: (33, 0xFF51AFD7ED558CCD, 33, 0xC4CEB9FE1A85EC53, 33)}
    of = np.uint32 if key_bytes == 4 else np.uint64
    first, times, second, times_again, third = (of(step) for step in steps[key_bytes])
    values = values.astype(of)
    values ^= values >> first
    values *= times
    values ^= values >> second
    values *= times_again
    values ^= values >> third
    return values.view(np.int32 if key_bytes == 4 else np.int64)


def hmg_batch(name: str, start: int, rows: int, distinct: int, key_bytes: int, seed: int) -> pa.RecordBatch:
    """Rows of one side of an HMG workload, from row `start` on. With as many rows as distinct keys, each comes once."""
    of = np.int32 if key_bytes == 4 else np.int64
    numbers = np.arange(start, start + rows)
    drawn = np.random.default_rng([seed, start]).integers(0, distinct, rows) if name == "b" else numbers
    return pa.record_batch([scattered(drawn, key_bytes), numbers.astype(of)], names=["k", f"{name}0"])


def put_share(uri: str, table: str, upload: str, share: int, shares: int, rows: int, side: tuple[object, ...]) -> None:
    """Makes and uploads each `shares`-th chunk of one side as one stream of an upload."""
    name, distinct, key_bytes, seed = side
    options = json.dumps({"mode": "replace", "upload": upload}).encode()
    with flight.connect(uri) as client:
        headers = flight.FlightCallOptions(headers=[(b"dovetail-upload-options", options)])
        schema = hmg_batch(name, 0, 0, distinct, key_bytes, seed).schema
        writer, _ = client.do_put(flight.FlightDescriptor.for_path(table), schema, headers)
        for start in range(share * CHUNK_ROWS, rows, shares * CHUNK_ROWS):
            writer.write_batch(hmg_batch(name, start, min(CHUNK_ROWS, rows - start), distinct, key_bytes, seed))
        writer.close()


def put_hmg(uri: str, workload: str, build: int, probe: int, seed: int, processes: int) -> None:
    """Uploads both sides of an HMG workload, by half of the processes each."""
    key_bytes, shares = HMG[workload][2], max(processes // 2, 1)
    sides = {"left": (build, ("a", build, key_bytes, seed)), "right": (probe, ("b", build, key_bytes, seed))}
    uploads = {table: uuid.uuid4().hex for table in sides}
    work = [
        (uri, table, uploads[table], share, shares, rows, side)
        for share in range(shares)
        for table, (rows, side) in sides.items()
    ]
    with multiprocessing.get_context("spawn").Pool(len(work)) as pool:
        pool.starmap(put_share, work, chunksize=1)
    with flight.connect(uri) as client:
        for upload in uploads.values():
            list(client.do_action(flight.Action("commit_upload", json.dumps({"upload": upload}).encode())))


def tables(workload: str, build: int, probe: int, seed: int) -> tuple[pa.Table, pa.Table, int]:
    """Both sides, and the rows of the probe side that find a match. Build keys are distinct."""
    generator = np.random.default_rng(seed)
    columns = 4 if workload == "wide" else 1
    exponent = float(workload.removeprefix("zipf-")) if workload.startswith("zipf-") else 0.0
    share = float(workload.removeprefix("match-")) if workload.startswith("match-") else 1.0
    drawn = zipf(generator, build, probe, exponent) if exponent else generator.integers(0, build, probe)
    missed = generator.random(probe) >= share
    drawn = np.where(missed, drawn + build, drawn)
    made = text_of if workload == "text" else pa.array

    def side(keys: np.ndarray, name: str) -> pa.Table:
        payload = {f"{name}{at}": np.arange(len(keys)) * (2 * at + 1) for at in range(columns)}
        return pa.table({"k": made(keys), **payload})

    return side(generator.permutation(build), "a"), side(drawn, "b"), probe - int(missed.sum())


def checksum(result: dovetail.Result) -> int:
    """A sum over all rows in which a column of one side is multiplied with one of the other."""
    total = 0
    for batch in result.reader():
        last_of_left = max((name for name in batch.schema.names if name.startswith("a")), default=None)
        last_of_right = max((name for name in batch.schema.names if name.startswith("b")), default=None)
        left, right = (batch[name].to_numpy().astype(np.uint64) for name in (last_of_left, last_of_right))
        with np.errstate(over="ignore"):
            total += int(np.sum((left + np.uint64(1)) * (2 * right + np.uint64(1)), dtype=np.uint64))
    return total % 2**64


def run(
    client: dovetail.Client, count: bool, ranks: int, distribution: str, check: bool
) -> tuple[float, tuple[int, int], dict[str, object]]:
    """One join: its time, its rows with their sum, and what the server says of it."""
    command = {"left": "left", "right": "right", "on": [{"left": "k", "right": "k"}], "count": count}
    if ranks > 0:
        command["devices"] = ranks
    if ranks > 1:
        command["distribution"] = distribution
    with client.command({"join": command}) as result:
        rows, total = result.job.wait().rows, 0
        if count:
            rows = result.table()["count"][0].as_py()
        elif check:
            total = checksum(result)
        explained = result.job.explain()
    return explained["measured_seconds"], (rows, total), explained


def rates(program: list[str], devices: str, link: str) -> dict[str, float]:
    """Bytes per second of each device while all of them copy: in, out, both ways and to each other."""
    arguments = ["--devices", devices, "--link", link, "--push", "1GiB", "--runs", "3"]
    said = subprocess.run([*program, *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return {line["case"]: line["bytes_per_second"] for line in lines}


def floor_seconds(explained: dict[str, object], rate: dict[str, float]) -> dict[str, float]:
    """The least seconds for the bytes that cross each boundary of a device, on average of all devices."""
    measured = {phase["name"]: phase["measured_bytes"] or 0 for phase in explained["phases"]}
    # Packing counts the keys that come in and the packed ones. A gather counts what it reads on the device and what it
    # copies out.
    into = measured.get("copy in", 0) + measured.get("pack keys", 0) / 2
    out = measured.get("gather", 0) / 2
    sent = (explained["exchange"] or {}).get("measured_bytes") or 0
    crossing = {"in": into, "out": out, "both": into + out, "push": sent}
    return {boundary: crossing[boundary] / rate[boundary] for boundary in crossing if rate.get(boundary)}


def peers_program() -> list[str]:
    """The command of `peers.rs`: of an archive, or built here."""
    archived = ROOT / "bin" / "bench-peers"
    cargo = ["cargo", "bench", "-qp", "dovetail-bench", "--bench", "peers", "--"]
    return [str(archived)] if archived.exists() else cargo


# Devices and distribution of a join for which the server chooses both.
CHOSEN = (0, "chosen")


def ways(options: argparse.Namespace, devices: int) -> Iterator[tuple[int, str]]:
    """One device, then gangs of each size by each distribution, then the server's choice."""
    for ranks in options.ranks or range(1, devices + 1):
        if ranks == 1:
            yield 1, "alone"
        else:
            yield from ((ranks, distribution) for distribution in options.distributions)
    yield CHOSEN


def sizes(text: str) -> list[tuple[int, int]]:
    return [(int(build), int(probe)) for build, probe in (pair.split(":") for pair in text.split(","))]


def rows_of(workload: str, options: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """Each size of a workload: its name, and the rows of both sides."""
    if workload in HMG:
        build, probe, _ = HMG[workload]
        for factor in options.factors:
            yield f"f = {factor:g}", round(factor * build), round(factor * probe)
        return
    for build, probe in options.sizes:
        if max(build, probe) <= options.rows_max_log2:
            yield f"2^{build} x 2^{probe}", 1 << build, 1 << probe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="host:2", help="as for `dovetail serve --devices`: cuda:N or host:N")
    parser.add_argument("--host-memory", default="8GiB", help="of the server")
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS, *HMG], default=WORKLOADS)
    parser.add_argument("--sizes", type=sizes, default=SIZES, help="base-2 logarithms of rows, as in 16:24,22:22")
    parser.add_argument("--factors", type=float, nargs="+", default=[0.001], help="of the HMG workloads")
    parser.add_argument("--rows-max-log2", type=int, default=22, help="sizes with more rows are left out")
    parser.add_argument("--check-rows-max-log2", type=int, default=24, help="larger results are only counted")
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each join, after one that is not timed")
    parser.add_argument("--counted-only", action="store_true", help="leave out the joins with all columns")
    parser.add_argument("--processes", type=int, default=4, help="that make and upload the tables of HMG")
    parser.add_argument("--ranks", type=int, nargs="+", help="devices of a join (default: one, two, ... and all)")
    parser.add_argument("--distributions", nargs="+", choices=DISTRIBUTIONS, default=DISTRIBUTIONS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--link", default="1GiB", help="bytes of each copy that measures a link")
    parser.add_argument("--no-floors", action="store_true", help="measure no rates of plain copies")
    options = parser.parse_args()
    recorder = Recorder("gangs")
    kind, _, count = options.devices.partition(":")
    devices = int(count)
    # The server takes most of a GPU's memory, so the links are measured before it starts.
    rate: dict[int, dict[str, float]] = {ranks: {} for ranks in range(1, devices + 1)}
    if not options.no_floors:
        rate = {ranks: rates(peers_program(), f"{kind}:{ranks}", options.link) for ranks in rate}
        print(f"bytes per second of each device: {rate}", flush=True)
    with Dovetail(devices=options.devices, host_memory=options.host_memory, device_cache="0") as server:
        client = dovetail.connect(server.uri)
        # Pinning memory stops copies of joins.
        wait_until_prepared(server)
        for workload in options.workloads:
            for size in rows_of(workload, options):
                measure(server.uri, client, recorder, options, rate, workload, size)
        client.close()


def measure(
    uri: str,
    client: dovetail.Client,
    recorder: Recorder,
    options: argparse.Namespace,
    rate: dict[int, dict[str, float]],
    workload: str,
    size: tuple[str, int, int],
) -> None:
    """Joins one pair of tables in all ways, counted and with all columns."""
    named, build, probe = size
    if workload in HMG:
        put_hmg(uri, workload, build, probe, options.seed, options.processes)
        matched = probe
    else:
        *sides, matched = tables(workload, build, probe, options.seed)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda name, side: client.put(name, side, mode="replace"), ("left", "right"), sides))
    for count in [True] if options.counted_only else [True, False]:
        expected: tuple[int, int] | None = None
        times: dict[tuple[int, str], list[float]] = {}
        told: dict[tuple[int, str], dict[str, object]] = {}
        refused: dict[tuple[int, str], str] = {}
        for timed in range(options.runs + 1):
            check = timed == 0 and probe <= 1 << options.check_rows_max_log2
            for ranks, distribution in ways(options, len(rate)):
                if (ranks, distribution) in refused:
                    continue
                # Wide keys cannot be exchanged.
                with suppress(dovetail.InvalidRequest):
                    try:
                        seconds, found, explained = run(client, count, ranks, distribution, check)
                    except dovetail.Exhausted as error:
                        refused[ranks, distribution] = str(error)
                        continue
                    expected = expected or found
                    assert found[0] == matched, f"{found[0]} rows, not {matched}"
                    assert found[0] == expected[0] and (not check or found == expected), f"{found}, not {expected}"
                    told[ranks, distribution] = explained
                    if timed:
                        times.setdefault((ranks, distribution), []).append(seconds)
        what = "counted" if count else "all columns"
        joined = {"devices": options.devices, "workload": workload, "build_rows": build, "probe_rows": probe}
        for (ranks, distribution), why in refused.items():
            recorder.write(
                benchmark="gangs", **joined, ranks=ranks, distribution=distribution, count=count, refused=why
            )
            print(f"{workload} {named}, {what}, {ranks} ranks ({distribution}): {why}", flush=True)
        best = min((median(seconds_of) for way, seconds_of in times.items() if way != CHOSEN), default=None)
        for (ranks, distribution), seconds_of in times.items():
            explained = told[ranks, distribution]
            is_chosen = (ranks, distribution) == CHOSEN
            ranks = explained["device"]["ranks"]
            floors = floor_seconds(explained, rate[ranks])
            # A join on host devices that exchanges nothing crosses no boundary.
            floor = max(floors.values(), default=0.0) or None
            recorder.write(
                benchmark="gangs",
                memory=USED_BEFORE,
                **joined,
                ranks=ranks,
                distribution=explained["device"]["distribution"],
                is_chosen=is_chosen,
                best_seconds=best,
                strategy=explained["strategy"],
                count=count,
                result_rows=matched,
                runs=options.runs,
                seconds=median(seconds_of),
                seconds_min=min(seconds_of),
                seconds_max=max(seconds_of),
                predicted_seconds=explained["predicted_seconds"],
                floor_seconds=floor,
                floors=floors,
                rates=rate[ranks],
                exchange=explained["exchange"],
                of_ranks=explained["ranks"],
                skew=explained["skew"],
                phases=[{key: phase[key] for key in PHASE} for phase in explained["phases"]],
            )
            milliseconds = median(seconds_of) * 1e3
            beside = f", floor {floor * 1e3:.2f} ms ({floor * 1e5 / milliseconds:.0f} %)" if floor else ""
            how = f"{ranks} ranks ({explained['strategy']}, {distribution})"
            if is_chosen and best:
                beside += f", {median(seconds_of) / best:.2f} of the best"
            print(f"{workload} {named}, {what}, {how}: {milliseconds:.2f} ms{beside}", flush=True)


if __name__ == "__main__":
    main()
