"""The shell scripts: that bash can read them, and what `./bundle` makes, with stand-ins for all that takes minutes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

from harness import ROOT

BUNDLE = ROOT / "bundle"
SCRIPTS = [ROOT / "test", BUNDLE, *sorted((ROOT / "benches").rglob("*.sh"))]

# An archive made by ./bundle has tests/python, and not the script.
pytestmark = pytest.mark.skipif(not BUNDLE.exists(), reason="this is no clone of the repository")

COMMIT = "0123456789ab"


def run(*command: object, cwd: Path = ROOT, **env: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **{name: str(value) for name, value in env.items()}},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def check_script() -> str:
    """The script for the GPU host that ./bundle has in it."""
    return BUNDLE.read_text().split("<<'CHECK'\n")[1].split("\nCHECK\n")[0] + "\n"


def write_program(path: Path, text: str) -> Path:
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: str(script.relative_to(ROOT)))
def test_every_script_is_valid_bash(script: Path) -> None:
    read = run("bash", "-n", script)
    assert (read.returncode, read.stderr) == (0, "")


def test_the_script_of_an_archive_is_valid_bash(tmp_path: Path) -> None:
    check = tmp_path / "check"
    check.write_text(check_script())
    read = run("bash", "-n", check)
    assert (read.returncode, read.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments", [[], ["--help"], ["FILE", "--wheels"], ["FILE", "3.12"], ["FILE", "--wheel", "3.12"]], ids=" ".join
)
def test_bundle_prints_its_usage(tmp_path: Path, arguments: list[str]) -> None:
    file = tmp_path / "archive.tar.gz"
    said = run(BUNDLE, *[file if word == "FILE" else word for word in arguments])
    assert said.returncode == 2, said.stderr
    assert "./bundle FILE.tar.gz" in said.stdout and "set -e" not in said.stdout
    assert not file.exists()


def test_bundle_refuses_a_package_without_a_version_before_anything_is_built(tmp_path: Path) -> None:
    file = tmp_path / "archive.tar.gz"
    said = run(BUNDLE, file, "--wheels", "3.12", "numpy", "nonesuch", TMPDIR=tmp_path)
    assert said.returncode == 2, said.stderr
    assert "has no nonesuch" in said.stderr
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """What ./bundle makes, unpacked, where compilers only write programs that tell their name."""
    tools, made = tmp_path / "tools", tmp_path / "made"
    tools.mkdir()
    made.mkdir()
    built = {
        "build": [
            ("dovetail", "bin"),
            ("dovetail-bench", "bin"),
            ("joins", "bench"),
            ("peers", "bench"),
            ("primitives", "bench"),
            ("resident", "bench"),
        ],
        "test": [("dovetail", "lib"), ("joins", "test")],
    }
    for command, targets in built.items():
        said = [json.dumps({"reason": "build-finished"})]
        for name, kind in targets:
            program = write_program(made / f"{name}-{kind}", f"echo this is {name}-{kind}")
            target = {"name": name, "kind": [kind]}
            artifact = {"reason": "compiler-artifact", "target": target, "executable": str(program)}
            said.append(json.dumps(artifact))
        (made / command).write_text("\n".join(said) + "\n")
    write_program(tools / "cargo", f'cat "{made}/$1"')
    # Nothing is changed in the checkout.
    write_program(tools / "git", f'[[ " $* " == *" status "* ]] || echo {COMMIT}')
    write_program(tools / "strip", '[[ $1 != -o ]] || cp "$3" "$2"')
    nvcc = """while [[ $1 != -o ]]; do shift; done
printf '#!/usr/bin/env bash\\necho this is %s\\n' "$3" >"$2"
chmod +x "$2" """
    write_program(tools / "nvcc", nvcc)
    file = tmp_path / "archive.tar.gz"
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    bundled = run(BUNDLE, file, PATH=path, NVCC=tools / "nvcc", LIBRAFT=tmp_path, TMPDIR=made)
    assert bundled.returncode == 0, bundled.stderr
    assert not list(made.glob("tmp.*")), "no folder is left behind"
    folder = tmp_path / "archive"
    with tarfile.open(file) as packed:
        packed.extractall(folder, filter="data")
    return folder


def test_a_bundle_has_the_files_that_a_gpu_host_needs(archive: Path) -> None:
    says = {program.name: run(program).stdout.strip() for program in (archive / "bin").iterdir()}
    assert says == {
        "dovetail": "this is dovetail-bin",
        "dovetail-bench": "this is dovetail-bench-bin",
        "bench-joins": "this is joins-bench",
        "bench-peers": "this is peers-bench",
        "bench-primitives": "this is primitives-bench",
        "bench-resident": "this is resident-bench",
        "test-lib": "this is dovetail-lib",
        "test-joins": "this is joins-test",
        "gpu-micro": "this is micro.cu",
        "gpu-radix_join": "this is radix_join.cu",
        "gpu-cluster_join": "this is cluster_join.cu",
        "gpu-cuco_join": "this is cuco_join.cu",
    }
    assert (archive / "check").read_text() == check_script()
    assert (archive / "commit").read_text().strip() == COMMIT
    there = ["tests/python/test_device_faults.py", "tests/csv/cases.json", "clients/python/src/dovetail/__init__.py"]
    for path in [*there, "benches/gpu/run.sh", "benches/gpu/record.sh", "benches/plot.py"]:
        assert (archive / path).is_file(), path
    # Suites that ./check names are there.
    for name in ("oracle", "payloads", "dictionaries", "device_cache", "device_faults", "device_processes"):
        assert name.removeprefix("device_") in check_script(), name
        assert (archive / f"tests/python/test_{name}.py").is_file(), name
    for script in re.findall(r"measure (\w+\.py)", check_script()):
        assert (archive / "benches" / script).is_file(), script


def test_the_check_of_a_bundle_runs_the_requested_checks_and_names_those_that_failed(archive: Path) -> None:
    for unknown in ("help", "nonesuch"):
        said = run("./check", unknown, cwd=archive)
        assert said.returncode == 2 and "./check PART" in said.stdout, said.stdout
    said = run("./check", "rust", cwd=archive)
    assert said.returncode == 0, said.stdout
    assert "this is dovetail-lib" in said.stdout and "this is joins-test" in said.stdout and "all passed" in said.stdout
    failing = "echo 'test result: FAILED. 15 passed; 2 failed; 0 ignored'; exit 1"
    write_program(archive / "bin" / "test-joins", failing)
    said = run("./check", "rust", cwd=archive)
    assert said.returncode == 1 and "FAILED: tests of joins" in said.stdout, said.stdout
    # How each ended is written down.
    lines = [json.loads(line) for line in (archive / "results" / "gpu_checks.jsonl").read_text().splitlines()]
    ended = [(line["what"], line["outcome"], line["passed"], line["failed"]) for line in lines]
    primitives, joins = "tests of the primitives", "tests of joins"
    assert ended == [
        (primitives, "passed", 0, 0), (joins, "passed", 0, 0), (primitives, "passed", 0, 0), (joins, "failed", 15, 2),
    ]  # fmt: skip
    assert all(line["benchmark"] == "gpu_checks" and line["commit"] == COMMIT for line in lines)
    assert lines[0]["command"].startswith("DOVETAIL_TEST_DEVICE=cuda ")
    assert lines[0]["command"].endswith(" bin/test-lib device::cuda")
    said = run("./check", "suites", cwd=archive, SUITES="wu-7 q95")
    assert said.returncode == 0 and said.stdout.count("this is dovetail-bench-bin") == 2, said.stdout
    # Without a Python that can run the suites they are left out, and that is said.
    said = run("./check", "python", "faults", cwd=archive, PYTHON=archive / "nowhere")
    assert said.returncode == 0, said.stdout
    assert said.stdout.count("skipped: Python suite") == 3 and "all passed" not in said.stdout, said.stdout
