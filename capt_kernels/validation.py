"""Checks that every op shares. Each raises ValueError naming the argument, what was wanted and what was given."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
#: Offsets are int32, so that no sequence has more rows.
MOST_ROWS = 2**31 - 1


def check_floating(name: str, tensor: Tensor) -> None:
    """``tensor`` must be fp32, fp16, bf16 or fp64."""
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{name} must be float32, float16, bfloat16 or float64, got {tensor.dtype}")


def check_same_device(anchor_name: str, anchor: Tensor, others: Iterable[tuple[str, Tensor | None]]) -> None:
    """Every tensor of ``others`` must lie on the device of ``anchor``."""
    for name, tensor in others:
        if tensor is not None and tensor.device != anchor.device:
            raise ValueError(f"{name} must be on {anchor.device} as {anchor_name} is, got {tensor.device}")


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    """``tensor`` must have exactly ``shape``; ``meaning`` spells it in the op's letters."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {meaning} = {tuple(shape)}, got {tuple(tensor.shape)}")


def boolean_mask(name: str, mask: Tensor) -> Tensor:
    """A mask of any dtype with values 0 and 1, as bool. 1 marks a real position.

    A bool mask is never inspected. Others are, since an additive or a fractional mask would be read as something else
    entirely. Values cannot be looked at while torch.compile traces: there an integer mask is read as ``!= 0`` and a
    float mask is refused.
    """
    if mask.dtype == torch.bool:
        return mask
    if mask.is_complex():
        raise ValueError(f"{name} must be bool, an integer or a float tensor of 0 and 1, got {mask.dtype}")
    if torch.compiler.is_compiling():
        if mask.is_floating_point():
            raise ValueError(f"{name} must be bool or an integer under torch.compile, got {mask.dtype}")
        return mask != 0
    truth = mask != 0
    wrong = mask[(mask != 1) & truth]
    if wrong.numel():
        raise ValueError(f"{name} must hold only 0 and 1 (1 = real position), got {wrong[0].item()}")
    return truth


def is_readable(tensor: Tensor) -> bool:
    """Whether a check may look at values: on a GPU that would stall the stream at every call, and a trace has none."""
    return tensor.device.type == "cpu" and type(tensor) is Tensor and not torch.compiler.is_compiling()


def check_cu_seqlens(name: str, cu_seqlens: Tensor, rows: int) -> Tensor:
    """Offsets [B+1] int32 (or int64) that start at 0, never fall and end within ``rows``. Returned as int32.

    Values are looked at where they are readable, which is on the CPU and not in a trace. Elsewhere int64 offsets are
    cut to int32 unseen, kernels stay within ``rows`` whatever they say, and the result of wrong ones is undefined.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise ValueError(f"{name} must have shape [B+1], got {tuple(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be int32, got {cu_seqlens.dtype}")
    if is_readable(cu_seqlens):
        offsets = cu_seqlens.tolist()
        if offsets[0] != 0:
            raise ValueError(f"{name} must start at 0, got {offsets[0]}")
        if offsets != sorted(offsets):
            raise ValueError(f"{name} must never fall, got {offsets}")
        if offsets[-1] > rows:
            raise ValueError(f"{name} must end within the {rows} rows given, got {offsets[-1]}")
    return cu_seqlens.to(torch.int32)
