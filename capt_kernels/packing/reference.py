"""Packing in plain torch: the definition. ``indices [N]`` are the real positions of the flattened batch, rising."""

from __future__ import annotations

from torch import Tensor


def pack(hidden: Tensor, indices: Tensor) -> Tensor:
    """See :func:`capt_kernels.pack`."""
    return hidden.flatten(0, 1).index_select(0, indices)


def unpack(rows: Tensor, indices: Tensor, batch: int, length: int) -> Tensor:
    """See :func:`capt_kernels.unpack`."""
    flat = rows.new_zeros(batch * length, *rows.shape[1:]).index_copy(0, indices, rows)
    return flat.unflatten(0, (batch, length))
