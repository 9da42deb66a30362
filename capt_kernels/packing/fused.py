"""Autograd for fused packing: each of the two is the other's backward, and only the indices are kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..first_order import first_order


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernels, hidden, indices):
        ctx.save_for_backward(indices)
        ctx.kernel, ctx.batch, ctx.length = kernels.unpack, hidden.shape[0], hidden.shape[1]
        return kernels.pack(hidden, indices)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        (indices,) = ctx.saved_tensors
        return None, ctx.kernel(grad, indices, ctx.batch, ctx.length), None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernels, rows, indices, batch, length):
        ctx.save_for_backward(indices)
        ctx.kernel = kernels.pack
        return kernels.unpack(rows, indices, batch, length)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        (indices,) = ctx.saved_tensors
        return None, ctx.kernel(grad, indices), None, None, None


def pack(kernels: Any, hidden: Tensor, indices: Tensor) -> Tensor:
    return _Pack.apply(kernels, hidden, indices)


def unpack(kernels: Any, rows: Tensor, indices: Tensor, batch: int, length: int) -> Tensor:
    return _Unpack.apply(kernels, rows, indices, batch, length)
