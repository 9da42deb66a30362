"""Attention over packed rows, each led by its capsule slot: grouped heads, causal, window, T5 bias, dropout."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..backends import flash_attn_status, interpreted, kernels, resolve
from ..packing import real_positions, take, unpack
from ..rotary import apply_rotary
from ..validation import (
    MOST_ROWS,
    boolean_mask,
    check_cu_seqlens,
    check_floating,
    check_same_device,
    check_shape,
    is_readable,
)
from . import flash_attn, fused, reference, sdpa
from .dropout import seed_of
from .t5_bias import t5_bias_table

_BACKENDS = ("reference", "cpu", "sdpa", "triton", "flash_attn")
_WIDEST_HEAD = 256


def _check_heads(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    """Shapes and dtypes of queries, keys and values among themselves."""
    check_floating("q", q)
    if q.dim() != (3 if packed else 4):
        wanted = "[R, H, d] with cu_seqlens" if packed else "[B, T, H, d] without cu_seqlens"
        raise ValueError(f"q must have shape {wanted}, got {tuple(q.shape)}")
    fits = k.dim() == q.dim() and k.shape[-1] == q.shape[-1] and (packed or k.shape[0] == q.shape[0])
    if not fits:
        meaning = "[Rk, Hkv, d]" if packed else "[B, Tk, Hkv, d]"
        raise ValueError(f"k must have shape {meaning} that fits q's {tuple(q.shape)}, got {tuple(k.shape)}")
    check_shape("v", v, tuple(k.shape), "k's")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"q's heads must be a multiple of k's, got {q.shape[-2]} and {k.shape[-2]}")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name} must have q's dtype {q.dtype}, got {tensor.dtype}")


def _check_options(causal: bool, scale: float, window: int | None, dropout_p: float, backend: str) -> None:
    if not isinstance(causal, bool):
        raise ValueError(f"causal must be a bool, got {causal!r}")
    # Kernels multiply masked scores too, and -inf times a scale that is not positive is not -inf.
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise ValueError(f"scale must be a positive finite number, got {scale!r}")
    if window is not None:
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(f"window must be None or a positive int, got {window!r}")
        if not causal:
            raise ValueError(f"window looks back only, so it wants causal=True, got window={window} with causal=False")
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, int | float) or not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be a number from 0 up to, but not, 1, got {dropout_p!r}")
    if backend != "auto" and backend not in _BACKENDS:
        raise ValueError(f"backend must be 'auto' or one of {', '.join(_BACKENDS)} for attention, got {backend!r}")


def _check_bias(bias_table: Tensor, q: Tensor) -> None:
    check_floating("bias_table", bias_table)
    heads = q.shape[-2]
    if bias_table.dim() != 2 or bias_table.shape[0] != heads or bias_table.shape[1] % 2 == 0:
        raise ValueError(f"bias_table must have shape [H, 2*Tmax-1] with H = {heads}, got {tuple(bias_table.shape)}")
    if bias_table.requires_grad and torch.is_grad_enabled():
        raise ValueError("bias_table must need no gradient (detach it), as none is computed for it")


def _check_reach(bias_table: Tensor, longest: int) -> None:
    reach = (bias_table.shape[1] + 1) // 2
    if longest > reach:
        raise ValueError(f"bias_table must reach Tmax = {longest}, the longest sequence, got one for {reach}")


def _obstacle(backend: str, q: Tensor, bias_table: Tensor | None, drops: bool) -> str | None:
    """What a backend other than the reference cannot serve of a call, or None."""
    if drops and backend in ("sdpa", "flash_attn"):
        return "takes no dropout_p: its weights do not drop out by the seed that tells all other backends which"
    if backend in ("sdpa", "cpu"):
        return None
    if backend == "flash_attn" and bias_table is not None:
        return "takes no bias_table"
    dtypes = [torch.float16, torch.bfloat16]
    if backend == "triton":
        dtypes.append(torch.float32)
        if q.dtype == torch.bfloat16 and interpreted():
            return "has no bfloat16 product in Triton's interpreter: it wants a GPU, or float32 or float16"
    if q.dtype not in dtypes:
        return f"takes q in {', '.join(str(dtype) for dtype in dtypes)}, got {q.dtype}"
    multiple = 8 if backend == "flash_attn" else 1
    if q.shape[-1] > _WIDEST_HEAD or q.shape[-1] % multiple:
        only = f", multiples of {multiple}" if multiple > 1 else ""
        return f"takes head sizes up to {_WIDEST_HEAD}{only}, got {q.shape[-1]}"
    return None


def _choose(backend: str, q: Tensor, bias_table: Tensor | None, drops: bool) -> str:
    """The backend of a call; FlashAttention's own kernels are the fastest where they serve it."""
    plain = "reference" if drops else "sdpa"
    if backend == "auto":
        fused = resolve("auto", q.device)
        if fused != "triton":
            return "cpu" if fused == "cpu" else plain
        # Its lengths are read on the host, which would break torch.compile's graph.
        flash = q.device.type == "cuda" and not torch.compiler.is_compiling()
        if flash and not _obstacle("flash_attn", q, bias_table, drops) and flash_attn_status(q.device).available:
            return "flash_attn"
        return plain if _obstacle("triton", q, bias_table, drops) else "triton"
    if backend == "reference":
        return backend
    if backend in ("cpu", "triton"):
        resolve(backend, q.device)
    elif backend == "flash_attn":
        status = flash_attn_status(q.device)
        if not status.available:
            raise ImportError(f"backend 'flash_attn' is not available: {status.reason}")
        if q.device.type != "cuda":
            raise ValueError(f"backend 'flash_attn' serves tensors on cuda, got a tensor on {q.device}")
    obstacle = _obstacle(backend, q, bias_table, drops)
    if obstacle is not None:
        raise ValueError(f"backend {backend!r} {obstacle}")
    return backend


def _run(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor | None,
    causal: bool,
    scale: float,
    bias_table: Tensor | None,
    window: int | None,
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    """A packed call that has been checked, but for the reach of its bias; the offsets of k are q's where None."""
    name = _choose(backend, q, bias_table, seed is not None)
    # A fused call on a GPU leaves the lengths there, as reading them would stall the stream; nor has a trace any.
    looked_at = bias_table is not None and is_readable(cu_seqlens)
    if name in ("reference", "sdpa") or looked_at:
        queries = cu_seqlens.diff().tolist()
        keys = queries if cu_seqlens_k is None else cu_seqlens_k.diff().tolist()
        if bias_table is not None:
            _check_reach(bias_table, max([*queries, *keys], default=0))
        with torch.autocast(q.device.type, enabled=False):  # q tells the dtype of the result, whoever asks
            if name == "reference":
                return reference.attention(q, k, v, queries, keys, causal, scale, bias_table, window, dropout_p, seed)
            if name == "sdpa":
                return sdpa.attention(q, k, v, queries, keys, causal, scale, bias_table, window)
    if name == "flash_attn":
        return flash_attn.attention(q, k, v, cu_seqlens, cu_seqlens_k, causal, scale, window)
    room = kernels("attention", name)
    where = (cu_seqlens, cu_seqlens_k, causal, scale, bias_table, window)
    return fused.attention(room, q, k, v, *where, dropout_p, seed)


def capsule_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool,
    scale: float,
    rotary: tuple[Tensor, Tensor] | None = None,
    bias_table: Tensor | None = None,
    window: int | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Softmax attention of every sequence over itself: ``dropout(softmax(scale * q @ k.T + bias)) @ v``.

    Scores, bias and softmax are in fp32 (fp64 for fp64 input). Grouped heads: query head h reads key head
    ``h // (H / Hkv)``. With m keys against n queries, query i stands at key position ``i + m - n``: the last query is
    aligned to the last key, and causality, window and bias are counted from there. A query that sees no key gives 0.

    Dropout is torch's: a weight is 0 with probability ``dropout_p``, and divided by ``1 - dropout_p`` else. Which ones
    drop is a pure function of the seed and of a weight's place, Philox-4x32-7 (Salmon et al. 2011; :mod:`.dropout` has
    the layout of its counter): one seed has one mask on every backend, and nothing of T x T is kept for backward.

    "reference", "sdpa" and "flash_attn" read the lengths on the host, where ``torch.compile`` breaks the graph.

    Args:
        q: ``[R, H, d]`` packed, or ``[B, T, H, d]`` padded. fp32, fp16, bf16 or fp64.
        k, v: ``[Rk, Hkv, d]``, or ``[B, Tk, Hkv, d]`` with Tk >= T; dtype of q; H a multiple of Hkv.
        cu_seqlens: ``[B+1]`` int32 offsets of a packed call. Rows past the last one are 0 in the result.
        cu_seqlens_k: ``[B+1]`` int32, the offsets of k and v where they differ from q's (prefix keys, cached decoding).
        mask: ``[B, Tk]``, padded calls only: 1 = real, holes allowed; its last T columns are the queries'.
            Real positions are packed at the door, so that padding is not seen and does not count for a distance.
        causal: whether a query sees only keys up to its own position.
        scale: positive factor of the scores; T5 wants 1.
        rotary: ``(cos, sin)``, ``[R, d]`` or ``[B, T, d]``: q and k go through :func:`apply_rotary` first, which wants
            one key a query.
        bias_table: ``[H, 2*Tmax-1]``: ``bias_table[h, j - i + Tmax - 1]`` is added to the score of key j at query i of
            head h (see :func:`t5_bias_table`). Frozen: no gradient is computed for it. "triton" on a GPU does not look
            at the lengths: there a sequence longer than Tmax gives NaN and no error.
        window: W: a query at i sees the keys ``i - W < j <= i`` of a causal call.
        dropout_p: from 0 up to, but not, 1. "sdpa" and "flash_attn" take 0 alone.
        seed: an int, or an int64 tensor of one element; looked at where ``dropout_p`` is not 0. None draws one from the
            default generator of q's device, where ``torch.manual_seed`` and checkpointing find it.
        backend: "auto", "reference", "cpu", "sdpa" (torch's scaled_dot_product_attention a sequence at a time, any
            device), "triton" (head sizes up to 256, no fp64), or "flash_attn" (the flash-attn package, or torch's own
            build of it; fp16 and bf16, no bias).

    Returns:
        The shape and dtype of q; 0 in padding.

    Raises:
        ValueError: a shape, dtype, device, mask, offset or option that does not fit, or that ``backend`` cannot serve.
        ImportError: ``backend`` is not on this machine.
    """
    packed = cu_seqlens is not None
    if packed and mask is not None:
        raise ValueError(
            "mask and cu_seqlens were both given: a packed call holds no padding, so it takes cu_seqlens alone"
        )
    if cu_seqlens_k is not None and not packed:
        raise ValueError("cu_seqlens_k was given without cu_seqlens: a padded call tells its keys by mask")
    _check_heads(q, k, v, packed)
    _check_options(causal, scale, window, dropout_p, backend)
    if bias_table is not None:
        _check_bias(bias_table, q)
    tensors = [("k", k), ("v", v), ("cu_seqlens", cu_seqlens), ("cu_seqlens_k", cu_seqlens_k)]
    check_same_device("q", q, [*tensors, ("mask", mask), ("bias_table", bias_table)])

    # Rotation and packing have backends of their own; the oracle stays plain torch throughout.
    door = "reference" if backend == "reference" else "auto"
    if rotary is not None:
        if not isinstance(rotary, tuple | list) or len(rotary) != 2:
            raise ValueError(f"rotary must be a pair (cos, sin), got {type(rotary).__name__}")
        if cu_seqlens_k is not None or k.shape[:-2] != q.shape[:-2]:
            given = "cu_seqlens_k" if cu_seqlens_k is not None else f"q {tuple(q.shape)} and k {tuple(k.shape)}"
            raise ValueError(f"rotary turns q and k by one table and wants one key a query, got {given}")
        q, k = apply_rotary(q, k, *rotary, backend=door)

    drawn = seed_of(seed, q.device) if dropout_p else None
    window = None if window is None else min(window, MOST_ROWS)
    options = (causal, float(scale), bias_table, window, float(dropout_p), drawn)
    if cu_seqlens is not None:
        cu_seqlens = check_cu_seqlens("cu_seqlens", cu_seqlens, q.shape[0])
        if cu_seqlens_k is None:
            check_shape("k", k, (q.shape[0], *k.shape[1:]), "[R, Hkv, d] without cu_seqlens_k")
        else:
            cu_seqlens_k = check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, k.shape[0])
            check_shape("cu_seqlens_k", cu_seqlens_k, tuple(cu_seqlens.shape), "cu_seqlens's")
        return _run(backend, q, k, v, cu_seqlens, cu_seqlens_k, *options)

    batch, length = q.shape[:2]
    if k.shape[1] < length:
        raise ValueError(f"k must have at least the {length} tokens of q in a padded call, got {k.shape[1]}")
    if mask is None:
        each = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        rows, key_rows, value_rows = (x.flatten(0, 1) for x in (q, k, v))
        out = _run(backend, rows, key_rows, value_rows, each * length, each * k.shape[1], *options)
        return out.unflatten(0, (batch, length))
    check_shape("mask", mask, tuple(k.shape[:2]), "[B, Tk]")
    mask = boolean_mask("mask", mask)
    # On a GPU the host waits for each look at a mask: one, where queries and keys have the same.
    cu_seqlens_k, key_indices = real_positions(mask)
    cu_seqlens, indices = cu_seqlens_k, key_indices
    if mask.shape[1] != length:
        cu_seqlens, indices = real_positions(mask[:, mask.shape[1] - length :])
    q, k, v = take(q, indices, door), take(k, key_indices, door), take(v, key_indices, door)
    out = _run(backend, q, k, v, cu_seqlens, cu_seqlens_k, *options)
    return unpack(out, indices, batch, length, backend=door)


__all__ = ["capsule_attention", "t5_bias_table"]
