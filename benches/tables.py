"""Makes the tables of benches/cpu.md from the newest lines in results/*.jsonl.

    python benches/tables.py            prints them
    python benches/tables.py --write    puts them into benches/cpu.md, between the marks that name them

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. Each says at its end of which commit and day its
numbers are. A table whose results nobody has recorded yet says so, and how to record them.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER / "cpu.md"

Line = dict[str, Any]

MARKED = re.compile(r"(?P<begin><!-- table: (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)

ENGINES = {"dovetail": "Dovetail", "duckdb": "DuckDB", "polars": "Polars", "datafusion": "DataFusion"}
WORKLOADS = ["int4", "int8", "string", "tpch"]

PRIMITIVES = {
    "partition/11-bits": "partition with 4 bytes of payload: 11 bits, one pass",
    "partition/13-bits": "the same: 13 bits, two passes",
    "sort": "sort with 4 bytes of payload",
    "build_table": "build a hash table of 2^21 distinct keys",
    "probe_table": "probe that table",
    "match_partitions": "match within partitions",
    "group_partitions": "group partitions, every key on two rows",
    "group_partitions/heavy-key": "group partitions, half of the rows with one key",
    "build_filter": "build a filter of 2^21 keys",
    "filter_keys": "apply a filter of 2^17 keys, which one row in sixteen passes",
}

SERVERS = [
    ("DoPut", "dovetail", "DoPut, Dovetail, stores the table"),
    ("DoPut", "pyarrow, keeps the table", "DoPut, pyarrow, stores the table"),
    ("DoPut", "pyarrow, DISCARDS all (not a store)", "DoPut, pyarrow, discards"),
    ("DoGet", "dovetail", "DoGet, Dovetail"),
    ("DoGet", "pyarrow, keeps the table", "DoGet, pyarrow"),
]


def lines_of(name: str) -> list[Line]:
    """The lines of a file of results, oldest first; none when nobody has recorded any."""
    path = FOLDER / "results" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def newest_run(lines: Iterable[Line], is_whole: Callable[[list[Line]], bool] = bool) -> list[Line]:
    """Of these lines, those of the run that was begun last and has all that its table shows."""
    runs: dict[str, list[Line]] = {}
    for line in lines:
        runs.setdefault(line["date"], []).append(line)
    return next((runs[date] for date in sorted(runs, reverse=True) if is_whole(runs[date])), [])


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [heading, ["---" for _ in heading], *rows])


def recorded(*runs: Sequence[Line]) -> str:
    """Where the numbers are from."""
    heads = dict.fromkeys((run[0]["commit"], run[0]["date"][:10], machine(run[0])) for run in runs)
    return "\n\n" + "; ".join(f"Commit {commit}, {date}, {where}" for commit, date, where in heads) + "."


def machine(line: Line) -> str:
    about = line["machine"]
    cores = line.get("cores", about["cores"])
    return f"{cores} {'core' if cores == 1 else 'cores'} of {about['cpu']}"


def nothing(command: str) -> str:
    return f"Not recorded yet: `{command}`."


def seconds(run: Line) -> float:
    """What a caller waits for: of Dovetail with the result at the client, of DuckDB the faster of two ways."""
    timings: dict[str, float] = run["median_seconds"]
    return timings.get("through the client", min(timings.values()))


def peers() -> dict[str, dict[str, Line]]:
    """By workload and engine: the newest run on the CPU in which Dovetail and DuckDB took turns."""
    on_cpu = [line for line in lines_of("joins_vs_peers") if not str(line.get("devices") or "host").startswith("cuda")]
    # A run on a GPU has lines of the peers too, which its head tells apart.
    on_cpu = [line for line in on_cpu if "--devices cuda" not in line["command"]]

    def compares(run: list[Line]) -> bool:
        return {"dovetail", "duckdb"} <= {line["engine"] for line in run}

    found = {}
    for workload in WORKLOADS:
        run = newest_run((line for line in on_cpu if line["workload"] == workload), compares)
        if run:
            found[workload] = {line["engine"]: line for line in run}
    return found


def joins() -> str:
    found = peers()
    if not found:
        return nothing("python benches/joins_vs_peers.py")
    rows = []
    for workload, engines in found.items():
        times = [f"{seconds(engines[engine]):.2f} s" if engine in engines else "" for engine in ENGINES]
        ratio = f"{seconds(engines['duckdb']) / seconds(engines['dovetail']):.1f} ×"
        rows.append([f"`{workload}`", *times, ratio])
    heading = ["join", *ENGINES.values(), "against DuckDB"]
    return table(heading, rows) + recorded(*([engines["dovetail"]] for engines in found.values()))


def memory() -> str:
    found = peers()
    if not found:
        return nothing("python benches/joins_vs_peers.py")

    def mark(line: Line | None) -> str:
        return f"{line['memory_max_bytes'] / 1e6:,.0f} / {line['memory_increase_bytes'] / 1e6:,.0f}" if line else ""

    rows = []
    for workload, engines in found.items():
        tables = f"{engines['dovetail']['input_bytes'] / 1e6:,.0f}"
        rows.append([f"`{workload}`", tables, *(mark(engines.get(engine)) for engine in ENGINES)])
    heading = ["join, MB", "tables", *ENGINES.values()]
    return table(heading, rows) + recorded(*([engines["dovetail"]] for engines in found.values()))


def primitives() -> str:
    # Those of a GPU are not for this table.
    lines = [line for line in lines_of("primitives") if line.get("device", "host").startswith("host")]
    run = newest_run(lines, lambda run: PRIMITIVES.keys() <= {line["name"] for line in run})
    if not run:
        return nothing("cargo bench -p dovetail-bench --bench primitives -- --record")
    nanoseconds = {(line["name"], line["width"]): 1e9 * line["seconds"] / line["rows"] for line in run}
    rows = [
        [what, *(f"{nanoseconds[name, width]:.1f}" if (name, width) in nanoseconds else "" for width in (4, 8, 16))]
        for name, what in PRIMITIVES.items()
    ]
    return table(["primitive", "4-byte keys", "8-byte keys", "16-byte keys"], rows) + recorded(run)


def flight() -> str:
    shown = {(rpc, server) for rpc, server, _ in SERVERS}
    run = newest_run(lines_of("flight_vs_pyarrow"), lambda run: shown <= {(x["rpc"], x["server"]) for x in run})
    if not run:
        return nothing("python benches/flight_vs_pyarrow.py")
    by = {(line["rpc"], line["server"], line["streams"]): line for line in run}
    streams = sorted({line["streams"] for line in run})

    def cell(line: Line | None) -> str:
        if not line:
            return ""
        cell = f"{line['gb_per_second']:.1f} GB/s, {line['server_cpu_seconds_per_gb']:.2f} s"
        times = line.get("all_times_discarding") if line["server"] == "dovetail" else None
        if not times:
            return cell
        return f"{cell}; {line['times_discarding']:.2f} times discarding ({min(times):.2f} to {max(times):.2f})"

    rows = [[what, *(cell(by.get((rpc, server, count))) for count in streams)] for rpc, server, what in SERVERS]
    heading = ["", *(f"{count} {'stream' if count == 1 else 'streams'}" for count in streams)]
    return table(heading, rows) + recorded(run)


def demo() -> str:
    run = newest_run(lines_of("demo"))
    if not run:
        return nothing("python benches/demo.py")
    rows = [
        [
            f"{line['scale']}",
            f"{line['median_seconds']:.1f} s",
            f"{line['seconds_min']:.1f} to {line['seconds_max']:.1f} s",
            f"{line['memory_max_bytes'] / 1e6:,.0f} MB",
        ]
        for line in run
    ]
    return table(["scale factor", "median", "range", "peak memory"], rows) + recorded(run)


def life() -> str:
    run = newest_run(lines_of("life"))
    if not run:
        return nothing("./test long life")
    rows = [
        [
            f"{line['clients']}",
            f"{line['seconds']:.0f} s",
            f"{line['joins']:,}",
            f"{line['joins'] / line['seconds']:.1f}",
            f"{line['bytes'] / 1e9:.2f} GB",
            line["build"],
        ]
        for line in run
    ]
    heading = ["clients", "time", "joins", "joins per second", "bytes, up and down", "build"]
    return table(heading, rows) + recorded(run)


TABLES: dict[str, Callable[[], str]] = {
    "joins": joins,
    "memory": memory,
    "primitives": primitives,
    "flight": flight,
    "demo": demo,
    "life": life,
}


def with_tables(text: str) -> str:
    """A page with the tables that it has marks for made anew."""

    def made(found: re.Match[str]) -> str:
        return f"{found['begin']}{TABLES[found['name']]()}\n{found['end']}"

    return MARKED.sub(made, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put them into benches/cpu.md")
    if parser.parse_args().write:
        PAGE.write_text(with_tables(PAGE.read_text()))
        return
    for name, make in TABLES.items():
        print(f"{name}\n\n{make()}\n")


if __name__ == "__main__":
    main()
