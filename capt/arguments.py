"""What the command line takes: ``capt train | evaluate | predict | demo | reproduce | attention | backends``."""

from __future__ import annotations

import argparse
import copy
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from transformers import HfArgumentParser

from .analysis import command as analysis
from .experiments import command as experiments
from .tasks import SPLITS
from .training import TrainConfig


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Each option once: HfArgumentParser makes it with dashes and with underscores, and ``--no-x`` beside ``--x``."""

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        if len(actions := list(actions)) > 9:
            usage = "%(prog)s [options]"
        super().add_usage(usage, actions, groups, prefix)

    def add_argument(self, action: argparse.Action) -> None:
        if not any(option.startswith("--no-") for option in action.option_strings):
            shown = copy.copy(action)
            shown.option_strings = [option for option in action.option_strings if "_" not in option]
            if action.default is None:  # which tells a reader nothing
                shown.default = argparse.SUPPRESS
            super().add_argument(shown)


class Parser(HfArgumentParser):
    """An argument parser that says what is wrong in one line."""

    commands: Mapping[str, Parser] = {}

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, formatter_class=Help, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        given, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = self.commands[given.command]
            known = [option for action in command._actions for option in action.option_strings if "_" not in option]
            near = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return given


def make_parser() -> Parser:
    """The parser of every command."""
    parser = Parser(
        prog="capt", description="Capsule prompt-tuning: one trained vector a layer of a frozen language model."
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)

    training = commands.add_parser("train", help="train an adapter", dataclass_types=TrainConfig, allow_abbrev=False)
    training.add_argument("--config", type=Path, help="YAML or JSON file of the fields below; flags win over it")
    training.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in output_dir")
    training.add_argument("--overwrite", action="store_true", help="clear away an earlier run in output_dir")

    evaluation = commands.add_parser("evaluate", help="measure a trained run", allow_abbrev=False)
    evaluation.add_argument("run", type=Path, help="output_dir of a finished training run")
    evaluation.add_argument("--split", choices=SPLITS, help="all of its rows [test]")
    evaluation.add_argument("--file", type=Path, help="labelled CSV, TSV or JSON Lines in place of the task's split")
    evaluation.add_argument("--label-column", help="column of the label in --file [as in training]")
    evaluation.add_argument("--output", type=Path, help="JSON file to write the metrics to as well")
    _add_reading(evaluation)

    prediction = commands.add_parser(
        "predict",
        help="label texts",
        description="Labels texts of --text or --file, or lines of standard input.",
        allow_abbrev=False,
    )
    prediction.add_argument("run", type=Path, help="output_dir of a finished training run")
    source = prediction.add_mutually_exclusive_group()
    source.add_argument("--text", action="append", help="a text to label; may be repeated")
    source.add_argument("--file", type=Path, help="CSV, TSV or JSON Lines, or any other file with one text a line")
    prediction.add_argument(
        "--format", choices=("tsv", "jsonl"), default="tsv", help="label and probability, or all of them"
    )
    _add_reading(prediction)

    demo = commands.add_parser("demo", help="train on a real model and real text within minutes", allow_abbrev=False)
    demo.add_argument("--output-dir", type=Path, default=Path("runs/demo"), help="folder for results.json")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument(
        "--quick", action="store_true", help="a few steps on a few rows: tells that it works, not how well"
    )

    reproduction = commands.add_parser("reproduce", help="run the paper's experiments", allow_abbrev=False)
    experiments.add_arguments(reproduction)

    attention = commands.add_parser("attention", help="measure what a model attends to", allow_abbrev=False)
    analysis.add_arguments(attention)

    commands.add_parser("backends", help="which backends this machine has")
    parser.commands = commands.choices
    return parser


def _add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text-column", help="column of the text in --file, for a task of one text [as in training]")
    parser.add_argument("--batch-size", type=int, help="rows a forward pass [as in training]")
