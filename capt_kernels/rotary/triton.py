"""Rotary embedding in Triton: queries and keys of a position in one launch, its row of the tables read once for both.

A rotation is linear and its backward is its transpose, so one kernel serves both ways.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..library import serve_gpus

#: Elements of a tile, positions by heads by half a head: 16 a thread of each half.
_TILE = 2048


@triton.jit
def _turn(
    x_ptr, out_ptr, place, stride_h, exists, cos_a, cos_b, sin_a, sin_b, position,
    HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Rotates all heads of some positions: halves (a, b) become (a * cos - b * sin, b * cos + a * sin)."""
    columns = tl.arange(0, BLOCK)[None, None, :]
    for i in range(0, HEADS, STEP):
        head = i + tl.arange(0, STEP)[None, :, None]
        mask = exists & (head < HEADS) & (columns < HALF)
        source = x_ptr + place + head.to(tl.int64) * stride_h + columns
        a = tl.load(source, mask=mask, other=0).to(ACC)
        b = tl.load(source + HALF, mask=mask, other=0).to(ACC)
        target = out_ptr + (position * HEADS + head) * (2 * HALF) + columns
        tl.store(target, (a * cos_a - b * sin_a).to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(target + HALF, (b * cos_b + a * sin_b).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rotary_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, q_stride_b, q_stride_r, q_stride_h, k_stride_b, k_stride_r,
    k_stride_h, cos_stride_b, cos_stride_r, sin_stride_b, sin_stride_r, count, rows,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Some of ``count`` positions, ``rows`` a sequence: every head of q and of k, either of which may be None."""
    position = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    sequence, row = position // rows, position % rows
    columns = tl.arange(0, BLOCK)[None, None, :]
    exists = position < count
    inside = exists & (columns < HALF)
    cos_ptr += sequence * cos_stride_b + row * cos_stride_r + columns
    sin_ptr += sequence * sin_stride_b + row * sin_stride_r + columns
    cos_a = tl.load(cos_ptr, mask=inside, other=0).to(ACC)
    cos_b = tl.load(cos_ptr + HALF, mask=inside, other=0).to(ACC)
    sin_a = tl.load(sin_ptr, mask=inside, other=0).to(ACC)
    sin_b = tl.load(sin_ptr + HALF, mask=inside, other=0).to(ACC)
    if TRANSPOSED:
        swapped = sin_a
        sin_a = -sin_b
        sin_b = -swapped
    if q_ptr is not None:
        place = sequence * q_stride_b + row * q_stride_r
        _turn(
            q_ptr, q_out_ptr, place, q_stride_h, exists, cos_a, cos_b, sin_a, sin_b, position,
            Q_HEADS, HALF, BLOCK, STEP, ACC,
        )  # fmt: skip
    if k_ptr is not None:
        place = sequence * k_stride_b + row * k_stride_r
        _turn(
            k_ptr, k_out_ptr, place, k_stride_h, exists, cos_a, cos_b, sin_a, sin_b, position,
            K_HEADS, HALF, BLOCK, STEP, ACC,
        )  # fmt: skip


def _padded(tensor: Tensor, dims: int) -> Tensor:
    """A packed tensor as a batch of one; the last stride is 1."""
    tensor = tensor if tensor.dim() == dims else tensor[None]
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def rotary(q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Rotates q and k, or back where ``transposed``; what is None comes back empty."""
    given = [None if x is None else _padded(x, 4) for x in (q, k)]
    some = given[1] if given[0] is None else given[0]
    assert some is not None
    outs = [some.new_empty(0 if x is None else x.shape) for x in (q, k)]
    tables = [_padded(table, 3) for table in (cos, sin)]
    strides = [stride for x in given for stride in ((0, 0, 0) if x is None else x.stride()[:3])]
    strides += [stride for table in tables for stride in table.stride()[:2]]
    batch, rows, _, width = some.shape
    if batch * rows * width == 0:
        return outs[0], outs[1]
    block = triton.next_power_of_2(width // 2)
    heads = [0 if x is None else x.shape[2] for x in given]
    step = min(triton.next_power_of_2(max(1, *heads)), max(1, _TILE // block))
    tile_rows = min(64, max(1, _TILE // (step * block)))
    with torch.accelerator.device_index(some.device.index):
        rotary_kernel[triton.cdiv(batch * rows, tile_rows),](
            *given, *outs, *tables, *strides, batch * rows, rows, Q_HEADS=heads[0], K_HEADS=heads[1], HALF=width // 2,
            TRANSPOSED=transposed, ROWS=tile_rows, STEP=step, BLOCK=block,
            ACC=tl.float64 if some.dtype == torch.float64 else tl.float32, num_warps=4,
        )  # fmt: skip
    return outs[0], outs[1]


serve_gpus(rotary)
