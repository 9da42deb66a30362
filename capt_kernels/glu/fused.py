"""Autograd for the fused gated activation, which the backward recomputes, so that no third tensor is kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..first_order import first_order


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernels, gate, up, kind):
        ctx.save_for_backward(gate, up)
        ctx.kernel, ctx.kind = kernels.gated_activation_backward, kind
        return kernels.gated_activation(gate, up, kind)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        _, need_gate, need_up, _ = ctx.needs_input_grad
        grad_gate, grad_up = ctx.kernel(grad, *ctx.saved_tensors, ctx.kind, need_gate, need_up)
        return None, grad_gate if need_gate else None, grad_up if need_up else None, None


def gated_activation(kernels: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
    return _GatedActivation.apply(kernels, gate, up, kind)
