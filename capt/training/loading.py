"""A base with its tokenizer, and what a task's prompt and words are to it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..assets import minilm, smollm2
from ..backbones import BACKBONES
from ..tasks import Prompt, label_word_ids


def load_base(model: str, num_labels: int, bf16: bool = False) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A language model and its tokenizer, which is given a token to pad with if it has none.

    A decoder or an encoder-decoder comes with its language-model head; an encoder, which has none for a task, without.

    Raises:
        OSError: there is no such model. ValueError: a tokenizer with neither a padding nor an end token.
    """
    embedded = {"smollm2": smollm2, "minilm": minilm}
    source = str(embedded[model]()) if model in embedded else model
    try:
        config = AutoConfig.from_pretrained(source, num_labels=num_labels)
        tokenizer = AutoTokenizer.from_pretrained(source)
        family = BACKBONES.get(config.model_type)
        loader: Any = AutoModelForCausalLM if family is None or family[0].is_causal else AutoModel
        if config.is_encoder_decoder:
            loader = AutoModelForSeq2SeqLM
        base = loader.from_pretrained(source, config=config, dtype=torch.bfloat16 if bf16 else torch.float32)
    except OSError as error:
        raise OSError(f"model {model!r} cannot be loaded: {error}") from error
    tokenizer.padding_side = "right"
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer of {model!r} has neither a padding nor an end-of-sequence token to pad with"
            )
        tokenizer.pad_token = tokenizer.eos_token  # masked everywhere, so any token will do
    return base, tokenizer


def prompt_for(prompt: Prompt, classifier: str, base: PreTrainedModel) -> Prompt:
    """``prompt`` as ``base`` is given it: with its cue where the next word is the answer.

    An encoder-decoder's answer starts a text of its own, and a linear head reads no word.
    """
    return prompt.asking() if classifier == "label-words" and not base.config.is_encoder_decoder else prompt


def word_ids(
    prompt: Prompt, classifier: str, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[int] | None:
    """Token ids of the label words; None for a linear classifier.

    Raises:
        ValueError: a word that is not a single token, a task without words, or a base without a head that says one.
    """
    if classifier == "linear":
        return None
    if prompt.label_words is None:
        raise ValueError("the task has no label words: name some with label_words, or take classifier 'linear'")
    if base.get_output_embeddings() is None:
        name = type(base).__name__
        raise ValueError(
            f"classifier 'label-words' wants a language-model head, {name} has none: "
            "take 'linear' (--classifier linear)"
        )
    # An encoder-decoder's answer starts a text of its own, so no space stands before it.
    words = [word.strip() if base.config.is_encoder_decoder else word for word in prompt.label_words]
    return label_word_ids(tokenizer, words)
