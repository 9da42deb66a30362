"""The paper's experiments: its grids as data, cells that can be resumed, and tables beside the published numbers."""

from .cells import Bench, Cell, run_cell
from .grids import FIGURES, TABLES, Grid, Plan, Row
from .methods import METHODS
from .runner import Done, plan_grid, reproduce
from .suites import SUITES

__all__ = [
    "FIGURES",
    "METHODS",
    "SUITES",
    "TABLES",
    "Bench",
    "Cell",
    "Done",
    "Grid",
    "Plan",
    "Row",
    "plan_grid",
    "reproduce",
    "run_cell",
]
