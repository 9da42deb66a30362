"""apply_rotary against a rotation of complex numbers, and against transformers."""

from __future__ import annotations

import pytest
import torch

import capt_kernels as ck

from . import checks


def angles(positions, head, base=10000.0):
    """``[..., d/2]`` in fp64."""
    return positions[..., None].double() * base ** (-torch.arange(0, head, 2).double() / head)


def tables(positions, head, dtype=torch.float32, device="cpu"):
    twice = torch.cat([angles(positions, head)] * 2, -1)
    return twice.cos().to(device, dtype), twice.sin().to(device, dtype)


def turned(cos, sin):
    """The definition: halves (a, b) of a head are numbers a + ib, turned by cos + i sin."""
    turn = torch.complex(cos.double(), sin.double()).cpu()[..., None, : cos.shape[-1] // 2]

    def one(x):
        out = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat([out.real, out.imag], -1)

    return lambda q, k: (one(q), one(k))


def op(cos, sin):
    return lambda q, k, backend: ck.apply_rotary(q, k, cos, sin, backend=backend)


CASES = [  # leading sizes, heads, key heads, head size
    ((5,), 4, 2, 8),
    ((2, 5), 3, 1, 6),
    ((1,), 1, 1, 2),
    ((3, 17), 2, 2, 64),
    ((127,), 9, 3, 80),
    ((2, 16), 4, 4, 96),
    ((2, 15), 1, 1, 130),
    ((513,), 2, 1, 16),
]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_a_rotation(case, dtype, backend, device):
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("fp64 is for the reference and C++ backends")
    lead, heads, key_heads, head = case
    table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    cos, sin = tables(torch.randint(0, 999, lead), head, table_dtype, device)
    inputs = checks.leaves([torch.randn(*lead, heads, head), torch.randn(*lead, key_heads, head)], dtype, device)
    checks.compare(op(cos, sin), turned(cos, sin), inputs, backend)


@pytest.mark.parametrize("gradient", checks.GRADIENTS)
@pytest.mark.parametrize("kind", checks.INPUTS)
@pytest.mark.parametrize("lead", [(6,), (2, 6)], ids=str)
def test_strides(lead, kind, gradient, backend, device):
    cos, sin = (checks.strided(t, kind) for t in tables(torch.randint(0, 99, lead), 8, device=device))
    inputs = checks.leaves([torch.randn(*lead, 4, 8), torch.randn(*lead, 2, 8)], torch.float32, device, kind)
    checks.compare(op(cos, sin), turned(cos, sin), inputs, backend, gradient)


def test_heads_first_memory(backend, device):
    """A view of [B, H, T, d], as a projection split into heads and transposed leaves it; q and k differ in strides."""
    cos, sin = tables(torch.arange(6).expand(2, 6), 8, device=device)
    q = torch.randn(2, 3, 6, 8, device=device).transpose(1, 2).requires_grad_()
    k = torch.randn(2, 6, 2 * 2 * 8, device=device)[..., 16:].unflatten(-1, (2, 8)).requires_grad_()
    checks.compare(op(cos, sin), turned(cos, sin), [q, k], backend)


def test_tables_of_one_sequence_serve_all(backend, device):
    cos, sin = tables(torch.arange(6)[None], 8, device=device)
    q, k = torch.randn(3, 6, 4, 8, device=device), torch.randn(3, 6, 2, 8, device=device)
    got = ck.apply_rotary(q, k, cos, sin, backend=backend)
    want = ck.apply_rotary(q, k, cos.expand(3, -1, -1), sin.expand(3, -1, -1), backend=backend)
    assert all(map(torch.equal, got, want))


def test_equals_transformers(backend, device):
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    cos, sin = tables(torch.arange(7).expand(2, 7), 16, device=device)
    q, k = torch.randn(2, 7, 4, 16, device=device), torch.randn(2, 7, 2, 16, device=device)
    want = modeling.apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    for got, theirs in zip(ck.apply_rotary(q, k, cos, sin, backend=backend), want, strict=True):
        torch.testing.assert_close(got, theirs.transpose(1, 2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_far_position_errs_by_rounding_alone(dtype, backend, device):
    """With fp32 tables, bf16 heads at position 8191 are as exact as their dtype is."""
    position = torch.tensor([8191])
    cos, sin = tables(position, 64, device=device)
    q, k = (torch.randn(1, 2, 64).to(device, dtype) for _ in range(2))
    exact = turned(*tables(position, 64, torch.float64))(q.cpu().double(), k.cpu().double())
    for got, want in zip(ck.apply_rotary(q, k, cos, sin, backend=backend), exact, strict=True):
        assert got.dtype == dtype
        assert ((got.cpu().double() - want).abs() <= torch.finfo(dtype).eps / 2 * want.abs() + 1e-6).all()


@pytest.mark.parametrize("table_dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_tables_of_every_dtype(table_dtype, backend, device):
    if backend == "triton" and table_dtype == torch.float64:
        pytest.skip("fp64 is for the reference and C++ backends")
    cos, sin = tables(torch.arange(5), 8, table_dtype, device)
    q, k = torch.randn(5, 4, 8, device=device), torch.randn(5, 2, 8, device=device)
    for got, want in zip(
        ck.apply_rotary(q, k, cos, sin, backend=backend),
        ck.apply_rotary(q, k, cos.float(), sin.float(), backend="reference"),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_gradcheck(backend):
    """Also with halves of a table that differ, where the backward is the transpose and no rotation back."""
    if backend == "triton":
        pytest.skip("gradcheck needs fp64: the reference and C++ backends")
    for lead in ((4,), (2, 3)):
        cos, sin = torch.randn(2, *lead, 6, dtype=torch.float64)
        q = torch.randn(*lead, 2, 6, dtype=torch.float64, requires_grad=True)
        k = torch.randn(*lead, 1, 6, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda q, k, c=cos, s=sin: ck.apply_rotary(q, k, c, s, backend=backend), (q, k))


@pytest.mark.parametrize("wanted", ["q", "k", "only q's output", "only k's output"])
def test_only_the_gradients_asked_for(wanted, backend, device):
    cos, sin = tables(torch.arange(5), 8, device=device)
    q, k = torch.randn(5, 4, 8, device=device), torch.randn(5, 2, 8, device=device)
    q.requires_grad_(wanted != "k")
    k.requires_grad_(wanted != "q")
    turned_q, turned_k = ck.apply_rotary(q, k, cos, sin, backend=backend)
    loss = sum(
        x.square().sum() for x, name in ((turned_q, "q"), (turned_k, "k")) if wanted in (name, f"only {name}'s output")
    )
    loss.backward()
    for name, x in (("q", q), ("k", k)):
        if wanted in (name, f"only {name}'s output"):  # a rotation keeps the norm, so its square has the gradient 2x
            torch.testing.assert_close(x.grad, 2 * x.detach(), rtol=1e-5, atol=1e-5)
        else:
            assert x.grad is None or not x.grad.any()


@pytest.mark.parametrize("shape", [(0, 2, 4), (0, 3, 2, 4), (2, 0, 2, 4), (3, 0, 4), (3, 2, 0)], ids=str)
def test_empty(shape, backend, device):
    q = torch.randn(shape, device=device, requires_grad=True)
    k = torch.randn(shape, device=device, requires_grad=True)
    cos, sin = torch.randn(2, *shape[:-2], shape[-1], device=device)
    out = ck.apply_rotary(q, k, cos, sin, backend=backend)
    assert [o.shape for o in out] == [shape, shape]
    (out[0].sum() + out[1].sum()).backward()
    assert q.grad.shape == k.grad.shape == shape


def test_keeps_its_tables_alone(backend, device):
    if backend == "reference":
        pytest.skip("plain torch keeps what its autograd formulas need")
    cos, sin = tables(torch.arange(5), 8, device=device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ck.apply_rotary(
            *(torch.randn(5, 2, 8, device=device, requires_grad=True) for _ in "qk"), cos, sin, backend=backend
        )
    assert {t.data_ptr() for t in kept} == {cos.data_ptr(), sin.data_ptr()}


def test_compiles_without_a_break(backend, device):
    if backend == "triton" and device == "cpu":
        pytest.skip("torch.compile cannot look into Triton's interpreter")
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *a: ck.apply_rotary(*a, backend=backend), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for length in (7, 8, 9):
        cos, sin = tables(torch.arange(length), 8, device=device)
        inputs = [torch.randn(length, h, 8, device=device, requires_grad=True) for h in (4, 2)]
        out, want = compiled(*inputs, cos, sin), ck.apply_rotary(*inputs, cos, sin, backend=backend)
        given = [torch.randn_like(o) for o in want]
        for a, b in zip(
            (*out, *torch.autograd.grad(out, inputs, given)),
            (*want, *torch.autograd.grad(want, inputs, given)),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["contiguous", "transposed", "sliced"])
def test_opcheck(kind, backend, device):
    if backend == "reference" or (backend == "triton" and device == "cpu"):
        pytest.skip("no kernel is registered for this backend and device")
    q, k = (checks.strided(torch.randn(2, 5, h, 8, device=device), kind) for h in (4, 2))
    cos, sin = (checks.strided(t, kind) for t in tables(torch.arange(5).expand(2, 5), 8, device=device))
    for arguments in (
        (q, k, cos, sin, False),
        (q, k, cos, sin, True),
        (None, k, cos, sin, True),
        (q, None, cos, sin, True),
    ):
        torch.library.opcheck(torch.ops.capt_kernels.rotary.default, arguments)


Q, K = torch.randn(3, 4, 8), torch.randn(3, 2, 8)
COS, SIN = torch.randn(2, 3, 8)
P4 = torch.randn(2, 3, 4, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Q.long(), K, COS, SIN), r"q must be float32, float16, bfloat16 or float64, got torch.int64"),
        ((Q[0], K[0], COS, SIN), r"q must have shape \[R, H, d\] or \[B, T, H, d\], got \(4, 8\)"),
        ((Q[..., :7], K[..., :7], COS[..., :7], SIN[..., :7]), r"q must have an even head size d, .*, got 7"),
        ((Q, K[:2], COS, SIN), r"k must have q's shape \(3, 4, 8\) but for the number of heads, got \(2, 2, 8\)"),
        ((Q, K[..., :6], COS, SIN), r"k must have q's shape \(3, 4, 8\) but for .*, got \(3, 2, 6\)"),
        ((Q, K[None], COS, SIN), r"k must have q's shape .*, got \(1, 3, 2, 8\)"),
        ((Q, K.half(), COS, SIN), r"k must have q's dtype torch.float32, got torch.float16"),
        ((Q, K, COS[:2], SIN), r"cos must have shape \[R, d\] = \(3, 8\) as q has, got \(2, 8\)"),
        ((Q, K, COS, SIN[:, :4]), r"sin must have shape \[R, d\] = \(3, 8\) as q has, got \(3, 4\)"),
        ((P4, P4, COS, SIN), r"cos must have shape \[B, T, d\] or \[1, T, d\] = \(2, 3, 8\) as q has, got \(3, 8\)"),
        ((P4, P4, COS.expand(3, 3, 8), SIN), r"cos must have shape .* = \(2, 3, 8\) as q has, got \(3, 3, 8\)"),
        ((Q, K, COS.int(), SIN), r"cos must be float32, float16, bfloat16 or float64, got torch.int32"),
        ((Q, K, COS, SIN.half()), r"sin must have cos's dtype torch.float32, got torch.float16"),
        ((Q, K, COS, SIN.clone().requires_grad_()), r"sin must need no gradient \(detach it\)"),
        ((Q, K, COS.to("meta"), SIN), r"cos must be on cpu as q is, got meta"),
        ((Q, K.to("meta"), COS, SIN), r"k must be on cpu as q is, got meta"),
    ],
)
def test_bad_input(arguments, message, backend):
    with pytest.raises(ValueError, match=message):
        ck.apply_rotary(*arguments, backend=backend)


def test_unknown_backend():
    with pytest.raises(ValueError, match="backend must be 'auto' or one of reference, cpu, triton, got 'cuda'"):
        ck.apply_rotary(Q, K, COS, SIN, backend="cuda")
