"""Autograd for the fused attention: q, k, v, the output and one fp32 a head and row are kept, and nothing of T x T.

``kernels`` is ``torch.ops.capt_kernels``, whose dispatcher picks C++ or Triton by device, or
:mod:`capt_kernels.attention.triton` itself when Triton's interpreter runs on CPU tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..first_order import first_order


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernels, q, k, v, cu_seqlens, cu_seqlens_k, causal, scale, bias_table, window, dropout_p, seed):
        where = (cu_seqlens, cu_seqlens_k, causal, scale, bias_table, window, dropout_p, seed)
        out, lse = kernels.attention_forward(q, k, v, *where)
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens, cu_seqlens_k, bias_table, seed)
        ctx.kernel = kernels.attention_backward
        ctx.causal, ctx.scale, ctx.window, ctx.dropout_p = causal, scale, window, dropout_p
        return out

    @staticmethod
    @first_order
    def backward(ctx, grad):
        *saved, bias_table, seed = ctx.saved_tensors
        _, need_q, need_k, need_v = ctx.needs_input_grad[:4]
        where = (ctx.causal, ctx.scale, bias_table, ctx.window)
        dq, dk, dv = ctx.kernel(grad, *saved, *where, need_q, need_k or need_v, ctx.dropout_p, seed)
        return None, dq if need_q else None, dk if need_k else None, dv if need_v else None, *[None] * 8


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
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    where = (cu_seqlens, cu_seqlens_k, causal, scale, bias_table, window, dropout_p, seed)
    return _Attention.apply(kernels, q, k, v, *where)
