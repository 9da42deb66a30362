"""The Llama family on packed rows: the base's own Linear modules, everything between them through capt_kernels.

The base is frozen, so a layer keeps for its backward what is needed to reach the capsule and no more: the residual
stream twice, q, k, v, the attention's output and log-sum-exp, gate and up, and one number a row for each norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from capt_kernels import apply_rotary, gated_activation

from ..layout import Layout
from .decoder import DecoderBackbone
from .packed import ACTIVATIONS, PackedBackbone, attend_packed, obstacle_in, project, rms_norm
from .stream import Refresh, Stream


@dataclass(frozen=True)
class PackedContext:
    """Rotary tables ``[R, d]`` of a layout, in fp32."""

    cos: Tensor
    sin: Tensor


class PackedDecoderBackbone(PackedBackbone, DecoderBackbone):
    """Runs a decoder of the Llama family without padding and without masks."""

    def obstacle(self, positions: str) -> str | None:
        """Why this base has to run on the reference backbone as it is now, or None."""
        if self.config.hidden_act not in ACTIVATIONS:
            return f"its activation {self.config.hidden_act!r} has no fused form"
        watched = [m for layer in self.stack.layers for m in (layer, layer.self_attn, layer.mlp, *_norms(layer))]
        return obstacle_in(self.stack, [*watched, self.stack.norm])

    @torch.compiler.disable
    def context(self, rows: Tensor, layout: Layout, positions: str) -> PackedContext:
        """Rotary tables of the packed positions."""
        wide = torch.empty(0, dtype=torch.float32, device=rows.device)
        cos, sin = self.stack.rotary_emb(wide, layout.unpad(layout.positions(positions))[None])
        return PackedContext(cos[0], sin[0])

    def layers(self) -> Any:
        return self.stack.layers

    def process(
        self, layer: Any, stream: Stream, layout: Layout, context: PackedContext, refresh: Refresh | None
    ) -> Stream:
        attention, mlp = layer.self_attn, layer.mlp
        slots = {} if refresh is None else refresh.arguments(layout)
        # Some of Qwen's layers have it, all of Mistral's. By the layer's number torch.compile would make a graph each.
        window = getattr(attention, "sliding_window", getattr(self.config, "sliding_window", None))

        def attend(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            if hasattr(attention, "q_norm"):  # Qwen3 norms every head
                q, _ = rms_norm(attention.q_norm, None, q)
                k, _ = rms_norm(attention.k_norm, None, k)
            q, k = apply_rotary(q, k, cos.to(q.device), sin.to(q.device))
            dropout_p = attention.attention_dropout if attention.training else 0.0
            options = {"causal": True, "scale": attention.scaling, "window": window, "dropout_p": dropout_p}
            return attend_packed(q, k, v, layout, **options)

        def feed_forward(branch: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            normed, residual = rms_norm(layer.post_attention_layernorm, branch, residual)
            kind = ACTIVATIONS[self.config.hidden_act]
            gate, up = project((mlp.gate_proj, mlp.up_proj), normed)
            return residual, mlp.down_proj(gated_activation(gate, up, kind=kind))

        normed, residual = rms_norm(layer.input_layernorm, stream.branch, stream.residual, **slots)
        parts = project((attention.q_proj, attention.k_proj, attention.v_proj), normed)
        heads = (part.unflatten(-1, (-1, attention.head_dim)) for part in parts)
        tables = (context.cos, context.sin)
        attended = self.kept(attend, *heads, *tables, worthwhile=self._heads_outweigh_gates(attention))
        return Stream(*self.kept(feed_forward, attention.o_proj(attended), residual))

    def _heads_outweigh_gates(self, attention: Any) -> bool:
        """Whether gate and up are less than half of the bytes; else long texts are spared their second attention."""
        heads = self.config.num_attention_heads + self.config.num_key_value_heads
        copies = 3 if hasattr(attention, "q_norm") else 2
        return 2 * self.config.intermediate_size < 2 * self.width + copies * heads * attention.head_dim

    def finish(self, stream: Stream) -> Tensor:
        """``[R, D]`` behind the last norm."""
        return rms_norm(self.stack.norm, stream.branch, stream.residual)[0]


def _norms(layer: Any) -> list[nn.Module]:
    own = [layer.input_layernorm, layer.post_attention_layernorm]
    return own + [getattr(layer.self_attn, n) for n in ("q_norm", "k_norm") if hasattr(layer.self_attn, n)]
