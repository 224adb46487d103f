"""No identifier uses a retired word. docs/glossary.md has the words in use."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = ["src/*.rs", "benches/*.rs", "tests/*.rs", "kernels/*.cu", "kernels/*.cuh"]
# Words of identifiers, in snake case, with what to say instead.
RETIRED = {
    "arrang(e|es|ed|ing|ement|ements|er)": "transform, or row layout",
    "carry|carries|carried|carrying|carrier": "payload, or move",
    "workshops?|shops?": "context, or cx",
    "crews?": "CPU pool",
    "seats?|seated": "slot",
    "waves?": "probe batch",
    "stretch|stretches|stretched": "stage, or slice",
    "spared": "savings, or saved",
    "hopeless": "unsatisfiable",
    "knobs?": "setting",
    "clerks?": "allocation worker",
    "chores?": "allocation request",
    "belts?": "staging ring",
    "graves?|bury|buries|buried|burial": "child process, or its end",
    "inscriptions?": "exit error",
    "forced": "overrides, or overridden",
    "unkeyed": "null keys",
    "hands?_over|handed_over": "record_stream",
    "gives?_way|gave_way|giving_way": "evict, or yield",
    "bookings?": "timeline",
    "homeless": "unplaceable",
}
SAVED = "a name in saved rates"
WIRE = "a name in explanations, which clients read"
# Uses that stay, by file and identifier, with the reason.
ALLOWED = {
    ("kernels/count_partitions.cu", "CARRY"): "the carry of an addition",
    ("src/cli/demo/tables.rs", "clerks"): "a table of the demo: TPC-H has clerks",
    ("src/planner/calibrate.rs", "sort_carry"): SAVED,
    ("src/planner/cost/phases.rs", "sort_carry"): SAVED,
    ("src/planner/rates.rs", "sort_carry"): SAVED,
    ("src/planner/tests/mod.rs", "sort_carry"): SAVED,
    ("src/planner/explain.rs", "carried"): WIRE,
    ("src/planner/tests/choice.rs", "carried"): WIRE,
}

SKIPPED = r"""//[^\n]*|/\*.*?\*/|\br(?P<hashes>\#*)".*?"(?P=hashes)|"(?:\\.|[^"\\])*"|'(?:\\[^\n']+|\\'|[^'\\\n])'"""
TOKEN = re.compile(rf"{SKIPPED}|(?P<identifier>\b[A-Za-z_]\w*)", re.DOTALL)
HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
WORDS = [(re.compile(rf"(?:^|_)({words})(?:_|$)"), instead) for words, instead in RETIRED.items()]


def retired(source: str) -> list[tuple[int, str, str, str]]:
    """The retired words in code: line, identifier, word, and what to say. Comments and strings are skipped."""
    found = []
    for token in TOKEN.finditer(source):
        if (identifier := token["identifier"]) is None:
            continue
        snake = HUMP.sub("_", identifier).lower()
        line = source.count("\n", 0, token.start()) + 1
        found += [(line, identifier, word[1], say) for pattern, say in WORDS if (word := pattern.search(snake))]
    return found


def test_the_scan_sees_identifiers_and_nothing_else() -> None:
    source = """// carry
    let r = r#"a "carry" {seat}"#; let c = '"'; fn give_way<'a>(CarriedRows: &'a str, waves_max: u8, wavelet: u8) {}
    /* crew */ "seat \\" crew"; HTTPCrew('\\'', b'"', shopping)"""
    found = [(line, identifier) for line, identifier, _, _ in retired(source)]
    assert found == [(2, "give_way"), (2, "CarriedRows"), (2, "waves_max"), (3, "HTTPCrew")]


def test_no_identifier_has_a_retired_word() -> None:
    listed = subprocess.run(["git", "ls-files", *CODE], cwd=ROOT, capture_output=True, text=True, check=True)
    files = listed.stdout.split()
    assert len(files) > 250
    found, used = [], set()
    for path in files:
        for line, identifier, word, say in retired((ROOT / path).read_text()):
            if (path, identifier) in ALLOWED:
                used.add((path, identifier))
            else:
                found.append(f"{path}:{line}: {identifier} has the retired word {word!r}; say {say}")
    found += [f"{path} has no {identifier}: delete it from ALLOWED" for path, identifier in ALLOWED.keys() - used]
    assert not found, "\n".join(found)
