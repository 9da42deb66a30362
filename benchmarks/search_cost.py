"""What the search for P-Tuning v2's length costs beside one CaPT run, which has none to search (the paper's Table 2).

    python -m benchmarks.search_cost --task cb --data-dir DATA --output search_cost.json

Every run starts from the same base, stops early by the same rule on the same validation rows, and runs on this
library's engine, so the ratio is the methods' alone. The length with the best validation score counts, and the seconds
of all lengths.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from capt.experiments import Bench, Cell, run_cell
from capt.experiments.fit import better
from capt.markdown import table
from capt.staging import write_json
from capt.training import TrainConfig

#: method of capt.experiments -> name, and its learning rate where none is given.
METHODS = {"capt": ("CaPT", 1e-2), "p-tuning-v2": ("P-Tuning v2", 1e-2)}


def search_cost(config: TrainConfig, lengths: Sequence[int], rates: dict[str, float], answer: str) -> dict[str, Any]:
    """Trains CaPT once, and P-Tuning v2 with each of ``lengths``.

    Args:
        config: model, task, rows and recipe; ``patience`` stops early. rates: learning rate by method.
        answer: a kind of :mod:`capt.experiments.answers`.

    Returns:
        ``runs``, in the order they ran: method, length, seconds with validation, steps, trained numbers, validation and
        test score; ``best_length``; ``seconds`` of both methods; ``ratio``, P-Tuning v2's over CaPT's.
    """
    bench, runs = Bench(), []
    for method, options in (("capt", {}), *(("p-tuning-v2", {"length": n}) for n in lengths)):
        fields = config.to_dict() | {"learning_rate": rates[method]}
        result = run_cell(Cell(method, TrainConfig.from_dict(fields), options, answer), bench)
        marks = result["metrics"]
        runs.append(
            {
                "method": method,
                "length": options.get("length"),
                "learning_rate": rates[method],
                "seconds": result["seconds"],
                "steps": result["steps"],
                "trained": result["parameters"]["trainable"],
                "validation": marks["validation"],
                "test": marks["test"],
            }
        )
    seconds = {method: sum(run["seconds"] for run in runs if run["method"] == method) for method in METHODS}
    best: dict[str, Any] | None = None
    for run in runs[1:]:
        if run["validation"] and better(run["validation"], best and best["validation"]):
            best = run
    return {
        "runs": runs,
        "best_length": best and best["length"],
        "seconds": seconds,
        "ratio": seconds["p-tuning-v2"] / seconds["capt"],
    }


def markdown(found: dict[str, Any]) -> str:
    """The runs, and the two sums."""

    def score(mark: dict[str, float] | None) -> str:
        return "not finite" if mark is None else f"{100 * mark['score']:.1f}"

    rows = []
    for run in found["runs"]:
        length = "" if run["length"] is None else f", {run['length']} tokens"
        best = " (chosen)" if run["length"] is not None and run["length"] == found["best_length"] else ""
        name = f"{METHODS[run['method']][0]}{length}{best}"
        cells = (f"{run['seconds']:.1f}", str(run["steps"]), f"{run['trained']:,}")
        rows.append((name, *cells, score(run["validation"]), score(run["test"])))
    for method, (name, _) in METHODS.items():
        rows.append((f"**{name}, all of its runs**", f"**{found['seconds'][method]:.1f}**", "", "", "", ""))
    text = table(("run", "seconds", "steps", "trained", "validation", "test"), rows)
    return f"{text}\n\nThe search takes {found['ratio']:.1f} times the seconds of the one CaPT run."


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search_cost", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="as of `capt train`")
    parser.add_argument("--task", default="movie-reviews", help="as of `capt train`; cb, rte: --data-dir")
    parser.add_argument("--data-dir", help="SuperGLUE in the official layout")
    parser.add_argument("--train-file", help="of task 'file'")
    parser.add_argument("--answer", default="label-words", help="label-words, linear or text")
    parser.add_argument("--lengths", type=int, nargs="+", default=[10, 20, 50, 100], help="P-Tuning v2's grid")
    parser.add_argument("--rows", type=int, nargs=3, default=[160, 64, 200], metavar=("TRAIN", "VALIDATION", "TEST"))
    parser.add_argument("--epochs", type=float, default=20.0, help="at most")
    parser.add_argument("--patience", type=int, default=3, help="epochs without a better validation score")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--max-length", type=int, default=256, help="tokens")
    parser.add_argument("--seed", type=int, default=0)
    for method, (name, rate) in METHODS.items():
        parser.add_argument(f"--{method}-rate", type=float, default=rate, help=f"{name}'s learning rate [{rate:g}]")
    parser.add_argument("--quick", action="store_true", help="two lengths, one epoch on a few rows")
    parser.add_argument("--output", type=Path, help="JSON file")
    given = parser.parse_args(arguments)
    if given.quick:
        given.lengths, given.rows, given.epochs = given.lengths[:2], [8, 4, 4], 1.0
    config = TrainConfig(
        model=given.model,
        task=given.task,
        data_dir=given.data_dir,
        train_file=given.train_file,
        train_rows=given.rows[0],
        validation_rows=given.rows[1],
        test_rows=given.rows[2],
        epochs=given.epochs,
        patience=given.patience,
        batch_size=given.batch_size,
        max_length=given.max_length,
        warmup_steps=0,
        seed=given.seed,
    )
    rates = {method: vars(given)[f"{method.replace('-', '_')}_rate"] for method in METHODS}
    found = search_cost(config, given.lengths, rates, given.answer)
    told = {
        name: value for name, value in config.to_dict().items() if name not in ("data_dir", "train_file", "output_dir")
    }
    machine = {
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    if given.output:
        write_json(given.output, found | {"config": told, "torch": torch.__version__, "machine": machine})
    print(markdown(found))


if __name__ == "__main__":
    main()
