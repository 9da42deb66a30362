"""Llama, Mistral, Qwen2 and Qwen3: pre-norm causal decoders with rotary positions, some with sliding windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from capt_kernels import capsule_refresh

from ..layout import Layout
from .prefixed import prefixed
from .stream import Refresh, Stream


@dataclass(frozen=True)
class DecoderContext:
    """What the layers of one forward share while the layout stays the same."""

    masks: dict[str, Any]
    position_ids: Tensor
    rotary: tuple[Tensor, Tensor]


class DecoderBackbone:
    """Runs the layers of a decoder of the Llama family on packed rows, padding them to the right around each layer.

    transformers' own mask and rotary functions are called with the caller's positions; every argument that was renamed
    between transformers releases (``past_key_values``) is left out or positional.
    """

    is_encoder_decoder = False
    is_causal = True
    has_token_types = False

    def __init__(self, base: PreTrainedModel):
        self.stack = cast(Any, base.base_model)
        self.config = self.stack.config
        self.blocks: nn.ModuleList = self.stack.layers
        self.num_layers: int = self.config.num_hidden_layers
        self.width: int = self.config.hidden_size
        windowed = getattr(self.config, "sliding_window", None) is not None
        # Qwen names a kind for every layer; Mistral has one window for all of them, Llama none.
        default = "sliding_attention" if windowed else "full_attention"
        self.kinds: list[str] = getattr(self.config, "layer_types", None) or [default] * self.num_layers

    def embed(self, given: Tensor, layout: Layout, shift: int, token_types: Tensor | None) -> Tensor:
        """``[R, D]`` of ids ``[R]``, or of embeddings ``[R, D]``: themselves. Positions enter in the layers."""
        return self.stack.embed_tokens(given) if given.dim() == 1 else given

    def start(self, rows: Tensor) -> Stream:
        """What the base does to embeddings, slots included, before its first layer."""
        return Stream(rows)

    def context(self, rows: Tensor, layout: Layout, positions: str) -> DecoderContext:
        """Masks and rotary tables of ``layout``."""
        padded = rows.new_empty(layout.batch, layout.longest, 1)
        makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
        with prefixed(self.stack, layout.prefix):  # whose attention takes a mask of its own form
            masks = {kind: makers[kind](self.config, padded, layout.mask, None) for kind in set(self.kinds)}
        position_ids = layout.positions(positions)
        return DecoderContext(masks, position_ids, self.stack.rotary_emb(padded, position_ids))

    def layer(
        self, index: int, stream: Stream, layout: Layout, context: DecoderContext, refresh: Refresh | None
    ) -> Stream:
        """The base's layer ``index``, after the slots that are due in front of it."""
        rows = stream.rows if refresh is None else capsule_refresh(stream.rows, **refresh.arguments(layout))
        with prefixed(self.stack, layout.prefix):
            out = self.stack.layers[index](
                layout.pad(rows),
                attention_mask=context.masks[self.kinds[index]],
                position_ids=context.position_ids,
                position_embeddings=context.rotary,
                use_cache=False,
            )
        return Stream(layout.unpad(out))

    def finish(self, stream: Stream) -> Tensor:
        """``[R, D]`` behind the last norm."""
        return self.stack.norm(stream.rows)
