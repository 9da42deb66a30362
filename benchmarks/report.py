"""Markdown tables of a run: ``python -m benchmarks.report results.json``, which is what ``--benchmark-json`` wrote."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Benchmark = dict[str, Any]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns but the first are aligned right."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _milliseconds(benchmark: Benchmark) -> float:
    return 1e3 * benchmark["stats"]["median"]


def ops(benchmarks: list[Benchmark]) -> str:
    """How many times as fast as plain torch, torch.compile, and how far from a copy of the same bytes."""
    groups: dict[tuple, dict[str, float]] = defaultdict(dict)
    for benchmark in benchmarks:
        info = benchmark["extra_info"]
        groups[info["op"], info["direction"], info["width"]][info["how"]] = _milliseconds(benchmark)
    rows = [
        (
            f"`{op}` {direction}",
            str(width),
            f"{ms['fused']:.2f}",
            f"{ms['plain'] / ms['fused']:.1f}x",
            f"{ms['compiled'] / ms['fused']:.2f}x",
            f"{ms['fused'] / ms['move']:.2f}",
        )
        for (op, direction, width), ms in groups.items()
    ]
    return table(("op", "D", "fused, ms", "over plain", "over `torch.compile`", "of a copy's time"), rows)


def attention(benchmarks: list[Benchmark]) -> str:
    """Milliseconds and useful GFLOP/s of packed rows, beside the padded ways."""
    groups: dict[tuple, dict[str, Benchmark]] = defaultdict(dict)
    for benchmark in benchmarks:
        info = benchmark["extra_info"]
        groups[info["task"], info["shape"], info["direction"]][info["how"]] = benchmark

    def cell(found: dict[str, Benchmark], how: str) -> str:
        if how not in found:
            return "-"
        return f"{_milliseconds(found[how]):.1f} ({found[how]['extra_info']['gigaflops']:.0f})"

    ways = ("packed", "padded SDPA", "FlexAttention")
    rows = [(" ".join(group), *(cell(found, how) for how in ways)) for group, found in groups.items()]
    return table(("ms (useful GFLOP/s)", *ways), rows)


def methods(benchmarks: list[Benchmark]) -> str:
    """Time, throughput and memory of a training step."""
    rows = [
        (
            benchmark["extra_info"]["method"],
            f"{benchmark['stats']['median']:.2f}",
            f"{benchmark['extra_info']['over_matrix_products']:.2f}",
            f"{benchmark['extra_info']['texts_per_second']:.1f}",
            f"{benchmark['extra_info']['bytes_kept'] / 1e6:.0f}",
            f"{benchmark['extra_info']['trained']:,}",
        )
        for benchmark in benchmarks
    ]
    return table(("method", "s a step", "of the matrix products", "texts/s", "MB kept", "trained"), rows)


def boundary(benchmarks: list[Benchmark]) -> str:
    """Microseconds a call."""
    rows = [(b["extra_info"]["boundary"], f"{b['extra_info']['microseconds']:.1f}") for b in benchmarks]
    return table(("one call on one row", "microseconds"), rows)


#: A key that only one file's benchmarks have -> the table of that file.
TABLES = {"boundary": boundary, "op": ops, "shape": attention, "method": methods}


def report(results: dict[str, Any]) -> str:
    """Every table that a run has numbers for, under a line that says who measured."""
    machine = results["machine_info"]
    where = machine.get("gpu") or machine["cpu"].get("brand_raw", "unknown CPU")
    parts = [
        f"{where}, {machine['threads']} threads, {machine['cpu_capability']}, torch {machine['torch']}, "
        f"{results['datetime'][:10]}, commit {results['commit_info']['id'][:9]}"
    ]
    for key, make in TABLES.items():
        chosen = [b for b in results["benchmarks"] if key in b["extra_info"]]
        if chosen:
            parts.append(make(chosen))
    return "\n\n".join(parts)


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        print("usage: python -m benchmarks.report RESULTS.json ...", file=sys.stderr)
        return 2
    for path in arguments:
        print(report(json.loads(Path(path).read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
