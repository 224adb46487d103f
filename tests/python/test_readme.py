"""What the README shows works as it stands there, and ARCHITECTURE.md names what is there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dovetail
from harness import ROOT, Server, binary

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


def test_the_architecture_page_names_every_room_and_nothing_that_is_not_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = {name for name in re.findall(r"`([\w./-]+)`", text) if name.endswith((".rs", "/"))}
    # Relative to the root, to src, or to the room that the line speaks of.
    places = [ROOT, ROOT / "src", *(folder for folder in (ROOT / "src").iterdir() if folder.is_dir())]
    missing = [name for name in named if not any((place / name).exists() for place in places)]
    assert not missing, f"ARCHITECTURE.md names {missing}, which are not there"
    rooms = {f"{folder.name}/" for folder in (ROOT / "src").iterdir() if folder.is_dir()}
    assert rooms <= named, f"ARCHITECTURE.md has no word on {rooms - named}"


def test_links_in_the_documentation_lead_somewhere() -> None:
    for page in [
        ROOT / "README.md",
        ROOT / "ARCHITECTURE.md",
        ROOT / "kernels/README.md",
        *ROOT.glob("clients/**/README.md"),
        *ROOT.glob("benches/*.md"),
    ]:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{page} links to {link}"
