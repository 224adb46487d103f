"""What is wrong gets a status code and a sentence that says what would be right, and leaves nothing behind.

After every test here the `client` fixture asserts that the server serves the next request and that its memory is free
again: once for a test function (and each of its parameters), whatever the number of bad inputs in it. Memory
that one of them left held would still be held then. Tests with a server of their own call :func:`refusals.is_unharmed`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import dovetail
from harness import Server, clean
from refusals import is_unharmed

TOKENS = """
# token tenant role weight
ann-writes  ann  writer
ann-reads   ann  reader
bob-writes  bob  writer 2
root        ops  admin
"""


@pytest.fixture
def client(server: Server) -> Iterator[dovetail.Client]:
    """A client of the shared server, which must be unharmed when the test is over."""
    with server.connect() as client:
        yield client
        clean(server, client)
        is_unharmed(server, client)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(TOKENS)
    return path
