"""The attention kernels in Triton: strides, what must not reach a result, what is kept, and their registration."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import capt_kernels as ck
from capt_kernels.attention import fused
from capt_kernels.backends import interpreted

from . import checks
from .test_attention import KINDS, MIXED, Case, dense, make, offsets, op

if not interpreted():
    pytest.skip("these tests take CPU tensors, and with them Triton's interpreter", allow_module_level=True)

from capt_kernels.attention import triton
from capt_kernels.attention.triton import layout


def attend(q, k, v, lengths, keys=None, *, causal=True, scale=0.3, bias_table=None, window=None):
    """The forward and a backward without a door: output, log-sum-exp, gradients for an incoming one of 1."""
    where = (offsets(lengths), offsets(lengths if keys is None else keys), causal, scale, bias_table, window)
    out, lse = triton.attention_forward(q, k, v, *where)
    grads = triton.attention_backward(torch.ones_like(out), q, k, v, out, lse, *where, True, True)
    return out, lse, *grads


PAIRS = list(zip([*KINDS, *MIXED], [*checks.GRADIENTS, "sum"], strict=True))


@pytest.mark.parametrize(("kinds", "gradient"), PAIRS, ids=str)
def test_strides(kinds, gradient):
    """k and v of different strides among them: a kernel that reads one with the other's passes wherever they agree."""
    case = Case(lengths=(5, 0, 4), bias=5, causal=False, beyond=1)
    inputs, options = make(case, torch.float32, kinds)
    checks.compare(op(options), dense(case, options), inputs, "triton", gradient)


@pytest.mark.parametrize("head", [80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_wide_heads(head, dtype):
    case = Case(lengths=(33, 2), heads=2, key_heads=1, head=head, scale=head**-0.5)
    inputs, options = make(case, dtype)
    checks.compare(op(options), dense(case, options), inputs, "triton")


@pytest.mark.parametrize("case", [Case(lengths=(33, 70, 1)), Case(lengths=(70, 129), causal=False, bias=129)], ids=str)
def test_uneven_lengths(case):
    case = Case(**{**vars(case), "heads": 2, "key_heads": 1})
    inputs, options = make(case, torch.float32)
    checks.compare(op(options), dense(case, options), inputs, "triton")


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("causal", [True, False])
def test_nan_stays_in_its_sequence(causal):
    """Rows of the neighbours and rows past the last offset lie in the same blocks."""
    q, k, v = (torch.randn(50, heads, 8) for heads in (2, 1, 1))
    clean = attend(q, k, v, (20, 9, 15), causal=causal)
    for x in (q, k, v):
        x[:20] = torch.nan
        x[29:44] = torch.inf
        x[44:] = torch.nan
    dirty = attend(q, k, v, (20, 9, 15), causal=causal)
    for a, b in zip(clean, dirty, strict=True):
        a, b = (x.T if x.dim() == 2 else x for x in (a, b))
        assert torch.equal(a[20:29], b[20:29])
    assert not dirty[0][44:].any()
    assert not any(grad[44:].any() for grad in dirty[2:])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("causal", [True, False])
def test_queries_without_a_key(causal):
    q, k, v = (torch.randn(12, heads, 8) for heads in (2, 1, 1))
    out, lse, dq, dk, dv = attend(q, k[:5], v[:5], (7, 5), (3, 0), causal=causal)
    blind = torch.tensor([causal] * 4 + [False] * 3 + [True] * 5)
    assert not out[blind].any()
    assert torch.equal(lse == torch.inf, blind.expand(2, -1))
    assert not dq[blind].any()
    assert all(grad.isfinite().all() for grad in (out, dq, dk, dv))
    assert not dk[3:].any()
    assert not dv[3:].any()


def test_log_sum_exp_is_that_of_base_two():
    q, k, v = (torch.randn(9, 2, 8) for _ in range(3))
    lse = attend(q, k, v, (9,), causal=False)[1]
    assert lse.dtype == torch.float32
    want = torch.einsum("ihd,jhd->hij", q, k).mul(0.3).logsumexp(-1) / torch.tensor(2.0).log()
    torch.testing.assert_close(lse, want)


@pytest.mark.parametrize(
    "extra", [{}, {"window": 9}, {"bias_table": torch.randn(4, 255)}], ids=["plain", "window", "bias"]
)
def test_kept_for_the_backward(extra):
    """q, k, v, the output and one fp32 a head and row; offsets and the bias's table are the caller's."""
    q, k, v = (torch.randn(60, heads, 16, dtype=torch.float16, requires_grad=True) for heads in (4, 2, 2))
    cu_seqlens = offsets([40, 20])
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        out = ck.capsule_attention(q, k, v, cu_seqlens=cu_seqlens, causal=True, scale=0.3, backend="triton", **extra)
    given = [cu_seqlens, *(x for x in extra.values() if isinstance(x, torch.Tensor))]
    bytes_kept = sum(t.untyped_storage().nbytes() for t in kept.values())
    exact = sum(t.nbytes for t in (q, k, v, out, *given)) + 4 * out.shape[0] * out.shape[1]
    assert bytes_kept == exact


def test_only_the_gradients_asked_for():
    q, k, v = (torch.randn(9, heads, 8) for heads in (4, 2, 2))
    where = (offsets([9]), offsets([9]), True, 0.3, None, None)
    out, lse = triton.attention_forward(q, k, v, *where)
    saved = (torch.ones_like(out), q, k, v, out, lse)
    dq, dk, dv = triton.attention_backward(*saved, *where, True, True)
    alone, *nothing = triton.attention_backward(*saved, *where, True, False)
    assert torch.equal(alone, dq)
    assert [x.numel() for x in nothing] == [0, 0]
    nothing, *keys = triton.attention_backward(*saved, *where, False, True)
    assert nothing.numel() == 0
    assert torch.equal(keys[0], dk)
    assert torch.equal(keys[1], dv)


def test_a_table_too_short_is_not_read():
    """The door cannot see lengths on a GPU: what lies past a table of 5 must not come in, and the result is loud."""
    q, k, v = (torch.randn(12, 2, 8) for _ in range(3))
    room = torch.randn(4, 9)
    for causal in (True, False):
        results = attend(q, k, v, (7, 5), causal=causal, bias_table=room[1:3])
        alone = attend(q[7:], k[7:], v[7:], (5,), causal=causal, bias_table=room[1:3])
        assert results[0][:7].isnan().all()
        for got, want in zip(results, alone, strict=True):
            got, want = (x.T if x.dim() == 2 else x for x in (got, want))
            assert torch.equal(got[7:], want)


def test_wrong_offsets_stay_within_the_rows():
    """On a GPU offsets are not looked at either: the result is undefined, but made of rows of the call."""
    room = torch.full((40, 2, 8), torch.nan)
    room[8:20] = torch.randn(12, 2, 8)
    q = room[8:20]
    for lengths in ((9, -5, 90), (50,), (-3, 4)):
        out, *_ = attend(q, q, q, lengths)
        assert not out.isnan().any()


def test_rows_too_far_apart_are_copied():
    far = torch.empty_strided((2, 1, 8), (2**24, 8, 1), device="meta")
    assert layout.element_strided(far).is_contiguous()
    near = torch.empty_strided((2, 1, 8), (2**20, 8, 1), device="meta")
    assert layout.element_strided(near) is near


@pytest.fixture
def registered():
    """The interpreted kernels as the ops' CPU kernels, so that the dispatcher's side can be tested without a GPU."""
    with torch.library._scoped_library("capt_kernels", "IMPL") as library:
        library.impl("attention_forward", triton.attention_forward, "CPU")
        library.impl("attention_backward", triton.attention_backward, "CPU")
        yield torch.ops.capt_kernels


@pytest.mark.parametrize("dropout", [(), (0.3, torch.tensor(3))], ids=["", "dropout"])
@pytest.mark.parametrize("more", [(True, 0.3, None, 4), (False, 1.0, torch.randn(2, 19), None)], ids=["window", "bias"])
def test_schema_and_fake(more, dropout, registered):
    q, k, v = (torch.randn(12, heads, 8) for heads in (2, 1, 1))
    where = (offsets([7, 4]), offsets([7, 4]), *more)
    torch.library.opcheck(registered.attention_forward.default, (q, k, v, *where, *dropout))
    out, lse = registered.attention_forward(q, k, v, *where, *dropout)
    for needed in ((True, True), (True, False), (False, True)):
        arguments = (torch.randn_like(out), q, k, v, out, lse, *where, *needed, *dropout)
        torch.library.opcheck(registered.attention_backward.default, arguments)


def test_compiles_to_one_graph(registered):
    q, k, v = (torch.randn(12, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    cu_seqlens = offsets([7, 4])

    def call(q, k, v):
        return fused.attention(torch.ops.capt_kernels, q, k, v, cu_seqlens, None, True, 0.3, None, None, 0.0, None)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    want, got = call(q, k, v), compiled(q, k, v)
    assert torch.equal(got, want)
    given = torch.randn_like(want)
    for a, b in zip(
        torch.autograd.grad(got, (q, k, v), given), torch.autograd.grad(want, (q, k, v), given), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("q", "message"),
    [
        (torch.randn(4, 2, 8).double(), r"'triton' takes q in torch.float16, torch.bfloat16, torch.float32, got .*64"),
        (torch.randn(4, 2, 257), r"backend 'triton' takes head sizes up to 256, got 257"),
        (torch.randn(4, 2, 8).bfloat16(), r"backend 'triton' has no bfloat16 product in Triton's interpreter"),
    ],
)
def test_what_the_kernels_cannot_serve(q, message):
    with pytest.raises(ValueError, match=message):
        ck.capsule_attention(q, q, q, cu_seqlens=offsets([4]), causal=True, scale=1.0, backend="triton")
