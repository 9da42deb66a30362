"""T5's relative position bias as a table of diagonals."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..validation import check_floating


def _buckets(distance: Tensor, bidirectional: bool, num_buckets: int, max_distance: int) -> Tensor:
    """The bucket of each key-minus-query distance: exact for the near half, then logarithmic up to ``max_distance``.

    The logarithm is taken in fp32 in the order that T5 was trained with, since a bucket's edge hangs on its rounding.
    """
    side = torch.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        side = (distance > 0) * num_buckets
        behind = distance.abs()
    else:
        behind = (-distance).clamp(min=0)
    exact = num_buckets // 2
    octaves = torch.log(behind.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (octaves * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return side + torch.where(behind < exact, behind, far)


def t5_bias_table(
    relative_attention_bias_weight: Tensor,
    max_length: int,
    *,
    bidirectional: bool,
    num_buckets: int,
    max_distance: int,
) -> Tensor:
    """The bias of every distance up to ``max_length``, for :func:`capsule_attention` (T5, arXiv 1910.10683).

    Entry ``[h, j - i + max_length - 1]`` is what T5 adds to the score of key j at query i: linear in the length where
    the bias itself is quadratic, and no bucket is left to be computed in a kernel.

    Args:
        relative_attention_bias_weight: ``[num_buckets, H]``, the embedding that the first layer of a T5 stack holds.
        max_length: Tmax, the longest sequence, slots included; at least 1.
        bidirectional: True for an encoder; False for a decoder, where keys behind the query share bucket 0.
        num_buckets, max_distance: as in the model's config. Buckets beyond ``max_distance`` are one.

    Returns:
        ``[H, 2*max_length-1]``, dtype of the weight; differentiable, as plain torch.

    Raises:
        ValueError: a shape, dtype or size that does not fit.
    """
    check_floating("relative_attention_bias_weight", relative_attention_bias_weight)
    for name, size, least in (
        ("max_length", max_length, 1),
        ("num_buckets", num_buckets, 4 if bidirectional else 2),
        ("max_distance", max_distance, num_buckets // (4 if bidirectional else 2) + 1),
    ):
        if isinstance(size, bool) or not isinstance(size, int) or size < least:
            raise ValueError(f"{name} must be an int of at least {least}, got {size!r}")
    shape = tuple(relative_attention_bias_weight.shape)
    if len(shape) != 2 or shape[0] != num_buckets:
        wanted = f"[num_buckets, H] with num_buckets = {num_buckets}"
        raise ValueError(f"relative_attention_bias_weight must have shape {wanted}, got {shape}")
    distance = torch.arange(1 - max_length, max_length, device=relative_attention_bias_weight.device)
    return relative_attention_bias_weight[_buckets(distance, bidirectional, num_buckets, max_distance)].T
