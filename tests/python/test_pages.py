"""What the pages show works as it stands there, what they link to and name is there, and generated ones are current."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dovetail
from harness import ROOT, STOP_SECONDS, Server, StartFailed, binary

ADDRESS = "grpc://127.0.0.1:8815"


def blocks(language: str, heading: str | None = None, page: str = "README.md") -> list[str]:
    """The blocks of code in a language, of a whole page or of one section."""
    text = (ROOT / page).read_text()
    if heading:
        assert f"\n## {heading}\n" in text, f"{page} has no section {heading!r}"
        text = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run(line: str, folder: Path, server: Server) -> str:
    path = f"{binary().parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env={**os.environ, "PATH": path, "DOVETAIL_SERVER": server.uri},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{line}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Path:
    """The folder that the reader is in, with the tables of the demo in it."""
    folder = tmp_path_factory.mktemp("readme")
    [save] = [line for block in blocks("sh", "Build and start") for line in block.splitlines() if "--save" in line]
    run(save.replace("demo", "demo --scale 0.001", 1), folder, server)
    return folder


def test_the_command_line_of_the_readme_works(files: Path, server: Server) -> None:
    [block] = blocks("sh", "One join, three ways")
    for line in block.splitlines():
        assert run(line, files, server), line
    lines = pq.read_metadata(files / "lineitem.parquet").num_rows
    # An order has at least one line, and every line an order.
    assert pq.read_metadata(files / "joined.parquet").num_rows == lines
    for name in ("orders", "lineitem"):
        run(f"dovetail drop {name}", files, server)


def test_the_page_of_the_command_line_works(files: Path, server: Server, client: dovetail.Client) -> None:
    commands, manual = blocks("sh", page="docs/command-line.md")
    for line in manual.splitlines():
        run(line.split("#")[0].split(";")[0], files, server)
    assert (files / "dovetail.bash").stat().st_size > 0 and (files / "man1/dovetail-serve.1").exists()
    block = commands
    lines = block.splitlines()
    assert len(lines) >= 5
    for line in lines:
        assert run(line, files, server), line
    tables = {table.name: table.rows for table in client.tables()}
    customers = client.get("customer")
    with_orders = set(client.get("orders")["o_custkey"].to_pylist())
    assert tables["idle_customers"] == len(set(customers["c_custkey"].to_pylist()) - with_orders) > 0
    # An order has at least one line, and every line an order.
    assert pq.read_metadata(files / "joined.parquet").num_rows == tables["lineitem"]


def server_lines() -> list[str]:
    """The command lines of the page on operating, without what is said of them."""
    [block] = blocks("sh", "A server", "docs/operating.md")
    return [line.split("#")[0].strip() for line in block.splitlines()]


def settings_of(line: str) -> dict[str, object]:
    words = shlex.split(line)
    assert words[:2] == ["dovetail", "serve"], line
    names = [word.removeprefix("--").replace("-", "_") for word in words[2::2]]
    return dict(zip(names, words[3::2], strict=True))


@pytest.mark.parametrize("line", [line for line in server_lines() if "--print-config" not in line])
def test_the_servers_of_the_page_start_and_end_with_ctrl_c(tmp_path: Path, line: str) -> None:
    settings = settings_of(line)
    if "host_memory" in settings:
        # This machine may have less.
        settings["host_memory"] = "1GiB"
    try:
        server = Server(tmp_path, **settings)
    except StartFailed as failed:
        # Without a GPU that line must say so, and nothing else may fail.
        assert str(settings["devices"]).startswith("cuda"), failed.log
        assert "cuda" in failed.log and "panicked" not in failed.log, failed.log
        return
    with server, server.connect() as client:
        devices = [device["device"] for device in client.server_info()["devices"]]
        kind, _, count = str(settings.get("devices", "auto")).partition(":")
        assert devices if kind == "auto" else devices == [f"{kind}:{index}" for index in range(int(count))]
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(STOP_SECONDS) == 0, server.tail()


def test_the_settings_of_the_page_are_right(tmp_path: Path) -> None:
    def serve(*words: str, **env: str) -> str:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DOVETAIL_")}
        command = [str(binary()), "serve", *words]
        done = subprocess.run(command, env={**clean, **env}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "dovetail serve --print-config" in server_lines()
    printed = serve("--print-config")
    text = "".join((ROOT / "docs" / name).read_text() for name in ("operating.md", "container.md"))
    for address, setting in (("127.0.0.1:8815", "listen"), ("127.0.0.1:8816", "admin-listen")):
        assert address in text and f'\n{setting} = "{address}"' in f"\n{printed}"
    # Flags in code, and not those of Docker and of other commands.
    flags = set(re.findall(r"--[a-z][a-z-]+", " ".join(re.findall(r"`([^`\n]*)`", text))))
    help_text = serve("--help")
    unknown = {flag for flag in flags if flag not in help_text}
    others = {
        "--closed-loop",
        "--json",
        "--measure",
        "--check",
        "--devices",
        "--gpus",
        "--memory",
        "--cpus",
        "--cpuset-cpus",
        "--ulimit",
        "--cap-add",
        "--build-arg",
        "--distribution",
    }
    assert len(flags) > 30 and unknown <= {*others, "--stop-timeout", "--device", "--profile"}
    # Flags win over the environment, and that over the file.
    [variable] = re.findall(r"`(DOVETAIL_HOST_MEMORY)=4GiB`", text)
    file = tmp_path / "dovetail.toml"
    file.write_text('host-memory = "1GiB"\nendpoints = 3\n')
    layered = serve("--print-config", "--config", str(file), "--endpoints", "2", **{variable: "512MiB"})
    assert 'host-memory = "512MiB"' in layered and "endpoints = 2" in layered


@pytest.mark.parametrize("title", ["import dovetail", "import pyarrow.flight"])
def test_the_python_of_the_readme_works(
    files: Path, server: Server, client: dovetail.Client, monkeypatch: pytest.MonkeyPatch, title: str
) -> None:
    [block] = [block for block in blocks("python") if title in block]
    assert ADDRESS in block
    monkeypatch.chdir(files)
    names: dict[str, object] = {}
    exec(block.replace(ADDRESS, server.uri), names)
    result = names["table"] if title == "import dovetail" else names["result"]
    assert isinstance(result, pa.Table)
    assert result.num_rows == client.get("lineitem").num_rows > 0
    assert {"o_orderdate", "l_quantity"} <= set(result.column_names)
    # Nothing of the join is left.
    assert client.jobs()[-1].raw["released"]


@pytest.mark.parametrize("heading", ["Python", "pandas", "Polars", "DuckDB", "Rows that arrive, in Python"])
def test_the_python_of_the_clients_page_works(
    files: Path, server: Server, monkeypatch: pytest.MonkeyPatch, heading: str
) -> None:
    [block] = blocks("python", heading, "docs/clients.md")
    assert ADDRESS in block
    monkeypatch.chdir(files)
    names: dict[str, object] = {}
    exec(block.replace(ADDRESS, server.uri), names)
    lines = pq.read_metadata("lineitem.parquet").num_rows
    match heading:
        case "Python":
            assert names["rows"] == lines
        case "Rows that arrive, in Python":
            orders = set(pq.read_table("orders.parquet")["o_orderkey"].to_pylist())
            assert (names["rows"], len(names["frame"])) == (lines, len(orders & {1, 2, 3}))
        case "DuckDB":
            assert sum(count for _, count in names["answer"]) == lines
        case _:
            assert len(names["frame"]) == lines


def test_a_server_with_a_token_lets_the_clients_of_the_pages_in(
    tmp_path: Path, start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    [block] = blocks("text", "Who may connect", "docs/operating.md")
    token, certificate, serve, tables = block.replace("\\\n", " ").replace("HOST", "localhost").splitlines()
    for line in (token, certificate):
        subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "tokens").stat().st_mode & 0o77 == 0
    monkeypatch.chdir(tmp_path)
    settings = {**settings_of(serve), "listen": "127.0.0.1:0", "devices": "host:1", "host_memory": "256MiB"}
    server = start(**settings)
    address = f"localhost:{server.address.split(':')[1]}"
    words = tables.replace("localhost:8815", address).split()
    subprocess.run([binary(), *words[1:]], check=True, capture_output=True)
    with_client, with_pyarrow = blocks("python", "With TLS and a token", "docs/clients.md")
    for code in (with_client, with_pyarrow):
        assert "//HOST:8815" in code
        exec(code.replace("HOST:8815", address), {})


def test_the_service_of_the_page_has_settings_that_exist() -> None:
    [block] = blocks("ini", "As a service of systemd", "docs/operating.md")
    [line] = re.findall(r"^ExecStart=(.*)$", block, re.MULTILINE)
    program, *words = line.split()
    assert program.endswith("/dovetail") and words.pop(0) == "serve"
    help_text = subprocess.run([binary(), "serve", "--help"], check=True, capture_output=True, text=True).stdout
    assert all(word in help_text for word in words if word.startswith("--"))
    [drain] = re.findall(r"--drain-seconds.*?\[default: (\d+)\]", help_text, re.DOTALL)
    [stop] = re.findall(r"^TimeoutStopSec=(\d+)$", block, re.MULTILINE)
    assert int(stop) > int(drain)


def pages() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listed.split() if (ROOT / name).exists()]


def anchors(page: Path) -> set[str]:
    """What links to sections of a page may name, as GitHub makes it of their headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name} links to {target}, which is not there"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{page.name} links to {target}: {sorted(anchors(path))}"


def test_the_readme_fits_two_screens_and_points_to_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    for page in (ROOT / "docs").glob("*.md"):
        linked = f"(docs/{page.name})" in text
        operating = (ROOT / "docs/operating.md").read_text()
        assert linked or f"({page.name})" in operating, f"nothing links to {page.name}"


@pytest.mark.parametrize("script", ["results_page.py", "scheduling.py"])
def test_the_pages_made_of_results_are_current(script: str) -> None:
    # A process of its own, because modules there have the names of modules here.
    check = subprocess.run(
        [sys.executable, ROOT / "benches" / script, "--check"], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stdout + check.stderr


def test_the_architecture_page_names_every_room_and_only_existing_paths() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = {name for name in re.findall(r"`([\w./-]+)`", text) if name.endswith((".rs", "/"))}
    # Relative to the root, to src, or to the room that the line speaks of.
    places = [ROOT, ROOT / "src", *(folder for folder in (ROOT / "src").iterdir() if folder.is_dir())]
    missing = [name for name in named if not any((place / name).exists() for place in places)]
    assert not missing, f"ARCHITECTURE.md names {missing}, which are not there"
    rooms = {f"{folder.name}/" for folder in (ROOT / "src").iterdir() if folder.is_dir()}
    assert rooms <= named, f"ARCHITECTURE.md has no word on {rooms - named}"


def test_the_tables_of_measurements_equal_the_recorded_results() -> None:
    spec = importlib.util.spec_from_file_location("tables_of_results", ROOT / "benches" / "tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    page = tables.PAGE.read_text()
    named = {found["name"] for found in tables.MARKED.finditer(page)}
    assert named == set(tables.TABLES), "benches/cpu.md has a place for each of the tables, and for no other"
    assert page == tables.with_tables(page), "results were recorded: run `python benches/tables.py --write`"
