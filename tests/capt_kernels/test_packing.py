"""pack and unpack: real positions out and back in, bit for bit, whatever the padding holds."""

from __future__ import annotations

import pytest
import torch

import capt_kernels as ck

from . import checks

MASKS = {
    "right": [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]],
    "left": [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [1, 1, 1, 1, 1]],
    "holes": [[1, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 1, 0, 1, 0]],
    "full": [[1] * 5] * 3,
    "empty": [[0] * 5] * 3,
}


SHAPE = (3, 7)


def real_rows(hidden, mask):
    """The definition: each sequence's real rows, one after another."""
    rows = [hidden[b, t] for b in range(len(mask)) for t in range(len(mask[b])) if mask[b][t]]
    return torch.stack(rows) if rows else hidden.new_zeros(0, *hidden.shape[2:]) + hidden.sum() * 0


def padded_rows(rows, mask):
    """The definition of the way back."""
    rows, zero = iter(rows), torch.zeros(SHAPE).double()
    return torch.stack([torch.stack([next(rows) if real else zero for real in m]) for m in mask])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("gradient", checks.GRADIENTS)
@pytest.mark.parametrize("kind", checks.INPUTS)
@pytest.mark.parametrize("side", ["left", "holes", "full"])
def test_pack_and_unpack_equal_the_definition(side, kind, gradient, backend, device):
    mask = torch.tensor(MASKS[side], device=device)
    hidden = checks.leaves([torch.randn(3, 5, *SHAPE)], torch.float32, device, kind)
    checks.compare(
        lambda h, backend: ck.pack(h, mask, backend=backend)[0],
        lambda h: real_rows(h, MASKS[side]),
        hidden,
        backend,
        gradient,
    )
    indices = mask.flatten().nonzero().flatten()
    rows = checks.leaves([torch.randn(len(indices), *SHAPE)], torch.float32, device, kind)
    checks.compare(
        lambda r, backend: ck.unpack(r, indices, 3, 5, backend=backend),
        lambda r: padded_rows(r, MASKS[side]),
        rows,
        backend,
        gradient,
    )


@pytest.mark.parametrize("side", MASKS)
def test_offsets_and_indices(side, backend, device):
    mask = torch.tensor(MASKS[side], device=device)
    ids = torch.arange(15, device=device).view(3, 5)
    rows, cu_seqlens, indices = ck.pack(ids, mask, backend=backend)
    counts = [sum(m) for m in MASKS[side]]
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.tolist() == [0, counts[0], counts[0] + counts[1], sum(counts)]
    assert indices.dtype == torch.int64
    assert rows.tolist() == indices.tolist() == mask.flatten().nonzero().flatten().tolist()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("width", [1, 3, 33, 80, 96, 769])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 127, 513])
def test_sizes_there_and_back(length, width, backend, device):
    mask = torch.rand(2, length, device=device) < 0.6
    hidden = torch.randn(2, length, width, device=device)
    rows, _, indices = ck.pack(hidden, mask, backend=backend)
    assert torch.equal(rows, hidden[mask])
    back = ck.unpack(rows, indices, 2, length, backend=backend)
    assert torch.equal(back, hidden.masked_fill(~mask[..., None], 0))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool], ids=str
)
@pytest.mark.parametrize("trailing", [(), (5,), (2, 0), (2, 3)], ids=str)
def test_rows_of_every_dtype_move_bit_for_bit(trailing, dtype, backend, device):
    mask = torch.tensor(MASKS["holes"], device=device).bool()
    hidden = (torch.randn(3, 5, *trailing, device=device) * 3).to(dtype)
    rows, _, indices = ck.pack(hidden, mask, backend=backend)
    assert rows.dtype == dtype
    assert torch.equal(rows, hidden[mask])
    back = ck.unpack(rows, indices, 3, 5, backend=backend)
    assert back.dtype == dtype
    assert torch.equal(back[mask], rows)
    assert not back[~mask].any()


@pytest.mark.parametrize("view", [torch.conj, lambda x: x.conj().imag], ids=["conjugated", "negated"])
def test_views_whose_bits_are_not_their_values(view, backend, device):
    mask = torch.tensor(MASKS["holes"], device=device).bool()
    hidden = view(torch.randn(3, 5, 4, dtype=torch.complex64, device=device))
    rows, _, indices = ck.pack(hidden, mask, backend=backend)
    assert torch.equal(rows, hidden[mask])
    lazy = view(torch.randn(len(indices), 4, dtype=torch.complex64, device=device))
    assert torch.equal(ck.unpack(lazy, indices, 3, 5, backend=backend)[mask], lazy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_gradients_of_every_dtype_move_bit_for_bit(dtype, backend, device):
    mask = torch.tensor(MASKS["left"], device=device).bool()
    hidden = torch.randn(3, 5, 8, device=device).to(dtype).requires_grad_()
    rows, _, indices = ck.pack(hidden, mask, backend=backend)
    given = torch.randn(rows.shape, device=device).to(dtype)
    (grad,) = torch.autograd.grad(rows, hidden, given)
    assert torch.equal(grad[mask], given)
    assert not grad[~mask].any()
    rows = rows.detach().requires_grad_()
    given = torch.randn(3, 5, 8, device=device).to(dtype)
    (grad,) = torch.autograd.grad(ck.unpack(rows, indices, 3, 5, backend=backend), rows, given)
    assert torch.equal(grad, given[mask])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_padding_may_hold_anything(bad, backend, device):
    mask = torch.tensor(MASKS["holes"], device=device).bool()
    hidden = torch.randn(3, 5, 4, device=device).masked_fill(~mask[..., None], bad).requires_grad_()
    rows, _, indices = ck.pack(hidden, mask, backend=backend)
    assert rows.isfinite().all()
    rows.square().sum().backward()
    assert torch.equal(hidden.grad, (2 * hidden.detach()).masked_fill(~mask[..., None], 0))
    leaf = rows.detach().requires_grad_()
    out = ck.unpack(leaf, indices, 3, 5, backend=backend)
    assert not out[~mask].any()
    out.backward(torch.ones_like(out).masked_fill(~mask[..., None], bad))
    assert torch.equal(leaf.grad, torch.ones_like(leaf))


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0), (0, 0)], ids=str)
def test_empty(shape, backend, device):
    hidden = torch.randn(shape, device=device).requires_grad_()
    mask = torch.ones(shape[:2], dtype=torch.bool, device=device)
    rows, cu_seqlens, indices = ck.pack(hidden, mask, backend=backend)
    assert rows.shape == (shape[0] * shape[1], *shape[2:])
    assert cu_seqlens.tolist() == [shape[1] * b for b in range(shape[0] + 1)]
    out = ck.unpack(rows, indices, *shape[:2], backend=backend)
    assert out.shape == shape
    out.sum().backward()
    assert hidden.grad.shape == shape
    nothing, _, indices = ck.pack(
        torch.randn(2, 4, 3, device=device), torch.zeros(2, 4, device=device), backend=backend
    )
    assert nothing.shape == (0, 3)
    assert not ck.unpack(nothing, indices, 2, 4, backend=backend).any()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.bfloat16], ids=str)
def test_masks_of_every_dtype(dtype, backend, device):
    hidden, mask = torch.randn(3, 5, 2, device=device), torch.tensor(MASKS["holes"], device=device)
    for got, want in zip(
        ck.pack(hidden, mask.to(dtype), backend=backend), ck.pack(hidden, mask.bool(), backend=backend), strict=True
    ):
        assert torch.equal(got, want)


def test_gradcheck(backend):
    if backend == "triton":
        pytest.skip("gradcheck needs fp64: the reference and C++ backends")
    mask = torch.tensor(MASKS["holes"])
    hidden = torch.randn(3, 5, 2, dtype=torch.float64, requires_grad=True)
    rows, _, indices = ck.pack(hidden, mask, backend=backend)
    assert torch.autograd.gradcheck(lambda h: ck.pack(h, mask, backend=backend)[0], hidden)
    leaf = rows.detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda r: ck.unpack(r, indices, 3, 5, backend=backend), leaf)


def test_unpack_compiles_without_a_break(backend, device):
    if backend == "triton" and device == "cpu":
        pytest.skip("torch.compile cannot look into Triton's interpreter")
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda r, i, t: ck.unpack(r, i, 2, t, backend=backend), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for length in (7, 8, 9):
        indices = torch.arange(0, 2 * length, 2, device=device)
        rows = torch.randn(len(indices), 3, device=device, requires_grad=True)
        out, want = compiled(rows, indices, length), ck.unpack(rows, indices, 2, length, backend=backend)
        assert torch.equal(out, want)
        given = torch.randn_like(want)
        assert torch.equal(*(torch.autograd.grad(o, rows, given)[0] for o in (out, want)))


@pytest.mark.parametrize("kind", ["contiguous", "transposed", "sliced"])
def test_opcheck(kind, backend, device):
    if backend == "reference" or (backend == "triton" and device == "cpu"):
        pytest.skip("no kernel is registered for this backend and device")
    ops = torch.ops.capt_kernels
    hidden = checks.strided(torch.randn(2, 4, 3, device=device), kind)
    indices = torch.tensor([0, 3, 6], device=device)
    torch.library.opcheck(ops.pack.default, (hidden, indices))
    torch.library.opcheck(ops.unpack.default, (checks.strided(torch.randn(3, 3, device=device), kind), indices, 2, 4))


HIDDEN, REAL = torch.randn(2, 3, 4), torch.ones(2, 3)
ROWS, INDICES = torch.randn(2, 4), torch.tensor([1, 3])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: ck.pack(torch.randn(3), REAL, backend=b), r"hidden must have shape \[B, T, ...\], got \(3,\)"),
        (lambda b: ck.pack(HIDDEN, REAL[:1], backend=b), r"mask must have shape \[B, T\] = \(2, 3\), got \(1, 3\)"),
        (lambda b: ck.pack(HIDDEN, REAL * 0.5, backend=b), r"mask must hold only 0 and 1 .*, got 0.5"),
        (lambda b: ck.pack(HIDDEN, REAL * -torch.inf, backend=b), r"mask must hold only 0 and 1 .*, got -inf"),
        (lambda b: ck.pack(HIDDEN, REAL.to("meta"), backend=b), r"mask must be on cpu as hidden is, got meta"),
        (
            lambda b: ck.unpack(torch.tensor(1.0), INDICES, 2, 3, backend=b),
            r"rows must have shape \[N, ...\], got a scalar",
        ),
        (
            lambda b: ck.unpack(ROWS, INDICES[:1], 2, 3, backend=b),
            r"indices must have shape \[N\] = \(2,\), got \(1,\)",
        ),
        (lambda b: ck.unpack(ROWS, INDICES.int(), 2, 3, backend=b), r"indices must be int64, got torch.int32"),
        (
            lambda b: ck.unpack(ROWS, INDICES.to("meta"), 2, 3, backend=b),
            r"indices must be on cpu as rows is, got meta",
        ),
        (lambda b: ck.unpack(ROWS, INDICES, -1, 3, backend=b), r"batch must be a non-negative int, got -1"),
        (lambda b: ck.unpack(ROWS, INDICES, 2, -3, backend=b), r"length must be a non-negative int, got -3"),
        (
            lambda b: ck.unpack(ROWS, INDICES, 1, 1, backend=b),
            r"rows must fit into batch \* length = 1 positions, got 2",
        ),
        (
            lambda b: ck.unpack(ROWS, INDICES, 1, 3, backend=b),
            r"indices must lie within batch \* length = 3, got 1 to 3",
        ),
        (lambda b: ck.unpack(ROWS, INDICES - 2, 1, 3, backend=b), r"indices must lie within .* = 3, got -1 to 1"),
        (lambda b: ck.unpack(ROWS, INDICES.flip(0), 2, 3, backend=b), r"indices must rise strictly, got \[3, 1\] at 0"),
        (lambda b: ck.unpack(ROWS, INDICES * 0, 2, 3, backend=b), r"indices must rise strictly, got \[0, 0\] at 0"),
    ],
)
def test_bad_input(call, message, backend):
    with pytest.raises(ValueError, match=message):
        call(backend)


def test_unknown_backend():
    with pytest.raises(ValueError, match="backend must be 'auto' or one of reference, cpu, triton, got 'cuda'"):
        ck.pack(HIDDEN, REAL, backend="cuda")
    with pytest.raises(ValueError, match="backend must be 'auto' or one of reference, cpu, triton, got 'cuda'"):
        ck.unpack(ROWS, INDICES, 2, 3, backend="cuda")
