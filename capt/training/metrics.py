"""Accuracy and macro-F1 of class predictions."""

from __future__ import annotations

from torch import Tensor

from ..tasks.metrics import accuracy, macro_f1


def classification_metrics(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """``accuracy`` and ``macro_f1`` of ``logits [N, C]`` against class ids ``labels [N]``, N > 0.

    Macro-F1 is the mean of F1 over the classes that are labelled or predicted at least once, as scikit-learn has it.
    """
    predicted, wanted = logits.argmax(-1).tolist(), labels.tolist()
    return {"accuracy": accuracy(predicted, wanted), "macro_f1": macro_f1(predicted, wanted, logits.shape[-1])}
