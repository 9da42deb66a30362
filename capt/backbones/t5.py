"""The encoder of T5 (v1.0, v1.1, flan): bidirectional, unscaled scores, one relative bias shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask

from capt_kernels import capsule_refresh, t5_bias_table

from ..layout import Layout
from .prefixed import prefixed
from .stream import Refresh, Stream


@dataclass(frozen=True)
class T5Context:
    """What the blocks of one forward share while the layout stays the same."""

    mask: Any
    position_bias: Tensor
    prefix_bias: Tensor


class T5EncoderBackbone:
    """Runs the blocks of a T5 encoder on packed rows, padding them to the right around each block.

    The bias is read from a table at the caller's positions and handed to every block, as T5's stack does with the bias
    that its first block computes from physical positions.
    """

    is_encoder_decoder = True
    is_causal = False
    has_token_types = False

    def __init__(self, base: PreTrainedModel):
        self.stack = cast(Any, base.base_model).encoder
        self.config = self.stack.config
        self.num_layers: int = self.config.num_layers
        self.width: int = self.config.d_model

    def embed(self, given: Tensor, layout: Layout, shift: int, token_types: Tensor | None) -> Tensor:
        """``[R, D]`` of ids ``[R]``, or of embeddings ``[R, D]``: themselves. Positions enter in the layers."""
        return self.stack.embed_tokens(given) if given.dim() == 1 else given

    def start(self, rows: Tensor) -> Stream:
        """T5 drops out of its embeddings; the slot takes part as prompt tuning's rows do."""
        return Stream(self.stack.dropout(rows))

    def context(self, rows: Tensor, layout: Layout, positions: str) -> T5Context:
        """Mask ``[B, 1, L, L]`` and bias ``[1 or B, H, L, L]`` of ``layout``; ``[H, L, P]`` of its prefix."""
        padded = rows.new_empty(layout.batch, layout.longest, 1)
        with prefixed(self.stack, layout.prefix):  # whose attention takes a mask of its own form
            mask = create_bidirectional_mask(self.config, padded, layout.mask)
        reach = max(layout.front + layout.longest, 1)
        table = self.bias_table(reach).to(rows.dtype)
        place = layout.positions(positions)[: 1 if positions == "shift" else None]
        distance = place[:, None, :] - place[:, :, None]
        bias = table[:, distance + reach - 1].transpose(0, 1)
        before = torch.arange(layout.front, device=place.device) - place[0, :, None]
        return T5Context(mask, bias, table[:, before + reach - 1])

    def bias_table(self, reach: int) -> Tensor:
        """``[H, 2*reach-1]``: the relative bias that all blocks share, by distance."""
        weight = self.stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        if isinstance(weight, DTensor):  # FSDP gathers it while block 0 runs, and every block wants it
            weight = weight.full_tensor()
        return t5_bias_table(
            weight,
            reach,
            bidirectional=True,
            num_buckets=self.config.relative_attention_num_buckets,
            max_distance=self.config.relative_attention_max_distance,
        )

    def layer(self, index: int, stream: Stream, layout: Layout, context: T5Context, refresh: Refresh | None) -> Stream:
        """The base's block ``index``, after the slots that are due in front of it."""
        rows = stream.rows if refresh is None else capsule_refresh(stream.rows, **refresh.arguments(layout))
        with prefixed(self.stack, layout.prefix, context.prefix_bias):
            out = self.stack.block[index](layout.pad(rows), context.mask, context.position_bias)
        return Stream(layout.unpad(out[0]))

    def finish(self, stream: Stream) -> Tensor:
        """``[R, D]`` behind the last norm and dropout."""
        return self.stack.dropout(self.stack.final_layer_norm(stream.rows))
