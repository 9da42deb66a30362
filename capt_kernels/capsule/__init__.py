"""The capsule ops: put the slot in front, overwrite it between layers, and do so inside the residual add and RMSNorm.

Each public function validates, then hands over to a backend: ``reference`` (plain torch) or the fused kernels.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from ..backends import kernels, resolve
from ..validation import MOST_ROWS, boolean_mask, check_cu_seqlens, check_floating, check_same_device, check_shape
from . import fused, reference


def _run(backend: str, op: str, device: torch.device, *arguments):
    name = resolve(backend, device)
    if name == "reference":
        return getattr(reference, op)(*arguments)
    return getattr(fused, op)(kernels("capsule", name), *arguments)


def _prompt_and_place(
    name: str, hidden: Tensor, prompt: Tensor, mask, cu_seqlens, pool_mask, lead: Any, pool: Any, held: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, int, bool]:
    """Checks a call; returns the prompt as [B, K, D], the rows that may enter the pool, int32 offsets, lead and pool.

    ``held`` tells whether ``hidden`` holds the slots already (then a padded mask covers T = rows - K tokens).
    """
    check_floating(name, hidden)
    check_floating("prompt", prompt)
    check_same_device(
        name, hidden, [("prompt", prompt), ("mask", mask), ("cu_seqlens", cu_seqlens), ("pool_mask", pool_mask)]
    )
    if isinstance(lead, bool) or not isinstance(lead, int) or lead < 0:
        raise ValueError(f"lead must be a non-negative int, got {lead!r}")
    if not isinstance(pool, bool):
        raise ValueError(f"pool must be a bool, got {pool!r}")
    packed = cu_seqlens is not None
    if packed and mask is not None:
        raise ValueError(
            "mask and cu_seqlens were both given: a packed call holds no padding, so it takes cu_seqlens alone"
        )
    if hidden.dim() != (2 if packed else 3):
        wanted = "[R, D] with cu_seqlens" if packed else "[B, T, D] without cu_seqlens"
        raise ValueError(f"{name} must have shape {wanted}, got {tuple(hidden.shape)}")
    if lead and not packed:
        raise ValueError(
            f"lead counts real rows, so it wants a packed call (cu_seqlens), got lead={lead} with {name} padded"
        )
    if prompt.dim() not in (1, 2, 3) or prompt.shape[-1] != hidden.shape[-1]:
        raise ValueError(
            f"prompt must have shape [D], [K, D] or [B, K, D] with D = {hidden.shape[-1]} as {name} has, "
            f"got {tuple(prompt.shape)}"
        )
    if packed:
        cu_seqlens = check_cu_seqlens("cu_seqlens", cu_seqlens, hidden.shape[0])
        batch = cu_seqlens.shape[0] - 1
    else:
        batch = hidden.shape[0]
    if prompt.dim() == 3 and prompt.shape[0] != batch:
        raise ValueError(f"prompt [B, K, D] must have B = {batch} sequences as {name} has, got {prompt.shape[0]}")
    prompt = prompt.expand(batch, -1, -1) if prompt.dim() != 1 else prompt.expand(batch, 1, -1)
    slots = prompt.shape[1]
    if slots == 0:
        raise ValueError("prompt must hold at least one slot, got K = 0")
    if held and not packed and hidden.shape[1] < slots:
        raise ValueError(
            f"{name} must hold the {slots} slots of prompt in front, got {hidden.shape[1]} rows a sequence"
        )

    if packed:
        if pool_mask is not None:
            check_shape("pool_mask", pool_mask, (hidden.shape[0],), "[R]")
            pool_mask = boolean_mask("pool_mask", pool_mask)
        return prompt, pool_mask, cu_seqlens, min(lead, MOST_ROWS), pool
    tokens = (batch, hidden.shape[1] - (slots if held else 0))
    masks = []
    for mask_name, given in (("mask", mask), ("pool_mask", pool_mask)):
        if given is not None:
            check_shape(mask_name, given, tokens, "[B, T]")
            masks.append(boolean_mask(mask_name, given))
    return prompt, functools.reduce(torch.logical_and, masks) if masks else None, None, 0, pool


def capsule_prepend(
    hidden: Tensor,
    prompt: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    pool_mask: Tensor | None = None,
    lead: int = 0,
    pool: bool = True,
    backend: str = "auto",
) -> Tensor:
    """Puts K capsule slots in front of every sequence: ``S = prompt + pool(hidden)`` (CaPT, Eq. 2, layer 1).

    The pool is the mean of a sequence's real rows; with K slots, their adaptive mean pool into K pieces. Sums are in
    fp32 (fp64 for fp64 input). An empty pool gives ``S = prompt``. Padding rows are carried through and never pooled.

    Args:
        hidden: ``[B, T, D]`` padded, or ``[R, D]`` packed. fp32, fp16, bf16 or fp64.
        prompt: ``[D]``, ``[K, D]``, or ``[B, K, D]`` for one prompt a sequence. Any float dtype; its gradient has it
            too.
        mask: ``[B, T]``, padded calls only: 1 = real. Bool, integer or float of 0 and 1.
        cu_seqlens: ``[B+1]`` int32 offsets of a packed call. Rows past the last one are carried through behind.
        pool_mask: ``[B, T]`` or ``[R]``: narrows the pool further; ANDed with ``mask``.
        lead: real rows that stay in front of the slots (packed calls); a shorter sequence has its slots behind what
            it has.
        pool: False leaves the mean out: ``S = prompt``.
        backend: "auto", "reference", "cpu" or "triton".

    Returns:
        ``[B, K+T, D]``, or ``[R + B*K, D]`` whose offsets are ``cu_seqlens + K * arange(B + 1)``. dtype of ``hidden``.

    Raises:
        ValueError: a shape, dtype, device, mask or offset that does not fit. ImportError: ``backend`` is not on this
            machine.
    """
    place = _prompt_and_place("hidden", hidden, prompt, mask, cu_seqlens, pool_mask, lead, pool, held=False)
    return _run(backend, "capsule_prepend", hidden.device, hidden, *place)


def capsule_refresh(
    hidden: Tensor,
    prompt: Tensor,
    mask: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    pool_mask: Tensor | None = None,
    lead: int = 0,
    pool: bool = True,
    backend: str = "auto",
) -> Tensor:
    """Overwrites the K slots ``hidden`` holds: ``S = prompt + pool(slots ++ real rows)`` (CaPT, Eq. 2, layers 2..N).

    Out of place. The old slots always pool, in front of the real rows; the divisor is n + K. Arguments as
    :func:`capsule_prepend`, except:

    Args:
        hidden: ``[B, K+T, D]`` with the slots in rows 0..K-1, or ``[R, D]`` with them behind ``lead`` rows of each
            sequence. A packed sequence with fewer than K rows holds no slots and is carried through.
        mask, pool_mask: cover the T tokens of a padded call; a packed ``pool_mask [R]`` is ignored at slot rows.

    Returns:
        A tensor of the shape and dtype of ``hidden``.

    Raises:
        ValueError: a shape, dtype, device, mask or offset that does not fit. ImportError: ``backend`` is not on this
            machine.
    """
    place = _prompt_and_place("hidden", hidden, prompt, mask, cu_seqlens, pool_mask, lead, pool, held=True)
    return _run(backend, "capsule_refresh", hidden.device, hidden, *place)


def add_rms_norm(
    branch: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    prompt: Tensor | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    pool_mask: Tensor | None = None,
    lead: int = 0,
    pool: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Residual add, capsule refresh and RMSNorm in one pass over memory.

    ``x = residual + branch``; with ``prompt``, x's slots become ``prompt + pool(x)`` as in :func:`capsule_refresh`;
    ``normed = x / sqrt(mean(x^2) + eps) * weight``, in fp32 (fp64 for fp64). x is rounded to its dtype first, so that
    normed follows from the residual that is handed on. ``weight``'s gradient is computed when it requires one.

    Args:
        branch: the output of the layer's attention or MLP, shaped as ``residual``, or None.
        residual: ``[B, K+T, D]`` or ``[R, D]`` packed; without a prompt any ``[..., D]``. fp32, fp16, bf16 or fp64.
        weight: ``[D]``, any float dtype.
        eps: added to the mean square; non-negative.
        prompt, mask, cu_seqlens, pool_mask, lead, pool, backend: as :func:`capsule_refresh`. Without a prompt, the
            five in the middle are refused.

    Returns:
        ``(normed, residual_out)``, both of the shape and dtype of ``residual``; ``residual_out`` is x. Without a branch
        and a prompt there is nothing to write, and ``residual_out`` is ``residual`` itself, not a copy.

    Raises:
        ValueError: a shape, dtype, device, mask or offset that does not fit. ImportError: ``backend`` is not on this
            machine.
    """
    check_floating("residual", residual)
    check_floating("weight", weight)
    if residual.dim() < 1:
        raise ValueError("residual must have shape [..., D], got a scalar")
    check_shape("weight", weight, residual.shape[-1:], "[D]")
    check_same_device("residual", residual, [("branch", branch), ("weight", weight)])
    if branch is not None:
        check_shape("branch", branch, tuple(residual.shape), "residual's")
        if branch.dtype != residual.dtype:
            raise ValueError(f"branch must have residual's dtype {residual.dtype}, got {branch.dtype}")
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < math.inf:
        raise ValueError(f"eps must be a non-negative finite number, got {eps!r}")
    place: tuple = (None, None, None, 0, True)
    if prompt is not None:
        place = _prompt_and_place("residual", residual, prompt, mask, cu_seqlens, pool_mask, lead, pool, held=True)
    else:
        tensors = (("mask", mask), ("cu_seqlens", cu_seqlens), ("pool_mask", pool_mask))
        given = [name for name, tensor in tensors if tensor is not None]
        given += ["lead"] * (lead != 0) + ["pool"] * (pool is not True)
        if given:
            raise ValueError(
                f"{given[0]} tells where a prompt's slots are or what enters them, got it without a prompt"
            )
    return _run(backend, "add_rms_norm", residual.device, branch, residual, weight, float(eps), *place)


__all__ = ["add_rms_norm", "capsule_prepend", "capsule_refresh"]
