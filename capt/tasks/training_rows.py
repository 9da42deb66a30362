"""Training rows made noisy, or few: what robustness and few-shot experiments train on."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

from .task import Example, Prompt


def with_noise(rows: Sequence[Example], prompt: Prompt, level: float, seed: int) -> list[Example]:
    """``rows`` with special characters (ASCII punctuation) put into random places of their texts.

    Args:
        level: characters put in, as a share of a text's own; 0 leaves the rows as they are.
        seed: decides characters and places.

    Raises:
        ValueError: a negative level.
    """
    if not 0 <= level < float("inf"):
        raise ValueError(f"noise must be a share of the text of at least 0, got {level}")
    draw = random.Random(seed)
    return [row | {name: _noisy(row[name], level, draw) for name in prompt.fields} for row in rows]


def _noisy(text: str, level: float, draw: random.Random) -> str:
    characters = list(text)
    for _ in range(round(level * len(text))):
        characters.insert(draw.randint(0, len(characters)), draw.choice(string.punctuation))
    return "".join(characters)


def few(rows: Sequence[Example], count: int, seed: int) -> list[Example]:
    """``count`` of ``rows``, drawn by ``seed`` from the labels in turn, so that none is missing while there is room.

    Raises:
        ValueError: fewer rows than that, or a count below 1.
    """
    if not 1 <= count <= len(rows):
        raise ValueError(f"shots must be between 1 and the {len(rows)} training rows, got {count}")
    draw = random.Random(seed)
    by_label: dict[str, list[Example]] = {}
    for row in draw.sample(list(rows), len(rows)):
        by_label.setdefault(row["label"], []).append(row)
    queues = [by_label[label] for label in sorted(by_label)]
    taken: list[Example] = []
    while len(taken) < count:
        taken += [queue.pop() for queue in queues if queue]
    return taken[:count]
