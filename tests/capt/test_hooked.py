"""Causal decoders of no family here: their own forward, with slots written in front of their layers."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma2ForSequenceClassification,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from capt import CaptConfig, CaptModel, get_capt_model
from capt.backbones import BACKBONES, HookedBackbone
from capt.methods import PrefixModel

from .naive import SMALL, batch_of, make_base, randomise
from .test_packed_parity import OPTIONS as PARITY

NEOX = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
FAMILIES = {
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SMALL)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**NEOX)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=2)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SMALL, head_dim=4)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=61, n_embd=16, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=1)
    ),
    "bloom": lambda: BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=16, n_layer=3, n_head=4)),
}


def wrapped(family, **fields):
    torch.manual_seed(0)
    base = FAMILIES[family]().eval()
    base.generation_config.eos_token_id = None
    base.generation_config.pad_token_id = 0
    model = get_capt_model(base, CaptConfig(**fields)).eval()
    randomise(model)
    return model


#: Those of the packed backbones that prompt the first layer.
OPTIONS = {name: config for name, config in PARITY.items() if config.prompted_layers(4)[0] == 0} | {
    "paper": CaptConfig(),
    "listed": CaptConfig(depth=[0, 2]),
}


@pytest.mark.parametrize("side", ["left", "holes"])
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_backbone_that_was_written_for_a_family(monkeypatch, name, side):
    ids, mask = batch_of((5, 1, 12, 0, 9), side)
    labels = ids.masked_fill((mask == 0) | (torch.arange(ids.shape[1]) % 3 == 0), -100)
    results = []
    for hooked in (False, True):
        if hooked:
            monkeypatch.delitem(BACKBONES, "llama")
        model = get_capt_model(make_base("llama"), OPTIONS[name]).eval().double()
        assert isinstance(model._backbone, HookedBackbone) == hooked
        torch.manual_seed(1)
        randomise(model)
        model.backend = "reference"
        out = model(input_ids=ids, attention_mask=mask, labels=labels)
        grads = torch.autograd.grad(out.loss, [p for p in model.parameters() if p.requires_grad])
        results.append((out.logits, out.loss, *grads))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


# Where Gemma scales embeddings depends on transformers' version.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma"])
def test_a_vector_in_front_of_the_first_layer_is_an_embedding(family):
    """A slot without a mean in the first layer alone is prompt tuning, which needs no wrapper."""
    model = wrapped(family, depth="input", instance=False, length=2)
    prompt = model.adapters["default"].capsules.vectors[0].detach()
    if family == "gpt2":  # adds positions to them
        prompt = prompt - model.base.transformer.wpe.weight[:2]
    elif family == "bloom":  # norms them, which has no inverse
        norm = model.base.transformer.word_embeddings_layernorm
        model.adapters["default"].capsules.vectors.data[0] = norm(prompt)
    ids, _ = batch_of((6, 6), "left")
    embeds = torch.cat([prompt.expand(2, -1, -1), model.get_input_embeddings()(ids)], 1)
    want = model.base(inputs_embeds=embeds).logits[:, 2:]
    torch.testing.assert_close(model(input_ids=ids).logits, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"lead": 1, "length": 2}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_and_generation(family, fields):
    model = wrapped(family, **fields)
    ids, mask = batch_of((4, 9), "left")
    together = model(input_ids=ids, attention_mask=mask).logits
    alone = model(input_ids=ids[:1, -4:]).logits
    torch.testing.assert_close(together[:1, -4:], alone, rtol=1e-5, atol=1e-5)
    cached = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert torch.equal(
        cached, model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, use_cache=False)
    )
    whole = torch.cat([mask, mask.new_ones(2, 4)], 1)
    prompt = torch.cat([mask, mask.new_zeros(2, 4)], 1)
    logits = model(input_ids=cached, attention_mask=whole, pool_mask=prompt).logits[:, -5:-1]
    assert torch.equal(logits.argmax(-1), cached[:, -4:])


def test_an_adapter_is_saved_and_found_again(tmp_path):
    model = wrapped("phi3", label_words=[3, 4])
    ids, mask = batch_of((4, 9), "left")
    want = model(input_ids=ids, attention_mask=mask).logits
    model.save_pretrained(tmp_path)
    again = CaptModel.from_pretrained(model.unload(), tmp_path).eval()
    assert torch.equal(again(input_ids=ids, attention_mask=mask).logits, want)


def test_training_warns_of_the_slower_backend():
    model = wrapped("gpt2").train()
    ids, _ = batch_of((4, 4), "left")
    with pytest.warns(
        UserWarning, match="slower reference backend: no packed backbone is written for model_type 'gpt2'"
    ):
        model(input_ids=ids, labels=ids.masked_fill(torch.arange(4) < 2, -100)).loss.backward()
    vectors = model.adapters["default"].capsules.vectors
    assert (vectors.grad.flatten(1).norm(dim=1) > 0).all()
    assert all(p.grad is None for p in model.base.parameters())


def test_what_is_refused():
    model = wrapped("phi3")
    ids, _ = batch_of((4, 4), "left")
    with pytest.raises(NotImplementedError, match="'fused' cannot run this base: no packed backbone is written"):
        model.backend = "fused"
    with pytest.raises(NotImplementedError, match="runs with slots from its first layer on, got depth 'latter_half'"):
        wrapped("phi3", depth="latter_half")
    with pytest.raises(NotImplementedError, match="counts positions itself"):
        wrapped("phi3", positions="keep")
    with pytest.raises(NotImplementedError, match="P-Tuning v2 is not written for bases of model_type 'phi3'"):
        PrefixModel(model.base)
    with pytest.raises(NotImplementedError, match="'phi3' again without their slots"):
        model.gradient_checkpointing_enable()
    model.train().base.gradient_checkpointing_enable()
    model.backend = "reference"
    with pytest.raises(NotImplementedError, match="'phi3' again without their slots"):
        model(input_ids=ids)
    with pytest.raises(NotImplementedError, match="model_type 'opt' are not supported"):
        get_capt_model(
            OPTForCausalLM(OPTConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)),
            CaptConfig(),
        )


@pytest.mark.parametrize(
    "base",
    [
        lambda: GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=8.0)),
        lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=4)),
    ],
    ids=["scaled", "capped"],
)
def test_logits_that_are_no_plain_product(base):
    with pytest.raises(NotImplementedError, match="changes its logits behind its language-model head"):
        get_capt_model(base(), CaptConfig())
    base = Gemma2ForSequenceClassification(Gemma2Config(**SMALL, head_dim=4, num_labels=2)).eval()
    assert get_capt_model(base, CaptConfig())(input_ids=torch.ones(2, 3, dtype=torch.long)).logits.shape == (2, 2)
