"""The methods that are compared, by name. A method is a function of a frozen base and of how it answers.

To add one, write ``build(base, answer, **options)`` that returns a module with

- ``forward(input_ids, attention_mask, labels=None)``: ``logits [B, C]``, or for ``answer.kind == "text"`` what
  :class:`.answers.TextToText` makes of a module that takes ``labels [B, L]`` and has ``generate``;
- parameters that require a gradient where, and only where, they train;
- ``unload()``, which leaves the base as it was given;

and put it into :data:`METHODS`, and into the rows of :mod:`.grids` that it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..config import CaptConfig
from ..methods import PrefixModel
from ..model import get_capt_model
from .answers import Answer, TextToText
from .bare import BareClassifier, BareWriter

Build = Callable[..., nn.Module]


def capsule(**fixed: Any) -> Build:
    """CaPT with the :class:`CaptConfig` fields ``fixed``; a row's options are further fields."""

    def build(base: PreTrainedModel, answer: Answer, **options: Any) -> nn.Module:
        task_type = "SEQ_2_SEQ_LM" if answer.kind == "text" else "SEQ_CLS"
        config = CaptConfig(**{**fixed, **options}, task_type=task_type, label_words=answer.words)
        model = get_capt_model(base, config)
        return TextToText(model, answer) if answer.kind == "text" else model

    return build


def prefix(base: PreTrainedModel, answer: Answer, length: int = 20) -> nn.Module:
    """P-Tuning v2: ``length`` trained keys and values a layer."""
    text = answer.kind == "text"
    model = PrefixModel(base, length, task_type="SEQ_2_SEQ_LM" if text else "SEQ_CLS", label_words=answer.words)
    return TextToText(model, answer) if text else model


def bare(base: PreTrainedModel, answer: Answer) -> nn.Module:
    """The base as it is; a linear head on it trains, and nothing else does."""
    return TextToText(BareWriter(base), answer) if answer.kind == "text" else BareClassifier(base, answer)


def lora(base: PreTrainedModel, answer: Answer, rank: int = 8) -> nn.Module:
    """LoRA of ``rank`` (alpha twice that, no dropout) on the query and value projections, by PEFT.

    Raises:
        ImportError: PEFT is missing.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ImportError("method 'lora' needs PEFT: pip install 'capt-kernels[bench]'") from None
    model: Any = bare(base, answer)  # first: it freezes the base
    injected: Any = get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank))
    thaw = model.unload

    def unload() -> None:
        injected.unload()
        thaw()

    model.unload = unload
    return model


METHODS: dict[str, Build] = {
    "bare": bare,
    "capt": capsule(),
    "capt-lead": capsule(lead=1, first_mean=False),
    "deep-pt": capsule(instance=False),
    "instance-only": capsule(task=False),
    "lora": lora,
    "p-tuning-v2": prefix,
}
