"""How each family of base models runs its own layers, one at a time, so that slots can be written between them."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from .decoder import DecoderBackbone
from .t5 import T5EncoderBackbone

#: model_type of a base's config -> the backbone that runs it.
BACKBONES: dict[str, Any] = {
    "llama": DecoderBackbone,
    "mistral": DecoderBackbone,
    "qwen2": DecoderBackbone,
    "qwen3": DecoderBackbone,
    "t5": T5EncoderBackbone,
}
Backbone = DecoderBackbone | T5EncoderBackbone


def backbone_of(base: PreTrainedModel) -> Backbone:
    """The backbone of ``base``.

    Raises:
        ValueError: ``base`` is no transformers model. NotImplementedError: a family that is not supported.
    """
    if not isinstance(base, PreTrainedModel):
        raise ValueError(f"base must be a transformers PreTrainedModel, got {type(base).__name__}")
    kind = base.config.model_type
    if kind not in BACKBONES:
        raise NotImplementedError(f"bases of model_type {kind!r} are not supported; supported: {', '.join(BACKBONES)}")
    return BACKBONES[kind](base)


__all__ = ["BACKBONES", "Backbone", "backbone_of"]
