"""The C++ attention: what its op promises to the dispatcher and torch.compile, the same bits whatever the threads.

Its numbers are tested with those of the other backends, in test_attention.
"""

from __future__ import annotations

import pytest
import torch

import capt_kernels as ck

if not ck.backends()["cpu"].available:
    pytest.skip(ck.backends()["cpu"].reason, allow_module_level=True)

ops = torch.ops.capt_kernels
CU = torch.tensor([0, 5, 5, 60, 127], dtype=torch.int32)


def tensors(rows=127, heads=(4, 2, 2), head=8, dtype=torch.float32):
    return [torch.randn(rows, h, head, dtype=dtype, requires_grad=True) for h in heads]


def attend(q, k, v, **options):
    options = {"cu_seqlens": CU, "causal": True, "scale": 0.3, "backend": "cpu"} | options
    return ck.capsule_attention(q, k, v, **options)


OPTIONS = {"causal": {}, "window": {"window": 7}, "bias": {"causal": False, "bias_table": torch.randn(4, 2 * 67 - 1)}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", OPTIONS)
def test_opcheck(kind, dtype):
    options = {"causal": True, "bias_table": None, "window": None} | OPTIONS[kind]
    where = (CU, None, options["causal"], 0.3, options["bias_table"], options["window"])
    q, k, v = (x.detach() for x in tensors(dtype=dtype))
    torch.library.opcheck(ops.attention_forward.default, (q, k, v, *where))
    out, lse = ops.attention_forward(q, k, v, *where)
    for grad, keys in ((torch.randn_like(out), True), (torch.ones(1, dtype=dtype).expand_as(out), False)):
        other_strides = k.transpose(0, 1).contiguous().transpose(0, 1)
        torch.library.opcheck(ops.attention_backward.default, (grad, q, other_strides, v, out, lse, *where, True, keys))


def test_compiles_to_one_graph_for_any_lengths():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def call(q, k, v, cu_seqlens, table):
        return attend(q, k, v, cu_seqlens=cu_seqlens, causal=False, bias_table=table).square().sum()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    table = torch.randn(4, 2 * 20 - 1)
    for lengths in ([7, 3], [8, 4], [9, 20]):
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        leaves = tensors(sum(lengths))
        got, want = (torch.autograd.grad(f(*leaves, cu_seqlens, table), leaves) for f in (compiled, call))
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    with pytest.raises(RuntimeError, match="bias_table must reach Tmax = 30, got one for 20"):
        compiled(*tensors(30), torch.tensor([0, 30, 30], dtype=torch.int32), table)


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_same_bits_on_any_number_of_threads(kind):
    leaves = tensors()
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 3):
            torch.set_num_threads(threads)
            out = attend(*leaves, **OPTIONS[kind])
            results.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_sequence_of_nan_stays_alone(kind, value):
    """Neither the result nor a gradient of another sequence meets it."""
    leaves = tensors()
    clean = attend(*leaves, **OPTIONS[kind])
    with torch.no_grad():
        for x in leaves:
            x[5:60] = value
    out = attend(*leaves, **OPTIONS[kind])
    others = torch.ones(127, dtype=torch.bool)
    others[5:60] = False
    assert torch.equal(out[others], clean[others])
    assert not out[5:60].isfinite().any()
    grad = torch.ones_like(out).masked_fill(~others[:, None, None], value)
    for got in torch.autograd.grad(out, leaves, grad):
        assert got[others].isfinite().all()


def test_gradients_that_nobody_wants_are_not_formed():
    q, k, v = (x.detach() for x in tensors())
    where = (CU, None, True, 0.3, None, None)
    out, lse = ops.attention_forward(q, k, v, *where)
    assert lse.shape == (4, 127)
    whole = ops.attention_backward(out, q, k, v, out, lse, *where, True, True)
    for need_q, need_keys in ((True, False), (False, True)):
        part = ops.attention_backward(out, q, k, v, out, lse, *where, need_q, need_keys)
        for got, want, wanted in zip(part, whole, (need_q, need_keys, need_keys), strict=True):
            assert torch.equal(got, want) if wanted else got.numel() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(127, 32)}, "q has 2 dimensions"),
        ({"q": torch.zeros(127, 4, 8).int()}, "q must be float32"),
        ({"q": torch.zeros(127, 3, 8)}, "heads must be a multiple"),
        ({"k": torch.zeros(127, 2, 4)}, "v must have shape"),
        ({"k": torch.zeros(120, 2, 8), "v": torch.zeros(120, 2, 8)}, "k must have q's rows"),
        ({"v": torch.zeros(127, 2, 8).half()}, "v must have dtype Float"),
        ({"cu_seqlens": CU.long()}, "cu_seqlens must have dtype Int"),
        ({"cu_seqlens": CU[:0]}, r"cu_seqlens must have shape \[B\+1\]"),
        ({"cu_seqlens_k": CU[:3]}, r"cu_seqlens_k must have shape \[5\], got \[3\]"),
        ({"bias_table": torch.zeros(2, 133)}, r"bias_table must have shape \[4, 133\]"),
        ({"bias_table": torch.zeros(4, 134)}, r"bias_table must have shape \[H, 2\*Tmax-1\], got \[4, 134\]"),
        ({"bias_table": torch.zeros(4, 0)}, r"bias_table must have shape \[H, 2\*Tmax-1\], got \[4, 0\]"),
        ({"bias_table": torch.zeros(4, 131)}, "bias_table must reach Tmax = 67, got one for 66"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_what_does_not_fit_raises(change, message):
    q, k, v = (x.detach() for x in tensors())
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens": CU, "cu_seqlens_k": None, "causal": True, "scale": 1.0}
    arguments |= {"bias_table": None, "window": None} | change
    with pytest.raises(RuntimeError, match=message):
        ops.attention_forward(*arguments.values())


def test_wrong_offsets_stay_inside():
    """Offsets are values, which a direct call does not check: whatever they say, no row outside is touched."""
    q, k, v = (x.detach() for x in tensors(16))
    for offsets in ([0, 40, 90], [-5, 3, 10], [0, 12, 4]):
        cu = torch.tensor(offsets, dtype=torch.int32)
        out, lse = ops.attention_forward(q, k, v, cu, None, True, 1.0, None, None)
        ops.attention_backward(out, q, k, v, out, lse, cu, None, True, 1.0, None, None, True, True)
    cu = torch.tensor([-5, 2**31 - 1], dtype=torch.int32)  # a length beyond int32
    with pytest.raises(RuntimeError, match="bias_table must reach Tmax = 2147483652, got one for 2"):
        ops.attention_forward(q, k, v, cu, None, False, 1.0, torch.zeros(4, 3), None)
