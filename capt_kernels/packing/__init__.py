"""Padded batches to packed rows and back: the door of every packed op."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends import kernels, resolve
from ..validation import boolean_mask, check_same_device, check_shape, is_readable
from . import fused, reference


def real_positions(mask: Tensor) -> tuple[Tensor, Tensor]:
    """``(cu_seqlens [B+1] int32, indices [N] int64)`` of a bool mask ``[B, T]``; on a GPU the host waits for N."""
    cu_seqlens = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    return cu_seqlens, mask.flatten().nonzero().flatten()


def take(hidden: Tensor, indices: Tensor, backend: str = "auto") -> Tensor:
    """The rows ``[N, ...]`` of ``hidden [B, T, ...]`` at ``indices``, which :func:`real_positions` has found."""
    name = resolve(backend, hidden.device)
    if name == "reference":
        return reference.pack(hidden, indices)
    return fused.pack(kernels("packing", name), hidden, indices)


def pack(hidden: Tensor, mask: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """Takes the real positions of a padded batch out, sequence after sequence, wherever the padding stands.

    Padding is selected away, never multiplied: what it holds (NaN, inf) reaches neither the rows nor a gradient, and
    its own gradient is 0. The number of rows depends on the values of ``mask``: on a GPU the host waits for it once,
    and ``torch.compile`` breaks the graph here unless ``torch._dynamo.config.capture_dynamic_output_shape_ops`` is set.

    Args:
        hidden: ``[B, T, ...]`` of any dtype, token ids included; a gradient flows when it is floating.
        mask: ``[B, T]``, 1 = real, holes allowed. Bool, integer or float of 0 and 1.
        backend: "auto", "reference", "cpu" or "triton".

    Returns:
        ``(rows [N, ...], cu_seqlens [B+1] int32, indices [N] int64)``: the rows, where each sequence starts, and each
        row's place in ``hidden.flatten(0, 1)``, rising.

    Raises:
        ValueError: a shape, mask or device that does not fit. ImportError: ``backend`` is not on this machine.
    """
    if hidden.dim() < 2:
        raise ValueError(f"hidden must have shape [B, T, ...], got {tuple(hidden.shape)}")
    check_shape("mask", mask, tuple(hidden.shape[:2]), "[B, T]")
    check_same_device("hidden", hidden, [("mask", mask)])
    cu_seqlens, indices = real_positions(boolean_mask("mask", mask))
    return take(hidden, indices, backend), cu_seqlens, indices


def unpack(rows: Tensor, indices: Tensor, batch: int, length: int, *, backend: str = "auto") -> Tensor:
    """Puts packed rows back into a padded batch; every other position is 0. The inverse of :func:`pack`.

    Args:
        rows: ``[N, ...]`` of any dtype.
        indices: ``[N]`` int64, as :func:`pack` returned them: strictly rising, below ``batch * length``.
        batch, length: B and T of the batch.
        backend: "auto", "reference", "cpu" or "triton".

    Returns:
        ``[B, T, ...]``, dtype of ``rows``.

    Raises:
        ValueError: a shape, dtype or device that does not fit, or indices that do not rise within the batch (looked at
            on the CPU only, since on a GPU that would stall the stream).
        ImportError: ``backend`` is not on this machine.
    """
    if rows.dim() < 1:
        raise ValueError("rows must have shape [N, ...], got a scalar")
    check_shape("indices", indices, (rows.shape[0],), "[N]")
    if indices.dtype != torch.int64:
        raise ValueError(f"indices must be int64, got {indices.dtype}")
    check_same_device("rows", rows, [("indices", indices)])
    for name, size in (("batch", batch), ("length", length)):
        if size < 0:
            raise ValueError(f"{name} must be a non-negative int, got {size}")
    if rows.shape[0] > batch * length:
        raise ValueError(f"rows must fit into batch * length = {batch * length} positions, got {rows.shape[0]}")
    if indices.numel() and is_readable(indices):
        first, last = int(indices[0]), int(indices[-1])
        if first < 0 or last >= batch * length:
            raise ValueError(f"indices must lie within batch * length = {batch * length}, got {first} to {last}")
        if bool((indices.diff() <= 0).any()):
            at = int((indices.diff() <= 0).nonzero()[0])
            raise ValueError(f"indices must rise strictly, got {indices[at : at + 2].tolist()} at {at}")
    name = resolve(backend, rows.device)
    if name == "reference":
        return reference.unpack(rows, indices, batch, length)
    return fused.unpack(kernels("packing", name), rows, indices, batch, length)


__all__ = ["pack", "unpack"]
