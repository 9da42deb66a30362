"""P-Tuning v2 on both backbones of every family, and against PEFT's where PEFT has it."""

from __future__ import annotations

import pytest
import torch
from transformers import BertForSequenceClassification, LlamaConfig, LlamaForCausalLM, LlamaModel, T5EncoderModel

from capt.methods import PrefixModel

from .naive import SMALL, make_base

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "t5", "bert"]
LENGTHS = torch.tensor([9, 1, 5])


def batch(side="right"):
    torch.manual_seed(3)
    place = torch.arange(9)
    mask = (place < LENGTHS[:, None] if side == "right" else place >= 9 - LENGTHS[:, None]).long()
    return {"input_ids": torch.randint(3, 40, mask.shape), "attention_mask": mask}


def stack(family, dtype=torch.float64):
    """The base without its language-model head, T5's without its decoder."""
    base = make_base(family, dtype)
    return T5EncoderModel(base.config).to(dtype).eval() if family == "t5" else base.base_model


def wrapped(family, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return PrefixModel(stack(family, dtype), 4, **options).to(dtype).eval()


def run(model, inputs, backend="fused"):
    """The states of real tokens, and the gradients of keys and values."""
    model.backend = backend
    states = model(**inputs).last_hidden_state
    assert not states[inputs["attention_mask"] == 0].any()
    weights = torch.linspace(0.5, 1.5, states.shape[-1], dtype=states.dtype)
    grads = torch.autograd.grad((states.square() * weights).sum(), (model.keys, model.values))
    return [states[inputs["attention_mask"] == 1].detach(), *grads]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_equals_reference(family, side):
    model = wrapped(family)
    for got, want in zip(run(model, batch(side)), run(model, batch(side), "reference"), strict=True):
        assert (got - want).abs().max() <= 5e-6 * want.abs().max()
        if family not in ("mistral", "qwen2"):  # whose windows slide past the prefix
            assert want.abs().amax(-1).min() > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_whose_own_attention_wants_another_mask(family):
    """An eager base's mask is added to scores."""
    model = wrapped(family)
    want = run(model, batch(), "reference")
    model.base.set_attn_implementation("eager")
    for got, exact in zip(run(model, batch(), "reference"), want, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_positions_follow_the_prefix(family):
    """Of embeddings that hold their positions: as many are left as the prefix has not taken."""
    model, ids = wrapped(family), torch.arange(3, 8)[None]
    seen = []
    model.base.embeddings.position_embeddings.register_forward_hook(lambda module, given, out: seen.append(given[0]))
    model(input_ids=ids)
    first = 2 if family == "roberta" else 0  # behind the padding token's id, 1
    assert seen[0].flatten().tolist() == [first + 4 + i for i in range(5)]
    room = model.base.config.max_position_embeddings - first - 4
    model(input_ids=torch.full((1, room), 5))
    with pytest.raises(ValueError, match=f"a sequence of {room + 1} tokens and 4 prefix rows wants {room + 5}"):
        model(input_ids=torch.full((1, room + 1), 5))


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {"token_type_ids": torch.zeros(3, 9)}, "token_type_ids given to LlamaModel"),
        ("bert", {"token_type_ids": torch.zeros(3, 8)}, r"token_type_ids must have shape \[B, T\] = \(3, 9\)"),
        ("llama", {"decoder_input_ids": torch.zeros(3, 2)}, "decoder_input_ids given to LlamaModel"),
    ],
    ids=["token types", "their shape", "a decoder's"],
)
def test_inputs_that_do_not_fit(family, change, message):
    with pytest.raises(ValueError, match=message):
        wrapped(family)(**batch(), **change)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_text_equals_itself_alone(family):
    model, inputs = wrapped(family), batch("left")
    together = model(**inputs).last_hidden_state[2, -5:]
    alone = model(input_ids=inputs["input_ids"][2:, -5:]).last_hidden_state[0]
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("memory", ["full", "min"])
def test_checkpointing_and_memory(memory):
    model = wrapped("llama").train()
    want = run(model, batch())
    model.memory = memory
    model.gradient_checkpointing_enable()
    for got, exact in zip(run(model, batch()), want, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-12)
    model.memory = "full"
    with pytest.raises(NotImplementedError, match="the fused backbone has both"):
        run(model, batch(), "reference")


def test_equals_peft():
    """PEFT puts the same keys and values into a cache in front of the text."""
    peft = pytest.importorskip("peft")
    model = wrapped("llama", torch.float32, init_std=0.5)
    tokens = model.keys.shape[1]
    base = model.unload()
    try:
        other = peft.get_peft_model(
            base, peft.PrefixTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=tokens)
        ).eval()
        # [tokens, layers, keys and values, heads, size]
        flat = torch.stack([model.keys, model.values], 1).permute(2, 0, 1, 3, 4).reshape(tokens, -1)
        with torch.no_grad():
            other.prompt_encoder["default"].embedding.weight.copy_(flat)
        want = other(**batch()).last_hidden_state
    except ValueError as error:
        pytest.skip(f"PEFT cannot prefix-tune on this transformers: {error}")
    real = batch()["attention_mask"] == 1
    for backend in ("fused", "reference"):
        model.backend = backend
        torch.testing.assert_close(model(**batch()).last_hidden_state[real], want[real], rtol=1e-4, atol=1e-5)


def test_tasks():
    config = stack("bert").config
    config.num_labels = 3
    labels = torch.tensor([0, 2, 1])
    model = PrefixModel(BertForSequenceClassification(config), 3)
    out = model.eval()(**batch(), labels=labels)
    assert out.logits.shape == (3, 3)
    out.loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert trained == {"keys", "values", "head.weight", "head.bias"}
    causal = LlamaForCausalLM(stack("llama").config)
    with pytest.raises(ValueError, match="a text of padding alone has no row to classify"):
        model(input_ids=torch.ones(1, 2).long(), attention_mask=torch.zeros(1, 2))
    words = PrefixModel(causal, 3, task_type="SEQ_CLS", label_words=[5, 6])
    assert words(**batch()).logits.shape == (3, 2)
    model = PrefixModel(causal, 3).eval()
    ids, mask = batch().values()
    assert model(input_ids=ids, attention_mask=mask, labels=torch.where(mask == 1, ids, -100)).loss.isfinite()
    with pytest.raises(ValueError, match=r"labels must have shape \[B, T\]"):
        model(input_ids=ids, attention_mask=mask, labels=ids[:, 1:])


def test_generation():
    """T5's decoder writes from the prefixed encoder, as a forward sees it; a decoder refuses."""
    model = PrefixModel(make_base("t5", torch.float32), 3).eval()
    ids, mask = batch().values()
    written = model.generate(ids, mask, max_new_tokens=4, do_sample=False)
    logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=written[:, :-1]).logits
    for row, text in zip(logits.argmax(-1), written[:, 1:], strict=True):
        ended = (text == 1).nonzero()
        stop = int(ended[0]) + 1 if len(ended) else len(text)
        assert torch.equal(row[:stop], text[:stop])
    with pytest.raises(NotImplementedError, match="would have to stand in the cache"):
        PrefixModel(make_base("llama", torch.float32), 3).generate(ids, mask)


def test_where_the_prefix_lies():
    """As capsules do: with storage though the base has none, and as wide as an fp64 base."""
    with torch.device("meta"):
        base = LlamaModel(LlamaConfig(**SMALL))
    assert PrefixModel(base, 2).keys.device.type == "cpu"
    assert PrefixModel(make_base("llama", torch.float64), 2).keys.dtype == torch.float64
    assert PrefixModel(make_base("llama", torch.bfloat16), 2).keys.dtype == torch.float32


def test_the_base_is_given_back():
    base = stack("llama", torch.float32)
    want, implementation = base(**batch()).last_hidden_state, base.config._attn_implementation
    model = PrefixModel(base, 3)
    run(model, batch(), "reference")
    assert not any(p.requires_grad for p in base.parameters())
    assert model.unload() is base
    assert all(p.requires_grad for p in base.parameters())
    assert base.config._attn_implementation == implementation
    assert torch.equal(base(**batch()).last_hidden_state, want)


@pytest.mark.parametrize("length", [0, -1, 2.0, True])
def test_wrong_lengths(length):
    with pytest.raises(ValueError, match="length must be a positive int"):
        PrefixModel(stack("llama", torch.float32), length)
    model = PrefixModel(stack("llama", torch.float32), 2)
    for name in ("backend", "memory"):
        with pytest.raises(ValueError, match=f"{name} must be one of"):
            setattr(model, name, "none")
