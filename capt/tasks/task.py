"""What a task is: examples in splits, a template that makes a prompt of one, and the words its labels are called by."""

from __future__ import annotations

import dataclasses
import itertools
import random
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .metrics import METRICS

#: The fields that the template names, "label" (absent in a text yet to be labelled), and "group" where several rows are
#: scored as one (the answers to one question). All are strings.
Example = dict[str, str]

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Prompt:
    """How an example is put to a model, and what its answers are called.

    Args:
        template: a format string over the example's fields, such as ``"Review: {text}\\nSentiment:"``.
        cut: the field that gives way where a prompt is too long; everything else stays whole. None: nothing does, and
            too long a prompt is an error.
        labels: the label names; a class id is an index into them.
        label_words: one word a label, in the same order, as it would follow the template (a leading space included);
            None where the task has none.
        cue: what stands between the template and a label word, such as ``" answer:"``; see :meth:`asking`.

    Raises:
        ValueError: a template without the field to cut, or as many words as there are not labels.
    """

    template: str
    cut: str | None
    labels: tuple[str, ...]
    label_words: tuple[str, ...] | None = None
    cue: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", tuple(self.labels))
        if self.cut is not None and self.cut not in self.fields:
            raise ValueError(f"template must name the field {{{self.cut}}}, got {self.template!r}")
        if len(self.labels) < 2:
            raise ValueError(f"a task needs at least two labels, got {list(self.labels)}")
        if self.label_words is not None:
            object.__setattr__(self, "label_words", tuple(self.label_words))
            if len(self.label_words) != len(self.labels):
                raise ValueError(
                    f"label_words must be {len(self.labels)} words, for {', '.join(self.labels)} in this order, "
                    f"got {len(self.label_words)}: {list(self.label_words)}"
                )

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields that the template uses, in its order."""
        try:
            parts = list(string.Formatter().parse(self.template))
        except ValueError as error:
            raise ValueError(f"template {self.template!r} is not a format string: {error}") from None
        return tuple(dict.fromkeys(name for _, name, _, _ in parts if name is not None))

    def asking(self) -> Prompt:
        """The prompt with its cue in the template: for a language model whose next word is read as the answer."""
        return dataclasses.replace(self, template=self.template + self.cue, cue="")

    def render(self, example: Mapping[str, str]) -> str:
        """The prompt for ``example``."""
        return self.template.format_map(example)


@dataclass(frozen=True)
class Task:
    """Examples of ``"train"``, ``"validation"`` and ``"test"``, and the :class:`Prompt` for them.

    Args:
        metric: what the task is scored by, a name in :data:`.metrics.METRICS`.

    Raises:
        ValueError: an empty split, a template field that the examples lack, or a metric that does not exist.
    """

    name: str
    prompt: Prompt
    splits: Mapping[str, Sequence[Example]] = field(repr=False)
    metric: str = "accuracy"

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {self.metric!r}")
        for split in SPLITS:
            if not self.splits[split]:
                raise ValueError(f"{self.name}: the {split} split is empty")
        present = [name for name in self.splits["train"][0] if name not in ("label", "group")]
        for name in self.prompt.fields:
            if name not in present:
                raise ValueError(
                    f"template names the field {name!r}, which {self.name} does not have; it has {present}"
                )


def groups_of(examples: Sequence[Example]) -> list[str] | None:
    """What each of ``examples``, one at least, belongs to; None where they stand alone."""
    return [row["group"] for row in examples] if "group" in examples[0] else None


def example(fields: Mapping[str, str], label: str | None, where: str, may_be_empty: Sequence[str] = ()) -> Example:
    """An example of ``fields``; ``where`` tells its file and line in the errors.

    Raises:
        ValueError: an empty field, or half a character (of an emoji that was cut in two), which no tokenizer takes.
    """
    made = dict(fields) if label is None else {**fields, "label": label}
    for name, text in made.items():
        if not text.strip() and name not in may_be_empty:
            raise ValueError(f"{where}: {name} is empty")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: {name} holds half a character: {text[error.start]!a}") from None
    return made


def distinct(examples: Iterable[Example]) -> list[Example]:
    """The first of each group of examples that agree in every field but the label."""
    first: dict[tuple[tuple[str, str], ...], Example] = {}
    for row in examples:
        first.setdefault(tuple((name, text) for name, text in row.items() if name != "label"), row)
    return list(first.values())


def cut_rows(
    rows: Sequence[Example], shares: Mapping[str, float], seed: int, source: str, together: str | None = None
) -> dict[str, list[Example]]:
    """``rows``, shuffled by ``seed``, cut into a split for each share; each gets one row at least.

    Args:
        together: a field; rows that agree in it share a split, and the shares are shares of its values.

    Raises:
        ValueError: fewer rows (or values of ``together``) than splits.
    """
    units: dict[Any, list[Example]] = {}
    for number, row in enumerate(rows):
        units.setdefault(number if together is None else row[together], []).append(row)
    kind = "rows" if together is None else f"different {together}s"
    if len(units) < len(shares):
        raise ValueError(f"{source} has {len(units)} {kind}: too few to cut into {', '.join(shares)}")
    shuffled = random.Random(seed).sample(list(units.values()), len(units))
    splits: dict[str, list[Example]] = {}
    # The first share takes what the others leave, so that rounding never empties one of them.
    for name in reversed(list(shares)):
        count = len(shuffled) if name == next(iter(shares)) else max(1, round(shares[name] * len(units)))
        splits[name] = list(itertools.chain.from_iterable(shuffled[:count]))
        shuffled = shuffled[count:]
    return {name: splits[name] for name in shares}
