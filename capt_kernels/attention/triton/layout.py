"""Which rows a program owns, which rows of the other side they meet, and how a score is formed.

A program owns ``BLOCK`` rows of one sequence. Nothing about a batch is read back to the host, not even its longest
sequence: sequence b's programs start at ``cu_seqlens[b] // BLOCK + b``, which leaves room for a last, partly filled
block of each, so a grid of ``rows // BLOCK + B + 1`` programs covers any lengths and uneven ones waste next to nothing.
A program finds its sequence by counting the starts up to its own id. What lies past the last offset counts as sequence
B, which meets no rows of the other side: its results are 0.

Query i of n stands at key position ``i + m - n``, the last query at the last of m keys.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .. import dropout

#: Sequence starts that a program looks through at once.
_SEARCH = tl.constexpr(256)
LOG2_E = tl.constexpr(1.4426950408889634)
ROUNDS = tl.constexpr(dropout.ROUNDS)


@triton.jit
def _span(sequence, cu_ptr, rows):
    # Offsets on a GPU are not looked at before a launch: wrong ones must not lead outside the tensor.
    begin = tl.minimum(tl.maximum(tl.load(cu_ptr + sequence), 0), rows)
    stop = tl.minimum(tl.load(cu_ptr + sequence + 1), rows)
    return begin, tl.maximum(stop - begin, 0)


@triton.jit
def find_rows(program, cu_ptr, other_cu_ptr, batch, rows, other_rows, BLOCK: tl.constexpr):
    """A program's block within its sequence, and where that sequence starts and how long it is, on both sides."""
    rows, other_rows = tl.cast(rows, tl.int32), tl.cast(other_rows, tl.int32)
    sequence = -1
    for i in range(0, batch + 1, _SEARCH):
        index = i + tl.arange(0, _SEARCH)
        offset = tl.load(cu_ptr + index, mask=index <= batch, other=0)
        begun = tl.minimum(tl.maximum(offset, 0), rows) // BLOCK + index <= program
        sequence += tl.sum((begun & (index <= batch)).to(tl.int32), 0)
    sequence = tl.maximum(sequence, 0)
    if sequence < batch:
        start, length = _span(sequence, cu_ptr, rows)
        other_start, other_length = _span(sequence, other_cu_ptr, other_rows)
    else:
        start = tl.minimum(tl.maximum(tl.load(cu_ptr + batch), 0), rows)
        length = rows - start
        other_start = start * 0
        other_length = start * 0
    block = tl.maximum(program - sequence - start // BLOCK, 0)
    return block, start.to(tl.int64), length, other_start.to(tl.int64), other_length


@triton.jit
def keys_seen(first, queries, keys, window, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys that queries ``first .. first + BLOCK_M - 1`` see: from (a whole number of blocks), and up to."""
    low = tl.cast(0, tl.int32)
    high = keys
    if CAUSAL:
        high = tl.minimum(keys, tl.minimum(first + BLOCK_M, queries) + keys - queries)
    if window is not None:
        low = tl.maximum(first + keys - queries - window + 1, 0) // BLOCK_N * BLOCK_N
    return low, high


@triton.jit
def queries_seeing(first, queries, keys, window, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The queries that see keys ``first .. first + BLOCK_N - 1``, as in :func:`keys_seen`."""
    low = tl.cast(0, tl.int32)
    high = queries
    if CAUSAL:
        low = tl.maximum(first - keys + queries, 0) // BLOCK_M * BLOCK_M
    if window is not None:
        high = tl.minimum(queries, tl.minimum(first + BLOCK_N, keys) - 1 + window - keys + queries)
    return low, high


@triton.jit
def load_rows(ptr, stride, first, rows, HEAD: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """``[ROWS, BLOCK_D]`` of one head, from row ``first`` on; rows from ``rows`` on are 0 and are not read."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    address = ptr + tl.cast(first, tl.int64) * stride + row[:, None] * stride + column[None, :]
    inside = (first + row < rows)[:, None]
    if HEAD < BLOCK_D:
        inside = inside & (column < HEAD)[None, :]
    return tl.load(address, mask=inside, other=0)


@triton.jit
def store_rows(ptr, stride, first, rows, tile, HEAD: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes what :func:`load_rows` reads."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    address = ptr + tl.cast(first, tl.int64) * stride + row[:, None] * stride + column[None, :]
    inside = (first + row < rows)[:, None]
    if HEAD < BLOCK_D:
        inside = inside & (column < HEAD)[None, :]
    tl.store(address, tile.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def score(product, i, j, bias_ptr, scale, queries, keys):
    """``q @ k`` with the bias of its diagonal. Without a bias the scale is left to :func:`exponent`.

    ``i`` and ``j`` number queries and keys and broadcast to the product; ``bias_ptr`` points at distance 0. Rows that
    a block has past its sequence read the last real row's bias, so that no load leaves the table.
    """
    if bias_ptr is not None:
        distance = tl.minimum(j, keys - 1) - (tl.minimum(i, queries - 1) + keys - queries)
        product = product * scale + tl.load(bias_ptr + distance).to(tl.float32)
    return product


@triton.jit
def exponent(scale, bias_ptr):
    """The factor that makes a score an exponent of 2; with it, scaling a score and taking off a maximum is one FMA."""
    return LOG2_E if bias_ptr is not None else scale * LOG2_E


@triton.jit
def seen(i, j, queries, keys, window, CAUSAL: tl.constexpr):
    """Whether query ``i`` sees key ``j``; broadcast. True of queries past the last one too, which nobody stores."""
    if CAUSAL:  # the last query stands at the last key, so that keys past it are hidden too
        visible = j <= i + (keys - queries)
        if window is not None:
            visible = visible & (j > i + (keys - queries - window))
    else:
        visible = j < keys
    return visible


@triton.jit
def kept(seed_ptr, threshold, head, row, first, KEYS_FIRST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The weights that do not drop out (see :mod:`..dropout`), of packed rows from ``row`` on, keys from ``first`` on.

    ``[BLOCK_M, BLOCK_N]``, transposed with ``KEYS_FIRST``. ``first`` is a multiple of 4.
    """
    seed = tl.load(seed_ptr)
    row = tl.cast(row, tl.int32) + tl.arange(0, BLOCK_M)
    quad = first // 4 + tl.arange(0, BLOCK_N // 4)
    if KEYS_FIRST:
        row, quad = row[None, :], quad[:, None]
    else:
        row, quad = row[:, None], quad[None, :]
    a, b, c, d = tl.philox(seed, quad, row, tl.cast(head, tl.int32), 0, ROUNDS)
    words = tl.join(tl.join(a, c), tl.join(b, d))
    if KEYS_FIRST:
        words = tl.reshape(tl.permute(words, (0, 2, 3, 1)), (BLOCK_N, BLOCK_M))
    else:
        words = tl.reshape(words, (BLOCK_M, BLOCK_N))
    return words.to(tl.int32, bitcast=True) >= threshold


@triton.jit
def bias_origin(bias_ptr, head, reach):
    """Where a head's row of the table ``[H, 2 * reach - 1]`` has distance 0."""
    return bias_ptr + tl.cast(head, tl.int64) * (2 * reach - 1) + reach - 1


def programs(rows: int, cu_seqlens: Tensor, block: int) -> int:
    """How many programs cover ``rows`` packed rows, whatever the offsets."""
    return rows // block + cu_seqlens.shape[0]


def element_strided(rows: Tensor) -> Tensor:
    """``rows`` with the elements of a head side by side, and rows near enough for 32-bit offsets inside a block."""
    fits = rows.stride(-1) == 1 or rows.shape[-1] == 1
    return rows if fits and rows.stride(0) < 2**23 else rows.contiguous()


def arguments(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None,
    causal: bool, scale: float, bias_table: Tensor | None, window: int | None, dropout_p: float, seed: Tensor | None,
) -> dict[str, Any]:  # fmt: skip
    """What every kernel takes."""
    q, k, v = element_strided(q), element_strided(k), element_strided(v)
    cu_seqlens = cu_seqlens.contiguous()
    (rows, heads, head), (key_rows, key_heads, _) = q.shape, k.shape
    return {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "bias_ptr": None if bias_table is None else bias_table.contiguous(),
        "cu_ptr": cu_seqlens, "cu_k_ptr": cu_seqlens if cu_seqlens_k is None else cu_seqlens_k.contiguous(),
        "q_stride": q.stride(0), "q_stride_h": q.stride(1), "k_stride": k.stride(0), "k_stride_h": k.stride(1),
        "v_stride": v.stride(0), "v_stride_h": v.stride(1),
        "batch": cu_seqlens.shape[0] - 1, "rows": rows, "key_rows": key_rows, "heads": heads,
        "reach": 0 if bias_table is None else (bias_table.shape[1] + 1) // 2,
        # A window as long as all keys hides none.
        "window": None if window is None or window >= key_rows else window, "scale": scale,
        "seed_ptr": seed, "threshold": None if seed is None else dropout.threshold(dropout_p),
        "rescale": None if seed is None else 1 / (1 - dropout_p),
        "group": heads // key_heads, "HEAD": head, "CAUSAL": causal, "BLOCK_D": max(16, triton.next_power_of_2(head)),
    }  # fmt: skip
