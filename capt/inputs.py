"""What a forward is given: which input there is, and whether the rest fits it."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from capt_kernels.validation import check_shape


def present(**tensors: Tensor | None) -> dict[str, Tensor]:
    """Those that were given."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def the_input(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """Whichever of the two was given, its shape checked."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("exactly one of input_ids [B, T] and inputs_embeds [B, T, D] must be given")
    if inputs_embeds is not None:
        return _checked("inputs_embeds", inputs_embeds, "[B, T, D]", 3)
    assert input_ids is not None
    return _checked("input_ids", input_ids, "[B, T]", 2)


def _checked(name: str, given: Tensor, wanted: str, dims: int) -> Tensor:
    # transformers' own layers, which the reference backbone calls, take no empty batch.
    if given.dim() != dims or not given.shape[0]:
        raise ValueError(f"{name} must have shape {wanted} with at least one sequence, got {tuple(given.shape)}")
    return given


def check_fit(
    base: Any, backbone: Any, shape: tuple[int, ...], per_token: dict[str, Tensor], decoder: dict[str, Tensor]
) -> None:
    """Whether ``base`` takes what was given.

    Args:
        backbone: one of the base's.
        shape: B and T. per_token: tensors ``[B, T]`` by their names.
        decoder: inputs of an encoder-decoder's decoder by their names.

    Raises:
        ValueError: a tensor of another shape, token types or decoder inputs that the base has no use for.
    """
    for name, tensor in per_token.items():
        check_shape(name, tensor, shape, "[B, T]")
    if "token_type_ids" in per_token and not backbone.has_token_types:
        raise ValueError(f"token_type_ids given to {type(base).__name__}, which has no token types")
    if decoder and not backbone.is_encoder_decoder:
        raise ValueError(f"{', '.join(decoder)} given to {type(base).__name__}, which has no decoder of its own")


def warn_of_empty_pools(pool_mask: Tensor, attention_mask: Tensor | None) -> None:
    """Warns where labels leave a text no token for its mean, which ``generate`` takes over the whole prompt."""
    real = torch.ones_like(pool_mask) if attention_mask is None else attention_mask != 0
    if (real.any(1) & ~(pool_mask & real).any(1)).any():
        warnings.warn(
            "labels cover every token of a text, so its mean is empty in training and that of the whole prompt in "
            "generate(): set the prompt's labels to -100, or give a pool_mask",
            stacklevel=5,  # the caller of the model
        )
