"""A training run from its config to its folder, and a finished run back from there."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import (
    PreTrainedTokenizerBase,
    set_seed,
)

from ..model import CaptModel, get_capt_model
from ..staging import staged, write_json
from ..tasks import SPLITS, Example, Prompt, encode, groups_of
from .config import TrainConfig
from .inference import class_logits
from .loading import load_base, prompt_for, word_ids
from .metrics import Scoring
from .report import plot_curve, versions
from .trainer import CaptTrainer, last_checkpoint

Rows = list[dict[str, Any]]

CONFIG_FILE = "train_config.json"
PROMPT_FILE = "prompt.json"


def train(config: TrainConfig, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """:func:`prepare`, then :meth:`Training.run`."""
    return prepare(config, resume=resume, overwrite=overwrite).run()


def prepare(config: TrainConfig, *, resume: bool = False, overwrite: bool = False) -> Training:
    """Loads and checks all that a run needs, before anything is written or trained.

    Args:
        resume: go on from the newest checkpoint of this very config; the result is an uninterrupted run's, bit for bit
            on a CPU.
        overwrite: clear away a run that is there already.

    Raises:
        ValueError, OSError, NotImplementedError, ImportError: for input that does not fit; the message names the thing.
    """
    folder = Path(config.output_dir)
    checkpoint = _checkpoint_to_resume(config, folder) if resume else None
    if not resume and not overwrite and (earlier := _earlier_run(folder)):
        found = ", ".join(path.name for path in earlier)
        raise ValueError(
            f"output_dir {folder} holds a run already ({found}): resume it (--resume), overwrite it (--overwrite), "
            "or name another folder"
        )
    task = config.load_task()
    if config.classifier == "label-words" and task.prompt.template.strip() == f"{{{task.prompt.fields[0]}}}":
        warnings.warn(
            f"label words are read behind the template {task.prompt.template!r}, which asks nothing: name one that "
            "ends where the answer follows, such as --template 'Review: {text} Sentiment:'",
            stacklevel=2,
        )
    base, tokenizer = load_base(config.model, len(task.prompt.labels), config.bf16)
    prompt = prompt_for(task.prompt, config.classifier, base)
    capsule = config.capsule(word_ids(prompt, config.classifier, base, tokenizer))
    limits = {"train": config.train_rows, "validation": config.validation_rows, "test": config.test_rows}
    room = config.max_length - capsule.slots
    examples = {split: task.splits[split][: limits[split]] for split in SPLITS}
    rows = {split: encode(examples[split], prompt, tokenizer, room, f"{task.name} {split}") for split in SPLITS}
    set_seed(config.seed)  # a linear head starts from it
    model = get_capt_model(base, capsule)
    model.backend = config.backend
    if not model.get_nb_trainable_parameters()[0]:
        raise ValueError("nothing trains: task_vectors is false and there is no linear head")
    scoring = {split: Scoring(task.metric, groups_of(examples[split])) for split in SPLITS}
    return Training(config, prompt, tokenizer, model, rows, scoring, checkpoint)


@dataclass
class Training:
    """A run about to start: see :func:`prepare`."""

    config: TrainConfig
    prompt: Prompt
    tokenizer: PreTrainedTokenizerBase
    model: CaptModel
    rows: dict[str, Rows]
    scoring: dict[str, Scoring]
    checkpoint: Path | None

    def run(self) -> dict[str, Any]:
        """Trains, evaluates on validation and test, and writes ``config.output_dir``.

        The folder holds ``train_config.json``, ``prompt.json``, ``adapter/`` (the best on validation),
        ``results.json``, ``curve.png`` and the checkpoints. Of several processes, as ``accelerate launch`` starts them,
        the first one writes.

        Returns:
            What ``results.json`` holds.
        """
        config, model, folder = self.config, self.model, Path(self.config.output_dir)
        rows, scoring = self.rows, self.scoring
        trainer = CaptTrainer(
            model, self.tokenizer, config, folder, rows["train"], rows["validation"], scoring["validation"]
        )
        writes = trainer.is_world_process_zero()
        trainer.accelerator.wait_for_everyone()  # each has looked whether the folder holds a run
        if writes and self.checkpoint is None:
            _begin(folder, config, self.prompt)
        started = time.perf_counter()
        trainer.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)
        seconds = time.perf_counter() - started

        trainable, total = model.get_nb_trainable_parameters()
        metrics = {
            split: evaluate_rows(model, self.tokenizer, rows[split], config.batch_size, scoring[split])
            for split in ("validation", "test")
        }
        results = {
            "config": config.to_dict(),
            "versions": versions(),
            "device": str(model.device),
            "labels": list(self.prompt.labels),
            "rows": {split: len(rows[split]) for split in SPLITS},
            "parameters": {"trainable": trainable, "all": total},
            "seconds": round(seconds, 2),
            "resumed_from": self.checkpoint.name if self.checkpoint else None,
            "steps": trainer.state.global_step,
            "best_step": trainer.state.best_global_step,
            "metrics": metrics,
            "history": trainer.state.log_history,
        }
        # All processes call, since where FSDP shards the vectors each has a part of them.
        with staged(folder / "adapter") if writes else contextlib.nullcontext(folder) as target:
            model.save_pretrained(target, is_main_process=writes)
        if writes:
            plot_curve(folder / "curve.png", trainer.state.log_history)
            write_json(folder / "results.json", results)  # last: its presence says that the run is whole
        trainer.accelerator.wait_for_everyone()
        return results


def _earlier_run(folder: Path) -> list[Path]:
    """Everything in ``folder`` that a run writes."""
    # The config first: without it there is nothing to resume from what is left when clearing it away is interrupted.
    names = (CONFIG_FILE, PROMPT_FILE, "results.json", "curve.png", "adapter", "checkpoint-*")
    return [path for name in names for path in sorted(folder.glob(name))]


def _begin(folder: Path, config: TrainConfig, prompt: Prompt) -> None:
    """Writes what a resumption and a later prediction need, and clears away an earlier run, but nothing else."""
    for path in _earlier_run(folder):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    write_json(folder / PROMPT_FILE, dataclasses.asdict(prompt))
    write_json(folder / CONFIG_FILE, config.to_dict())


def _checkpoint_to_resume(config: TrainConfig, folder: Path) -> Path:
    earlier = _read_json(folder / CONFIG_FILE, "output_dir holds no run to resume")
    for name, value in config.to_dict().items():
        if name != "output_dir" and earlier.get(name) != value:
            raise ValueError(f"{name} was {earlier.get(name)!r} in the run to resume, got {value!r}")
    checkpoint = last_checkpoint(folder)
    if checkpoint is None:
        raise ValueError(f"output_dir {folder} holds no checkpoint to resume from")
    return checkpoint


def _read_json(path: Path, missing: str) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{missing}: there is no {path}")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(fields).__name__}")
    return fields


def evaluate_rows(
    model: CaptModel, tokenizer: PreTrainedTokenizerBase, rows: Rows, batch_size: int, scoring: Scoring
) -> dict[str, float]:
    """``loss``, what ``scoring`` tells, the commonest label's share (``majority``) and the number of ``rows``."""
    model.eval()
    logits = class_logits(model, tokenizer, rows, batch_size, model.device)
    labels = torch.tensor([row["labels"] for row in rows])
    return {
        "loss": cross_entropy(logits, labels).item(),
        **scoring(logits, labels),
        "majority": labels.bincount().max().item() / len(labels),
        "rows": len(labels),
    }


@dataclass
class Run:
    """A finished run: its config, prompt, tokenizer and model with the trained adapter."""

    config: TrainConfig
    prompt: Prompt
    tokenizer: PreTrainedTokenizerBase
    model: CaptModel

    @classmethod
    def load(cls, folder: Path, batch_size: int | None = None) -> Run:
        """The run in ``folder``; ``batch_size`` in place of the training's.

        Raises:
            ValueError, OSError: a file that is missing or damaged, or a base that does not fit.
        """
        fields = _read_json(folder / CONFIG_FILE, f"{folder} is no run")
        written = _read_json(folder / PROMPT_FILE, f"{folder} is no run")
        try:
            config = TrainConfig.from_dict(fields | ({} if batch_size is None else {"batch_size": batch_size}))
            prompt = Prompt(**written)
        except TypeError as error:  # a value of another kind, edited by hand
            raise ValueError(f"{folder}: {CONFIG_FILE} or {PROMPT_FILE} does not fit: {error}") from None
        if not (folder / "adapter").is_dir():
            raise FileNotFoundError(f"{folder} holds no adapter: its training did not come to an end")
        base, tokenizer = load_base(config.model, len(prompt.labels), config.bf16)
        model = CaptModel.from_pretrained(base, folder / "adapter")
        model.backend = config.backend
        if torch.cuda.is_available():
            model.to("cuda")
        return cls(config, prompt, tokenizer, model)

    def encode(self, examples: Sequence[Example], source: str) -> Rows:
        """Token ids of ``examples``, as in training. Arguments and errors as :func:`capt.tasks.encode`."""
        room = self.config.max_length - self.model.capt_config.slots
        return encode(examples, self.prompt, self.tokenizer, room, source)

    def evaluate(self, rows: Rows, scoring: Scoring | None = None) -> dict[str, float]:
        """:func:`evaluate_rows` of labelled rows; by accuracy unless told otherwise."""
        return evaluate_rows(self.model, self.tokenizer, rows, self.config.batch_size, scoring or Scoring())

    def predict(self, rows: Rows) -> list[dict[str, float]]:
        """The probability of every label, for each row."""
        self.model.eval()
        logits = class_logits(self.model, self.tokenizer, rows, self.config.batch_size, self.model.device)
        return [dict(zip(self.prompt.labels, row, strict=True)) for row in logits.softmax(-1).tolist()]
