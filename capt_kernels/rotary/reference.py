"""Rotary embedding in plain torch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from ..library import accumulator


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.to(accumulator(x.dtype))
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (wide * cos[..., None, :].to(wide.dtype) + turned * sin[..., None, :].to(wide.dtype)).to(x.dtype)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`capt_kernels.apply_rotary`."""
    return _rotate(q, cos, sin), _rotate(k, cos, sin)
