"""Accuracy and macro-F1 of class predictions."""

from __future__ import annotations

import torch
from torch import Tensor


def classification_metrics(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """``accuracy`` and ``macro_f1`` of ``logits [N, C]`` against class ids ``labels [N]``, N > 0.

    Macro-F1 is the mean of F1 over the classes that are labelled or predicted at least once, as scikit-learn has it.
    """
    predicted, classes = logits.argmax(-1), logits.shape[-1]
    right = torch.bincount(labels[predicted == labels], minlength=classes).double()
    shown = (torch.bincount(labels, minlength=classes) + torch.bincount(predicted, minlength=classes)).double()
    f1 = 2 * right[shown > 0] / shown[shown > 0]
    return {"accuracy": (predicted == labels).double().mean().item(), "macro_f1": f1.mean().item()}
