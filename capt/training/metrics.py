"""What class predictions are scored by in training: accuracy, macro-F1, and the task's own metric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..tasks import score
from ..tasks.metrics import accuracy, macro_f1


@dataclass(frozen=True)
class Scoring:
    """Scores predictions of rows, in the rows' order.

    Args:
        metric: a name in :data:`capt.tasks.METRICS`.
        groups: ``[N]`` names of what each row belongs to, where the metric wants them.
    """

    metric: str = "accuracy"
    groups: Sequence[str] | None = None

    def of(self, order: Sequence[int]) -> Scoring:
        """That of the same rows in another order."""
        return Scoring(self.metric, None if self.groups is None else [self.groups[i] for i in order])

    def __call__(self, logits: Tensor, labels: Tensor) -> dict[str, float]:
        """``accuracy``, ``macro_f1`` and the metric's numbers, ``score`` (higher is better) among them, of
        ``logits [N, C]`` against class ids ``labels [N]``, N > 0.

        Macro-F1 is the mean of F1 over the classes that are labelled or predicted at least once, as in scikit-learn.
        """
        predicted, wanted, classes = logits.argmax(-1).tolist(), labels.tolist(), logits.shape[-1]
        return {
            "accuracy": accuracy(predicted, wanted),
            "macro_f1": macro_f1(predicted, wanted, classes),
            **score(self.metric, predicted, wanted, classes, self.groups),
        }
