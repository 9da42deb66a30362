"""capsule_attention's door: padded calls, what their padding holds, rotary on the way in, empty batches, bad input."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import capt_kernels as ck

from . import checks


@pytest.fixture(params=["reference", "cpu", "sdpa", "triton"])
def backend(request):
    """All but "triton" run everywhere. New tensors lie where the backend is tested."""
    status = ck.backends()[request.param]
    if request.param == "triton" and not status.available:
        pytest.skip(f"triton: {status.reason}")
    with torch.device("cuda" if request.param == "triton" and torch.cuda.is_available() else "cpu"):
        yield request.param


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


MASKS = {
    "right": [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]],
    "left": [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [1, 1, 1, 1, 1]],
    "holes": [[1, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 1, 0, 1, 0]],
    "empty": [[0] * 5] * 3,
}


def padded(dtype):
    """q, k and v of a padded batch with four heads over two."""
    return [torch.randn(3, 5, heads, 8, dtype=dtype) for heads in (4, 2, 2)]


@pytest.mark.parametrize("extra", ["plain", "window", "bias"])
@pytest.mark.parametrize("side", MASKS)
def test_padded_equals_packed(side, extra, backend):
    mask = torch.tensor(MASKS[side]).bool()
    q, k, v = (x.requires_grad_() for x in padded(checks.exact(backend)))
    more = {"plain": {}, "window": {"window": 2}, "bias": {"bias_table": torch.randn(4, 9)}}[extra]
    options = {"causal": True, "scale": 0.3, "backend": backend, **more}
    got = ck.capsule_attention(q, k, v, mask=mask, **options)
    want = ck.capsule_attention(q[mask], k[mask], v[mask], cu_seqlens=offsets(mask.sum(1).tolist()), **options)
    assert not got[~mask].any()
    torch.testing.assert_close(got[mask], want)
    given = torch.randn_like(got)
    grads = torch.autograd.grad(got, (q, k, v), given, allow_unused=True)
    for grad, wanted in zip(grads, torch.autograd.grad(want, (q, k, v), given[mask], allow_unused=True), strict=True):
        if wanted is not None:
            assert not grad[~mask].any()
            torch.testing.assert_close(grad, wanted)


def test_without_a_mask_all_is_real(backend):
    q, k, v = padded(checks.exact(backend))
    options = {"causal": True, "scale": 0.3, "backend": backend}
    ones = torch.ones(3, 5)
    assert torch.equal(ck.capsule_attention(q, k, v, **options), ck.capsule_attention(q, k, v, mask=ones, **options))
    alone = ck.capsule_attention(q[:1], k[:1], v[:1], **options)
    torch.testing.assert_close(alone, ck.capsule_attention(q, k, v, **options)[:1])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("side", ["right", "left", "holes"])
def test_padding_may_hold_anything(side, bad, backend):
    mask = torch.tensor(MASKS[side]).bool()
    clean = [x.masked_fill(~mask[..., None, None], 0).requires_grad_() for x in padded(checks.exact(backend))]
    dirty = [x.detach().masked_fill(~mask[..., None, None], bad).requires_grad_() for x in clean]
    rotary = torch.randn(2, 3, 5, 8, dtype=checks.exact(backend))
    results = []
    for inputs, value in ((clean, 0), (dirty, bad)):
        tables = tuple(rotary.masked_fill(~mask[..., None], value))
        out = ck.capsule_attention(*inputs, mask=mask, causal=True, scale=0.3, rotary=tables, backend=backend)
        given = torch.ones_like(out)
        results.append((out, *torch.autograd.grad(out, inputs, given)))
    for got, want in zip(results[1], results[0], strict=True):
        assert torch.equal(got[mask], want[mask])
    assert not results[1][0][~mask].any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32])
def test_masks_of_every_dtype(dtype, backend):
    q, k, v = padded(checks.exact(backend))
    mask = torch.tensor(MASKS["holes"])
    options = {"causal": False, "scale": 0.3, "backend": backend}
    got = ck.capsule_attention(q, k, v, mask=mask.to(dtype), **options)
    assert torch.equal(got, ck.capsule_attention(q, k, v, mask=mask.bool(), **options))


@pytest.mark.parametrize("side", ["left", "right", "holes"])
@pytest.mark.parametrize("length", [1, 3])
def test_a_padded_call_decodes_the_last_tokens(length, side, backend):
    """The last T columns of a mask over Tk keys are the queries: cached decoding."""
    mask = torch.tensor(MASKS[side]).bool()
    q, k, v = padded(checks.exact(backend))
    options = {"causal": True, "scale": 0.3, "mask": mask, "backend": backend, "bias_table": torch.randn(4, 9)}
    whole = ck.capsule_attention(q, k, v, **options)
    if side == "left":  # only there do the last columns hold the last real tokens, whatever the sequence's length
        torch.testing.assert_close(ck.capsule_attention(q[:, -length:], k, v, **options), whole[:, -length:])
    full = {**options, "mask": None}
    whole = ck.capsule_attention(q, k, v, **full)
    torch.testing.assert_close(ck.capsule_attention(q[:, -length:], k, v, **full), whole[:, -length:])
    ends = mask[:, -length:]
    rows, keys = q[:, -length:][ends], offsets(mask.sum(1).tolist())
    packed = {**options, "cu_seqlens": offsets(ends.sum(1).tolist()), "cu_seqlens_k": keys, "mask": None}
    want = ck.capsule_attention(rows, k[mask], v[mask], **packed)
    torch.testing.assert_close(ck.capsule_attention(q[:, -length:], k, v, **options)[ends], want)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)], ids=str)
def test_empty_padded(shape, backend):
    q = torch.randn(*shape, 4, 8, requires_grad=True)
    k = torch.randn(*shape, 2, 8)
    for mask in (None, torch.ones(shape)):
        out = ck.capsule_attention(q, k, k, mask=mask, causal=True, scale=1.0, backend=backend)
        assert out.shape == q.shape
        assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)], ids=str)
def test_no_sequence_at_all(lengths, backend):
    for rows in (0, 3):
        q = torch.full((rows, 4, 8), torch.nan, requires_grad=True)
        out = ck.capsule_attention(q, q, q, cu_seqlens=offsets(lengths), causal=True, scale=1.0, backend=backend)
        assert out.shape == q.shape
        assert not out.any()
        out.sum().backward()
        assert not q.grad.any()


@pytest.mark.parametrize("wanted", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize(("queries", "keys"), [((), ()), ((0, 0), (0, 2)), ((2, 1), (0, 0))], ids=str)
def test_what_no_key_is_seen_of_has_a_gradient_of_zero(queries, keys, wanted, backend):
    inputs = [torch.randn(3, heads, 8) for heads in (4, 2, 2)]
    inputs[wanted].requires_grad_()
    where = {"cu_seqlens": offsets(queries), "cu_seqlens_k": offsets(keys)}
    out = ck.capsule_attention(*inputs, **where, causal=False, scale=1.0, backend=backend)
    assert not out.any()
    out.sum().backward()
    assert torch.equal(inputs[wanted].grad, torch.zeros_like(inputs[wanted]))


class _Waits(TorchDispatchMode):
    """Counts what a GPU's host would wait for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.nonzero.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("length", "waits"), [(5, 1), (2, 2)])
def test_a_mask_is_packed_by_once(length, waits):
    mask = torch.tensor(MASKS["left"]).bool()
    q, k, v = padded(torch.float32)
    with _Waits() as seen:
        ck.capsule_attention(q[:, -length:], k, v, mask=mask, causal=True, scale=0.3, backend="cpu")
    assert seen.count == waits


@pytest.mark.parametrize("packed", [True, False])
def test_rotary_turns_queries_and_keys_first(packed, backend):
    mask = torch.tensor(MASKS["left"]).bool()
    q, k, v = padded(torch.float32)
    cos, sin = torch.randn(2, 3, 5, 8)
    where = {"mask": mask}
    if packed:
        q, k, v, cos, sin = (x[mask] for x in (q, k, v, cos, sin))
        where = {"cu_seqlens": offsets(mask.sum(1).tolist())}
    options = {"causal": True, "scale": 0.3, "backend": backend, **where}
    turned = ck.apply_rotary(q, k, cos, sin, backend="reference")
    want = ck.capsule_attention(*turned, v, **options)
    got = ck.capsule_attention(q, k, v, rotary=(cos, sin), **options)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


Q, K = torch.randn(6, 4, 8), torch.randn(6, 2, 8)
CU = torch.tensor([0, 2, 6], dtype=torch.int32)
PAD = {"q": Q.view(2, 3, 4, 8), "k": K.view(2, 3, 2, 8), "v": K.view(2, 3, 2, 8), "cu_seqlens": None}
COS = torch.randn(6, 8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": Q.long()}, r"q must be float32, float16, bfloat16 or float64, got torch.int64"),
        ({"q": Q[0]}, r"q must have shape \[R, H, d\] with cu_seqlens, got \(4, 8\)"),
        ({"cu_seqlens": None}, r"q must have shape \[B, T, H, d\] without cu_seqlens, got \(6, 4, 8\)"),
        ({"k": K[..., :4]}, r"k must have shape \[Rk, Hkv, d\] that fits q's \(6, 4, 8\), got \(6, 2, 4\)"),
        ({**PAD, "k": PAD["k"][:1]}, r"k must have shape \[B, Tk, Hkv, d\] that fits q's .*, got \(1, 3, 2, 8\)"),
        ({"v": K[:, :1]}, r"v must have shape k's = \(6, 2, 8\), got \(6, 1, 8\)"),
        ({"q": Q[:, :3]}, r"q's heads must be a multiple of k's, got 3 and 2"),
        ({"k": K[:, :0], "v": K[:, :0]}, r"q's heads must be a multiple of k's, got 4 and 0"),
        ({"k": K.half()}, r"k must have q's dtype torch.float32, got torch.float16"),
        ({"v": K.double()}, r"v must have q's dtype torch.float32, got torch.float64"),
        (
            {"k": K[:5], "v": K[:5]},
            r"k must have shape \[R, Hkv, d\] without cu_seqlens_k = \(6, 2, 8\), got \(5, 2, 8\)",
        ),
        ({"v": K.to("meta")}, r"v must be on cpu as q is, got meta"),
        ({"cu_seqlens": CU.to("meta")}, r"cu_seqlens must be on cpu as q is, got meta"),
        ({"cu_seqlens": CU + 1}, r"cu_seqlens must start at 0, got 1"),
        ({"cu_seqlens": CU * 2}, r"cu_seqlens must end within the 6 rows given, got 12"),
        ({"cu_seqlens": CU.float()}, r"cu_seqlens must be int32, got torch.float32"),
        ({"cu_seqlens_k": CU[[0, 2, 1]]}, r"cu_seqlens_k must never fall, got \[0, 6, 2\]"),
        ({"cu_seqlens_k": CU[:2]}, r"cu_seqlens_k must have shape cu_seqlens's = \(3,\), got \(2,\)"),
        ({"mask": torch.ones(2, 3)}, r"mask and cu_seqlens were both given"),
        ({**PAD, "cu_seqlens_k": CU}, r"cu_seqlens_k was given without cu_seqlens"),
        ({**PAD, "mask": torch.ones(2, 4)}, r"mask must have shape \[B, Tk\] = \(2, 3\), got \(2, 4\)"),
        ({**PAD, "mask": torch.full((2, 3), -1e9)}, r"mask must hold only 0 and 1 .*, got -1000000000.0"),
        ({**PAD, "k": PAD["k"][:, :2], "v": PAD["v"][:, :2]}, r"k must have at least the 3 tokens of q .*, got 2"),
        ({"causal": 1}, r"causal must be a bool, got 1"),
        ({"scale": None}, r"scale must be a positive finite number, got None"),
        ({"scale": float("nan")}, r"scale must be a positive finite number, got nan"),
        ({"scale": 0}, r"scale must be a positive finite number, got 0"),
        ({"window": 0}, r"window must be None or a positive int, got 0"),
        ({"window": 2.0}, r"window must be None or a positive int, got 2.0"),
        ({"window": 2, "causal": False}, r"window .* wants causal=True, got window=2 with causal=False"),
        ({"rotary": COS}, r"rotary must be a pair \(cos, sin\), got Tensor"),
        ({"rotary": (COS[:5], COS)}, r"cos must have shape \[R, d\] = \(6, 8\) as q has, got \(5, 8\)"),
        ({"rotary": (COS, COS), "cu_seqlens_k": CU}, r"rotary .* wants one key a query, got cu_seqlens_k"),
        ({"rotary": (COS, COS), "k": K[:5], "v": K[:5]}, r"rotary .*, got q \(6, 4, 8\) and k \(5, 2, 8\)"),
        ({"bias_table": torch.randn(4, 8)}, r"bias_table must have shape \[H, 2\*Tmax-1\] with H = 4, got \(4, 8\)"),
        ({"bias_table": torch.randn(2, 9)}, r"bias_table must have shape \[H, 2\*Tmax-1\] with H = 4, got \(2, 9\)"),
        ({"bias_table": torch.randn(4, 5)}, r"bias_table must reach Tmax = 4, the longest sequence, got one for 3"),
        ({"bias_table": torch.ones(4, 9).int()}, r"bias_table must be float32, .*, got torch.int32"),
        ({"bias_table": torch.randn(4, 9, requires_grad=True)}, r"bias_table must need no gradient \(detach it\)"),
        ({"bias_table": torch.randn(4, 9, device="meta")}, r"bias_table must be on cpu as q is, got meta"),
        ({"backend": "gpu"}, r"backend must be 'auto' or one of reference, cpu, sdpa, triton, .*, got 'gpu'"),
    ],
)
def test_bad_input(changed, message):
    call = {"q": Q, "k": K, "v": K, "cu_seqlens": CU, "causal": True, "scale": 1.0, **changed}
    with pytest.raises(ValueError, match=message):
        ck.capsule_attention(**call)
