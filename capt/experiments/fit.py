"""Training of any method's module by one loop: transformers' Trainer, the best step on validation kept in memory."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, TrainerCallback

from ..training import TrainConfig
from ..training.run import Rows
from ..training.trainer import CaptTrainer
from .answers import TextToText

#: Numbers on validation, "score" (higher is better) and "loss" among them; None: the logits are not finite.
Mark = dict[str, float] | None


def better(found: dict[str, float], than: dict[str, float] | None) -> bool:
    """Whether a mark has the higher score, or the lower loss with an equal one."""
    return than is None or (found["score"], -found["loss"]) > (than["score"], -than["loss"])


class Fit(NamedTuple):
    """What a training was.

    Args:
        steps: taken. seconds, cpu_seconds: with validation; of the clock, and of this process on all cores, which a
            machine that others use or that was suspended does not stretch. history: marks and their "step".
        best: the mark of the step kept; None where none was finite.
    """

    steps: int
    seconds: float
    cpu_seconds: float
    history: list[dict[str, float]]
    best: dict[str, float] | None


class _KeepBest(TrainerCallback):
    """Marks the model on validation each epoch, or each ``every`` steps; keeps the best, stops after ``patience``."""

    def __init__(self, module: nn.Module, mark: Callable[[], Mark], every: int | None, patience: int | None):
        self.module, self.mark, self.every, self.patience = module, mark, every, patience
        self.best: dict[str, float] | None = None
        self.kept: dict[str, Tensor] = {}
        self.history: list[dict[str, float]] = []
        self.waited = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.every and (state.global_step % self.every == 0 or state.global_step == state.max_steps):
            self._look(state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.every:
            self._look(state, control)

    def _look(self, state: Any, control: Any) -> None:
        found = self.mark()
        self.module.train()
        if found is None:  # what is no longer finite will not come back
            control.should_training_stop = True
            return
        self.history.append({"step": state.global_step, **found})
        if better(found, self.best):
            self.best, self.waited = self.history[-1], 0
            self.kept = {name: p.detach().clone() for name, p in self.module.named_parameters() if p.requires_grad}
        else:
            self.waited += 1
            if self.patience and self.waited >= self.patience:
                control.should_training_stop = True


def fit(
    module: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    config: TrainConfig,
    train_rows: Rows,
    mark: Callable[[], Mark],
) -> Fit:
    """Trains what trains in ``module`` by ``config``, and leaves it at its best step on validation.

    Args:
        module: as :mod:`.methods` says. It returns logits for the rows' labels, or, for texts, its own loss.
        mark: measures the model, as it is, on validation.
    """
    keep = _KeepBest(module, mark, config.eval_steps, config.patience)
    with tempfile.TemporaryDirectory() as folder:
        trainer = CaptTrainer(module, tokenizer, config, Path(folder), train_rows)  # type: ignore[arg-type]
        if isinstance(module, TextToText):
            trainer.compute_loss_func = None  # the loss is the module's own, over the tokens of the labels' names
        trainer.add_callback(keep)
        started, used = time.perf_counter(), time.process_time()
        trainer.train()
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - used
    with torch.no_grad():
        for name, kept in keep.kept.items():
            module.get_parameter(name).copy_(kept)
    return Fit(trainer.state.global_step, round(seconds, 2), round(cpu_seconds, 2), keep.history, keep.best)
