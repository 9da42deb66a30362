"""Markdown, CSV and charts of a run: ``python -m benchmarks.report results.json``, which ``--benchmark-json`` wrote.

The tables are printed; beside the JSON (or in ``--output-dir``) lie then ``results.md``, ``results.csv`` and, where
methods were measured, ``results-throughput.png``, ``-memory.png`` and ``-scaling.png``.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from capt.markdown import table

from . import charts, method_tables

Benchmark = dict[str, Any]


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


def boundary(benchmarks: list[Benchmark]) -> str:
    """Microseconds a call."""
    rows = [(b["extra_info"]["boundary"], f"{b['extra_info']['microseconds']:.1f}") for b in benchmarks]
    return table(("one call on one row", "microseconds"), rows)


#: A key that only one file's benchmarks have -> the table of that file.
TABLES = {"boundary": boundary, "op": ops, "shape": attention}


def machine_of(results: dict[str, Any]) -> str:
    """Who measured, and when, in a line."""
    machine = results["machine_info"]
    where = machine.get("gpu") or machine["cpu"].get("brand_raw", "unknown CPU")
    commit = results["commit_info"]
    dirty = " and changes" if commit.get("dirty") else ""
    versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items())
    return (
        f"{where}, {machine['threads']} threads, {machine['cpu_capability']}, torch {machine['torch']}"
        f"{versions and ', '}{versions}, {results['datetime'][:10]}, commit {commit['id'][:9]}{dirty}"
    )


def _with(key: str, results: dict[str, Any]) -> list[Benchmark]:
    return [b for b in results["benchmarks"] if key in b["extra_info"]]


def report(results: dict[str, Any]) -> str:
    """Every table that a run has numbers for, under a line that says who measured."""
    parts = [machine_of(results)]
    for title, (header, rows) in method_tables.tables(_with("setting", results), results.get("not_timed", [])):
        parts += [f"### {title}", table(header, rows)]
    for key, make in TABLES.items():
        chosen = _with(key, results)
        if chosen:
            parts.append(make(chosen))
    return "\n\n".join(parts)


def flat(results: dict[str, Any]) -> list[dict[str, Any]]:
    """A dict a benchmark, of scalars: what it was, its numbers, its seconds, machine, date and commit."""
    same = {
        "machine": machine_of(results),
        "commit": results["commit_info"]["id"],
        "datetime": results["datetime"],
    }
    rows = []
    for benchmark in results["benchmarks"]:
        info = {name: value for name, value in benchmark["extra_info"].items() if not isinstance(value, list)}
        seconds = {
            f"seconds_{name}": benchmark["stats"].get(name) for name in ("median", "min", "max", "iqr", "rounds")
        }
        rows.append({"group": benchmark["group"], "name": benchmark["name"], **info, **seconds, **same})
    return rows + [row | same for row in results.get("not_timed", [])]


def write(results: dict[str, Any], folder: Path, stem: str) -> str:
    """Writes everything into ``folder``, and returns the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    text = report(results)
    (folder / f"{stem}.md").write_text(text + "\n", encoding="utf-8")
    rows = flat(results)
    with (folder / f"{stem}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
    charts.draw(_with("setting", results), folder, stem, machine_of(results))
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", help="what --benchmark-json wrote")
    parser.add_argument("--output-dir", type=Path, help="in place of each JSON's own folder")
    given = parser.parse_args(arguments)
    for path in given.results:
        results = json.loads(path.read_text(encoding="utf-8"))
        print(write(results, given.output_dir or path.parent, path.stem))


if __name__ == "__main__":
    main()
