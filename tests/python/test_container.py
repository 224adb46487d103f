"""The server in the file system of its image, with a read-only root, a limit of memory, and no rights.

Without a container engine, the file system is made of the Debian packages that docker/Dockerfile lists, and entered by
unshare and chroot, as a container engine does it. Needs root, mmdebstrap and Debian's packages, and takes ten minutes:
`./test long container`.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.flight as flight
import pyarrow.parquet as pq
import pytest

import dovetail
from dockerfile import stages
from harness import LONG, ROOT, STOP_SECONDS, WAIT_SECONDS, binary

MEMORY_BYTES = 1 << 30
SECONDS = float(os.environ.get("DOVETAIL_CONTAINER_SECONDS") or 600)

pytestmark = pytest.mark.skipif(not LONG, reason="./test long container runs it")

# What a container engine does before it starts the program. $1: the root, $2: the volume, $3: the secrets, $4: the file
# that takes processes into the control group; then the program.
ENTER = """
set -euo pipefail
root=$1 volume=$2 secrets=$3 group=$4
shift 4
echo $$ >"$group"
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
mount --rbind -o ro /sys "$root/sys"
mount -t tmpfs -o size=64m,mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for name in null zero urandom; do
    touch "$root/dev/$name"
    mount --bind "/dev/$name" "$root/dev/$name"
done
mount --bind "$volume" "$root/var/lib/dovetail"
mount --bind -o ro "$secrets" "$root/run/secrets"
mount -o remount,bind,ro "$root"
exec /usr/sbin/chroot "$root" setpriv --reuid 10001 --regid 10001 --clear-groups --bounding-set=-all --inh-caps=-all \
    --no-new-privs "$@"
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file system of the image's second stage."""
    image = stages()[-1]
    folder = tmp_path_factory.mktemp("image")
    folder.chmod(0o755)
    root = folder / "root"
    assert os.geteuid() == 0, "making the file system of the image needs root"
    assert shutil.which("mmdebstrap"), "install Debian's mmdebstrap, which makes the file system of the image"
    release = image.base.split(":")[1].removesuffix("-slim")
    subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(image.packages())}", release, root],
        check=True,
    )
    user, group = map(int, image.one("USER").split(":"))
    for volume in image.all("VOLUME"):
        path = root / volume.lstrip("/")
        path.mkdir(parents=True)
        os.chown(path, user, group)
    (root / "run/secrets").mkdir()
    subprocess.run(["strip", "-o", root / "usr/local/bin/dovetail", binary()], check=True)
    yield root
    shutil.rmtree(folder)


@pytest.fixture
def group() -> Iterator[tuple[Path, Callable[[str], int]]]:
    """A control group with the limit of memory, and a reader of its files by their name in either version."""
    base, first = Path("/sys/fs/cgroup"), False
    if (base / "memory").is_dir():
        base, first = base / "memory", True
    folder = base / f"dovetail-test-{os.getpid()}"
    folder.mkdir()
    (folder / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(MEMORY_BYTES))

    def read(name: str) -> int:
        if name == "peak":
            return int((folder / ("memory.max_usage_in_bytes" if first else "memory.peak")).read_text())
        events = (folder / ("memory.oom_control" if first else "memory.events")).read_text()
        return dict((key, int(value)) for key, value in map(str.split, events.splitlines()))[name]

    yield folder / "cgroup.procs", read
    for _ in range(100):
        try:
            folder.rmdir()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"processes are left in {folder}")


class Container:
    """The server in its image: `command` runs another program in the same way."""

    def __init__(self, root: Path, folder: Path, group: Path) -> None:
        self.root, self.group = root, group
        self.volume, self.secrets = folder / "volume", folder / "secrets.d"
        user, owner = map(int, stages()[-1].one("USER").split(":"))
        if not self.volume.exists():
            self.volume.mkdir()
            os.chown(self.volume, user, owner)
            shutil.copy(ROOT / "docker/secrets", folder / "secrets")
            subprocess.run([folder / "secrets"], check=True)
        folder.chmod(0o755)
        self.log_path = folder / "server.log"
        secrets = {"TOKEN_FILE": "tokens", "TLS_CERT": "tls.crt", "TLS_KEY": "tls.key"}
        self.environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "RUST_BACKTRACE": "1",
            **stages()[-1].environment(),
            **{f"DOVETAIL_{name}": f"/run/secrets/{file}" for name, file in secrets.items()},
            # The tests' machine has one network.
            "DOVETAIL_LISTEN": "127.0.0.1:0",
            "DOVETAIL_ADMIN_LISTEN": "127.0.0.1:0",
        }
        with self.log_path.open("wb") as log:
            ready = self.volume / "ready.json"
            ready.unlink(missing_ok=True)
            words = [*json.loads(stages()[-1].one("ENTRYPOINT")), *json.loads(stages()[-1].one("CMD"))]
            words += ["--ready-file", "/var/lib/dovetail/ready.json"]
            self.process = self.start(words, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + WAIT_SECONDS
        while not ready.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log()
            time.sleep(0.1)
        self.addresses = json.loads(ready.read_text())

    def start(self, words: list[str], **options: object) -> subprocess.Popen[bytes]:
        enter = ["bash", "-c", ENTER, "enter", self.root, self.volume, self.secrets, self.group]
        return subprocess.Popen(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child=SIGTERM", "--ipc", "--uts", *enter, *words],
            env=self.environment,
            **options,
        )

    def run(self, *words: str) -> tuple[int, str]:
        process = self.start(list(words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        text = process.communicate(timeout=WAIT_SECONDS)[0].decode()
        return process.returncode, text

    def connect(self) -> dovetail.Client:
        token = (self.secrets / "token").read_text().strip()
        certificate = (self.secrets / "tls.crt").read_bytes()
        uri = f"grpc+tls://{self.addresses['flight']}"
        return dovetail.connect(uri, token=token, tls_root_certs=certificate, timeout=WAIT_SECONDS)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def stop(self) -> None:
        # The server is the first process of its own tree, a child of unshare.
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        assert self.process.wait(STOP_SECONDS) == 0, self.log()


class Clients:
    """Clients of several kinds, each in a thread, until the time is over. The first failure ends all."""

    def __init__(self, container: Container, folder: Path) -> None:
        self.container, self.folder = container, folder
        self.failure: BaseException | None = None
        self.rounds: dict[str, int] = {}
        self.deadline = time.monotonic() + SECONDS
        self.orders = pa.table({"k": list(range(50_000)), "name": [f"order {n}" for n in range(50_000)]})
        self.lines = pa.table({"k": [n % 60_000 for n in range(240_000)], "v": list(range(240_000))})

    def run(self) -> dict[str, int]:
        with self.container.connect() as client:
            client.put("orders", self.orders)
            client.put("lines", self.lines)
        kinds = [self.joins, self.joins, self.uploads, self.cancels, self.bare, self.shell, self.stalls, self.watches]
        threads = [
            threading.Thread(target=self.repeat, args=(kind, number), name=f"{kind.__name__}-{number}")
            for number, kind in enumerate(kinds)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure:
            raise self.failure
        return self.rounds

    def repeat(self, kind: Callable[[dovetail.Client, random.Random, str], None], number: int) -> None:
        draw, name = random.Random(number), f"{kind.__name__}_{number}"
        try:
            with self.container.connect() as client:
                while time.monotonic() < self.deadline and not self.failure:
                    kind(client, draw, name)
                    self.rounds[name] = self.rounds.get(name, 0) + 1
        except BaseException as failure:
            failure.add_note(f"in {name}, round {self.rounds.get(name, 0)}")
            self.failure = self.failure or failure

    def joins(self, client: dovetail.Client, draw: random.Random, name: str) -> None:
        how = draw.choice(["inner", "left", "left_semi", "left_anti", "full"])
        rows = {"inner": 200_000, "left": 200_000, "left_semi": 50_000, "left_anti": 0, "full": 240_000}[how]
        with client.join("orders", "lines", on="k", how=how) as result:
            assert result.table().num_rows == rows, how

    def uploads(self, client: dovetail.Client, draw: random.Random, name: str) -> None:
        rows = draw.randrange(1, 400_000)
        client.put(name, pa.table({"k": list(range(rows))}), mode="replace", streams=draw.choice([1, 3]))
        assert client.get(name).num_rows == rows
        client.drop(name)

    def cancels(self, client: dovetail.Client, draw: random.Random, name: str) -> None:
        # 240,000 rows joined with themselves by 60,000 keys.
        result = client.join("lines", "lines", on="k")
        time.sleep(draw.random() * 0.05)
        result.cancel()

    def bare(self, client: dovetail.Client, draw: random.Random, name: str) -> None:
        token = (self.container.secrets / "token").read_text().strip()
        options = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {token}".encode())])
        certificate = (self.container.secrets / "tls.crt").read_bytes()
        with flight.FlightClient(
            f"grpc+tls://{self.container.addresses['flight']}", tls_root_certs=certificate
        ) as bare:
            join = {"left": "orders", "right": "lines", "on": [{"left": "k", "right": "k"}], "columns": ["name", "v"]}
            command = flight.FlightDescriptor.for_command(json.dumps({"join": join}))
            info = bare.get_flight_info(command, options)
            rows = sum(bare.do_get(endpoint.ticket, options).read_all().num_rows for endpoint in info.endpoints)
            assert rows == 200_000

    def shell(self, client: dovetail.Client, draw: random.Random, name: str) -> None:
        file, joined = self.folder / f"{name}.parquet", self.folder / f"{name}.joined.parquet"
        pq.write_table(self.orders.slice(0, draw.randrange(1, 50_000)), file)
        words = ["--server", f"https://{self.container.addresses['flight']}"]
        words += ["--ca", str(self.container.secrets / "tls.crt")]
        env = {**os.environ, "DOVETAIL_TOKEN": (self.container.secrets / "token").read_text().strip()}

        def dovetail_does(*command: str) -> None:
            done = subprocess.run([binary(), *command, *words], env=env, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr

        dovetail_does("put", str(file), "--table", name, "--mode", "replace")
        joined.unlink(missing_ok=True)
        dovetail_does("join", name, "lines", "--on", "k", "-o", str(joined))
        rows = min(pq.read_metadata(file).num_rows, 60_000)
        assert pq.read_metadata(joined).num_rows == 4 * rows

    def stalls(self, client: dovetail.Client, draw: random.Random, name: str) -> None:
        with client.join("orders", "lines", on="k") as result:
            for _ in itertools.islice(result.reader(), 1):
                time.sleep(draw.random())

    def watches(self, client: dovetail.Client, draw: random.Random, name: str) -> None:
        admin = f"http://{self.container.addresses['admin']}"
        for path in ("/metrics", "/readyz", "/healthz"):
            with urllib.request.urlopen(admin + path, timeout=WAIT_SECONDS) as answer:
                assert answer.status == 200 and answer.read()
        time.sleep(0.2)


def test_mixed_clients_use_a_server_in_its_image_within_its_limit_of_memory(
    root: Path, tmp_path: Path, group: tuple[Path, Callable[[str], int]]
) -> None:
    processes, read = group
    container = Container(root, tmp_path, processes)
    # The probe of the image, at the port that this server has.
    port = container.addresses["admin"].split(":")[1]
    probe = [word.replace("8816", port) for word in stages()[-1].health_check()]
    assert container.run(*probe)[0] == 0
    assert container.run("bash", "-c", "echo x >/usr/x")[1].strip().endswith("Read-only file system")
    assert container.run("bash", "-c", "id -u; grep ^CapEff /proc/self/status")[1].split() == [
        "10001",
        "CapEff:",
        "0000000000000000",
    ]
    # The default of host memory is a share of the container's limit.
    with container.connect() as client:
        limit = client.server_info()["host_memory_bytes"]
    assert limit == MEMORY_BYTES * 60 // 100
    status, doctor = container.run("dovetail", "doctor", "--json")
    findings = {line["check"]: line for line in map(json.loads, doctor.splitlines()) if "check" in line}
    assert findings["memory"]["found"].startswith("1.0 GiB of ")
    assert status in (0, 3) and findings["driver"]["verdict"] == "good"

    rounds = Clients(container, tmp_path).run()
    print(rounds, f"peak {read('peak') >> 20} MiB")
    assert all(count > 0 for count in rounds.values()) and len(rounds) == 8
    assert read("peak") <= MEMORY_BYTES and read("oom_kill") == 0
    with container.connect() as client:
        for table in client.tables():
            client.drop(table.name)
    container.stop()
    assert "panicked" not in container.log()
    # The volume keeps the rates, so the next start measures nothing.
    assert (container.volume / "dovetail/rates.json").exists()
    again = Container(root, tmp_path, processes)
    assert "measuring" not in again.log()
    again.stop()
