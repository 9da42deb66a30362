"""The capsule ops as a loop over sequences in fp64, and the rule by which a result passes.

Written against the paper's Eq. 2 and torch's own adaptive_avg_pool1d, not against the library's reference.
"""

from __future__ import annotations

import torch
from torch.nn.functional import adaptive_avg_pool1d

EPS = 1e-5


def mean_of(rows, slots):
    """Adaptive mean pool of ``rows [n, D]`` into ``[slots, D]``; zeros where there is nothing to pool."""
    if not len(rows):
        return rows.new_zeros(slots, rows.shape[-1])
    return adaptive_avg_pool1d(rows.T[None], slots)[0].T


def prepend(rows, prompt, member, lead, pool):
    """One sequence: ``rows [n, D]``, ``prompt [K, D]``, ``member [n]`` bool."""
    slot = prompt + mean_of(rows[member], len(prompt)) if pool else prompt
    lead = min(lead, len(rows))
    return torch.cat([rows[:lead], slot, rows[lead:]])


def refresh(rows, prompt, member, lead, pool):
    """One sequence that holds its slots; ``member`` is looked at outside the slots only."""
    slots = len(prompt)
    if len(rows) < slots:
        return rows
    lead = min(lead, len(rows) - slots)
    old, front, behind = rows[lead : lead + slots], rows[:lead], rows[lead + slots :]
    pooled = torch.cat([old, front[member[:lead]], behind[member[lead + slots :]]])
    slot = prompt + mean_of(pooled, slots) if pool else prompt
    return torch.cat([front, slot, behind])


def batched(one, hidden, prompt, pooled, cu_seqlens, lead, pool):
    """``one`` over every sequence of a padded or packed batch; ``pooled`` spans the rows of ``hidden`` or is None."""
    member = torch.ones(hidden.shape[:-1], dtype=torch.bool) if pooled is None else pooled
    if cu_seqlens is None:
        prompts = prompt.expand(len(hidden), *prompt.shape[-2:])
        done = [one(h, p, m, lead, pool) for h, p, m in zip(hidden, prompts, member, strict=True)]
        grown = prompt.shape[-2] if one is prepend else 0
        return torch.stack(done) if done else torch.nn.functional.pad(hidden, (0, 0, grown, 0))
    bounds = cu_seqlens.tolist()
    prompts = prompt.expand(len(bounds) - 1, *prompt.shape[-2:])
    spans = list(zip(bounds, bounds[1:], prompts, strict=False))
    done = [one(hidden[a:b], p, member[a:b], lead, pool) for a, b, p in spans]
    return torch.cat([*done, hidden[bounds[-1] :]])


def rms_norm(rows, weight):
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPS) * weight


def assert_close(name, result, truth, plain, dtype):
    """``result`` against the fp64 ``truth`` in a call of ``dtype``.

    fp32: 1e-5 relative. Below it: at most twice what ``plain`` torch errs in that dtype, plus eps * max|truth|.
    """
    assert result.shape == truth.shape, f"{name}: {tuple(result.shape)} is not {tuple(truth.shape)}"
    if not truth.numel():
        return
    assert result.isfinite().all(), f"{name} holds NaN or inf"
    scale = truth.abs().max().item()
    error = (result.double() - truth).abs().max().item()
    if dtype in (torch.float32, torch.float64):
        allowed = (1e-5 if dtype == torch.float32 else 1e-12) * max(scale, 1e-3)
    else:
        allowed = 2 * (plain.double() - truth).abs().max().item() + torch.finfo(dtype).eps * scale
    assert error <= allowed, f"{name}: error {error:.3g} over {allowed:.3g}"
