"""The packed backbones equal the reference ones: outputs, losses and gradients, for every family and option."""

from __future__ import annotations

import pytest
import torch

from capt import CaptConfig, get_capt_model

from .naive import ENCODERS, FAMILIES, batch_of, make_base, randomise

#: transformers norms in fp32 whatever the dtype, so that fp64 agrees to fp32 rounding only.
TIGHT = 5e-6


def both(family, config, lengths=(5, 1, 12, 0, 9), side="left", dtype=torch.float64, base=None):
    """Outputs and gradients of a training forward under both backends."""
    labels = family not in ENCODERS
    model = get_capt_model(make_base(family, dtype) if base is None else base, config).eval()
    torch.manual_seed(1)
    randomise(model)
    ids, mask = batch_of(lengths, side)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if labels:
        inputs["labels"] = ids.masked_fill(mask == 0, -100)
    results = []
    for backend in ("fused", "reference"):
        model.backend = backend
        model.zero_grad()
        out = model(**inputs)
        states = out.logits if labels else out.last_hidden_state
        loss = out.loss if labels else (states * _weights(states)).square().sum()
        grads = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], materialize_grads=True)
        results.append((states, loss, *grads))
    return results


def _weights(states):
    """Some weights: the plain sum of squares of what a LayerNorm hands out would hardly depend on its input."""
    return torch.randn(states.shape, generator=torch.Generator().manual_seed(2), dtype=states.dtype)


def assert_equal(results, tolerance):
    for fused, reference in zip(*results, strict=True):
        scale = reference.abs().max()
        assert (fused - reference).abs().max() <= tolerance * max(scale, 1e-6)


@pytest.mark.parametrize("side", ["left", "right", "holes"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_families(family, side):
    assert_equal(both(family, CaptConfig(), side=side), TIGHT)
    assert_equal(both(family, CaptConfig(), side=side, dtype=torch.float32), 1e-5)


OPTIONS = {
    "lead": CaptConfig(lead=1),
    "lead, no first mean": CaptConfig(lead=1, first_mean=False),
    "lead past the end": CaptConfig(lead=3, length=2),
    "four slots": CaptConfig(length=4),
    "no instance": CaptConfig(instance=False, length=3),
    "prepending": CaptConfig(variant="prepending", length=2),
    "extraction": CaptConfig(variant="extraction"),
    "projection": CaptConfig(variant="projection", rank=3, lead=1),
    "input": CaptConfig(depth="input"),
    "latter half": CaptConfig(depth="latter_half"),
    "odd": CaptConfig(depth="odd"),
    "listed": CaptConfig(depth=[1, 3]),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_options(family, name):
    assert_equal(both(family, OPTIONS[name]), TIGHT)


LOW = [(name, torch.float32) for name in OPTIONS]
LOW += [(name, torch.bfloat16) for name in ("lead", "four slots", "projection")] + [("lead", torch.float16)]


@pytest.mark.parametrize(("name", "dtype"), LOW, ids=str)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_low_precision(family, name, dtype):
    """Fused may err at most twice as much against fp64 as the base's own layers do in the same dtype.

    By the root of the mean square: which of two low precisions has the largest single error is a matter of chance.
    """
    base = make_base(family, dtype).double()  # the very weights that the low precision holds
    truth = both(family, OPTIONS[name], base=base)[1]
    fused, plain = both(family, OPTIONS[name], base=make_base(family, dtype))
    least = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    for true, got, other in zip(truth, fused, plain, strict=True):
        error, usual = ((x.double() - true).square().mean().sqrt() for x in (got, other))
        assert error <= 2 * usual + least * true.abs().max()


@pytest.mark.parametrize("family", ["llama", "roberta"])
def test_positions_kept(family):
    assert_equal(both(family, CaptConfig(positions="keep", lead=1)), TIGHT)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 127, 513])
def test_lengths(length):
    for family in ("llama", "t5", "roberta"):
        assert_equal(both(family, CaptConfig(depth=[0, 3]), lengths=(length, 3)), TIGHT)


def test_what_makes_auto_fall_back_and_fused_raise():
    model = get_capt_model(make_base("t5"), CaptConfig()).double()
    for training in (True, False):
        assert model.train(training)._runner.choose("shift") is model._runner.packed
    with pytest.raises(NotImplementedError, match="positions='keep'"):
        get_capt_model(make_base("t5"), CaptConfig(positions="keep")).eval().backend = "fused"

    model = get_capt_model(make_base("llama"), CaptConfig()).double()
    seen = []
    handle = model.base.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
    with pytest.raises(NotImplementedError, match="a hook or another forward is registered on its LlamaDecoderLayer"):
        model.backend = "fused"
    model(input_ids=torch.ones(1, 3, dtype=torch.long))
    assert seen == [1]
    handle.remove()
    assert model._runner.choose("shift") is model._runner.packed
    model.base.config.hidden_act = "quick_gelu"
    with pytest.raises(NotImplementedError, match="activation 'quick_gelu' has no fused form"):
        model.backend = "fused"


def test_the_bases_own_linear_modules_are_called():
    """A hooked, quantised or LoRA-wrapped Linear goes on working."""
    model = get_capt_model(make_base("llama"), CaptConfig()).double().eval()
    called = []
    for name, module in model.base.named_modules():
        if name.endswith("_proj"):
            module.register_forward_hook(lambda *_, n=name: called.append(n))
    model.backend = "fused"
    model(input_ids=torch.ones(1, 3, dtype=torch.long))
    assert len(called) == 7 * 4
