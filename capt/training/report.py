"""What a run leaves behind: results.json and curve.png."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..staging import staged


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a run's numbers depend on."""
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "accelerate", "capt-kernels"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def plot_curve(path: Path, history: Sequence[dict[str, Any]]) -> None:
    """Training loss and validation loss over the steps, validation accuracy beside them, as a PNG.

    Args:
        history: the Trainer's log.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure  # without pyplot: no window system, no state shared with the caller
    except ImportError:
        raise ImportError("drawing curve.png needs matplotlib: pip install 'capt-kernels[train]'") from None

    figure = Figure(figsize=(7, 4), layout="constrained")
    left = figure.subplots()
    right = left.twinx()
    left.set(xlabel="step", ylabel="loss")
    right.set(ylabel="validation accuracy", ylim=(0, 1))
    for axes, key, label, style in (
        (left, "loss", "training loss", {"color": "tab:blue", "alpha": 0.7}),
        (left, "eval_loss", "validation loss", {"color": "tab:orange", "marker": "o"}),
        (right, "eval_accuracy", "validation accuracy", {"color": "tab:green", "marker": "s"}),
    ):
        points = [(entry["step"], entry[key]) for entry in history if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, **style)
    figure.legend(loc="outside upper center", ncols=3)
    with staged(path) as target:
        figure.savefig(target, dpi=120, format="png")
