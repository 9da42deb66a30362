"""PNG charts of :mod:`.test_methods`: throughput, memory, and how both scale with T and N.

Colours are Okabe and Ito's, which colour-blind people tell apart; engines differ by hatch as well, lines by marker and
dash.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

Benchmark = dict[str, Any]
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
HATCHES = ("", "//", "..", "xx", "\\\\")
LINES = tuple(zip(COLOURS, "osD^vP*", ("-", "--", "-.", ":", "-", "--", "-."), strict=True))


def draw(benchmarks: list[Benchmark], folder: Path, stem: str, title: str) -> list[Path]:
    """Writes the charts that ``benchmarks`` have numbers for into ``folder``, and returns their paths.

    Args:
        stem: in front of each file's name. title: who measured, and when.
    """
    made = []
    steps = [b for b in benchmarks if b["extra_info"]["work"] == "train" and not b["extra_info"]["axis"]]
    if steps:
        groups: dict[str, list[Benchmark]] = defaultdict(list)
        for b in steps:
            groups[b["extra_info"]["setting"]].append(b)
        largest = max(groups.values(), key=len)
        made.append(
            _bars(largest, "tokens_per_second", 1, "real tokens a second", folder / f"{stem}-throughput.png", title)
        )
        made.append(_bars(largest, "bytes_kept", 1e-6, "MB kept for backward", folder / f"{stem}-memory.png", title))
    curves = [b for b in benchmarks if b["extra_info"]["axis"]]
    if curves:
        made.append(_scaling(curves, folder / f"{stem}-scaling.png", title))
    return made


def _bars(found: list[Benchmark], key: str, scale: float, label: str, path: Path, title: str) -> Path:
    engines = list(dict.fromkeys(b["extra_info"]["engine"] for b in found))
    methods: dict[str, list[Benchmark]] = defaultdict(list)
    for b in found:
        methods[b["extra_info"]["method"]].append(b)
    figure = Figure(figsize=(8, 1.6 + 0.24 * len(found) + 0.1 * len(methods)), layout="constrained")
    axes = figure.subplots()
    place, ticks = 0.0, []
    for rows in methods.values():
        ticks.append(place + (len(rows) - 1) / 2)
        for b in rows:
            engine, value = engines.index(b["extra_info"]["engine"]), b["extra_info"][key] * scale
            axes.barh(
                place, value, 0.85, color=COLOURS[engine], hatch=HATCHES[engine], edgecolor="white", linewidth=0.5
            )
            axes.annotate(f" {value:.3g}" if value < 100 else f" {value:.0f}", (value, place), va="center", fontsize=7)
            place += 1
        place += 0.5
    axes.set_yticks(ticks, list(methods), fontsize=8)
    axes.set_ylim(place, -1)
    axes.margins(x=0.08)
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    if key == "bytes_kept":
        axes.axvline(found[0]["extra_info"]["least_bytes"] * scale, color="black", linestyle=":", linewidth=1)
        axes.annotate(
            "each needed row once",
            (found[0]["extra_info"]["least_bytes"] * scale, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -8),
            textcoords="offset points",
            fontsize=7,
        )
    handles = [Patch(facecolor=c, hatch=h, edgecolor="white") for c, h in zip(COLOURS, HATCHES, strict=False)]
    figure.legend(handles[: len(engines)], engines, loc="outside upper center", ncols=len(engines), fontsize=8)
    figure.supxlabel(f"training step, {found[0]['extra_info']['setting']}\n{title}", fontsize=6)
    figure.savefig(path, dpi=150)
    return path


def _scaling(points: list[Benchmark], path: Path, title: str) -> Path:
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    grid = figure.subplots(2, 2)
    named = list(dict.fromkeys(f"{b['extra_info']['method']}, {b['extra_info']['engine']}" for b in points))
    for column, (axis, words) in enumerate((("T", "tokens a text (none padded)"), ("N", "layers"))):
        for row, (label, read) in enumerate(
            (
                ("seconds a training step", lambda info: statistics.median(info["rounds"])),
                ("MB kept for backward", lambda info: info["bytes_kept"] / 1e6),
            )
        ):
            axes = grid[row][column]
            for name, (colour, marker, dash) in zip(named, LINES, strict=False):
                infos = [b["extra_info"] for b in points if b["extra_info"]["axis"] == axis]
                own = sorted((int(i["value"]), read(i)) for i in infos if f"{i['method']}, {i['engine']}" == name)
                if own:
                    axes.plot(*zip(*own, strict=True), color=colour, marker=marker, linestyle=dash, label=name, ms=5)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            ticks = sorted({int(b["extra_info"]["value"]) for b in points if b["extra_info"]["axis"] == axis})
            axes.set_xticks(ticks, list(map(str, ticks)))
            axes.yaxis.set_major_formatter("{x:.3g}")
            axes.set(xlabel=words, ylabel=label)
            axes.grid(alpha=0.3)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, fontsize=8)
    figure.supxlabel(title, fontsize=6)
    figure.savefig(path, dpi=150)
    return path
