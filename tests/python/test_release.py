"""The packages of a release, made of the binary under test: `./test long packages`."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from harness import LONG, ROOT, binary

pytestmark = pytest.mark.skipif(not LONG, reason="./test long packages runs it")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("release") / "made"
    # Installs what it made in an empty environment, and runs the demo there.
    command = [sys.executable, ROOT / "release/make", folder, "--binary", binary(), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "work in an empty environment" in done.stdout
    return folder


def one(folder: Path, pattern: str) -> Path:
    [path] = folder.glob(pattern)
    return path


def test_the_archive_has_the_binary_pages_completions_and_the_licence(made: Path) -> None:
    with tarfile.open(one(made, "dovetail-*.tar.gz")) as tar:
        modes = {member.name.split("/", 1)[1]: member.mode for member in tar.getmembers()}
    assert {"LICENSE", "CHANGELOG.md", "man/man1/dovetail.1", "man/man1/dovetail-serve.1"} <= set(modes)
    assert {"completions/bash/dovetail", "completions/zsh/_dovetail", "completions/fish/dovetail.fish"} <= set(modes)
    assert modes["dovetail"] == 0o755
    for line in (made / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((made / name).read_bytes()).hexdigest() == digest


def test_the_same_binary_makes_the_same_archive(made: Path, tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "release/make", tmp_path / "again", "--binary", binary()]
    subprocess.run(command, check=True, capture_output=True)
    for pattern in ("dovetail_server-*.whl", "*.cdx.json"):
        first, second = one(made, pattern), one(tmp_path / "again", pattern)
        assert first.name == second.name and first.read_bytes() == second.read_bytes(), pattern
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "give an empty folder" in refused.stderr


def test_the_wheel_runs_where_its_tag_says(made: Path) -> None:
    wheel = one(made, "dovetail_server-*.whl")
    [minor] = re.findall(r"manylinux_2_(\d+)_", wheel.name)
    # Debian 12 has 2.36, and the image is made of it.
    assert int(minor) <= 36
    with zipfile.ZipFile(wheel) as files:
        record = one_line(files, ".dist-info/RECORD")
        assert all(name in record for name in files.namelist())
        assert "Name: dovetail-server\n" in one_line(files, ".dist-info/METADATA")


def one_line(files: zipfile.ZipFile, end: str) -> str:
    [name] = [name for name in files.namelist() if name.endswith(end)]
    return files.read(name).decode()


def test_the_bill_of_materials_names_every_crate_with_its_licence(made: Path, tmp_path: Path) -> None:
    bill = json.loads(one(made, "*.cdx.json").read_text())
    assert bill["metadata"]["component"]["name"] == "dovetail"
    locked = {
        f"{name}@{version}"
        for name, version in re.findall(
            r'\[\[package\]\]\nname = "(.*)"\nversion = "(.*)"\n', (ROOT / "Cargo.lock").read_text()
        )
    }
    named = {f"{component['name']}@{component['version']}" for component in bill["components"]}
    assert named < locked and len(named) > 200
    assert {"arrow-flight", "tonic", "tokio"} <= {component["name"] for component in bill["components"]}
    # Only tests need these.
    assert not {"cbindgen", "rcgen"} & {component["name"] for component in bill["components"]}
    assert all(component["licenses"][0]["expression"] for component in bill["components"])
    # The reference library reads it by the schema of CycloneDX.
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    install = [environment / "bin/pip", "install", "--quiet", "cyclonedx-python-lib[json-validation]==11.12.0"]
    subprocess.run(install, check=True)
    program = (
        "import sys; from cyclonedx.validation.json import JsonStrictValidator as V; "
        "from cyclonedx.schema import SchemaVersion; "
        "error = V(SchemaVersion.V1_5).validate_str(open(sys.argv[1]).read()); sys.exit(str(error) if error else 0)"
    )
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([environment / "bin/python", "-c", program, one(made, "*.cdx.json")], check=True, env=clean)
