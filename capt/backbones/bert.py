"""BERT and RoBERTa (XLM-R and CamemBERT with it): post-norm encoders with LayerNorm and absolute positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask

from capt_kernels import capsule_refresh

from ..layout import Layout
from .prefixed import prefixed
from .stream import Refresh, Stream


@dataclass(frozen=True)
class BertContext:
    """The mask that the layers of one forward share while the layout stays the same."""

    mask: Any


class BertBackbone:
    """Runs the layers of a BERT on packed rows, padding them to the right around each layer.

    A position is added once, to a token's embedding, and a slot, a vector and a mean of rows that have theirs, gets
    none. So with ``positions="shift"`` tokens behind the slots move up where the slots stand in front of the first
    layer; where the first prompted layer is a later one, the layers before it compute what the bare base does, and
    nothing moves.

    Raises:
        NotImplementedError: a decoder, or one with cross-attention.
    """

    is_encoder_decoder = False
    is_causal = False
    has_token_types = True

    def __init__(self, base: PreTrainedModel):
        self.stack = cast(Any, base.base_model)
        self.config = self.stack.config
        self.num_layers: int = self.config.num_hidden_layers
        self.width: int = self.config.hidden_size
        for name in ("is_decoder", "add_cross_attention"):
            if getattr(self.config, name, False):
                raise NotImplementedError(
                    f"{type(base).__name__} is supported as an encoder, whose tokens see each other both ways, got "
                    f"{name}=True"
                )

    def embed(self, given: Tensor, layout: Layout, shift: int, token_types: Tensor | None) -> Tensor:
        """Word, position and token type embeddings, normed: ``[R, D]``.

        Args:
            given: ids ``[R]``, or word embeddings ``[R, D]``.
            layout: of the rows, which hold no slot yet.
            shift: positions that tokens behind ``layout.lead`` move up.
            token_types: ``[R]``, or None for zeros.

        Raises:
            ValueError: a sequence longer than the base has positions for, or a token type that it does not have.
        """
        embeddings = self.stack.embeddings
        table = embeddings.position_embeddings
        # RoBERTa counts from behind its padding token's id, BERT from 0.
        first = 0 if table.padding_idx is None else table.padding_idx + 1
        moved = layout.front + (shift if layout.longest > layout.lead else 0)
        if layout.longest + moved > table.num_embeddings - first:
            before = "prefix rows" if layout.front else "slots"
            raise ValueError(
                f"{type(self.stack).__name__} has {table.num_embeddings - first} positions, and a sequence of "
                f"{layout.longest} tokens and {moved} {before} wants {layout.longest + moved}"
            )
        if token_types is not None:
            token_types = _checked(token_types, embeddings.token_type_embeddings.num_embeddings)[None]
        place = layout.unpad(layout.positions("keep"))
        place = place + shift * (place >= layout.lead) + first
        words = {"input_ids": given[None]} if given.dim() == 1 else {"inputs_embeds": given[None]}
        return embeddings(position_ids=place[None], token_type_ids=token_types, **words)[0]

    def start(self, rows: Tensor) -> Stream:
        """What the base does to embeddings, slots included, before its first layer: nothing."""
        return Stream(rows)

    def context(self, rows: Tensor, layout: Layout, positions: str) -> BertContext:
        """The mask of ``layout``."""
        padded = rows.new_empty(layout.batch, layout.longest, 1)
        with prefixed(self.stack, layout.prefix):  # whose attention takes a mask of its own form
            return BertContext(create_bidirectional_mask(self.config, padded, layout.mask))

    def layer(
        self, index: int, stream: Stream, layout: Layout, context: BertContext, refresh: Refresh | None
    ) -> Stream:
        """The base's layer ``index``, after the slots that are due in front of it."""
        rows = stream.rows if refresh is None else capsule_refresh(stream.rows, **refresh.arguments(layout))
        with prefixed(self.stack, layout.prefix):
            return Stream(layout.unpad(self.stack.encoder.layer[index](layout.pad(rows), context.mask)))

    def finish(self, stream: Stream) -> Tensor:
        """``[R, D]``: a layer ends in its norm, and none follows the last."""
        return stream.rows


def _checked(token_types: Tensor, kinds: int) -> Tensor:
    if token_types.is_floating_point():
        raise ValueError(f"token_type_ids must be integers, got {token_types.dtype}")
    token_types = token_types.long()
    wrong = token_types[(token_types < 0) | (token_types >= kinds)]
    if wrong.numel():
        raise ValueError(f"token_type_ids must be from 0 to {kinds - 1}, got {int(wrong[0])}")
    return token_types
