"""CaPT as a user would write it, without this library: padded rows, plain torch, hooks on transformers' layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from capt.backbones import backbones_of

from .plain import capsule_prepend, capsule_refresh


class PaddedCapt(nn.Module):
    """CaPT of the paper's defaults on right-padded batches.

    Args:
        base: a decoder, or a T5 encoder, without its head. Its layers get a hook, and a vector as ``layer.capsule``.
        compiled: whether ``torch.compile`` compiles each layer with its hook; one graph serves all of them.

    Raises:
        NotImplementedError: a base that adds positions to embeddings, and so to the slot.
    """

    def __init__(self, base: PreTrainedModel, compiled: bool):
        super().__init__()
        reference, packed = backbones_of(base)
        if reference.has_token_types:
            raise NotImplementedError(f"{type(base).__name__} adds positions to inputs_embeds, so also to a slot there")
        self.base, self.layers = base, list(packed.layers())
        self.vectors = nn.ParameterList(torch.zeros(reference.width) for _ in self.layers).to(base.device)
        for layer, vector in zip(self.layers[1:], self.vectors[1:], strict=True):
            layer.capsule = vector
            layer.register_forward_pre_hook(_refresh)
        for layer in self.layers if compiled else []:
            layer.compile(dynamic=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The last hidden state ``[B, T, D]`` of ``[B, T]``."""
        embeds = self.base.get_input_embeddings()(input_ids)
        rows = capsule_prepend(embeds, self.vectors[0].to(embeds.dtype), attention_mask)
        for layer in self.layers:
            layer.real = attention_mask
        mask = torch.cat([attention_mask.new_ones(len(attention_mask), 1), attention_mask], 1)
        return self.base(inputs_embeds=rows, attention_mask=mask).last_hidden_state[:, 1:]


def _refresh(layer: nn.Module, args: tuple) -> tuple:
    hidden = args[0]
    return capsule_refresh(hidden, layer.capsule.to(hidden.dtype), layer.real), *args[1:]
