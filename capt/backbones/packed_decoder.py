"""The Llama family on packed rows: the base's own Linear modules, everything between them through capt_kernels.

The base is frozen, so a layer keeps for its backward what is needed to reach the capsule and no more: the residual
stream twice, q, k, v, the attention's output and log-sum-exp, gate and up, and one number a row for each norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from capt_kernels import apply_rotary, capsule_attention, gated_activation

from ..layout import Layout
from .decoder import DecoderBackbone
from .packed import ACTIVATIONS, obstacle_in, rms_norm
from .stream import Refresh, Stream


@dataclass(frozen=True)
class PackedContext:
    """Rotary tables ``[R, d]`` of a layout, in fp32."""

    cos: Tensor
    sin: Tensor


class PackedDecoderBackbone(DecoderBackbone):
    """Runs a decoder of the Llama family without padding and without masks."""

    def obstacle(self, positions: str) -> str | None:
        """Why this base has to run on the reference backbone as it is now, or None."""
        if self.config.hidden_act not in ACTIVATIONS:
            return f"its activation {self.config.hidden_act!r} has no fused form"
        if self.stack.training and getattr(self.config, "attention_dropout", 0.0):
            return "its attention drops out in training"
        watched = [m for layer in self.stack.layers for m in (layer, layer.self_attn, layer.mlp, *_norms(layer))]
        return obstacle_in(self.stack, [*watched, self.stack.norm])

    def context(self, rows: Tensor, layout: Layout, positions: str) -> PackedContext:  # type: ignore[override]
        """Rotary tables of the packed positions."""
        wide = torch.empty(0, dtype=torch.float32, device=rows.device)
        cos, sin = self.stack.rotary_emb(wide, layout.unpad(layout.positions(positions))[None])
        return PackedContext(cos[0], sin[0])

    def layer(  # type: ignore[override]
        self, index: int, stream: Stream, layout: Layout, context: PackedContext, refresh: Refresh | None
    ) -> Stream:
        """The base's layer ``index``; the slots are written while its first norm reads the residual."""
        layer = self.stack.layers[index]
        slots = {} if refresh is None else refresh.arguments(layout)
        normed, residual = rms_norm(layer.input_layernorm, stream.branch, stream.residual, **slots)
        attended = self._attention(layer.self_attn, normed, layout, context, self.kinds[index])
        normed, residual = rms_norm(layer.post_attention_layernorm, attended, residual)
        mlp = layer.mlp
        gated = gated_activation(mlp.gate_proj(normed), mlp.up_proj(normed), kind=ACTIVATIONS[self.config.hidden_act])
        return Stream(residual, mlp.down_proj(gated))

    def _attention(self, attention: Any, normed: Tensor, layout: Layout, context: PackedContext, kind: str) -> Tensor:
        heads: tuple = (-1, attention.head_dim)
        q = attention.q_proj(normed).unflatten(-1, heads)
        k = attention.k_proj(normed).unflatten(-1, heads)
        v = attention.v_proj(normed).unflatten(-1, heads)
        if hasattr(attention, "q_norm"):  # Qwen3 norms every head
            q, _ = rms_norm(attention.q_norm, None, q)
            k, _ = rms_norm(attention.k_norm, None, k)
        q, k = apply_rotary(q, k, context.cos.to(q.device), context.sin.to(q.device))
        window = self.config.sliding_window if kind == "sliding_attention" else None
        out = capsule_attention(
            q, k, v, cu_seqlens=layout.cu_seqlens, causal=True, scale=attention.scaling, window=window
        )
        return attention.o_proj(out.flatten(-2))

    def finish(self, stream: Stream) -> Tensor:
        """``[R, D]`` behind the last norm."""
        return rms_norm(self.stack.norm, stream.branch, stream.residual)[0]


def _norms(layer: Any) -> list[nn.Module]:
    own = [layer.input_layernorm, layer.post_attention_layernorm]
    return own + [getattr(layer.self_attn, n) for n in ("q_norm", "k_norm") if hasattr(layer.self_attn, n)]
