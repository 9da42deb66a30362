"""add_rms_norm for rows too wide for a program's registers.

The add and the refresh, whose columns do not meet, go first; a norm then walks each row twice in blocks of columns,
once for its sum and once to write. No model that is trained this way is so wide, so this is kept short, not fast.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...library import accumulator, batch_of
from .layout import as_rows, launch_options, tl_accumulator
from .overwrite import capsule_refresh, capsule_refresh_backward

#: 8192 elements are 16 a thread with 16 warps.
WIDEST_IN_REGISTERS = 8192
_BLOCK = 4096


@triton.jit
def norm_kernel(
    x_ptr, weight_ptr, normed_ptr, rstd_ptr, stride_b, stride_r, rows, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Normalises one row."""
    program = tl.program_id(0).to(tl.int64)
    x_ptr += program // rows * stride_b + program % rows * stride_r
    squares = tl.zeros([BLOCK], ACC)
    for i in range(0, WIDTH, BLOCK):
        columns = i + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + columns, mask=columns < WIDTH, other=0).to(ACC)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
    tl.store(rstd_ptr + program, scale)
    for i in range(0, WIDTH, BLOCK):
        columns = i + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + columns, mask=columns < WIDTH, other=0).to(ACC)
        weight = tl.load(weight_ptr + columns, mask=columns < WIDTH, other=0).to(ACC)
        normed = (x * scale * weight).to(normed_ptr.dtype.element_ty)
        tl.store(normed_ptr + program * WIDTH + columns, normed, mask=columns < WIDTH)


@triton.jit
def norm_backward_kernel(
    normed_ptr, total_grad_ptr, x_ptr, weight_ptr, rstd_ptr, grad_ptr,
    normed_stride_b, normed_stride_r, total_grad_stride_b, total_grad_stride_r, x_stride_b, x_stride_r, rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Gradient of one row of the sum, from its norm and from the residual stream."""
    program = tl.program_id(0).to(tl.int64)
    sequence, row = program // rows, program % rows
    normed_ptr += sequence * normed_stride_b + row * normed_stride_r
    x_ptr += sequence * x_stride_b + row * x_stride_r
    scale = tl.load(rstd_ptr + program)
    products = tl.zeros([BLOCK], ACC)
    for i in range(0, WIDTH, BLOCK):
        columns = i + tl.arange(0, BLOCK)
        g = tl.load(normed_ptr + columns, mask=columns < WIDTH, other=0).to(ACC)
        g *= tl.load(weight_ptr + columns, mask=columns < WIDTH, other=0).to(ACC)
        products += g * (tl.load(x_ptr + columns, mask=columns < WIDTH, other=0).to(ACC) * scale)
    mean = tl.sum(products, 0) / WIDTH
    for i in range(0, WIDTH, BLOCK):
        columns = i + tl.arange(0, BLOCK)
        g = tl.load(normed_ptr + columns, mask=columns < WIDTH, other=0).to(ACC)
        g *= tl.load(weight_ptr + columns, mask=columns < WIDTH, other=0).to(ACC)
        g = (g - tl.load(x_ptr + columns, mask=columns < WIDTH, other=0).to(ACC) * scale * mean) * scale
        if total_grad_ptr is not None:
            offset = sequence * total_grad_stride_b + row * total_grad_stride_r
            g += tl.load(total_grad_ptr + offset + columns, mask=columns < WIDTH, other=0).to(ACC)
        tl.store(grad_ptr + program * WIDTH + columns, g.to(grad_ptr.dtype.element_ty), mask=columns < WIDTH)


def forward(
    branch: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    prompt: Tensor | None,
    pooled: Tensor | None,
    cu_seqlens: Tensor | None,
    lead: int,
    pool: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`.add_rms_norm.add_rms_norm`.

    Returns:
        ``(normed, total, rstd)``: the first two of residual's shape and dtype, total empty where it is residual; rstd
        ``[...]``, one a row, fp32 (fp64 for fp64 input).
    """
    total = residual if branch is None else residual + branch
    if prompt is not None:
        total = capsule_refresh(total, prompt, pooled, cu_seqlens, lead, pool)
    normed = total.new_empty(total.shape)
    rstd = total.new_empty(total.shape[:-1], dtype=accumulator(total.dtype))
    rows, width = as_rows(total), total.shape[-1]
    with torch.accelerator.device_index(total.device.index):
        if rstd.numel():
            norm_kernel[rstd.numel(),](
                rows, weight.contiguous(), normed, rstd, *rows.stride()[:2], rows.shape[1], eps,
                WIDTH=width, BLOCK=_BLOCK, ACC=tl_accumulator(total.dtype), **launch_options(8, total.device),
            )  # fmt: skip
    return normed, residual.new_empty(0) if total is residual else total, rstd


def backward(
    grad_normed: Tensor | None,
    grad_total: Tensor | None,
    total: Tensor,
    weight: Tensor,
    rstd: Tensor,
    slots: int,
    pooled: Tensor | None,
    cu_seqlens: Tensor | None,
    lead: int,
    pool: bool,
    need_rows: bool,
) -> tuple[Tensor, Tensor]:
    """As :func:`.add_rms_norm.add_rms_norm_backward`.

    Returns:
        ``(grad_rows, grad_slots)``: of total's shape and dtype, or empty unless ``need_rows``; ``[B, K, D]`` in rstd's
        dtype.
    """
    if grad_normed is None:
        assert grad_total is not None  # autograd asks for nothing where neither came in
        grad = grad_total
    else:
        # The slots' gradients are read from it, and are not to be rounded to total's dtype.
        grad = total.new_empty(total.shape, dtype=rstd.dtype if slots else total.dtype)
        normed, rows, extra = as_rows(grad_normed), as_rows(total), None if grad_total is None else as_rows(grad_total)
        with torch.accelerator.device_index(total.device.index):
            if rstd.numel():
                norm_backward_kernel[rstd.numel(),](
                    normed, extra, rows, weight.contiguous(), rstd, grad, *normed.stride()[:2],
                    *((0, 0) if extra is None else extra.stride()[:2]), *rows.stride()[:2], rows.shape[1],
                    WIDTH=total.shape[-1], BLOCK=_BLOCK, ACC=tl_accumulator(total.dtype),
                    **launch_options(8, total.device),
                )  # fmt: skip
    if slots:
        grad_rows, grad_slots = capsule_refresh_backward(grad, slots, pooled, cu_seqlens, lead, pool, need_rows)
        return grad_rows.to(total.dtype), grad_slots
    grad_slots = total.new_empty(batch_of(total, cu_seqlens), 0, total.shape[-1], dtype=rstd.dtype)
    if not need_rows:
        return total.new_empty(0), grad_slots
    return grad.clone() if grad is grad_total else grad, grad_slots
