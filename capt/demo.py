"""``capt demo``: a capsule trained on a real model and real text, beside what it has to be measured against.

SmolLM2-135M tells positive from negative film reviews by the logits of " positive" and " negative" after "Sentiment:",
so nothing trains but one vector a layer. Every row of the table is measured when it is printed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase

from .config import CaptConfig
from .memory import bytes_kept
from .model import CaptModel, get_capt_model
from .staging import write_json
from .tasks import encode
from .training import TrainConfig
from .training.loading import load_base, word_ids
from .training.metrics import Scoring
from .training.report import versions
from .training.run import Rows, evaluate_rows
from .training.trainer import CaptTrainer


class Method(NamedTuple):
    """A capsule (None: the base as it is), and its learning rate. The README lists the runs behind each rate."""

    capsule: CaptConfig | None = None
    learning_rate: float | None = None


METHODS = {
    "bare model": Method(),
    "Deep PT-1 (no mean)": Method(CaptConfig(instance=False), 1e-3),
    "mean alone": Method(CaptConfig(task=False)),
    "CaPT, paper": Method(CaptConfig(), 1e-2),
    "CaPT, lead=1, first_mean=False": Method(CaptConfig(lead=1, first_mean=False), 1e-2),
}

_SETTINGS = {
    "warmup_steps": 10,
    "max_steps": 60,
    "batch_size": 16,
    "train_rows": 960,
    "test_rows": 300,
    "max_length": 128,
}
_QUICK = {"max_steps": 2, "train_rows": 8, "test_rows": 8, "batch_size": 4}


@dataclass
class Demo:
    """The demo, its model and texts loaded and encoded."""

    config: TrainConfig
    quick: bool
    base: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    words: list[int]
    train_rows: Rows
    test_rows: Rows

    @classmethod
    def load(cls, seed: int = 0, quick: bool = False, **changes: Any) -> Demo:
        """Fetches what the cache lacks.

        Args:
            quick: a few steps on a few rows.
            changes: fields of :class:`TrainConfig` in place of the demo's own.

        Raises:
            ValueError, OSError, ImportError: the defaults cannot be fetched or do not fit.
        """
        config = TrainConfig.from_dict({**_SETTINGS, **(_QUICK if quick else {}), "seed": seed, **changes})
        task = config.load_task()
        base, tokenizer = load_base(config.model, len(task.prompt.labels))
        words = word_ids(task.prompt, config.classifier, base, tokenizer)
        if words is None:
            raise ValueError(f"the demo classifies by label words, got classifier {config.classifier!r}")
        train_rows, test_rows = (
            encode(task.splits[split][:limit], task.prompt, tokenizer, config.max_length - 1, f"{task.name} {split}")
            for split, limit in (("train", config.train_rows), ("test", config.test_rows))
        )
        return cls(config, quick, base, tokenizer, words, train_rows, test_rows)

    def run(self, folder: Path) -> str:
        """Measures every row, writes ``results.json`` into ``folder``, and returns the table."""
        started = time.perf_counter()
        rows = []
        for name, method in METHODS.items():
            print(f"capt: {name}", file=sys.stderr)
            rows.append({"method": name, "learning_rate": method.learning_rate, **self._measure(*method)})
        config, settings = self.config, ("warmup_steps", "max_steps", "batch_size", "max_grad_norm")
        write_json(
            folder / "results.json",
            {
                "model": config.model,
                "task": config.task,
                "rows": {"train": len(self.train_rows), "test": len(self.test_rows)},
                "settings": {name: getattr(config, name) for name in settings},
                "seed": config.seed,
                "quick": self.quick,
                "seconds": round(time.perf_counter() - started, 1),
                "versions": versions(),
                "methods": rows,
            },
        )
        title = (
            f"{config.model} on {config.task}: {config.max_steps} steps of {config.batch_size} rows, "
            f"tested on {len(self.test_rows)}"
        )
        return f"{title}\n{_table(rows)}"

    def _measure(self, capsule: CaptConfig | None, learning_rate: float | None) -> dict[str, Any]:
        # A zero vector is no no-op, since a slot is attended to: the bare model is the base with no slot at all.
        config = dataclasses.replace(capsule or CaptConfig(), task_type="SEQ_CLS", label_words=self.words)
        model = get_capt_model(self.base, config)
        if torch.cuda.is_available():
            model.to("cuda")
        with model.disable_adapter() if capsule is None else contextlib.nullcontext():
            before = self._accuracy(model)
        trainable = 0 if capsule is None else model.get_nb_trainable_parameters()[0]
        row = {"trainable": trainable, "accuracy_before": before}
        if not trainable or learning_rate is None:
            return row | dict.fromkeys(("accuracy_after", "seconds", "kept_bytes"))
        padded = DataCollatorWithPadding(self.tokenizer)(self.train_rows[: self.config.batch_size])
        batch = {name: tensor.to(model.device) for name, tensor in padded.items()}
        kept = bytes_kept(model.train(), lambda: model(**batch).loss)
        seconds = self._fit(model, learning_rate)
        return row | {"accuracy_after": self._accuracy(model), "seconds": seconds, "kept_bytes": kept}

    def _accuracy(self, model: CaptModel) -> float:
        return evaluate_rows(model, self.tokenizer, self.test_rows, self.config.batch_size, Scoring())["accuracy"]

    def _fit(self, model: CaptModel, learning_rate: float) -> float:
        config = dataclasses.replace(self.config, learning_rate=learning_rate)
        with tempfile.TemporaryDirectory() as folder:
            trainer = CaptTrainer(model, self.tokenizer, config, Path(folder), self.train_rows)
            started = time.perf_counter()
            trainer.train()
            return round(time.perf_counter() - started, 1)


def _table(rows: Sequence[dict[str, Any]]) -> str:
    columns = {
        "method": lambda row: row["method"],
        "trained": lambda row: f"{row['trainable']:,}",
        "lr": lambda row: "-" if row["learning_rate"] is None else f"{row['learning_rate']:g}",
        "accuracy before": lambda row: f"{row['accuracy_before']:.3f}",
        "after": lambda row: "-" if row["accuracy_after"] is None else f"{row['accuracy_after']:.3f}",
        "seconds": lambda row: "-" if row["seconds"] is None else f"{row['seconds']:.1f}",
        "MB kept for backward": lambda row: "-" if row["kept_bytes"] is None else f"{row['kept_bytes'] / 1e6:.0f}",
    }
    cells = [list(columns), *([show(row) for show in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        first, *others = (
            text.ljust(w) if i == 0 else text.rjust(w) for i, (text, w) in enumerate(zip(line, widths, strict=True))
        )
        lines.append("  ".join([first, *others]))
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
