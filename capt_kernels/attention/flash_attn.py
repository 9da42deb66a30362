"""Attention through FlashAttention's kernels over packed rows: the flash-attn package's, or else torch's own build.

They take fp16 or bf16 and no bias, and leave rows past the last offset as they were, so those are cut off before. The
longest lengths and the last offsets are read on the host, once a call.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .unattended import unattended


@functools.cache
def implementation() -> str | None:
    """``"flash_attn"``, ``"torch"`` for ``torch.nn.attention.varlen``, or None where neither is installed."""
    if importlib.util.find_spec("flash_attn") is not None:
        return "flash_attn"
    if importlib.util.find_spec("torch.nn.attention.varlen") is not None:
        varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
        # Its first versions had neither.
        if {"scale", "window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys():
            return "torch"
    return None


def _kernel(causal: bool, scale: float, window: int | None, grouped: bool) -> Callable[..., Tensor]:
    # Their window is the number of keys to the left and to the right of a query, itself not counted; -1 is no limit.
    sides = (-1 if window is None else window - 1, 0 if causal else -1)
    if implementation() == "flash_attn":
        return functools.partial(
            importlib.import_module("flash_attn").flash_attn_varlen_func,
            softmax_scale=scale,
            causal=causal,
            window_size=sides,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    return functools.partial(varlen_attn, scale=scale, window_size=sides, enable_gqa=grouped)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
) -> Tensor:
    """See :func:`capt_kernels.capsule_attention`."""
    cu_seqlens_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    if cu_seqlens.shape[0] == 1:
        longest = longest_k = rows = rows_k = 0
    else:
        ends = [cu_seqlens.diff().max(), cu_seqlens_k.diff().max(), cu_seqlens[-1], cu_seqlens_k[-1]]
        longest, longest_k, rows, rows_k = torch.stack(ends).tolist()
    if rows == 0 or rows_k == 0:
        return unattended(q, k, v)
    kernel = _kernel(causal, scale, window, grouped=q.shape[1] != k.shape[1])
    # torch hands them on as they are to kernels that want the elements of a head side by side.
    q_rows, k_rows, v_rows = (x if x.stride(-1) == 1 else x.contiguous() for x in (q[:rows], k[:rows_k], v[:rows_k]))
    out = kernel(q_rows, k_rows, v_rows, cu_seqlens, cu_seqlens_k, longest, longest_k)
    return F.pad(out, (0, 0, 0, 0, 0, q.shape[0] - rows)) if rows < q.shape[0] else out
