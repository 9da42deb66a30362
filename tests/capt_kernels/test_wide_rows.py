"""add_rms_norm of rows wider than a program's registers: the slots' gradients are not rounded on their way."""

from __future__ import annotations

import pytest
import torch

from capt_kernels.backends import kernels

WIDTH = 8200
CU = torch.tensor([0, 3, 5], dtype=torch.int32)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("residual", [True, False], ids=["and a residual", "alone"])
@pytest.mark.parametrize("need_rows", [True, False])
def test_gradients_of_slots_are_wide(need_rows, residual, backend, device):
    if backend == "reference":
        pytest.skip("no kernel of this backend")
    cu_seqlens = CU.to(device)
    total, grad, extra = (torch.randn(5, WIDTH, device=device).bfloat16() for _ in range(3))
    weight = (torch.rand(WIDTH, device=device) + 0.5).bfloat16()
    rstd = total.float().square().mean(-1).rsqrt()
    more = extra if residual else None
    rows, slots = kernels("capsule", backend).add_rms_norm_backward(
        grad, more, total, weight, rstd, 1, None, cu_seqlens, 0, True, need_rows
    )

    x = total.double().requires_grad_()
    normed = x * x.square().mean(-1, keepdim=True).rsqrt() * weight.double()
    (want,) = torch.autograd.grad(normed, x, grad.double())
    want = want + extra.double() if residual else want
    assert slots.dtype == torch.float32
    torch.testing.assert_close(slots[:, 0].double(), want[[0, 3]], rtol=1e-5, atol=1e-5)
    assert rows.dtype == torch.bfloat16
    assert rows.shape == (total.shape if need_rows else (0,))
    if need_rows:
        for start, stop in ((0, 3), (3, 5)):
            share = want[start] / (stop - start)
            exact = want[start:stop] + share
            exact[0] = share
            torch.testing.assert_close(rows[start:stop].double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("need_rows", [True, False])
def test_without_slots_rows_are_written_where_wanted(need_rows, normed, backend, device):
    if backend == "reference":
        pytest.skip("no kernel of this backend")
    total, grad = (torch.randn(5, WIDTH, device=device) for _ in range(2))
    rstd = total.square().mean(-1).rsqrt()
    grads = (grad, None) if normed else (None, grad)
    weight = torch.ones(WIDTH, device=device)
    where = (0, None, CU.to(device), 0, False, need_rows)
    rows, slots = kernels("capsule", backend).add_rms_norm_backward(*grads, total, weight, rstd, *where)
    assert slots.shape == (2, 0, WIDTH)
    assert rows.shape == (total.shape if need_rows else (0,))
