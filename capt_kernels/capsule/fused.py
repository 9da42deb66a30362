"""Autograd for the fused capsule ops: what is saved, and which gradients are asked for.

``kernels`` is where the forward and backward kernels live: ``torch.ops.capt_kernels``, whose dispatcher picks C++ or
Triton by device, or :mod:`capt_kernels.capsule.triton` itself when Triton's interpreter runs on CPU tensors.
Nothing of the size of ``hidden`` is saved but the normalised sum's input, which is an output already.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..first_order import first_order


class _Overwrite(torch.autograd.Function):
    """capsule_prepend and capsule_refresh: linear in their inputs, so that only masks and offsets are kept."""

    @staticmethod
    def forward(ctx, kernels, op, hidden, prompt, pooled, cu_seqlens, lead, pool):
        ctx.save_for_backward(pooled, cu_seqlens)
        ctx.backward_kernel = getattr(kernels, op + "_backward")
        ctx.slots, ctx.lead, ctx.pool = prompt.shape[1], lead, pool
        ctx.prompt_dtype = prompt.dtype
        return getattr(kernels, op)(hidden, prompt, pooled, cu_seqlens, lead, pool)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        pooled, cu_seqlens = ctx.saved_tensors
        need_hidden, need_prompt = ctx.needs_input_grad[2:4]
        grad_hidden, grad_slots = ctx.backward_kernel(
            grad, ctx.slots, pooled, cu_seqlens, ctx.lead, ctx.pool, need_hidden
        )
        return (
            None,
            None,
            grad_hidden if need_hidden else None,
            grad_slots.to(ctx.prompt_dtype) if need_prompt else None,
            None,
            None,
            None,
            None,
        )


def _weight_gradient(grad_normed: Tensor, total: Tensor, rstd: Tensor, weight: Tensor) -> Tensor:
    # A trainable norm is the exception: plain torch, nothing kept for it beforehand.
    scaled = grad_normed.to(rstd.dtype) * total.to(rstd.dtype) * rstd[..., None]
    return scaled.sum_to_size(weight.shape).to(weight.dtype)


class _AddRMSNorm(torch.autograd.Function):
    """Keeps the sum (an output that the residual stream holds anyway) and one fp32 a row."""

    @staticmethod
    def forward(ctx, kernels, branch, residual, weight, eps, prompt, pooled, cu_seqlens, lead, pool):
        normed, total, rstd = kernels.add_rms_norm(
            branch, residual, weight, eps, prompt, pooled, cu_seqlens, lead, pool
        )
        ctx.save_for_backward(total, weight, rstd, pooled, cu_seqlens)
        ctx.set_materialize_grads(False)
        ctx.backward_kernel = kernels.add_rms_norm_backward
        ctx.slots, ctx.lead, ctx.pool = 0 if prompt is None else prompt.shape[1], lead, pool
        ctx.prompt_dtype = None if prompt is None else prompt.dtype
        return normed, total

    @staticmethod
    @first_order
    def backward(ctx, grad_normed, grad_total):
        total, weight, rstd, pooled, cu_seqlens = ctx.saved_tensors
        _, need_branch, need_residual, need_weight, _, need_prompt = ctx.needs_input_grad[:6]
        if grad_normed is None and grad_total is None:
            return (None,) * 10
        grad_weight = None
        if need_weight and grad_normed is not None:
            grad_weight = _weight_gradient(grad_normed, total, rstd, weight)
        grad = grad_slots = None
        need_rows = need_branch or need_residual
        if need_rows or need_prompt:
            where = (pooled, cu_seqlens, ctx.lead, ctx.pool)
            grad, grad_slots = ctx.backward_kernel(
                grad_normed, grad_total, total, weight, rstd, ctx.slots, *where, need_rows
            )
        return (
            None,
            grad if need_branch else None,
            grad if need_residual else None,
            grad_weight,
            None,
            grad_slots.to(ctx.prompt_dtype) if need_prompt else None,
            None,
            None,
            None,
            None,
        )


class _RMSNorm(torch.autograd.Function):
    """add_rms_norm where nothing is added and no slot is overwritten: the sum is its input, and no output of it."""

    @staticmethod
    def forward(ctx, kernels, residual, weight, eps):
        normed, _, rstd = kernels.add_rms_norm(None, residual, weight, eps, None, None, None, 0, False)
        ctx.save_for_backward(residual, weight, rstd)
        ctx.backward_kernel = kernels.add_rms_norm_backward
        return normed

    @staticmethod
    @first_order
    def backward(ctx, grad_normed):
        residual, weight, rstd = ctx.saved_tensors
        _, need_residual, need_weight, _ = ctx.needs_input_grad
        grad = None
        if need_residual:
            grad, _ = ctx.backward_kernel(grad_normed, None, residual, weight, rstd, 0, None, None, 0, False, True)
        return None, grad, _weight_gradient(grad_normed, residual, rstd, weight) if need_weight else None, None


def capsule_prepend(kernels: Any, hidden: Tensor, prompt: Tensor, *where) -> Tensor:
    return _Overwrite.apply(kernels, "capsule_prepend", hidden, prompt, *where)


def capsule_refresh(kernels: Any, hidden: Tensor, prompt: Tensor, *where) -> Tensor:
    return _Overwrite.apply(kernels, "capsule_refresh", hidden, prompt, *where)


def add_rms_norm(
    kernels: Any, branch: Tensor | None, residual: Tensor, weight: Tensor, eps: float, prompt: Tensor | None, *where
) -> tuple[Tensor, Tensor]:
    if branch is None and prompt is None:
        return _RMSNorm.apply(kernels, residual, weight, eps), residual
    return _AddRMSNorm.apply(kernels, branch, residual, weight, eps, prompt, *where)
