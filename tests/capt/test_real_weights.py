"""Fused against reference on SmolLM2-135M as it was trained, whose activations are less tame than random ones."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import rms_norm
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from capt import CaptConfig, assets, get_capt_model

#: Right-padded, of 1 to 40 tokens; ids of no meaning serve, since it is the weights that are real.
LENGTHS = torch.tensor([40, 1, 17])


@pytest.fixture(scope="module")
def folder():
    try:
        return assets.smollm2()
    except OSError as error:
        pytest.skip(f"SmolLM2 is not to be had: {error}")


def loss_and_gradient(folder, dtype, backend, **fields):
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model = get_capt_model(base, CaptConfig(**fields))
    model.backend = backend
    vectors = model.adapters["default"].capsules.vectors
    torch.nn.init.normal_(vectors, std=0.05)
    mask = (torch.arange(40) < LENGTHS[:, None]).long()
    ids = torch.randint(100, 40000, mask.shape)
    labels = torch.where((mask == 1) & (torch.arange(40) >= 8), ids, -100)
    out = model(input_ids=ids, attention_mask=mask, labels=labels, return_logits=True)
    (grad,) = torch.autograd.grad(out.loss, vectors)
    return [x.detach().double() for x in (out.loss, out.logits[mask == 1], grad)]


@pytest.fixture
def exact_norms(monkeypatch):
    """transformers norms in fp32 whatever it is given, which is no oracle."""

    def forward(self, hidden):
        if hidden.dtype != torch.float64:
            return original(self, hidden)
        return rms_norm(hidden, hidden.shape[-1:], self.weight, self.variance_epsilon)

    original = LlamaRMSNorm.forward
    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("fields", [{}, {"lead": 1, "first_mean": False}], ids=["paper", "lead"])
def test_smollm2(folder, fields):
    """In fp64 they agree; in fp32 the fused backbone is as near to that as transformers' own layers are."""
    want, wide = (loss_and_gradient(folder, torch.float64, backend, **fields) for backend in ("reference", "fused"))
    fused, reference = (loss_and_gradient(folder, torch.float32, name, **fields) for name in ("fused", "reference"))
    for name, exact, *others in zip(("loss", "logits", "gradient"), want, wide, fused, reference, strict=True):
        in_fp64, error, allowed = ((x - exact).abs().max() / exact.abs().max() for x in others)
        assert in_fp64 <= 1e-9, (name, in_fp64)
        assert error <= 2 * allowed + 1e-5, (name, error, allowed)
