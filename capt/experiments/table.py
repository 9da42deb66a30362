"""A plan's results as a Markdown table: mean and spread over seeds, beside what was published."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..markdown import table
from .grids import Plan, Row
from .published import BASES, SCORES, TRAINED

Entries = Mapping[tuple[str, str], "Entry"]


class Entry(NamedTuple):
    """A row of a table on one task: the results of each seed at the chosen setting, and of all that was run for it."""

    runs: list[dict[str, Any]]
    all: list[dict[str, Any]]

    @property
    def scores(self) -> list[float]:
        """Test scores in percent, one a seed."""
        return [100 * run["metrics"]["test"]["score"] for run in self.runs if run["metrics"]["test"] is not None]


def markdown(plan: Plan, entries: Entries) -> str:
    """The table of a plan. What is not finished or not published is left empty.

    Args:
        entries: by row's label and task.
    """
    seeds = max((len(entry.runs) for entry in entries.values()), default=0)
    budget = ", ".join(f"{name} {value}" for name, value in plan.settings.items())
    lines = [
        f"## {plan.title}: {plan.model}, {plan.answer or 'answers as in the paper'}",
        "",
        f"Test scores in percent, mean ± standard deviation over up to {seeds} seeds. Learning rate and options are "
        f"chosen on validation with the first seed. Minutes are those of every training with its validation, search "
        f"included; CPU minutes leave out what others had of the machine. {budget}.",
        "",
    ]
    tried = (f"{row.label} {', '.join(f'{rate:g}' for rate in plan.rates[row.method])}" for row in plan.rows)
    lines += [f"Learning rates tried: {'; '.join(tried)}.", ""]
    base = _base(entries)
    header = ["method", *plan.tasks, "average", "trained", "minutes", "CPU minutes"]
    rows = [_majority(plan, entries)]
    for row in plan.rows:
        rows.append(_measured(plan, row, entries))
        if plan.table is not None and base is not None:
            rows.append(_published(plan, row, base))
    lines.append(table(header, rows))
    if plan.table is not None and entries and base is None:
        lines += ["", f"Numbers were published for {', '.join(BASES.values())}, not for a base of this size."]
    lines += ["", "Chosen on validation:", ""]
    chosen = [[row.label, *(_setting(entries.get((row.label, task))) for task in plan.tasks)] for row in plan.rows]
    lines.append(table(["method", *plan.tasks], chosen))
    return "\n".join([*lines, ""])


def _measured(plan: Plan, row: Row, entries: Entries) -> list[str]:
    found = [entries.get((row.label, task)) for task in plan.tasks]
    there = [entry for entry in found if entry is not None]
    scores = [statistics.fmean(entry.scores) if entry.scores else None for entry in there]
    whole = len(there) == len(plan.tasks) and None not in scores
    trained = sorted({(entry.runs or entry.all)[0]["parameters"]["trainable"] for entry in there})
    return [
        row.label,
        *("" if entry is None else _spread(entry) for entry in found),
        f"{statistics.fmean(s for s in scores if s is not None):.1f}" if whole else "",
        " to ".join(f"{count:,}" for count in dict.fromkeys([*trained[:1], *trained[-1:]])),
        *(_minutes(there, clock) for clock in ("seconds", "cpu_seconds")),
    ]


def _minutes(entries: list[Entry], clock: str) -> str:
    return f"{sum(run[clock] for entry in entries for run in entry.all) / 60:.1f}" if entries else ""


def _published(plan: Plan, row: Row, base: str) -> list[str]:
    numbers = [SCORES.get((str(plan.table), base, row.label, column)) for column in (*plan.tasks, "average")]
    share = TRAINED.get((base, row.label))
    shown = ["" if number is None else f"{number:.2f}" for number in numbers]
    return [f"{row.label}, published ({base})", *shown, "" if share is None else f"{share} %", "", ""]


def _majority(plan: Plan, entries: Entries) -> list[str]:
    scores = []
    for task in plan.tasks:
        any_run = next((entry.all[0] for (_, name), entry in entries.items() if name == task), None)
        scores.append(None if any_run is None else 100 * any_run["majority"]["score"])
    known = [score for score in scores if score is not None]
    average = f"{statistics.fmean(known):.1f}" if len(known) == len(scores) else ""
    return ["majority class", *("" if score is None else f"{score:.1f}" for score in scores), average, "0", "", ""]


def _spread(entry: Entry) -> str:
    scores = entry.scores
    if not scores:
        return "not finite"
    mean = f"{statistics.fmean(scores):.1f}"
    told = mean if len(scores) == 1 else f"{mean} ± {statistics.stdev(scores):.1f}"
    return told if len(scores) == len(entry.runs) else f"{told} ({len(scores)} of {len(entry.runs)} seeds finite)"


def _setting(entry: Entry | None) -> str:
    if entry is None or not entry.runs or not entry.runs[0]["parameters"]["trainable"]:
        return ""
    cell = entry.runs[0]["cell"]
    options = [f"{name} {value}" for name, value in cell["options"].items()]
    return ", ".join([*options, f"lr {cell['config']['learning_rate']:g}"])


def _base(entries: Entries) -> str | None:
    run = next((entry.all[0] for entry in entries.values()), None)
    return None if run is None else BASES.get(tuple(run["base"]))
