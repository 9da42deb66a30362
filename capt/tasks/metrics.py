"""What a task is scored by, from predicted class ids: accuracy, CB's mean of F1 and accuracy, MultiRC's F1a.

Plain Python over lists, each formula readable against its definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

Ids = Sequence[int]


def accuracy(predicted: Ids, labels: Ids) -> float:
    """Share of the predictions that are right."""
    return fmean(p == y for p, y in zip(predicted, labels, strict=True))


def f1(predicted: Ids, labels: Ids, positive: int) -> float:
    """F1 of the class ``positive``; 0 where it is neither predicted nor labelled."""
    hits = sum(p == y == positive for p, y in zip(predicted, labels, strict=True))
    shown = sum(p == positive for p in predicted) + sum(y == positive for y in labels)
    return 2 * hits / shown if shown else 0.0


def macro_f1(predicted: Ids, labels: Ids, classes: int) -> float:
    """Mean of F1 over the classes ``0..classes - 1`` that are labelled or predicted at least once.

    A prediction outside of them (a text that is no label) misses, and is no class of its own.
    """
    shown = [c for c in range(classes) if c in predicted or c in labels]
    return fmean(f1(predicted, labels, c) for c in shown)


def exact_match(predicted: Ids, labels: Ids, groups: Sequence[str]) -> float:
    """Share of the groups (questions) whose rows (answers) are all right."""
    right: dict[str, bool] = {}
    for p, y, group in zip(predicted, labels, groups, strict=True):
        right[group] = right.get(group, True) and p == y
    return fmean(right.values())


def _accuracy(predicted: Ids, labels: Ids, classes: int, groups: Sequence[str]) -> dict[str, float]:
    return {"score": accuracy(predicted, labels)}


def _f1_and_accuracy(predicted: Ids, labels: Ids, classes: int, groups: Sequence[str]) -> dict[str, float]:
    parts = {"accuracy": accuracy(predicted, labels), "macro_f1": macro_f1(predicted, labels, classes)}
    return {"score": fmean(parts.values()), **parts}


def _multirc(predicted: Ids, labels: Ids, classes: int, groups: Sequence[str]) -> dict[str, float]:
    f1a = f1(predicted, labels, positive=1)
    parts = {"exact_match": exact_match(predicted, labels, groups), "accuracy": accuracy(predicted, labels)}
    return {"score": f1a, "f1a": f1a, **parts}


#: Metric name -> numbers of ``(predicted, labels, classes, groups)``, "score" the one that is published.
METRICS: dict[str, Callable[[Ids, Ids, int, Sequence[str]], dict[str, float]]] = {
    "accuracy": _accuracy,
    "f1_and_accuracy": _f1_and_accuracy,
    "multirc": _multirc,
}


def score(
    metric: str, predicted: Ids, labels: Ids, classes: int, groups: Sequence[str] | None = None
) -> dict[str, float]:
    """The numbers of ``metric`` for class ids ``predicted`` against ``labels``, both of length N > 0.

    Args:
        classes: number of classes; a predicted id outside of them counts as wrong.
        groups: ``[N]`` names of what a row belongs to; ``"multirc"`` wants them.

    Raises:
        ValueError: a metric that does not exist, no rows, or groups that are wanted and not there.
    """
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")
    if not len(labels):
        raise ValueError("labels must hold at least one row, got none")
    if metric == "multirc" and groups is None:
        raise ValueError("metric 'multirc' wants groups, which question each answer belongs to; got none")
    return METRICS[metric](predicted, labels, classes, groups or [])
