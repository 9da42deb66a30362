"""The capsule ops in plain torch: the definition, and the oracle (in fp64) that every other backend is tested against.

Arguments are what :mod:`capt_kernels.capsule` has checked: ``prompt [B, K, D]``; ``pooled`` a bool mask of the rows
that may enter the pool, ``[B, T]`` padded or ``[R]`` packed, or None; ``cu_seqlens`` int32 or None for a padded call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..library import accumulator


def adaptive_mean(rows: Tensor, sequence: Tensor, member: Tensor, batch: int, slots: int) -> Tensor:
    """The mean of every sequence's members, or their adaptive mean pool into ``slots`` pieces: ``[B, slots, D]``.

    Bin k covers the members ranked floor(k*n/K) .. ceil((k+1)*n/K)-1, as adaptive_avg_pool1d does. Without members it
    is 0, so that S = p. Rows are selected, never multiplied by 0: what another row holds (NaN, inf) is not felt.

    Args:
        rows: ``[N, D]`` in the order of the pool. sequence: ``[N]`` whose they are, rising; ``batch`` for nobody's.
        member: ``[N]`` bool.
    """
    member = member & (sequence < batch)
    count = torch.zeros(batch + 1, dtype=torch.int64, device=rows.device).index_add(0, sequence, member.long())
    rank = member.cumsum(0) - 1 - (count.cumsum(0) - count)[sequence]
    means = []
    for k in range(slots):
        start = k * count // slots
        stop = ((k + 1) * count + slots - 1) // slots
        inside = member & (rank >= start[sequence]) & (rank < stop[sequence])
        chosen = torch.where(inside[:, None], rows.to(accumulator(rows.dtype)), 0)
        total = chosen.new_zeros(batch + 1, rows.shape[1]).index_add(0, sequence, chosen)
        means.append((total / (stop - start).clamp(min=1)[:, None])[:batch])
    return torch.stack(means, 1)


def _padded_mean(hidden: Tensor, member: Tensor | None, slots: int) -> Tensor:
    """:func:`adaptive_mean` of ``[B, T, D]`` whose rows are in the order of the pool."""
    batch, length, _ = hidden.shape
    if member is None:
        member = hidden.new_ones(batch, length, dtype=torch.bool)
    sequence = torch.arange(batch, device=hidden.device)[:, None].expand(-1, length)
    return adaptive_mean(hidden.flatten(0, 1), sequence.flatten(), member.flatten(), batch, slots)


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


def capsule_prepend(
    hidden: Tensor, prompt: Tensor, pooled: Tensor | None, cu_seqlens: Tensor | None, lead: int, pool: bool
) -> Tensor:
    """See :func:`capt_kernels.capsule_prepend`."""
    batch, slots, _ = prompt.shape
    value = prompt.to(accumulator(hidden.dtype))
    if cu_seqlens is None:
        if pool:
            value = value + _padded_mean(hidden, pooled, slots)
        return torch.cat([value.to(hidden.dtype), hidden], dim=1)

    if pool:
        sequence, _, _ = _locate(cu_seqlens, hidden.shape[0], 0, 0)
        member = sequence < batch if pooled is None else pooled
        value = value + adaptive_mean(hidden, sequence, member, batch, slots)
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
    value = prompt.to(accumulator(hidden.dtype))
    if cu_seqlens is None:
        if pool:
            member = None if pooled is None else torch.cat([pooled.new_ones(batch, slots), pooled], dim=1)
            value = value + _padded_mean(hidden, member, slots)
        return torch.cat([value.to(hidden.dtype), hidden[:, slots:]], dim=1)

    where = sequence, _, is_slot = _locate(cu_seqlens, hidden.shape[0], slots, lead)
    if pool:
        member = sequence < batch if pooled is None else is_slot | pooled
        # The pool runs over slots ++ real rows, in that order, whatever stands between them in memory.
        order = torch.argsort(2 * sequence + (~is_slot).to(sequence.dtype), stable=True)
        value = value + adaptive_mean(hidden[order], sequence[order], member[order], batch, slots)
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
