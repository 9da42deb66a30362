"""How each family of base models runs its own layers, one at a time, so that slots can be written between them.

Every family has two backbones of one interface: a reference, which calls the base's own layers on padded rows, and a
packed one, which calls the base's own Linear modules on packed rows and capt_kernels for the rest. Other causal
decoders have one: their own forward, with hooks.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from .bert import BertBackbone
from .decoder import DecoderBackbone
from .hooked import HookedBackbone
from .packed_bert import PackedBertBackbone
from .packed_decoder import PackedDecoderBackbone
from .packed_t5 import PackedT5EncoderBackbone
from .t5 import T5EncoderBackbone

Backbone = DecoderBackbone | T5EncoderBackbone | BertBackbone | HookedBackbone
Packed = PackedDecoderBackbone | PackedT5EncoderBackbone | PackedBertBackbone
_DECODER = (DecoderBackbone, PackedDecoderBackbone)
_BERT = (BertBackbone, PackedBertBackbone)
#: model_type of a base's config -> its reference backbone and its packed one.
BACKBONES: dict[str, tuple[type[Backbone], type[Packed]]] = {
    "llama": _DECODER,
    "mistral": _DECODER,
    "qwen2": _DECODER,
    "qwen3": _DECODER,
    "t5": (T5EncoderBackbone, PackedT5EncoderBackbone),
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "camembert": _BERT,
}


def backbones_of(base: PreTrainedModel) -> tuple[Backbone, Packed | None]:
    """The reference and the packed backbone of ``base``; of a decoder of no family here, the hooked one and None.

    Raises:
        ValueError: ``base`` is no transformers model. NotImplementedError: it can be run by none of them.
    """
    if not isinstance(base, PreTrainedModel):
        raise ValueError(f"base must be a transformers PreTrainedModel, got {type(base).__name__}")
    kind = base.config.model_type
    if kind not in BACKBONES:
        return HookedBackbone(base), None
    reference, packed = BACKBONES[kind]
    return reference(base), packed(base)


__all__ = ["BACKBONES", "Backbone", "HookedBackbone", "backbones_of"]
