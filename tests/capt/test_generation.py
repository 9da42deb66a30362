"""generate(): cached, uncached, recomputed, beams, static caches, T5; and what it refuses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LlamaConfig, LlamaModel, LogitsProcessor, LogitsProcessorList

from capt import CaptConfig, get_capt_model
from capt.methods import PrefixModel

from .naive import DECODERS, SMALL, batch_of, make_base, randomise

NEW = 8


def wrapped(family="llama", **fields):
    base = make_base(family, torch.float32)
    base.generation_config.eos_token_id = None
    base.generation_config.pad_token_id = 0
    model = get_capt_model(base, CaptConfig(**fields)).eval()
    randomise(model)
    return model


def steps(model, ids, mask, **options):
    """Greedy ids and logits ``[B, NEW, V]`` of a generation."""
    out = model.generate(
        ids, mask, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_logits=True, **options
    )
    return out.sequences, torch.stack(out.logits, 1)


@pytest.mark.parametrize(
    "fields", [{}, {"lead": 1}, {"length": 3, "lead": 2}, {"variant": "prepending"}, {"depth": [0, 2]}]
)
@pytest.mark.parametrize("lengths", [(4, 4), (4, 9, 6)])
def test_recomputed_cached_and_uncached_agree(lengths, fields):
    model = wrapped(**fields)
    ids, mask = batch_of(lengths, "left")
    cached_ids, cached = steps(model, ids, mask)
    uncached_ids, uncached = steps(model, ids, mask, use_cache=False)
    assert cached_ids.shape == (len(ids), ids.shape[1] + NEW)
    assert torch.equal(cached_ids[:, : ids.shape[1]], ids)
    assert torch.equal(cached_ids, uncached_ids)
    full_mask = torch.cat([mask, mask.new_ones(len(ids), NEW)], 1)
    prompt = torch.cat([mask, mask.new_zeros(len(ids), NEW)], 1)
    recomputed = model(input_ids=cached_ids, attention_mask=full_mask, pool_mask=prompt).logits[:, -NEW - 1 : -1]
    for got in (cached, uncached):
        assert (got - recomputed).abs().max() <= 1e-5 * recomputed.abs().max()


@pytest.mark.parametrize("family", DECODERS)
def test_prompts_of_one_token_and_every_family(family):
    model = wrapped(family)
    ids, mask = batch_of((1, 4), "left")
    together, logits = steps(model, ids, mask)
    for row, n in enumerate((1, 4)):
        alone, own = steps(model, ids[row : row + 1, 4 - n :], None)
        assert torch.equal(alone[0, n:], together[row, 4:])
        assert (own[0] - logits[row]).abs().max() <= 1e-5 * own.abs().max()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_beams_of_a_batch_equal_each_row_alone(cache):
    model = wrapped(lead=1)
    ids, mask = batch_of((4, 7), "left")
    options = {"num_beams": 3, "max_new_tokens": NEW, "do_sample": False, "num_return_sequences": 2}
    options["cache_implementation"] = cache
    together = model.generate(ids, mask, **options)
    assert together.shape == (4, 7 + NEW)
    for row, n in enumerate((4, 7)):
        alone = model.generate(ids[row : row + 1, 7 - n :], **options)
        assert torch.equal(alone[:, n:], together[2 * row : 2 * row + 2, 7:])


def test_static_cache():
    model = wrapped()
    ids, mask = batch_of((4, 7), "left")
    dynamic, logits = steps(model, ids, mask)
    static, own = steps(model, ids, mask, cache_implementation="static")
    assert torch.equal(static, dynamic)
    assert (own - logits).abs().max() <= 1e-5 * logits.abs().max()


def test_limits_count_the_callers_tokens():
    model = wrapped(length=3)
    ids, _ = batch_of((5, 5))
    assert model.generate(ids, max_length=9, do_sample=False).shape == (2, 9)
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (2, 7)
    torch.manual_seed(0)
    sampled = model.generate(ids, max_new_tokens=4, do_sample=True, temperature=2.0)
    assert sampled.shape == (2, 9)


def test_t5_beams_and_mixed_adapters():
    model = wrapped("t5")
    ids, mask = batch_of((4, 7), "left")
    options = {"max_new_tokens": NEW, "num_beams": 2, "do_sample": False}
    together = model.generate(ids, mask, **options)
    alone = model.generate(ids[:1, 3:], **options)
    assert torch.equal(together[:1, : alone.shape[1]], alone)
    model = wrapped()
    model.add_adapter("b", CaptConfig())
    randomise(model)
    mixed = model.generate(ids, mask, adapter_names=["b", "default"], max_new_tokens=NEW, do_sample=False)
    model.set_adapter("b")
    assert torch.equal(mixed[:1], model.generate(ids, mask, max_new_tokens=NEW, do_sample=False)[:1])


@pytest.mark.parametrize(
    "method",
    [lambda base: get_capt_model(base, CaptConfig()), lambda base: PrefixModel(base, 2)],
    ids=["capsule", "prefix"],
)
def test_the_text_that_t5_read_is_known_to_what_looks_at_it(method):
    ids, mask = batch_of((4, 7), "left")
    options = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 2, "encoder_no_repeat_ngram_size": 1}
    model = method(make_base("t5", torch.float32)).eval()
    written = model.generate(ids, mask, **options)
    for text, answer in zip(ids.tolist(), written[:, 1:].tolist(), strict=True):
        assert not set(text) & set(answer)
    with pytest.raises(NotImplementedError, match="does not take inputs_embeds"):
        model.generate(ids, mask, inputs_embeds=torch.zeros(2, 7, 16))


def test_other_texts_are_run_in_the_midst_of_a_generation():
    """A prompt's slots are written into no other thread's texts, nor into a processor's own, however long these are."""
    model = wrapped(lead=1)
    ids, _ = batch_of((3,))
    others, _ = batch_of((9, 9))
    want = model(input_ids=others).logits
    seen = []

    class Interrupt(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append(model(input_ids=others).logits)
            with ThreadPoolExecutor(1) as pool:
                seen.append(pool.submit(lambda: model(input_ids=others).logits).result())
            return scores

    model.generate(ids, max_new_tokens=1, logits_processor=LogitsProcessorList([Interrupt()]))
    torch.testing.assert_close(seen, [want, want], rtol=1e-5, atol=1e-5)


def test_disabled_is_the_bases_own_and_no_hook_is_left():
    model = wrapped()
    ids, mask = batch_of((4, 7), "left")
    with model.disable_adapter():
        bare = model.generate(ids, mask, max_new_tokens=NEW, do_sample=False)
    model.generate(ids, mask, max_new_tokens=1, do_sample=False)
    assert torch.equal(bare, model.base.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False))
    assert not any(m._forward_pre_hooks for m in model.base.modules())


def test_what_is_refused():
    ids, mask = batch_of((4, 7), "right")
    with pytest.raises(ValueError, match=r"padded on the left \(padding_side='left'\)"):
        wrapped().generate(ids, mask)
    ids, mask = batch_of((1, 7), "left")
    with pytest.raises(NotImplementedError, match="lead=1 wants prompts longer than that, got one of 1 tokens"):
        wrapped(lead=1).generate(ids, mask)
    with pytest.raises(NotImplementedError, match="so the first layer prompted, got depth 'latter_half'"):
        wrapped(depth="latter_half").generate(ids, mask)
    with pytest.raises(NotImplementedError, match="got positions 'keep'"):
        wrapped(positions="keep").generate(ids, mask)
    with pytest.raises(NotImplementedError, match="does not take assistant_model"):
        wrapped().generate(ids, mask, assistant_model=make_base("llama"))
    with pytest.raises(ValueError, match=r"attention_mask must have shape \[B, T\] = \(2, 7\), got \(2, 5\)"):
        wrapped().generate(ids, mask[:, :5])
    with pytest.raises(NotImplementedError, match="LlamaModel has no language-model head"):
        get_capt_model(LlamaModel(LlamaConfig(**SMALL)), CaptConfig()).generate(ids, mask)
