"""capsule_prepend, capsule_refresh and add_rms_norm against the fp64 oracle: every backend, dtype, size and option."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import capt_kernels as ck
from capt_kernels.backends import kernels
from capt_kernels.capsule import fused

from . import checks, oracle
from .capsule_cases import OPS, Case, call, compare, gradients, make

WIDTHS = [Case(width=d, layout=layout) for d in (1, 3, 80, 96, 769) for layout in ("packed", "left", "right")]
LENGTHS = [
    Case(lengths=(t, 2), layout=layout) for t in (0, 1, 2, 15, 16, 17, 127, 513) for layout in ("packed", "right")
]
OPTIONS = [
    Case(layout="left"),
    Case(layout="holes", pool_mask=True),
    Case(layout="right", slots=4, per_row=True, pool_mask=True),
    Case(layout="left", slots=3, pool=False),
    Case(lead=1),
    Case(lead=2, slots=2, pool_mask=True),
    Case(lead=3, slots=5, per_row=True, beyond=3),
    Case(lead=1, pool=False),
    Case(slots=4, pool_mask=True, beyond=2),
    Case(beyond=4, branch=False),
    Case(lengths=(), layout="packed"),
    Case(lengths=(), layout="right"),
    Case(lengths=(), layout="packed", beyond=3, slots=2),
    Case(lengths=(0, 0), layout="packed", lead=1),
    Case(lengths=(6,), layout="right"),
    Case(lengths=(1,) * 33, layout="packed", width=3),
    Case(lengths=(3,) * 17, layout="right", width=1),
]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", WIDTHS + LENGTHS + OPTIONS, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_equals_the_oracle(op, case, backend, device):
    compare(op, case, torch.float32, backend, device)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "case", [OPTIONS[2], OPTIONS[6], Case(width=96, layout="left"), Case(width=80, lead=1)], ids=str
)
@pytest.mark.parametrize("op", OPS)
def test_other_dtypes(op, case, dtype, backend, device):
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("fp64 is for the reference and C++ backends")
    compare(op, case, dtype, backend, device)


@pytest.mark.parametrize(
    "case", [Case(width=3, lead=1, slots=2), Case(width=2, layout="left", slots=2, lengths=(3, 0, 4))], ids=str
)
@pytest.mark.parametrize("op", OPS)
def test_gradcheck(op, case, backend):
    if backend == "triton":
        pytest.skip("gradcheck needs fp64: the reference and C++ backends")
    tensors, options, _ = make(case, op, torch.float64, prompt_dtype=torch.float64)
    names = list(tensors)
    assert torch.autograd.gradcheck(
        lambda *v: tuple(call(op, dict(zip(names, v, strict=True)), options, backend)), tuple(tensors.values())
    )


@pytest.mark.parametrize("op", OPS)
def test_only_the_gradients_asked_for(op, backend, device):
    tensors, options, _ = make(Case(), op, torch.float32, device)
    frozen = {k: v.detach() for k, v in tensors.items()}
    frozen["prompt"].requires_grad_()
    out = call(op, frozen, options, backend)
    sum(o.square().sum() for o in out).backward()
    full = call(op, tensors, options, backend)
    want = gradients(full, [2 * o.detach() for o in full], tensors)
    torch.testing.assert_close(frozen["prompt"].grad, want["prompt"], rtol=1e-5, atol=1e-5)
    assert all(v.grad is None for k, v in frozen.items() if k != "prompt")


def test_one_output_without_a_gradient(backend, device):
    tensors, options, _ = make(Case(lead=1), "add_rms_norm", torch.float32, device)
    for chosen in (0, 1):
        got = gradients(call("add_rms_norm", tensors, options, backend)[chosen].sum(), None, tensors)
        want = gradients(call("add_rms_norm", tensors, options, "reference")[chosen].sum(), None, tensors)
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-5)


def test_the_prompt_alone_is_asked_for(backend, device):
    """autograd tells the kernel, which the public gradients do not show."""
    if backend == "reference":
        pytest.skip("plain torch forms what its autograd formulas need")
    namespace, asked = kernels("capsule", backend), []

    def backward(*arguments):
        asked.append(arguments[-1])
        return namespace.add_rms_norm_backward(*arguments)

    spied = SimpleNamespace(add_rms_norm=namespace.add_rms_norm, add_rms_norm_backward=backward)
    for wanted in (("prompt",), ("hidden",), ("branch", "prompt")):
        tensors, _, _ = make(Case(layout="right", lengths=(4,)), "add_rms_norm", torch.float32, device)
        t = {k: v.detach().requires_grad_(k in wanted) for k, v in tensors.items()}
        out = fused.add_rms_norm(
            spied, t["branch"], t["hidden"], t["weight"], 1e-6, t["prompt"][None], None, None, 0, True
        )
        (out[0].sum() + out[1].sum()).backward()
        assert asked.pop() == (wanted != ("prompt",))
        assert all((v.grad is not None) == (k in wanted) for k, v in t.items())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    "case", [Case(lead=1, slots=2, beyond=2), Case(layout="left", pool_mask=True), Case(pool=False)], ids=str
)
def test_a_prompt_alone_touches_slot_rows_alone(case, backend, device):
    """Without a gradient of rows to write, nothing but slot rows is read: NaN stands in all others."""
    if backend == "reference":
        pytest.skip("no kernel of this backend")
    namespace = kernels("capsule", backend)
    tensors, options, (pooled, cu_seqlens) = make(case, "add_rms_norm", torch.float32, device)
    t = {k: v.detach() for k, v in tensors.items()}
    if pooled is not None and cu_seqlens is None:
        pooled = pooled[:, case.slots :]
    where = (*(None if x is None else x.to(device) for x in (pooled, cu_seqlens)), case.lead, case.pool)
    prompt = t["prompt"].expand(len(case.lengths), -1, -1)
    normed, total, rstd = namespace.add_rms_norm(t["branch"], t["hidden"], t["weight"], 1e-6, prompt, *where)
    grads = [torch.randn_like(normed), torch.randn_like(total)]
    full = namespace.add_rms_norm_backward(*grads, total, t["weight"], rstd, case.slots, *where, True)

    mark = ck.capsule_refresh(
        torch.zeros_like(total), torch.ones_like(prompt), backend=backend, **{**options, "pool": False}
    )
    not_slot = mark[..., 0] == 0
    grads, total = [g.masked_fill(not_slot[..., None], torch.nan) for g in grads], total.clone()
    total[not_slot] = rstd[not_slot] = torch.nan
    alone = namespace.add_rms_norm_backward(*grads, total, t["weight"], rstd, case.slots, *where, False)
    assert alone[0].shape == (0,)
    assert torch.equal(alone[1], full[1])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("prompt_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [Case(slots=2, lead=1), Case(layout="left", width=80)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_a_narrow_prompt_and_a_wide_weight(op, case, prompt_dtype, dtype, backend, device):
    compare(op, case, dtype, backend, device, prompt_dtype, weight_dtype=torch.float32)


MEMORY = [(kind, "contiguous") for kind in checks.INPUTS] + [("contiguous", kind) for kind in checks.GRADIENTS[1:]]


def norm_alone(x, weight, backend):
    return ck.add_rms_norm(None, x, weight, oracle.EPS, backend=backend)[0]


def add_and_norm(branch, x, weight, backend):
    return ck.add_rms_norm(branch, x, weight, oracle.EPS, backend=backend)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("kind", "gradient"), MEMORY)
@pytest.mark.parametrize("shape", [(6, 8), (6, 3, 8), (40, 1, 33), (2, 3, 4, 8)], ids=str)
def test_without_a_prompt(shape, kind, gradient, backend, device):
    """Rows of any leading shape, among them the heads [R, H, d] of a norm of queries."""
    x, branch = checks.leaves([torch.randn(shape), torch.randn(shape)], torch.float32, device, kind)
    weight = (torch.rand(shape[-1], device=device) + 0.5).requires_grad_()
    checks.compare(norm_alone, oracle.rms_norm, [x, weight], backend, gradient)
    truth = lambda b, x, w: (oracle.rms_norm(b + x, w), b + x)  # noqa: E731
    checks.compare(add_and_norm, truth, [branch, x, weight], backend, gradient)
    dense = torch.randn(shape, device=device).requires_grad_()
    checks.compare(add_and_norm, truth, [dense, x, weight], backend, gradient)


def test_heads_of_one_row_are_no_sequences_of_their_own(backend, device, monkeypatch):
    """Without slots [R, H, d] is R*H rows: dealt out like them, unless their memory forbids."""
    if backend != "triton" or device != "cpu":
        pytest.skip("programs are counted in Triton's interpreter")
    from triton.runtime.interpreter import InterpreterBuilder

    grids, set_grid_dim = [], InterpreterBuilder.set_grid_dim

    def recorded(self, *grid):
        grids.append(grid)
        set_grid_dim(self, *grid)

    monkeypatch.setattr(InterpreterBuilder, "set_grid_dim", recorded)
    counts = []
    joint = torch.randn(64, 5, 8)
    for rows in (torch.randn(128, 8), torch.randn(64, 2, 8), joint[:, 3:]):
        grids.clear()
        x = rows.requires_grad_()
        normed, _ = ck.add_rms_norm(None, x, torch.ones(8), 1e-6, backend=backend)
        normed.backward(torch.ones_like(normed))
        counts.append([grid[0] for grid in grids])
    assert counts[1] == counts[0]
    assert counts[2] == [64, 64]


def test_without_branch_and_prompt_the_residual_is_handed_on(backend, device):
    """It is the tensor that was given, so that autograd lets a caller write into it."""
    x, weight = torch.randn(2, 5, 33, device=device, requires_grad=True), torch.rand(33, device=device)
    residual = 2 * x
    normed, total = ck.add_rms_norm(None, residual, weight, 1e-6, backend=backend)
    assert total is residual
    torch.autograd.backward([normed, total], [torch.ones_like(x), torch.ones_like(x)])
    want = x.detach().requires_grad_()
    torch.nn.functional.rms_norm(2 * want, (33,), weight, 1e-6).sum().backward()
    torch.testing.assert_close(x.grad, want.grad + 2, rtol=1e-5, atol=1e-5)
    x.grad, residual = None, 2 * x
    ck.add_rms_norm(None, residual, weight, 1e-6, backend=backend)[1].mul_(3).sum().backward()
    assert (x.grad == 6).all()
