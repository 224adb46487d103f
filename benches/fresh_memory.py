"""What a join takes whose host memory is not there yet, was prepared, or was used before.

    python benches/fresh_memory.py --devices cuda:1
    python benches/fresh_memory.py --devices cuda:4 --arena-directory none

For each value of `--prefault`, a fresh server gets two tables. Unless the value is none, it prepares memory meanwhile,
and joins the tables again and again until that is done. Then it joins them a few times, into a result and into a table.
It keeps all of them, so no run gets memory that another run had. At the end all are released, and the joins run again
in memory that was used before. A line has the time that the server's threads waited for memory, too. The machine itself
may never have used the memory (`virgin`): that is so on a host that has just started, and `--note` records it.
"""

from __future__ import annotations

import argparse
import time
import urllib.request

import numpy as np
import pyarrow as pa

import dovetail
from common import Dovetail, Recorder, is_prepared, median, metrics, wait_until_prepared

# Time between joins while the server prepares memory, and the most time for all of them.
PAUSE_SECONDS = 0.02
PREPARING_SECONDS_MAX = 60


def tables(build: int, probe: int, seed: int) -> tuple[pa.Table, pa.Table]:
    """Distinct keys, and rows that each find one of them; two columns of 4 bytes beside the keys on both sides."""
    generator = np.random.default_rng(seed)
    keys = generator.permutation(build).astype(np.int32)
    rows = np.arange(build, dtype=np.int32)
    left = pa.table({"k": keys, "a": rows, "b": rows})
    rows = np.arange(probe, dtype=np.int32)
    return left, pa.table({"k": generator.integers(0, build, probe, np.int32), "c": rows, "d": rows})


def waited_seconds(server: Dovetail) -> float:
    return metrics(server.admin)["dovetail_arena_wait_seconds_total"]


def run(client: dovetail.Client, into: str | None) -> tuple[dovetail.Job, float, float, int]:
    """One join: its job, the seconds in the engine and from request to end, and its rows."""
    since = time.monotonic()
    job = client.submit("left", "right", on="k", retain_seconds=3600, **({"into": into} if into else {}))
    rows = job.wait().rows
    seconds = time.monotonic() - since
    return job, job.explain()["measured_seconds"], seconds, rows


def joined_while_preparing(server: Dovetail, client: dovetail.Client) -> list[float]:
    """Joins with pauses until memory is prepared. Returns the engine's seconds of each but the first."""
    engine = []
    until = time.monotonic() + PREPARING_SECONDS_MAX
    while not is_prepared(server) and time.monotonic() < until:
        job, seconds, _, _ = run(client, None)
        job.cancel()
        engine.append(seconds)
        time.sleep(PAUSE_SECONDS)
    return engine[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="host:1", help="as for `dovetail serve`")
    parser.add_argument("--device-processes", default="auto", help="as for `dovetail serve`")
    parser.add_argument("--arena-directory", default="auto", help="as for `dovetail serve`")
    parser.add_argument("--host-memory", default="60%", help="as for `dovetail serve`")
    parser.add_argument("--prefault", nargs="+", default=["none", "auto"], help="as for `dovetail serve`, each in turn")
    parser.add_argument("--build", type=int, default=1 << 26, help="rows")
    parser.add_argument("--probe", type=int, default=1 << 27, help="rows")
    parser.add_argument("--runs", type=int, default=3, help="joins of each kind")
    parser.add_argument("--note", default="", help="for each line, such as virgin")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    recorder = Recorder("fresh_memory")
    left, right = tables(options.build, options.probe, options.seed)
    kept = ["devices", "device_processes", "arena_directory", "host_memory"]
    settings = {name: getattr(options, name) for name in kept}
    for prefault in options.prefault:
        with Dovetail(prefault=prefault, **settings) as server, dovetail.connect(server.uri, timeout=600) as client:
            since = time.monotonic()
            client.put("left", left)
            client.put("right", right)
            preparing = joined_while_preparing(server, client) if prefault != "none" else []
            wait_until_prepared(server)
            prepared_seconds = time.monotonic() - since
            with urllib.request.urlopen(f"http://{server.admin}/readyz", timeout=10) as answer:
                host_memory = answer.read().decode().splitlines()[-1]
            about = {
                "benchmark": "fresh_memory",
                "prefault": prefault,
                **settings,
                "note": options.note,
                "host_memory_is": host_memory,
                "prepared_seconds": prepared_seconds,
                "build_rows": options.build,
                "probe_rows": options.probe,
            }
            if preparing:
                recorder.write(**about, memory="preparing", kind="result", engine_seconds=preparing)
                times = f"{1e3 * median(preparing):.1f} ms in the engine, at most {1e3 * max(preparing):.1f}"
                print(f"prefault {prefault}, while preparing, result: {times} of {len(preparing)}", flush=True)
            # The first join of a process loads code and copies the tables to a device.
            run(client, None)[0].cancel()
            for memory in ["fresh", "used"]:
                held = []
                for kind in ["result", "table"]:
                    engine, whole, waited = [], [], waited_seconds(server)
                    for number in range(options.runs):
                        into = f"made{number}" if kind == "table" else None
                        job, in_engine, in_all, rows = run(client, into)
                        held.append((job, into))
                        engine.append(in_engine)
                        whole.append(in_all)
                    recorder.write(
                        **about,
                        memory="prepared" if memory == "fresh" and prefault != "none" else memory,
                        kind=kind,
                        result_rows=rows,
                        engine_seconds=engine,
                        seconds=whole,
                        waited_seconds=waited_seconds(server) - waited,
                    )
                    times = ", ".join(f"{1e3 * one:.1f}" for one in engine)
                    of_all = f"{1e3 * median(engine):.1f} ms in the engine ({times}), {1e3 * median(whole):.1f} in all"
                    print(f"prefault {prefault}, {memory} memory, {kind}: {of_all}", flush=True)
                for job, into in held:
                    if into:
                        client.drop(into)
                    job.cancel()


if __name__ == "__main__":
    main()
