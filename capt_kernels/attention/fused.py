"""Autograd for the fused attention: q, k, v, the output and one fp32 a head and row are kept, and nothing of T x T.

``kernels`` is ``torch.ops.capt_kernels``, whose dispatcher finds the Triton kernels, or
:mod:`capt_kernels.attention.triton` itself when Triton's interpreter runs on CPU tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernels, q, k, v, cu_seqlens, cu_seqlens_k, causal, scale, bias_table, window):
        out, lse = kernels.attention_forward(q, k, v, cu_seqlens, cu_seqlens_k, causal, scale, bias_table, window)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens, cu_seqlens_k, bias_table)
        ctx.kernel = kernels.attention_backward
        ctx.causal, ctx.scale, ctx.window = causal, scale, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        *saved, bias_table = ctx.saved_tensors
        _, need_q, need_k, need_v = ctx.needs_input_grad[:4]
        dq, dk, dv = ctx.kernel(grad, *saved, ctx.causal, ctx.scale, bias_table, ctx.window, need_q, need_k or need_v)
        return None, dq if need_q else None, dk if need_k else None, dv if need_v else None, *[None] * 6


def attention(
    kernels: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor | None,
    causal: bool,
    scale: float,
    bias_table: Tensor | None,
    window: int | None,
) -> Tensor:
    return _Attention.apply(kernels, q, k, v, cu_seqlens, cu_seqlens_k, causal, scale, bias_table, window)
