"""Runs plans cell by cell into a folder: what is finished there is not run again."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..staging import staged, write_json
from ..tasks import SPLITS
from ..training import TrainConfig
from .cells import Bench, Cell, build, run_cell, slots_of
from .fit import better
from .grids import PROTOCOL, Grid, Plan, Row, rates_for
from .table import Entry, markdown

Results = dict[str, Any]


def plan_grid(
    name: str,
    grid: Grid,
    model: str,
    bench: Bench,
    *,
    table: str | None = None,
    learning_rates: Sequence[float] | None = None,
    **changes: Any,
) -> Plan:
    """A :class:`.grids.Grid` on ``model``, by the published protocol.

    Args:
        table: of the paper, for its published numbers.
        learning_rates: for every method, in place of the published ones.
        changes: fields of :class:`.grids.Plan` in place of the grid's; ``settings`` are added to the protocol.

    Raises:
        ValueError, OSError: the model cannot be had, or has no published learning rates and none are given.
    """
    base = bench.base(TrainConfig(model=model), 2)[0]
    fields: dict[str, Any] = {"tasks": grid.tasks, "rows": grid.rows, **changes}
    methods = [row.method for row in fields["rows"]]
    settings = {**PROTOCOL, **fields.pop("settings", {})}
    rates = rates_for(base.config.model_type, learning_rates, methods)
    return Plan(name, grid.title, model, rates=rates, settings=settings, table=table, **fields)


class Runner:
    """Plans, the folder their cells are in, and what is left to run.

    Args:
        plans: in the order in which they run, seed by seed: every plan's first seed comes before any one's second.
        folder: of the results: ``<plan>/<cell>.json`` and ``table.md``.
        data_dir: of the tasks, as TrainConfig has it.
        bench: what is loaded already.
    """

    def __init__(self, plans: Sequence[Plan], folder: Path, data_dir: str | None = None, bench: Bench | None = None):
        self.plans, self.folder, self.data_dir = list(plans), folder, data_dir
        self.bench = bench or Bench()
        self.ran = 0

    def check(self) -> None:
        """Loads every task, builds every method, encodes every row and reads every finished cell once, so that what
        does not fit shows before anything trains.

        Raises:
            ValueError, NotImplementedError, ImportError, OSError: names the thing that does not fit.
        """
        for plan, row, task in self._places():
            for options in row.candidates:
                cell = self._cell(plan, row, task, options, plan.rates[row.method][0], 0)
                module: Any = build(cell, self.bench)
                room = cell.config.max_length - slots_of(module)
                module.unload()
                tokenizer = self.bench.base(cell.config, 2)[1]
                for split in SPLITS:
                    self.bench.rows(cell, split, room, tokenizer)
        for plan in self.plans:
            self.entries(plan)

    def run(self, minutes: float | None = None) -> bool:
        """Runs what is not finished; writes ``table.md`` after each cell.

        Args:
            minutes: no cell starts later than that.

        Returns:
            Whether all is finished.
        """
        deadline = None if minutes is None else time.monotonic() + 60 * minutes
        for seed in range(max(plan.seeds for plan in self.plans)):
            for plan, row, task in self._places():
                for cell in self._wanted(plan, row, task, seed) if seed < plan.seeds else ():
                    if self.result(plan, cell) is None:
                        if deadline is not None and time.monotonic() > deadline:
                            return False
                        self._run(plan, cell)
                        self.write_table()
        return True

    def write_table(self) -> str:
        """The tables of all plans, of what is finished; written to ``table.md`` and returned."""
        text = "\n".join(markdown(plan, self.entries(plan)) for plan in self.plans)
        with staged(self.folder / "table.md") as target:
            target.write_text(text, encoding="utf-8")
        return text

    def entries(self, plan: Plan) -> dict[tuple[str, str], Entry]:
        """What is finished of a plan, by row's label and task; a search half done has chosen nothing yet."""
        found = {}
        for row in plan.rows:
            for task in plan.tasks:
                if not all(self.result(plan, cell) for cell in self._wanted(plan, row, task, 0)):
                    continue
                chosen, searched = self._chosen(plan, row, task)
                runs = [chosen] if chosen else []
                for seed in range(1, plan.seeds):
                    wanted = self._wanted(plan, row, task, seed)
                    runs += [result for cell in wanted if (result := self.result(plan, cell))]
                found[row.label, task] = Entry(runs, [*searched, *runs[1:]])
        return found

    def result(self, plan: Plan, cell: Cell) -> Results | None:
        """The finished results of a cell.

        Raises:
            ValueError: a damaged file, or one of another cell.
        """
        path = self.folder / plan.name / cell.file
        if not path.is_file():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}; delete it to run the cell again") from None
        if not isinstance(found, dict) or found.get("cell") != cell.describe():
            raise ValueError(f"{path} holds another cell than its name says; delete it to run the cell again")
        return found

    def _places(self) -> Iterator[tuple[Plan, Row, str]]:
        return ((plan, row, task) for plan in self.plans for task in plan.tasks for row in plan.rows)

    def _cell(self, plan: Plan, row: Row, task: str, options: Any, rate: float, seed: int) -> Cell:
        fields = {**plan.settings, "model": plan.model, "task": task, "data_dir": self.data_dir}
        config = TrainConfig(**fields, learning_rate=rate, seed=seed)
        return Cell(row.method, config, options, plan.answer, row.shots, row.noise)

    def _search(self, plan: Plan, row: Row, task: str) -> list[Cell]:
        rates = plan.rates[row.method]
        return [self._cell(plan, row, task, options, rate, 0) for options in row.candidates for rate in rates]

    def _wanted(self, plan: Plan, row: Row, task: str, seed: int) -> Iterator[Cell]:
        """The cells of a place for a seed; each is asked for when those before it are finished."""
        if seed == 0:
            last = None
            for cell in self._search(plan, row, task):
                # Where nothing trains, the other learning rates would give the same.
                if not (last and _trains_nothing(last) and last["cell"]["options"] == dict(cell.options)):
                    yield cell
                    last = self.result(plan, cell)
            return
        chosen = self._chosen(plan, row, task)[0]
        if chosen and not _trains_nothing(chosen):
            rate = chosen["cell"]["config"]["learning_rate"]
            yield self._cell(plan, row, task, chosen["cell"]["options"], rate, seed)

    def _chosen(self, plan: Plan, row: Row, task: str) -> tuple[Results | None, list[Results]]:
        """The best on validation of what is searched, None if nothing was finite; and all of that."""
        searched = [result for cell in self._search(plan, row, task) if (result := self.result(plan, cell))]
        best: Results | None = None
        for result in searched:
            mark = result["metrics"]["validation"]
            if mark is not None and better(mark, best and best["metrics"]["validation"]):
                best = result
        return best, searched

    def _run(self, plan: Plan, cell: Cell) -> None:
        started = time.monotonic()
        results = run_cell(cell, self.bench)
        write_json(self.folder / plan.name / cell.file, results)
        self.ran += 1
        mark = results["metrics"]["validation"]
        told = "not finite" if mark is None else f"validation {100 * mark['score']:.1f}"
        seconds = time.monotonic() - started
        print(f"capt: {plan.name}/{cell.file.rsplit('--', 1)[0]}: {told}, {seconds:.0f} s", file=sys.stderr)


def _trains_nothing(result: Results) -> bool:
    return not result["parameters"]["trainable"]


class Done(NamedTuple):
    """Tables as Markdown, whether everything in them is finished, and how many cells were run for it just now."""

    tables: str
    whole: bool
    ran: int


def reproduce(
    plans: Sequence[Plan],
    folder: Path,
    *,
    data_dir: str | None = None,
    minutes: float | None = None,
    bench: Bench | None = None,
) -> Done:
    """:meth:`Runner.check`, :meth:`Runner.run` and :meth:`Runner.write_table`."""
    runner = Runner(plans, folder, data_dir, bench)
    runner.check()
    whole = runner.run(minutes)
    return Done(runner.write_table(), whole, runner.ran)
