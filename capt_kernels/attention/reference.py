"""Attention in plain torch, with every score in memory: the definition, and the oracle of the other backends.

``q [R, H, d]``, ``k``, ``v [Rk, Hkv, d]`` are packed; ``queries`` and ``keys`` are each sequence's number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..library import accumulator
from .dropout import kept
from .unattended import unattended


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row: int,
    causal: bool,
    scale: float,
    bias_table: Tensor | None,
    window: int | None,
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    """One sequence: n queries, the packed rows from ``row`` on, against m keys."""
    (n, heads, _), (m, key_heads, _) = q.shape, k.shape
    dtype = accumulator(q.dtype)
    wide_k, wide_v = (x.to(dtype).repeat_interleave(heads // key_heads, dim=1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.to(dtype), wide_k) * scale
    i = torch.arange(m - n, m, device=q.device)[:, None]
    j = torch.arange(m, device=q.device)
    if bias_table is not None:
        scores = scores + bias_table.to(dtype)[:, j - i + bias_table.shape[1] // 2]
    seen = torch.ones(n, m, dtype=torch.bool, device=q.device)
    if causal:
        seen = j <= i
    if window is not None:
        seen = seen & (j > i - window)
    seen = seen & ~scores.isneginf()  # a bias of -inf hides a key, and may hide all of them
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    weights = torch.where(seen.any(-1, keepdim=True), weights, 0)
    if seed is not None:
        weights = weights * kept(seed, dropout_p, heads, row, n, m) / (1 - dropout_p)
    return torch.einsum("hij,jhd->ihd", weights, wide_v).to(q.dtype)


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
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    """See :func:`capt_kernels.capsule_attention`."""
    *q_rows, q_rest = q.split([*queries, q.shape[0] - sum(queries)])
    *k_rows, _ = k.split([*keys, k.shape[0] - sum(keys)])
    *v_rows, _ = v.split([*keys, v.shape[0] - sum(keys)])
    out, row = [], 0
    for query, key, value in zip(q_rows, k_rows, v_rows, strict=True):
        out.append(_attend(query, key, value, row, causal, scale, bias_table, window, dropout_p, seed))
        row += query.shape[0]
    # An empty batch has a backward too.
    return torch.cat([*out, unattended(q_rest, k, v)])
