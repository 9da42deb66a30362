"""A task out of the user's own CSV, TSV or JSON Lines file."""

from __future__ import annotations

from pathlib import Path

from .readers import read_examples
from .task import Prompt, Task, cut_rows


def file(
    *,
    train_file: str,
    eval_file: str | None = None,
    text_column: str = "text",
    label_column: str = "label",
    split_seed: int = 0,
) -> Task:
    """Texts and labels of ``train_file``, cut 80/10/10; or 90/10 where ``eval_file`` is the test set.

    The labels are those of the file, sorted; their own names, after a space, are the default label words.

    Raises:
        ValueError: as :func:`.readers.read_examples`; a label of ``eval_file`` that ``train_file`` does not have.
    """
    columns = {"text": text_column}
    rows = read_examples(Path(train_file), columns, label_column)
    labels = tuple(sorted({row["label"] for row in rows}))
    if len(labels) < 2:
        raise ValueError(f"{train_file}: column {label_column!r} must hold at least two labels, got {list(labels)}")
    if eval_file is None:
        splits = cut_rows(rows, {"train": 0.8, "validation": 0.1, "test": 0.1}, split_seed, train_file)
    else:
        splits = cut_rows(rows, {"train": 0.9, "validation": 0.1}, split_seed, train_file)
        splits["test"] = read_examples(Path(eval_file), columns, label_column, labels)
    prompt = Prompt("{text}", "text", labels, tuple(f" {label}" for label in labels))
    return Task("file", prompt, splits)
