"""What the comparison benchmarks share: the machine, the commit, one JSON line per measurement."""

from __future__ import annotations

import ctypes
import datetime
import json
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# What the host memory was that a join wrote its result to, as lines of results say it in `memory`. It was never used
# by the server, which was started for this join. Or earlier joins of the server had used it. Or the server had prepared
# all its memory at its start (`--prefault all`).
VIRGIN, USED_BEFORE, PREPARED = "virgin", "used before", "prepared"
# An archive for another host has what is measured there elsewhere.
RESULTS = Path(os.environ.get("DOVETAIL_RESULTS", ROOT / "benches" / "results"))


def gpu() -> str | None:
    """What the first GPU is called, where there is one."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None
    return said[0].strip() if said else None


def machine() -> dict[str, object]:
    """The processor, how many of it, the memory, and the GPU if there is one."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*:\s*(.*)", cpuinfo)
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    return {
        "cpu": model[1] if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory[1]) / 2**20, 1) if memory else None,
        "kernel": platform.release(),
        **({"gpu": name} if (name := gpu()) else {}),
    }


def commit() -> str:
    """The commit that is checked out, with `-dirty` when files differ from it, other than those of results.

    Of an archive, the one that it was made of.
    """
    archived = ROOT / "commit"
    if archived.is_file():
        return archived.read_text().strip()
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True).stdout.strip()
    status = [*git, "status", "--porcelain", "-uno", "--", ":!benches/results"]
    changed = subprocess.run(status, capture_output=True, text=True).stdout.strip()
    return f"{head or 'unknown'}{'-dirty' if changed else ''}"


def portable(argument: str) -> str:
    """An argument of a command. A path on this machine becomes its name."""
    return Path(argument).name if argument.startswith("/") else argument


class Recorder:
    """Appends measurements to a file of JSON lines, each with what is needed to repeat it."""

    def __init__(self, name: str, directory: Path = RESULTS, command: str | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"{name}.jsonl"
        self._head = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "machine": machine(),
            "command": command
            or " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *map(portable, sys.argv[1:])]),
        }

    def write(self, **measurement: object) -> None:
        with self.path.open("a") as lines:
            lines.write(json.dumps({**self._head, **measurement}) + "\n")


def median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def cpu_seconds(pid: int) -> float:
    """Processor time that all threads of a process have used: finer than /proc tells it."""
    clock = ctypes.c_int()
    failure = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))
    if failure:
        raise OSError(failure, f"the processor time of process {pid}: {os.strerror(failure)}")
    return time.clock_gettime(clock.value)


def memory_max_bytes(pid: int) -> int:
    """The most memory that a process has had resident."""
    peak = re.search(r"VmHWM:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(peak[1]) * 1024 if peak else 0


def reset_memory_max(pid: int) -> int:
    """Makes the high-water mark start from here; what is resident now, in bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return memory_max_bytes(pid)


def keep_to_cores(count: int) -> None:
    """Keeps this process, and those that it starts from now on, to that many processors.

    An engine's own setting for its threads is not enough: not every thread of every engine heeds one.
    """
    available = sorted(os.sched_getaffinity(0))
    if not 1 <= count <= len(available):
        raise SystemExit(f"--cores {count}: this process may use {len(available)}")
    os.sched_setaffinity(0, available[:count])


def metrics(admin: str) -> dict[str, float]:
    """A Dovetail server's metrics."""
    with urllib.request.urlopen(f"http://{admin}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def at_once(work: Callable[..., None], clients: list[tuple[object, ...]], timeout: float) -> list[Any]:
    """Runs `work` in a process for each client, and returns what all of them tell.

    A client gets its arguments, a barrier at which all wait before what is measured, and the queue to tell it.
    """
    context = multiprocessing.get_context("spawn")
    go, found = context.Barrier(len(clients)), context.Queue()
    processes = [context.Process(target=work, args=(*arguments, go, found)) for arguments in clients]
    for process in processes:
        process.start()
    told = [found.get(timeout=timeout) for _ in processes]
    for process in processes:
        process.join()
    return told


START_SECONDS = 60
PREPARE_SECONDS = 300
STOP_SECONDS = 60


class Dovetail:
    """A Dovetail server process, of the release build unless DOVETAIL_BIN says otherwise. Stop it, whatever happens.

    `environment` holds variables of its own, `open_files` is the limit of open files of the process, and `settings` are
    those of ``dovetail serve``.
    """

    def __init__(
        self, environment: Mapping[str, str] | None = None, *, open_files: int | None = None, **settings: object
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dovetail-bench-")
        folder = Path(self._folder.name)
        ready = folder / "ready.json"
        # Rates that were kept from another day, or with other work beside, would choose other plans.
        own = {"listen": "127.0.0.1:0", "admin_listen": "127.0.0.1:0", "rates_file": folder / "rates.json"}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**own, **settings}.items()]
        # Settings of whoever measures would be settings of what is measured.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("DOVETAIL_")}
        log = folder / "server.log"
        # Both limits: the server raises the one that it may raise.
        limits = ["prlimit", f"--nofile={open_files}"] if open_files else []
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [*limits, str(binary()), "serve", *flags, "--ready-file", str(ready)],
                stdout=sink,
                stderr=sink,
                env={**inherited, **(environment or {})},
            )
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            has_ended = self.process.poll() is not None
            if has_ended or time.monotonic() > deadline:
                how = "ended" if has_ended else f"did not start within {START_SECONDS} s"
                said = log.read_text(errors="replace")
                self.stop()
                raise SystemExit(f"the server {how}; it said:\n{said}")
            time.sleep(0.01)
        addresses = json.loads(ready.read_text())
        self.uri, self.admin, self.pid = f"grpc://{addresses['flight']}", addresses["admin"], self.process.pid

    def stop(self) -> None:
        """Ends the process, by force when it must be, and removes its files."""
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Dovetail:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def can_prepare(server: str) -> bool:
    """True if a server of that binary can prepare its memory. Earlier versions cannot."""
    options = subprocess.run([server, "serve", "--help"], capture_output=True, text=True, check=True).stdout
    return "--prefault" in options


def is_prepared(server: Dovetail) -> bool:
    """True if as much memory is mapped as should be."""
    found = metrics(server.admin)
    return found['dovetail_arena_bytes{kind="mapped"}'] >= found['dovetail_arena_bytes{kind="prefault"}']


def wait_until_prepared(server: Dovetail) -> float:
    """Waits until as much is mapped as should be; the seconds that it took from here."""
    since = time.monotonic()
    while True:
        if is_prepared(server):
            return time.monotonic() - since
        if time.monotonic() - since > PREPARE_SECONDS:
            raise SystemExit(f"the server did not prepare its memory within {PREPARE_SECONDS} s")
        time.sleep(0.05)


def bench_program() -> Path:
    """`dovetail-bench`, which is built into the folder of the server's binary, or packed into it."""
    path = binary().parent / "dovetail-bench"
    if not path.exists():
        raise SystemExit(f"{path} is not there; run `cargo build --release --workspace` first, or set DOVETAIL_BIN")
    return path


def binary() -> Path:
    given = os.environ.get("DOVETAIL_BIN")
    if given:
        return Path(given)
    metadata = subprocess.run(
        ["cargo", "metadata", "--format-version=1", "--no-deps", "--offline"], cwd=ROOT, capture_output=True, check=True
    )
    path = Path(json.loads(metadata.stdout)["target_directory"]) / "release" / "dovetail"
    if not path.exists():
        raise SystemExit(f"{path} is not there; run `cargo build --release` first, or set DOVETAIL_BIN")
    return path
