"""T5's encoder on packed rows: the base's own Linear modules, everything between them through capt_kernels.

Keeps for backward what :mod:`.packed_decoder` keeps. The relative bias is one table of distances, read along diagonals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from capt_kernels import capsule_attention, gated_activation

from ..layout import Layout
from .packed import ACTIVATIONS, obstacle_in, rms_norm
from .stream import Refresh, Stream
from .t5 import T5EncoderBackbone


@dataclass(frozen=True)
class PackedT5Context:
    """``bias_table [H, 2*longest-1]`` of a layout."""

    bias_table: Tensor


class PackedT5EncoderBackbone(T5EncoderBackbone):
    """Runs a T5 encoder without padding and without masks."""

    def obstacle(self, positions: str) -> str | None:
        """Why this base has to run on the reference backbone as it is now, or None."""
        if self.config.dense_act_fn not in ACTIVATIONS:
            return f"its activation {self.config.dense_act_fn!r} has no fused form"
        if self.stack.training and self.config.dropout_rate:
            return "its attention drops out in training"
        if positions == "keep":
            return (
                "positions='keep' gives a slot and a token one distance, which a table of distances between rows lacks"
            )
        watched = [m for block in self.stack.block for m in (block, *block.layer, *_parts(block))]
        return obstacle_in(self.stack, [*watched, self.stack.final_layer_norm])

    def context(self, rows: Tensor, layout: Layout, positions: str) -> PackedT5Context:  # type: ignore[override]
        """The relative bias by distance."""
        return PackedT5Context(self.bias_table(max(layout.longest, 1)).detach())

    def layer(  # type: ignore[override]
        self, index: int, stream: Stream, layout: Layout, context: PackedT5Context, refresh: Refresh | None
    ) -> Stream:
        """The base's block ``index``; the slots are written while its first norm reads the residual."""
        attention, feed_forward = self.stack.block[index].layer
        slots = {} if refresh is None else refresh.arguments(layout)
        normed, residual = rms_norm(attention.layer_norm, stream.branch, stream.residual, **slots)
        own = attention.SelfAttention
        q, k, v = (part(normed).unflatten(-1, (own.n_heads, -1)) for part in (own.q, own.k, own.v))
        out = capsule_attention(
            q, k, v, cu_seqlens=layout.cu_seqlens, causal=False, scale=1.0, bias_table=context.bias_table
        )
        branch, residual = _finite(own.o(out.flatten(-2)), residual)
        normed, residual = rms_norm(feed_forward.layer_norm, branch, residual)
        branch, residual = _finite(self._feed_forward(feed_forward.DenseReluDense, normed), residual)
        return Stream(residual, branch)

    def _feed_forward(self, dense: Any, normed: Tensor) -> Tensor:
        kind = ACTIVATIONS[self.config.dense_act_fn]
        if hasattr(dense, "wi_0"):
            hidden = gated_activation(dense.wi_0(normed), dense.wi_1(normed), kind=kind)
        else:
            hidden = dense.act(dense.wi(normed))
        # T5 keeps wo in fp32 where the rest is fp16; a quantised wo takes what comes.
        dtype = dense.wo.weight.dtype
        return dense.wo(hidden.to(dtype) if dtype.is_floating_point else hidden).to(normed.dtype)

    def finish(self, stream: Stream) -> Tensor:
        """``[R, D]`` behind the last norm."""
        return rms_norm(self.stack.final_layer_norm, stream.branch, stream.residual)[0]


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
