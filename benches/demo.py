"""How long `dovetail demo` takes: from the command to its end, as somebody who tries it first meets it.

    python benches/demo.py --scale 0.1 --repeat 5

Generating the tables, starting a server, uploading, seven or so joins with all rows fetched and counted: all of it is
in the time. The first run is recorded like the others; it finds no rates of the devices kept from earlier.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time

from common import VIRGIN, Recorder, binary, keep_to_cores, median


def run(scale: float, cache: str) -> dict[str, object]:
    """One demo: seconds in all and of its parts, and the most memory it had resident."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DOVETAIL_")}
    # Rates that were measured of another build must not be used.
    environment["XDG_CACHE_HOME"] = cache
    command = [str(binary()), "demo", "--scale", str(scale), "--json"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        events = [json.loads(line) for line in process.stdout]
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    if process.returncode or events[-1]["event"] != "done":
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    joins = [event for event in events if event["event"] == "join"]
    uploads = [event for event in events if event["event"] == "upload"]
    return {
        "seconds": round(seconds, 3),
        "upload_seconds": round(sum(event["seconds"] for event in uploads), 3),
        "upload_bytes": sum(event["bytes"] for event in uploads),
        "join_seconds": {event["title"]: round(event["seconds"], 3) for event in joins},
        # In kilobytes on Linux.
        "memory_max_bytes": usage.ru_maxrss * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=0.1, help="scale factor of TPC-H")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    keep_to_cores(arguments.cores)
    recorder = Recorder("demo")
    with tempfile.TemporaryDirectory(prefix="dovetail-bench-") as cache:
        runs = [run(arguments.scale, cache) for _ in range(arguments.repeat)]
    seconds = [run["seconds"] for run in runs]
    recorder.write(
        benchmark="demo", memory=VIRGIN, scale=arguments.scale, cores=arguments.cores, median_seconds=median(seconds),
        seconds_min=min(seconds), seconds_max=max(seconds), joins=len(runs[0]["join_seconds"]),
        memory_max_bytes=max(run["memory_max_bytes"] for run in runs), runs=runs,
    )  # fmt: skip
    print(
        f"scale factor {arguments.scale}: {median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f}), "
        f"{len(runs)} runs; appended to {recorder.path}"
    )


if __name__ == "__main__":
    main()
