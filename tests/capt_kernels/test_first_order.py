"""Gradients of gradients: the reference has them, the fused backends refuse, and nothing else asks for any."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from .test_modes import calls

#: One of each autograd.Function.
NAMES = ["prepend, packed", "add_rms_norm", "add_rms_norm, alone", "capsule_attention", "apply_rotary", "silu", "pack",
         "unpack"]  # fmt: skip


@pytest.fixture
def call(request, device):
    """Leaves, and the sum of squares of what an op makes of them and a backend."""
    if device != "cpu":
        pytest.skip("the masks and offsets of these calls lie on the CPU")
    leaves, op = calls()[request.param]
    return leaves, lambda backend, *x: sum(out.square().sum() for out in op(*x, backend))


@pytest.mark.parametrize("call", NAMES, indirect=True)
def test_a_gradient_of_gradients_is_whole_or_refused(call, backend):
    leaves, op = call
    total = op(backend, *leaves)
    if backend == "reference":
        first = torch.autograd.grad(total, leaves, create_graph=True)
        assert all(grad.grad_fn is not None for grad in first)
    else:
        with pytest.raises(NotImplementedError, match='create_graph=True wants backend="reference"'):
            torch.autograd.grad(total, leaves, create_graph=True)


@pytest.mark.parametrize("mode", ["plain", "recomputed", "recomputed, reentrant"])
@pytest.mark.parametrize("call", NAMES, indirect=True)
def test_training_asks_for_no_more_than_the_first(call, mode, backend):
    leaves, op = call
    want = torch.autograd.grad(op(backend, *leaves), leaves)
    if mode == "plain":
        total = op(backend, *leaves)
        total.backward(retain_graph=True)
        for leaf in leaves:
            leaf.grad = None
    else:
        total = checkpoint(op, backend, *leaves, use_reentrant="reentrant" in mode)
    total.backward()
    for leaf, grad in zip(leaves, want, strict=True):
        torch.testing.assert_close(leaf.grad, grad)
