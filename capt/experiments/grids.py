"""The paper's experiments as data: what rows a table has, on which tasks, and which learning rates are searched.

The published protocol: fp32, up to 50 epochs, early stopping on validation, batches of 16 to 32, Adafactor at a fixed
scale with a linear schedule, and CaPT's learning rates below. Where the published text was not at hand (how long early
stopping waits, lengths, noise levels, the learning rates of the other methods) the values are this project's own, and
so is the order of tables S2 (noise) and S3 (few-shot).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SUPERGLUE_TASKS = ("boolq", "cb", "copa", "multirc", "rte", "wic")


@dataclass(frozen=True)
class Row:
    """A line of a table: a method in one setting.

    Args:
        label: what the table calls it. method: a name in :data:`.methods.METHODS`.
        candidates: the method's options to choose from on validation, together with the learning rate.
        shots: train on so many rows, or on all (None). noise: special characters put into the training texts, as a
            share of them.
    """

    label: str
    method: str
    candidates: tuple[Mapping[str, Any], ...] = ({},)
    shots: int | None = None
    noise: float = 0.0


@dataclass(frozen=True)
class Grid:
    """A table or figure of the paper."""

    title: str
    rows: tuple[Row, ...]
    tasks: tuple[str, ...] = SUPERGLUE_TASKS


@dataclass(frozen=True)
class Plan:
    """A grid on one model, ready to run.

    Args:
        name: of its results. title: of its table. table: of the paper, to find published numbers by; or None.
        model: as :class:`capt.training.TrainConfig` takes it. answer: a kind of :mod:`.answers`, None for the paper's.
        rates: learning rates by method. settings: other fields of TrainConfig.
        seeds: the first one chooses learning rate and candidate on validation, the others run with them.
    """

    name: str
    title: str
    model: str
    tasks: tuple[str, ...]
    rows: tuple[Row, ...]
    rates: Mapping[str, Sequence[float]]
    answer: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 3
    table: str | None = None


#: CaPT's published learning rates, by the base's model_type.
CAPT_RATES = {"t5": (5.0, 1.0, 0.1), "llama": (7e-4, 5e-5, 1e-5), "qwen2": (1e-1, 5e-3, 5e-4, 1e-5)}
#: Methods that want other ones; as many as CaPT has are taken, from the front.
OWN_RATES = {"bare": (1e-2, 1e-3, 1e-4, 3e-3), "lora": (1e-3, 3e-4, 1e-4, 3e-3)}

#: The published recipe, as fields of TrainConfig.
PROTOCOL = {
    "optimizer": "adafactor",
    "epochs": 50.0,
    "patience": 5,
    "batch_size": 16,
    "warmup_steps": 0,
    "max_length": 512,
}

COMPARED = (
    Row("base alone", "bare"),
    Row("LoRA", "lora"),
    Row("P-Tuning v2", "p-tuning-v2"),
    Row("Deep PT-1", "deep-pt"),
    Row("CaPT", "capt"),
    Row("CaPT, lead=1, first_mean=False", "capt-lead"),
)


def _both(setting: str, levels: Sequence[Any], words: str) -> tuple[Row, ...]:
    """Deep PT-1 and CaPT at each of ``levels`` of a field of :class:`Row`, which ``words`` tell in the label."""
    rows = (Row("Deep PT-1", "deep-pt"), Row("CaPT", "capt"))
    return tuple(
        dataclasses.replace(row, label=f"{row.label}, {words.format(level)}", **{setting: level})
        for level in levels
        for row in rows
    )


TABLES: dict[str, Grid] = {
    "1": Grid("methods on SuperGLUE", COMPARED),
    "2": Grid(
        "time to the best setting, search included",
        (
            Row("P-Tuning v2, length searched", "p-tuning-v2", tuple({"length": n} for n in (1, 5, 10, 20, 50, 100))),
            Row("CaPT", "capt"),
        ),
    ),
    "3": Grid(
        "how the capsule is formed",
        tuple(
            Row(f"CaPT, {variant}", "capt", ({"variant": variant},))
            for variant in ("addition", "prepending", "extraction", "projection")
        ),
    ),
    "S2": Grid("noisy training texts", _both("noise", (0.0, 0.05, 0.1, 0.2), "{:.0%} noise")),
    "S3": Grid("few training rows", _both("shots", (4, 8, 16, 32), "{} rows")),
    "S4": Grid(
        "instance and task information alone",
        (
            Row("instance only", "instance-only"),
            Row("task only (Deep PT-1)", "deep-pt"),
            Row("CaPT", "capt"),
        ),
    ),
    "S5": Grid("CommonsenseQA", COMPARED, ("csqa",)),
}

FIGURES: dict[str, Grid] = {
    "6": Grid(
        "length and depth of the capsule",
        (
            *(Row(f"CaPT, length {n}", "capt", ({"length": n},)) for n in (1, 2, 3, 4, 5)),
            *(
                Row(f"CaPT, depth {depth}", "capt", ({"depth": depth},))
                for depth in ("input", "first_half", "latter_half", "odd", "all")
            ),
        ),
    ),
}


def rates_for(model_type: str, given: Sequence[float] | None, methods: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Learning rates of each of ``methods`` on a base of ``model_type``; ``given`` ones hold for them all.

    Raises:
        ValueError: none given, for a base whose learning rates were not published.
    """
    if given:
        return {method: tuple(given) for method in methods}
    if model_type not in CAPT_RATES:
        raise ValueError(
            f"no learning rates were published for a base of model_type {model_type!r}: name some with "
            f"--learning-rates; published for {', '.join(CAPT_RATES)}"
        )
    capt = CAPT_RATES[model_type]
    return {method: OWN_RATES.get(method, capt)[: len(capt)] for method in methods}
