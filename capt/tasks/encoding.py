"""Prompts as token ids: label words, and truncation that leaves the template whole."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from .task import Example, Prompt


def label_word_ids(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> list[int]:
    """The token id of each label word.

    Raises:
        ValueError: a word that is not a single token (names its token ids), or two words with the same token.
    """
    ids: dict[int, str] = {}
    for word in words:
        tokens = tokenizer.encode(word, add_special_tokens=False)
        if len(tokens) != 1 or tokens[0] == tokenizer.unk_token_id:
            kind = "an unknown word" if tokens == [tokenizer.unk_token_id] else f"{len(tokens)} tokens"
            raise ValueError(
                f"label word {word!r} must be a single token of the tokenizer, got {kind}: {tokens}; name others with "
                "label_words (--label-words), or take classifier 'linear' (--classifier linear)"
            )
        if tokens[0] in ids:
            raise ValueError(f"label words {ids[tokens[0]]!r} and {word!r} are the same token {tokens[0]}")
        ids[tokens[0]] = word
    return list(ids)


def encode(
    examples: Sequence[Example], prompt: Prompt, tokenizer: PreTrainedTokenizerBase, max_length: int, source: str
) -> list[dict[str, Any]]:
    """``{"input_ids": [...], "labels": class id}`` for each example, with ``max_length`` ids at most.

    Too long a prompt loses the end of the field ``prompt.cut``; the template and the other fields stay whole. What a
    tokenizer puts around a text ([CLS] and [SEP], an end-of-sequence token) counts, and is never cut off.

    Args:
        examples: with or without a label; without one, there is no "labels".
        source: what the examples are, for errors.

    Raises:
        ValueError: nothing of the field to cut would be left, or too long a prompt of which nothing may be cut.
    """
    rows = []
    encoded = tokenizer([prompt.render(row) for row in examples], verbose=False)["input_ids"] if examples else []
    for number, (row, ids) in enumerate(zip(examples, encoded, strict=True), start=1):
        if len(ids) > max_length:
            cut = fitted(row, prompt, tokenizer, max_length, f"{source}, example {number}")
            ids = tokenizer(prompt.render(cut), verbose=False)["input_ids"]
        features: dict[str, Any] = {"input_ids": ids}
        if "label" in row:
            features["labels"] = prompt.labels.index(row["label"])
        rows.append(features)
    return rows


def fitted(row: Example, prompt: Prompt, tokenizer: PreTrainedTokenizerBase, max_length: int, where: str) -> Example:
    """``row``, its field ``prompt.cut`` without the end that is too much for ``max_length`` ids.

    Raises:
        ValueError: as :func:`encode`.
    """

    def length(row: Example) -> int:
        return len(tokenizer(prompt.render(row), verbose=False)["input_ids"])

    if length(row) <= max_length:
        return row
    field = prompt.cut
    if field is None:
        raise ValueError(
            f"{where}: max_length leaves {max_length} tokens, the prompt takes more, and it must stay whole"
        )
    text = row[field]

    def cut(kept: int) -> Example:
        return {**row, field: text[:kept]}

    kept = bisect.bisect_right(range(len(text)), max_length, key=lambda kept: length(cut(kept))) - 1
    # One character more can make a token fewer, so the search may stop a little too far on.
    while kept > 0 and length(cut(kept)) > max_length:
        kept -= 1
    if kept <= 0 or not text[:kept].strip():
        raise ValueError(
            f"{where}: max_length leaves {max_length} tokens, and the template with its other fields takes "
            f"{length(cut(0))} of them: nothing of {field!r} is left"
        )
    return cut(kept)
