"""Draws what `dovetail-bench SUITE --out FILE` measured: three SVGs for each suite in the file, one for `choices`.

    pip install -r tests/python/requirements.txt
    dovetail-bench wu-13 --out results.jsonl
    python benches/plot.py results.jsonl            # wu-13.svg, wu-13-phases.svg, wu-13-memory.svg beside results.jsonl

Each line of results names the axis of its suite's figure. A figure shows rows of both sides per second, as the papers
do, with the floor of `dovetail-bench` as a dashed line; that of the phases, the seconds of each part of a join, added
up over streams, with which a floor cannot be compared: a GPU's own, by its events, where all lines of a panel have
them, and else the host's, which waits for the GPU; that of the memory, the most that each strategy took on the
device, with the bytes of tables and result as a dashed line. Where a suite varies more than its axis, each combination
has a panel.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

Line = dict[str, object]

# What may vary beside a suite's own axis, in the order in which a panel's title says it.
FIELDS = [
    "query", "joins", "build_rows", "ratio", "keys", "key_columns", "types", "match_ratio", "copies", "probe_keys",
    "nulls", "device", "scale",
]  # fmt: skip

# What else tells one measurement from another.
TOLD_APART = ["probe_rows", "payloads", "seed", "asked", "forced", "kept"]

# Fields that follow from the axis, and would give each of its points a panel of its own.
FOLLOW = {
    "build_rows": {"probe_rows"},
    "probe_rows": {"ratio"},
    "ratio": {"build_rows"},
    "payload_columns": {"types"},
    "payloads": {"types"},
    "zipf": {"probe_keys"},
    "joins": {"build_rows", "ratio"},
    "query": {"build_rows", "ratio"},
    "bytes_in": set(FIELDS),
}

# How far above the fastest strategy a floor is still drawn.
FLOOR_TIMES_MAX = 3

STRATEGIES = ["hash", "radix-hash", "radix-hash-gfur", "sort-merge", "sort-merge-gfur", "auto"]


def read(path: Path) -> dict[str, list[Line]]:
    """The measurements of each suite; of those that were repeated, the last ones."""
    suites: dict[str, dict[str, Line]] = defaultdict(dict)
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            line = json.loads(text)
            suite = line["suite"]
        except (ValueError, KeyError, TypeError) as error:
            sys.exit(f"{path}, line {number}, is not a result of `dovetail-bench`: {error!r}")
        if "seconds" in line:
            # Lines of earlier builds lack fields that came later: what is not there, and what is not so, is one case.
            case = json.dumps([line.get(field) or None for field in [*FIELDS, *TOLD_APART]])
            suites[suite][case] = line
    return {suite: list(lines.values()) for suite, lines in suites.items()}


def panels(lines: list[Line]) -> dict[str, list[Line]]:
    """The lines of each panel, by its title: what varies beside the axis."""
    axis = lines[0]["axis"]["field"]
    follow = FOLLOW.get(axis, set()) | {axis}
    varied = [
        field
        for field in FIELDS
        if field not in follow and len({json.dumps(line.get(field)) for line in lines}) > 1
    ]  # fmt: skip
    found: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        found[", ".join(f"{field.replace('_', ' ')} {line.get(field)}" for field in varied)].append(line)
    return dict(found)


def places(lines: list[Line], axis: str) -> dict[object, float]:
    """Where the values of the axis stand: numbers in order, words in the order in which they came."""
    values = list(dict.fromkeys(line[axis] for line in lines))
    if all(isinstance(value, int | float) for value in values):
        values.sort()
    return {value: at for at, value in enumerate(values)}


def short(value: object) -> str:
    """A value as it stands at an axis: powers of two of rows as such."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and value >= 1024:
        return f"$2^{{{value.bit_length() - 1}}}$" if value & (value - 1) == 0 else f"{value / 1e6:.3g} M"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def mark(panel: Axes, at: dict[object, float], label: str, title: str) -> None:
    panel.set_xticks(list(at.values()), [short(value) for value in at])
    panel.set_xlabel(label)
    panel.set_title(title, fontsize=9)
    panel.set_ylim(bottom=0)
    panel.grid(axis="y", linewidth=0.3)


def draw_series(panel: Axes, lines: list[Line], value: Callable[[Line], float]) -> None:
    """A value over the axis, a line for each strategy."""
    field = lines[0]["axis"]["field"]
    at = places(lines, field)
    for strategy in [name for name in STRATEGIES if any(line["asked"] == name for line in lines)]:
        points = sorted((at[line[field]], value(line)) for line in lines if line["asked"] == strategy)
        style = {"marker": "x", "linestyle": "none"} if strategy == "auto" else {"marker": "o"}
        color = f"C{STRATEGIES.index(strategy)}"
        panel.plot([x for x, _ in points], [y for _, y in points], label=strategy, color=color, **style)


def draw_bound(panel: Axes, lines: list[Line], label: str, value: Callable[[Line], float]) -> list[float]:
    """What all strategies are compared with, over the axis, where the lines have it: the greatest of each place."""
    field = lines[0]["axis"]["field"]
    at = places(lines, field)
    points: dict[float, float] = {}
    for line in lines:
        points[at[line[field]]] = max(points.get(at[line[field]], 0.0), value(line))
    # A single point makes no line.
    marker = "_" if len(points) == 1 else None
    xs = sorted(points)
    panel.plot(xs, [points[x] for x in xs], label=label, color="black", linestyle="--", linewidth=0.8, marker=marker)
    return list(points.values())


def draw_rates(panel: Axes, lines: list[Line], title: str) -> None:
    """Rows per second over the axis, a line for each strategy, and what they would be at the floor."""
    axis = lines[0]["axis"]

    def rate(line: Line) -> float:
        return line["rows_per_second"] / 1e6

    draw_series(panel, lines, rate)
    with_floor = [line for line in lines if line.get("floor_seconds")]
    at_floor = []
    if with_floor:
        at_floor = draw_bound(
            panel, with_floor, "floor", lambda line: rate(line) * line["seconds"] / line["floor_seconds"]
        )
    mark(panel, places(lines, axis["field"]), axis["label"], title)
    # A floor that is far away would leave the strategies a flat line.
    top = FLOOR_TIMES_MAX * max(rate(line) for line in lines)
    if max(at_floor, default=0.0) > top:
        panel.set_ylim(top=top)
        text = f"floor: up to {max(at_floor):,.0f}"
        panel.text(0.99, 0.99, text, transform=panel.transAxes, fontsize=7, ha="right", va="top")
    panel.set_ylabel("million rows per second (|R| + |S|)")


def draw_memory(panel: Axes, lines: list[Line], title: str) -> None:
    """The most device memory that was in use, a line for each strategy, and the bytes of tables and result."""
    axis = lines[0]["axis"]
    draw_series(panel, lines, lambda line: line["device_memory_max_bytes"] / 2**30)
    draw_bound(panel, lines, "tables and result", lambda line: (line["bytes_in"] + line["bytes_out"]) / 2**30)
    mark(panel, places(lines, axis["field"]), axis["label"], title)
    panel.set_ylabel("device memory, GiB")


# In the order in which joins come to them, each with a color of its own. What has no name was done between two.
PHASES = [
    "pack keys", "filter", "copy in", "partition build", "partition probe", "check build order", "check probe order",
    "sort build", "sort probe", "group build", "build table", "match", "join", "expand", "compare keys", "gather", "",
]  # fmt: skip


def color_of(phase: str) -> object:
    return plt.get_cmap("tab20")(PHASES.index(phase) if phase in PHASES else len(PHASES))


def phases_of(lines: list[Line]) -> tuple[str, list[dict[str, float]]]:
    """Whose seconds these are, and those of each phase, for each line."""
    events = [line.get("device_seconds") for line in lines]
    if all(events):
        return "the GPU", [{name: sum(work.values()) for name, work in phases.items()} for phases in events]
    return "the host", [line["phase_seconds"] for line in lines]


def draw_phases(panel: Axes, lines: list[Line], title: str) -> None:
    """Seconds of each phase over the axis, a stack for each strategy."""
    axis = lines[0]["axis"]
    at = places(lines, axis["field"])
    lines = [line for line in lines if line["asked"] != "auto"]
    whose, phases = phases_of(lines)
    asked = [name for name in STRATEGIES if any(line["asked"] == name for line in lines)]
    width = 0.8 / max(len(asked), 1)
    for line, of_line in zip(lines, phases, strict=True):
        place = at[line[axis["field"]]] + width * (asked.index(line["asked"]) - (len(asked) - 1) / 2)
        bottom = 0.0
        for name, seconds in of_line.items():
            panel.bar(place, seconds * 1e3, 0.9 * width, bottom=bottom, color=color_of(name))
            bottom += seconds * 1e3
    for name in dict.fromkeys(name for of_line in phases for name in of_line):
        panel.bar(0, 0, color=color_of(name), label=name or "between phases")
    mark(panel, at, f"{axis['label']}\nbars: {', '.join(asked)}", title)
    panel.set_ylabel(f"milliseconds of {whose}")


def draw_choices(panel: Axes, lines: list[Line], title: str) -> None:
    """How many times the best time the planner's choice takes, a point per join; hollow where columns were kept."""
    best: dict[object, float] = {}
    for line in lines:
        join = (line["seed"], bool(line.get("kept")))
        best[join] = min(best.get(join, float("inf")), line["seconds"])
    for kept, fill, label in [(False, "full", "columns in host memory"), (True, "none", "columns on the device")]:
        chosen = [line for line in lines if line["asked"] == "auto" and bool(line.get("kept")) == kept]
        times = [line["seconds"] / best[line["seed"], kept] for line in chosen]
        panel.plot([line["bytes_in"] for line in chosen], times, "o", color="C0", fillstyle=fill, label=label)
    panel.axhline(1.1, linewidth=0.8, linestyle="--", color="grey")
    panel.set_xscale("log", base=2)
    panel.set_xlabel(lines[0]["axis"]["label"])
    panel.set_ylabel("time of the planner's choice / best")
    panel.set_title(title, fontsize=9)


def draw(suite: str, lines: list[Line], kind: str, path: Path) -> None:
    """One figure: its panels side by side, up to three in a row."""
    drawing = {"rates": draw_rates, "phases": draw_phases, "memory": draw_memory, "choices": draw_choices}[kind]
    found = panels(lines)
    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(6 * columns, 4.2 * rows), squeeze=False, layout="constrained")
    for panel, (title, of_panel) in zip(axes.flat, found.items(), strict=False):
        drawing(panel, of_panel, title)
    for unused in axes.flat[len(found) :]:
        unused.set_visible(False)
    shown = {}
    for panel in axes.flat:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    if shown:
        figure.legend(shown.values(), shown.keys(), loc="outside right center", fontsize=8)
    machine = lines[0]["machine"]
    where = str(lines[0]["device"])
    if isinstance(machine, dict) and machine["cpu"] not in where:
        where += f", {machine['cpu']}"
    about = textwrap.fill(f"{suite}: {lines[0]['about']}", 70 * columns)
    versions = list(dict.fromkeys(str(line["version"]) for line in lines))
    figure.suptitle(f"{about}\n{where}, {', '.join(versions)}", fontsize=10)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="file that `dovetail-bench --out` wrote")
    parser.add_argument("--suite", help="this suite only")
    parser.add_argument("--into", type=Path, help="folder of the figures (default: that of the results)")
    options = parser.parse_args()
    if not options.results.is_file():
        sys.exit(f"{options.results} is no file; `dovetail-bench SUITE --out {options.results}` writes one")
    suites = read(options.results)
    if not suites:
        sys.exit(f"{options.results} has no measurement of `dovetail-bench`")
    wanted = [options.suite] if options.suite else list(suites)
    into = options.into or options.results.parent
    into.mkdir(parents=True, exist_ok=True)
    # The same results give the same file.
    plt.rcParams["svg.hashsalt"] = "dovetail"
    for suite in wanted:
        lines = suites.get(suite)
        if not lines:
            sys.exit(f"{options.results} has no results of suite {suite!r}; it has {', '.join(suites) or 'none'}")
        if suite == "choices":
            if not any(line["asked"] == "auto" for line in lines):
                sys.exit(
                    f"{options.results} has no join of suite {suite!r} as the planner would run it, which is what its "
                    "figure shows; let `dovetail-bench choices` run to its end"
                )
            draw(suite, lines, "choices", into / f"{suite}.svg")
        else:
            draw(suite, lines, "rates", into / f"{suite}.svg")
            draw(suite, lines, "phases", into / f"{suite}-phases.svg")
            # Beside columns that are kept a join's own memory is not known.
            with_memory = [line for line in lines if line.get("device_memory_max_bytes") is not None]
            if with_memory:
                draw(suite, with_memory, "memory", into / f"{suite}-memory.svg")


if __name__ == "__main__":
    main()
