"""Attention by groups of rows, against q and k taken from the base's own projections and all the rest by hand."""

import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from capt.analysis import ROLES, Groups, attention_of, average_attention, observing
from capt.analysis.moments import Moments
from capt.runner import Runner

from .naive import FAMILIES, make_base
from .small import wrapped

ROTARY_IN_FP32 = {"atol": 1e-7, "rtol": 1e-6}  # transformers' tables, whatever the base's dtype
ROLE = {name: i for i, name in enumerate(ROLES)}


def measured(model, texts, batch_size=2):
    """The averages of a wrapped base, its groups and its capsules."""
    capsules = model.adapters["default"].capsules
    groups = Groups(texts, capsules.config.slots, capsules.config.lead)
    return average_attention(Runner(model.base), capsules, texts, groups, batch_size), groups, capsules


def rotated(x):
    """Rotary positions 0..L-1 at base 10,000 on ``[H, L, d]``, by complex numbers."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles).to(
        torch.cdouble
    )
    return torch.cat([turned.real, turned.imag], -1)


def by_hand(model, text):
    """``(logits, probabilities) [H, L, L]`` of each layer, from nothing but what the projections make of the rows."""
    projected = {"q": [], "k": []}
    stack = model._backbone.stack
    t5 = model.base.config.model_type == "t5"
    attentions = [b.layer[0].SelfAttention for b in stack.block] if t5 else [x.self_attn for x in stack.layers]
    handles = [
        getattr(attention, name if t5 else f"{name}_proj").register_forward_hook(
            lambda module, args, out, name=name: projected[name].append(out[0])
        )
        for attention in attentions
        for name in ("q", "k")
    ]
    runner = Runner(model.base)
    runner.backend = "reference"
    runner.run(model.adapters["default"].capsules, torch.tensor([text.ids]), None, None)
    for handle in handles:
        handle.remove()
    layers = []
    for q, k in zip(projected["q"], projected["k"], strict=True):
        q, k = (x.unflatten(-1, (-1, 4)).transpose(0, 1) for x in (q, k))
        n = q.shape[1]
        if t5:
            logits = torch.stack([q[h] @ k[h].T for h in range(4)]) + attentions[0].compute_bias(n, n)[0]
            layers.append((logits, logits.softmax(-1)))
        else:
            q, k = rotated(q), rotated(k)
            logits = torch.stack([q[h] @ k[h // 2].T / math.sqrt(4) for h in range(4)])
            later = torch.ones(n, n).triu(1).bool()
            layers.append((logits.masked_fill(later, torch.nan), logits.masked_fill(later, -torch.inf).softmax(-1)))
    return layers


@pytest.mark.parametrize("family", ["llama", "t5"])
@pytest.mark.parametrize("fields", [{}, {"lead": 1, "instance": False}], ids=["capt", "deep-lead"])
def test_tables_equal_a_computation_by_hand(texts, family, fields):
    model = wrapped(family, **fields)
    averages, groups, _ = measured(model, texts)
    place = fields.get("lead", 0)
    shares, slot_share, logits, field_share = [], [], [], []
    with torch.no_grad():
        for text in texts:
            layers = by_hand(model, text)
            n = len(text.ids) + 1
            others = [i for i in range(n) if i != place]
            structural = [row for row, kind in zip(others, text.kinds, strict=True) if kind == "structural"]
            texts_own = [row for row, kind in zip(others, text.kinds, strict=True) if kind == "text"]
            p = torch.stack([p for _, p in layers])
            a = torch.stack([a for a, _ in layers])
            shares.append(p[:, :, others, place].mean(-1))
            slot_share.append(p[:, :, place, structural].sum(-1))
            logits.append(a[:, :, texts_own][..., structural].flatten(2).nanmean(-1))
            premise, hypothesis = (
                [row for row, at in zip(others, text.places, strict=True) if at.label == label]
                for label in ("{premise}", "{hypothesis}")
            )
            field_share.append(p[:, :, hypothesis][..., premise].mean((-2, -1)))
    probabilities = averages["probabilities"]
    columns = len(ROLES) + groups.labels.index("{hypothesis}"), len(ROLES) + groups.labels.index("{premise}")
    for moments, samples, at in (
        (probabilities, shares, (ROLE["tokens"], ROLE["slot"])),
        (probabilities, slot_share, (ROLE["slot"], ROLE["structural"])),
        (averages["logits"], logits, (ROLE["text"], ROLE["structural"])),
        (probabilities, field_share, columns),
    ):
        samples = torch.stack(samples)
        for part, expected in (
            (moments.heads, samples),
            (moments.layers, samples.mean(2)),
            (moments.whole, samples.mean((1, 2))),
        ):
            torch.testing.assert_close(part.mean[(..., *at)], expected.mean(0), **ROTARY_IN_FP32)
            error = expected.std(0) / math.sqrt(len(texts))
            torch.testing.assert_close(part.standard_error[(..., *at)], error, **ROTARY_IN_FP32)


@pytest.mark.parametrize(
    "fields", [None, {"variant": "prepending", "lead": 2}, {"depth": "latter_half"}, {"length": 3}]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_each_row_gives_adds_up_to_one(texts, family, fields):
    model = wrapped(family, **(fields or {}))
    capsules = None if fields is None else model.adapters["default"].capsules
    slots, lead = (0, 0) if capsules is None else (capsules.config.slots, capsules.config.lead)
    averages = average_attention(Runner(model.base), capsules, texts, Groups(texts, slots, lead), 2)
    own = ["slot", "structural", "text"] if slots else ["structural", "text"]
    for quantity in ("probabilities", "uniform"):
        heads = averages[quantity].heads.mean
        for query in (*own, "tokens", "first", "last"):
            given = heads[..., ROLE[query], [ROLE[name] for name in ("slot", "structural", "text")]].nansum(-1)
            has = ~heads[..., ROLE[query], ROLE["structural"]].isnan()  # layers in front of the first slot have none
            torch.testing.assert_close(given[has], torch.ones_like(given[has]))
            assert has[2:].all()
    whole = averages["probabilities"].whole.mean
    first = averages["probabilities"].first  # layers in front of it have no slot, and are no part of the whole
    layers = averages["probabilities"].layers.mean[first:, ROLE["tokens"], ROLE["text"]]
    torch.testing.assert_close(whole[ROLE["tokens"], ROLE["text"]], layers.mean())
    assert first == (2 if fields == {"depth": "latter_half"} else 0)
    assert whole[ROLE["special"]].isnan().all()
    assert not whole[[ROLE[name] for name in own]][:, [ROLE[name] for name in own]].isnan().any()


def test_the_bare_base_attends_as_transformers_says(texts):
    base = make_base("qwen3")
    averages = average_attention(Runner(base), None, texts, Groups(texts, 0, 0), 2)
    base.set_attn_implementation("eager")
    expected = []
    for text in texts:
        layers = base(input_ids=torch.tensor([text.ids]), output_attentions=True).attentions
        expected.append(torch.stack([p[0, :, :, 0].mean(-1) for p in layers]))
    found = averages["probabilities"].heads.mean[..., ROLE["tokens"], ROLE["first"]]
    torch.testing.assert_close(found, torch.stack(expected).mean(0))


def test_batches_and_padding_change_nothing(texts):
    model = wrapped("mistral")
    alone, padded = (measured(model, texts, batch_size)[0] for batch_size in (1, 3))
    for quantity in alone:
        torch.testing.assert_close(
            alone[quantity].heads.mean, padded[quantity].heads.mean, equal_nan=True, atol=1e-12, rtol=1e-9
        )


def test_one_text_token_by_token(texts):
    model = wrapped("llama", lead=1)
    probabilities, logits, labels = attention_of(Runner(model.base), model.adapters["default"].capsules, texts[0])
    with torch.no_grad():
        expected = by_hand(model, texts[0])
    assert labels[:3] == ["rte", "[slot]", "sentence1"]
    torch.testing.assert_close(
        logits, torch.stack([a for a, _ in expected]).mean((0, 1)), equal_nan=True, **ROTARY_IN_FP32
    )
    seen = torch.stack([p for _, p in expected]).mean((0, 1))
    torch.testing.assert_close(probabilities.nan_to_num(), seen, **ROTARY_IN_FP32)
    assert torch.equal(probabilities.isnan(), logits.isnan())


# --- observing


@pytest.mark.parametrize("family", ["llama", "t5", "bert"])
def test_observing_changes_no_output_and_is_undone(texts, family):
    base = make_base(family)
    stack = Runner(base).reference.stack
    before, ids = stack.config._attn_implementation, torch.tensor([texts[0].ids])
    expected = stack(input_ids=ids).last_hidden_state
    calls = []
    with observing(stack, lambda *seen: calls.append(len(seen))):
        torch.testing.assert_close(stack(input_ids=ids).last_hidden_state, expected)
    assert calls == [3] * 4
    assert stack.config._attn_implementation == before
    assert torch.equal(stack(input_ids=ids).last_hidden_state, expected)


def test_observing_is_undone_by_an_error_too():
    stack = Runner(make_base("llama")).reference.stack
    before = stack.config._attn_implementation
    with pytest.raises(ZeroDivisionError), observing(stack, print):
        _ = 1 / 0
    assert stack.config._attn_implementation == before


def test_a_base_that_cannot_be_observed_says_so(monkeypatch):
    stack = Runner(make_base("llama")).reference.stack
    monkeypatch.setattr(stack, "set_attn_implementation", lambda name: None)
    with pytest.raises(NotImplementedError, match="AttentionInterface"), observing(stack, print):
        pass


class _Alive(TorchDispatchMode):
    """Counts tensors of ``size`` elements that are alive, by the layer that made them, after every operation."""

    def __init__(self, size):
        super().__init__()
        self.size, self.layer, self.most_layers, self.made = size, 0, 0, 0
        self.alive = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.alive = [(tensor, layer) for tensor, layer in self.alive if tensor() is not None]
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.numel() == self.size:
                self.alive.append((weakref.ref(tensor), self.layer))
                self.made += 1
        self.most_layers = max(self.most_layers, len({layer for _, layer in self.alive}))
        return out


@pytest.mark.parametrize("family", ["llama", "t5", "bert"])
def test_no_more_than_one_layers_matrix_is_alive(texts, family):
    model = wrapped(family)
    rows = max(len(text.ids) for text in texts) + 1
    mode = _Alive(len(texts) * 4 * rows * rows)
    layers = [m for m in Runner(model.base).reference.stack.modules() if type(m).__name__.endswith(("Layer", "Block"))]
    handles = [
        layer.register_forward_pre_hook(lambda module, args, i=i: setattr(mode, "layer", i))
        for i, layer in enumerate(layers)
    ]
    assert len(handles) == 4
    with mode:
        measured(model, texts, batch_size=3)
    assert mode.made >= 4 * 3
    assert mode.most_layers == 1


def test_moments_of_batches_are_those_of_the_whole():
    samples = torch.randn(23, 4, 3).double() + 1e6
    samples[torch.rand(23, 4, 3) < 0.3] = torch.nan
    samples[:, 0, 0], samples[1:, 0, 1] = torch.nan, torch.nan
    samples[0, 0, 1] = 5.0
    moments = Moments()
    for batch in samples.split(5):
        moments.add(batch)
    count = (~samples.isnan()).sum(0)
    spread = torch.where(samples.isnan(), torch.nan, (samples - samples.nanmean(0)).square()).nansum(0)
    torch.testing.assert_close(moments.mean, samples.nanmean(0), equal_nan=True)
    assert moments.mean[0, 0].isnan()
    assert moments.standard_error[0, :2].isnan().all()
    several = count > 1
    expected = (spread / (count - 1) / count).sqrt()
    torch.testing.assert_close(moments.standard_error[several], expected[several])
