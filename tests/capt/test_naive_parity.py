"""The wrapper on padded batches equals a loop over unpadded samples, in fp64, outputs and gradients."""

from __future__ import annotations

import pytest
import torch

from capt import CaptConfig, get_capt_model

from .naive import ENCODERS, batch_of, make_base, randomise, run_sample

VARIANTS = ("addition", "prepending", "extraction", "projection")
DEPTHS = ("all", "input", "first_half", "latter_half", "odd", [1, 3])
LENGTHS = (5, 1, 9)


def check(family, config, side="left", lengths=LENGTHS, pool=False):
    base = make_base(family)
    model = get_capt_model(base, config).double().eval()
    model.backend = "reference"
    randomise(model)
    adapter = model.adapters["default"]
    ids, mask = batch_of(lengths, side)
    pool_mask = (torch.rand(mask.shape) < 0.6).long() if pool else None
    encoder_decoder = base.config.is_encoder_decoder
    if encoder_decoder:
        decoder_ids = torch.tensor([[0, 5, 7]] * len(lengths))
        got = model(input_ids=ids, attention_mask=mask, pool_mask=pool_mask, decoder_input_ids=decoder_ids)
        got = [got.encoder_last_hidden_state, got.logits]
    else:
        got = [model(input_ids=ids, attention_mask=mask, pool_mask=pool_mask)[0]]

    want = [torch.zeros_like(g) for g in got]
    for row, real in enumerate(mask.bool()):
        tokens = base.get_input_embeddings()(ids[row, real])
        member = torch.ones(len(tokens), dtype=torch.bool) if pool_mask is None else pool_mask[row, real].bool()
        slots, tokens = run_sample(base, config, adapter, tokens, member)
        if encoder_decoder:
            want[0][row, real] = tokens
            lead = min(config.lead, len(tokens))
            memory = torch.cat([tokens[:lead], slots, tokens[lead:]]) if config.expose_slot else tokens
            want[1][row] = base(encoder_outputs=(memory[None],), decoder_input_ids=decoder_ids[row : row + 1]).logits[0]
        else:
            want[0][row, real] = tokens if family in ENCODERS else base.lm_head(tokens)
    incoming = [torch.randn_like(g) for g in got]
    trained = [p for p in model.parameters() if p.requires_grad]
    got_grads = torch.autograd.grad(got, trained, incoming) if trained else []
    want_grads = torch.autograd.grad(want, trained, incoming, allow_unused=True) if trained else []
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        assert a.abs().max() > 0.1
    for a, b in zip(got_grads, want_grads, strict=True):
        b = torch.zeros_like(a) if b is None else b
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("depth", DEPTHS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "t5", "bert"])
def test_variants_and_depths(family, variant, depth):
    check(family, CaptConfig(variant=variant, depth=depth, rank=3))


@pytest.mark.parametrize("family", ["mistral", "qwen3", "flan-t5", "roberta"])
@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_families_and_padding_sides(family, side):
    check(family, CaptConfig(), side, lengths=(5, 1, 12, 9))


OPTIONS = {
    "lead": CaptConfig(lead=1),
    "lead, no first mean": CaptConfig(lead=1, first_mean=False),
    "lead past the end": CaptConfig(lead=3, length=2),
    "no first mean": CaptConfig(first_mean=False, depth="latter_half"),
    "four slots": CaptConfig(length=4),
    "two slots prepended behind a lead": CaptConfig(length=2, variant="prepending", lead=2),
    "three convolved": CaptConfig(length=3, variant="extraction", kernel_size=3, lead=1),
    "prepending, no first mean": CaptConfig(variant="prepending", first_mean=False),
    "projection, no first mean": CaptConfig(variant="projection", first_mean=False, rank=2),
    "no instance": CaptConfig(instance=False),
    "twenty prompts": CaptConfig(instance=False, length=20),
    "no task": CaptConfig(task=False),
    "positions kept": CaptConfig(positions="keep"),
    "positions kept behind a lead": CaptConfig(positions="keep", lead=1, length=2),
    "slot hidden from the decoder": CaptConfig(expose_slot=False, lead=1),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("family", ["llama", "t5", "bert"])
def test_options(family, name):
    if name.startswith("slot hidden") and family != "t5":
        pytest.skip("a base of one stack has no decoder to hide the slot from")
    check(family, OPTIONS[name])


@pytest.mark.parametrize("variant", VARIANTS)
def test_pool_mask(variant):
    check("llama", CaptConfig(variant=variant, length=2, rank=3, lead=1), "holes", lengths=(6, 3, 9), pool=True)
    check("t5", CaptConfig(variant=variant, rank=3), "left", lengths=(6, 3, 9), pool=True)
    check("bert", CaptConfig(variant=variant, length=2, rank=3, lead=1), "holes", lengths=(6, 3, 9), pool=True)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "t5", "roberta"])
def test_attention_implementations_agree(family, implementation):
    base = make_base(family)
    base.set_attn_implementation(implementation)
    model = get_capt_model(base, CaptConfig(lead=1)).double().eval()
    randomise(model)
    ids, mask = batch_of((4, 7), "left")
    extra = {"decoder_input_ids": ids[:, :2]} if family == "t5" else {}
    mixed = model(input_ids=ids, attention_mask=mask, **extra)[0]
    alone = model(input_ids=ids[:1, 3:], **{k: v[:1] for k, v in extra.items()})[0]
    torch.testing.assert_close(mixed[:1, -alone.shape[1] :], alone, rtol=1e-9, atol=1e-9)
