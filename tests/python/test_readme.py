"""What the README shows works as it stands there, and ARCHITECTURE.md names what is there."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dovetail
from harness import ROOT, STOP_SECONDS, Server, StartFailed, binary

ADDRESS = "grpc://127.0.0.1:8815"


def blocks(language: str, heading: str | None = None) -> list[str]:
    """The blocks of code in a language, of the whole README or of one section."""
    text = (ROOT / "README.md").read_text()
    if heading:
        assert f"\n## {heading}\n" in text, f"README.md has no section {heading!r}"
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
    """The folder that the README's reader is in, with the tables of the demo in it."""
    folder = tmp_path_factory.mktemp("readme")
    [save] = [line for block in blocks("sh", "Try it") for line in block.splitlines() if "--save" in line]
    run(save.replace("demo", "demo --scale 0.001", 1), folder, server)
    return folder


def test_the_command_line_of_the_readme_works(files: Path, server: Server, client: dovetail.Client) -> None:
    [block] = blocks("sh", "Join from the command line")
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
    """The command lines of the section on servers, without what is said of them."""
    [block] = blocks("sh", "Run a server")
    return [line.split("#")[0].strip() for line in block.splitlines()]


def settings_of(line: str) -> dict[str, object]:
    words = shlex.split(line)
    assert words[:2] == ["dovetail", "serve"], line
    names = [word.removeprefix("--").replace("-", "_") for word in words[2::2]]
    return dict(zip(names, words[3::2], strict=True))


@pytest.mark.parametrize("line", [line for line in server_lines() if "--print-config" not in line])
def test_the_servers_of_the_readme_start_and_end_with_ctrl_c(tmp_path: Path, line: str) -> None:
    settings = settings_of(line)
    if "host_memory" in settings:
        # Of which this machine may have less.
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


def test_the_settings_in_the_readme_are_right(tmp_path: Path) -> None:
    def serve(*words: str, **env: str) -> str:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("DOVETAIL_")}
        command = [str(binary()), "serve", *words]
        done = subprocess.run(command, env={**clean, **env}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "dovetail serve --print-config" in server_lines()
    printed = serve("--print-config")
    text = (ROOT / "README.md").read_text().split("\n## Run a server\n")[1].split("\n## ")[0]
    for address, setting in (("127.0.0.1:8815", "listen"), ("127.0.0.1:8816", "admin-listen")):
        assert address in text and f'\n{setting} = "{address}"' in f"\n{printed}"
    flags = set(re.findall(r"--[a-z][a-z-]+", text))
    help_text = serve("--help")
    assert len(flags) > 10 and {flag for flag in flags if flag not in help_text} == set()
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


def anchors(page: Path) -> set[str]:
    """What links to sections of a page may name, as GitHub makes it of their headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_in_the_documentation_lead_somewhere() -> None:
    for page in [
        ROOT / "README.md",
        ROOT / "ARCHITECTURE.md",
        *ROOT.glob("kernels/**/*.md"),
        *ROOT.glob("clients/**/README.md"),
        *ROOT.glob("benches/*.md"),
    ]:
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            if link.startswith("https://"):
                continue
            name, _, section = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), f"{page} links to {link}"
            assert not section or section in anchors(target), f"{page} links to {link}, a section that is not there"
