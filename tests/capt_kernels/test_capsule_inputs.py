"""The capsule ops on inputs that broke others: odd memory, NaN that must not be felt, short sequences, wide sums."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

import capt_kernels as ck

from . import checks
from .capsule_cases import OPS, Case, call, gradients, make


@pytest.mark.parametrize("kind", checks.INPUTS)
@pytest.mark.parametrize("case", [Case(width=16, lead=1), Case(width=16, layout="left", slots=2)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_strides(op, case, kind, backend, device):
    """Rows in memory of another order, and gradients as autograd hands them in, against the same values made dense."""
    tensors, options, _ = make(case, op, torch.float32, device)
    odd = ("hidden", "branch") if "expanded" in kind else tensors
    views = {k: checks.strided(v.detach(), kind if k in odd else "contiguous") for k, v in tensors.items()}
    dense = {k: v.clone(memory_format=torch.contiguous_format).requires_grad_() for k, v in views.items()}
    views = {k: v.requires_grad_() for k, v in views.items()}
    out, expected = call(op, views, options, backend), call(op, dense, options, backend)
    for got, want in zip(out, expected, strict=True):
        assert torch.equal(got, want)
    for gradient in (*checks.GRADIENTS, "sliced"):
        incoming = [checks.incoming(o, gradient) for o in out]
        got = gradients(out, incoming, views, again=True)
        want = gradients(expected, [g.contiguous() for g in incoming], dense, again=True)
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"d{n}: {m}")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("sick", [1, 3], ids=["a sequence", "rows past the last offset"])
@pytest.mark.parametrize(
    "case",
    [
        Case(lead=1, slots=2, per_row=True, lengths=(5, 40, 3), beyond=2),
        Case(per_row=True, lengths=(5, 40, 3), beyond=2, pool_mask=True),
        Case(layout="left", slots=2, per_row=True, lengths=(5, 40, 3)),
        Case(layout="right", per_row=True, lengths=(5, 40, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("op", OPS)
def test_what_a_sequence_holds_stays_there(op, case, sick, bad, backend, device):
    """NaN or inf in one sequence, its prompt and the gradient that comes in for it: the others give the same bits."""
    if case.layout != "packed" and sick == 3:
        pytest.skip("a padded batch has no rows past its sequences")
    tensors, options, _ = make(case, op, torch.float32, device)
    if "weight" in tensors:
        tensors["weight"] = tensors["weight"].detach()  # its gradient is a sum over all rows
    spans = [(sick, sick + 1)] * 2
    if case.layout == "packed":
        bounds = [*options["cu_seqlens"].tolist(), len(tensors["hidden"])]
        gained = case.slots if op == "capsule_prepend" else 0
        spans = [(bounds[sick] + n * sick, bounds[sick + 1] + n * min(sick + 1, 3)) for n in (0, gained)]

    def others(tensor, span):
        return torch.cat([tensor[: span[0]], tensor[span[1] :]])

    results, incoming = [], None
    for value in (None, bad):
        given = {k: v.detach().clone() for k, v in tensors.items()}
        if value is not None:
            given["hidden"][slice(*spans[0])] = value
            given["prompt"][sick : sick + 1] = value
        given = {k: v.requires_grad_(k != "weight") for k, v in given.items()}
        out = call(op, given, options, backend)
        incoming = incoming or [torch.randn_like(o) for o in out]
        for gradient in incoming if value is not None else ():
            gradient[slice(*spans[1])] = value
        leaves = {k: v for k, v in given.items() if k != "weight"}
        grads = gradients(out, incoming, leaves)
        prompt = grads.pop("prompt")
        results.append([others(o, spans[1]) for o in out] + [others(g, spans[0]) for g in grads.values()])
        results[-1].append(others(prompt, (sick, sick + 1)))
    for got, want in zip(*results, strict=True):
        assert want.isfinite().all()
        assert torch.equal(got, want)


ROWS = torch.tensor([[[1.0, 2], [3, 4], [5, 6], [100, 100]]])
MASK = torch.tensor([[1, 1, 0]])
P = torch.tensor([0.5, -0.5])


def test_the_small_example_by_hand(backend, device):
    hidden, prompt = ROWS.to(device, copy=True).requires_grad_(), P.to(device, copy=True).requires_grad_()
    out = ck.capsule_refresh(hidden, prompt, MASK.to(device), backend=backend)
    assert out[0, 0].tolist() == [3.5, 3.5]
    assert torch.equal(out[0, 1:], hidden[0, 1:])
    out[0, 0].backward(torch.tensor([3.0, 6.0], device=device))
    assert prompt.grad.tolist() == [3.0, 6.0]
    torch.testing.assert_close(hidden.grad[0].cpu(), torch.tensor([[1.0, 2], [1, 2], [1, 2], [0, 0]]))
    assert hidden.grad[0, 3].tolist() == [0.0, 0.0]


def test_a_sequence_of_padding_keeps_its_slot_and_stays_alone(backend, device):
    hidden = torch.cat([ROWS, ROWS]).to(device)
    mask = torch.cat([MASK, 0 * MASK]).to(device)
    prompt = P.to(device, copy=True).requires_grad_()
    out = ck.capsule_refresh(hidden, prompt, mask, backend=backend)
    assert out[:, 0].tolist() == [[3.5, 3.5], [1.5, 1.5]]
    out[0].sum().backward()
    assert prompt.grad.tolist() == [1.0, 1.0]
    first = ck.capsule_prepend(hidden[:, 1:], prompt, mask, backend=backend)
    assert first[1, 0].tolist() == P.tolist()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("op", OPS)
def test_padding_may_hold_anything(op, bad, backend, device):
    tensors, options, _ = make(Case(layout="left", lengths=(3, 0, 6)), op, torch.float32, device)
    held = 0 if op == "capsule_prepend" else 1
    real = torch.cat([torch.ones(3, held, dtype=torch.bool), options["mask"].cpu()], 1).to(device)
    shown = torch.cat([torch.ones(3, 1, dtype=torch.bool), options["mask"].cpu()], 1).to(device)
    clean, dirty = dict(tensors), dict(tensors)
    for store, value in ((clean, 0.0), (dirty, bad)):
        store["hidden"] = tensors["hidden"].detach().masked_fill(~real[..., None], value).requires_grad_()
    results = []
    for store in (clean, dirty):
        out = call(op, store, options, backend)
        incoming = [torch.where(shown[..., None], 1.0, 0.0).expand_as(o) for o in out]
        grads = gradients(out, incoming, store)
        results.append(([o[shown] for o in out], grads["prompt"], grads["hidden"][real]))
    for got, want in zip(results[1][0], results[0][0], strict=True):
        assert torch.equal(got, want)
    assert torch.equal(results[1][1], results[0][1])
    assert torch.equal(results[1][2], results[0][2])


def test_sums_are_wide(backend, device):
    hundred = torch.full((1, 1024, 2), 100.0, dtype=torch.float16, device=device)
    zero = torch.zeros(2, device=device)
    assert ck.capsule_prepend(hundred, zero, backend=backend)[0, 0].tolist() == [100.0, 100.0]
    ones = torch.ones(1, 4096, 2, dtype=torch.bfloat16, device=device)
    assert ck.capsule_prepend(ones, zero, backend=backend)[0, 0].tolist() == [1.0, 1.0]


def test_a_count_that_bf16_cannot_hold(backend, device):
    """257 is not a bf16 number: a count rounded to 256 would give 255/256."""
    rows = torch.full((1, 257, 2), 1.0, dtype=torch.bfloat16, device=device)
    rows[:, 0] = -1.0
    slot = ck.capsule_refresh(rows.float(), torch.zeros(2, device=device), backend=backend)[0, 0]
    torch.testing.assert_close(slot.cpu(), torch.full((2,), 255 / 257))
    low = ck.capsule_refresh(rows, torch.zeros(2, device=device), backend=backend)[0, 0]
    assert low.tolist() == torch.full((2,), 255 / 257).bfloat16().tolist()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.float16])
def test_masks_of_every_dtype(dtype, backend, device):
    tensors, options, _ = make(Case(layout="left"), "capsule_refresh", torch.float32, device)
    want = call("capsule_refresh", tensors, options, backend)[0]
    got = call("capsule_refresh", tensors, {**options, "mask": options["mask"].to(dtype)}, backend)[0]
    assert torch.equal(got, want)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_sequence_is_the_same_alone_and_among_others(side, backend, device):
    tensors, options, _ = make(Case(layout=side, lengths=(4, 9)), "capsule_refresh", torch.float32, device)
    hidden, prompt = tensors["hidden"].detach(), tensors["prompt"].detach()
    among = ck.capsule_refresh(hidden, prompt, options["mask"], backend=backend)[0]
    real = torch.cat([torch.tensor([True]), options["mask"][0].cpu()]).to(device)
    alone = ck.capsule_refresh(hidden[:1, real], prompt, backend=backend)[0]
    torch.testing.assert_close(among[real], alone, rtol=1e-6, atol=1e-6)
    ones = torch.ones(1, 4, dtype=torch.int64, device=device)
    assert torch.equal(alone, ck.capsule_refresh(hidden[:1, real], prompt, ones, backend=backend)[0])


def test_packed_equals_padded(backend, device):
    lengths = torch.tensor([3, 0, 5])
    mask = torch.arange(5) < lengths[:, None]
    hidden, prompt = torch.randn(3, 5, 8, device=device), torch.randn(2, 8, device=device)
    cu_seqlens = torch.tensor([0, 3, 3, 8], dtype=torch.int32, device=device)
    padded = ck.capsule_prepend(hidden, prompt, mask.to(device), backend=backend)
    packed = ck.capsule_prepend(hidden[mask.to(device)], prompt, cu_seqlens=cu_seqlens, backend=backend)
    real = torch.cat([torch.ones(3, 2, dtype=torch.bool), mask], 1).to(device)
    torch.testing.assert_close(padded[real], packed, rtol=1e-6, atol=1e-6)


def test_rows_past_the_last_offset(backend, device):
    tensors, options, _ = make(Case(beyond=3), "capsule_refresh", torch.float32, device)
    out = call("capsule_refresh", tensors, options, backend)[0]
    assert torch.equal(out[-3:], tensors["hidden"][-3:])
    grads = gradients([out[:-3].sum()], None, tensors)
    assert not grads["hidden"][-3:].any()


@pytest.mark.parametrize("case", [Case(width=0, slots=2), Case(width=0, layout="left")], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_rows_of_no_width(op, case, backend, device):
    tensors, options, _ = make(case, op, torch.float32, device)
    out = call(op, tensors, options, backend)
    assert [o.shape for o in out] == [o.shape for o in call(op, tensors, options, "reference")]
    grads = gradients(out, [torch.ones_like(o) for o in out], tensors)
    assert all(grads[k].shape == v.shape for k, v in tensors.items())


@pytest.mark.parametrize("op", OPS)
def test_shapes_without_values(op, backend, device):
    """FakeTensorMode has no offsets to look at, on any device."""
    if backend != "cpu":
        pytest.skip("plain torch and Triton's interpreter need values")
    tensors, options, _ = make(Case(lead=1), op, torch.float32, device)
    want = [o.shape for o in call(op, tensors, options, backend)]
    mode = FakeTensorMode()
    tensors = {k: mode.from_tensor(v) for k, v in tensors.items()}
    options["cu_seqlens"] = mode.from_tensor(options["cu_seqlens"])
    with mode:
        assert [o.shape for o in call(op, tensors, options, backend)] == want


def test_the_saved_output_of_another_op(backend, device):
    """softmax keeps its output for backward: an op that wrote into it would spoil the gradient."""
    x, prompt = torch.randn(2, 5, 8, device=device).requires_grad_(), torch.zeros(8, device=device)
    out = ck.capsule_refresh(x.softmax(-1), prompt, backend=backend)
    incoming = torch.randn_like(out)
    got = torch.autograd.grad(out, x, incoming)[0]
    soft = x.softmax(-1)
    want = torch.autograd.grad(torch.cat([soft.mean(1, keepdim=True), soft[:, 1:]], 1), x, incoming)[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_lead_with_fewer_real_rows(backend, device):
    rows = torch.tensor([[1.0], [2], [3], [4]], device=device)
    cu_seqlens = torch.tensor([0, 1, 1, 4], device=device)
    out = ck.capsule_prepend(
        rows, torch.tensor([9.0], device=device), cu_seqlens=cu_seqlens, lead=2, pool=False, backend=backend
    )
    assert out.flatten().tolist() == [1, 9, 9, 2, 3, 9, 4]
