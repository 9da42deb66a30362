"""Frozen bases by name, and batches of real lengths for them.

Random weights do for time and memory, which do not depend on what weights hold; ``smollm2`` and ``minilm`` are real.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5EncoderModel,
)

from capt import assets
from capt.backbones import BACKBONES

from .lengths import lengths

Batch = dict[str, Tensor]


def _llama(layers: int, **shape: Any) -> Callable[..., PreTrainedModel]:
    def make(layers: int = layers) -> PreTrainedModel:
        config = LlamaConfig(num_hidden_layers=layers, pad_token_id=0, max_position_embeddings=4096, **shape)
        return LlamaForCausalLM(config)

    return make


#: A third of SmolLM2-135M.
_llama_cut = _llama(
    10, vocab_size=1000, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3
)
#: Llama-3.2-1B's shape.
_llama_1b = _llama(
    16,
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=32,
    num_key_value_heads=8,
    rope_theta=500000.0,
    tie_word_embeddings=True,
)


def _t5_cut(layers: int = 6) -> PreTrainedModel:
    """Half of T5 v1.1 base's encoder."""
    config = T5Config(
        vocab_size=1000,
        d_model=768,
        d_kv=64,
        d_ff=2048,
        num_layers=layers,
        num_heads=12,
        feed_forward_proj="gated-gelu",
    )
    return T5EncoderModel(config)


#: Random weights; ``layers`` may be given.
SHAPES: dict[str, Callable[..., PreTrainedModel]] = {
    "llama-10x576": _llama_cut,
    "t5-6x768": _t5_cut,
    "llama-3.2-1b": _llama_1b,
}
#: Real weights, fetched by the user's own pip.
EMBEDDED = {"smollm2": assets.smollm2, "minilm": assets.minilm}


def make_base(name: str, layers: int | None = None, device: str = "cpu") -> PreTrainedModel:
    """A frozen base in eval mode, fp32 on a CPU, bf16 on a GPU.

    Args:
        name: of :data:`SHAPES` or :data:`EMBEDDED`, or a folder or a model id of a family that capt runs.
        layers: in place of a shape's own number.

    Raises:
        ValueError: layers for weights that have theirs, or a family without a packed backbone. OSError: no such model.
    """
    torch.manual_seed(0)
    if name in SHAPES:
        base = SHAPES[name]() if layers is None else SHAPES[name](layers)
    elif layers is not None:
        raise ValueError(f"layers can be chosen for {', '.join(SHAPES)}, got {layers} for {name!r}")
    else:
        source = str(EMBEDDED[name]()) if name in EMBEDDED else name
        kind = AutoConfig.from_pretrained(source).model_type
        if kind not in BACKBONES:
            raise ValueError(f"no packed backbone runs a model_type {kind!r}; there are {', '.join(BACKBONES)}")
        if kind == "t5":
            base = T5EncoderModel.from_pretrained(source, dtype=torch.float32)
        elif kind in BACKBONES and not BACKBONES[kind][0].is_causal:
            # Without the pooler, which no method reads: full fine-tuning would train a part that has no gradient.
            base = AutoModel.from_pretrained(source, add_pooling_layer=False, dtype=torch.float32)
        else:
            base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    base = base.requires_grad_(False).eval().to(device)
    return base.to(torch.bfloat16) if device == "cuda" else base


def headless(base: PreTrainedModel) -> PreTrainedModel:
    """The stack alone, which keeps no cache."""
    stack = base.base_model
    stack.config.use_cache = False
    return stack


def shell(base: PreTrainedModel) -> PreTrainedModel:
    """A module tree of its own over the same weights: what a method does to its modules is seen by no other."""
    return copy.deepcopy(base, memo={id(t): t for t in (*base.parameters(), *base.buffers())})


def make_batch(base: PreTrainedModel, task: str, rows: int, side: str = "right") -> Batch:
    """Random ids and a mask of the task's real lengths (:func:`.lengths.lengths`), on the base's device."""
    counts = lengths(task, rows)
    longest = int(counts.max())
    place = torch.arange(longest)
    mask = (place < counts[:, None] if side == "right" else place >= longest - counts[:, None]).long()
    ids = torch.randint(3, base.config.get_text_config().vocab_size, mask.shape) * mask
    return {"input_ids": ids.to(base.device), "attention_mask": mask.to(base.device)}
