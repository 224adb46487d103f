"""What the comparison benchmarks share: the machine, the commit, one JSON line per measurement."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benches" / "results"


def machine() -> dict[str, object]:
    """The processor, how many of it, and the memory."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*:\s*(.*)", cpuinfo)
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    return {
        "cpu": model[1] if model else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory[1]) / 2**20, 1) if memory else None,
        "kernel": platform.release(),
    }


def commit() -> str:
    """The commit that is checked out, with `-dirty` when files differ from it."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True).stdout.strip()
    return f"{head or 'unknown'}{'-dirty' if changed else ''}"


class Recorder:
    """Appends measurements to a file of JSON lines, each with what is needed to repeat it."""

    def __init__(self, name: str, directory: Path = RESULTS) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"{name}.jsonl"
        self._head = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": commit(),
            "machine": machine(),
            "command": " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
        }

    def write(self, **measurement: object) -> None:
        with self.path.open("a") as lines:
            lines.write(json.dumps({**self._head, **measurement}) + "\n")


def median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_max_bytes(pid: int) -> int:
    """The most memory that a process has had resident."""
    peak = re.search(r"VmHWM:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(peak[1]) * 1024 if peak else 0


def reset_memory_max(pid: int) -> None:
    """Makes the high-water mark start from here."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def metrics(admin: str) -> dict[str, float]:
    """A Dovetail server's metrics."""
    with urllib.request.urlopen(f"http://{admin}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


class Dovetail:
    """A Dovetail server process, of the release build unless DOVETAIL_BIN says otherwise."""

    def __init__(self, folder: Path, **settings: object) -> None:
        ready = folder / "ready.json"
        flags = [
            f"--{name.replace('_', '-')}={value}"
            for name, value in {"listen": "127.0.0.1:0", "admin_listen": "127.0.0.1:0", **settings}.items()
        ]
        self._log = (folder / "server.log").open("wb")
        self.process = subprocess.Popen(
            [str(binary()), "serve", *flags, "--ready-file", str(ready)], stdout=self._log, stderr=self._log
        )
        while not ready.exists():
            if self.process.poll() is not None:
                raise RuntimeError(f"the server did not start; see {self._log.name}")
        addresses = json.loads(ready.read_text())
        self.uri, self.admin, self.pid = f"grpc://{addresses['flight']}", addresses["admin"], self.process.pid

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()
        self._log.close()


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
