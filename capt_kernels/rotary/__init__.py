"""Rotary position embedding of queries and keys in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backends import kernels, resolve
from ..validation import check_floating, check_same_device
from . import fused, reference


def _check_table(name: str, table: Tensor, q: Tensor) -> Tensor:
    """A table of angles for the positions of ``q``, expanded to one row a position."""
    check_floating(name, table)
    rows = tuple(q.shape[:-2])
    fits = table.dim() == len(rows) + 1 and table.shape[-1] == q.shape[-1] and table.shape[-2] == rows[-1]
    if not fits or (len(rows) == 2 and table.shape[0] not in (1, rows[0])):
        meaning = "[R, d]" if len(rows) == 1 else "[B, T, d] or [1, T, d]"
        wanted = (*rows, q.shape[-1])
        raise ValueError(f"{name} must have shape {meaning} = {wanted} as q has, got {tuple(table.shape)}")
    if table.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} must need no gradient (detach it), as none is computed for it")
    return table.expand(*rows, -1)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Rotates queries and keys by their positions: ``x * cos + rotate_half(x) * sin`` (RoFormer, arXiv 2104.09864).

    ``rotate_half`` maps halves ``(a, b)`` of a head to ``(-b, a)``, and the tables hold each angle twice, once a half,
    as transformers has it. Computed in fp32 (fp64 for fp64 input), whatever dtype the tables have, and cast once.

    Args:
        q: ``[R, H, d]`` packed or ``[B, T, H, d]`` padded, d even. fp32, fp16, bf16 or fp64.
        k: ``[R, Hkv, d]`` or ``[B, T, Hkv, d]``, in q's dtype.
        cos, sin: ``[R, d]``, or ``[B, T, d]`` (B = 1 serves every sequence). Any float dtype, the same for both;
            fp32 keeps long positions exact.
        backend: "auto", "reference", "cpu" or "triton".

    Returns:
        ``(q, k)`` rotated, shapes and dtypes as given.

    Raises:
        ValueError: a shape, dtype or device that does not fit, or a table that requires a gradient.
        ImportError: ``backend`` is not on this machine.
    """
    check_floating("q", q)
    if q.dim() not in (3, 4):
        raise ValueError(f"q must have shape [R, H, d] or [B, T, H, d], got {tuple(q.shape)}")
    if q.shape[-1] % 2:
        raise ValueError(f"q must have an even head size d, as its halves are rotated, got {q.shape[-1]}")
    if k.dim() != q.dim() or k.shape[:-2] != q.shape[:-2] or k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k must have q's shape {tuple(q.shape)} but for the number of heads, got {tuple(k.shape)}")
    if k.dtype != q.dtype:
        raise ValueError(f"k must have q's dtype {q.dtype}, got {k.dtype}")
    check_same_device("q", q, [("k", k), ("cos", cos), ("sin", sin)])
    cos, sin = _check_table("cos", cos, q), _check_table("sin", sin, q)
    if sin.dtype != cos.dtype:
        raise ValueError(f"sin must have cos's dtype {cos.dtype}, got {sin.dtype}")
    name = resolve(backend, q.device)
    if name == "reference":
        return reference.apply_rotary(q, k, cos, sin)
    return fused.apply_rotary(kernels("rotary", name), q, k, cos, sin)


__all__ = ["apply_rotary"]
