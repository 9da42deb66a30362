"""BERT and RoBERTa on packed rows: the base's own modules around capt_kernels' attention.

All but attention works row by row, so the base's own LayerNorm, activation, dropout and Linear modules are called. The
base is frozen, so a layer keeps for its backward the rows in front of each norm, q, k, v, the attention's output and
log-sum-exp, the activation's input, two numbers a row for each norm, and what its two dropouts drew. With
``memory="min"`` the attention's output and all from the first norm to the sum in front of the second go, and are
computed again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from capt_kernels import capsule_refresh

from ..layout import Layout
from .bert import BertBackbone, BertContext
from .packed import PackedBackbone, attend_packed, obstacle_in, project
from .stream import Refresh, Stream


class PackedBertBackbone(PackedBackbone, BertBackbone):
    """Runs a BERT without padding and without masks."""

    def obstacle(self, positions: str) -> str | None:
        """Why this base has to run on the reference backbone as it is now, or None."""
        layers: Any = self.layers()
        return obstacle_in(self.stack, [part for layer in layers for part in _parts(layer)])

    def context(self, rows: Tensor, layout: Layout, positions: str) -> BertContext:
        """No mask: attention needs the layout's offsets alone."""
        return BertContext(None)

    def layers(self) -> nn.ModuleList:
        return self.stack.encoder.layer

    def process(
        self, layer: Any, stream: Stream, layout: Layout, context: BertContext, refresh: Refresh | None
    ) -> Stream:
        own, first, second = layer.attention.self, layer.attention.output, layer.output

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            dropout_p = own.dropout.p if own.training else 0.0
            return attend_packed(q, k, v, layout, causal=False, scale=own.scaling, dropout_p=dropout_p)

        def feed_forward(total: Tensor) -> Tensor:
            normed = first.LayerNorm(total)
            return second.dropout(second.dense(layer.intermediate(normed))) + normed

        rows = stream.rows if refresh is None else capsule_refresh(stream.rows, **refresh.arguments(layout))
        heads = (own.num_attention_heads, own.attention_head_size)
        parts = project((own.query, own.key, own.value), rows)
        attended = self.kept(attend, *(part.unflatten(-1, heads) for part in parts))
        total = self.kept(feed_forward, first.dropout(first.dense(attended)) + rows)
        return Stream(second.LayerNorm(total))


def _parts(layer: Any) -> list[nn.Module]:
    return [layer, layer.attention, layer.attention.self, layer.attention.output, layer.output]
