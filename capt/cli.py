"""``capt train | evaluate | predict | demo | reproduce | attention | backends``."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers.utils import logging as transformers_logging

from .analysis import command as analysis
from .arguments import make_parser
from .experiments import command as experiments
from .staging import write_json
from .tasks import Example, groups_of, read_examples
from .tasks.task import example
from .training import Run, TrainConfig, prepare
from .training.config import as_flags, read_config_file
from .training.metrics import Scoring
from .training.trainer import last_checkpoint


class _Refused(Exception):
    """Input that does not fit."""


@contextlib.contextmanager
def _checking() -> Iterator[None]:
    """Around the reading of input, whose errors are the user's to put right. Elsewhere they are defects of ours."""
    try:
        yield
    except (ValueError, NotImplementedError, ImportError) as error:
        raise _Refused(str(error)) from error


@contextlib.contextmanager
def _plain_warnings(command: str) -> Iterator[None]:
    """Inside, a warning is a line of its own, without the place in our source that gave it."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_: f"capt {command}: warning: {' '.join(str(message).split())}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code: 0, 2 on bad input with one line on stderr, 130 on Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    parser, given = make_parser(), argparse.Namespace(command="")
    try:
        given = parser.parse_args(arguments)
        if given.command == "train" and given.config is not None:
            with _checking():
                flags = as_flags(read_config_file(given.config))
            given = parser.parse_args(["train", *flags, *arguments[1:]])  # in this order, so that flags win
        with _plain_warnings(given.command):
            return _COMMANDS[given.command](given)
    except BrokenPipeError:  # the reader of our output left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"capt: interrupted{_after_interrupt(given)}", file=sys.stderr)
        return 130
    except (_Refused, OSError) as error:
        if os.environ.get("CAPT_TRACEBACK"):
            raise
        print(f"capt {given.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _after_interrupt(given: argparse.Namespace) -> str:
    if given.command == "reproduce":
        return "; finished cells are kept, and the same command goes on from them"
    if given.command != "train":
        return ""
    checkpoint = last_checkpoint(Path(given.output_dir))
    return "; no checkpoint was made yet" if checkpoint is None else f"; {checkpoint} is whole, go on with --resume"


def _train(given: argparse.Namespace) -> int:
    fields = {name: value for name, value in vars(given).items() if name in TrainConfig.__dataclass_fields__}
    with _checking():
        training = prepare(TrainConfig(**fields), resume=given.resume, overwrite=given.overwrite)
    results = training.run()
    if not PartialState().is_main_process:  # one of several that accelerate launched
        return 0
    for split, metrics in results["metrics"].items():
        print(f"{split}\t" + "\t".join(f"{name} {_shown(value)}" for name, value in metrics.items()))
    print(f"adapter\t{results['parameters']['trainable']:,} trained parameters in {Path(given.output_dir) / 'adapter'}")
    return 0


def _evaluate(given: argparse.Namespace) -> int:
    if given.output is not None and given.output.is_dir():
        raise _Refused(f"--output {given.output} is a folder, where a file is to be written")
    with _checking():
        run = _load(given)
        scoring = None
        if given.file is not None:
            if given.split is not None:
                raise ValueError(f"--split {given.split} and --file {given.file} name two sets of rows; give one")
            label_column = given.label_column or run.config.label_column or "label"
            examples = read_examples(given.file, _columns(run, given.text_column), label_column, run.prompt.labels)
            source = str(given.file)
        else:
            task = run.config.load_task()
            if task.prompt.labels != run.prompt.labels:
                raise ValueError(f"the task has the labels {task.prompt.labels}, the run {run.prompt.labels}")
            for flag in ("text_column", "label_column"):
                if getattr(given, flag) is not None:
                    raise ValueError(f"--{flag.replace('_', '-')} names a column of --file, and none was given")
            split = given.split or "test"
            examples, source = list(task.splits[split]), f"{task.name} {split}"
            scoring = Scoring(task.metric, groups_of(examples))
        rows = run.encode(examples, source)
    metrics = run.evaluate(rows, scoring)
    if given.output is not None:
        write_json(given.output, {"run": str(given.run), "source": source, "metrics": metrics})
    print("\n".join(f"{name}\t{_shown(value)}" for name, value in metrics.items()))
    return 0


def _predict(given: argparse.Namespace) -> int:
    with _checking():
        run = _load(given)
        rows = run.encode(*_texts(given, run))
    for probabilities in run.predict(rows):
        label = max(probabilities, key=probabilities.__getitem__)
        if given.format == "jsonl":
            row = {"label": label, "probability": probabilities[label], "probabilities": probabilities}
            print(json.dumps(row, ensure_ascii=False))
        else:
            print(f"{label}\t{probabilities[label]:.4f}")
    return 0


def _load(given: argparse.Namespace) -> Run:
    if given.batch_size is not None and given.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, got {given.batch_size}")
    return Run.load(given.run, given.batch_size)


def _texts(given: argparse.Namespace, run: Run) -> tuple[list[Example], str]:
    """The texts of --text, --file or stdin, and what to call them in errors."""
    if given.file is not None and given.file.suffix.lower() in (".csv", ".tsv", ".jsonl"):
        return read_examples(given.file, _columns(run, given.text_column), None), str(given.file)
    if given.text_column is not None:
        raise ValueError("--text-column names a column of a CSV, TSV or JSON Lines --file, and none was given")
    if len(run.prompt.fields) > 1:
        raise ValueError(f"the run takes {', '.join(run.prompt.fields)}: give them as columns of a --file")
    if given.file is not None:
        if not given.file.is_file():
            raise FileNotFoundError(f"{given.file}: there is no such file")
        lines: Iterable[str] = _lines(functools.partial(given.file.read_text, encoding="utf-8"), str(given.file))
        source = str(given.file)
    elif given.text is not None:
        lines, source = given.text, "--text"
    else:
        if sys.stdin.isatty():
            print("capt predict: a text a line, then Ctrl-D (or give --text or --file)", file=sys.stderr)
        lines, source = _lines(sys.stdin.read, "stdin"), "stdin"
    examples = [
        example({run.prompt.fields[0]: line}, None, f"{source}, line {n}") for n, line in enumerate(lines, start=1)
    ]
    if not examples:
        raise ValueError(f"{source} holds no text")
    return examples, source


def _lines(read: Callable[[], str], source: str) -> list[str]:
    """The lines of a text, with or without a byte-order mark. No other separator ends one, so that answers keep step.

    Raises:
        ValueError: bytes that are not UTF-8.
    """
    try:
        text = read().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: not UTF-8: {error.reason} at byte {error.start}") from None
    return text.removesuffix("\n").split("\n") if text else []


def _columns(run: Run, text_column: str | None) -> dict[str, str]:
    """Which column each field of the run's template comes from."""
    fields = run.prompt.fields
    if len(fields) > 1 and text_column is not None:
        raise ValueError(f"--text-column does not fit a task of several texts: {', '.join(fields)}")
    text_column = text_column or run.config.text_column
    return {field: field for field in fields} if len(fields) > 1 or text_column is None else {fields[0]: text_column}


def _demo(given: argparse.Namespace) -> int:
    from .demo import Demo

    with _checking():
        demo = Demo.load(given.seed, given.quick)
    print(demo.run(given.output_dir))
    return 0


def _reproduce(given: argparse.Namespace) -> int:
    with _checking():
        runner = experiments.prepare(given)
    whole = runner.run(given.minutes)
    print(runner.write_table())
    if not whole:
        print(f"capt: {given.minutes:g} minutes are over; the same command goes on", file=sys.stderr)
    return 0


def _attention(given: argparse.Namespace) -> int:
    with _checking():
        measurement = analysis.prepare(given)
    print(measurement.run())
    return 0


def _backends(_: argparse.Namespace) -> int:
    from capt_kernels import backends

    for name, status in backends().items():
        print(f"{name}\t{'yes' if status.available else 'no'}\t{status.reason}")
    return 0


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


_COMMANDS = {
    "train": _train,
    "evaluate": _evaluate,
    "predict": _predict,
    "demo": _demo,
    "reproduce": _reproduce,
    "attention": _attention,
    "backends": _backends,
}
