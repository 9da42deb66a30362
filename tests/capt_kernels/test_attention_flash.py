"""Backend flash_attn: what FlashAttention is asked for, with stand-ins that compute what its docs promise."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch._subclasses import FakeTensorMode

import capt_kernels as ck
from capt_kernels import attention
from capt_kernels.attention import flash_attn
from capt_kernels.backends import BackendStatus, _flash_attn_status, flash_attn_status

from .test_attention import Case, make


def attend(q, k, v, cu_q, cu_k, scale, left, right):
    """Query i sees keys i-left .. i+right, -1 being no limit, the last query aligned to the last key."""
    assert (cu_q.dtype, cu_k.dtype) == (torch.int32, torch.int32)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert (q.shape[0], k.shape[0], v.shape[0]) == (cu_q[-1], cu_k[-1], cu_k[-1])
    outputs = []
    for (a, b), (c, d) in zip(cu_q.long().unfold(0, 2, 1), cu_k.long().unfold(0, 2, 1), strict=True):
        group = q.shape[1] // k.shape[1]
        key, value = (x[c:d].repeat_interleave(group, 1) for x in (k, v))
        distance = torch.arange(d - c) - (torch.arange(b - a)[:, None] + (d - c) - (b - a))
        seen = (distance >= -left if left >= 0 else True) & (distance <= right if right >= 0 else distance == distance)
        scores = torch.einsum("ihd,jhd->hij", q[a:b], key) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hij,jhd->ihd", torch.where(seen.any(1, keepdim=True), weights, 0), value))
    return torch.cat(outputs)


@pytest.fixture(params=["flash_attn", "torch"])
def stand_in(request, monkeypatch):
    """One of the two libraries, and the longest lengths that it was told."""
    longest = []

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), deterministic=False,
    ):  # fmt: skip
        longest.append((max_seqlen_q, max_seqlen_k))
        assert dropout_p == 0
        assert deterministic == torch.are_deterministic_algorithms_enabled()
        left, right = window_size
        return attend(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, left, 0 if causal else right)

    def varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
    ):
        longest.append((max_q, max_k))
        assert enable_gqa == (query.shape[1] != key.shape[1])
        return attend(query, key, value, cu_seq_q, cu_seq_k, scale, *window_size)

    monkeypatch.setattr(flash_attn, "implementation", lambda: request.param)
    flash = types.ModuleType("flash_attn")
    flash.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    varlen = types.ModuleType("torch.nn.attention.varlen")
    varlen.varlen_attn = varlen_attn
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", varlen)
    return longest


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(causal=False),
        Case(beyond=3, key_heads=4),
        Case(window=1),
        Case(window=3, beyond=1),
        Case(keys=(9, 2, 7, 4)),
        Case(keys=(9, 2, 7, 4), causal=False),
        Case(lengths=(5, 4, 2), keys=(2, 0, 3)),
    ],
    ids=str,
)
def test_equals_the_reference(case, stand_in):
    inputs, options = make(case)
    where = (options["cu_seqlens"], options.get("cu_seqlens_k"), case.causal, case.scale, case.window)
    got = flash_attn.attention(*inputs, *where)
    want = ck.capsule_attention(*inputs, **options, backend="reference")
    torch.testing.assert_close(got, want)
    given = torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(got, inputs, given), torch.autograd.grad(want, inputs, given), strict=True):
        torch.testing.assert_close(a, b)
    assert stand_in == [(max(case.lengths), max(case.keys or case.lengths))]


@pytest.mark.parametrize("kind", ["every other", "transposed", "sliced"])
def test_memory_of_another_order(kind, stand_in):
    inputs, options = make(Case(beyond=1), kinds=(kind,) * 3)
    got = flash_attn.attention(*inputs, options["cu_seqlens"], None, True, 0.3, None)
    torch.testing.assert_close(got, ck.capsule_attention(*inputs, **options, backend="reference"))


@pytest.mark.parametrize("wanted", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("lengths", [(), (0, 0)], ids=str)
def test_no_sequence_at_all(lengths, wanted, stand_in):
    inputs = [torch.full((3, 2, 8), torch.nan) for _ in "qkv"]
    inputs[wanted].requires_grad_()
    offsets = torch.tensor([0, *lengths], dtype=torch.int32)
    out = flash_attn.attention(*inputs, offsets, None, True, 0.3, None)
    assert not out.any()
    out.sum().backward()
    assert torch.equal(inputs[wanted].grad, torch.zeros(3, 2, 8))
    assert not stand_in


def on_gpu(dtype=torch.bfloat16, head=64):
    with FakeTensorMode():
        return torch.empty(8, 4, head, dtype=dtype, device="cuda")


@pytest.fixture
def gpu(monkeypatch):
    """A machine with Triton and FlashAttention on a GPU, as far as the choice of a backend goes."""
    monkeypatch.setattr(attention, "resolve", lambda name, device: "triton")
    monkeypatch.setattr(attention, "flash_attn_status", lambda device: BackendStatus(True, ""))
    monkeypatch.setattr(attention, "interpreted", lambda: False)


@pytest.mark.parametrize(
    ("q", "bias", "chosen"),
    [
        ({}, False, "flash_attn"),
        ({}, True, "triton"),
        ({"dtype": torch.float32}, False, "triton"),
        ({"head": 20}, False, "triton"),
        ({"dtype": torch.float64}, False, "sdpa"),
        ({"head": 320}, False, "sdpa"),
    ],
    ids=str,
)
def test_auto_takes_the_fastest_that_serves_the_call(q, bias, chosen, gpu):
    q = on_gpu(**q)
    assert attention._choose("auto", q, torch.empty(4, 15) if bias else None, False) == chosen


@pytest.mark.parametrize(
    ("q", "bias", "message"),
    [
        ({}, True, "backend 'flash_attn' takes no bias_table"),
        (
            {"dtype": torch.float32},
            False,
            "backend 'flash_attn' takes q in torch.float16, torch.bfloat16, got .*float32",
        ),
        ({"head": 20}, False, "backend 'flash_attn' takes head sizes up to 256, multiples of 8, got 20"),
    ],
)
def test_what_it_cannot_serve(q, bias, message, gpu):
    q = on_gpu(**q)
    with pytest.raises(ValueError, match=message):
        attention._choose("flash_attn", q, torch.empty(4, 15) if bias else None, False)


def test_wants_a_gpu(monkeypatch):
    q = torch.randn(4, 2, 8).half()
    call = {"cu_seqlens": torch.tensor([0, 4]), "causal": True, "scale": 1.0, "backend": "flash_attn"}
    monkeypatch.setattr(attention, "flash_attn_status", lambda device: BackendStatus(True, ""))
    with pytest.raises(ValueError, match="backend 'flash_attn' serves tensors on cuda, got a tensor on cpu"):
        ck.capsule_attention(q, q, q, **call)
    monkeypatch.setattr(attention, "flash_attn_status", lambda device: BackendStatus(False, "so it is"))
    with pytest.raises(ImportError, match="backend 'flash_attn' is not available: so it is"):
        ck.capsule_attention(q, q, q, **call)


@pytest.mark.parametrize(
    ("hip", "index", "reason"),
    [(None, 0, "torch.nn.attention.varlen on CUDA"), (None, 1, "needs compute capability 8.0"), ("6.4", 0, "ROCm")],
)
def test_status_is_that_of_the_device(hip, index, reason, monkeypatch):
    monkeypatch.setattr(flash_attn, "implementation", lambda: "torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", {0: (9, 0), 1: (7, 5)}.get)
    monkeypatch.setattr(torch.version, "hip", hip)
    _flash_attn_status.cache_clear()
    status = flash_attn_status(torch.device("cuda", index))
    _flash_attn_status.cache_clear()
    assert status.available == (reason == "torch.nn.attention.varlen on CUDA")
    assert reason in status.reason


def test_status_names_what_is_missing():
    if not torch.cuda.is_available():
        status = ck.backends()["flash_attn"]
        assert not status.available
        assert "CUDA" in status.reason or "not installed" in status.reason
