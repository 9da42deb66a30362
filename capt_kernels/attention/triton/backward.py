"""The backward: every score is computed again, once for the queries' gradients and once for the keys' and values'.

With P the weights and dO the incoming gradient: ``dV = P^T dO``, ``dS = P * (dO V^T - delta)``, ``dQ = scale * dS K``,
``dK = scale * dS^T Q``, where delta is the row sum of ``dO * O``. Dropout by M, the mask over ``1 - p``, makes it
``dV = (P * M)^T dO`` and ``dS = P * (M * dO V^T - delta)``. The kernel of queries goes first, since it has the
rows at hand that delta needs, and leaves it for the other. The bias is frozen: there is no gradient of it, and dS never
leaves the registers.
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
    element_strided,
    exponent,
    find_rows,
    kept,
    keys_seen,
    load_rows,
    programs,
    queries_seeing,
    score,
    seen,
    store_rows,
)


@triton.jit
def query_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, grad_ptr, out_ptr, lse_ptr, delta_ptr, dq_ptr, cu_ptr, cu_k_ptr,
    q_stride, q_stride_h, k_stride, k_stride_h, v_stride, v_stride_h, grad_stride, grad_stride_h,
    batch, rows, key_rows, heads, group, reach, window, scale, seed_ptr, threshold, rescale,
    HEAD: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes ``delta`` and (unless ``dq_ptr`` is None) the gradient of a block of queries of one head."""
    head = tl.program_id(1)
    block, start, queries, key_start, keys = find_rows(
        tl.program_id(0), cu_ptr, cu_k_ptr, batch, rows, key_rows, BLOCK_M
    )
    if block * BLOCK_M >= queries:
        return
    first = (tl.cdiv(queries, BLOCK_M) - 1 - block) * BLOCK_M
    i = first + tl.arange(0, BLOCK_M)

    grad_ptr += start * grad_stride + tl.cast(head, tl.int64) * grad_stride_h
    out_ptr += start * heads * HEAD + head * HEAD
    line = tl.cast(head, tl.int64) * rows + start
    grad = load_rows(grad_ptr, grad_stride, first, queries, HEAD, BLOCK_M, BLOCK_D)
    out = load_rows(out_ptr, heads * HEAD, first, queries, HEAD, BLOCK_M, BLOCK_D)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + line + i, delta, mask=i < queries)
    if dq_ptr is None:
        return

    q_ptr += start * q_stride + tl.cast(head, tl.int64) * q_stride_h
    k_ptr += key_start * k_stride + tl.cast(head // group, tl.int64) * k_stride_h
    v_ptr += key_start * v_stride + tl.cast(head // group, tl.int64) * v_stride_h
    if bias_ptr is not None:
        bias_ptr = bias_origin(bias_ptr, head, reach)
        keys = tl.where(tl.maximum(queries, keys) > reach, 0, keys)
    q = load_rows(q_ptr, q_stride, first, queries, HEAD, BLOCK_M, BLOCK_D)
    lse = tl.load(lse_ptr + line + i, mask=i < queries, other=0)

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    factor = exponent(scale, bias_ptr)
    low, high = keys_seen(first, queries, keys, window, CAUSAL, BLOCK_M, BLOCK_N)
    for start_n in range(low, high, BLOCK_N):
        j = start_n + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, k_stride, start_n, keys, HEAD, BLOCK_N, BLOCK_D)
        v = load_rows(v_ptr, v_stride, start_n, keys, HEAD, BLOCK_N, BLOCK_D)
        product = tl.dot(q, tl.trans(k), input_precision="ieee")
        s = score(product, i[:, None], j[None, :], bias_ptr, scale, queries, keys)
        p = tl.math.exp2(s * factor - lse[:, None])
        # Selected, not subtracted from: what exp2 makes of the score of a key that is not seen goes here.
        p = tl.where(seen(i[:, None], j[None, :], queries, keys, window, CAUSAL), p, 0.0)
        dp = tl.dot(grad, tl.trans(v), input_precision="ieee")
        if seed_ptr is not None:
            keep = kept(seed_ptr, threshold, head, start + first, start_n, False, BLOCK_M, BLOCK_N)
            dp = tl.where(keep, dp * rescale, 0.0)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    dq_ptr += start * heads * HEAD + head * HEAD
    store_rows(dq_ptr, heads * HEAD, first, queries, dq * scale, HEAD, BLOCK_M, BLOCK_D)


@triton.jit
def key_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, grad_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, cu_ptr, cu_k_ptr,
    q_stride, q_stride_h, k_stride, k_stride_h, v_stride, v_stride_h, grad_stride, grad_stride_h,
    batch, rows, key_rows, heads, group, reach, window, scale, seed_ptr, threshold, rescale,
    HEAD: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of a block of keys and values of one head, summed over the query heads of its group."""
    key_head = tl.program_id(1)
    block, key_start, keys, start, queries = find_rows(
        tl.program_id(0), cu_k_ptr, cu_ptr, batch, key_rows, rows, BLOCK_N
    )
    # Earlier keys of a causal call are seen by more queries: they are in front already.
    first = block * BLOCK_N
    if first >= keys:
        return
    j = first + tl.arange(0, BLOCK_N)

    k_ptr += key_start * k_stride + tl.cast(key_head, tl.int64) * k_stride_h
    v_ptr += key_start * v_stride + tl.cast(key_head, tl.int64) * v_stride_h
    k = load_rows(k_ptr, k_stride, first, keys, HEAD, BLOCK_N, BLOCK_D)
    v = load_rows(v_ptr, v_stride, first, keys, HEAD, BLOCK_N, BLOCK_D)
    q_ptr += start * q_stride
    grad_ptr += start * grad_stride
    lse_ptr += start
    delta_ptr += start
    if bias_ptr is not None:
        queries = tl.where(tl.maximum(queries, keys) > reach, 0, queries)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    factor = exponent(scale, bias_ptr)
    low, high = queries_seeing(first, queries, keys, window, CAUSAL, BLOCK_M, BLOCK_N)
    steps = tl.cdiv(tl.maximum(high - low, 0), BLOCK_M)
    # One loop over all heads of the group, so that loads are in flight from one to the next.
    for step in range(0, group * steps):
        head = tl.cast(key_head * group + step // steps, tl.int64)
        start_m = low + step % steps * BLOCK_M
        i = start_m + tl.arange(0, BLOCK_M)
        q = load_rows(q_ptr + head * q_stride_h, q_stride, start_m, queries, HEAD, BLOCK_M, BLOCK_D)
        grad = load_rows(grad_ptr + head * grad_stride_h, grad_stride, start_m, queries, HEAD, BLOCK_M, BLOCK_D)
        # Queries past the last one have no weight: exp2(-inf).
        lse = tl.load(lse_ptr + head * rows + i, mask=i < queries, other=float("inf"))
        delta = tl.load(delta_ptr + head * rows + i, mask=i < queries, other=0)
        bias_head = bias_ptr
        if bias_ptr is not None:
            bias_head = bias_origin(bias_ptr, head, reach)
        product = tl.dot(k, tl.trans(q), input_precision="ieee")
        s = score(product, i[None, :], j[:, None], bias_head, scale, queries, keys)
        p = tl.math.exp2(s * factor - lse[None, :])
        if CAUSAL:
            p = tl.where(seen(i[None, :], j[:, None], queries, keys, window, CAUSAL), p, 0.0)
        # The orders in which neither spills: a mask lives from its first use to its last.
        if seed_ptr is None:
            dv = tl.dot(p.to(grad.dtype), grad, dv, input_precision="ieee")
            dp = tl.dot(v, tl.trans(grad), input_precision="ieee")
        else:
            dp = tl.dot(v, tl.trans(grad), input_precision="ieee")
            keep = kept(seed_ptr, threshold, head, start + start_m, first, True, BLOCK_M, BLOCK_N)
            dp = tl.where(keep, dp * rescale, 0.0)
            dv = tl.dot(tl.where(keep, p, 0.0).to(grad.dtype), grad, dv, input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    if seed_ptr is not None:
        dv *= rescale
    key_heads = heads // group
    offset = key_start * key_heads * HEAD + key_head * HEAD
    store_rows(dk_ptr + offset, key_heads * HEAD, first, keys, dk * scale, HEAD, BLOCK_N, BLOCK_D)
    store_rows(dv_ptr + offset, key_heads * HEAD, first, keys, dv, HEAD, BLOCK_N, BLOCK_D)


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor | None,
    causal: bool,
    scale: float,
    bias_table: Tensor | None,
    window: int | None,
    need_q: bool,
    need_keys: bool,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each empty unless asked for; those of k and v come together."""
    (rows, heads, _), (key_rows, key_heads, _) = q.shape, k.shape
    dq = q.new_empty(q.shape if need_q else 0)
    dk, dv = (x.new_empty(x.shape if need_keys else 0) for x in (k, v))
    delta = torch.empty_like(lse)
    grad = element_strided(grad)
    common = arguments(q, k, v, cu_seqlens, cu_seqlens_k, causal, scale, bias_table, window, dropout_p, seed)
    common |= {"grad_ptr": grad, "grad_stride": grad.stride(0), "grad_stride_h": grad.stride(1)}
    common |= {"lse_ptr": lse, "delta_ptr": delta}
    with torch.accelerator.device_index(q.device.index):
        if q.numel():
            blocks = blocks_for("queries", q, bias_table is not None, seed is not None)
            query_kernel[programs(rows, cu_seqlens, blocks.m), heads](
                **common, out_ptr=out.contiguous(), dq_ptr=dq if need_q else None, **blocks.options
            )
        if k.numel() and need_keys:
            blocks = blocks_for("keys", q, bias_table is not None, seed is not None)
            key_kernel[programs(key_rows, cu_seqlens, blocks.n), key_heads](
                **common, dk_ptr=dk, dv_ptr=dv, **blocks.options
            )
    return dq, dk, dv
