"""How a run trains: optimizers, schedule, accumulation, early stopping, seeds, the order of rows."""

import dataclasses

import pytest
import torch

from capt.training import prepare, train
from capt.training.loading import load_base
from capt.training.trainer import CaptTrainer, LengthGroupedBatches

from .tiny import save_llama


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
