"""T5's encoder on packed rows: the base's own Linear modules, everything between them through capt_kernels.

Keeps for backward what :mod:`.packed_decoder` keeps, and what dropout drew, but for attention's, which is drawn again.
The relative bias is one table of distances, read along diagonals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from capt_kernels import gated_activation

from ..layout import Layout
from .packed import ACTIVATIONS, PackedBackbone, attend_packed, obstacle_in, project, rms_norm
from .stream import Refresh, Stream
from .t5 import T5EncoderBackbone


@dataclass(frozen=True)
class PackedT5Context:
    """``bias_table [H, 2*longest-1]`` of a layout."""

    bias_table: Tensor


class PackedT5EncoderBackbone(PackedBackbone, T5EncoderBackbone):
    """Runs a T5 encoder without padding and without masks."""

    def obstacle(self, positions: str) -> str | None:
        """Why this base has to run on the reference backbone as it is now, or None."""
        if self.config.dense_act_fn not in ACTIVATIONS:
            return f"its activation {self.config.dense_act_fn!r} has no fused form"
        if positions == "keep":
            return (
                "positions='keep' gives a slot and a token one distance, which a table of distances between rows lacks"
            )
        watched = [m for block in self.stack.block for m in (block, *block.layer, *_parts(block))]
        return obstacle_in(self.stack, [*watched, self.stack.final_layer_norm])

    @torch.compiler.disable
    def context(self, rows: Tensor, layout: Layout, positions: str) -> PackedT5Context:
        """The relative bias by distance."""
        return PackedT5Context(self.bias_table(max(layout.front + layout.longest, 1)).detach())

    def layers(self) -> Any:
        return self.stack.block

    def process(
        self, layer: Any, stream: Stream, layout: Layout, context: PackedT5Context, refresh: Refresh | None
    ) -> Stream:
        first, second = layer.layer
        own, dense = first.SelfAttention, second.DenseReluDense
        slots = {} if refresh is None else refresh.arguments(layout)

        def attend(q: Tensor, k: Tensor, v: Tensor, bias_table: Tensor) -> Tensor:
            dropout_p = own.dropout if own.training else 0.0
            return attend_packed(q, k, v, layout, causal=False, scale=1.0, bias_table=bias_table, dropout_p=dropout_p)

        def feed_forward(branch: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
            normed, residual = rms_norm(second.layer_norm, *_finite(first.dropout(branch), residual))
            done, residual = _finite(second.dropout(self._feed_forward(dense, normed)), residual)
            return residual, done

        # One hidden is too little to halve the bytes of an ungated block: the sum in front of it goes too.
        def attend_and_feed_forward(residual: Tensor, *heads: Tensor) -> tuple[Tensor, Tensor | None]:
            return feed_forward(own.o(attend(*heads)), residual)

        normed, residual = rms_norm(first.layer_norm, stream.branch, stream.residual, **slots)
        heads = [part.unflatten(-1, (own.n_heads, -1)) for part in project((own.q, own.k, own.v), normed)]
        if not hasattr(dense, "wi_0"):
            return Stream(*self.kept(attend_and_feed_forward, residual, *heads, context.bias_table))
        attended = self.kept(attend, *heads, context.bias_table)
        return Stream(*self.kept(feed_forward, own.o(attended), residual))

    def _feed_forward(self, dense: Any, normed: Tensor) -> Tensor:
        kind = ACTIVATIONS[self.config.dense_act_fn]
        if hasattr(dense, "wi_0"):
            gate, up = project((dense.wi_0, dense.wi_1), normed)
            hidden = gated_activation(gate, up, kind=kind)
        else:
            hidden = dense.act(dense.wi(normed))
        hidden = dense.dropout(hidden)
        # T5 keeps wo in fp32 where the rest is fp16; a quantised wo takes what comes.
        dtype = dense.wo.weight.dtype
        return dense.wo(hidden.to(dtype) if dtype.is_floating_point else hidden).to(normed.dtype)

    def finish(self, stream: Stream) -> Tensor:
        """``[R, D]`` behind the last norm and dropout."""
        return self.stack.dropout(rms_norm(self.stack.final_layer_norm, stream.branch, stream.residual)[0])


def _parts(block: Any) -> list[nn.Module]:
    attention, feed_forward = block.layer
    return [attention.SelfAttention, attention.layer_norm, feed_forward.DenseReluDense, feed_forward.layer_norm]


def _finite(branch: Tensor, residual: Tensor) -> tuple[Tensor | None, Tensor]:
    """transformers clamps T5's fp16 residual where it overflows; other dtypes add the branch later."""
    if residual.dtype != torch.float16:
        return branch, residual
    total = residual + branch
    largest = torch.finfo(torch.float16).max
    limit = torch.where(total.isinf().any(), largest - 1000, largest)
    return None, total.clamp(-limit, limit)
