"""Simulates a DGX H100 under rising load with `dovetail-bench simulate`, and draws docs/scheduling.svg.

    python benches/scheduling.py --record      runs the simulations, and appends a line of each to results/
    python benches/scheduling.py --write       draws the picture from the newest lines
    python benches/scheduling.py --check       fails if the picture is not current

The policy of the server (`fair`) beside one without shares, aging and limits (`greedy`), on the same drawn jobs. Small
joins, large joins and gangs belong to a tenant each, of equal weight. A run takes seconds, whatever it simulates.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from common import ROOT, Recorder

Line = dict[str, Any]

PICTURE = ROOT / "docs" / "scheduling.svg"
LINES = ROOT / "benches" / "results" / "scheduling.jsonl"
TOPOLOGY = "tests/fixtures/topology/dgx-h100.toml"
LOADS = [0.2, 0.4, 0.6, 0.8, 1.0, 1.2]
SEEDS = [1, 2, 3]
COLOURS = {"fair": "#0b6e4f", "greedy": "#b5651d"}


def arguments_of(policy: str, load: float, seed: int, jobs: int) -> list[str]:
    tenants = ["--tenants", "1,1,1", "--tenant-by-kind"]
    drawn = ["--jobs", str(jobs), "--load", str(load), "--seed", str(seed)]
    machine = ["--topology", TOPOLOGY, "--host-memory", "2TiB"]
    return ["simulate", *machine, "--policy", policy, *drawn, *tenants, "--json"]


def record(program: str, jobs: int) -> None:
    """Runs every simulation, and records its line."""
    recorder = Recorder("scheduling")
    for load in LOADS:
        for policy in COLOURS:
            for seed in SEEDS:
                arguments = arguments_of(policy, load, seed, jobs)
                done = subprocess.run([program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
                if done.returncode != 0:
                    sys.exit(done.stderr)
                recorder.write(**json.loads(done.stdout))


def newest() -> list[Line]:
    """The lines of the last run of this script."""
    lines = [json.loads(line) for line in LINES.read_text().splitlines()]
    return [line for line in lines if line["date"] == lines[-1]["date"]]


def least_share(line: Line) -> float:
    """The device time of the tenant that had the least of its fair share, over that share."""
    tenants = line["tenants"].values()
    return min(tenant["device_seconds"] / tenant["fair_seconds"] for tenant in tenants if tenant["fair_seconds"] > 0)


def small_wait(line: Line) -> float:
    return line["classes"]["small"]["waited_p99"]


def medians(lines: list[Line], policy: str, value: Callable[[Line], float]) -> list[tuple[float, float]]:
    """By load, the median over the seeds."""
    loads = sorted({line["load"] for line in lines})
    of = {load: [line for line in lines if line["policy"] == policy and line["load"] == load] for load in loads}
    return [(load, statistics.median(map(value, of[load]))) for load in loads]


class Panel:
    """A part of the picture, with the load from left to right."""

    def __init__(self, left: float, title: str, low: float, high: float, is_log: bool) -> None:
        self.left, self.top, self.width, self.height = left, 74.0, 290.0, 210.0
        self.low, self.high, self.is_log = low, high, is_log
        self.parts = [f'<text x="{left}" y="{self.top - 14}" font-weight="bold">{title}</text>']

    def x(self, load: float) -> float:
        return self.left + (load - LOADS[0]) / (LOADS[-1] - LOADS[0]) * self.width

    def y(self, value: float) -> float:
        scale = math.log10 if self.is_log else float
        share = (scale(value) - scale(self.low)) / (scale(self.high) - scale(self.low))
        return self.top + self.height * (1 - share)

    def mark(self, value: float, label: str) -> None:
        at = self.y(value)
        right = self.left + self.width
        self.parts.append(f'<line x1="{self.left}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" stroke="#dddddd"/>')
        self.parts.append(f'<text x="{self.left - 8}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')

    def mark_loads(self) -> None:
        down = self.top + self.height
        for load in LOADS:
            self.parts.append(f'<text x="{self.x(load):.1f}" y="{down + 20}" text-anchor="middle">{load:.1f}</text>')
        middle = self.left + self.width / 2
        self.parts.append(f'<text x="{middle}" y="{down + 40}" text-anchor="middle">load</text>')

    def line(self, policy: str, points: list[tuple[float, float]]) -> None:
        colour = COLOURS[policy]
        places = [(self.x(load), self.y(value)) for load, value in points]
        joined = " ".join(f"{across:.1f},{down:.1f}" for across, down in places)
        self.parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>')
        self.parts += [f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{colour}"/>' for across, down in places]
        across, down = places[-1]
        self.parts.append(f'<text x="{across + 8:.1f}" y="{down + 4:.1f}" fill="{colour}">{policy}</text>')


def waits(lines: list[Line]) -> Panel:
    points = {policy: medians(lines, policy, small_wait) for policy in COLOURS}
    values = [max(value, 1e-5) for of in points.values() for _, value in of]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    panel = Panel(80, "small joins: 99th percentile of waiting", 10.0**low, 10.0**high, is_log=True)
    for exponent in range(low, high + 1):
        value = 10.0**exponent
        panel.mark(value, f"{value:.0f} s" if value >= 1 else f"{value * 1e3:g} ms")
    for policy, of in points.items():
        panel.line(policy, [(load, max(value, 10.0**low)) for load, value in of])
    panel.mark_loads()
    return panel


def shares(lines: list[Line]) -> Panel:
    panel = Panel(510, "least device time of a tenant over its fair share", 0.0, 1.0, is_log=False)
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        panel.mark(part, f"{100 * part:.0f} %")
    for policy in COLOURS:
        panel.line(policy, [(load, min(value, 1.0)) for load, value in medians(lines, policy, least_share)])
    panel.mark_loads()
    return panel


def picture() -> str:
    lines = newest()
    jobs, version = lines[0]["jobs"], lines[0]["commit"]
    title = f"Simulated: DGX H100, 8 GPUs, {jobs:,} joins of three equal tenants, median of {len(SEEDS)} seeds"
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 350" font-family="sans-serif" font-size="12">',
        '<rect width="880" height="350" fill="#ffffff"/>',
        f'<text x="80" y="24" font-size="14">{title}</text>',
        f'<text x="80" y="342" fill="#777777">benches/results/scheduling.jsonl, {version}</text>',
        *waits(lines).parts,
        *shares(lines).parts,
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--program", default=str(ROOT / "target" / "release" / "dovetail-bench"))
    parser.add_argument("--jobs", type=int, default=1500)
    arguments = parser.parse_args()
    if arguments.record:
        record(arguments.program, arguments.jobs)
    if arguments.write:
        PICTURE.write_text(picture())
    if arguments.check and PICTURE.read_text() != picture():
        print("simulations were recorded: run `python benches/scheduling.py --write`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
