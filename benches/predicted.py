"""Predicted times of the HMG sort-merge join's workload B on a machine of a topology file: no GPU is used.

    python benches/predicted.py
    python benches/predicted.py --topology tests/fixtures/topology/h200-x4.toml --machines h200 --factors 1 2 4

`dovetail-bench simulate` plans each join as a server on that machine would, and runs it alone on a simulated clock. B
joins f with f billion rows of an 8-byte key and an 8-byte column, as in `gangs.py`, from host memory to a count, which
reads only the keys. There is a line for each number of devices and each distribution, or the reason why such a join is
refused, and a table of them at the end. The links are those of the file, with GPUs of each of `--machines`: h100 with
the file's memory, and 0.7 times the speed of an H200, as its memory has 0.7 times the rate; and h200 with what a server
has of its memory.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from common import ROOT, Recorder, bench_program
from gangs import DISTRIBUTIONS, HMG

WORKLOAD = "hmg-b"

# Speed of each GPU as a multiple of an H200's, and its memory; without one, that of the file.
MACHINES: dict[str, tuple[float, str | None]] = {"h100": (0.7, None), "h200": (1.0, "132GiB")}

# Seconds between the arrivals of two joins, which is longer than any of them takes.
APART = 1000.0


def ways(factors: list[float], ranks: list[int]) -> Iterator[tuple[float, int, str | None]]:
    """Each factor with each number of devices and each distribution."""
    for factor in factors:
        for count in ranks:
            yield from ((factor, count, how) for how in (DISTRIBUTIONS if count > 1 else [None]))


def traced(number: int, factor: float, ranks: int, distribution: str | None) -> dict[str, object]:
    """A line of a trace."""
    build, probe, key_bytes = HMG[WORKLOAD]

    def side(rows: int) -> dict[str, object]:
        return {"rows": round(factor * rows), "key_bytes": [key_bytes], "distinct": round(factor * build)}

    asked = {"distribution": distribution} if distribution else {}
    return {
        "at": APART * number,
        "left": side(build),
        "right": side(probe),
        "count": True,
        "devices": ranks,
        **asked,
    }


def simulated(program: Path, topology: Path, machine: str, jobs: list[dict[str, object]]) -> list[dict[str, object]]:
    """What became of each job of a trace."""
    speed, memory = MACHINES[machine]
    described = (ROOT / topology).read_text()
    if memory:
        described = re.sub(r'^memory = ".*"', f'memory = "{memory}"', described, flags=re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        file, trace = Path(folder, "topology.toml"), Path(folder, "trace.jsonl")
        file.write_text(described)
        trace.write_text("".join(json.dumps(job) + "\n" for job in jobs))
        asked = ["--topology", str(file), "--speed", str(speed), "--trace", str(trace), "--spread", "0"]
        arguments = ["simulate", *asked, "--each", "--json"]
        done = subprocess.run([program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return json.loads(done.stdout)["each"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    fixture = "tests/fixtures/topology/dgx-h100.toml"
    parser.add_argument("--topology", type=Path, default=fixture, help="from the root of the tree")
    parser.add_argument("--factors", type=float, nargs="+", default=[8, 16])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 6, 8], help="devices of a join")
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=list(MACHINES))
    parser.add_argument("--program", type=Path, help="dovetail-bench (default: beside the server's binary)")
    options = parser.parse_args()
    recorder = Recorder("predicted")
    asked = list(ways(options.factors, options.ranks))
    jobs = [traced(number, *way) for number, way in enumerate(asked)]
    rows: dict[tuple[float, int, str | None], list[str]] = {way: [] for way in asked}
    for machine in options.machines:
        told = simulated(options.program or bench_program(), options.topology, machine, jobs)
        for job, (factor, ranks, distribution), found in zip(jobs, asked, told, strict=True):
            build, probe = (job[side]["rows"] for side in ("left", "right"))
            seconds = found["predicted_seconds"]
            recorder.write(
                benchmark="predicted",
                topology=options.topology.stem,
                gpus=machine,
                speed=MACHINES[machine][0],
                device_memory=MACHINES[machine][1],
                workload=WORKLOAD,
                factor=factor,
                build_rows=build,
                probe_rows=probe,
                count=True,
                ranks=ranks,
                distribution=distribution or "alone",
                strategy=found["strategy"],
                predicted_seconds=seconds,
                rows_per_second=(build + probe) / seconds if seconds else None,
                refused=found["refused"],
            )
            shown = f"{seconds:.2f} s, {(build + probe) / seconds / 1e9:.1f} G" if seconds else "refused"
            rows[factor, ranks, distribution].append(shown)
            if not seconds:
                print(f"{machine}, f = {factor:g}, {ranks} devices, {distribution or 'alone'}: {found['refused']}")
    print("| f | devices | distribution | " + " | ".join(options.machines) + " |")
    for (factor, ranks, distribution), cells in rows.items():
        print(f"| {factor:g} | {ranks} | {distribution or 'alone'} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
