"""What a forward is given: which input there is, and whether the rest fits it."""

from __future__ import annotations

from torch import Tensor


def present(**tensors: Tensor | None) -> dict[str, Tensor]:
    """Those that were given."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def the_input(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """Whichever of the two was given, its shape checked."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("exactly one of input_ids [B, T] and inputs_embeds [B, T, D] must be given")
    if inputs_embeds is not None:
        if inputs_embeds.dim() != 3:
            raise ValueError(f"inputs_embeds must have shape [B, T, D], got {tuple(inputs_embeds.shape)}")
        return inputs_embeds
    assert input_ids is not None
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids must have shape [B, T], got {tuple(input_ids.shape)}")
    return input_ids
