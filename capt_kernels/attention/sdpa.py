"""Attention through torch's scaled_dot_product_attention, a sequence at a time, without a T x T tensor.

What a query adds to a score or may not see depends on the distance ``j - i`` alone, so bias, causality and window are
one table of diagonals, -inf where nothing is seen. With the queries in reverse order, row i' of the mask is that table
shifted by i': a strided view, which the kernel reads in place. Plain causal and plain full attention need no mask.

Arguments are those of :mod:`.reference`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..library import accumulator


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
    """``[1, H, n, d]``; the flash kernels want the elements of a head side by side."""
    return (rows if rows.stride(-1) == 1 else rows.contiguous()).transpose(0, 1)[None]


def _nothing(rows: Tensor) -> Tensor:
    """Zeros in place of rows that see no key, whatever those hold, still connected to them so that a backward runs."""
    return torch.where(rows.new_zeros((), dtype=torch.bool), rows, 0)


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
    *q_rows, q_rest = q.split([*queries, q.shape[0] - sum(queries)])
    *k_rows, _ = k.split([*keys, k.shape[0] - sum(keys)])
    *v_rows, _ = v.split([*keys, v.shape[0] - sum(keys)])

    out = []
    for rows, key, value in zip(q_rows, k_rows, v_rows, strict=True):
        m = key.shape[0]
        # Queries before the first key see nothing, and a softmax over nothing is NaN.
        blind = max(rows.shape[0] - m, 0) if causal or m == 0 else 0
        if blind:
            out.append(_nothing(rows[:blind]))
            rows = rows[blind:]
        n = rows.shape[0]
        if n == 0:
            continue
        whole = bias_table is None and (window is None or window >= m)
        key, value = _heads_first(key), _heads_first(value)
        if whole and (not causal or n == m or n == 1):
            attended = F.scaled_dot_product_attention(
                _heads_first(rows), key, value, is_causal=causal and n == m, scale=scale, enable_gqa=grouped
            )[0].transpose(0, 1)
        else:
            mask = table[:, longest - m : longest + n - 1].unfold(1, m, 1)
            attended = (
                F.scaled_dot_product_attention(
                    _heads_first(rows.flip(0)), key, value, attn_mask=mask[None], scale=scale, enable_gqa=grouped
                )[0]
                .transpose(0, 1)
                .flip(0)
            )
        out.append(attended)
    return torch.cat([*out, _nothing(q_rest)])
