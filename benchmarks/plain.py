"""The ops as a user writes them in plain torch: the peers that the fused kernels are timed against.

Padded batches, K = 1, as in most training code; formulas of the paper and of transformers' modules.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu


def masked_mean(hidden: Tensor, mask: Tensor, slots: int) -> Tensor:
    """``[B, 1, D]`` mean of the real rows; the first ``slots`` rows always count."""
    weights = torch.cat([mask.new_ones(mask.shape[0], slots), mask], 1).to(hidden.dtype)[..., None]
    return (hidden * weights).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp(min=1)


def capsule_prepend(hidden: Tensor, prompt: Tensor, mask: Tensor) -> Tensor:
    return torch.cat([prompt + masked_mean(hidden, mask, 0), hidden], 1)


def capsule_refresh(hidden: Tensor, prompt: Tensor, mask: Tensor) -> Tensor:
    return torch.cat([prompt + masked_mean(hidden, mask, 1), hidden[:, 1:]], 1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm(branch: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = residual + branch
    return rms_norm(x, weight, eps), x


def add_rms_norm_with_capsule(
    branch: Tensor, residual: Tensor, weight: Tensor, eps: float, prompt: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    x = capsule_refresh(residual + branch, prompt, mask)
    return rms_norm(x, weight, eps), x


def gated_activation(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)

    def turn(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    return turn(q), turn(k)
