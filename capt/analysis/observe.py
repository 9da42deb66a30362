"""A look at the attention of a base while it runs: its own layers, through transformers' public AttentionInterface.

The base's attention modules hand over q and k as they enter the dot product, so whatever a family does to them (rotary
positions, norms, shared key heads) or to the scores (scale, T5's relative bias) is in what is seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

#: Called in every layer, in order, with ``probabilities`` and ``logits [B, H, L, L]`` (fp32; fp64 of an fp64 base) and
#: ``visible [B or 1, 1, L, L]`` (bool: keys a query may see). Logits are the scores in front of the mask.
Observer = Callable[[Tensor, Tensor, Tensor], None]

_NAME = "capt_observed"
_observer: ContextVar[Observer] = ContextVar("_observer")


@contextlib.contextmanager
def observing(stack: Any, observer: Observer) -> Iterator[None]:
    """Inside, every layer of ``stack`` calls ``observer`` and computes what it did before.

    Args:
        stack: a transformers model in eval mode.

    Raises:
        NotImplementedError: this transformers does not run its attention through the AttentionInterface.
    """
    before = stack.config._attn_implementation
    stack.set_attn_implementation(_NAME)
    token = _observer.set(observer)
    try:
        if stack.config._attn_implementation != _NAME:
            raise NotImplementedError(
                f"transformers {transformers.__version__} does not run the attention of {type(stack).__name__} through "
                "its AttentionInterface, where it is looked at; a newer one may"
            )
        yield
    finally:
        _observer.reset(token)
        stack.set_attn_implementation(before)


def _observed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Plain attention that shows its probabilities and lets go of them before the next layer starts."""
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    wide = torch.promote_types(query.dtype, torch.float32)
    logits = query.to(wide) @ key.to(wide).transpose(2, 3) * scaling
    if position_bias is not None:
        logits = logits + position_bias
    visible = logits.new_ones(logits.shape[-2:], dtype=torch.bool)[None, None]
    if attention_mask is not None:
        visible = attention_mask == 0
    # A finite floor, so that a padding row that sees no key is finite too.
    probabilities = logits.masked_fill(~visible, torch.finfo(wide).min).softmax(-1)
    _observer.get()(probabilities, logits, visible)
    return (probabilities.to(value.dtype) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _observed_attention)
AttentionMaskInterface.register(_NAME, eager_mask)
