"""Training with dropout on packed rows: each of the base's own where the base has it, and gradients of its masks."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaModel,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5EncoderModel,
)
from transformers.masking_utils import sdpa_mask

from capt import CaptConfig, get_capt_model
from capt_kernels.attention import dropout

from .naive import BERT_SMALL, SMALL, T5_SMALL, batch_of, randomise

P = 0.3
T5 = T5_SMALL | {"dropout_rate": P}
BERT = BERT_SMALL | {"hidden_dropout_prob": P, "attention_probs_dropout_prob": P}
BASES = {
    "t5": lambda: T5EncoderModel(T5Config(**T5)),
    "flan-t5": lambda: T5EncoderModel(T5Config(**T5, feed_forward_proj="gated-gelu")),
    "bert": lambda: BertModel(BertConfig(**BERT)),
    "roberta": lambda: RobertaModel(RobertaConfig(**BERT | {"pad_token_id": 1}), add_pooling_layer=False),
    "llama": lambda: LlamaModel(LlamaConfig(**SMALL, attention_dropout=P)),
}


def make(family, dtype=torch.float64, **fields):
    torch.manual_seed(0)
    base = BASES[family]().to(dtype)
    for p in base.parameters():
        p.data += 0.2 * torch.randn_like(p)
    model = get_capt_model(base, CaptConfig(**fields)).train()
    if dtype == torch.float64:
        model = model.double()
    randomise(model)
    model.backend = "fused"
    return model


def step(model, run=None, lengths=(5, 9, 2), seed=3):
    """States, and the gradients of some weighted sum of them, under one seed."""
    torch.manual_seed(1)
    ids, mask = batch_of(lengths, "left")
    torch.manual_seed(seed)
    states = (model if run is None else run)(input_ids=ids, attention_mask=mask).last_hidden_state
    torch.manual_seed(9)
    model.zero_grad()
    (states * torch.randn(states.shape, dtype=states.dtype)).sum().backward()
    return states.detach(), *(p.grad for p in model.parameters() if p.requires_grad)


def assert_equal(got, want, tolerance=1e-9):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item())


@pytest.fixture
def told(monkeypatch):
    """Every dropout told what to do, so that packed and padded rows have the same.

    A module of the base's multiplies with a pattern of its own over the columns; attention on padded rows, through
    transformers' AttentionInterface, has the mask of the op for that layer's seed.
    """
    seeds, padded = itertools.count(), itertools.count()

    def drop(module, rows):
        columns = torch.arange(rows.shape[-1], dtype=rows.dtype)
        return rows * (1 + P * torch.sin(columns + module.number)) if module.training else rows

    def attention(module, query, key, value, attention_mask, scaling=1.0, dropout=0.0, position_bias=None, **_):
        assert dropout == P
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        scores = query @ key.transpose(2, 3) * scaling
        scores = scores if position_bias is None else scores + position_bias
        weights = scores.masked_fill(~attention_mask, -torch.inf).softmax(-1)
        factors, row = torch.zeros_like(weights), 0
        seed = torch.tensor(next(padded))
        for b, n in enumerate(attention_mask[:, 0, -1].sum(-1).tolist()):
            factors[b, :, :n, :n] = kept(seed, P, query.shape[1], row, n, n) / (1 - P)
            row += n
        return ((weights * factors) @ value).transpose(1, 2), None

    kept = dropout.kept
    monkeypatch.setattr(nn.Dropout, "forward", drop)
    monkeypatch.setattr("capt_kernels.attention.seed_of", lambda seed, device: torch.tensor(next(seeds)))
    monkeypatch.setitem(AttentionInterface._global_mapping, "told", attention)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "told", sdpa_mask)
    return seeds, padded


@pytest.mark.parametrize("fields", [{}, {"lead": 1, "depth": "latter_half"}], ids=["all", "latter half"])
@pytest.mark.parametrize("family", BASES)
def test_every_dropout_is_where_the_base_has_it(family, fields, told):
    results = []
    for backend in ("fused", "reference"):
        model = make(family, **fields)
        model.base.set_attn_implementation("told")
        for number, module in enumerate(m for m in model.base.modules() if isinstance(m, nn.Dropout)):
            module.number = number
        model.backend = backend
        results.append(step(model))
    assert [next(count) for count in told] == [4, 4]
    assert_equal(*results, tolerance=5e-6)


@pytest.mark.parametrize("family", BASES)
def test_training_is_fused_and_seeded(family):
    model = make(family)
    model.backend = "auto"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one, again, other = (step(model, seed=s) for s in (3, 3, 4))
    assert model._runner.choose("shift") is model._runner.packed
    assert all(map(torch.equal, one, again))
    assert not torch.equal(one[0], other[0])
    assert not torch.equal(one[0], step(model.eval())[0])


@pytest.mark.parametrize("family", BASES)
def test_attention_alone_drops_out_in_training_only(family):
    model = make(family)
    for name, module in model.base.named_modules():
        if isinstance(module, nn.Dropout) and not name.endswith("attention.self.dropout"):
            module.p = 0.0
    one, other = (step(model, seed=s)[0] for s in (3, 4))
    assert not torch.equal(one, other)
    one, other = (step(model.eval(), seed=s)[0] for s in (3, 4))
    assert torch.equal(one, other)


@pytest.mark.parametrize("family", BASES)
def test_memory_min_has_the_same_masks_twice(family):
    model = make(family)
    plain = step(model)
    model.memory = "min"
    assert_equal(step(model), plain)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", BASES)
def test_checkpointed_layers_have_the_same_masks_twice(family, reentrant):
    model = make(family)
    plain = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for memory in ("full", "min"):
        model.memory = memory
        assert_equal(step(model), plain)


@pytest.mark.parametrize("memory", ["full", "min"])
@pytest.mark.parametrize("family", ["t5", "flan-t5", "bert"])
def test_gradients_are_those_of_the_forwards_masks(family, memory):
    """Against a central difference: one seed is one function."""
    model = make(family)
    model.memory = memory
    vectors = model.adapters["default"].capsules.vectors
    torch.manual_seed(5)
    direction = torch.randn_like(vectors)

    def loss(shift):
        with torch.no_grad():
            vectors.add_(shift * direction)
            torch.manual_seed(3)
            value = model(input_ids=ids, attention_mask=mask).last_hidden_state[..., :5].square().sum()
            vectors.sub_(shift * direction)
        return value

    torch.manual_seed(1)
    ids, mask = batch_of((5, 9, 2), "left")
    torch.manual_seed(3)
    model(input_ids=ids, attention_mask=mask).last_hidden_state[..., :5].square().sum().backward()
    slope = (vectors.grad * direction).sum()
    # transformers norms T5 in fp32, whose rounding a difference magnifies; the fused norm has the dtype of the rows.
    want = (loss(1e-5) - loss(-1e-5)) / 2e-5
    assert abs(slope) > 1e-2
    assert abs(slope - want) < 1e-5 * abs(slope)


@pytest.mark.parametrize(("family", "memory"), [("t5", "full"), ("bert", "min")])
def test_compiled_models_draw_anew(family, memory):
    torch._dynamo.reset()
    model = make(family)
    model.memory = memory
    compiled = torch.compile(model, backend="aot_eager")
    one, again, other = (step(model, compiled, seed=s) for s in (3, 3, 4))
    assert all(map(torch.equal, one, again))
    assert not torch.equal(one[0], other[0])
    assert_equal(one, step(model))
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["t5", "flan-t5", "bert"])
def test_autocast(family):
    """The masks are those of fp32, and gradients those of the masks."""
    model = make(family, torch.float32)
    exact = step(model)

    def run(**inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return model(**inputs)

    plain = step(model, run)
    model.memory = "min"
    assert_equal(step(model, run), plain, 1e-6)
    for got, want, other in zip(plain, exact, step(model, run, seed=4), strict=True):
        assert (got.float() - want).norm() < 0.2 * want.norm()
        assert (other.float() - want).norm() > 0.5 * want.norm()
