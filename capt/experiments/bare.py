"""The base without a capsule, and what stands beside one: a linear head on it, LoRA in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import heads
from ..backbones import backbones_of
from ..config import CaptConfig
from ..frozen import FrozenBase
from .answers import Answer


class BareClassifier(FrozenBase):
    """A base that classifies without a slot, by the same head and the same token as a capsule's classifier.

    Args:
        base: frozen here, in place, until :meth:`unload`; what is injected into it afterwards trains.
        answer: ``"linear"`` trains a head, ``"label-words"`` trains nothing.
    """

    def __init__(self, base: PreTrainedModel, answer: Answer):
        super().__init__()
        self._backbone = backbones_of(base)[0]
        self._config = CaptConfig(task_type="SEQ_CLS", label_words=answer.words)
        self._freeze(base)
        self.head = heads.make_head(base, self._backbone, "SEQ_CLS", self._config)
        if self.head is not None:
            self.head.to(base.device)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """``logits [B, C]`` of right-padded ``input_ids [B, T]``; the labels are the trainer's business."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if self.head is None:
            return {"logits": heads.bare(self.base, self._backbone, self._config, inputs, None)["logits"]}
        causal = self._backbone.is_causal
        states = self.base.base_model(**inputs, **({"use_cache": False} if causal else {})).last_hidden_state
        rows = torch.arange(len(states), device=states.device)
        features = states[rows, attention_mask.sum(1) - 1] if causal else states[:, 0]
        return {"logits": heads.apply_head([self.head], None, features)}


class BareWriter(FrozenBase):
    """An encoder-decoder as it is, frozen in place until :meth:`unload`."""

    def __init__(self, base: PreTrainedModel):
        super().__init__()
        self._freeze(base)

    def forward(self, **inputs: Tensor) -> Any:
        """As the base."""
        return self.base(**inputs)

    def generate(self, **options: Any) -> Any:
        """As the base."""
        return self.base.generate(**options)
