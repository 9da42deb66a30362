"""SuperGLUE tasks, from a folder in the official layout or through ``datasets``.

A task is one entry of :data:`SUPERGLUE`. The train file is cut 90/10 into train and validation; the official validation
file is the test set, since the official test labels are not published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .multirc import one_answer_a_row
from .official import hub, official
from .readers import Record, check_label, label_of, text_of
from .task import Example, Prompt, Task, cut_rows, example

#: The dataset on the hub that holds every configuration as plain data files.
_HUB_DATASET = "aps/super_glue"


@dataclass(frozen=True)
class Entry:
    """A SuperGLUE task: its folder, its configuration on the hub, and its prompt.

    Labels stand in the hub's order, so that an integer label is an index into them.

    Args:
        metric: what the task is scored by.
        label_key: what BoolQ's own release calls the label.
        rows: makes rows with the prompt's fields and a label of the records of a file.
        together: a field whose equal values are not torn apart by the cut into train and validation.
        may_be_empty: fields that are empty in rows of the official files.
    """

    folder: str
    config: str
    prompt: Prompt
    metric: str = "accuracy"
    label_key: str = "label"
    rows: Callable[[Iterable[Record]], Iterable[Record]] = iter
    together: str | None = None
    may_be_empty: tuple[str, ...] = ()


SUPERGLUE = {
    "rte": Entry(
        "RTE",
        "rte",
        Prompt(
            "rte sentence1: {premise} sentence2: {hypothesis}",
            "premise",
            ("entailment", "not_entailment"),
            (" yes", " no"),
            " answer:",
        ),
    ),
    "cb": Entry(
        "CB",
        "cb",
        Prompt(
            "cb sentence1: {premise} sentence2: {hypothesis}",
            "premise",
            ("entailment", "contradiction", "neutral"),
            (" yes", " no", " maybe"),
            " answer:",
        ),
        metric="f1_and_accuracy",
    ),
    "boolq": Entry(
        "BoolQ",
        "boolq",
        Prompt(
            "boolq passage: {passage} question: {question}",
            "passage",
            ("False", "True"),
            (" False", " True"),
            " answer:",
        ),
        label_key="answer",
    ),
    "wic": Entry(
        "WiC",
        "wic",
        Prompt(
            "wic sentence1: {sentence1} sentence2: {sentence2} word: {word}",
            "sentence1",
            ("False", "True"),
            (" False", " True"),
            " answer:",
        ),
    ),
    "copa": Entry(
        "COPA",
        "copa",
        Prompt(
            "copa choice1: {choice1} choice2: {choice2} premise: {premise} question: {question}",
            "premise",
            ("choice1", "choice2"),
            (" first", " second"),
            " answer:",
        ),
    ),
    "multirc": Entry(
        "MultiRC",
        "multirc",
        Prompt(
            "multirc paragraph: {paragraph} question: {question} answer: {answer}",
            "paragraph",
            ("False", "True"),
            (" False", " True"),
            " correct:",
        ),
        metric="multirc",
        rows=one_answer_a_row,
        together="paragraph",
        may_be_empty=("answer",),
    ),
}


def superglue(name: str, *, data_dir: str | None = None, split_seed: int = 0) -> Task:
    """A task of :data:`SUPERGLUE`: ``data_dir`` holds ``train.jsonl`` and ``val.jsonl``, itself or in a folder of the
    task's official name; without it they come through ``datasets.load_dataset``.

    Raises:
        ValueError: a split that is not there or is empty, a malformed line, a field that is missing, an unknown label.
        OSError: the dataset cannot be had.
    """
    entry = SUPERGLUE[name]
    splits = {}
    for split, file, hub_split in (("train", "train", "train"), ("test", "val", "validation")):
        if data_dir is not None:
            records = official(Path(data_dir), entry.folder, file)
        else:
            records = hub(_HUB_DATASET, entry.config, hub_split)
        splits[split] = [_example(row, entry, where) for where, row in entry.rows(records)]
    splits |= cut_rows(splits["train"], {"train": 0.9, "validation": 0.1}, split_seed, name, entry.together)
    return Task(name, entry.prompt, splits, entry.metric)


def _example(row: dict[str, Any], entry: Entry, where: str) -> Example:
    prompt, key = entry.prompt, "label" if "label" in row else entry.label_key
    for column in (*prompt.fields, key):
        if column not in row:
            raise ValueError(f"{where}: there is no field {column!r}; there are {', '.join(map(repr, row))}")
    value = row[key]
    if type(value) is int and 0 <= value < len(prompt.labels):
        value = prompt.labels[value]
    label = label_of(value, f"{where}: {key}")
    check_label(label, prompt.labels, where)
    fields = {name: text_of(row[name], f"{where}: {name}") for name in prompt.fields}
    made = example(fields, label, where, entry.may_be_empty)
    return made | {"group": row["group"]} if "group" in row else made
