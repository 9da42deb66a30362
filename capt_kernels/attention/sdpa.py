"""Attention through torch's scaled_dot_product_attention, a sequence (or neighbours of one length) at a time.

There is no T x T tensor.

What a query adds to a score or may not see depends on the distance ``j - i`` alone, so bias, causality and window are
one table of diagonals, -inf where nothing is seen. With the queries in reverse order, row i' of the mask is that table
shifted by i': a strided view, which the kernel reads in place. Plain causal and plain full attention need no mask.

Arguments are those of :mod:`.reference`.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from ..library import accumulator
from .unattended import unattended


def _diagonals(q: Tensor, longest: int, causal: bool, bias_table: Tensor | None, window: int | None) -> Tensor:
    """``[H or 1, 2*longest-1]``: what is added to a score at distances ``-(longest-1) .. longest-1``."""
    dtype = accumulator(q.dtype)
    distance = torch.arange(1 - longest, longest, device=q.device)
    if bias_table is None:
        table = torch.zeros(1, distance.numel(), dtype=dtype, device=q.device)
    else:
        centre = bias_table.shape[1] // 2
        table = bias_table[:, centre + 1 - longest : centre + longest].to(dtype)
    if causal:
        table = table.masked_fill(distance > 0, -torch.inf)
    if window is not None:
        table = table.masked_fill(distance <= -window, -torch.inf)
    return table


def _heads_first(rows: Tensor) -> Tensor:
    """``[g, n, H, d] -> [g, H, n, d]``; the flash kernels want the elements of a head side by side."""
    return (rows if rows.stride(-1) == 1 else rows.contiguous()).transpose(1, 2)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: list[int],
    keys: list[int],
    causal: bool,
    scale: float,
    bias_table: Tensor | None,
    window: int | None,
) -> Tensor:
    """See :func:`capt_kernels.capsule_attention`."""
    longest = max([*queries, *keys, 1])
    table = _diagonals(q, longest, causal, bias_table, window)
    grouped = q.shape[1] != k.shape[1]
    # Neighbours of one length go through in one call.
    groups = [(n, m, len(list(same))) for (n, m), same in itertools.groupby(zip(queries, keys, strict=True))]
    *q_rows, q_rest = q.split([*(n * g for n, _, g in groups), q.shape[0] - sum(queries)])
    *k_rows, _ = k.split([*(m * g for _, m, g in groups), k.shape[0] - sum(keys)])
    *v_rows, _ = v.split([*(m * g for _, m, g in groups), v.shape[0] - sum(keys)])

    out: list[Tensor] = []
    for (n, m, g), rows, key, value in zip(groups, q_rows, k_rows, v_rows, strict=True):
        # Queries before the first key see nothing, and a softmax over nothing is NaN.
        blind = max(n - m, 0) if causal or m == 0 else 0
        rows = rows.unflatten(0, (g, n))
        parts = [unattended(rows[:, :blind], key, value)] if blind else []
        n -= blind
        if n:
            key, value = (_heads_first(x.unflatten(0, (g, m))) for x in (key, value))
            rows = rows[:, blind:]
            whole = bias_table is None and (window is None or window >= m)
            if whole and (not causal or n == m or n == 1):
                attended = F.scaled_dot_product_attention(
                    _heads_first(rows), key, value, is_causal=causal and n == m, scale=scale, enable_gqa=grouped
                ).transpose(1, 2)
            else:
                mask = table[:, longest - m : longest + n - 1].unfold(1, m, 1)
                attended = (
                    F.scaled_dot_product_attention(
                        _heads_first(rows.flip(1)), key, value, attn_mask=mask[None], scale=scale, enable_gqa=grouped
                    )
                    .transpose(1, 2)
                    .flip(1)
                )
            parts.append(attended)
        out.extend(part.flatten(0, 1) for part in (parts if len(parts) < 2 else [torch.cat(parts, 1)]))
    if q_rest.shape[0] or not out:
        out.append(unattended(q_rest, k, v))
    return out[0] if len(out) == 1 else torch.cat(out)
