"""Labelled texts to train and test on, by name. Nothing here knows of models or kernels."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from .csqa import csqa
from .embedded import movie_reviews, trec
from .encoding import encode, label_word_ids
from .files import file
from .metrics import METRICS, score
from .readers import read_examples
from .superglue import SUPERGLUE, superglue
from .task import SPLITS, Example, Prompt, Task, groups_of
from .training_rows import few, with_noise

__all__ = [
    "METRICS",
    "SPLITS",
    "TASKS",
    "Example",
    "Prompt",
    "Task",
    "encode",
    "few",
    "groups_of",
    "label_word_ids",
    "load_task",
    "read_examples",
    "score",
    "with_noise",
]

#: Task name -> a function of that task's own options.
TASKS: dict[str, Callable[..., Task]] = {
    "trec": trec,
    "movie-reviews": movie_reviews,
    "file": file,
    **{name: functools.partial(superglue, name) for name in SUPERGLUE},
    "csqa": csqa,
}


def load_task(
    name: str, *, template: str | None = None, label_words: Sequence[str] | None = None, **options: Any
) -> Task:
    """The task called ``name``.

    Args:
        template, label_words: in place of the task's own (:class:`Prompt`); a template of yours brings its own cue.
        options: the task's own options (``data_dir``; ``train_file``, ``eval_file``, ``text_column``, ``label_column``;
            ``split_seed``). None counts as not given.

    Raises:
        ValueError: an unknown task, an option the task does not take or lacks, data that do not fit; names the thing.
        OSError: a file or a download that cannot be had.
    """
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; there are {', '.join(TASKS)}")
    taken = inspect.signature(TASKS[name]).parameters
    given = {option: value for option, value in options.items() if value is not None}
    for option in given:
        if option not in taken:
            hint = "; task 'file' does" if option in inspect.signature(TASKS["file"]).parameters else ""
            raise ValueError(f"task {name!r} takes no {option}, got {given[option]!r}{hint}")
    for option, parameter in taken.items():
        if parameter.default is inspect.Parameter.empty and option not in given:
            raise ValueError(f"task {name!r} needs {option}")
    task = TASKS[name](**given)
    prompt = dataclasses.replace(
        task.prompt,
        template=task.prompt.template if template is None else template,
        label_words=task.prompt.label_words if label_words is None else tuple(label_words),
        cue=task.prompt.cue if template is None else "",
    )
    return dataclasses.replace(task, prompt=prompt)
