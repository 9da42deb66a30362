"""CommonsenseQA, from a folder in the official layout or through ``datasets``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .official import hub, official
from .readers import Record, check_label, label_of, text_of
from .task import Example, Prompt, Task, cut_rows, example

_HUB_DATASET = "tau/commonsense_qa"
_LETTERS = ("A", "B", "C", "D", "E")

# Nothing is cut: the question has to stay whole, and an answer less would change the task.
_PROMPT = Prompt(
    f"csqa question: {{question}} {' '.join(f'{letter}: {{{letter}}}' for letter in _LETTERS)}",
    None,
    _LETTERS,
    tuple(f" {letter}" for letter in _LETTERS),
    " answer:",
)


def csqa(*, data_dir: str | None = None, split_seed: int = 0) -> Task:
    """Which of five answers a question has. ``data_dir`` holds ``train_rand_split.jsonl`` and ``dev_rand_split.jsonl``,
    itself or in a folder ``CSQA``; the train file is cut 90/10 into train and validation, the dev file is the test set.

    Raises:
        ValueError: a split that is empty, a malformed line, a field that is missing, an unknown label.
        OSError: the dataset cannot be had.
    """
    splits = {}
    for split, file, hub_split in (("train", "train", "train"), ("test", "dev", "validation")):
        records = official(Path(data_dir), "CSQA", file) if data_dir is not None else hub(_HUB_DATASET, None, hub_split)
        splits[split] = [_example(record) for record in records]
    splits |= cut_rows(splits["train"], {"train": 0.9, "validation": 0.1}, split_seed, "csqa")
    return Task("csqa", _PROMPT, splits)


def _example(record: Record) -> Example:
    where, row = record
    question = row.get("question")
    # The official files nest the choices in the question, as a list of objects; the hub holds two lists beside it.
    holder = {"stem": question, "choices": row.get("choices")} if not isinstance(question, dict) else question
    stem, choices = holder.get("stem"), holder.get("choices")
    fields = {"question": text_of(stem, f"{where}: the question")} | _answers(choices, where)
    if "answerKey" not in row:
        raise ValueError(f"{where}: there is no field 'answerKey'; there are {', '.join(map(repr, row))}")
    label = label_of(row["answerKey"], f"{where}: answerKey")
    check_label(label, _LETTERS, where)
    return example(fields, label, where)


def _answers(choices: Any, where: str) -> dict[str, str]:
    try:
        pairs = (
            [(choice["label"], choice["text"]) for choice in choices]
            if isinstance(choices, list)
            else list(zip(choices["label"], choices["text"], strict=True))
        )
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{where}: choices must be labelled texts, got {str(choices)[:80]}") from None
    if [letter for letter, _ in pairs] != list(_LETTERS):
        raise ValueError(f"{where}: choices must be labelled {', '.join(_LETTERS)}, got {[name for name, _ in pairs]}")
    return {letter: text_of(text, f"{where}: choice {letter}") for letter, text in pairs}
