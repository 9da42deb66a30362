"""Gradient checkpointing of the base: the same gradients from fewer bytes, on both backends and under a Trainer."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from capt import CaptConfig, get_capt_model
from capt.memory import bytes_kept

from .naive import ENCODERS, batch_of, make_base, randomise


def without_dropout(base):
    """Both backends then compute one function; test_dropout has the masks."""
    for module in base.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for part in (base, getattr(base, "encoder", base)):
        part.config.dropout_rate = 0.0
    return base


def make(family, when, reentrant, backend, **fields):
    """A model in training, checkpointed ``when`` ("before" or "after" it is wrapped, or "never")."""
    base = without_dropout(make_base(family))
    if when == "before":
        base.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model = get_capt_model(base, CaptConfig(**fields)).double().train()
    if when == "after":
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    randomise(model)
    model.backend = backend
    return model


def step(model, family, lengths=(4, 6, 1)):
    """Bytes kept, loss and gradients of a training step."""
    torch.manual_seed(2)
    ids, mask = batch_of(lengths, "left")
    inputs = {"input_ids": ids, "attention_mask": mask}
    weights = torch.randn(*ids.shape, 16, dtype=torch.float64)
    answers = mask.bool() & (torch.arange(max(lengths)) >= max(lengths) // 2)

    def loss():
        if family in ENCODERS:
            return (model(**inputs).last_hidden_state * weights).sum()
        return model(**inputs, labels=ids.masked_fill(~answers, -100)).loss

    kept, done = bytes_kept(model, loss), loss()
    model.zero_grad()
    done.backward()
    return kept, done.detach(), *(p.grad for p in model.parameters() if p.requires_grad)


def assert_spared(sparing, plain):
    assert sparing[0] < plain[0]
    for one, other in zip(sparing[1:], plain[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert all(grad.abs().max() > 0 for grad in plain[2:])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("backend", ["fused", "reference"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "t5", "flan-t5", "bert"])
def test_the_same_gradient_from_fewer_bytes(family, backend, when, reentrant):
    plain = step(make(family, "never", None, backend, lead=1), family)
    assert_spared(step(make(family, when, reentrant, backend, lead=1), family), plain)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["llama", "t5"])
@pytest.mark.parametrize("fields", [{"variant": "extraction"}, {"depth": "latter_half"}, {"depth": [1, 3]}], ids=str)
def test_options(family, fields, reentrant):
    plain = step(make(family, "never", None, "fused", **fields), family)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # layers that have no gradient are not checkpointed
        warnings.filterwarnings("ignore", "labels cover every token")  # of the shortest text they do
        sparing = step(make(family, "after", reentrant, "fused", **fields), family)
    assert_spared(sparing, plain)


@pytest.mark.parametrize("reentrant", [True, False])
def test_with_the_least_memory(reentrant):
    plain = step(make("llama", "never", None, "fused"), "llama")
    model = make("llama", "after", reentrant, "fused")
    model.memory = "min"
    assert_spared(step(model, "llama"), plain)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("depth", ["all", "latter_half"])
def test_trained_linears_inside_checkpointed_layers(depth, reentrant):
    peft = pytest.importorskip("peft")
    results = []
    for when in ("never", "after"):
        model = make("llama", when, reentrant, "fused", depth=depth)
        torch.manual_seed(1)
        peft.inject_adapter_in_model(
            peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False), model.base
        )
        model.double()
        for name, p in model.base.named_parameters():
            p.requires_grad_("lora_" in name)
        results.append(step(model, "llama"))
    assert_spared(results[1], results[0])


def test_a_checkpointed_layer_keeps_one_row():
    """The sum in front of each layer, and behind the last one the rows of its norm."""
    model = make("llama", "after", False, "fused")
    lengths = (50, 40)
    rows = sum(lengths) + len(lengths)
    kept = step(model, "llama", lengths)[0]
    logits = len(lengths) * max(lengths) // 2 * 61 * 8
    tables = 2 * rows * 4 * 4
    assert kept <= 1.1 * (rows * 8 * (4 * 16 + 16 + 1) + logits + tables)


def test_it_can_be_switched_off_and_acts_in_training_only():
    model = make("llama", "never", None, "fused")
    plain = step(model, "llama")[0]
    assert model.supports_gradient_checkpointing
    assert not model.is_gradient_checkpointing
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    assert model.is_activation_checkpointing
    assert step(model, "llama")[0] < plain
    assert step(model.eval(), "llama")[0] >= plain
    model.train().gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing
    assert step(model, "llama")[0] == plain


def test_every_other_layer():
    model = make("llama", "never", None, "fused")
    if not hasattr(model.base, "activation_checkpointing_enable"):
        pytest.skip("this transformers checkpoints every layer")
    plain = step(model, "llama")
    model.activation_checkpointing_enable(every_n_layers=2)
    half = step(model, "llama")
    assert_spared(half, plain)
    model.activation_checkpointing_enable()
    assert step(model, "llama")[0] < half[0]


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"use_reentrant": False}, None], ids=str)
def test_a_trainer_checkpoints(tmp_path, options):
    """transformers' own Trainer ends at the same vectors, with and without."""
    torch.manual_seed(0)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(2, 61, (8, 5))]
    ends = []
    for checkpointing in (False, True):
        model = get_capt_model(make_base("llama", torch.float32), CaptConfig())
        seen = []
        model.base.lm_head.register_forward_hook(lambda *_, m=model, s=seen: s.append(m.is_gradient_checkpointing))
        arguments = TrainingArguments(
            tmp_path,
            gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs=options if checkpointing else None,
            max_steps=3,
            per_device_train_batch_size=4,
            learning_rate=0.1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
        )
        Trainer(model, arguments, train_dataset=rows).train()
        assert seen == [checkpointing] * 3
        ends.append(model.adapters["default"].capsules.vectors.detach())
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-6, atol=1e-6)
    assert ends[0].abs().max() > 0.1


def test_a_loss_without_a_gradient_raises():
    model = get_capt_model(make_base("llama", torch.float32), CaptConfig(task=False)).train()
    model.gradient_checkpointing_enable()
    ids, _ = batch_of((4, 4))
    with pytest.raises(RuntimeError, match="does not require grad"):
        model(input_ids=ids, labels=ids).loss.backward()
