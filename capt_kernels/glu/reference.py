"""Gated activation in plain torch: the definition."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from ..library import accumulator

#: What ``kind`` names.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def gated_activation(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """See :func:`capt_kernels.gated_activation`."""
    dtype = accumulator(gate.dtype)
    return (ACTIVATIONS[kind](gate.to(dtype)) * up.to(dtype)).to(gate.dtype)
