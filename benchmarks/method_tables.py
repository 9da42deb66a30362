"""Markdown tables of :mod:`.test_methods`: a table a setting, method and engine apart, and the curves."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

Benchmark = dict[str, Any]
Table = tuple[Sequence[str], list[Sequence[str]]]


def tables(benchmarks: list[Benchmark], not_timed: list[dict[str, Any]]) -> Iterable[tuple[str, Table]]:
    """``(title, (header, rows))`` of everything that was measured, rows without a time among the others."""
    groups: dict[str, list[Benchmark]] = defaultdict(list)
    for benchmark in benchmarks:
        groups[benchmark["extra_info"]["setting"]].append(benchmark)
    for setting, found in groups.items():
        if not found[0]["extra_info"]["axis"]:
            missing = [row for row in not_timed if row["setting"] == setting]
            yield _title(setting, found), _setting(found, missing)
            apart = _apart(found)
            if apart[1]:
                yield f"{setting}: method and engine apart, as multiples of the bare base's time", apart
    for axis in ("T", "N"):
        points = [b for b in benchmarks if b["extra_info"]["axis"] == axis]
        if points:
            yield f"Training step over {axis}: seconds (MB kept for backward)", _curve(points)


def _title(setting: str, found: list[Benchmark]) -> str:
    info = found[0]["extra_info"]
    least = f", each row that backward needs {info['least_bytes'] / 1e6:.0f} MB" if info["work"] == "train" else ""
    return f"{setting}: matrix products alone {info['products_seconds']:.3g} s{least}"


def _setting(found: list[Benchmark], missing: list[dict[str, Any]]) -> Table:
    header = ["method", "engine", "s", "spread", "of bare", "of products", "samples/s", "tokens/s"]
    train = found[0]["extra_info"]["work"] == "train"
    memory = "peak_bytes" in found[0]["extra_info"]
    header += ["MB kept", "of needed"] * train + ["MB peak"] * memory + ["trained", "MB of it", "MB optimizer"] * train
    rows = []
    for benchmark in found:
        info = benchmark["extra_info"]
        samples = info["rounds"]
        median = statistics.median(samples)
        cells = [
            info["method"],
            info["engine"],
            f"{median:.3g}",
            f"{(max(samples) - min(samples)) / median:.0%}",
            f"{info['over_bare']:.2f}",
            f"{info['over_products']:.2f}",
            f"{info['samples_per_second']:.1f}",
            f"{info['tokens_per_second']:.0f}",
        ]
        if train:
            cells += [f"{info['bytes_kept'] / 1e6:.1f}", f"{info['bytes_kept'] / info['least_bytes']:.2f}"]
        if memory:
            cells.append(f"{info['peak_bytes'] / 1e6:.1f}")
        if train:
            cells += [f"{info['trained']:,}", *(f"{info[k] / 1e6:.2f}" for k in ("trained_bytes", "optimizer_bytes"))]
        rows.append(cells)
    for row in missing:
        rows.append([row["method"], row["engine"], f"not timed: {row['reason']}", *[""] * (len(header) - 3)])
    return header, rows


def _apart(found: list[Benchmark]) -> Table:
    """Method alone: on transformers' engine. Engine alone: the same method on both. Both: on the fused engine."""
    rounds = {(b["extra_info"]["method"], b["extra_info"]["engine"]): b["extra_info"]["rounds"] for b in found}
    bare = rounds["bare base", "transformers"]
    rows = []
    for method in dict.fromkeys(method for method, _ in rounds):
        plain, fused = rounds.get((method, "transformers")), rounds.get((method, "fused"))
        if plain and fused:
            rows.append([method, *(f"{_ratio(a, b):.2f}" for a, b in ((plain, bare), (fused, plain), (fused, bare)))])
    return ["method", "method alone", "engine alone", "both"], rows


def _ratio(own: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(own, other, strict=True))


def _curve(points: list[Benchmark]) -> Table:
    values = sorted({int(b["extra_info"]["value"]) for b in points})
    cells: dict[str, dict[int, str]] = defaultdict(dict)
    for b in points:
        info = b["extra_info"]
        shown = f"{statistics.median(info['rounds']):.3g} ({info['bytes_kept'] / 1e6:.0f})"
        cells[f"{info['method']}, {info['engine']}"][int(info["value"])] = shown
    rows = [[name, *(row.get(value, "-") for value in values)] for name, row in cells.items()]
    return ["method, engine", *map(str, values)], rows
