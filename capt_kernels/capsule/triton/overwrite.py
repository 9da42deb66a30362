"""capsule_prepend and capsule_refresh: every row is read once and written once.

The pool's column sums are formed from rows that are in registers for the copy anyway, one partial sum a chunk, and a
second, tiny launch turns a sequence's partial sums into its slots. Backward is the same walk: a slot's gradient
is its own row of the incoming gradient, so every program reads that row and spreads it over the rows that it copies.
Columns do not meet, so they are dealt out to programs too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...library import accumulator, batch_of
from . import layout
from .layout import Plan

#: Columns of a program.
_BLOCK = 1024


@triton.jit
def carry_kernel(
    hidden_ptr, out_ptr, partial_ptr, stride_b, stride_r, cu_ptr, before_ptr, batch, rows, lead,
    WIDTH: tl.constexpr, SLOTS: tl.constexpr, HELD: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Copies a chunk's rows to their places and adds up those that pool (unless ``partial_ptr`` is None)."""
    program = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    sequence, chunk, start, length, slots, held, first, count, lowest, highest = layout.locate(
        program, cu_ptr, before_ptr, batch, rows, lead, SLOTS, HELD, CHUNK
    )

    source_ptr = hidden_ptr + layout.base(sequence, start, cu_ptr, stride_b, stride_r)
    target_ptr = out_ptr + (start if HELD else start + sequence * SLOTS) * WIDTH
    for k in range(lowest, highest + 1):
        total = tl.zeros([ROWS, BLOCK], ACC)
        for i in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, length), ROWS):
            index = i + tl.arange(0, ROWS)
            owner, last, pooled = layout.row_bins(index, lowest, count, start, length, held, first, before_ptr, SLOTS)
            carried = (owner == k) & (index < length)
            felt = pooled & (owner <= k) & (last >= k)
            row = layout.place(index, held, first)
            x = tl.load(
                source_ptr + row.to(tl.int64)[:, None] * stride_r + columns[None, :],
                mask=(carried | felt)[:, None] & inside[None, :],
                other=0,
            )
            target = row if HELD else row + tl.where(row >= first, slots, 0)
            tl.store(
                target_ptr + target.to(tl.int64)[:, None] * WIDTH + columns[None, :],
                x,
                mask=(carried & (index >= held))[:, None] & inside[None, :],
            )
            if partial_ptr is not None:
                total += tl.where(felt[:, None], x.to(ACC), 0)
        if partial_ptr is not None:
            origin = tl.cast(program, tl.int64) + sequence * SLOTS + k
            tl.store(partial_ptr + origin * WIDTH + columns, tl.sum(total, 0), mask=inside)


@triton.jit
def slot_kernel(
    prompt_ptr, out_ptr, partial_ptr, stride_b, stride_k, cu_ptr, before_ptr, batch, rows, lead,
    WIDTH: tl.constexpr, SLOTS: tl.constexpr, HELD: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
    BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Writes one slot: its prompt and, unless ``partial_ptr`` is None, the mean of its bin."""
    sequence = tl.program_id(0) // SLOTS
    k = tl.program_id(0) % SLOTS
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    start, length = layout.span(sequence, cu_ptr, batch, rows)
    slots, held, first = layout.slot_span(sequence, length, cu_ptr, batch, lead, SLOTS, HELD)
    prompt_ptr += tl.cast(sequence, tl.int64) * stride_b + tl.cast(k, tl.int64) * stride_k
    value = tl.load(prompt_ptr + columns, mask=inside, other=0).to(ACC)
    if partial_ptr is not None:
        count = layout.rank(length, start, held, first, before_ptr)
        value += layout.pooled_mean(
            partial_ptr, columns, inside, k, sequence, count, start, length, held, first, cu_ptr, before_ptr, rows,
            WIDTH, SLOTS, CHUNK, STEP, BLOCK, ACC,
        )  # fmt: skip
    row = (start if HELD else start + sequence * SLOTS) + first + k
    if slots > 0:
        tl.store(out_ptr + row * WIDTH + columns, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    grad_ptr, grad_hidden_ptr, grad_slots_ptr, stride_b, stride_r, cu_ptr, before_ptr, batch, rows, lead,
    WIDTH: tl.constexpr, SLOTS: tl.constexpr, HELD: tl.constexpr, POOL: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Hands out the slots' gradients and, unless ``grad_hidden_ptr`` is None, spreads them over a chunk's rows.

    ``rows`` counts the forward's input; a packed ``grad`` of capsule_prepend has K rows more a sequence.
    """
    program = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    sequence, chunk, start, length, slots, held, first, count, lowest, highest = layout.locate(
        program, cu_ptr, before_ptr, batch, rows, lead, SLOTS, HELD, CHUNK
    )
    grad_ptr += layout.base(sequence, start if HELD else start + sequence * SLOTS, cu_ptr, stride_b, stride_r)
    slot_ptr = grad_ptr + tl.cast(first, tl.int64) * stride_r
    # A sequence without slots gives its prompt no gradient, and its rows no share of one.
    in_slot = columns < tl.where(slots > 0, WIDTH, 0)

    # A sequence's chunks share the work on its slots.
    chunks = tl.maximum(tl.cdiv(length, CHUNK), 1)
    for k in range(chunk, tl.where((chunk < chunks) & (sequence < batch), SLOTS, 0), chunks):
        g = tl.load(slot_ptr + tl.cast(k, tl.int64) * stride_r + columns, mask=in_slot, other=0)
        tl.store(grad_slots_ptr + (tl.cast(sequence, tl.int64) * SLOTS + k) * WIDTH + columns, g.to(ACC), mask=inside)

    if grad_hidden_ptr is not None:
        target_ptr = grad_hidden_ptr + start * WIDTH
        for k in range(lowest, highest + 1):
            if POOL:
                share = tl.load(slot_ptr + tl.cast(k, tl.int64) * stride_r + columns, mask=in_slot, other=0)
                share = share.to(ACC) / layout.bin_size(k, count, SLOTS, ACC)
            for i in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, length), ROWS):
                index = i + tl.arange(0, ROWS)
                owner, last, pooled = layout.row_bins(
                    index, lowest, count, start, length, held, first, before_ptr, SLOTS
                )
                carried = (owner == k) & (index < length)
                row = layout.place(index, held, first)
                source = row if HELD else row + tl.where(row >= first, slots, 0)
                g = tl.load(
                    grad_ptr + source.to(tl.int64)[:, None] * stride_r + columns[None, :],
                    mask=(carried & (index >= held))[:, None] & inside[None, :],
                    other=0,
                ).to(ACC)
                if POOL:
                    felt = carried & pooled
                    g += tl.where(felt[:, None], share[None, :], 0)
                    if SLOTS > 1:
                        # Rows at a border are in the next bin too, and in many where slots outnumber rows.
                        for q in range(k + 1, tl.max(tl.where(felt, last, k), 0) + 1):
                            other = tl.load(slot_ptr + tl.cast(q, tl.int64) * stride_r + columns, mask=in_slot, other=0)
                            other = other.to(ACC) / layout.bin_size(q, count, SLOTS, ACC)
                            g += tl.where((felt & (last >= q))[:, None], other[None, :], 0)
                tl.store(
                    target_ptr + row.to(tl.int64)[:, None] * WIDTH + columns[None, :],
                    g.to(grad_hidden_ptr.dtype.element_ty),
                    mask=carried[:, None] & inside[None, :],
                )


def _tiles(width: int) -> tuple[int, int, int]:
    """Columns of a program, blocks of columns, rows of a tile."""
    block = min(_BLOCK, max(1, triton.next_power_of_2(width)))
    return block, triton.cdiv(width, block), min(16, layout.TILE // block)


def _forward(hidden: Tensor, prompt: Tensor, out: Tensor, plan: Plan, pool: bool, held: bool) -> Tensor:
    rows, width, slots = layout.as_rows(hidden), hidden.shape[-1], prompt.shape[1]
    block, blocks, tile_rows = _tiles(width)
    acc = layout.tl_accumulator(hidden.dtype)
    constants = {"WIDTH": width, "SLOTS": slots, "HELD": held, "CHUNK": plan.chunk, "BLOCK": block, "ACC": acc}
    partial = plan.partial_sums(slots, width, hidden, accumulator(hidden.dtype)) if pool else None
    prompt = layout.as_rows(prompt)
    with torch.accelerator.device_index(hidden.device.index):
        if plan.programs:
            carry_kernel[plan.programs, blocks](
                rows, out, partial, rows.stride(0), rows.stride(1), *plan.where, **constants,
                ROWS=tile_rows, **layout.launch_options(layout.WARPS, hidden.device),
            )  # fmt: skip
        if plan.batch:
            slot_kernel[plan.batch * slots, blocks](
                prompt, out, partial, prompt.stride(0), prompt.stride(1), *plan.where, **constants,
                STEP=min(64, layout.SUM_TILE // block), **layout.launch_options(layout.SUM_WARPS, hidden.device),
            )  # fmt: skip
    return out


def _backward(
    grad: Tensor, grad_hidden: Tensor | None, slots: int, plan: Plan, pool: bool, held: bool
) -> tuple[Tensor, Tensor]:
    rows, width = layout.as_rows(grad), grad.shape[-1]
    block, blocks, tile_rows = _tiles(width)
    grad_slots = grad.new_empty(plan.batch, slots, width, dtype=accumulator(grad.dtype))
    with torch.accelerator.device_index(grad.device.index):
        if plan.programs:
            backward_kernel[plan.programs, blocks](
                rows, grad_hidden, grad_slots, rows.stride(0), rows.stride(1), *plan.where,
                WIDTH=width, SLOTS=slots, HELD=held, POOL=pool, CHUNK=plan.chunk, ROWS=tile_rows, BLOCK=block,
                ACC=layout.tl_accumulator(grad.dtype), **layout.launch_options(layout.WARPS, grad.device),
            )  # fmt: skip
    return (grad.new_empty(0) if grad_hidden is None else grad_hidden), grad_slots


def capsule_prepend(
    hidden: Tensor, prompt: Tensor, pooled: Tensor | None, cu_seqlens: Tensor | None, lead: int, pool: bool
) -> Tensor:
    """See :func:`capt_kernels.capsule_prepend`."""
    batch, slots, width = prompt.shape
    rows, blocks = hidden.shape[-2], _tiles(width)[1]
    plan = layout.plan(
        batch, rows, pooled if pool else None, cu_seqlens, lead, hidden.device,
        slots=slots, held=False, column_blocks=blocks,
    )  # fmt: skip
    shape = (batch, slots + rows) if cu_seqlens is None else (rows + batch * slots,)
    return _forward(hidden, prompt, hidden.new_empty(*shape, width), plan, pool, held=False)


def capsule_prepend_backward(
    grad: Tensor, slots: int, pooled: Tensor | None, cu_seqlens: Tensor | None, lead: int, pool: bool, need_hidden: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of capsule_prepend: ``hidden``'s (empty unless ``need_hidden``) and the slots' ``[B, K, D]``."""
    batch, width = batch_of(grad, cu_seqlens), grad.shape[-1]
    rows = grad.shape[1] - slots if cu_seqlens is None else grad.shape[0] - batch * slots
    plan = layout.plan(
        batch, rows, pooled if pool and need_hidden else None, cu_seqlens, lead, grad.device,
        slots=slots, held=False, column_blocks=_tiles(width)[1], only_slots=not need_hidden,
    )  # fmt: skip
    shape = (batch, rows) if cu_seqlens is None else (rows,)
    return _backward(grad, grad.new_empty(*shape, width) if need_hidden else None, slots, plan, pool, held=False)


def capsule_refresh(
    hidden: Tensor, prompt: Tensor, pooled: Tensor | None, cu_seqlens: Tensor | None, lead: int, pool: bool
) -> Tensor:
    """See :func:`capt_kernels.capsule_refresh`."""
    batch, slots, width = prompt.shape
    plan = layout.plan(
        batch, hidden.shape[-2], pooled if pool else None, cu_seqlens, lead, hidden.device,
        slots=slots, column_blocks=_tiles(width)[1],
    )  # fmt: skip
    return _forward(hidden, prompt, hidden.new_empty(hidden.shape), plan, pool, held=True)


def capsule_refresh_backward(
    grad: Tensor, slots: int, pooled: Tensor | None, cu_seqlens: Tensor | None, lead: int, pool: bool, need_hidden: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of capsule_refresh: ``hidden``'s (empty unless ``need_hidden``) and the slots' ``[B, K, D]``."""
    plan = layout.plan(
        batch_of(grad, cu_seqlens), grad.shape[-2], pooled if pool and need_hidden else None, cu_seqlens, lead,
        grad.device, slots=slots, column_blocks=_tiles(grad.shape[-1])[1], only_slots=not need_hidden,
    )  # fmt: skip
    return _backward(grad, grad.new_empty(grad.shape) if need_hidden else None, slots, plan, pool, held=True)
