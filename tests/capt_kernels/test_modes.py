"""Every op under torch.autocast and torch.inference_mode: nothing changes."""

from __future__ import annotations

import pytest
import torch

import capt_kernels as ck

OFFSETS, POOL_MASK = torch.tensor([0, 5, 12], dtype=torch.int32), torch.arange(12) % 3 > 0
REAL = torch.arange(6) < torch.tensor([[6], [3]])


def rows(*shape):
    return torch.randn(shape, requires_grad=True)


def capsule(op, mask, **options):
    padded = mask is not None
    inputs = [rows(2, 6 if op == ck.capsule_prepend else 8, 16) if padded else rows(12, 16), rows(2, 16)]
    return inputs, lambda h, p, b: (op(h, p, mask, backend=b, **options),)


def calls():
    """name -> (leaves, op of them and a backend)."""
    packed = {"cu_seqlens": OFFSETS, "pool_mask": POOL_MASK, "lead": 1}
    norm = [rows(12, 16), rows(12, 16), rows(16), rows(2, 16)]
    heads = [rows(6, 4, 8), rows(6, 2, 8), rows(6, 2, 8)]
    attention = {"cu_seqlens": torch.tensor([0, 2, 6]), "causal": True, "scale": 0.3, "window": 2}
    cos, sin = torch.randn(2, 6, 8)
    indices = torch.tensor([0, 3, 4])
    return {
        "prepend, padded": capsule(ck.capsule_prepend, REAL),
        "prepend, packed": capsule(ck.capsule_prepend, None, **packed),
        "refresh, padded": capsule(ck.capsule_refresh, REAL),
        "refresh, packed": capsule(ck.capsule_refresh, None, **packed),
        "add_rms_norm": (
            norm,
            lambda x, r, w, p, b: ck.add_rms_norm(x, r, w, 1e-5, prompt=p, backend=b, **packed),
        ),
        "add_rms_norm, no prompt": (norm[:3], lambda x, r, w, b: ck.add_rms_norm(x, r, w, 1e-5, backend=b)),
        "add_rms_norm, alone": (norm[1:3], lambda r, w, b: ck.add_rms_norm(None, r, w, 1e-5, backend=b)[:1]),
        "capsule_attention": (heads, lambda q, k, v, b: (ck.capsule_attention(q, k, v, **attention, backend=b),)),
        "capsule_attention by sdpa": (
            heads,
            lambda q, k, v, _: (ck.capsule_attention(q, k, v, **attention, backend="sdpa"),),
        ),
        "apply_rotary": (heads[:2], lambda q, k, b: ck.apply_rotary(q, k, cos, sin, backend=b)),
        **{
            kind: (norm[:2], lambda g, u, b, kind=kind: (ck.gated_activation(g, u, kind, backend=b),))
            for kind in ("silu", "gelu", "gelu_tanh", "relu")
        },
        "pack": ([rows(2, 6, 16)], lambda h, b: (ck.pack(h, REAL.to(h.device), backend=b)[0],)),
        "unpack": ([rows(3, 16)], lambda r, b: (ck.unpack(r, indices.to(r.device), 2, 6, backend=b),)),
    }


NAMES = list(calls())


@pytest.fixture
def on_default_device(device):
    if device != "cpu":
        pytest.skip("the masks and offsets of these calls lie on the CPU")


@pytest.mark.usefixtures("on_default_device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_autocast_changes_nothing(name, dtype, backend):
    """These are no autocast ops: their sums are wide, and no matrix product of the reference may be narrowed."""
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("fp64 is for the reference and C++ backends")
    leaves, op = calls()[name]
    leaves = [x.detach().to(dtype).requires_grad_() for x in leaves]
    want = op(*leaves, backend)
    with torch.autocast("cpu", torch.bfloat16):
        got = op(*leaves, backend)
    given = [torch.randn_like(o) for o in want]
    grads = [torch.autograd.grad(o, leaves, given) for o in (got, want)]
    for a, b in zip((*got, *grads[0]), (*want, *grads[1]), strict=True):
        assert a.dtype == dtype
        assert torch.equal(a, b)


@pytest.mark.usefixtures("on_default_device")
@pytest.mark.parametrize("name", NAMES)
def test_inference_mode_changes_nothing(name, backend):
    leaves, op = calls()[name]
    want = op(*leaves, backend)
    with torch.inference_mode():
        got = op(*leaves, backend)
        again = op(*(x.clone() for x in leaves), backend)  # inference tensors themselves
    for a, b, c in zip(got, again, want, strict=True):
        assert a.is_inference()
        assert not a.requires_grad
        assert torch.equal(a, c)
        assert torch.equal(b, c)
