"""SuperGLUE tasks, from a folder in the official layout or through ``datasets``.

A task is one entry of :data:`SUPERGLUE`. The train file is cut 90/10 into train and validation; the official validation
file is the test set, since the official test labels are not published.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .readers import Record, check_label, label_of, read_records, text_of
from .task import Example, Prompt, Task, cut_rows, example

#: The dataset on the hub that holds every configuration as plain data files.
_HUB_DATASET = "aps/super_glue"


@dataclass(frozen=True)
class Entry:
    """A SuperGLUE task: its folder, its configuration on the hub, and its prompt.

    Labels stand in the hub's order, so that an integer label is an index into them.
    """

    folder: str
    config: str
    prompt: Prompt


SUPERGLUE = {
    "rte": Entry(
        "RTE",
        "rte",
        Prompt(
            "rte sentence1: {premise} sentence2: {hypothesis}",
            "premise",
            ("entailment", "not_entailment"),
            (" yes", " no"),
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
        ),
    ),
    "boolq": Entry(
        "BoolQ",
        "boolq",
        Prompt("boolq passage: {passage} question: {question}", "passage", ("False", "True"), (" False", " True")),
    ),
    "wic": Entry(
        "WiC",
        "wic",
        Prompt(
            "wic sentence1: {sentence1} sentence2: {sentence2} word: {word}",
            "sentence1",
            ("False", "True"),
            (" False", " True"),
        ),
    ),
    "copa": Entry(
        "COPA",
        "copa",
        Prompt(
            "copa choice1: {choice1} choice2: {choice2} premise: {premise} question: {question}",
            "premise",
            ("choice1", "choice2"),
            (" A", " B"),
        ),
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
    for split, source in {"train": "train", "test": "val"}.items():
        records = _official(Path(data_dir), entry, source) if data_dir is not None else _hub(entry, source)
        splits[split] = [_example(row, entry.prompt, where) for where, row in records]
    splits |= cut_rows(splits["train"], {"train": 0.9, "validation": 0.1}, split_seed, name)
    return Task(name, entry.prompt, splits)


def _official(folder: Path, entry: Entry, split: str) -> Iterable[Record]:
    tried = [folder / f"{split}.jsonl", folder / entry.folder / f"{split}.jsonl"]
    for path in tried:
        if path.is_file():
            return read_records(path)
    raise FileNotFoundError(f"data_dir has no {split} split: there is neither {tried[0]} nor {tried[1]}")


def _hub(entry: Entry, split: str) -> Iterable[Record]:
    from datasets import load_dataset

    try:
        rows = load_dataset(_HUB_DATASET, entry.config, split={"val": "validation"}.get(split, split))
    except OSError as error:
        raise OSError(f"{error}. Without a connection, data_dir names a folder in the official layout") from error
    return ((f"{_HUB_DATASET} {entry.config}, {split} row {number}", row) for number, row in enumerate(rows))


def _example(row: dict[str, Any], prompt: Prompt, where: str) -> Example:
    for column in (*prompt.fields, "label"):
        if column not in row:
            raise ValueError(f"{where}: there is no field {column!r}; there are {', '.join(map(repr, row))}")
    value = row["label"]
    if type(value) is int and 0 <= value < len(prompt.labels):
        value = prompt.labels[value]
    label = label_of(value, f"{where}: label")
    check_label(label, prompt.labels, where)
    return example({name: text_of(row[name], f"{where}: {name}") for name in prompt.fields}, label, where)
