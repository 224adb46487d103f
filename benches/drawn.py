"""Joins drawn at random, for benchmarks of choices: those of devices, and those of sets of devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
import pyarrow as pa

# Kinds of keys and payload columns, and how often each is drawn.
KINDS, WEIGHTS = ["int32", "int64", "text"], [4, 4, 1]


@dataclass(frozen=True)
class Join:
    """A join of a table of unique keys with one of keys drawn from `build_rows / match_ratio` of them.

    `key` and the payload columns are "int32", "int64" or "text", which has 20 bytes.
    """

    build_rows: int
    probe_rows: int
    key: str = "int64"
    build_payload: tuple[str, ...] = ("int64",)
    probe_payload: tuple[str, ...] = ("int64",)
    match_ratio: float = 1.0

    def tables(self) -> tuple[pa.Table, pa.Table, int]:
        """The build side, the probe side, and how many rows their join has."""
        generator = np.random.default_rng(self.build_rows)
        drawn = generator.integers(0, round(self.build_rows / self.match_ratio), self.probe_rows)
        build = self._table(generator, "b", generator.permutation(self.build_rows), self.build_payload)
        probe = self._table(generator, "p", drawn, self.probe_payload)
        return build, probe, int((drawn < self.build_rows).sum())

    def _table(self, generator: np.random.Generator, name: str, keys: np.ndarray, payload: tuple[str, ...]) -> pa.Table:
        drawn = (generator.integers(0, 1 << 31, len(keys)) for _ in payload)
        columns = (column(kind, values) for kind, values in zip(payload, drawn, strict=True))
        return pa.table({"k": column(self.key, keys), **{f"{name}{at}": values for at, values in enumerate(columns)}})

    def __str__(self) -> str:
        build = f"{self.build_rows} rows of {len(self.build_payload)}"
        probe = f"{self.probe_rows} rows of {len(self.probe_payload)}"
        return f"{build} and {probe} columns by {self.key}, {self.match_ratio:g} of them with a partner"


def column(kind: str, values: np.ndarray) -> pa.Array:
    """Numbers as a column."""
    if kind != "text":
        return pa.array(values.astype(kind))
    width, parts = 20, []
    for start in range(0, len(values), 1 << 22):
        part = values[start : start + (1 << 22), None] // 10 ** np.minimum(np.arange(width - 1, -1, -1), 18) % 10
        part[:, 0] = 0
        parts.append((part + ord("0")).astype(np.uint8).ravel())
    offsets = np.arange(0, (len(values) + 1) * width, width, dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.concatenate(parts) if parts else b"")]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)


def joins(count: int, seed: int, build_log2: tuple[float, float], ratio_log2: tuple[float, float]) -> Iterator[Join]:
    """So many joins, which follow from the seed.

    ``build_log2`` bounds the rows of the build side, and ``ratio_log2`` how many times as many the probe side has.
    """
    random = Random(seed)

    def payload() -> tuple[str, ...]:
        return tuple(random.choices(KINDS, WEIGHTS, k=random.randint(0, 3)))

    for _ in range(count):
        rows = round(2 ** random.uniform(*build_log2))
        yield Join(
            build_rows=rows,
            probe_rows=round(rows * 2 ** random.uniform(*ratio_log2)),
            key=random.choices(KINDS, WEIGHTS)[0],
            build_payload=payload(),
            probe_payload=payload(),
            match_ratio=random.choice([1.0, 1.0, 0.5, 0.125, 0.01]),
        )
