"""add_rms_norm with the capsule inside, at the traffic of a plain fused residual add and RMSNorm.

Forward, 2 reads + 2 writes a row: while a chunk's rows are in registers to be added and normalised, their column sums
are formed too; a second, tiny launch turns each sequence's partial sums into its slots, normalises those, and is the
only one to write them. Backward, 3 reads + 1 write: the gradient of a slot depends on the slot's row alone, so every
program forms it afresh and spreads it over its own rows; nothing is handed from one program to another. A frozen base
wants no gradient of ``weight``, and none is formed here.

A row lies in registers whole. Rows wider than 8192 are left to :mod:`.wide_rms_norm`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...library import accumulator, batch_of
from . import layout, wide_rms_norm


@triton.jit
def carry_kernel(
    branch_ptr, residual_ptr, weight_ptr, normed_ptr, total_ptr, rstd_ptr, partial_ptr,
    branch_stride_b, branch_stride_r, residual_stride_b, residual_stride_r, cu_ptr, before_ptr, batch, rows, lead, eps,
    WIDTH: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Adds and normalises a chunk's rows, but not slots, and sums those that pool (unless ``partial_ptr`` is None)."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    sequence, chunk, start, length, _slots, held, first, count, lowest, highest = layout.locate(
        program, cu_ptr, before_ptr, batch, rows, lead, SLOTS, True, CHUNK
    )

    weight = tl.load(weight_ptr + columns, mask=inside, other=0).to(ACC)
    residual_ptr += layout.base(sequence, start, cu_ptr, residual_stride_b, residual_stride_r)
    if branch_ptr is not None:
        branch_ptr += layout.base(sequence, start, cu_ptr, branch_stride_b, branch_stride_r)
    for k in range(lowest, highest + 1):
        sums = tl.zeros([ROWS, BLOCK], ACC)
        for i in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, length), ROWS):
            index = i + tl.arange(0, ROWS)
            owner, last, pooled = layout.row_bins(index, lowest, count, start, length, held, first, before_ptr, SLOTS)
            carried = (owner == k) & (index < length)
            felt = pooled & (owner <= k) & (last >= k)
            row = layout.place(index, held, first).to(tl.int64)
            read = (carried | felt)[:, None] & inside[None, :]
            x = tl.load(residual_ptr + row[:, None] * residual_stride_r + columns[None, :], mask=read, other=0).to(ACC)
            if branch_ptr is not None:
                x += tl.load(branch_ptr + row[:, None] * branch_stride_r + columns[None, :], mask=read, other=0).to(ACC)
            rounded = x.to(residual_ptr.dtype.element_ty)
            x = rounded.to(ACC)
            scale = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)
            written = carried & (index >= held)
            target = (start + row)[:, None] * WIDTH + columns[None, :]
            write = written[:, None] & inside[None, :]
            if total_ptr is not None:
                tl.store(total_ptr + target, rounded, mask=write)
            normed = x * scale[:, None] * weight[None, :]
            tl.store(normed_ptr + target, normed.to(normed_ptr.dtype.element_ty), mask=write)
            tl.store(rstd_ptr + start + row, scale, mask=written)
            if partial_ptr is not None:
                sums += tl.where(felt[:, None], x, 0)
        if partial_ptr is not None:
            origin = tl.cast(program, tl.int64) + sequence * SLOTS + k
            tl.store(partial_ptr + origin * WIDTH + columns, tl.sum(sums, 0), mask=inside)


@triton.jit
def slot_kernel(
    prompt_ptr, weight_ptr, normed_ptr, total_ptr, rstd_ptr, partial_ptr, stride_b, stride_k,
    cu_ptr, before_ptr, batch, rows, lead, eps,
    WIDTH: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Writes one slot and its norm: the prompt and, unless ``partial_ptr`` is None, the mean of its bin."""
    sequence = tl.program_id(0) // SLOTS
    k = tl.program_id(0) % SLOTS
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    start, length = layout.span(sequence, cu_ptr, batch, rows)
    slots, held, first = layout.slot_span(sequence, length, cu_ptr, batch, lead, SLOTS, True)
    prompt_ptr += tl.cast(sequence, tl.int64) * stride_b + tl.cast(k, tl.int64) * stride_k
    value = tl.load(prompt_ptr + columns, mask=inside, other=0).to(ACC)
    if partial_ptr is not None:
        count = layout.rank(length, start, held, first, before_ptr)
        value += layout.pooled_mean(
            partial_ptr, columns, inside, k, sequence, count, start, length, held, first, cu_ptr, before_ptr, rows,
            WIDTH, SLOTS, CHUNK, STEP, BLOCK, ACC,
        )  # fmt: skip
    rounded = value.to(total_ptr.dtype.element_ty)
    x = rounded.to(ACC)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0).to(ACC)
    if slots > 0:
        row = start + first + k
        tl.store(total_ptr + row * WIDTH + columns, rounded, mask=inside)
        tl.store(normed_ptr + row * WIDTH + columns, (x * scale * weight).to(normed_ptr.dtype.element_ty), mask=inside)
        tl.store(rstd_ptr + row, scale)


@triton.jit
def _row_gradient(
    normed_ptr, total_grad_ptr, total_ptr, rstd_ptr, normed_stride_r, total_grad_stride_r, total_stride_r, row, wanted,
    columns, inside, weight, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """What reaches ``rows`` of the sum from the norm and from the residual stream."""
    read = wanted[:, None] & inside[None, :]
    g = tl.zeros([ROWS, BLOCK], ACC)
    if normed_ptr is not None:
        g = tl.load(normed_ptr + row[:, None] * normed_stride_r + columns[None, :], mask=read, other=0).to(ACC)
        g *= weight[None, :]
        scale = tl.load(rstd_ptr + row, mask=wanted, other=0)
        x = tl.load(total_ptr + row[:, None] * total_stride_r + columns[None, :], mask=read, other=0).to(ACC)
        x *= scale[:, None]
        g = (g - x * (tl.sum(g * x, 1) / WIDTH)[:, None]) * scale[:, None]
    if total_grad_ptr is not None:
        g += tl.load(total_grad_ptr + row[:, None] * total_grad_stride_r + columns[None, :], mask=read, other=0).to(ACC)
    return g


@triton.jit
def backward_kernel(
    normed_ptr, total_grad_ptr, total_ptr, weight_ptr, rstd_ptr, grad_ptr, grad_slots_ptr,
    normed_stride_b, normed_stride_r, total_grad_stride_b, total_grad_stride_r, total_stride_b, total_stride_r,
    cu_ptr, before_ptr, batch, rows, lead,
    WIDTH: tl.constexpr, SLOTS: tl.constexpr, POOL: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The slots' gradients and, unless ``grad_ptr`` is None, a chunk's rows', over which the slots' are spread."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    sequence, chunk, start, length, slots, held, first, count, lowest, highest = layout.locate(
        program, cu_ptr, before_ptr, batch, rows, lead, SLOTS, True, CHUNK
    )

    weight = tl.load(weight_ptr + columns, mask=inside, other=0).to(ACC)
    total_ptr += layout.base(sequence, start, cu_ptr, total_stride_b, total_stride_r)
    rstd_ptr += start
    if normed_ptr is not None:
        normed_ptr += layout.base(sequence, start, cu_ptr, normed_stride_b, normed_stride_r)
    if total_grad_ptr is not None:
        total_grad_ptr += layout.base(sequence, start, cu_ptr, total_grad_stride_b, total_grad_stride_r)

    one = tl.arange(0, 1)
    if SLOTS > 0:
        # A sequence's chunks share the work on its slots; without slots its prompt has no gradient.
        chunks = tl.maximum(tl.cdiv(length, CHUNK), 1)
        for k in range(chunk, tl.where((chunk < chunks) & (sequence < batch), SLOTS, 0), chunks):
            g = _row_gradient(
                normed_ptr, total_grad_ptr, total_ptr, rstd_ptr, normed_stride_r, total_grad_stride_r, total_stride_r,
                (one + first + k).to(tl.int64), one < slots, columns, inside, weight, WIDTH, 1, BLOCK, ACC,
            )  # fmt: skip
            slot = (tl.cast(sequence, tl.int64) * SLOTS + k + one)[:, None]
            tl.store(grad_slots_ptr + slot * WIDTH + columns[None, :], g, mask=inside[None, :])

    if grad_ptr is not None:
        grad_ptr += start * WIDTH
        for k in range(lowest, highest + 1):
            if POOL:
                share = _row_gradient(
                    normed_ptr, total_grad_ptr, total_ptr, rstd_ptr, normed_stride_r, total_grad_stride_r,
                    total_stride_r, (one + first + k).to(tl.int64), one < slots, columns, inside, weight,
                    WIDTH, 1, BLOCK, ACC,
                ) / layout.bin_size(k, count, SLOTS, ACC)  # fmt: skip
            for i in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, length), ROWS):
                index = i + tl.arange(0, ROWS)
                owner, last, pooled = layout.row_bins(
                    index, lowest, count, start, length, held, first, before_ptr, SLOTS
                )
                carried = (owner == k) & (index < length)
                row = layout.place(index, held, first).to(tl.int64)
                g = _row_gradient(
                    normed_ptr, total_grad_ptr, total_ptr, rstd_ptr, normed_stride_r, total_grad_stride_r,
                    total_stride_r, row, carried & (index >= held), columns, inside, weight, WIDTH, ROWS, BLOCK, ACC,
                )  # fmt: skip
                if POOL:
                    felt = carried & pooled
                    g += tl.where(felt[:, None], share, 0)
                    if SLOTS > 1:
                        # Rows at a border are in the next bin too, and in many where slots outnumber rows.
                        for q in range(k + 1, tl.max(tl.where(felt, last, k), 0) + 1):
                            other = _row_gradient(
                                normed_ptr, total_grad_ptr, total_ptr, rstd_ptr, normed_stride_r, total_grad_stride_r,
                                total_stride_r, (one + first + q).to(tl.int64), one < slots, columns, inside, weight,
                                WIDTH, 1, BLOCK, ACC,
                            ) / layout.bin_size(q, count, SLOTS, ACC)  # fmt: skip
                            g += tl.where((felt & (last >= q))[:, None], other, 0)
                tl.store(
                    grad_ptr + row[:, None] * WIDTH + columns[None, :],
                    g.to(grad_ptr.dtype.element_ty),
                    mask=carried[:, None] & inside[None, :],
                )


def _tiles(width: int) -> tuple[int, int, int]:
    """Columns of a tile (a whole row), rows of a tile, warps."""
    block = max(1, triton.next_power_of_2(width))
    return block, max(1, min(16, layout.TILE // block)), layout.WARPS * max(1, block // layout.TILE)


def add_rms_norm(
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
    """See :func:`capt_kernels.add_rms_norm`. Returns ``(normed, total, rstd)``; total is empty where it is residual."""
    width, device = residual.shape[-1], residual.device
    if width > wide_rms_norm.WIDEST_IN_REGISTERS:
        return wide_rms_norm.forward(branch, residual, weight, eps, prompt, pooled, cu_seqlens, lead, pool)
    acc = accumulator(residual.dtype)
    normed = residual.new_empty(residual.shape)
    total = residual.new_empty(residual.shape) if branch is not None or prompt is not None else None
    rstd = residual.new_empty(residual.shape[:-1], dtype=acc)
    rows, (added,) = layout.joined(cu_seqlens is None and prompt is None, residual, branch)
    weight = weight.contiguous()
    slots, pool = (0, False) if prompt is None else (prompt.shape[1], pool)

    batch = batch_of(rows, cu_seqlens)
    plan = layout.plan(batch, rows.shape[1], pooled if pool else None, cu_seqlens, lead, device, slots=slots)
    partial = plan.partial_sums(slots, width, residual, acc) if pool else None
    block, tile_rows, warps = _tiles(width)
    constants = {"WIDTH": width, "SLOTS": slots, "CHUNK": plan.chunk, "BLOCK": block}
    constants["ACC"] = layout.tl_accumulator(residual.dtype)
    with torch.accelerator.device_index(device.index):
        if plan.programs:
            carry_kernel[plan.programs,](
                added, rows, weight, normed, total, rstd, partial, *((0, 0) if added is None else added.stride()[:2]),
                *rows.stride()[:2], *plan.where, eps, **constants, ROWS=tile_rows,
                **layout.launch_options(warps, device),
            )  # fmt: skip
        if prompt is not None and plan.batch:
            prompt = layout.as_rows(prompt)
            slot_kernel[plan.batch * slots,](
                prompt, weight, normed, total, rstd, partial, *prompt.stride()[:2], *plan.where, eps, **constants,
                STEP=min(64, layout.SUM_TILE // block), **layout.launch_options(layout.SUM_WARPS, device),
            )  # fmt: skip
    return normed, residual.new_empty(0) if total is None else total, rstd


def add_rms_norm_backward(
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
    """Gradients of the sum's two terms, one and the same (empty unless ``need_rows``), and the slots' ``[B, K, D]``."""
    width, device = total.shape[-1], total.device
    if width > wide_rms_norm.WIDEST_IN_REGISTERS:
        return wide_rms_norm.backward(
            grad_normed, grad_total, total, weight, rstd, slots, pooled, cu_seqlens, lead, pool, need_rows
        )
    grad = total.new_empty(total.shape) if need_rows else None
    grad_slots = total.new_empty(batch_of(total, cu_seqlens), slots, width, dtype=accumulator(total.dtype))
    pool = pool and slots > 0 and need_rows

    rows, grads = layout.joined(cu_seqlens is None and not slots, total, grad_normed, grad_total)
    strides = [stride for g in grads for stride in ((0, 0) if g is None else g.stride()[:2])]
    plan = layout.plan(
        batch_of(rows, cu_seqlens), rows.shape[1], pooled if pool else None, cu_seqlens, lead, device,
        slots=slots, only_slots=not need_rows,
    )  # fmt: skip
    block, tile_rows, warps = _tiles(width)
    with torch.accelerator.device_index(device.index):
        if plan.programs:
            backward_kernel[plan.programs,](
                *grads, rows, weight.contiguous(), rstd, grad, grad_slots, *strides, *rows.stride()[:2], *plan.where,
                WIDTH=width, SLOTS=slots, POOL=pool, CHUNK=plan.chunk, ROWS=tile_rows, BLOCK=block,
                ACC=layout.tl_accumulator(total.dtype), **layout.launch_options(warps, device),
            )  # fmt: skip
    return (total.new_empty(0) if grad is None else grad), grad_slots
