"""One forward through a base: packed at the door, layer by layer, slots written where they are due."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from capt_kernels import capsule_refresh, pack
from capt_kernels.validation import boolean_mask

from .backbones import backbones_of
from .backbones.stream import Stream
from .capsules import Capsules, MixedCapsules, place, refresh
from .heads import Rows
from .layout import Layout

BACKENDS = ("auto", "reference", "fused")


class Runner:
    """Runs a base with capsules on one of its two backbones.

    Attributes:
        reference, packed: the base's backbones.
        backend: "auto", "reference" or "fused", see :class:`capt.CaptModel`.
    """

    def __init__(self, base: PreTrainedModel):
        self.reference, self.packed = backbones_of(base)
        self.backend = "auto"

    def choose(self, positions: str) -> Any:
        """The backbone of the next forward.

        Raises:
            NotImplementedError: "fused" cannot run the base as it is now; says why.
        """
        if self.backend == "reference":
            return self.reference
        obstacle = self.packed.obstacle(positions)
        if obstacle is None:
            return self.packed
        if self.backend == "auto":
            return self.reference
        raise NotImplementedError(f"backend 'fused' cannot run this base: {obstacle}; 'auto' and 'reference' run it")

    def run(
        self,
        capsules: Capsules | MixedCapsules,
        given: Tensor,
        mask: Tensor | None,
        pool_mask: Tensor | None,
        slots: list[Tensor] | None = None,
    ) -> Rows:
        """Processes a batch.

        Args:
            given: ``[B, T]`` ids or ``[B, T, D]`` embeddings. mask, pool_mask: ``[B, T]`` or None for all.
            slots: collects what the slots hold in front of each prompted layer, ``[B, K, D]`` each.
        """
        config = capsules.config
        backbone = self.choose(config.positions)
        hidden = backbone.embed(given) if given.dim() == 2 else given
        real = torch.ones(given.shape[:2], dtype=torch.bool, device=given.device) if mask is None else mask
        rows, cu_seqlens, indices = pack(hidden, real)
        pooled = None if pool_mask is None else boolean_mask("pool_mask", pool_mask).flatten()[indices]
        layout = Layout(cu_seqlens, 0, config.lead, pooled)

        ops = "reference" if self.backend == "reference" else "auto"
        stream, context = Stream(rows), None
        for i in range(backbone.num_layers):
            due = None
            if i in capsules.layers:
                prompted = capsules.layers.index(i)
                if layout.slots:
                    due = refresh(capsules, prompted, stream, layout, ops)
                else:
                    rows, layout = place(capsules, prompted, stream.rows, layout, ops)
                    stream, context = Stream(rows), None
                if slots is not None:
                    if due is not None:
                        stream, due = Stream(capsule_refresh(stream.rows, **due.arguments(layout))), None
                    slots.append(stream.rows[layout.slot_rows])
            if i == 0:
                stream = backbone.start(stream.rows)
            if context is None:
                context = backbone.context(stream.residual, layout, config.positions)
            stream = backbone.layer(i, stream, layout, context, due)
        return Rows(backbone.finish(stream), layout, indices, *given.shape[:2])
