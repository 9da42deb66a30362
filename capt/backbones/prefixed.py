"""A prefix on the reference backbones: the base's own layers, whose attention finds more keys than rows were given.

Through transformers' public AttentionInterface, which T5 and BERT have too, where a cache of past keys, which is how
prefix tuning is done elsewhere, reaches neither of their encoders.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "capt_prefixed"
#: Keys and values ``[P, Hkv, d]``, and a bias ``[H, L, P]`` of bases that have one.
_here: ContextVar[tuple[Tensor, Tensor, Tensor | None]] = ContextVar("_here")


@contextlib.contextmanager
def prefixed(stack: Any, prefix: tuple[Tensor, Tensor] | None, bias: Tensor | None = None) -> Iterator[None]:
    """Inside, a layer of ``stack`` attends to ``prefix`` in front of every sequence.

    Args:
        prefix: keys, which get no rotary position, and values ``[P, Hkv, d]``; None leaves the layer alone.
        bias: ``[H, L, P]``, T5's relative bias of the prefix, or None.

    Raises:
        NotImplementedError: gradient checkpointing is on.
    """
    if prefix is None:
        yield
        return
    if stack.training and any(getattr(module, "gradient_checkpointing", False) for module in stack.modules()):
        raise NotImplementedError(
            "gradient checkpointing would run the base's layers again without their prefix; the fused backbone has both"
        )
    before = stack.config._attn_implementation
    stack.set_attn_implementation(_NAME)
    token = _here.set((*prefix, bias))
    try:
        yield
    finally:
        _here.reset(token)
        stack.set_attn_implementation(before)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    keys, values, bias = _here.get()
    length, front = query.shape[2], keys.shape[0]
    if attention_mask is None:
        attention_mask = torch.ones(length, length, dtype=torch.bool, device=query.device)
        attention_mask = attention_mask.tril() if module.is_causal else attention_mask
        attention_mask = attention_mask.expand(query.shape[0], 1, -1, -1)
    seen = torch.ones(length, front, dtype=torch.bool, device=query.device)
    if sliding_window is not None:  # the prefix stands at positions 0 .. P-1
        seen = seen.triu(1 - sliding_window + front)
    attention_mask = torch.cat([seen.expand(*attention_mask.shape[:2], -1, -1), attention_mask], -1)
    if position_bias is not None and bias is not None:
        position_bias = torch.cat([bias.expand(position_bias.shape[0], -1, -1, -1), position_bias], -1)
        options["position_bias"] = position_bias
    key, value = (_in_front(own, rows) for own, rows in ((keys, key), (values, value)))
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options | {"is_causal": False})


def _in_front(prefix: Tensor, rows: Tensor) -> Tensor:
    """``[B, Hkv, P + L, d]``."""
    return torch.cat([prefix.to(rows.dtype).transpose(0, 1).expand(rows.shape[0], -1, -1, -1), rows], 2)


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)
