"""What a refusal must be: the right status, a sentence that helps, and a server that is none the worse for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import numpy as np
import pyarrow as pa
import pytest

import dovetail
from harness import Server

TABLE = pa.table({"k": [1, 2, 3], "s": ["a", "b", "c"], "f": [0.5, 1.5, 2.5], "l": [[1], [2], []]})


@contextmanager
def refused(kind: type[dovetail.Error], *sentence: str) -> Iterator[None]:
    """Expects exactly that error, with all of these words in its sentence, and none of gRPC's around it."""
    with pytest.raises(dovetail.Error) as caught:
        yield
    error = caught.value
    assert type(error) is kind, f"{type(error).__name__}: {error}"
    for words in sentence:
        assert words in str(error), f"{words!r} is not in {str(error)!r}"
    for noise in ("gRPC", "status:", "Error {", "panicked", "RecordBatch {"):
        assert noise not in str(error), str(error)


@contextmanager
def refused_raw(code: grpc.StatusCode, *sentence: str) -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as caught:
        yield
    error = caught.value
    assert error.code() is code, f"{error.code()}: {error.details()}"
    assert error.details(), f"{error.code()} without a sentence"
    for words in sentence:
        assert words in error.details(), f"{words!r} is not in {error.details()!r}"
    for noise in ("panicked", "Error {", "RecordBatch {"):
        assert noise not in error.details(), error.details()


def is_unharmed(server: Server, client: dovetail.Client, used: int = 0) -> None:
    """The server serves the next request, and holds no more memory than before."""
    client.put("next", {"k": [1, 2]})
    with client.join("next", "next", on="k") as result:
        assert sorted(result.table()["k"].to_pylist()) == [1, 2]
    client.drop("next")
    server.wait_for(lambda: server.arena_used() == used, f"host memory to be back at {used} bytes")
    server.wait_for(lambda: server.device_used() == 0, "device memory to be free again")


def patched(data: bytes, at: int, new: bytes) -> bytes:
    """The bytes with others in their place."""
    return data[:at] + new + data[at + len(new) :]


def slow_join(client: dovetail.Client, rows: int = 30_000) -> None:
    """Tables whose join has rows * rows rows: it runs until it is cancelled."""
    client.put("slow", pa.table({"k": np.zeros(rows, np.int64), "v": np.arange(rows)}), mode="replace")
