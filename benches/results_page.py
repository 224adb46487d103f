"""Makes docs/results.md, its chart and the table of the README from the newest lines in results/*.jsonl.

    python benches/results_page.py            prints the page
    python benches/results_page.py --write    writes docs/results.md and docs/results.svg, and the table of README.md
    python benches/results_page.py --check    fails if one of them is not current

A table has the numbers of one commit on one host, except where it says otherwise. A table without recorded
results says so, and how to record them.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tables import ENGINES, WORKLOADS, Line, lines_of, newest_run, nothing, peers, seconds, table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results.md"
CHART = ROOT / "docs" / "results.svg"
README = ROOT / "README.md"

JOINS = {
    "int4": "2^24 with 2^25 rows, keys of 4 bytes",
    "int8": "2^24 with 2^25 rows, keys of 8 bytes",
    "string": "2^22 with 2^23 rows, text keys",
    "tpch": "orders with lineitem, scale factor 1",
}
SUITE_SECONDS_MIN = 0.02
SWEEP_COMMAND = "python benches/joins_vs_peers.py --workloads wide --engines dovetail duckdb --rows N, for each size"


def host(line: Line) -> str:
    """The host of a line, in words."""
    about = line["machine"]
    if isinstance(about, str):
        return about
    gpu = f", {about['gpu']}" if about.get("gpu") else ""
    cores = line.get("cores") or about["cores"]
    return f"{cores} {'core' if cores == 1 else 'cores'} of {about['cpu']}{gpu}"


def recorded(*lines: Line) -> str:
    heads = dict.fromkeys((line["commit"].removesuffix("-dirty")[:7], line["date"][:10], host(line)) for line in lines)
    told = "; ".join(f"commit {commit}, {date}, {where}" for commit, date, where in heads)
    return f"\n\nC{told[1:]}."


def time(seconds: float) -> str:
    """A time with three digits, in the unit that fits."""
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1e3, "ms")
    return f"{value:.{max(0, 2 - int(math.floor(math.log10(value))))}f} {unit}"


def power(rows: int) -> str:
    exponent = int(math.log2(rows))
    return f"2^{exponent}" if 1 << exponent == rows else f"{rows:,}"


def pairs_of(lines: Iterable[Line], key: Callable[[Line], Any]) -> dict[Any, dict[str, Line]]:
    """By key, the newest run in which Dovetail and DuckDB took turns. With several numbers of streams, the fastest."""
    found: dict[Any, dict[str, Line]] = {}
    runs: dict[tuple[Any, str], list[Line]] = {}
    for line in lines:
        runs.setdefault((key(line), line["command"] + line["date"]), []).append(line)
    for (value, _), run in sorted(runs.items(), key=lambda entry: entry[1][0]["date"]):
        engines: dict[str, Line] = {}
        for line in sorted(run, key=seconds, reverse=True):
            engines[line["engine"]] = line
        if {"dovetail", "duckdb"} <= engines.keys():
            found[value] = engines
    return found


def wide(on_gpu: bool) -> dict[int, dict[str, Line]]:
    """Runs of `wide`, by rows of a side, on a GPU or on the CPU: those of the newest commit and host."""
    lines = [line for line in lines_of("joins_vs_peers") if line["workload"] == "wide"]
    lines = [line for line in lines if ("--devices cuda" in line["command"]) == on_gpu]
    # Each side has as many rows, and the right side finds one match for each.
    found = pairs_of(lines, lambda line: line["result_rows"])
    heads = [(engines["dovetail"]["commit"], host(engines["dovetail"])) for engines in found.values()]
    return {rows: found[rows] for rows, head in zip(found, heads, strict=True) if head == heads[-1]}


def sweep() -> dict[int, dict[str, Line]]:
    found = wide(on_gpu=False)
    return dict(sorted(found.items())) if len(found) > 2 else {}


def pays_from(found: dict[int, dict[str, Line]]) -> int | None:
    """The least number of rows from which on Dovetail is faster, at every size that was measured."""
    slower = [rows for rows, each in found.items() if seconds(each["dovetail"]) >= seconds(each["duckdb"])]
    return min((rows for rows in found if rows > max(slower, default=0)), default=None)


def against(engines: dict[str, Line]) -> list[str]:
    ours, theirs = seconds(engines["dovetail"]), seconds(engines["duckdb"])
    return [time(theirs), time(ours), f"{theirs / ours:.1f} ×"]


def readme() -> str:
    rows, lines = [], []
    cpu = peers()
    for workload in ("int8", "tpch"):
        if workload in cpu:
            rows.append(["2 cores", JOINS[workload], *against(cpu[workload])])
            lines.append(cpu[workload]["dovetail"])
    for size, engines in wide(on_gpu=True).items():
        rows.append(["1 H200, 16 cores", f"{power(size)} with {power(size)} rows, three columns", *against(engines)])
        lines.append(engines["dovetail"])
    found = sweep()
    least = pays_from(found)
    lines += [engines["dovetail"] for engines in found.values()]
    text = table(["host", "join", "DuckDB", "Dovetail", "ratio"], rows) + recorded(*lines)
    if not found:
        return text
    smallest = min(found)
    ours, theirs = (time(seconds(found[smallest][engine])) for engine in ("dovetail", "duckdb"))
    example = f"{power(smallest)} with {power(smallest)} rows take {ours} here and {theirs} there"
    if least is None:
        return text + f"\n\nOn two cores, DuckDB in the process is faster at every size that was measured: {example}."
    return text + (
        f"\n\nOn two cores it pays from about {power(least)} rows on each side. For smaller tables, DuckDB in the "
        f"process is the better tool: {example}, because a request and a stream cost milliseconds. Uploading is not in "
        "these times: a server pays for tables that are joined more than once, or by several clients."
    )


def cpu_joins() -> str:
    found = peers()
    if not found:
        return nothing("python benches/joins_vs_peers.py")
    rows = []
    for workload in WORKLOADS:
        if workload in found:
            engines = found[workload]
            others = [time(seconds(engines[name])) if name in engines else "" for name in ENGINES if name != "dovetail"]
            ratio = f"{seconds(engines['duckdb']) / seconds(engines['dovetail']):.1f} ×"
            rows.append([JOINS[workload], *others, time(seconds(engines["dovetail"])), ratio])
    names = [name for key, name in ENGINES.items() if key != "dovetail"]
    heading = ["join", *names, "Dovetail", "against DuckDB"]
    return table(heading, rows) + recorded(*(engines["dovetail"] for engines in found.values()))


def sizes() -> str:
    found = sweep()
    if not found:
        return nothing(SWEEP_COMMAND)
    rows = [[f"{power(size)} with {power(size)}", *against(engines)] for size, engines in found.items()]
    lines = [engines["dovetail"] for engines in found.values()]
    return table(["rows", "DuckDB", "Dovetail", "ratio"], rows) + recorded(*lines)


def gpu_client() -> str:
    found = wide(on_gpu=True)
    if not found:
        return nothing("python benches/joins_vs_peers.py --devices cuda:1 --workloads wide --rows 134217728")
    rows = []
    for size, engines in found.items():
        ours = engines["dovetail"]
        join = time(ours["median_seconds"]["join"])
        rows.append([f"{power(size)} with {power(size)}, {ours['streams']} streams", *against(engines), join])
    heading = ["rows", "DuckDB", "Dovetail", "ratio", "the join alone"]
    return table(heading, rows) + recorded(*(engines["dovetail"] for engines in found.values()))


def suites() -> str:
    """Joins of published sizes from host memory to host memory, beside the floor of the link, of one commit."""
    commits: dict[str, list[Line]] = {}
    for line in lines_of("bench"):
        if line["device"] == "NVIDIA H200" and line["suite"] != "choices" and line.get("floor_seconds"):
            commits.setdefault(line["version"], []).append(line)
    whole = [run for run in commits.values() if len({line["suite"] for line in run}) >= 10]
    if not whole:
        return nothing("dovetail-bench SUITE --device cuda:0 --out benches/results/bench.jsonl")
    run = whole[-1]
    shape = ("suite", "build_rows", "probe_rows", "types", "zipf", "nulls", "copies", "match_ratio", "keys")
    fastest: dict[tuple[Any, ...], Line] = {}
    for line in run:
        key = tuple(str(line.get(name)) for name in shape)
        if key not in fastest or line["seconds"] < fastest[key]["seconds"]:
            fastest[key] = line
    # Shorter joins are bound by calls.
    long = [line for line in fastest.values() if line["seconds"] >= SUITE_SECONDS_MIN]
    rows = []
    for suite in dict.fromkeys(line["suite"] for line in long):
        of = [line for line in long if line["suite"] == suite]
        shares = sorted(100 * line["floor_seconds"] / line["seconds"] for line in of)
        times = sorted(line["seconds"] for line in of)
        span = f"{time(times[0])} to {time(times[-1])}" if len(times) > 1 else time(times[0])
        share = " to ".join(dict.fromkeys(f"{share:.0f}" for share in (shares[0], shares[-1]))) + " %"
        # A line divides the cells of a table.
        rows.append([f"`{suite}`: {of[0]['about']}".replace("|", "\\|"), str(len(of)), span, share])
    commit = run[-1]["version"].split("(")[1].rstrip(")")[:7]
    where = f"\n\nCommit {commit}, {run[-1]['date'][:10]}, {run[-1]['device']}."
    return table(["suite", "joins", "time", "of the link's floor"], rows) + where


def resident() -> str:
    """Joins in a GPU's memory beside those composed of cuCollections, of one commit."""
    theirs = [line for line in lines_of("gpu_cuco_join") if line["table"] == "static_set" and not line["sparse"]]
    if not theirs:
        return nothing("benches/gpu/run.sh cuco_join")
    commit = theirs[-1]["commit"]

    def shape(line: Line) -> tuple[int, int, int, int]:
        return (line["build_rows"], line["probe_rows"], line.get("width") or line["key_bytes"], line["payloads"])

    ours = {
        shape(line): line
        for line in lines_of("resident")
        if line["commit"] == commit and not (line["count"] or line["zipf"] or line["sparse"])
    }
    # The last of each shape.
    of_theirs = {shape(line): line for line in theirs if line["commit"] == commit}
    rows, lines = [], []
    for key in sorted(ours.keys() & of_theirs.keys()):
        build, probe, width, payloads = key
        mine, other = ours[key]["seconds_median"], of_theirs[key]["milliseconds"] / 1e3
        what = f"{power(build)} with {power(probe)}, keys of {width} bytes, {payloads} + {payloads} payload columns"
        rows.append([what, time(other), time(mine), f"{other / mine:.1f} ×"])
        lines.append(ours[key])
    if not rows:
        return nothing("cargo bench -p dovetail-bench --bench resident -- --device cuda:0 --record")
    return table(["join", "cuCollections", "Dovetail", "ratio"], rows) + recorded(*lines[:1])


def newest_head(lines: Iterable[Line]) -> list[Line]:
    """The lines of the commit and host of the last line."""
    known = list(lines)
    if not known:
        return []
    head = (known[-1]["commit"], host(known[-1]))
    return [line for line in known if (line["commit"], host(line)) == head]


GANG_WORKLOADS = {
    "narrow": "two columns",
    "wide": "five columns",
    "text": "text keys",
    "zipf-0.5": "Zipf 0.5",
    "hmg-a": "HMG A",
    "hmg-b": "HMG B",
}


NUMBERS = {1: "one GPU", 2: "two GPUs", 3: "three GPUs", 4: "four GPUs"}


def gang_table(run: list[Line]) -> str:
    """Joins on several devices, each by its fastest distribution. The floor is the one that the same run measured."""
    joins: dict[tuple[str, int, int, bool], dict[int, Line]] = {}
    for line in run:
        if line.get("is_chosen") or line["workload"] not in GANG_WORKLOADS:
            continue
        fastest = joins.setdefault((line["workload"], line["build_rows"], line["probe_rows"], line["count"]), {})
        ranks = line["ranks"]
        if ranks not in fastest or line["seconds"] < fastest[ranks]["seconds"]:
            fastest[ranks] = line
    most = max(ranks for fastest in joins.values() for ranks in fastest)
    rows = []
    for (workload, build, probe, count), fastest in sorted(joins.items(), key=lambda join: not join[0][3]):
        what = f"{GANG_WORKLOADS[workload]}: {power(build)} with {power(probe)}{'' if count else ', written'}"
        times = [
            f"{time(fastest[ranks]['seconds'])}{'' if ranks == 1 else ', ' + fastest[ranks]['distribution']}"
            if ranks in fastest
            else "too large"
            for ranks in range(1, most + 1)
        ]
        best = min(fastest.values(), key=lambda line: line["seconds"])
        share = f"{100 * best['floor_seconds'] / best['seconds']:.0f} %"
        ratio = f"{fastest[1]['seconds'] / best['seconds']:.2f} ×" if 1 in fastest else ""
        rows.append([what, *times, ratio, share])
    heading = ["join", *(NUMBERS[ranks] for ranks in range(1, most + 1)), "ratio", "of the floor"]
    return table(heading, rows) + beyond(joins.values()) + recorded(run[-1])


def beyond(joins: Iterable[dict[int, Line]]) -> str:
    """Names a join that N devices run more than N times as fast as one, and by another strategy."""
    for fastest in joins:
        for ranks, line in sorted(fastest.items()):
            alone = fastest.get(1, line)
            if alone["strategy"] != line["strategy"] and alone["seconds"] > ranks * line["seconds"]:
                what = f"{GANG_WORKLOADS[line['workload']]}, {power(line['build_rows'])} with"
                what = f"{what} {power(line['probe_rows'])}, is more than {NUMBERS[ranks].split()[0]} times as fast on"
                return (
                    f"\n\n{what} {NUMBERS[ranks]}: one GPU joins it by the strategy `{alone['strategy']}`, and each of "
                    f"several its part of the rows by the strategy `{line['strategy']}`."
                )
    return ""


def two_gpus() -> str:
    lines = [line for line in lines_of("gangs") if line.get("devices") == "cuda:2"]
    lines = [line for line in lines if not line["commit"].endswith("-dirty") and line.get("floor_seconds")]
    # Later runs have a few joins only.
    whole = {line["commit"] for line in lines if line["workload"] == "hmg-b"}
    run = newest_head(line for line in lines if line["commit"] in whole)
    return gang_table(run) if run else nothing("python benches/gangs.py --devices cuda:2")


def four_gpus() -> str:
    lines = [line for line in lines_of("gangs") if line.get("devices") == "cuda:4" and line.get("floor_seconds")]
    run = newest_head(lines)
    return gang_table(run) if run else nothing("python benches/gangs.py --devices cuda:4")


def exchange() -> str:
    run = newest_head(line for line in lines_of("peers") if line["case"] in ("nccl", "push"))
    nccl: dict[int, float] = {}
    ours: dict[int, float] = {}
    for line in run:
        of = nccl if line["case"] == "nccl" else ours if line["case"] == "push" else {}
        of[line["bytes"]] = max(line["bytes_per_second"], of.get(line["bytes"], 0.0))
    if not nccl or not ours:
        return nothing("cargo bench -p dovetail-bench --bench peers")
    rows = [
        [
            f"{size >> 20} MiB",
            f"{nccl[size] / 1e9:.0f} GB/s",
            f"{ours[size] / 1e9:.0f} GB/s",
            f"{ours[size] / nccl[size]:.2f} ×",
        ]
        for size in sorted(nccl.keys() & ours.keys())
    ]
    return table(["from each GPU to each other", "NCCL", "Dovetail", "ratio"], rows) + recorded(run[-1])


def flight() -> str:
    lines = lines_of("flight_vs_pyarrow")
    run = newest_run(
        lines, lambda run: {("DoPut", "dovetail"), ("DoGet", "dovetail")} <= {(x["rpc"], x["server"]) for x in run}
    )
    if not run:
        return nothing("python benches/flight_vs_pyarrow.py")
    by = {(line["rpc"], line["server"], line["streams"]): line for line in run}
    rows = []
    for rpc, peer in (("DoPut", "pyarrow, keeps the table"), ("DoGet", "pyarrow, keeps the table")):
        for streams in sorted({line["streams"] for line in run}):
            theirs, mine = by.get((rpc, peer, streams)), by.get((rpc, "dovetail", streams))
            if theirs and mine:
                rates = [f"{line['gb_per_second']:.2f} GB/s" for line in (theirs, mine)]
                costs = [f"{line['server_cpu_seconds_per_gb']:.2f} s" for line in (theirs, mine)]
                rows.append([rpc, str(streams), rates[0], rates[1], costs[0], costs[1]])
    heading = ["call", "streams", "pyarrow", "Dovetail", "CPU per GB, pyarrow", "CPU per GB, Dovetail"]
    return table(heading, rows) + recorded(run[0])


def abuses() -> str:
    """What each abuse takes and what it does to others, before these limits existed and with them."""
    of: dict[str, dict[str, Line]] = {}
    for line in lines_of("abuse"):
        of.setdefault(line["label"], {})[line["abuse"]] = line
    before, after = of.get("before", {}), of.get("after", {})
    rows = []
    for name, line in after.items():
        was = before.get(name)
        if was is None:
            continue
        told: list[Callable[[Line], str]] = [
            lambda one: f"{one['held']:,}",
            lambda one: f"{one['grown_mib']:.0f} MiB",
            lambda one: time(one["worst_healthz_seconds"]),
            lambda one: time(one["worst_join_seconds"]),
        ]
        cells = [f"{of_one(was)}, {of_one(line)}" for of_one in told]
        rows.append([name.replace("_", " "), f"{line['offered']:,}", *cells])
    if not rows:
        return nothing("python benches/abuse.py --label after, and with an earlier binary --label before")
    heading = ["abuse", "tried", "held", "memory", "worst `/healthz`", "worst small join"]
    versions = [next(iter(of_one.values()))["version"] for of_one in (before, after)]
    last = next(iter(after.values()))
    told = f"\n\nVersions {versions[0]} and {versions[1]}, {last['date'][:10]}, {host(last)}."
    return table(heading, rows) + told


def streams() -> str:
    """On a GPU, and on the CPU."""
    runs = [
        newest_head(line for line in lines_of("streams") if line["device"].startswith(kind))
        for kind in ("cuda", "host")
    ]
    return "\n\n".join(map(stream_run, filter(None, runs))) or nothing("python benches/streams.py")


def stream_run(run: list[Line]) -> str:
    rows = [
        [
            f"{line['rows']:,}",
            str(line["clients"]),
            time(line["median_seconds"]),
            time(line["p99_seconds"]),
        ]
        for line in run
        if line["case"] == "questions"
    ]
    flowing = [
        [
            str(line["clients"]),
            f"{line['rows'] / 1e6:.0f} million",
            f"{line['rows_per_second'] / 1e6:.1f}",
            f"{line['put_rows_per_second'] / 1e6:.1f}",
            f"{line['get_rows_per_second'] / 1e6:.1f}",
            f"{(line['memory_max_bytes'] - line['memory_before_bytes']) / 2**20:.0f} MiB",
        ]
        for line in run
        if line["case"] == "rate"
    ]
    device = "a GPU" if run[0]["device"].startswith("cuda") else "the CPU"
    questions = table(["rows of a question", "clients", "median", "99th percentile"], rows)
    rates = table(
        ["streams", "rows", "million rows/s", "uploaded by DoPut", "read by DoGet", "more memory than before"], flowing
    )
    about = f"On {device}, with a table of {power(run[0]['build_rows'])} rows:"
    return f"{about}\n\n{questions}\n\n{rates}{recorded(run[0])}"


SECTIONS: list[tuple[str, str, Callable[[], str]]] = [
    (
        "On the CPU, against engines in the client's process",
        "From the request to the last column in the client's memory. The others run in the client's own process on the "
        "same cores, with their tables loaded. DuckDB makes an Arrow table or a table of its own, whichever is faster.",
        cpu_joins,
    ),
    (
        "From which size it pays",
        "Two tables of three columns each on the CPU, keys of 4 bytes, every row with one match. A request, a queue "
        "and a stream over loopback cost milliseconds, which small joins do not win back. The engines take turns, so "
        "that other work of the host meets both.\n\n![Seconds by rows of each side, Dovetail and DuckDB](results.svg)",
        sizes,
    ),
    (
        "On one GPU, from client to client",
        "The same tables, larger, on a GPU. Most of the time is the way to the client; the join itself is in the last "
        "column.",
        gpu_client,
    ),
    (
        "From host memory to host memory, on one GPU",
        "The engine alone, at sizes of published figures, every column written, by the fastest strategy. The floor "
        "is what the link needs for the bytes in, the bytes out, or both at once, whichever takes longest. Joins of "
        "less than 20 ms are left out. Wu: Wu, Koutsoukos and Alonso, *Efficiently Processing Large Relational Joins "
        "on GPUs*, 2024. Rui & Tu: *Fast Equi-Join Algorithms on GPUs*, 2017.",
        suites,
    ),
    (
        "In a GPU's memory",
        "Tables and results stay in the GPU's memory. The peer is a join of cuCollections' hash tables, composed as "
        "`cudf::distinct_hash_join`, with all columns gathered, on the same GPU right before or after.",
        resident,
    ),
    (
        "On two GPUs",
        "From host memory: pairs are counted or, where the table says so, written to host memory with all columns. "
        "Each join is divided in the faster of two ways: by broadcast, each GPU has the whole build side; by hash, "
        "rows cross to the GPU of their key. The ratio is that of one GPU to the fastest number of GPUs. The floor "
        "is the time that the links and host memory of this run need for the bytes of the fastest join alone. Tables "
        "are too large for as few GPUs if their memory cannot hold the build side. HMG: workloads A and B of "
        "Maltenberger, Tolovski and Rabl, *Efficiently Joining Large Relations on Multi-GPU Systems*, 2025.",
        two_gpus,
    ),
    ("On four GPUs", "As above.", four_gpus),
    (
        "Between GPUs",
        "Bytes that every GPU sends to every other at once, beside NCCL's all-to-all in the same run.",
        exchange,
    ),
    (
        "Uploads and downloads",
        "Tables over loopback, with the same client. The peer is pyarrow's C++ Flight server, which keeps the table.",
        flight,
    ),
    (
        "Joins of arriving rows",
        "A client sends rows of a key and a column, and waits for all of their joined rows, which have a column more. "
        "Below it: streams that do not wait, beside the same bytes uploaded as a table and the result's read from one.",
        streams,
    ),
    (
        "Under abuse",
        "One client's calls, connections or tables against a server with 512 MiB of host memory and 64 MiB of memory "
        "for calls. The first of two numbers is that of a version before these limits. Meanwhile another tenant asks "
        "for `/healthz` and joins two rows, again and again. A connection without a whole preface is closed in 10 s; "
        "an abuse lasts 5 s here.",
        abuses,
    ),
]


def page() -> str:
    text = [
        "# Results\n\nMade by `python benches/results_page.py --write` from the newest lines in `benches/results`; "
        "[benches](../benches/README.md) says how to record them. A ratio above 1 says how many times as fast Dovetail "
        "is. [decisions](decisions/README.md) says what the numbers decided."
    ]
    text += [f"## {title}\n\n{wrapped(about)}\n\n{make()}" for title, about, make in SECTIONS]
    return wrapped("\n\n".join(text)) + "\n"


def wrapped(text: str) -> str:
    """Wraps paragraphs, and leaves tables, headings and pictures as they are."""
    parts = text.split("\n\n")
    keep = ("|", "#", "!", "*")
    done = [
        part if part.startswith(keep) else textwrap.fill(part, 120, break_long_words=False, break_on_hyphens=False)
        for part in parts
    ]
    return "\n\n".join(done)


def chart() -> str:
    """The sweep as a picture, both axes logarithmic."""
    found = sweep()
    width, height, left, top, right, bottom = 720, 360, 70, 30, 110, 50
    colours = {"dovetail": "#0b6e4f", "duckdb": "#b5651d"}
    all_seconds = [seconds(engines[name]) for engines in found.values() for name in colours] or [0.001, 1.0]
    rows = list(found) or [1, 2]
    low, high = math.floor(math.log10(min(all_seconds))), math.ceil(math.log10(max(all_seconds)))
    first, last = math.log2(min(rows)), math.log2(max(rows))

    def x(count: float) -> float:
        return left + (math.log2(count) - first) / max(last - first, 1) * (width - left - right)

    def y(value: float) -> float:
        return height - bottom - (math.log10(value) - low) / max(high - low, 1) * (height - top - bottom)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{left}" y="18">Seconds from request to the last column, by rows of each side</text>',
    ]
    for exponent in range(low, high + 1):
        at = y(10.0**exponent)
        label = time(10.0**exponent).replace(".00", "").replace(".0", "")
        parts.append(f'<line x1="{left}" y1="{at:.1f}" x2="{width - right}" y2="{at:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    for count in found:
        parts.append(f'<text x="{x(count):.1f}" y="{height - bottom + 20}" text-anchor="middle">{power(count)}</text>')
    for name, colour in colours.items():
        points = [(x(count), y(seconds(engines[name]))) for count, engines in found.items()]
        line = " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{colour}"/>' for across, down in points]
        if points:
            across, down = points[-1]
            parts.append(f'<text x="{across + 10:.1f}" y="{down + 4:.1f}" fill="{colour}">{ENGINES[name]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def with_table(text: str) -> str:
    """The README with its table."""
    marked = re.compile(r"(<!-- table: readme -->\n).*?(<!-- end -->)", re.DOTALL)
    return marked.sub(lambda found: f"{found[1]}{wrapped(readme())}\n{found[2]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    files = {PAGE: page(), CHART: chart(), README: with_table(README.read_text())}
    if arguments.check:
        stale = [str(path.relative_to(ROOT)) for path, text in files.items() if path.read_text() != text]
        print(
            f"results were recorded: run `python benches/results_page.py --write` for {', '.join(stale)}"
            if stale
            else ""
        )
        return 1 if stale else 0
    if arguments.write:
        for path, text in files.items():
            path.write_text(text)
    else:
        print(files[PAGE])
    return 0


if __name__ == "__main__":
    sys.exit(main())
