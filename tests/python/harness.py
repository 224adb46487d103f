"""Starts the real server for tests, and looks at it from outside: its metrics, its log, its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dovetail

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 60
STOP_SECONDS = 60
# Whether `./test long` runs a part.
LONG = bool(os.environ.get("DOVETAIL_LONG"))
# For what must come: far longer than it takes, since the machine may be busy with other things.
WAIT_SECONDS = 60

# What servers run joins on: the CPU, or with DOVETAIL_TEST_DEVICE=cuda the first GPU, or as many as DOVETAIL_TEST_GPUS
# says.
DEVICE_KIND = "cuda" if os.environ.get("DOVETAIL_TEST_DEVICE") == "cuda" else "host"
GPUS = int(os.environ.get("DOVETAIL_TEST_GPUS") or 1) if DEVICE_KIND == "cuda" else 0

# Devices that run each join of the oracle's suite together; 0: as the server chooses.
GANG = int(os.environ.get("DOVETAIL_TEST_GANG") or 0)

# Whether devices have processes of their own, as `--device-processes` takes it; nothing: as the server chooses.
PROCESSES = os.environ.get("DOVETAIL_TEST_PROCESSES")


def binary() -> Path:
    """The server's binary: ``DOVETAIL_BIN``, or the debug build of this clone."""
    given = os.environ.get("DOVETAIL_BIN")
    if given:
        return Path(given)
    metadata = subprocess.run(
        ["cargo", "metadata", "--format-version=1", "--no-deps", "--offline"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    path = Path(json.loads(metadata.stdout)["target_directory"]) / "debug" / "dovetail"
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there; build it with `cargo build`, or set DOVETAIL_BIN")
    return path


def slow_devices(folder: Path, *rates: str) -> Path:
    """A topology file of a device for each of these rates, such as ``"4MB/s"``, that its link to host memory has.

    A join on such a device takes as long as its input and its result are large, on any machine. One of many rows that
    nobody reads holds its device for minutes; over a fast link it would soon have filled the memory, and would have to
    give way to others within seconds.
    """
    text = 'name = "slow"\n[[socket]]\nname = "cpu0"\n'
    for index, rate in enumerate(rates):
        text += f'[[device]]\nname = "host:{index}"\nthreads = 1\n'
        text += f'[[link]]\nbetween = ["cpu0", "host:{index}"]\nrate = "{rate}"\n'
    file = folder / "slow.toml"
    file.write_text(text)
    return file


class Server:
    """A server process on free ports.

    Settings are those of ``dovetail serve``: ``Server(folder, devices="host:2")``; ``True`` is a
    flag without a value. ``open_files`` is the limit of open files of the process, ``processors``
    that of its processors: more of them take more device memory.
    """

    def __init__(
        self,
        folder: Path,
        *,
        env: dict[str, str] | None = None,
        open_files: int | None = None,
        processors: int | None = None,
        **settings: object,
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.log_path = folder / "server.log"
        ready = folder / "ready.json"
        ready.unlink(missing_ok=True)
        settings = {"listen": "127.0.0.1:0", "admin_listen": "127.0.0.1:0", **settings}
        # Links of a topology file are shared within one process.
        if PROCESSES and "topology" not in settings:
            settings.setdefault("device_processes", PROCESSES)
        # Tests of what is lost look at it for longer than it takes to bring it back.
        settings.setdefault("device_restart_seconds", 0)
        flags = []
        for name, value in settings.items():
            flags.append(f"--{name.replace('_', '-')}")
            if value is not True:
                flags.append(str(value))
        kept = "DOVETAIL_TEST_GPUS_OF_ONE"
        clean = {name: value for name, value in os.environ.items() if name == kept or not name.startswith("DOVETAIL_")}
        limits = ["prlimit", f"--nofile={open_files}"] if open_files else []
        if processors:
            available = sorted(os.sched_getaffinity(0))[:processors]
            limits += ["taskset", "--cpu-list", ",".join(map(str, available))]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*limits, str(binary()), "serve", *flags, "--ready-file", str(ready)],
                stdout=log,
                stderr=subprocess.STDOUT,
                # Not the user's own file of rates: this may be another build.
                env={**clean, "RUST_BACKTRACE": "1", "XDG_CACHE_HOME": str(folder / "cache"), **(env or {})},
            )
        addresses = self._wait_until_ready(ready)
        scheme = "grpc+tls" if "tls_cert" in settings else "grpc"
        self.address: str = addresses["flight"]
        self.uri = f"{scheme}://{self.address}"
        self.admin = f"http://{addresses['admin']}" if addresses.get("admin") else None

    def connect(self, **options: object) -> dovetail.Client:
        """A client of it. A busy machine may take longer to answer than a person would wait."""
        return dovetail.connect(self.uri, **{"timeout": WAIT_SECONDS, **options})

    def log(self) -> str:
        """What it has written so far."""
        return self.log_path.read_text(errors="replace")

    def metrics(self) -> dict[str, float]:
        """All metrics, by name with labels as Prometheus writes them."""
        with urllib.request.urlopen(f"{self.admin}/metrics", timeout=WAIT_SECONDS) as answer:
            text = answer.read().decode()
        found = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                found[name] = float(value)
        return found

    def metric(self, pattern: str) -> float:
        """The sum of the metrics whose name with labels matches."""
        found = [value for name, value in self.metrics().items() if re.search(pattern, name)]
        assert found, f"no metric matches {pattern!r}"
        return sum(found)

    def arena_used(self) -> int:
        """Bytes of host memory that tables, results and uploads under way hold."""
        return int(self.metric(r'^dovetail_arena_bytes\{kind="used"\}'))

    def device_used(self) -> int:
        """Bytes of device memory that jobs hold."""
        return int(self.metric(r'^dovetail_device_memory_bytes\{.*kind="used"'))

    def is_ready(self) -> bool:
        """Whether its admin port says that it takes new work."""
        try:
            with urllib.request.urlopen(f"{self.admin}/readyz", timeout=WAIT_SECONDS):
                return True
        except urllib.error.HTTPError as answer:
            assert answer.code == 503, answer
            answer.close()
            return False

    def cpu_seconds(self) -> float:
        """Processor time that the process has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def wait_for(self, condition: object, what: str, seconds: float = WAIT_SECONDS) -> None:
        """Waits until a condition holds; the machine may be busy, so generously."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"the server ended while waiting for {what}\n{self.log()}"
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}\n{self.tail()}"
            time.sleep(0.02)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """Ends it as an operator does, and checks that it ends well."""
        if self.process.poll() is None:
            self.terminate()
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(
                    f"the server did not end within {STOP_SECONDS} s of SIGTERM\n{self.tail()}"
                ) from None
        assert self.process.returncode == 0, f"the server ended with {self.process.returncode}\n{self.tail()}"
        assert not self.panics(), f"the server panicked\n{self.tail(200)}"

    def panics(self) -> list[str]:
        """Lines of the log that tell of a panic in the server's own code.

        What the Arrow library panics on in a hostile message, the server catches and refuses.
        """
        return re.findall(r"panicked at (?!/\S*/registry/).*", self.log())

    def kill(self) -> None:
        """Ends it at once, for when a test has failed already."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def tail(self, lines: int = 60) -> str:
        """The end of its log."""
        return "\n".join(self.log().splitlines()[-lines:])

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()

    def _wait_until_ready(self, ready: Path) -> dict[str, str]:
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            if self.process.poll() is not None:
                raise StartFailed(self.process.returncode, self.log())
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"the server was not ready within {START_SECONDS} s\n{self.tail()}")
            time.sleep(0.01)
        return json.loads(ready.read_text())


def command_line(server: Server, *words: object) -> subprocess.CompletedProcess[str]:
    """Runs a command of the command line against a server."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DOVETAIL_")}
    # As wide as any of the tests' tables.
    clean["COLUMNS"] = "200"
    line = [str(binary()), *map(str, words), "--server", f"http://{server.address}"]
    return subprocess.run(line, capture_output=True, text=True, env=clean)


def csv_flags(options: Mapping[str, Any]) -> list[str]:
    """The options of CSV, as the command line takes them. Those with other names are passed over."""
    given = []
    if types := options.get("types"):
        given += ["--types", ",".join(f"{name}={kind}" for name, kind in types.items())]
    if words := options.get("null_values"):
        given += ["--null-values", ",".join(words)]
    for name in ("delimiter", "infer_rows"):
        if name in options:
            given += [f"--{name.replace('_', '-')}", str(options[name])]
    if options.get("header") is False:
        given.append("--no-header")
    return given


def clean(server: Server, client: dovetail.Client) -> None:
    """Drops every table, cancels every job, and checks that the server then holds no memory."""
    for table in client.tables():
        client.drop(table.name)
    for job in client.jobs():
        if job.state in ("queued", "running", "complete"):
            client.job(job.id).cancel()
    server.wait_for(lambda: server.arena_used() == 0, "all host memory to be free again")
    server.wait_for(lambda: server.device_used() == 0, "all device memory to be free again")


class StartFailed(AssertionError):
    """The server refused to start."""

    def __init__(self, code: int, log: str) -> None:
        super().__init__(f"the server ended with {code} before it was ready:\n{log}")
        self.code = code
        self.log = log
