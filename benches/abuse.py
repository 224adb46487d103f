"""What each abuse makes a server hold, and what it does to others: one abuse alone, against a server of its own.

    python benches/abuse.py --seconds 10
    DOVETAIL_BIN=before/dovetail python benches/abuse.py --seconds 10 --label before

Abuses are those of `tests/python/abuse.py`, by a tenant with a writer's token. Beside each, another tenant asks for
`/healthz`, joins two rows and uploads two rows, again and again. A line has what the abuse began and what the server
still held of it at the end, how much memory the process grew by, and the worst of each time. Settings that the binary
does not know are left out, so that an earlier version can be measured, too. `--scale` multiplies how many calls,
connections or tables each abuse has.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import dovetail
from common import ROOT, Dovetail, Recorder, binary

sys.path.insert(0, str(ROOT / "tests" / "python"))
from abuse import MIB, OF_MEMORY, OF_OTHERS, Abuse  # noqa: E402

TOKENS = "mallory-writes mallory writer\nann-writes ann writer\n"
SETTINGS = {
    "devices": "host:1",
    "host_memory": "512MiB",
    "device_memory": "64MiB",
    "call_memory": "64MiB",
    "tenant_memory": "256MiB",
}
# Longest wait for an answer beside an abuse, in seconds. Slower answers count as this.
PATIENCE = 60


def memory_bytes(pid: int) -> int:
    """Resident memory, without the pages of the program, which the system can drop."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


class Beside:
    """Watches a server's memory, and works with it as another tenant does, until it is left."""

    def __init__(self, server: Dovetail) -> None:
        self._server = server
        self._ended = threading.Event()
        self._before = memory_bytes(server.pid)
        self.grown = 0
        self.worst = {"healthz": 0.0, "join": 0.0, "put": 0.0}
        self.failures = dict.fromkeys(self.worst, 0)
        self._threads = [threading.Thread(target=self._watch)]
        self._threads += [threading.Thread(target=self._work, args=(name,)) for name in self.worst]

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            self.grown = max(self.grown, memory_bytes(self._server.pid) - self._before)

    def _healthz(self) -> None:
        with urllib.request.urlopen(f"http://{self._server.admin}/healthz", timeout=PATIENCE) as answer:
            answer.read()

    def _work(self, name: str) -> None:
        with dovetail.connect(self._server.uri, token="ann-writes", timeout=PATIENCE) as ann:
            work: dict[str, Callable[[], object]] = {
                "healthz": self._healthz,
                "join": lambda: ann.join("small", "small", on="k").table(),
                "put": lambda: ann.put("other", {"k": [1, 2]}, mode="replace"),
            }
            while not self._ended.is_set():
                start = time.monotonic()
                try:
                    work[name]()
                except (dovetail.Error, OSError):
                    self.failures[name] += 1
                self.worst[name] = max(self.worst[name], time.monotonic() - start)
                self._ended.wait(0.05)

    def __enter__(self) -> Beside:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()


def known(settings: dict[str, object]) -> dict[str, object]:
    """Those settings that the binary knows."""
    said = subprocess.run([str(binary()), "serve", "--help"], capture_output=True, text=True, check=True).stdout
    flags = set(re.findall(r"--([a-z0-9-]+)", said))
    return {name: value for name, value in settings.items() if name.replace("_", "-") in flags}


def measured(name: str, tokens: Path, seconds: float, scale: float, open_files: int | None) -> dict[str, object]:
    settings = known({**SETTINGS, "token_file": tokens})
    with Dovetail(open_files=open_files, **settings) as server:
        with dovetail.connect(server.uri, token="ann-writes", timeout=PATIENCE) as ann:
            ann.put("small", {"k": [1, 2]})
            ann.join("small", "small", on="k").table()
        mallory = Abuse(server.uri.removeprefix("grpc://"), seconds, "mallory-writes", scale, admin=server.admin)
        failure = None
        with Beside(server) as beside:
            try:
                getattr(mallory, name)()
            except (dovetail.Error, OSError) as error:
                # The server has refused the abuse, or has ended.
                failure = str(error).splitlines()[0]
        return {
            "settings": {name: str(value) for name, value in settings.items() if name != "token_file"},
            "open_files": open_files,
            "offered": mallory.offered,
            "held": mallory.held,
            "grown_mib": round(beside.grown / MIB, 1),
            **{f"worst_{what}_seconds": round(worst, 3) for what, worst in beside.worst.items()},
            **{f"failed_{what}": count for what, count in beside.failures.items() if count},
            **({"failure": failure} if failure else {}),
            "is_alive": server.process.poll() is None,
        }


def main() -> None:
    # The last is half prefaces again, more than the server may open files.
    names = [*(abuse.__name__ for abuse in [*OF_MEMORY, *OF_OTHERS]), "more_connections_than_files"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--abuses", nargs="+", choices=names, default=names, metavar="ABUSE", help=", ".join(names))
    parser.add_argument("--seconds", type=float, default=10, help="how long each part of an abuse lasts")
    parser.add_argument("--scale", type=float, default=1, help="multiplies the numbers of calls and connections")
    parser.add_argument("--label", default="", help="a name for the binary, such as before")
    options = parser.parse_args()
    recorder = Recorder("abuse")
    # Not that of the checkout.
    said = subprocess.run([str(binary()), "--version"], capture_output=True, text=True, check=True).stdout
    version = said.split(maxsplit=1)[1].strip()
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens"
        tokens.write_text(TOKENS)
        tokens.chmod(0o600)
        for name in options.abuses:
            is_of_files = name == "more_connections_than_files"
            method = "halves_of_prefaces" if is_of_files else name
            found = measured(method, tokens, options.seconds, options.scale, 512 if is_of_files else None)
            head = {
                "abuse": name,
                "label": options.label,
                "version": version,
                "seconds": options.seconds,
                "scale": options.scale,
            }
            recorder.write(**head, **found)
            print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in found.items() if key != "settings"))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
