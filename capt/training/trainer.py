"""transformers' Trainer, told how to order rows, what the loss is, and to name a checkpoint only when it is whole.

The loop, the optimizers, the schedule, accumulation, early stopping and devices are the Trainer's own.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import Sampler
from transformers import (
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import get_length_grouped_indices
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from ..model import CaptModel
from .config import TrainConfig
from .metrics import Scoring

#: Where a run's checkpoints are written, before each moves to its place.
UNFINISHED = ".unfinished"


class SaveAdapter(TrainerCallback):
    """Puts the active adapter's two files into each of a Trainer's checkpoints, so that each is an adapter's folder.

    For transformers' own Trainer on a :class:`CaptModel`, which without it writes the same tensors to
    ``model.safetensors`` alone: enough for its own resumption and ``load_best_model_at_end``.
    """

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        kwargs["model"].save_pretrained(folder, is_main_process=state.is_world_process_zero)


class _WholeCheckpoints(SaveAdapter):
    """Whatever is called ``checkpoint-N`` in ``folder`` is whole: the newest one, and the best where that is another.

    The Trainer writes into ``args.output_dir``, a hidden folder in ``folder``. What is finished moves out of it, what
    is to be deleted moves back into it, and what an interruption leaves there is cleared away.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._find_best(state)
        if state.is_world_process_zero:
            shutil.rmtree(args.output_dir, ignore_errors=True)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_save(args, state, control, **kwargs)
        self._find_best(state)
        PartialState().wait_for_everyone()  # each process writes its generator's state
        if state.is_world_process_zero:
            made = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            state.save_to_json(made / TRAINER_STATE_NAME)  # again, since the Trainer took the best to be here
            os.replace(made, self.folder / made.name)
            for path in self.folder.glob(f"{PREFIX_CHECKPOINT_DIR}-[0-9]*"):
                if path.name != made.name and str(path) != state.best_model_checkpoint:
                    os.replace(path, Path(args.output_dir, path.name))
            shutil.rmtree(args.output_dir, ignore_errors=True)
        PartialState().wait_for_everyone()  # the best may be loaded next

    def _find_best(self, state: Any) -> None:
        if state.best_global_step is not None:
            state.best_model_checkpoint = str(self.folder / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")


class LengthGroupedBatches(Sampler[int]):
    """Rows in batches of like length, the batches in random order; a function of the seed and the epoch alone.

    So a resumed epoch sees the same rows, and padding is rare. The rows that fill no batch come last.
    """

    def __init__(self, lengths: list[int], batch_size: int, seed: int):
        self.lengths, self.batch_size, self.seed = lengths, batch_size, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by accelerate's data loader."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        rows = get_length_grouped_indices(self.lengths, self.batch_size, generator=generator)
        full = len(rows) // self.batch_size
        for batch in torch.randperm(full, generator=generator).tolist():
            yield from rows[batch * self.batch_size : (batch + 1) * self.batch_size]
        yield from rows[full * self.batch_size :]


class _Progress(ProgressCallback):
    """A bar that carries the last loss, instead of a printed line a step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if self.training_bar is not None:
            shown = {name: f"{value:.3f}" for name, value in (logs or {}).items() if name in ("loss", "eval_score")}
            self.training_bar.set_postfix(shown)


class _Lines(TrainerCallback):
    """A line an evaluation, for a log file."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            metrics = kwargs["metrics"]
            shown = f"loss {metrics['eval_loss']:.4f}, score {metrics['eval_score']:.4f}"
            print(f"capt: step {state.global_step} of {state.max_steps}: validation {shown}", file=sys.stderr)


class CaptTrainer(Trainer):
    """Trains a classifying :class:`CaptModel` on rows of ``input_ids`` and ``labels``.

    A checkpoint holds the adapter and the optimizer's state, not the base.

    Args:
        model: the model, adapter active and trainable.
        tokenizer: pads a batch.
        config: the run.
        folder: where checkpoints go, each in one move.
        train_rows, validation_rows: as :func:`capt.tasks.encode` gives them; no validation rows, no evaluation and no
            checkpoints.
        scoring: of the validation rows; the checkpoint with the best score is kept, of equals the one of lowest loss.
    """

    def __init__(
        self,
        model: CaptModel,
        tokenizer: PreTrainedTokenizerBase,
        config: TrainConfig,
        folder: Path,
        train_rows: list[dict[str, Any]],
        validation_rows: list[dict[str, Any]] | None = None,
        scoring: Scoring | None = None,
    ):
        folder = folder.resolve()
        evaluates = validation_rows is not None
        # Sorted, so that like lengths share a batch.
        validation = validation_rows or []
        order = sorted(range(len(validation)), key=lambda i: len(validation[i]["input_ids"]))
        scored = (scoring or Scoring()).of(order)
        when = "no" if not evaluates else "epoch" if config.eval_steps is None else "steps"
        arguments = TrainingArguments(
            output_dir=str(folder / UNFINISHED),
            optim={"adamw": "adamw_torch", "adafactor": "adafactor"}[config.optimizer],
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            lr_scheduler_type="linear",
            warmup_steps=config.warmup_steps,
            num_train_epochs=config.epochs,
            max_steps=config.max_steps or -1,
            per_device_train_batch_size=config.batch_size,
            per_device_eval_batch_size=config.batch_size,
            gradient_accumulation_steps=config.gradient_accumulation,
            max_grad_norm=config.max_grad_norm,
            seed=config.seed,
            eval_strategy=when,
            save_strategy=when,
            eval_steps=config.eval_steps,
            save_steps=config.eval_steps or 500,
            load_best_model_at_end=evaluates,
            metric_for_best_model="rank" if evaluates else None,
            greater_is_better=True if evaluates else None,
            restore_callback_states_from_checkpoint=True,
            # Every step is logged: an average over steps would differ after a resumption in its midst.
            logging_steps=1,
            # A loss of NaN is to be seen, not replaced by the average.
            logging_nan_inf_filter=False,
            disable_tqdm=not sys.stderr.isatty(),
            report_to="none",
            remove_unused_columns=False,
            label_names=["labels"],
            dataloader_pin_memory=torch.cuda.is_available(),
            # Every trainable parameter takes part in every forward.
            ddp_find_unused_parameters=False,
            # Unless it is told, several processes without a GPU do not find one another.
            use_cpu=not torch.accelerator.is_available(),
        )
        arguments._n_gpu = 1  # several GPUs in one process would be torch's DataParallel, which cannot run the model
        super().__init__(
            model=model,
            args=arguments,
            data_collator=DataCollatorWithPadding(tokenizer),
            train_dataset=train_rows,
            eval_dataset=[validation[i] for i in order] or None,
            compute_loss_func=_mean_loss,
            compute_metrics=lambda told: _ranked(
                scored, torch.as_tensor(told.predictions), torch.as_tensor(told.label_ids)
            ),
            preprocess_logits_for_metrics=lambda logits, _: logits[0] if isinstance(logits, tuple) else logits,
            callbacks=[
                _WholeCheckpoints(folder),
                *([EarlyStoppingCallback(config.patience)] if evaluates and config.patience else []),
            ],
        )
        # The loss is _mean_loss, over the whole accumulated batch: the model need not be told of it.
        self.model_accepts_loss_kwargs = False
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.add_callback(_Lines if arguments.disable_tqdm else _Progress)

    def train(self, resume_from_checkpoint: str | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """As the Trainer's, but from a checkpoint at which training had ended it takes no further step."""
        if resume_from_checkpoint is not None:
            state = TrainerState.load_from_json(os.path.join(resume_from_checkpoint, TRAINER_STATE_NAME))
            if state.stateful_callbacks[TrainerControl.__name__]["args"]["should_training_stop"]:
                self.args.max_steps, self.args.num_train_epochs = -1, 0
        return super().train(resume_from_checkpoint, **kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        rows: Any = self.train_dataset if train_dataset is None else train_dataset
        # What one optimizer step sees, over all processes.
        batch = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        return LengthGroupedBatches([len(row["input_ids"]) for row in rows], batch, self.args.seed)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in ``folder``."""
    found = get_last_checkpoint(folder) if folder.is_dir() else None
    return Path(found) if found else None


def _mean_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Cross-entropy over the whole accumulated batch, so that 2 x 8 rows give the gradient of 16."""
    logits = outputs["logits"].float()
    count = len(labels) if num_items_in_batch is None else num_items_in_batch
    return cross_entropy(logits, labels, reduction="sum") / count


def _ranked(scoring: Scoring, logits: Tensor, labels: Tensor) -> dict[str, float]:
    """What ``scoring`` tells, and ``rank``: the score, to which a low loss adds less than any row could."""
    found, loss = scoring(logits, labels), cross_entropy(logits.float(), labels).item()
    return found | {"rank": found["score"] + (1e-6 / (1 + loss) if math.isfinite(loss) else 0)}
