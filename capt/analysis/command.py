"""The command line of ``capt attention``: its flags, and the measurement that they mean."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import saving
from ..adapters import Adapter
from ..capsules import Capsules
from ..runner import Runner
from ..tasks import SPLITS, TASKS, Example, Prompt, load_task, read_examples
from ..tasks.superglue import SUPERGLUE
from ..training.loading import load_base
from .attention import Groups, attention_of, average_attention
from .figures import require_matplotlib
from .report import Measured, write
from .structure import Tokens, tokens_of

BARE = "bare"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``capt attention``."""
    parser.add_argument("--model", required=True, help="a folder, a name on the hub, 'smollm2' or 'minilm'")
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="an adapter, or a run of capt train, to stand beside the bare model; may be repeated (without NAME=, the "
        "folder's own name)",
    )
    parser.add_argument(
        "--data", type=Path, help="CSV, TSV or JSON Lines with a column for each field of the template; or a --data-dir"
    )
    parser.add_argument("--task", choices=TASKS, help="whose template, and without a --data file, whose texts")
    parser.add_argument("--data-dir", type=Path, help="folder of the task's official files instead of a download")
    parser.add_argument("--split", choices=SPLITS, help="of the task [test]")
    parser.add_argument("--template", help="in place of the task's own, such as 'Review: {text} Sentiment:'")
    parser.add_argument("--rows", type=int, help="the first so many rows [all]")
    parser.add_argument("--example", type=int, help="row, from 1, that is drawn token by token [the shortest]")
    parser.add_argument("--batch-size", type=int, default=8, help="rows a forward pass [8]")
    parser.add_argument("--max-length", type=int, default=512, help="longest prompt in tokens, slots included [512]")
    parser.add_argument("--output", type=Path, default=Path("results/attention"), help="folder [results/attention]")


@dataclass
class Measurement:
    """A measurement about to start: see :func:`prepare`."""

    runner: Runner
    adapters: dict[str, Capsules | None]
    texts: list[Tokens]
    example: int
    batch_size: int
    facts: dict[str, Any]
    output: Path

    def run(self) -> str:
        """Measures every model, writes the folder and returns its summary."""
        models = {}
        for name, capsules in self.adapters.items():
            config = None if capsules is None else capsules.config
            groups = Groups(self.texts, *((0, 0) if config is None else (config.slots, config.lead)))
            averages = average_attention(self.runner, capsules, self.texts, groups, self.batch_size)
            example = attention_of(self.runner, capsules, self.texts[self.example])
            models[name] = Measured(None if config is None else config.to_dict(), groups, averages, example)
        return write(self.output, models, self.facts)


def prepare(given: argparse.Namespace) -> Measurement:
    """The measurement of parsed flags, everything loaded and checked.

    Raises:
        ValueError, NotImplementedError, ImportError, OSError: flags, a model, an adapter or data that do not fit.
    """
    require_matplotlib()
    for name in ("rows", "example", "batch_size", "max_length"):
        value = getattr(given, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    folders = _named(given.adapter)
    prompt, examples, source = _examples(given)
    examples = examples[: given.rows]
    if given.example is not None and given.example > len(examples):
        raise ValueError(f"--example must be one of the {len(examples)} rows, got {given.example}")

    base, tokenizer = load_base(given.model, len(prompt.labels))
    if torch.cuda.is_available():
        base.to("cuda")  # type: ignore[arg-type]
    runner = Runner(base.eval())
    if runner.packed is None:
        raise NotImplementedError(f"attention of bases of model_type {base.config.model_type!r} is not looked at")
    adapters: dict[str, Capsules | None] = {BARE: None}
    for name, folder in folders.items():
        adapters[name] = load_capsules(runner, folder)
    # Every model reads the same tokens, so the largest adapter says how many there are.
    most = max(0 if capsules is None else capsules.config.slots for capsules in adapters.values())
    texts = tokens_of(examples, prompt, tokenizer, given.max_length - most, source)
    shortest = min(range(len(texts)), key=lambda i: len(texts[i].ids))
    example = shortest if given.example is None else given.example - 1
    facts = {
        "model": given.model,
        "adapters": {name: str(folder) for name, folder in folders.items()},
        "source": source,
        "rows": len(texts),
        "template": prompt.template,
        "max_length": given.max_length,
        "example": example + 1,
    }
    return Measurement(runner, adapters, texts, example, given.batch_size, facts, given.output)


def load_capsules(runner: Runner, folder: Path) -> Capsules:
    """The capsules of an adapter, whose head attention does not need.

    Raises:
        ValueError: a file that is missing, corrupt, incomplete or made for another base; names both sides.
    """
    config, tensors = saving.load(folder, runner.reference)
    capsules = Capsules(config, runner.reference.num_layers, runner.reference.width)
    adapter = Adapter(config, capsules, None)
    saving.fill(adapter, {name: t for name, t in tensors.items() if name.startswith("capsules.")}, folder)
    weight = runner.reference.stack.get_input_embeddings().weight
    return capsules.to(weight.device, torch.promote_types(weight.dtype, torch.float32))


def _named(adapters: Sequence[str]) -> dict[str, Path]:
    folders: dict[str, Path] = {}
    for given in adapters:
        name, equals, folder = given.partition("=")
        path = Path(folder if equals else given)
        name = name if equals else path.name
        taken = [other.replace(" ", "-") for other in (BARE, *folders)]  # as files are called
        if not name or name.replace(" ", "-") in taken or "/" in name:
            raise ValueError(f"--adapter must be NAME=DIR with a new name, other than {BARE!r}, got {given!r}")
        if not path.is_dir():
            raise ValueError(f"--adapter {given}: {path} is not a folder")
        folders[name] = path / "adapter" if (path / "adapter").is_dir() else path
    return folders


def _examples(given: argparse.Namespace) -> tuple[Prompt, list[Example], str]:
    """Template, texts, and what to call them."""
    data_dir, file = given.data_dir, given.data
    if file is not None and file.is_dir():
        if data_dir is not None:
            raise ValueError(f"--data {file} is a folder, and so is --data-dir {data_dir}: give one of them")
        data_dir, file = file, None
    if file is None:
        if given.task is None:
            raise ValueError("--task is wanted, or --data with a file and a --template")
        folder = None if data_dir is None else str(data_dir)
        task = load_task(given.task, template=given.template, data_dir=folder)
        split = given.split or "test"
        return task.prompt, list(task.splits[split]), f"{task.name} {split}"
    for flag in ("data_dir", "split"):
        if getattr(given, flag) is not None:
            raise ValueError(f"--{flag.replace('_', '-')} does not go with a --data file, got {getattr(given, flag)}")
    template = given.template
    if template is None:
        if given.task not in SUPERGLUE:
            raise ValueError(
                f"--data {file} wants a --template, or a --task with a fixed one ({', '.join(SUPERGLUE)}), "
                f"got {'neither' if given.task is None else f'--task {given.task}'}"
            )
        template = SUPERGLUE[given.task].prompt.template
    # Attention has no labels; which field gives way to the length is the task's choice, or the first one.
    fields = Prompt(template, None, ("0", "1")).fields
    if not fields:
        raise ValueError(f"--template {template!r} names no field")
    cut = SUPERGLUE[given.task].prompt.cut if given.task in SUPERGLUE else fields[0]
    prompt = Prompt(template, cut, ("0", "1"))
    return prompt, read_examples(file, {field: field for field in fields}, None), str(file)
