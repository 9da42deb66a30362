"""Whole runs and interrupted ones: what they leave, and that going on is as if nothing had happened."""

import dataclasses
import json
import os
import shutil
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerState

from capt import cli, saving
from capt.training import Run, prepare, train
from capt.training import run as run_module
from capt.training.trainer import UNFINISHED, CaptTrainer, last_checkpoint


class Interrupt(TrainerCallback):
    """Ctrl-C in the midst of step ``step``."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def interrupted(config, step, monkeypatch):
    """Trains until Ctrl-C."""
    made = CaptTrainer.__init__

    def with_interrupt(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self.add_callback(Interrupt(step))

    with monkeypatch.context() as patch:
        patch.setattr(CaptTrainer, "__init__", with_interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(config)


def numbers(results):
    """What an interruption must not change: the log without its clock."""
    clock = ("runtime", "per_second", "flos", "train_loss")
    return [{k: v for k, v in entry.items() if not any(word in k for word in clock)} for entry in results["history"]]


# --- a whole run ------------------------------------------------------------------------------------------------------


def test_words_behind_a_text_that_asks_nothing(config):
    with pytest.warns(UserWarning, match="template '{text}', which asks nothing"):
        prepare(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        prepare(dataclasses.replace(config, template="a film: {text}"))
        prepare(dataclasses.replace(config, classifier="linear"))


def test_a_run_leaves_its_results(config, tmp_path):
    results = train(config)
    folder = tmp_path / "run"
    assert json.loads((folder / "results.json").read_text()) == json.loads(json.dumps(results))
    assert results["rows"] == {"train": 48, "validation": 6, "test": 6}
    assert results["parameters"]["trainable"] == 2 * 32
    assert results["steps"] == 18
    assert results["config"]["learning_rate"] == 0.1
    losses = [entry["loss"] for entry in results["history"] if "loss" in entry]
    assert len(losses) == 18
    assert (folder / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert {path.name for path in (folder / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert not [path for path in folder.rglob("*") if path.name.startswith(".")]


def test_nothing_but_the_adapter_moves_and_the_best_is_kept(config, sources):
    training = prepare(config)
    before = {name: tensor.clone() for name, tensor in training.model.base.state_dict().items()}
    results = training.run()
    for name, tensor in training.model.base.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    marks = {e["step"]: (e["eval_score"], -e["eval_loss"]) for e in results["history"] if "eval_score" in e}
    assert len({score for score, _ in marks.values()}) < len(marks)  # of equal scores the lower loss wins
    assert marks[results["best_step"]] == max(marks.values())
    assert results["metrics"]["validation"]["accuracy"] == max(marks.values())[0]


def test_every_process_takes_part_in_saving_and_one_writes(config, tmp_path, monkeypatch):
    """Where FSDP shards the vectors, each process has to give its part."""
    calls = []
    monkeypatch.setattr(CaptTrainer, "is_world_process_zero", lambda self: False)
    monkeypatch.setattr(saving, "whole", lambda tensors: calls.append(len(tensors)) or tensors)
    training = prepare(dataclasses.replace(config, max_steps=1))
    (tmp_path / "run").mkdir()
    training.run()
    assert calls[-1] == 1
    assert not (tmp_path / "run" / "adapter").exists()


def test_the_task_s_own_metric_chooses(config, tmp_path):
    """MultiRC's F1 over all answers, of which accuracy is no monotone function."""
    questions = [
        {"question": f"what {q}", "answers": [{"text": f"a{a}", "label": int(a == q)} for a in range(2)]}
        for q in range(2)
    ]
    for name, count in (("train", 20), ("val", 4)):
        lines = [{"passage": {"text": f"text {i}", "questions": questions}} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    changes = {
        "task": "multirc",
        "train_file": None,
        "data_dir": str(tmp_path),
        "classifier": "linear",
        "eval_steps": 2,
    }
    config = dataclasses.replace(config, **changes, max_steps=6)
    results = train(config)
    assert {"score", "f1a", "exact_match", "accuracy"} < results["metrics"]["test"].keys()
    scores = {entry["step"]: entry["eval_score"] for entry in results["history"] if "eval_score" in entry}
    assert scores[results["best_step"]] == max(scores.values()) == results["metrics"]["validation"]["f1a"]
    assert cli.main(["evaluate", config.output_dir, "--output", str(tmp_path / "found.json")]) == 0
    assert json.loads((tmp_path / "found.json").read_text())["metrics"] == results["metrics"]["test"]


@pytest.mark.parametrize("changes", [{}, {"classifier": "linear"}, {"optimizer": "adafactor"}, {"bf16": True}])
def test_training_lowers_the_loss(config, changes):
    results = train(dataclasses.replace(config, epochs=10, **changes))
    losses = [entry["loss"] for entry in results["history"] if "loss" in entry]
    assert sum(losses[-6:]) < 0.9 * sum(losses[:6])
    assert results["parameters"]["trainable"] == 64 + (2 * 32 if changes.get("classifier") == "linear" else 0)


def test_an_encoder_decoder_trains_by_label_words(config, sources):
    results = train(dataclasses.replace(config, model=sources["t5"], epochs=2))
    losses = [entry["loss"] for entry in results["history"] if "loss" in entry]
    assert len(losses) == 12
    assert all(map(torch.isfinite, torch.tensor(losses)))
    assert results["parameters"]["trainable"] == 2 * 32


def test_a_run_can_be_loaded_and_used(config):
    results = train(config)
    run = Run.load(Path(config.output_dir))
    task = config.load_task()
    rows = run.encode(task.splits["test"], "test")
    assert run.evaluate(rows) == results["metrics"]["test"]
    probabilities = run.predict(rows)
    assert all(set(row) == {"bad", "good"} and abs(sum(row.values()) - 1) < 1e-6 for row in probabilities)
    right = [max(p, key=p.get) == row["label"] for p, row in zip(probabilities, task.splits["test"], strict=True)]
    assert sum(right) / len(right) == results["metrics"]["test"]["accuracy"]


# --- interruption -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({}, 7),
        ({"eval_steps": 4}, 10),  # in the midst of an epoch
        ({"eval_steps": 4, "gradient_accumulation": 2, "optimizer": "adafactor"}, 6),
        ({"classifier": "linear", "patience": 2}, 13),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(config, tmp_path, monkeypatch, changes, step):
    config = dataclasses.replace(config, **changes)
    whole = train(dataclasses.replace(config, output_dir=str(tmp_path / "whole")))
    interrupted(config, step, monkeypatch)
    assert not (tmp_path / "run" / "results.json").exists()
    resumed = train(config, resume=True)
    assert resumed["resumed_from"] is not None
    assert numbers(resumed) == numbers(whole)
    assert resumed["metrics"] == whole["metrics"]
    ours, theirs = (load_file(tmp_path / name / "adapter/adapter_model.safetensors") for name in ("run", "whole"))
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def test_resumption_with_dropout(config, sources, tmp_path, monkeypatch):
    """T5 drops out in training, so the generator's state must come back too."""
    config = dataclasses.replace(config, model=sources["t5"], eval_steps=4)
    whole = train(dataclasses.replace(config, output_dir=str(tmp_path / "whole")))
    interrupted(config, 9, monkeypatch)
    assert numbers(train(config, resume=True)) == numbers(whole)


class Fault:
    """Ctrl-C at call ``at`` of all that writes, moves and deletes."""

    WRITERS = (
        (torch, "save"),
        (safetensors.torch, "save_file"),  # the Trainer's
        (saving, "save_file"),
        (Path, "write_text"),
        (PreTrainedTokenizerBase, "save_pretrained"),
        (TrainerState, "save_to_json"),
        (os, "replace"),
        (shutil, "rmtree"),
    )

    def __init__(self, patch, at):
        self.at, self.calls = at, 0
        for owner, name in self.WRITERS:
            patch.setattr(owner, name, self.guarded(getattr(owner, name)))

    def guarded(self, write):
        def guard(*args, **kwargs):
            self.calls += 1
            if self.calls == self.at:
                raise KeyboardInterrupt
            write(*args, **kwargs)

        return guard


class Trained(Exception):
    """Training is over, the last evaluation not yet."""


def end_with_training(*_):
    raise Trained


def whole_checkpoints(folder, files):
    """The names of those in ``folder``; each must hold ``files`` and name a best one that is there."""
    checkpoints = sorted(folder.glob("checkpoint-*"))
    for path in checkpoints:
        assert {file.name for file in path.iterdir()} == files
        best = Path(TrainerState.load_from_json(str(path / "trainer_state.json")).best_model_checkpoint)
        assert best.name in {path.name for path in checkpoints}
    return [path.name for path in checkpoints]


def test_whatever_is_called_a_checkpoint_is_whole(config, tmp_path, monkeypatch):
    """A checkpoint is made, and an older one deleted, with Ctrl-C at each write, move and deletion."""
    config = dataclasses.replace(config, max_steps=4, eval_steps=1)
    whole = train(dataclasses.replace(config, output_dir=str(tmp_path / "whole")))
    files = {path.name for path in (tmp_path / "whole/checkpoint-4").iterdir()}
    assert {"adapter_model.safetensors", "model.safetensors", "optimizer.pt", "trainer_state.json"} <= files
    interrupted(config, 3, monkeypatch)
    begun, at, seen = whole_checkpoints(tmp_path / "run", files), 0, set()
    assert begun[-1] == "checkpoint-3"
    over = False
    while not over:
        at += 1
        folder = shutil.copytree(tmp_path / "run", tmp_path / f"at-{at}")
        copy = dataclasses.replace(config, output_dir=str(folder))
        with monkeypatch.context() as patch:
            patch.setattr(run_module, "evaluate_rows", end_with_training)
            Fault(patch, at)
            try:
                train(copy, resume=True)
            except Trained:
                over = True
            except KeyboardInterrupt:
                pass
        found = whole_checkpoints(folder, files)
        if tuple(found) not in seen or over:
            seen.add(tuple(found))
            resumed = train(copy, resume=True)
            assert resumed["resumed_from"] == found[-1]
            assert numbers(resumed) == numbers(whole)
            assert resumed["metrics"] == whole["metrics"]
            assert not (folder / UNFINISHED).exists()
    assert at > 15
    assert len(seen) == 3  # as before, one more, and without the one that was deleted


def test_what_an_interrupted_clearing_leaves_is_not_resumed(config, monkeypatch):
    interrupted(config, 13, monkeypatch)
    with monkeypatch.context() as patch:
        Fault(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            train(config, overwrite=True)
    with pytest.raises(FileNotFoundError, match="holds no run to resume"):
        train(config, resume=True)


@pytest.mark.parametrize("changes", [{"max_steps": 3, "eval_steps": 1}, {"patience": 1, "epochs": 6}, {}])
def test_a_run_whose_training_had_ended_is_resumed(config, tmp_path, monkeypatch, changes):
    """Ctrl-C in the last evaluation: no further step is taken."""
    config = dataclasses.replace(config, **changes)
    whole = train(dataclasses.replace(config, output_dir=str(tmp_path / "whole")))
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "evaluate_rows", end_with_training)
        with pytest.raises(Trained):
            train(config)
    resumed = train(config, resume=True)
    assert resumed["resumed_from"] == f"checkpoint-{whole['steps']}"
    assert (numbers(resumed), resumed["metrics"]) == (numbers(whole), whole["metrics"])


def test_other_folders_are_no_checkpoints(config, tmp_path, monkeypatch):
    interrupted(config, 13, monkeypatch)
    folder = tmp_path / "run"
    (folder / "checkpoint-best").mkdir()
    (folder / "checkpoint-99-copy").mkdir()
    assert last_checkpoint(folder).name == "checkpoint-12"


def test_a_run_that_was_moved_is_resumed(config, tmp_path, monkeypatch):
    """Its best checkpoint, which its newest one names, moved too."""
    whole = train(dataclasses.replace(config, output_dir=str(tmp_path / "whole")))
    interrupted(config, 16, monkeypatch)
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    resumed = train(dataclasses.replace(config, output_dir=str(moved)), resume=True)
    assert (resumed["best_step"], resumed["metrics"]) == (whole["best_step"], whole["metrics"])


def test_what_cannot_be_resumed(config, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="holds no run to resume"):
        train(config, resume=True)
    interrupted(config, 2, monkeypatch)
    with pytest.raises(ValueError, match="holds no checkpoint"):
        train(config, resume=True)
    with pytest.raises(ValueError, match=r"learning_rate was 0\.1 in the run to resume, got 0.2"):
        train(dataclasses.replace(config, learning_rate=0.2), resume=True)


def test_a_folder_with_a_run_is_kept_unless_told(config, tmp_path):
    train(config)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds a run already"):
        train(config)
    assert train(dataclasses.replace(config, max_steps=2), overwrite=True)["steps"] == 2
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "run" / "checkpoint-18").exists()
