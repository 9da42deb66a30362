"""What padding holds, or what an attention makes of it, reaches no real position."""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .naive import make_base
from .small import wrapped

FAMILIES = ["llama", "mistral", "t5", "bert"]
LENGTHS = torch.tensor([6, 0, 3])


def batch(side):
    """The same texts, padded on either side."""
    torch.manual_seed(2)
    ids, mask = torch.randint(3, 40, (3, 6)), (torch.arange(6) < LENGTHS[:, None]).long()
    if side == "left":
        ids, mask = (
            torch.stack([x.roll(6 - int(n)) for x, n in zip(rows, LENGTHS, strict=True)]) for rows in (ids, mask)
        )
    return {"input_ids": ids, "attention_mask": mask}


def states(model, inputs):
    extra = {"decoder_input_ids": torch.full((3, 1), 2)} if model.base.config.is_encoder_decoder else {}
    return model(**inputs, **extra)[0]


def nan_in_padding(module, query, key, value, attention_mask, **options):
    out, weights = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if attention_mask is not None:
        seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        blind = ~seen.expand(len(out), -1, -1, -1)[:, 0, :, :].diagonal(dim1=1, dim2=2)
        out = out.masked_fill(blind[..., None, None], torch.nan)
    return out, weights


AttentionInterface.register("nan_in_padding", nan_in_padding)
AttentionMaskInterface.register("nan_in_padding", sdpa_mask)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_attention_that_writes_nan_into_padding(family, side):
    """CASES 18: no next layer's mean may take it in."""
    model, inputs = wrapped(family), batch(side)
    model.backend = "reference"
    want = states(model, inputs)
    model.base.set_attn_implementation("nan_in_padding")
    got = states(model, inputs)
    assert got.isfinite().all()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_masks_do_not_add_up_to_infinity_in_bf16(family, backend):
    """CASES 7: two additive masks of the lowest number are -inf, and a row that sees nothing else is NaN."""
    results = []
    for side in ("left", "right"):
        model, inputs = wrapped(family, torch.bfloat16), batch(side)
        model.backend = backend
        out = states(model, inputs)
        assert out.isfinite().all()
        loss = out.float().square().sum()
        (grad,) = torch.autograd.grad(loss, model.adapters["default"].capsules.vectors)
        assert grad.isfinite().all()
        results.append(grad)
    torch.testing.assert_close(*results, rtol=0, atol=0.02 * results[0].abs().max().item())


def test_the_base_itself_would_not_survive():
    """The NaN of the first test is a real one: transformers' own forward hands it on."""
    base, inputs = make_base("llama", torch.float64), batch("left")
    base.set_attn_implementation("nan_in_padding")
    assert not base(**inputs).logits.isfinite().all()
