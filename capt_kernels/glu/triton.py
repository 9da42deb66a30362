"""The gated activation in Triton: one pass each way, and what the backward needs is computed afresh."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..library import serve_gpus

#: Elements of a tile: 16 a thread with 4 warps.
_TILE = 2048


@triton.jit
def _activate(x, KIND: tl.constexpr):
    """The activation and its derivative."""
    if KIND == "silu":
        gate = tl.sigmoid(x)
        return x * gate, gate * (1 + x * (1 - gate))
    elif KIND == "gelu":
        below = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        return x * below, below + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        tanh = 1 - 2 / (1 + tl.exp(2 * inner))
        slope = 0.7978845608028654 * (1 + 0.134145 * x * x)
        return 0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * slope
    else:
        tl.static_assert(KIND == "relu")
        return tl.where(x <= 0, 0.0, x), tl.where(x <= 0, 0.0, 1.0).to(x.dtype)


@triton.jit
def _tile(count, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows and columns of a program, and which of them exist."""
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row, column, (row < count) & (column < width)


@triton.jit
def forward_kernel(
    gate_ptr, up_ptr, out_ptr, gate_stride_b, gate_stride_r, up_stride_b, up_stride_r, count, rows, width,
    KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    row, column, mask = _tile(count, width, ROWS, BLOCK)
    sequence, place = row // rows, row % rows
    gate = tl.load(gate_ptr + sequence * gate_stride_b + place * gate_stride_r + column, mask=mask, other=0).to(ACC)
    up = tl.load(up_ptr + sequence * up_stride_b + place * up_stride_r + column, mask=mask, other=0).to(ACC)
    value, _ = _activate(gate, KIND)
    tl.store(out_ptr + row * width + column, (value * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    grad_ptr, gate_ptr, up_ptr, grad_gate_ptr, grad_up_ptr, grad_stride_b, grad_stride_r, gate_stride_b, gate_stride_r,
    up_stride_b, up_stride_r, count, rows, width,
    KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Either of the two gradients may be None."""
    row, column, mask = _tile(count, width, ROWS, BLOCK)
    sequence, place = row // rows, row % rows
    grad = tl.load(grad_ptr + sequence * grad_stride_b + place * grad_stride_r + column, mask=mask, other=0).to(ACC)
    gate = tl.load(gate_ptr + sequence * gate_stride_b + place * gate_stride_r + column, mask=mask, other=0).to(ACC)
    value, slope = _activate(gate, KIND)
    if grad_gate_ptr is not None:
        up = tl.load(up_ptr + sequence * up_stride_b + place * up_stride_r + column, mask=mask, other=0).to(ACC)
        out = (grad * up * slope).to(grad_gate_ptr.dtype.element_ty)
        tl.store(grad_gate_ptr + row * width + column, out, mask=mask)
    if grad_up_ptr is not None:
        tl.store(grad_up_ptr + row * width + column, (grad * value).to(grad_up_ptr.dtype.element_ty), mask=mask)


def _as_rows(tensor: Tensor) -> Tensor:
    """``[..., F]`` as ``[B, T, F]`` with a last stride of 1."""
    if tensor.dim() < 3:
        tensor = tensor[(None,) * (3 - tensor.dim())]
    elif tensor.dim() > 3:
        tensor = tensor.flatten(0, -3)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _launch(kernel, inputs: list[Tensor], outputs: list[Tensor | None], kind: str) -> None:
    tensors = [_as_rows(tensor) for tensor in inputs]
    batch, rows, width = tensors[0].shape
    if batch * rows * width == 0:
        return
    block = min(_TILE, triton.next_power_of_2(width))
    tile_rows = min(16, _TILE // block)
    programs = triton.cdiv(batch * rows, tile_rows) * triton.cdiv(width, block)
    strides = [stride for tensor in tensors for stride in tensor.stride()[:2]]
    with torch.accelerator.device_index(tensors[0].device.index):
        kernel[programs,](
            *tensors, *outputs, *strides, batch * rows, rows, width, KIND=kind, ROWS=tile_rows, BLOCK=block,
            ACC=tl.float64 if tensors[0].dtype == torch.float64 else tl.float32,
        )  # fmt: skip


def gated_activation(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """See :func:`capt_kernels.gated_activation`."""
    out = gate.new_empty(gate.shape)
    _launch(forward_kernel, [gate, up], [out], kind)
    return out


def gated_activation_backward(
    grad: Tensor, gate: Tensor, up: Tensor, kind: str, need_gate: bool, need_up: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of ``gate`` and ``up``; one that is not needed comes back empty."""
    grad_gate = gate.new_empty(gate.shape) if need_gate else None
    grad_up = up.new_empty(up.shape) if need_up else None
    _launch(backward_kernel, [grad, gate, up], [grad_gate, grad_up], kind)
    return gate.new_empty(0) if grad_gate is None else grad_gate, up.new_empty(0) if grad_up is None else grad_up


serve_gpus(gated_activation, gated_activation_backward)
