"""Packing in Triton: rows are moved as bits, so that four integer types serve every dtype.

Indices rise, so unpacking needs no cleared output: the program that writes a row clears the positions between it
and the row before.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..library import serve_gpus

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Columns of a program.
_BLOCK = 2048


@triton.jit
def pack_kernel(hidden_ptr, out_ptr, indices_ptr, stride_b, stride_r, places, length, width, BLOCK: tl.constexpr):
    """Copies one real row out of the batch."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # Indices on a GPU are not looked at before a launch: wrong ones must not lead outside the tensor.
    index = tl.maximum(tl.minimum(tl.load(indices_ptr + program), places - 1), 0)
    source = hidden_ptr + index // length * stride_b + index % length * stride_r
    row = tl.load(source + columns, mask=columns < width, other=0)
    tl.store(out_ptr + program * width + columns, row, mask=columns < width)


@triton.jit
def unpack_kernel(rows_ptr, out_ptr, indices_ptr, stride_r, count, places, width, BLOCK: tl.constexpr):
    """Clears the places behind the row before, then copies one row; the last program has only places to clear."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    begin = tl.maximum(tl.load(indices_ptr + program - 1, mask=program > 0, other=-1) + 1, 0)
    index = tl.load(indices_ptr + program, mask=program < count, other=places)
    zeros = tl.zeros([BLOCK], out_ptr.dtype.element_ty)
    for place in range(begin, tl.minimum(index, places)):
        tl.store(out_ptr + tl.cast(place, tl.int64) * width + columns, zeros, mask=inside)
    if (index >= 0) & (index < places):
        row = tl.load(rows_ptr + program * stride_r + columns, mask=inside, other=0)
        tl.store(out_ptr + index * width + columns, row, mask=inside)


def _as_bits(tensor: Tensor, dims: int) -> Tensor:
    """What comes behind the first ``dims`` sizes in one, as integers, with a last stride of 1."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    tensor = tensor.reshape(*tensor.shape[:dims], math.prod(tensor.shape[dims:]))
    return (tensor if tensor.stride(-1) == 1 else tensor.contiguous()).view(_BITS[tensor.element_size()])


def _grid(programs: int, width: int) -> tuple[tuple[int, int], int]:
    block = min(_BLOCK, triton.next_power_of_2(width))
    return (programs, triton.cdiv(width, block)), block


def pack(hidden: Tensor, indices: Tensor) -> Tensor:
    """Rows ``[N, ...]`` of ``hidden [B, T, ...]`` at the rising places ``indices`` of the flattened batch."""
    out = hidden.new_empty(indices.shape[0], *hidden.shape[2:])
    if out.numel():
        source, target = _as_bits(hidden.detach(), 2), _as_bits(out, 1)
        batch, length, width = source.shape
        grid, block = _grid(indices.shape[0], width)
        with torch.accelerator.device_index(hidden.device.index):
            pack_kernel[grid](
                source, target, indices.contiguous(), *source.stride()[:2], batch * length, length, width, BLOCK=block
            )
    return out


def unpack(rows: Tensor, indices: Tensor, batch: int, length: int) -> Tensor:
    """``rows [N, ...]`` at the rising places ``indices`` of a batch ``[batch, length, ...]`` that is 0 elsewhere."""
    out = rows.new_empty(batch, length, *rows.shape[1:])
    if out.numel():
        source, target = _as_bits(rows.detach(), 1), _as_bits(out, 2)
        count, width = source.shape
        grid, block = _grid(count + 1, width)
        with torch.accelerator.device_index(rows.device.index):
            unpack_kernel[grid](
                source, target, indices.contiguous(), source.stride(0), count, batch * length, width, BLOCK=block
            )
    return out


serve_gpus(pack, unpack)
