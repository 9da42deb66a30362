"""A cell: one method on one task with one learning rate and one seed, from its description to its numbers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from ..tasks import SPLITS, Example, Task, encode, few, groups_of, score, with_noise
from ..training import TrainConfig
from ..training.config import TASK_OPTIONS
from ..training.inference import class_logits
from ..training.loading import load_base, prompt_for
from ..training.report import versions
from ..training.run import Rows
from .answers import TextToText, answer_of
from .fit import Fit, Mark, fit
from .methods import METHODS

#: Fields of TrainConfig that say where data lie and where results go.
PLACES = ("data_dir", "output_dir")
#: Fields of TrainConfig that a cell's method, options and answer stand for.
METHOD_FIELDS = (
    *("classifier", "variant", "length", "depth", "instance", "task_vectors", "lead", "first_mean", "positions"),
    *("expose_slot", "rank", "kernel_size", "backend"),
)


@dataclass(frozen=True)
class Cell:
    """What decides a cell's numbers.

    Args:
        method: a name in :data:`.methods.METHODS`, with its ``options``.
        config: model, task, recipe, learning rate and seed.
        answer: a kind of :mod:`.answers`; None: the paper's.
        shots, noise: as in :class:`.grids.Row`.
    """

    method: str
    config: TrainConfig
    options: Mapping[str, Any] = field(default_factory=dict)
    answer: str | None = None
    shots: int | None = None
    noise: float = 0.0

    def describe(self) -> dict[str, Any]:
        """All of it, as JSON holds it, without ``data_dir`` and ``output_dir``."""
        fields = self.config.to_dict()
        told = {name: fields[name] for name in fields if name not in (*PLACES, *METHOD_FIELDS)}
        own = {"method": self.method, "options": dict(self.options), "answer": self.answer}
        return json.loads(json.dumps({**own, "shots": self.shots, "noise": self.noise, "config": told}))

    @property
    def file(self) -> str:
        """A name for its results: readable, and different for each description."""
        digest = hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).hexdigest()[:10]
        options = [f"{name}={value}" for name, value in self.options.items()]
        marks = [f"shots={self.shots}"] * (self.shots is not None) + [f"noise={self.noise:g}"] * (self.noise > 0)
        rate, seed = f"lr={self.config.learning_rate:g}", f"seed={self.config.seed}"
        parts = [self.config.task, self.method, *options, *marks, rate, seed, digest]
        return re.sub(r"[^\w=.+-]", "_", "--".join(parts)) + ".json"


class Bench:
    """What cells share, loaded once: the last base, the tasks, their encoded rows."""

    def __init__(self) -> None:
        self._base: tuple[tuple[str, bool], tuple[PreTrainedModel, PreTrainedTokenizerBase]] | None = None
        self._tasks: dict[tuple[Any, ...], Task] = {}
        self._rows: dict[tuple[Any, ...], Rows] = {}

    def base(self, config: TrainConfig, classes: int) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The base of ``config`` and its tokenizer. Raises as :func:`capt.training.loading.load_base`."""
        key = (config.model, config.bf16)
        if self._base is None or self._base[0] != key:
            self._base, self._rows = (key, load_base(config.model, classes, config.bf16)), {}
        base, tokenizer = self._base[1]
        base.config.num_labels = classes  # a new head is made for so many
        return base, tokenizer

    def task(self, config: TrainConfig) -> Task:
        """The task of ``config``. Raises as :func:`capt.tasks.load_task`."""
        key = _task_key(config)
        if key not in self._tasks:
            self._tasks[key] = config.load_task()
        return self._tasks[key]

    def examples(self, cell: Cell, split: str) -> list[Example]:
        """The rows of a split that the cell takes."""
        config = cell.config
        limit = {"train": config.train_rows, "validation": config.validation_rows, "test": config.test_rows}[split]
        task = self.task(config)
        rows = list(task.splits[split][:limit])
        if split == "train" and cell.shots is not None:
            rows = few(rows, cell.shots, config.seed)
        return with_noise(rows, task.prompt, cell.noise, config.seed) if split == "train" and cell.noise else rows

    def rows(self, cell: Cell, split: str, room: int, tokenizer: PreTrainedTokenizerBase) -> Rows:
        """Those rows encoded, with ``room`` ids at most. Raises as :func:`capt.tasks.encode`."""
        config = cell.config
        drawn = split == "train" and (cell.shots is not None or cell.noise > 0)
        drawing = (cell.shots, cell.noise, config.seed) if drawn else None
        limits = (config.train_rows, config.validation_rows, config.test_rows)
        key = (_task_key(config), split, limits, room, cell.answer, drawing)
        if key not in self._rows:
            prompt = prompt_for(self.task(config).prompt, str(cell.answer), self.base(config, 2)[0])
            self._rows[key] = encode(self.examples(cell, split), prompt, tokenizer, room, f"{config.task} {split}")
        return self._rows[key]


def _task_key(config: TrainConfig) -> tuple[Any, ...]:
    return tuple(str(getattr(config, name)) for name in ("task", *TASK_OPTIONS))


def build(cell: Cell, bench: Bench) -> nn.Module:
    """The cell's module, before any training, on the GPU where there is one.

    Raises:
        ValueError, NotImplementedError, ImportError, OSError: the cell does not fit; names the thing.
    """
    if cell.method not in METHODS:
        raise ValueError(f"unknown method {cell.method!r}; there are {', '.join(METHODS)}")
    task = bench.task(cell.config)
    base, tokenizer = bench.base(cell.config, len(task.prompt.labels))
    set_seed(cell.config.seed)  # a head starts from it
    module = METHODS[cell.method](base, answer_of(cell.answer, task.prompt, base, tokenizer), **cell.options)
    return module.to("cuda" if torch.cuda.is_available() else base.device)


def run_cell(cell: Cell, bench: Bench) -> dict[str, Any]:
    """Trains and measures a cell.

    Returns:
        ``cell``; ``metrics`` of validation and test at the best step on validation, with "score" and "loss" (None where
        the logits were never finite); ``base``, its model_type, layers and width; ``majority``, the test metrics of
        always answering the commonest training label; ``rows``; ``parameters``; ``seconds`` and ``cpu_seconds``
        of training with its validation; ``steps``; ``history``; ``versions``; ``device``.
    """
    config, task = cell.config, bench.task(cell.config)
    module: Any = build(cell, bench)
    try:
        base, tokenizer = bench.base(config, len(task.prompt.labels))
        room = config.max_length - slots_of(module)
        rows = {split: bench.rows(cell, split, room, tokenizer) for split in SPLITS}
        device = next(module.parameters()).device

        def measure(split: str) -> Mark:
            module.eval()
            logits = class_logits(module, tokenizer, rows[split], config.batch_size, device)
            if not logits.isfinite().all():
                return None
            told = _score(task, bench.examples(cell, split), logits.argmax(-1).tolist())
            if isinstance(module, TextToText):
                return {**told, "loss": module.mean_loss(rows[split], tokenizer, config.batch_size)}
            labels = torch.tensor([row["labels"] for row in rows[split]])
            return {**told, "loss": cross_entropy(logits, labels).item()}

        trainable = sum(p.numel() for p in module.parameters() if p.requires_grad)
        if trainable:
            done = fit(module, tokenizer, config, rows["train"], lambda: measure("validation"))
        else:
            done = Fit(0, 0.0, 0.0, [], measure("validation"))
        return {
            "cell": cell.describe(),
            "metrics": {"validation": done.best, "test": None if done.best is None else measure("test")},
            "base": [base.config.model_type, base.config.num_hidden_layers, base.config.hidden_size],
            "majority": _majority(task, bench, cell),
            "rows": {split: len(rows[split]) for split in SPLITS},
            "parameters": {"trainable": trainable, "all": sum(p.numel() for p in module.parameters())},
            "seconds": done.seconds,
            "cpu_seconds": done.cpu_seconds,
            "steps": done.steps,
            "history": done.history,
            "versions": versions(),
            "device": str(device),
        }
    finally:
        module.unload()


def slots_of(module: nn.Module) -> int:
    """Positions that a method takes from the longest sequence of its base."""
    model: Any = getattr(module, "model", module)
    config = getattr(model, "capt_config", model)
    return getattr(config, "slots", 0)


def _score(task: Task, examples: list[Example], predicted: list[int]) -> dict[str, float]:
    labels = [task.prompt.labels.index(row["label"]) for row in examples]
    return score(task.metric, predicted, labels, len(task.prompt.labels), groups_of(examples))


def _majority(task: Task, bench: Bench, cell: Cell) -> dict[str, float]:
    whole = dataclasses.replace(cell, shots=None, noise=0.0)
    commonest = Counter(row["label"] for row in bench.examples(whole, "train")).most_common(1)[0][0]
    test = bench.examples(whole, "test")
    return _score(task, test, [task.prompt.labels.index(commonest)] * len(test))
