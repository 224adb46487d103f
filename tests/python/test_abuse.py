"""Peers that make the server hold memory: all at once, against a small server, which must stay within its bound.

`docs/memory.md` states the bound of the whole process. Each abuse here made a server hold hundreds of megabytes, or
more, before it was bounded. A tenant with a writer's token does all of them, while another tenant works.
"""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import dovetail
from abuse import KIB, MIB, OF_MEMORY, OF_OTHERS, Abuse
from harness import ROOT, WAIT_SECONDS, Server

Start = Callable[..., Server]
# Each with how many of its calls and connections there are, as a share of what it does to a large server. More
# connections than open files are not among them: a low limit of open files would refuse the connections of the others.
# `test_connections.py` has such a server.
ABUSES = [*((abuse, 1.0) for abuse in OF_MEMORY), *((abuse, 0.1) for abuse in OF_OTHERS)]
# The admin port closes its oldest connection for one above 64. As many within the time of an answer would close that of
# a probe, so there are fewer.
ABUSES[ABUSES.index((Abuse.halves_of_prefaces_to_admin, 0.1))] = (Abuse.halves_of_prefaces_to_admin, 0.05)

# Tables of the tenant that works.
OF_ANN = ("kept", "small")
MALLORY = "mallory-writes"
TOKENS = "mallory-writes mallory writer\nann-writes ann writer\n"
HOST_MEMORY, DEVICE_MEMORY, CALL_MEMORY, UPLOADS = 256 * MIB, 32 * MIB, 16 * MIB, 16
SETTINGS = {
    "devices": "host:1",
    "host_memory": "256MiB",
    "device_memory": "32MiB",
    "call_memory": "16MiB",
    "tenant_memory": "96MiB",
    "upload_limit": UPLOADS,
    # The abort of an upload is refused when the share of its tenant is full, and the upload stays for this time.
    "upload_idle_seconds": 20,
}

# The bound of the process, as docs/memory.md states it.
BOUND = (
    "host-memory + device-memory + 2 × call-memory + upload-limit × 1 MiB\n"
    "+ connections × 128 KiB + processors × 32 MiB + 128 MiB"
)
# Connections that the abuses hold at most, with some of ann's and those to the admin port.
CONNECTIONS = 300


def bound_bytes() -> int:
    processors = os.cpu_count() or 1
    settings = HOST_MEMORY + DEVICE_MEMORY + 2 * CALL_MEMORY + UPLOADS * MIB
    return settings + CONNECTIONS * 128 * KIB + processors * 32 * MIB + 128 * MIB


class Watch:
    """Watches how much memory a server's process has, without the pages of its program, which the system can drop."""

    def __init__(self, server: Server) -> None:
        self._status = Path(f"/proc/{server.process.pid}/status")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.most = 0

    def now(self) -> int:
        lines = self._status.read_text().splitlines()
        return sum(int(line.split()[1]) * KIB for line in lines if line.startswith(("RssAnon:", "RssShmem:")))

    def _look(self) -> None:
        while not self._ended.wait(0.02):
            self.most = max(self.most, self.now())

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def call_memory(server: Server, kind: str) -> int:
    return int(server.metric(rf'^dovetail_call_memory_bytes\{{kind="{kind}"\}}'))


@pytest.fixture
def server(start: Start, tmp_path: Path) -> Server:
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKENS)
    tokens.chmod(0o600)
    return start(token_file=tokens, **SETTINGS)


def is_whole(client: dovetail.Client, kept: pa.Table) -> None:
    assert client.get("kept").sort_by("k").equals(kept)


def memory_is_back(server: Server) -> None:
    server.wait_for(lambda: call_memory(server, "used") == 0, "the memory of calls to be free again")


def mallory(server: Server, scale: float = 1) -> Abuse:
    return Abuse(server.address, 0.5, MALLORY, scale, admin=server.admin.removeprefix("http://"))


def record(measured: dict[str, float]) -> None:
    """Adds what was measured to the record of a long run, which `./test long abuse` writes."""
    print(", ".join(f"{name} {value}" for name, value in measured.items()))
    if file := os.environ.get("DOVETAIL_MEASURED_FILE"):
        Path(file).write_text(json.dumps(measured))


def test_the_page_states_the_bound_that_is_tested() -> None:
    assert BOUND in (ROOT / "docs" / "memory.md").read_text()


@pytest.mark.parametrize(("abuse", "scale"), ABUSES, ids=[abuse.__name__ for abuse, _ in ABUSES])
def test_each_abuse_alone_holds_bounded_memory(server: Server, abuse: Callable[[Abuse], None], scale: float) -> None:
    """What is not a table stays within the memory of calls, and the rest of the process within its bound."""
    with server.connect(token="ann-writes") as ann, Watch(server) as memory:
        ann.put("small", {"k": [1, 2]})
        ann.join("small", "small", on="k").table()
        abuser = mallory(server, scale)
        abuse(abuser)
        assert ann.join("small", "small", on="k").table().num_rows == 2
        assert call_memory(server, "used_max") <= CALL_MEMORY
        assert memory.most <= bound_bytes()
        abuser.clean_up(but=OF_ANN)
        memory_is_back(server)


def test_a_list_of_many_jobs_fits_in_little_memory_of_calls(start: Start) -> None:
    with start(devices="host:1", call_memory="1MiB").connect() as client:
        client.put("t", {"k": [1]})
        jobs = [client.submit("t", "t", on="k").id for _ in range(300)]
        listed = client.jobs()
        assert [job.id for job in listed] == jobs
        assert sum(len(json.dumps(job.raw)) for job in listed) > 2**18, "a connection has a quarter of the memory"


def test_all_abuses_at_once_stay_within_the_bound_of_the_process(server: Server, long_run: bool) -> None:
    seconds = float(os.environ.get("DOVETAIL_ABUSE_SECONDS") or (600 if long_run else 5))
    end = time.monotonic() + seconds
    kept = pa.table({"k": np.arange(500_000), "v": np.arange(500_000) * 3})
    failures: list[BaseException] = []
    rounds = 0

    def again(abuse: Callable[[Abuse], None], scale: float) -> None:
        nonlocal rounds
        while time.monotonic() < end and not failures:
            try:
                # A tenant whose share is taken by its own abuses is refused.
                with suppress(dovetail.Error, pa.ArrowException, OSError):
                    abuse(mallory(server, scale))
                rounds += 1
            except BaseException as error:
                failures.append(error)

    worst_health = worst_join = 0.0
    with server.connect(token="ann-writes") as ann, Watch(server) as memory:
        ann.put("kept", kept)
        ann.put("small", {"k": [1, 2]})
        abuses = [threading.Thread(target=again, args=each) for each in ABUSES]
        for abuse in abuses:
            abuse.start()
        while time.monotonic() < end:
            before = time.monotonic()
            with urllib.request.urlopen(f"{server.admin}/healthz", timeout=WAIT_SECONDS) as answer:
                assert answer.status == 200
            worst_health = max(worst_health, time.monotonic() - before)
            before = time.monotonic()
            with ann.join("small", "small", on="k") as result:
                assert result.table().num_rows == 2
            worst_join = max(worst_join, time.monotonic() - before)
            time.sleep(0.1)
        for abuse in abuses:
            abuse.join()
        assert not failures, failures
        peak, bound = memory.most, bound_bytes()
        record(
            {
                "rounds": rounds,
                "peak_mib": round(peak / MIB),
                "bound_mib": round(bound / MIB),
                "worst_healthz_seconds": round(worst_health, 3),
                "worst_join_seconds": round(worst_join, 3),
            }
        )
        assert peak <= bound
        is_whole(ann, kept)
        mallory(server).clean_up(but=OF_ANN)
        memory_is_back(server)
        for name in OF_ANN:
            ann.drop(name)

        def is_free() -> bool:
            # A job that was asked for at the end may have begun meanwhile.
            mallory(server).clean_up(but=())
            return server.arena_used() == 0

        server.wait_for(is_free, "host memory to be free again")
