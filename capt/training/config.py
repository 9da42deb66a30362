"""TrainConfig: a training run in one dataclass; a YAML or JSON file and command-line flags both fill it."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..config import CaptConfig
from ..tasks import TASKS, Task, load_task

#: Fields of TrainConfig that decide what a task's rows are: the options of :func:`capt.tasks.load_task`.
TASK_OPTIONS = (
    *("data_dir", "train_file", "eval_file", "text_column", "label_column"),
    *("template", "label_words", "split_seed"),
)


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides a run's numbers. ``capt train --help`` shows what the fields mean.

    Raises:
        ValueError: a field out of its range; names the field and the value.
    """

    model: str = _option("smollm2", "'smollm2' or 'minilm' (embedded), a folder, or a name on the model hub")
    task: str = _option("movie-reviews", f"one of {', '.join(TASKS)}")
    output_dir: str = _option("runs/capt", "folder for the adapter, results.json, curve.png and checkpoints")

    data_dir: str | None = _option(None, "SuperGLUE, csqa: folder in the official layout instead of a download")
    train_file: str | None = _option(None, "task 'file': CSV, TSV or JSON Lines")
    eval_file: str | None = _option(None, "task 'file': the test set; without it a tenth of train_file is")
    text_column: str | None = _option(None, "task 'file': column of the text ['text']")
    label_column: str | None = _option(None, "task 'file': column of the label ['label']")
    template: str | None = _option(None, "prompt in place of the task's own, such as 'Review: {text} Sentiment:'")
    label_words: list[str] | None = field(
        default=None, metadata={"help": "words in place of the task's own, in the order of its labels"}
    )
    classifier: Literal["label-words", "linear"] = _option(
        "label-words", "read the label off the language-model head's logits of the label words, or train a linear head"
    )
    max_length: int = _option(512, "longest prompt in tokens, slots included; the task's long field is cut to fit")
    train_rows: int | None = _option(None, "use this many training rows at most")
    validation_rows: int | None = _option(None, "use this many validation rows at most")
    test_rows: int | None = _option(None, "use this many test rows at most")
    split_seed: int = _option(0, "seed of the cut into splits; apart from --seed, so that seeds share their test set")

    variant: str = _option("addition", "'addition', 'prepending', 'extraction' or 'projection'")
    length: int = _option(1, "vectors a layer")
    depth: str = _option("all", "'all', 'input', 'first_half', 'latter_half', 'odd', or layer indices such as '0,4,8'")
    instance: bool = _option(True, "whether the slot takes the mean (false: deep prompt tuning)")
    task_vectors: bool = _option(True, "whether the slot takes a trained vector (false: the mean alone)")
    lead: int = _option(0, "tokens that stay in front of the slot; decoders do better with 1")
    first_mean: bool = _option(True, "whether the first layer adds the mean too; decoders do better with false")
    positions: str = _option("shift", "'shift' or 'keep'")
    expose_slot: bool = _option(True, "whether an encoder-decoder's decoder sees the slot")
    rank: int = _option(8, "of variant 'projection'")
    kernel_size: int = _option(5, "of variant 'extraction'")
    backend: str = _option("auto", "'auto', 'reference' or 'fused'")

    optimizer: Literal["adamw", "adafactor"] = _option(
        "adamw", "Adafactor runs at the fixed scale of the paper's recipe"
    )
    learning_rate: float = _option(3e-3, "after warm-up; decays linearly to 0")
    weight_decay: float = _option(0.0, "of the optimizer")
    warmup_steps: int = _option(10, "steps of linear warm-up")
    epochs: float = _option(3.0, "passes over the training rows")
    max_steps: int | None = _option(None, "optimizer steps in place of epochs")
    batch_size: int = _option(16, "rows a forward pass")
    gradient_accumulation: int = _option(1, "forward passes an optimizer step")
    max_grad_norm: float = _option(1.0, "gradients are scaled down to this norm; 0 leaves them")
    bf16: bool = _option(False, "load the base in bfloat16; the vectors stay fp32")
    seed: int = _option(0, "of the order of the rows and of a linear head's start")
    eval_steps: int | None = _option(None, "evaluate and save each this many steps instead of each epoch")
    patience: int | None = _option(None, "stop after this many evaluations without a better score on validation")

    def __post_init__(self) -> None:
        if isinstance(self.depth, list | tuple):  # as a YAML file may give it
            object.__setattr__(self, "depth", ",".join(map(str, self.depth)))
        if self.template is not None:  # a shell hands a typed \n on as two characters
            object.__setattr__(self, "template", self.template.replace("\\n", "\n"))
        for least, names in (
            (1, "max_length train_rows validation_rows test_rows max_steps batch_size eval_steps patience"),
            (1, "gradient_accumulation"),
            (0, "warmup_steps seed split_seed weight_decay max_grad_norm"),
        ):
            for name in names.split():
                value = getattr(self, name)
                if value is not None and not value >= least:
                    raise ValueError(f"{name} must be at least {least}, got {value}")
        for name in ("learning_rate", "epochs"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be a positive number, got {getattr(self, name)}")
        for name in ("classifier", "optimizer"):
            allowed = {"classifier": ("label-words", "linear"), "optimizer": ("adamw", "adafactor")}[name]
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        self.capsule()  # checks its fields

    def load_task(self) -> Task:
        """The task with its options. Raises as :func:`capt.tasks.load_task`."""
        return load_task(self.task, **{name: getattr(self, name) for name in TASK_OPTIONS})

    def capsule(self, label_words: Sequence[int] | None = None) -> CaptConfig:
        """The adapter's config; ``label_words`` are the words' token ids."""
        try:
            depth = tuple(map(int, self.depth.split(","))) if self.depth[:1].isdigit() else self.depth
        except ValueError:
            raise ValueError(f"depth must be a name or comma-separated layer indices, got {self.depth!r}") from None
        same = "variant length instance lead first_mean positions expose_slot rank kernel_size"
        return CaptConfig(
            **{name: getattr(self, name) for name in same.split()},
            depth=depth,
            task=self.task_vectors,
            task_type="SEQ_CLS",
            label_words=label_words,
            base_model_name_or_path=self.model,
        )

    def to_dict(self) -> dict[str, Any]:
        """Every field, as JSON holds it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TrainConfig:
        """The config of ``fields``; those left out keep their defaults.

        Raises:
            ValueError: a field that does not exist (names it and the nearest that does), or a value out of range.
        """
        _check_names(fields)
        return cls(**fields)


def _check_names(fields: Iterable[str]) -> None:
    known = [known.name for known in dataclasses.fields(TrainConfig)]
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            raise ValueError(f"unknown field {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


def read_config_file(path: Path) -> dict[str, Any]:
    """The fields of a ``.yaml``, ``.yml`` or ``.json`` file, not yet checked.

    Raises:
        ValueError: another kind of file, or one that holds no mapping. FileNotFoundError: no such file.
    """
    if path.suffix.lower() not in (".yaml", ".yml", ".json"):
        raise ValueError(f"{path}: a config file must end in .yaml, .yml or .json")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    text = path.read_text(encoding="utf-8")
    if path.suffix.lower() == ".json":
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from None
    else:
        import yaml

        try:
            fields = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: not YAML: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: a mapping of fields to values is wanted, got {type(fields).__name__}")
    return fields


def as_flags(fields: Mapping[str, Any]) -> list[str]:
    """``fields`` as command-line flags, so that a file's values are parsed and checked as flags are.

    (YAML reads ``1e-3`` as a string; the flag's own type puts that right.)
    """
    _check_names(fields)
    flags = []
    for name, value in fields.items():
        if isinstance(value, Mapping):
            raise ValueError(f"{name} must be a single value or a list, got {value!r}")
        if isinstance(value, list) and any(isinstance(item, bool) for item in value):
            raise ValueError(f"{name} must not hold truth values, which YAML makes of unquoted yes and no, got {value}")
        if isinstance(value, list) and name != "depth":
            flags += [f"--{name}", *map(str, value)]
        elif value is not None:
            joined = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            flags.append(f"--{name}={joined}")
    return flags
