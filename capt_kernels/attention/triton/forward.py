"""The forward: online softmax over blocks of keys, in exponents of 2 (FlashAttention-2, arXiv 2307.08691).

A program has a block of queries of one head in registers and walks the keys that they see. Scores, bias, maxima and
sums are in fp32; weights are cast to v's dtype for the second product. Every block of keys is masked, by one comparison
a score: unmasked loops for the bulk beside the masked ones for its edges cost more registers than a block has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import blocks_for
from .layout import (
    arguments,
    bias_origin,
    exponent,
    find_rows,
    kept,
    keys_seen,
    load_rows,
    programs,
    score,
    seen,
    store_rows,
)


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr, lse_ptr, cu_ptr, cu_k_ptr,
    q_stride, q_stride_h, k_stride, k_stride_h, v_stride, v_stride_h,
    batch, rows, key_rows, heads, group, reach, window, scale, seed_ptr, threshold, rescale,
    HEAD: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes a block of queries of one head, and the base-2 logarithm of each query's sum of exponentials."""
    head = tl.program_id(1)
    block, start, queries, key_start, keys = find_rows(
        tl.program_id(0), cu_ptr, cu_k_ptr, batch, rows, key_rows, BLOCK_M
    )
    if block * BLOCK_M >= queries:
        return
    # Later queries of a causal call see more keys: the longest programs go first.
    first = (tl.cdiv(queries, BLOCK_M) - 1 - block) * BLOCK_M
    i = first + tl.arange(0, BLOCK_M)

    q_ptr += start * q_stride + tl.cast(head, tl.int64) * q_stride_h
    k_ptr += key_start * k_stride + tl.cast(head // group, tl.int64) * k_stride_h
    v_ptr += key_start * v_stride + tl.cast(head // group, tl.int64) * v_stride_h
    q = load_rows(q_ptr, q_stride, first, queries, HEAD, BLOCK_M, BLOCK_D)
    if bias_ptr is not None:
        bias_ptr = bias_origin(bias_ptr, head, reach)
        # Lengths on a GPU are not looked at before a launch: a table too short is not read, and the result is NaN.
        too_short = tl.maximum(queries, keys) > reach
        keys = tl.where(too_short, 0, keys)

    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    factor = exponent(scale, bias_ptr)
    low, high = keys_seen(first, queries, keys, window, CAUSAL, BLOCK_M, BLOCK_N)
    for start_n in range(low, high, BLOCK_N):
        j = start_n + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, k_stride, start_n, keys, HEAD, BLOCK_N, BLOCK_D)
        product = tl.dot(q, tl.trans(k), input_precision="ieee")
        s = score(product, i[:, None], j[None, :], bias_ptr, scale, queries, keys)
        s = tl.where(seen(i[:, None], j[None, :], queries, keys, window, CAUSAL), s, float("-inf"))
        raised = tl.maximum(highest, tl.max(s, 1))
        # A query that has seen nothing so far has no maximum, and -inf - -inf is NaN.
        pivot = tl.where(raised == float("-inf"), 0.0, raised)
        p = tl.math.exp2(s * factor - (pivot * factor)[:, None])
        shrink = tl.math.exp2((highest - pivot) * factor)
        total = total * shrink + tl.sum(p, 1)
        if seed_ptr is not None:
            p = tl.where(kept(seed_ptr, threshold, head, start + first, start_n, False, BLOCK_M, BLOCK_N), p, 0.0)
        v = load_rows(v_ptr, v_stride, start_n, keys, HEAD, BLOCK_N, BLOCK_D)
        out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
        highest = raised

    blind = highest == float("-inf")
    total = tl.where(blind, 1.0, total)
    out = out / total[:, None]
    if seed_ptr is not None:
        out *= rescale
    if bias_ptr is not None:
        out += tl.where(too_short, float("nan"), 0.0)
    # Less +inf, every score of a query that sees no key comes back as a weight of 0, even one that is -inf itself.
    lse = tl.where(blind, float("inf"), highest * factor + tl.math.log2(total))
    out_ptr += start * heads * HEAD + head * HEAD
    store_rows(out_ptr, heads * HEAD, first, queries, out, HEAD, BLOCK_M, BLOCK_D)
    tl.store(lse_ptr + tl.cast(head, tl.int64) * rows + start + i, lse, mask=i < queries)


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor | None,
    causal: bool,
    scale: float,
    bias_table: Tensor | None,
    window: int | None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`capt_kernels.capsule_attention`.

    Returns:
        The output, and the log-sum-exp in base 2, fp32 ``[H, R]``; +inf of a query that sees no key.
    """
    rows, heads, _ = q.shape
    out = q.new_empty(q.shape)
    lse = q.new_empty(heads, rows, dtype=torch.float32)
    blocks = blocks_for("forward", q, bias_table is not None, seed is not None)
    with torch.accelerator.device_index(q.device.index):
        if q.numel():
            forward_kernel[programs(rows, cu_seqlens, blocks.m), heads](
                **arguments(q, k, v, cu_seqlens, cu_seqlens_k, causal, scale, bias_table, window, dropout_p, seed),
                out_ptr=out, lse_ptr=lse, **blocks.options,
            )  # fmt: skip
    return out, lse
