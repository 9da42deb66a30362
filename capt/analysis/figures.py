"""Attention as PNGs: heat maps with tokens on the axes, and numbers by layer and head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..staging import staged

#: Even in lightness, and so readable in grey and with any kind of colour blindness.
_COLOURS = "cividis"
#: A decade of shares is told apart as well as the next; what is smaller than this part of the largest is not.
_SMALLEST = 1e-3
_LONGEST_LABEL = 16
#: Labels shrink up to here; of more rows, every second, third, ... is named.
_MOST_LABELS = 80


class Panel(NamedTuple):
    """A matrix ``[rows, columns]``, NaN where it has no value, and what its rows and columns are called."""

    title: str
    matrix: Tensor
    rows: Sequence[str]
    columns: Sequence[str]


def require_matplotlib() -> None:
    """Raises ImportError, which says how to install it, where matplotlib is missing."""
    _figure()


def heat_maps(path: Path, title: str, panels: Sequence[Panel], axes: tuple[str, str], logarithmic: bool) -> None:
    """Panels side by side on one colour scale, as a PNG.

    Args:
        axes: what the rows and the columns are.
        logarithmic: of shares; of what may be negative, a linear scale.
    """
    from matplotlib.colors import LogNorm, Normalize

    values = torch.cat([panel.matrix.flatten() for panel in panels])
    values = values[values.isfinite()]
    low, high = (float(values.min()), float(values.max())) if values.numel() else (0.0, 1.0)
    high = high if high > low else low + 1
    norm = LogNorm(max(high, 1e-12) * _SMALLEST, max(high, 1e-12), clip=True) if logarithmic else Normalize(low, high)

    shape = max(len(panel.rows) for panel in panels), max(len(panel.columns) for panel in panels)
    height, width = (min(max(0.22 * n, 2.2), 12) for n in shape)
    across = min(len(panels), max(1, int(24 / (width + 1.5))))
    down = math.ceil(len(panels) / across)
    figure = _figure()(figsize=(across * (width + 1.5) + 1.2, down * (height + 1.8)), layout="constrained")
    alike = all((panel.rows, panel.columns) == (panels[0].rows, panels[0].columns) for panel in panels)
    grid = figure.subplots(down, across, squeeze=False, sharex=alike, sharey=alike).flatten()
    for i, (plot, panel) in enumerate(zip(grid, panels, strict=False)):
        image = plot.imshow(panel.matrix.numpy(), cmap=_COLOURS, norm=norm, aspect="auto")
        plot.set_facecolor("0.85")  # what cannot be seen
        plot.set_title(panel.title, fontsize=10, parse_math=False)
        if i == 0 or not alike:  # axes that are shared share their ticks
            plot.set_yticks(*_ticks(panel.rows))
            plot.set_xticks(*_ticks(panel.columns))
        plot.tick_params(axis="y", labelsize=_size(panel.rows))
        # Shared columns are named where no panel is below.
        below = alike and i + across < len(panels)
        plot.tick_params(axis="x", labelsize=_size(panel.columns), rotation=90, labelbottom=not below)
    figure.supylabel(axes[0], fontsize=10)
    figure.supxlabel(axes[1], fontsize=10)
    for plot in grid[len(panels) :]:
        plot.set_axis_off()
    figure.suptitle(title, fontsize=11, parse_math=False)
    figure.colorbar(image, ax=list(grid), shrink=0.6, aspect=30, extend="min" if logarithmic else "neither")
    with staged(path) as target:
        figure.savefig(target, dpi=120, format="png")


def _ticks(labels: Sequence[str]) -> tuple[range, list[str]]:
    step = math.ceil(len(labels) / _MOST_LABELS)
    short = [x if len(x) <= _LONGEST_LABEL else f"{x[: _LONGEST_LABEL - 1]}…" for x in labels[::step]]
    # The dollar signs of a text are not the start of a formula.
    return range(0, len(labels), step), [x.replace("$", r"\$") for x in short]


def _size(labels: Sequence[str]) -> int:
    return 8 if len(labels) <= 40 else 6


def numbered(name: str, count: int) -> list[str]:
    """``name 1 .. count``, bare numbers behind the first."""
    return [f"{name} 1", *map(str, range(2, count + 1))]


def by_model(matrices: Mapping[str, tuple[Tensor, Sequence[str]]]) -> list[Panel]:
    """Square panels of ``(matrix, labels)`` by title."""
    return [Panel(title, matrix, labels, labels) for title, (matrix, labels) in matrices.items()]


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure  # without pyplot: no window system, no state shared with the caller
    except ImportError:
        raise ImportError("drawing heat maps needs matplotlib: pip install 'capt-kernels[train]'") from None
    return Figure
