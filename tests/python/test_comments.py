"""What a program can tell of plain English in the comments of src/. It is a floor: a reader tells the rest."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WIDTH_MAX = 100
COMMENT = re.compile(r"^\s*(//[/!]?)(\s|$)(.*)$")
BEGINNINGS = re.compile(r"(What|Whether|Who|Of|As|Those|The same|So many)\b(?!:)")
RETIRED = "in the place of|so many|but for|at the most|at the least|had better|nobody|somebody|whoever|as it lies"
PHRASES = re.compile(rf"\b({RETIRED})\b", re.IGNORECASE)
# Its comments are those of a generated header.
EXCEPT = {"src/device/cuda/abi.rs"}
# Doc comments are the text of `--help` here, which is wrapped anew.
HELP = "src/cli/"


def faults(path: str) -> list[str]:
    """The faults of one file, each with its line: how doc comments begin, retired phrases, and width."""
    found = []
    is_within = False
    for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
        comment = COMMENT.match(line)
        if comment is None:
            is_within = False
            continue
        kind, _, text = comment.groups()
        if path.startswith(HELP) and kind == "///":
            continue
        is_doc = kind != "//"
        if len(line) > WIDTH_MAX:
            found.append(f"{path}:{number}: a comment of {len(line)} columns; {WIDTH_MAX} is the most")
        if is_doc and not is_within and (beginning := BEGINNINGS.match(text)):
            found.append(f"{path}:{number}: a doc comment begins with {beginning[0]!r}; begin with a noun or a verb")
        if phrase := PHRASES.search(text):
            found.append(f"{path}:{number}: {phrase[0]!r} is retired")
        is_within = is_doc
    return found


def test_comments_are_plain() -> None:
    listed = subprocess.run(["git", "ls-files", "src/*.rs"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [path for path in listed.stdout.split() if path not in EXCEPT]
    assert len(files) > 250
    found = [fault for path in files for fault in faults(path)]
    assert not found, "\n".join(found)
