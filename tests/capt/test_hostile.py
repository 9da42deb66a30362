"""Surroundings that make a wrapper compute something else without a word: autocast, hooks, quantised layers, inf."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from capt import CaptConfig, CaptModel, get_capt_model

from .naive import batch_of, make_base, randomise


def wrapped(family="llama", dtype=torch.float32, **fields):
    model = get_capt_model(make_base(family, dtype), CaptConfig(**fields)).eval()
    randomise(model)
    return model


@pytest.mark.parametrize("family", ["llama", "qwen3", "t5"])
@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_autocast(family, backend):
    """bf16 products around fp32 slots: as close to fp32 as bf16 allows, with an fp32 gradient."""
    model = wrapped(family, variant="projection" if family == "llama" else "addition", rank=3)
    ids, mask = batch_of((5, 9), "left")
    extra = {"decoder_input_ids": ids[:, :2]} if family == "t5" else {}
    want = model(input_ids=ids, attention_mask=mask, **extra).logits
    model.backend = backend
    with torch.autocast("cpu", torch.bfloat16):
        got = model(input_ids=ids, attention_mask=mask, **extra).logits
    got.float().square().mean().backward()
    assert model.adapters["default"].capsules.vectors.grad.dtype == torch.float32
    assert (got - want).abs().max() < 0.06 * want.abs().max()


@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_inference_mode(backend):
    model = wrapped()
    model.backend = backend
    ids, mask = batch_of((5, 9), "left")
    want = model(input_ids=ids, attention_mask=mask).logits
    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, want)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("variant", ["addition", "extraction"])
@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_a_sequence_that_overflows_stays_alone(backend, variant, bad):
    model = wrapped(variant=variant)
    model.backend = backend
    ids, mask = batch_of((5, 9), "left")
    embeds = model.base.get_input_embeddings()(ids)
    want = model(inputs_embeds=embeds[1:], attention_mask=mask[1:]).logits
    embeds = embeds.detach().clone()
    embeds[0, -1] = bad
    got = model(inputs_embeds=embeds, attention_mask=mask).logits[1:]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


class Int8Linear(nn.Module):
    """A stand-in for a quantised Linear: an int8 weight, and whatever activations come."""

    def __init__(self, linear):
        super().__init__()
        self.scale = linear.weight.abs().max() / 127
        self.weight = nn.Parameter((linear.weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype))


@pytest.mark.parametrize("family", ["llama", "t5", "flan-t5"])
def test_quantised_layers(family):
    base = make_base(family, torch.float32)
    stack = base.encoder if hasattr(base, "encoder") else base.model
    for module in list(stack.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, Int8Linear(child))
    model = get_capt_model(base, CaptConfig()).eval()
    randomise(model)
    ids, mask = batch_of((5, 9), "left")
    extra = {"decoder_input_ids": ids[:, :2]} if family != "llama" else {}
    model.backend = "fused"
    fused = model(input_ids=ids, attention_mask=mask, **extra).logits
    model.backend = "reference"
    reference = model(input_ids=ids, attention_mask=mask, **extra).logits
    assert (fused - reference).abs().max() <= 1e-5 * reference.abs().max()


def test_lora_on_the_same_base():
    peft = pytest.importorskip("peft")
    base = make_base("llama", torch.float32)
    lora = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model = get_capt_model(lora.base_model.model, CaptConfig()).eval()
    randomise(model)
    ids, mask = batch_of((5, 9), "left")
    results = []
    for backend in ("fused", "reference"):
        model.backend = backend
        results.append(model(input_ids=ids, attention_mask=mask).logits)
    assert (results[0] - results[1]).abs().max() <= 1e-5 * results[1].abs().max()
    with lora.disable_adapter():
        assert not torch.allclose(model(input_ids=ids, attention_mask=mask).logits, results[1])


def test_a_patched_forward_is_not_bypassed():
    model = wrapped()
    mlp = model.base.model.layers[0].mlp
    mlp.forward = lambda x: torch.zeros_like(x)
    assert model._runner.choose("shift") is model._runner.reference
    words = wrapped(label_words=[3, 4])
    seen = []
    words.base.lm_head.register_forward_hook(lambda *_: seen.append(1))
    words(input_ids=torch.ones(1, 3, dtype=torch.long))
    assert seen == [1]


@pytest.mark.parametrize("depth", ["all", "latter_half"])  # whose first layers have not a single row
@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_a_batch_of_padding_alone(backend, depth):
    model = wrapped(depth=depth).train()
    model.backend = backend
    ids, mask = torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long)
    assert model(input_ids=ids, attention_mask=mask).logits.shape == (2, 4, 61)
    assert model(input_ids=ids, attention_mask=mask, labels=ids - 100).loss.isnan()


@pytest.mark.parametrize("backend", ["reference", "fused"])
@pytest.mark.parametrize("family", ["llama", "t5", "bert"])
def test_a_batch_of_nothing_is_refused(family, backend):
    model = wrapped(family)
    model.backend = backend
    with pytest.raises(
        ValueError, match=r"input_ids must have shape \[B, T\] with at least one sequence, got \(0, 4\)"
    ):
        model(input_ids=torch.zeros(0, 4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"inputs_embeds must .* at least one sequence, got \(0, 4, 16\)"):
        model(inputs_embeds=torch.zeros(0, 4, 16))


def test_a_classifier_feeds_the_decoder_itself():
    model = wrapped("t5", label_words=[3, 4])
    ids = torch.ones(1, 3, dtype=torch.long)
    for context in (model.disable_adapter(), torch.enable_grad()):
        with context, pytest.raises(ValueError, match="SEQ_CLS feeds the decoder itself, got decoder_input_ids"):
            model(input_ids=ids, decoder_input_ids=ids)


def test_a_wrap_that_fails_leaves_the_base_trainable(tmp_path):
    base = make_base("llama", torch.float32)
    with pytest.raises(ValueError, match="does not fit a base"):
        get_capt_model(base, CaptConfig(depth=[99]))
    assert all(p.requires_grad for p in base.parameters())
    get_capt_model(make_base("llama", torch.float32), CaptConfig(length=2)).save_pretrained(tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(config.read_text().replace('"length": 2', '"length": 1'))
    with pytest.raises(ValueError, match="shape"):
        CaptModel.from_pretrained(base, tmp_path)
    assert all(p.requires_grad for p in base.parameters())


@pytest.mark.parametrize("name", ["", "a.b", "keys", 3])
def test_names_that_cannot_name_an_adapter(name):
    with pytest.raises(ValueError, match="adapter_name must be a string"):
        get_capt_model(make_base("llama"), CaptConfig(), name)


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_lookup_num_tokens": 2},
        {"prefill_chunk_size": 2},
        {"no_repeat_ngram_size": 2},
        {"encoder_no_repeat_ngram_size": 2},
        {"assistant_early_exit": 1},
        {"token_healing": True},
        {"guidance_scale": 1.5},
    ],
    ids=str,
)
def test_options_inside_a_generation_config_are_refused_too(options):
    ids, _ = batch_of((4, 4))
    name = next(iter(options))
    with pytest.raises(NotImplementedError, match=f"does not take {name}"):
        wrapped().generate(ids, generation_config=GenerationConfig(**options))
    with pytest.raises(NotImplementedError, match=f"does not take {name}"):
        wrapped().generate(ids, **options)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=str)
def test_a_choice_of_next_tokens_sees_the_callers_ids(options):
    model = wrapped(length=3, lead=1)
    ids, mask = batch_of((3, 5), "left")
    seen = []

    def allowed(row, sentence):
        seen.append((row, sentence[:5].tolist(), len(sentence)))
        return [7, 8 + len(sentence)]

    kept = {"do_sample": False, "max_new_tokens": 2, "eos_token_id": None, "pad_token_id": 0} | options
    out = model.generate(ids, attention_mask=mask, prefix_allowed_tokens_fn=allowed, **kept)
    rows = len(out) // len(ids)
    assert {(row, tuple(prompt)) for row, prompt, _ in seen} == {
        (row, tuple(ids[row // rows].tolist())) for row in range(len(out))
    }
    assert {length for *_, length in seen} == {5, 6}
    assert set(out[:, 5].tolist()) <= {7, 13}
    assert set(out[:, 6].tolist()) <= {7, 14}


def test_a_loop_of_the_callers_own_is_refused():
    with pytest.raises(NotImplementedError, match="does not take custom_generate: it would see"):
        wrapped().generate(batch_of((4, 4))[0], custom_generate=lambda model, ids, **kwargs: ids)


def test_padding_shows_no_token_that_the_prompt_lacks():
    model = wrapped(lead=1)
    ids, mask = batch_of((2, 6), "left")
    seen = []
    run = model.base.forward
    model.base.forward = lambda input_ids=None, **kwargs: seen.append(input_ids) or run(input_ids=input_ids, **kwargs)
    model.generate(ids, attention_mask=mask, max_new_tokens=1)
    del model.base.forward
    for row, real, shown in zip(ids, mask, seen[0], strict=True):
        assert set(shown.tolist()) == set(row[real == 1].tolist())


def test_a_choice_of_next_tokens_for_several_samples_of_a_prompt_is_refused():
    ids, _ = batch_of((4, 4))
    with pytest.raises(NotImplementedError, match="prefix_allowed_tokens_fn with several sampled sequences"):
        wrapped().generate(
            ids, prefix_allowed_tokens_fn=lambda row, sentence: [7], do_sample=True, num_return_sequences=2
        )


def test_processors_and_streamers_see_the_callers_tokens():
    seen, streamed = [], []

    class Watch(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append(input_ids)
            return scores

    class Stream:
        def put(self, value):
            streamed.append(value)

        def end(self):
            streamed.append("end")

    model = wrapped(length=3)
    ids, _ = batch_of((4,))
    options = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(ids, logits_processor=LogitsProcessorList([Watch()]), streamer=Stream(), **options)
    assert [s.shape[1] for s in seen] == [4, 5, 6]
    assert torch.equal(seen[-1], out[:, :6])
    assert torch.equal(streamed[0].view(1, -1), ids)
    assert streamed[-1] == "end"
    by_config = model.generate(ids, generation_config=GenerationConfig(**options))
    assert torch.equal(by_config, out)
    default = model.generate(ids, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert default.shape == model.base.generate(ids, do_sample=False, eos_token_id=None, pad_token_id=0).shape
