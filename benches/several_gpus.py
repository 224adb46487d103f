"""Everything that is measured on a host with several GPUs, in parts of some minutes, the most wanted first.

    python benches/several_gpus.py --devices cuda:4 --folder measured
    python benches/several_gpus.py --devices cuda:8 --folder measured --total 9
    python benches/several_gpus.py --devices cuda:4 --list
    python benches/several_gpus.py --devices host:4 --scale 0.001 --folder tried

Each part is a process of another benchmark or a suite of tests, with a limit of time. `several_gpus.jsonl` in the
folder has a line for each part that has ended, beside the lines that the part measured and its output (`NAME.log`).
Started again, the script goes on with the first part that has no line. A part that fails, or that runs out of time, is
reported and does not stop the others; it runs again with `--again`. A part that was stopped in its middle has no line.
A part whose tables do not fit in host memory is skipped, with the bytes that it lacks. A join that does not fit in the
memory of the GPUs has a line with the server's reason.

The number of devices decides what is measured: up to four, what is asked of four GPUs; from five on, side by side with
the published measurements of eight. `--scale` multiplies all numbers of rows. With less than a tenth, clients ask for
half a second, and the suites run few of their tests, so that the parts can be tried on any machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common import RESULTS, ROOT, Recorder, binary, gpu
from gangs import HMG, peers_program
from predicted import MACHINES

GIB = 1 << 30

# Of the processes that make and upload the tables of HMG.
PROCESS_BYTES = 300_000_000

# What a server has of a GPU's memory: 132 of 140 GiB of an H200, and 73 of 80 of an H100.
OWN_MEMORY = 0.93

# Seconds for the processes of a part to end by themselves, once they are asked to.
STOP_SECONDS = 20

# Scale below which parts are only tried, and how long one takes then.
TRIED, TRIED_MINUTES = 0.1, 0.5

PASSED, FAILED, LATE, SKIPPED = "passed", "failed", "out of time", "skipped"

TOPOLOGIES = ROOT / "tests" / "fixtures" / "topology"


@dataclass(frozen=True)
class Step:
    """A command of a part. The JSON lines that it prints go to the file of `records`."""

    command: list[str]
    records: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    name: str
    about: str
    steps: list[Step]
    host_bytes: int = 0
    """Memory that its tables and results take, with what surrounds them."""
    missing: str | None = None
    """Why it cannot run."""
    replaces: Path | None = None
    """A file to which its commands append."""
    minutes: float = 2
    """How long it takes on H200s, roughly."""


@dataclass(frozen=True)
class Plan:
    """Parts of a machine."""

    kind: str
    count: int
    scale: float
    folder: Path

    @property
    def devices(self) -> str:
        return f"{self.kind}:{self.count}"

    @property
    def is_tried(self) -> bool:
        return self.scale < TRIED

    def parts(self) -> list[Part]:
        """All parts, the most wanted first."""
        clients = [
            *self.sets(),
            *self.pairs(),
            self.clients("0"),
            self.simulated(),
            self.clients("50%"),
            self.small_beside_gangs(),
            self.lost(),
        ]
        if self.count > 4:
            return [self.peers(), self.nccl(), *self.hmg_of_eight(), *clients, *self.suites()]
        return [*self.suites(), self.peers(), self.nccl(), *self.hmg_of_four(), *clients, *self.shapes()]

    @property
    def ranks(self) -> list[int]:
        """Numbers of devices that a join is measured on."""
        return [ranks for ranks in ([1, 2, 4, 6, 8] if self.count > 4 else range(1, 5)) if ranks <= self.count]

    @property
    def processes(self) -> int:
        return 2 if self.is_tried else min(max(len(os.sched_getaffinity(0)) - 8, 4), 96)

    def seconds(self, full: float) -> str:
        return f"{0.5 if self.is_tried else full:g}"

    def bits(self, full: int) -> int:
        """The base-2 logarithm of a number of rows."""
        return max(round(full + math.log2(self.scale)), 4)

    def memory(self, full: int) -> list[str]:
        return ["--host-memory", f"{max(math.ceil(full * min(self.scale * 4, 1)), 1)}GiB"]

    def script(self, name: str, *arguments: str) -> list[Step]:
        return [Step([sys.executable, f"benches/{name}.py", "--devices", self.devices, *arguments])]

    def suites(self) -> Iterator[Part]:
        gangs = [2, self.count // 2, self.count] if self.count > 4 else range(2, self.count + 1)
        of_gpus = {"DOVETAIL_TEST_DEVICE": "cuda", "DOVETAIL_TEST_GPUS": str(self.count)}
        environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **(of_gpus if self.kind == "cuda" else {})}
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        if importlib.util.find_spec("xdist"):
            pytest += ["-p", "xdist", "-n", "2" if self.is_tried else "8"]
        few = ["-k", "empty_sides"] if self.is_tried else ["--oracle-seconds", "60"]
        for ranks in dict.fromkeys(gangs):
            command = [*pytest, "tests/python/test_oracle.py", *few]
            step = Step(command, environment={**environment, "DOVETAIL_TEST_GANG": str(ranks)})
            about = f"joins of the oracle's suite on gangs of {ranks}, against DuckDB"
            yield Part(f"oracle-{ranks}", about, [step], minutes=5)
        few = ["-k", "distribution"] if self.is_tried else []
        step = Step([*pytest, "tests/python/test_gangs.py", *few], environment=environment)
        about = "the suite of gangs: faults, lost processes, exchange through host memory"
        yield Part("gang-tests", about, [step], minutes=5)

    def peers(self) -> Part:
        pushed = ["--push", "256KiB", "--window", "1MiB"] if self.is_tried else ["--push", "64MiB,1GiB,4GiB"]
        link = ["--link", "1MiB" if self.is_tried else "1GiB"]
        steps = [
            Step([*peers_program(), "--devices", f"{self.kind}:{count}", *pushed, *link], records="peers")
            for count in range(1, self.count + 1)
        ]
        about = "floors: bytes in, out, both ways and between devices, with one device to all of them"
        return Part("peers", about, steps)

    def nccl(self) -> Part:
        program = ROOT / "bin" / "gpu-nccl"
        how = "nvcc -O2 benches/gpu/nccl.cpp -lnccl -o bin/gpu-nccl"
        missing = None if program.exists() else f"{program.relative_to(ROOT)} is not there; make it with `{how}`"
        return Part(
            "nccl", "NCCL's all-to-all, beside the exchange", [Step([str(program)], records="peers")], 0, missing
        )

    def hmg(self, workload: str, factor: float, ranks: list[int], columns: bool, *more: str) -> Part:
        """One factor of an HMG workload."""
        build, probe, key_bytes = HMG[workload]
        # Rows of a key and a column. A result has a key and both columns.
        tables = (build + probe) * factor * self.scale * 2 * key_bytes
        result = probe * factor * self.scale * 3 * key_bytes if columns else 0
        server = math.ceil((1.05 * tables + 1.2 * result) / GIB + (1 if self.is_tried else 4))
        step = self.script(
            "gangs",
            *("--workloads", workload, "--factors", f"{factor * self.scale:g}"),
            *("--host-memory", f"{server}GiB", "--processes", str(self.processes)),
            *("--runs", "1" if factor > 1 else "3", "--check-rows-max-log2", "0" if not self.is_tried else "24"),
            *(["--no-floors"] if self.kind == "host" else ["--link", "512MiB"]),
            *("--ranks", *map(str, ranks)),
            *([] if columns else ["--counted-only"]),
            *more,
        )
        letter, how = workload[-1], "counted and with all columns" if columns else "counted"
        name = f"{letter}-{factor:g}" + ("-hash" if more else "")
        about = f"HMG's workload {letter.upper()} at f = {factor:g} on {', '.join(map(str, ranks))} devices, {how}"
        needed = server * GIB + self.processes * PROCESS_BYTES
        # B at f = 1, 2 and 4 took 257 s on four GPUs, most of them for uploads.
        minutes = 1 + (build + probe) * factor / 4.8e9
        return Part(name, about, step, needed, minutes=minutes)

    def hmg_of_four(self) -> Iterator[Part]:
        for factor in (2, 4, 1):
            yield self.hmg("hmg-b", factor, self.ranks, True)
        yield self.hmg("hmg-b", 8, [self.count], False, "--distributions", "hash")
        for factor in (1, 4):
            yield self.hmg("hmg-a", factor, self.ranks, True)
        yield self.hmg("hmg-a", 10, self.ranks, False)

    def hmg_of_eight(self) -> Iterator[Part]:
        for factor in (8, 16):
            yield self.hmg("hmg-b", factor, self.ranks, False)

    def sets(self) -> Iterator[Part]:
        bounds = [str(self.bits(16)), str(self.bits(24))]
        for seed in (1, 2):
            step = self.script(
                "sets",
                *("--build-log2", *bounds, "--draw", "3" if self.is_tried else "12", "--seed", str(seed)),
                *("--ranks", *map(str, self.ranks), *self.memory(48)),
            )
            yield Part(f"sets-{seed}", "the set that the server chooses beside every other, for joins drawn", step)

    def pairs(self) -> Iterator[Part]:
        half = self.count // 2
        for gangs in dict.fromkeys([(self.count - half, half), (self.count - 1, 1)]):
            step = self.script(
                "gang_clients",
                *("--gang-devices", *map(str, gangs), "--small-clients", "0"),
                *("--gang-rows-log2", str(self.bits(26)), "--seconds", self.seconds(8), *self.memory(40)),
            )
            name = "+".join(map(str, gangs))
            yield Part(f"gangs-{name}", f"gangs of {' and '.join(map(str, gangs))} devices, alone and at once", step)

    @property
    def trace(self) -> Path:
        return self.folder / f"jobs-{self.kind}-{self.count}.jsonl"

    def clients(self, cache: str) -> Part:
        sizes = [f"{self.bits(build)}:{self.bits(probe)}" for build, probe in ((14, 16), (20, 22), (23, 25), (25, 26))]
        counts = ["1", "2"] if self.is_tried else ["1", "4", "16", "64"]
        is_traced = cache == "0"
        step = self.script(
            "load",
            *("--sizes", *dict.fromkeys(sizes), "--clients", *counts, "--seconds", self.seconds(8)),
            *("--device-cache", cache, *self.memory(60)),
            *(["--job-trace", str(self.trace)] if is_traced else []),
        )
        about = f"{counts[0]} to {counts[-1]} clients of joins of mixed sizes"
        if is_traced:
            return Part("clients", f"{about}, with a trace of them", step, replaces=self.trace)
        return Part("clients-cached", f"{about}, with columns cached on the devices", step)

    def simulated(self) -> Part:
        """The trace of the clients, simulated."""
        program = binary().parent / "dovetail-bench"
        missing = None if self.trace.exists() else "there is no trace; run the part `clients` before"
        missing = missing if program.exists() else f"{program} is not there"
        topology = self.folder / f"topology-{self.count}.toml"
        speed = MACHINES["h100" if "H100" in (gpu() or "") else "h200"][0]
        arguments = ["simulate", "--topology", str(topology), "--trace", str(self.trace), "--speed", str(speed)]
        arguments += ["--spread", "0", "--json"]
        prepared = [sys.executable, "benches/several_gpus.py", "--devices", self.devices]
        steps = [
            Step([*prepared, "--folder", str(self.folder), "--write-topology", str(topology)]),
            Step([str(program), *arguments], records="simulated"),
        ]
        about = "the simulator on that trace: the share of the joins that end within 15 % of the measured time"
        return Part("simulator", about, steps, missing=missing)

    def small_beside_gangs(self) -> Part:
        step = self.script(
            "gang_clients",
            *("--gang-clients", "2", "--small-clients", "2" if self.is_tried else "8"),
            *("--gang-rows-log2", str(self.bits(25)), "--small-rows-log2", str(self.bits(16))),
            *("--seconds", self.seconds(8), *self.memory(40)),
        )
        return Part("small-joins", "clients of small joins beside clients of gangs", step)

    def lost(self) -> Part:
        step = self.script(
            "lost_device",
            *("--gang-rows-log2", str(self.bits(25)), "--small-rows-log2", str(self.bits(16))),
            *("--after", "20" if self.is_tried else "40", *self.memory(40)),
        )
        return Part("kill", "the process of a device is killed in the middle of gangs", step)

    def shapes(self) -> Iterator[Part]:
        """Skew, selectivity, text and wide rows."""
        build, probe = self.bits(25), self.bits(27)
        workloads = {
            "selectivity": (
                ["narrow", "match-0.0", "match-0.1", "match-0.5"],
                "no match to a match for each probe row",
            ),
            "text": (["text"], "keys of text"),
            "zipf-0.5": (["zipf-0.5"], "probe keys by Zipf's law"),
            "zipf-1.0": (["zipf-1.0"], "probe keys by Zipf's law"),
            "zipf-1.5": (["zipf-1.5"], "probe keys by Zipf's law"),
            "wide": (["wide"], "rows of five columns"),
        }
        for name, (of_part, about) in workloads.items():
            step = self.script(
                "gangs",
                *("--workloads", *of_part, "--sizes", f"{build}:{probe}", "--rows-max-log2", "27"),
                *("--runs", "1" if self.is_tried else "3", "--check-rows-max-log2", "0" if not self.is_tried else "24"),
                *("--ranks", *map(str, self.ranks), *self.memory(80)),
                *(["--no-floors"] if self.kind == "host" else ["--link", "512MiB"]),
            )
            yield Part(name, f"{about}, 2^{build} x 2^{probe} rows", step)


def topology_of(count: int) -> str:
    """The file of a described machine of as many GPUs or more, with the first of them."""
    file = TOPOLOGIES / ("dgx-h100.toml" if count > 4 else "h200-x4.toml")
    described = tomllib.loads(file.read_text())
    gone = {device["name"] for device in described["device"][count:]}
    described["device"] = described["device"][:count]
    described["link"] = [link for link in described["link"] if not gone & set(link["between"])]
    if megabytes := gpu_megabytes():
        for device in described["device"]:
            device["memory"] = f"{int(OWN_MEMORY * megabytes)}MiB"
    lines = [f"# The first {count} devices of {file.name}.", f"name = {json.dumps(described.pop('name'))}"]
    for name, tables in described.items():
        for table in tables:
            # Values are numbers, text and lists of text, which JSON writes as TOML does.
            lines += [f"[[{name}]]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def gpu_megabytes() -> int | None:
    """MiB of the first GPU, where there is one."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return int(said[0]) if said else None


def available_bytes() -> int:
    """Memory that this machine, or this container, has left."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free


def stop(process: subprocess.Popen[str]) -> None:
    """Ends all processes of a part."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        since = time.monotonic()
        while time.monotonic() - since < STOP_SECONDS and is_group_running(process):
            time.sleep(0.1)
    process.wait()


def is_group_running(process: subprocess.Popen[str]) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def run(part: Part, plan: Plan, seconds: float) -> tuple[str, str]:
    """Runs a part within a time, and returns how it ended, and why."""
    if part.replaces:
        part.replaces.unlink(missing_ok=True)
    log = plan.folder / f"{part.name}.log"
    deadline = time.monotonic() + seconds
    with log.open("w") as output:
        for step in part.steps:
            shown = " ".join(step.command)
            output.write(f"$ {shown}\n")
            output.flush()
            started = output.tell()
            environment = {
                **os.environ,
                "DOVETAIL_BIN": str(binary()),
                "DOVETAIL_RESULTS": str(plan.folder),
                "PYTHONPATH": str(ROOT / "clients" / "python" / "src"),
                **step.environment,
            }
            process = subprocess.Popen(
                step.command,
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
                text=True,
            )
            try:
                code = process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                return LATE, f"stopped after {seconds:.0f} s, in `{shown}`"
            finally:
                # Also what a command has left running.
                stop(process)
            said = [line for line in log.read_text(errors="replace")[started:].splitlines() if line.strip()]
            if step.records:
                record(step, plan.folder, said)
            if code != 0:
                return FAILED, f"`{shown}` ended with {code}: {said[-1] if said else 'it said nothing'}"
    return PASSED, said[-1] if said else ""


def record(step: Step, folder: Path, said: list[str]) -> None:
    recorder = Recorder(step.records, folder, " ".join(Path(word).name for word in step.command))
    for line in said:
        if line.startswith("{"):
            recorder.write(**{"benchmark": step.records, **json.loads(line)})


def outcomes(plan: Plan, recorder: Recorder) -> dict[str, str]:
    """How the parts of this plan have ended so far, by name."""
    lines = [json.loads(line) for line in recorder.path.read_text().splitlines()] if recorder.path.exists() else []
    of_plan = [line for line in lines if (line["devices"], line["scale"]) == (plan.devices, plan.scale)]
    return {line["part"]: line["outcome"] for line in of_plan}


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def run_all(plan: Plan, options: argparse.Namespace) -> int:
    """Runs the parts that are left, and returns the number of those that did not go well."""
    recorder = Recorder("several_gpus", plan.folder)
    ended = outcomes(plan, recorder)
    again = {FAILED, LATE, SKIPPED} if options.again else {SKIPPED}
    until = time.monotonic() + 60 * options.total if options.total else math.inf
    wanted = options.parts or [part.name for part in plan.parts()]
    for name in wanted:
        if name in ended and ended[name] not in again:
            print(f"{name}: {ended[name]} before", flush=True)
            continue
        # A part may need what an earlier one has made.
        part = next(part for part in plan.parts() if part.name == name)
        left, seconds = until - time.monotonic(), 60 * options.minutes
        if left < 60 * (TRIED_MINUTES if plan.is_tried else min(part.minutes, options.minutes)):
            print(f"{name}: not begun, because too little of the time is left", flush=True)
            continue
        began = time.monotonic()
        has = int(options.host_memory * GIB) if options.host_memory else available_bytes()
        if part.missing:
            outcome, why = SKIPPED, part.missing
        elif part.host_bytes > has:
            lacks = gigabytes(part.host_bytes - has)
            outcome, why = SKIPPED, f"needs {gigabytes(part.host_bytes)} of host memory, and lacks {lacks}"
        else:
            print(f"{name}: {part.about}", flush=True)
            outcome, why = run(part, plan, min(seconds, left))
        if outcome == LATE and left < seconds:
            print(f"{name}: stopped, because the time is over; it begins anew next time", flush=True)
            break
        took, ended[name] = time.monotonic() - began, outcome
        recorder.write(part=name, outcome=outcome, why=why, seconds=took, devices=plan.devices, scale=plan.scale)
        print(f"{name}: {outcome} after {took:.0f} s: {why}", flush=True)
    left_over = [name for name in wanted if name not in ended]
    bad = [name for name in wanted if ended.get(name) in (FAILED, LATE)]
    counts = {how: sum(ended.get(name) == how for name in wanted) for how in (PASSED, FAILED, LATE, SKIPPED)}
    print(", ".join(f"{count} {how}" for how, count in counts.items()) + f", {len(left_over)} to do")
    return len(bad)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="host:2", help="as for `dovetail serve --devices`: cuda:N or host:N")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of results")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="only these parts, in this order")
    parser.add_argument("--minutes", type=float, default=8, help="for each part")
    parser.add_argument("--total", type=float, help="minutes after which the script ends")
    parser.add_argument("--scale", type=float, default=1, help="multiplies all numbers of rows; at most 1")
    parser.add_argument("--host-memory", type=float, help="GiB that a part may take (default: what is available)")
    parser.add_argument("--again", action="store_true", help="also parts that have failed, or ran out of time")
    parser.add_argument("--list", action="store_true", help="show the parts, and how they have ended")
    parser.add_argument("--write-topology", type=Path, metavar="FILE", help="only write the simulator's machine")
    options = parser.parse_args()
    kind, _, count = options.devices.partition(":")
    if kind not in ("cuda", "host") or not count.isdecimal() or not 2 <= int(count) <= 8:
        parser.error(f"--devices {options.devices}: two to eight devices of one kind, as in cuda:4 or host:4")
    if not 0 < options.scale <= 1:
        parser.error(f"--scale {options.scale}: more than 0, and at most 1")
    archived = ROOT / "bin" / "dovetail"
    if archived.exists():
        os.environ.setdefault("DOVETAIL_BIN", str(archived))
    plan = Plan(kind, int(count), options.scale, options.folder.absolute())
    if options.write_topology:
        options.write_topology.write_text(topology_of(plan.count))
        return 0
    plan.folder.mkdir(parents=True, exist_ok=True)
    names = [part.name for part in plan.parts()]
    if unknown := [name for name in options.parts or [] if name not in names]:
        parser.error(f"--parts {' '.join(unknown)}: with {options.devices} there are {', '.join(names)}")
    if options.list:
        ended = outcomes(plan, Recorder("several_gpus", plan.folder))
        for part in plan.parts():
            needs = f", {gigabytes(part.host_bytes)} of host memory" if part.host_bytes else ""
            takes = "" if plan.is_tried else f"{part.minutes:3.0f} min  "
            print(f"{part.name:16} {ended.get(part.name, 'to do'):12} {takes}{part.about}{needs}")
        return 0
    # Asked to end, it ends the part that runs.
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, lambda number, _: sys.exit(128 + number))
    return 1 if run_all(plan, options) else 0


if __name__ == "__main__":
    sys.exit(main())
