"""Autograd for the fused rotary op. A rotation is linear, so its tables are all that is kept, and no activation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..first_order import first_order


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernels, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        ctx.set_materialize_grads(False)
        ctx.kernel = kernels.rotary
        return kernels.rotary(q, k, cos, sin, False)

    @staticmethod
    @first_order
    def backward(ctx, grad_q, grad_k):
        cos, sin = ctx.saved_tensors
        _, need_q, need_k = ctx.needs_input_grad[:3]
        turn_q, turn_k = need_q and grad_q is not None, need_k and grad_k is not None
        if not (turn_q or turn_k):
            return (None,) * 5
        back_q, back_k = ctx.kernel(grad_q if turn_q else None, grad_k if turn_k else None, cos, sin, True)
        return None, back_q if turn_q else None, back_k if turn_k else None, None, None


def apply_rotary(kernels: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _Rotary.apply(kernels, q, k, cos, sin)
