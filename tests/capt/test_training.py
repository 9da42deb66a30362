import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, TrainerCallback

from capt import CaptConfig, get_capt_model
from capt.tasks import Prompt, encode
from capt.training import Run, TrainConfig, prepare, train
from capt.training.config import as_flags, read_config_file
from capt.training.inference import class_logits
from capt.training.metrics import classification_metrics
from capt.training.run import load_base
from capt.training.trainer import CaptTrainer, LengthGroupedBatches, last_checkpoint

from .tiny import save_llama, save_t5, write_reviews


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    return {
        "llama": save_llama(folder / "llama"),
        "t5": save_t5(folder / "t5"),
        "reviews": write_reviews(folder / "reviews.csv"),
    }


@pytest.fixture
def config(sources, tmp_path):
    return TrainConfig(
        model=sources["llama"],
        task="file",
        train_file=sources["reviews"],
        output_dir=str(tmp_path / "run"),
        batch_size=8,
        epochs=3,
        learning_rate=0.1,
        warmup_steps=2,
    )


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
    accuracies = {e["step"]: e["eval_accuracy"] for e in results["history"] if "eval_accuracy" in e}
    assert accuracies[results["best_step"]] == max(accuracies.values())
    assert results["metrics"]["validation"]["accuracy"] == max(accuracies.values())


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


def test_a_checkpoint_cut_short_is_not_there(config, tmp_path, monkeypatch):
    """Ctrl-C while a checkpoint is written."""
    saved = CaptTrainer._save_optimizer_and_scheduler

    def cut_short(self, output_dir):
        if self.state.global_step > 6:
            raise KeyboardInterrupt
        saved(self, output_dir)

    with monkeypatch.context() as patch:
        patch.setattr(CaptTrainer, "_save_optimizer_and_scheduler", cut_short)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    folder = tmp_path / "run"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-6", "prompt.json", "train_config.json"]
    assert last_checkpoint(folder) == folder / "checkpoint-6"
    assert train(config, resume=True)["resumed_from"] == "checkpoint-6"


def test_incomplete_checkpoints_are_passed_over(config, tmp_path, monkeypatch):
    interrupted(config, 13, monkeypatch)
    folder = tmp_path / "run"
    assert last_checkpoint(folder).name == "checkpoint-12"
    (folder / "checkpoint-12" / "optimizer.pt").unlink()
    (folder / "checkpoint-best").mkdir()
    assert last_checkpoint(folder).name == "checkpoint-6"


def test_what_cannot_be_resumed(config, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="holds no run to resume"):
        train(config, resume=True)
    interrupted(config, 2, monkeypatch)
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
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


# --- recipe -----------------------------------------------------------------------------------------------------------


def trainer_of(config, tmp_path):
    training = prepare(config)
    return CaptTrainer(training.model, training.tokenizer, config, tmp_path / "x", training.rows["train"])


def test_adafactor_moves_zero_vectors(config, tmp_path):
    trainer = trainer_of(
        dataclasses.replace(config, optimizer="adafactor", learning_rate=0.3, warmup_steps=0, max_steps=1), tmp_path
    )
    trainer.create_optimizer()
    (group, *_) = trainer.optimizer.param_groups
    assert (group["scale_parameter"], group["relative_step"], group["warmup_init"]) == (False, False, False)
    trainer.train()
    moved = trainer.model.adapters["default"].capsules.vectors.detach()
    # Scaled by the parameters' size, which is 0, the step would be 1e-3 of this.
    assert moved.abs().max() > 0.03


def test_two_half_batches_are_one(config, tmp_path):
    vectors = []
    for batch, accumulation in ((8, 1), (4, 2)):
        changes = {"batch_size": batch, "gradient_accumulation": accumulation, "max_steps": 3}
        trainer = trainer_of(dataclasses.replace(config, **changes), tmp_path)
        trainer.train()
        vectors.append(trainer.model.adapters["default"].capsules.vectors.detach())
    torch.testing.assert_close(vectors[0], vectors[1], rtol=1e-3, atol=1e-4)


def test_schedule(config, tmp_path):
    results = train(dataclasses.replace(config, max_steps=10, warmup_steps=4, eval_steps=10))
    rates = [entry["learning_rate"] for entry in results["history"] if "loss" in entry]
    expected = [0, 0.025, 0.05, 0.075, 0.1, *(0.1 * (1 - i / 6) for i in range(1, 6))]
    assert rates == pytest.approx(expected)


def test_early_stopping(config):
    # A rate too small to change a prediction: the first evaluation stays the best.
    results = train(dataclasses.replace(config, learning_rate=1e-12, epochs=20, patience=2))
    assert results["steps"] == 3 * 6
    assert results["best_step"] == 6


def test_seeds_decide(config, tmp_path):
    losses = []
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        results = train(dataclasses.replace(config, output_dir=str(tmp_path / folder), seed=seed, max_steps=3))
        losses.append([entry["loss"] for entry in results["history"] if "loss" in entry])
    assert losses[0] == losses[1] != losses[2]


def test_bf16_base_keeps_vectors_in_fp32(config):
    training = prepare(dataclasses.replace(config, bf16=True))
    assert training.model.base.dtype == torch.bfloat16
    assert training.model.adapters["default"].capsules.vectors.dtype == torch.float32


def test_nothing_to_train(config):
    with pytest.raises(ValueError, match="nothing trains"):
        train(dataclasses.replace(config, task_vectors=False))


def test_a_tokenizer_without_padding_pads_with_the_end(config, tmp_path):
    model = save_llama(tmp_path / "model", with_pad=False)
    _, tokenizer = load_base(model, 2)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1
    assert train(dataclasses.replace(config, model=model, max_steps=2))["steps"] == 2


def test_batches_of_like_length():
    lengths = torch.randint(1, 100, (203,)).tolist()
    sampler = LengthGroupedBatches(lengths, 8, seed=0)
    first = list(sampler)
    assert sorted(first) == list(range(203))
    assert first == list(sampler)
    sampler.set_epoch(1)
    assert first != list(sampler)
    spread = [
        max(lengths[i] for i in first[k : k + 8]) - min(lengths[i] for i in first[k : k + 8]) for k in range(0, 200, 8)
    ]
    assert sum(spread) / len(spread) < 25  # at random it would be 78
    longest = [max(lengths[i] for i in first[k : k + 8]) for k in range(0, 200, 8)]
    assert longest != sorted(longest, reverse=True)  # a schedule must not meet the long rows first


# --- inference and metrics --------------------------------------------------------------------------------------------


def test_logits_come_in_the_order_of_the_rows(sources):
    base, _ = load_base(sources["llama"], 2)
    tokenizer = AutoTokenizer.from_pretrained(sources["llama"])
    model = get_capt_model(base, CaptConfig(label_words=(5, 6))).eval()
    texts = ["the film was a story", "fine", "a story about people", "the film", "dull film was"]
    rows = encode([{"text": text} for text in texts], Prompt("{text}", "text", ("a", "b")), tokenizer, 16, "x")
    together = class_logits(model, tokenizer, rows, 2, model.device)
    alone = torch.cat([model(input_ids=torch.tensor([row["input_ids"]])).logits for row in rows])
    torch.testing.assert_close(together, alone.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("predicted", "labels", "classes", "accuracy", "macro_f1"),
    [
        ([0, 1, 1, 0], [0, 1, 1, 0], 2, 1.0, 1.0),
        ([0, 0, 0, 0], [0, 0, 1, 1], 2, 0.5, (2 / 3 + 0) / 2),
        # class 0: 1 right of 2 labelled and 1 predicted; class 1: 1 of 1 and 2; class 2: 1 of 1 and 1
        ([0, 1, 1, 2], [0, 0, 1, 2], 3, 0.75, (2 / 3 + 2 / 3 + 1) / 3),
        # class 2 is neither labelled nor predicted, so it has no F1
        ([0, 1], [0, 0], 3, 0.5, (2 / 3 + 0) / 2),
    ],
)
def test_metrics_by_hand(predicted, labels, classes, accuracy, macro_f1):
    logits = torch.nn.functional.one_hot(torch.tensor(predicted), classes).float()
    found = classification_metrics(logits, torch.tensor(labels))
    assert found == pytest.approx({"accuracy": accuracy, "macro_f1": macro_f1})


# --- the config -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"learning_rate": 0.0}, "learning_rate must be a positive number, got 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be a positive number, got nan"),
        ({"epochs": -1}, "epochs must be a positive number, got -1"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"optimizer": "sgd"}, "optimizer must be one of adamw, adafactor, got 'sgd'"),
        ({"variant": "sum"}, "variant must be one of .*got 'sum'"),
        ({"depth": "0,x"}, "depth must be a name or comma-separated layer indices, got '0,x'"),
        ({"depth": "3,1"}, "strictly rising"),
        ({"lerning_rate": 1}, r"unknown field 'lerning_rate'; did you mean 'learning_rate'\?"),
        ({"zzz": 1}, "unknown field 'zzz'$"),
    ],
)
def test_bad_fields(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_dict(changes)


def test_every_capsule_option_arrives():
    config = TrainConfig(
        variant="projection",
        length=2,
        depth="0,2",
        lead=1,
        first_mean=False,
        positions="keep",
        expose_slot=False,
        rank=4,
    )
    capsule = config.capsule([5, 6])
    assert capsule == CaptConfig(
        variant="projection",
        length=2,
        depth=(0, 2),
        lead=1,
        first_mean=False,
        positions="keep",
        expose_slot=False,
        rank=4,
        task_type="SEQ_CLS",
        label_words=(5, 6),
        base_model_name_or_path="smollm2",
    )
    assert TrainConfig(task_vectors=False).capsule().task is False
    assert TrainConfig(instance=False).capsule().instance is False


def test_config_files(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "learning_rate: 1e-3\nbf16: true\ndepth: [0, 2]\nlabel_words: [' a', ' b']\nseed:\n"
    )
    fields = read_config_file(tmp_path / "a.yaml")
    assert as_flags(fields) == ["--learning_rate=1e-3", "--bf16=True", "--depth=0,2", "--label_words", " a", " b"]
    (tmp_path / "a.json").write_text('{"task": "trec"}')
    assert read_config_file(tmp_path / "a.json") == {"task": "trec"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", "", "must end in .yaml, .yml or .json"),
        ("a.yaml", "- 1", "a mapping of fields to values is wanted, got list"),
        ("a.yaml", "a: [", r"a\.yaml: not YAML"),
        ("a.json", "{\n,}", r"a\.json, line 2: not JSON"),
    ],
)
def test_bad_config_files(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_config_file(tmp_path / name)
