"""The capsule ops in plain torch: the definition, and the oracle (in fp64) that every other backend is tested against.

The pool is a matrix. For sequence b and slot k, row r of the batch has the weight 1/count when r lies in bin k of the
pooled rows of b, else 0; then the paper's Eq. 2 reads ``S = p + W @ H``. With one slot the bin is every pooled row.

Arguments are what :mod:`capt_kernels.capsule` has checked: ``prompt [B, K, D]``; ``pooled`` a bool mask of the rows
that may enter the pool, ``[B, T]`` padded or ``[R]`` packed, or None; ``cu_seqlens`` int32 or None for a padded call.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Sums are formed in fp32, or in fp64 for fp64 input."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pool_matrix(member: Tensor, slots: int, dtype: torch.dtype) -> Tensor:
    """Weights ``[..., slots, rows]`` of an adaptive mean pool of the rows where ``member [..., rows]`` is True.

    Bin k covers the members ranked floor(k*n/K) .. ceil((k+1)*n/K)-1, as adaptive_avg_pool1d does. Without members the
    weights are 0, so that S = p.
    """
    count = member.sum(-1)[..., None, None]
    rank = (member.cumsum(-1) - 1)[..., None, :]
    k = torch.arange(slots, device=member.device)[:, None]
    start = k * count // slots
    stop = ((k + 1) * count + slots - 1) // slots
    inside = member[..., None, :] & (rank >= start) & (rank < stop)
    return inside.to(dtype) / (stop - start).clamp(min=1)


def _apply(weights: Tensor, hidden: Tensor) -> Tensor:
    """``weights @ hidden``, where a row without a weight is not felt, whatever it holds (NaN, inf)."""
    felt = (weights != 0).any(-2)
    if weights.dim() > hidden.dim():  # packed: [B, K, R] against [R, D]
        felt = felt.any(0)
    return weights @ torch.where(felt[..., None], hidden.to(weights.dtype), 0)


def _locate(cu_seqlens: Tensor, rows: int, slots: int, lead: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each row of a packed batch that holds its slots: its sequence, its slot (if 0 .. slots-1), whether it is one.

    A sequence too short to hold its slots has none. Rows past the last offset count as part of sequence B.
    """
    row = torch.arange(rows, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    real = torch.nn.functional.pad(cu_seqlens.diff() - slots, (0, 1), value=-1)
    first = (cu_seqlens + real.clamp(min=0, max=lead))[sequence]
    slot = row - first
    return sequence, slot, (slot >= 0) & (slot < slots) & (real[sequence] >= 0)


def _place(value: Tensor, others: Tensor, where: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """``value [B, K, D]`` in the slot rows of ``others [R, D]``."""
    batch, slots, _ = value.shape
    if batch == 0:
        return others.clone()
    sequence, slot, is_slot = where
    flat = sequence.clamp(max=batch - 1) * slots + slot.clamp(0, slots - 1)
    return torch.where(is_slot[:, None], value.to(others.dtype).flatten(0, 1)[flat], others)


def _in_sequence(sequence: Tensor, batch: int) -> Tensor:
    """``[B, rows]``: whether a row belongs to a sequence."""
    return sequence == torch.arange(batch, device=sequence.device)[:, None]


def capsule_prepend(
    hidden: Tensor, prompt: Tensor, pooled: Tensor | None, cu_seqlens: Tensor | None, lead: int, pool: bool
) -> Tensor:
    """See :func:`capt_kernels.capsule_prepend`."""
    batch, slots, _ = prompt.shape
    dtype = accumulator(hidden.dtype)
    value = prompt.to(dtype)
    member = hidden.new_ones(hidden.shape[:-1], dtype=torch.bool) if pooled is None else pooled
    if cu_seqlens is None:
        if pool:
            value = value + _apply(pool_matrix(member, slots, dtype), hidden)
        return torch.cat([value.to(hidden.dtype), hidden], dim=1)

    if pool:
        sequence, _, _ = _locate(cu_seqlens, hidden.shape[0], 0, 0)
        value = value + _apply(pool_matrix(_in_sequence(sequence, batch) & member, slots, dtype), hidden)
    grown = cu_seqlens + slots * torch.arange(batch + 1, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    rows = hidden.shape[0] + batch * slots
    where = sequence, slot, _ = _locate(grown, rows, slots, lead)
    # A row came down by the slots of the sequences before its own, and by its own slots once past them.
    source = torch.arange(rows, device=hidden.device) - slots * (sequence + ((slot >= 0) & (sequence < batch)).long())
    others = hidden[source.clamp(min=0)] if hidden.shape[0] else torch.nn.functional.pad(hidden, (0, 0, 0, rows))
    return _place(value, others, where)


def capsule_refresh(
    hidden: Tensor, prompt: Tensor, pooled: Tensor | None, cu_seqlens: Tensor | None, lead: int, pool: bool
) -> Tensor:
    """See :func:`capt_kernels.capsule_refresh`."""
    batch, slots, _ = prompt.shape
    dtype = accumulator(hidden.dtype)
    value = prompt.to(dtype)
    if cu_seqlens is None:
        if pool:
            tokens = hidden.new_ones(batch, hidden.shape[1] - slots, dtype=torch.bool) if pooled is None else pooled
            member = torch.cat([tokens.new_ones(batch, slots), tokens], dim=1)
            value = value + _apply(pool_matrix(member, slots, dtype), hidden)
        return torch.cat([value.to(hidden.dtype), hidden[:, slots:]], dim=1)

    where = sequence, _, is_slot = _locate(cu_seqlens, hidden.shape[0], slots, lead)
    if pool:
        member = _in_sequence(sequence, batch)
        if pooled is not None:
            member = member & (is_slot | pooled)
        # The pool runs over slots ++ real rows, in that order, whatever stands between them in memory.
        order = torch.argsort((~is_slot).to(torch.uint8), stable=True)
        value = value + _apply(pool_matrix(member[:, order], slots, dtype), hidden[order])
    return _place(value, hidden, where)


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
) -> tuple[Tensor, Tensor]:
    """See :func:`capt_kernels.add_rms_norm`; ``prompt`` may be None."""
    total = residual if branch is None else residual + branch
    if prompt is not None:
        total = capsule_refresh(total, prompt, pooled, cu_seqlens, lead, pool)
    wide = total.to(accumulator(total.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(total.dtype), total
