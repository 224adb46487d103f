"""What a program can tell of plain English in the comments of src/. It is a floor: a reader tells the rest."""

from __future__ import annotations

import re
import subprocess
from itertools import pairwise
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
# A module in a file of its own is described at the beginning of that file.
KINDS = r"(fn|struct|enum|union|trait|type|const|static) \w+|mod \w+ \{"
PUBLIC = re.compile(rf"\s*pub ((const|async|unsafe) )*({KINDS})")
ATTRIBUTE = re.compile(r"^ *#\[.*?\]\n", re.MULTILINE | re.DOTALL)
TEST_FILE = re.compile(r"/tests/|/(tests|testing)\.rs$")
TEST_CODE = "#[cfg(test)]\nmod tests {"


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


def undocumented(source: str) -> list[str]:
    """The public items without a doc comment. Fields and variants need one only for what their names do not say."""
    head = [] if source.startswith("//!") else ["the file itself"]
    lines = ATTRIBUTE.sub("", source.split(TEST_CODE)[0]).splitlines()
    pairs = [(above.strip(), PUBLIC.match(line)) for above, line in pairwise(lines)]
    return head + [item[0].strip() for above, item in pairs if item and not above.startswith("///")]


def sources() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "src/*.rs"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [path for path in listed.stdout.split() if path not in EXCEPT]
    assert len(files) > 250
    return files


def test_comments_are_plain() -> None:
    found = [fault for path in sources() for fault in faults(path)]
    assert not found, "\n".join(found)


def test_public_items_have_doc_comments() -> None:
    files = [path for path in sources() if not TEST_FILE.search(path)]
    found = [f"{path}: no doc comment: {item}" for path in files for item in undocumented((ROOT / path).read_text())]
    assert not found, "\n".join(found)


SAMPLE = """//! A file.
pub mod a;
/// Described.
#[derive(
    Debug,
)]
pub struct B {
    pub field: u8,
}
impl B {
    pub(crate) fn c() {}
    #[inline]
    pub const fn d() {}
}
#[cfg(test)]
mod tests {
    pub fn e() {}
}
"""


def test_a_missing_doc_comment_is_found() -> None:
    assert undocumented(SAMPLE) == ["pub const fn d"]
    assert undocumented("use a::b;") == ["the file itself"]
