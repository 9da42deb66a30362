"""How a model says which label it means: as a text, through a linear head, or by the logits of label words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase

from ..tasks import Prompt
from ..training.loading import word_ids
from ..training.run import Rows

#: The label that transformers' losses pass over.
IGNORED = -100

Kind = Literal["text", "linear", "label-words"]


@dataclass(frozen=True)
class Answer:
    """What the answers of a task are to a model.

    Args:
        kind: ``"text"``: an encoder-decoder writes the label's name; ``"linear"``: a trained head over the original
            labels; ``"label-words"``: the language-model head's logits of one word a label.
        classes: number of labels C.
        words: vocabulary ids of the label words, or None.
        targets: ``[C, L]`` ids of the labels' names with their end token, -100 behind it; or None.
        pad: id of the tokenizer's padding.
    """

    kind: Kind
    classes: int
    words: tuple[int, ...] | None = None
    targets: Tensor | None = None
    pad: int = 0


def answer_of(kind: str | None, prompt: Prompt, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Answer:
    """The answers of ``prompt`` on ``base``; ``kind=None`` is the paper's: text for T5, a linear head elsewhere.

    Raises:
        ValueError: a kind that does not exist or does not fit the base, labels whose texts are the same tokens, or
            label words that :func:`capt.tasks.label_word_ids` refuses.
    """
    writes = bool(base.config.is_encoder_decoder)
    kind = kind or ("text" if writes else "linear")
    if kind not in ("text", "linear", "label-words"):
        raise ValueError(f"answer must be 'text', 'linear' or 'label-words', got {kind!r}")
    misfit = {
        "text": not writes and "only an encoder-decoder writes",
        "linear": writes and "an encoder-decoder answers by 'text' or 'label-words'",
        "label-words": base.get_output_embeddings() is None and "there is no language-model head to read them from",
    }[kind]
    if misfit:
        raise ValueError(f"answer {kind!r} does not fit {type(base).__name__}: {misfit}")
    classes = len(prompt.labels)
    if kind == "linear":
        return Answer("linear", classes)
    if kind == "label-words":
        words = word_ids(prompt, kind, base, tokenizer)
        return Answer("label-words", classes, words=None if words is None else tuple(words))
    rows = [torch.tensor(_ended(tokenizer, label)) for label in prompt.labels]
    targets = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORED)
    if len(targets.unique(dim=0)) < classes:
        raise ValueError(f"the labels {', '.join(prompt.labels)} are not all different to this tokenizer: {targets}")
    return Answer("text", classes, targets=targets, pad=int(tokenizer.pad_token_id))


def _ended(tokenizer: PreTrainedTokenizerBase, label: str) -> list[int]:
    ids = tokenizer(label, add_special_tokens=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id]


class TextToText(nn.Module):
    """An encoder-decoder that is trained to write a label's name, and is right when it has written it.

    Args:
        model: takes ``labels [B, L]`` and generates, as transformers' encoder-decoders do.
        answer: with ``targets``.
    """

    def __init__(self, model: Any, answer: Answer):
        super().__init__()
        assert answer.targets is not None
        self.model, self.answer = model, answer
        self.register_buffer("targets", answer.targets, persistent=False)
        self.targets: Tensor

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """With class ids ``labels [B]``: ``loss``, the mean over the tokens of their names. Without: ``logits``
        ``[B, C + 1]``, 1 for the label that greedy decoding wrote, the last column for a text that is none.
        """
        if labels is not None:
            wanted = self.targets[labels]
            return {"loss": self.model(input_ids=input_ids, attention_mask=attention_mask, labels=wanted).loss}
        longest, padding = self.targets.shape[1], self.answer.pad
        written = self.model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            max_new_tokens=longest,
            do_sample=False,
            num_beams=1,
            pad_token_id=padding,
        )[:, 1:]
        written = pad(written, (0, longest - written.shape[1]), value=padding)
        match = (written[:, None] == self.targets.masked_fill(self.targets == IGNORED, padding)).all(-1)
        found = torch.where(match.any(1), match.int().argmax(1), self.answer.classes)
        return {"logits": one_hot(found, self.answer.classes + 1).float()}

    @torch.inference_mode()
    def mean_loss(self, rows: Rows, tokenizer: PreTrainedTokenizerBase, batch_size: int) -> float:
        """The loss of encoded rows, a batch's weighted by its rows: it moves while every text is still wrong."""
        collate: Any = DataCollatorWithPadding(tokenizer)
        total = 0.0
        for start in range(0, len(rows), batch_size):
            batch = collate(rows[start : start + batch_size]).to(self.targets.device)
            total += self(**batch)["loss"].item() * len(batch["labels"])
        return total / len(rows)

    def unload(self) -> None:
        """Takes what the method put on the base off it."""
        self.model.unload()
