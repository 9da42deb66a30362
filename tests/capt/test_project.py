"""Linear modules of one input: their gradients in one running sum, and whatever is no plain module called as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from capt.backbones.packed import project


def modules(bias=True):
    return [nn.Linear(8, width, bias=bias).double().requires_grad_(False) for width in (8, 4, 4)]


def run(parts, rows, used=(0, 1, 2)):
    outputs = project(parts, rows)
    loss = sum((outputs[i] * torch.arange(outputs[i].numel()).view_as(outputs[i])).sum() for i in used)
    return [*outputs, *torch.autograd.grad(loss, rows)]


def apart(parts, rows, used=(0, 1, 2)):
    outputs = [nn.functional.linear(rows, part.weight, part.bias) for part in parts]
    loss = sum((outputs[i] * torch.arange(outputs[i].numel()).view_as(outputs[i])).sum() for i in used)
    return [*outputs, *torch.autograd.grad(loss, rows)]


@pytest.mark.parametrize("used", [(0, 1, 2), (1,), (0, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_modules(bias, used):
    rows, parts = torch.randn(5, 8, dtype=torch.float64, requires_grad=True), modules(bias)
    for got, want in zip(run(parts, rows, used), apart(parts, rows, used), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("used", [(0, 1, 2), (1,)])
def test_no_share_is_written_apart_nor_one_that_is_not_there(used):
    rows, parts = torch.randn(5, 8, dtype=torch.float64, requires_grad=True), modules()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run(parts, rows, used)
    counts = {event.key: event.count for event in seen.key_averages()}
    assert counts["aten::mm"] == 1
    assert counts.get("aten::addmm_", 0) == len(used) - 1
    assert "aten::add_" not in counts


def test_a_gradient_of_gradients_is_refused():
    """The running sum has no derivative, and to leave its term out without a word would be wrong."""
    rows, parts = torch.randn(5, 8, dtype=torch.float64, requires_grad=True), modules()
    loss = sum(out.sum() for out in project(parts, rows))
    with pytest.raises(NotImplementedError, match='create_graph=True wants backend="reference"'):
        torch.autograd.grad(loss, rows, create_graph=True)


def test_a_hook_a_trained_weight_and_a_subclass_are_called():
    class Quantised(nn.Linear):
        def forward(self, rows):
            return super().forward(rows) * 2

    rows, parts = torch.randn(5, 8, dtype=torch.float64, requires_grad=True), modules()
    called = []
    parts[1].register_forward_hook(lambda module, args, out: called.append(module))
    want = apart(parts, rows)
    for got, exact in zip(run(parts, rows), want, strict=True):
        torch.testing.assert_close(got, exact)
    assert called == [parts[1]]

    parts = modules()
    parts[2].weight.requires_grad_()
    outputs = project(parts, rows)
    (grad,) = torch.autograd.grad(outputs[2].sum(), parts[2].weight)
    assert grad.any()

    parts = modules()
    doubled = Quantised(8, 4).double().requires_grad_(False)
    outputs = project([*parts[:2], doubled], rows)
    torch.testing.assert_close(outputs[2], 2 * nn.functional.linear(rows, doubled.weight, doubled.bias))


def test_autocast_narrows_them():
    rows = torch.randn(5, 8, requires_grad=True)
    parts = [part.float() for part in modules()]
    with torch.autocast("cpu", torch.bfloat16):
        outputs = project(parts, rows)
    assert {x.dtype for x in outputs} == {torch.bfloat16}
    (grad,) = torch.autograd.grad(sum(x.sum() for x in outputs), rows)
    assert grad.dtype == torch.float32


def test_a_backward_under_autocast_is_that_of_the_forward():
    rows, parts = torch.randn(5, 8, requires_grad=True), [part.float() for part in modules()]
    loss = sum(x.square().sum() for x in project(parts, rows))
    (want,) = torch.autograd.grad(loss, rows, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        (got,) = torch.autograd.grad(loss, rows)
    assert torch.equal(got, want)
