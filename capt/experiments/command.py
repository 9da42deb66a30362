"""The command line of ``capt reproduce``: its flags, and the runner that they mean."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser

from ..training import TrainConfig
from ..training.config import as_flags
from .cells import METHOD_FIELDS, PLACES, Bench
from .grids import FIGURES, TABLES, Plan
from .methods import METHODS
from .runner import Runner, plan_grid
from .suites import SUITES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``capt reproduce``."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--table", choices=TABLES, help="; ".join(f"{name}: {grid.title}" for name, grid in TABLES.items())
    )
    what.add_argument(
        "--figure", choices=FIGURES, help="; ".join(f"{name}: {grid.title}" for name, grid in FIGURES.items())
    )
    what.add_argument("--suite", choices=SUITES, help="experiments on the embedded models, sized for a CPU")
    parser.add_argument("--model", help="of a table or figure: a folder, a name on the hub, 'smollm2' or 'minilm'")
    parser.add_argument("--tasks", nargs="+", help="in place of the paper's")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="only the rows of these methods")
    parser.add_argument("--seeds", type=int, default=3, help="the first one searches, the others run its choice [3]")
    parser.add_argument("--learning-rates", nargs="+", type=float, help="for every method, in place of the published")
    parser.add_argument("--answer", choices=("text", "linear", "label-words"), help="[text for T5, else a linear head]")
    parser.add_argument("--data-dir", help="folder of the tasks' official files instead of downloads")
    parser.add_argument("--output", type=Path, help="folder of results, where finished cells are kept [results/...]")
    parser.add_argument("--minutes", type=float, help="start no cell later than that; the same command goes on")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="fields of `capt train` in place of the protocol's"
    )


def prepare(given: argparse.Namespace) -> Runner:
    """The runner of parsed flags, everything checked that can be before anything trains.

    Raises:
        ValueError, NotImplementedError, ImportError, OSError: flags, a model or data that do not fit; names the thing.
    """
    bench = Bench()
    runner = Runner(_plans(given, bench), given.output or _results_folder(given), given.data_dir, bench)
    runner.check()
    return runner


def _results_folder(given: argparse.Namespace) -> Path:
    if given.suite is not None:
        return Path("results", given.suite)
    kind = f"table-{given.table}" if given.table is not None else f"figure-{given.figure}"
    return Path("results", f"{kind}-{Path(given.model).name}")


def _plans(given: argparse.Namespace, bench: Bench) -> list[Plan]:
    if given.seeds < 1:
        raise ValueError(f"--seeds must be at least 1, got {given.seeds}")
    settings = _settings(given.set)
    if given.suite is not None:
        for name in ("model", "learning_rates", "answer"):
            if getattr(given, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} is the suite's own, got {getattr(given, name)!r}")
        plans = [
            dataclasses.replace(plan, settings={**plan.settings, **settings}, seeds=given.seeds)
            for plan in SUITES[given.suite]
        ]
    else:
        if given.model is None:
            raise ValueError("--table and --figure want a --model")
        grid = TABLES[given.table] if given.table is not None else FIGURES[given.figure]
        name = f"table-{given.table}" if given.table is not None else f"figure-{given.figure}"
        options = {"learning_rates": given.learning_rates, "answer": given.answer, "table": given.table}
        plans = [plan_grid(name, grid, given.model, bench, settings=settings, seeds=given.seeds, **options)]
    if given.tasks is not None:
        plans = [dataclasses.replace(plan, tasks=tuple(given.tasks)) for plan in plans]
    if given.methods is not None:
        kept = [[row for row in plan.rows if row.method in given.methods] for plan in plans]
        if not all(kept):
            raise ValueError(f"--methods leaves no row: there are {', '.join(row.method for row in plans[0].rows)}")
        plans = [dataclasses.replace(plan, rows=tuple(rows)) for plan, rows in zip(plans, kept, strict=True)]
    return plans


#: Fields of TrainConfig that a cell decides, or that a method does.
_NOT_SET = {"model", "task", "learning_rate", "seed", *PLACES, *METHOD_FIELDS}


def _settings(assignments: Sequence[str]) -> dict[str, Any]:
    """The fields of TrainConfig that ``NAME=VALUE`` words name, their values of the right types."""
    fields = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or name in _NOT_SET:
            wanted = "NAME=VALUE is wanted" if not equals else "a cell or a method decides it"
            raise ValueError(f"--set {assignment}: {wanted}")
        fields[name] = value
    try:
        parser: Any = HfArgumentParser(TrainConfig, exit_on_error=False)  # type: ignore[arg-type]
        config = parser.parse_args_into_dataclasses(as_flags(fields))[0]
    except argparse.ArgumentError as error:
        raise ValueError(f"--set: {error}") from None
    return {name: getattr(config, name) for name in fields}
