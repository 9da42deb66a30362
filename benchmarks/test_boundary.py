"""What a call costs before any row is touched: microseconds on a batch of one row, forward, wanting a gradient.

From the inside out: the registered op, the same inside an ``autograd.Function`` (what the library does), the public
function with its checks, and, for comparison, the same op as a ``custom_op`` with ``register_autograd``.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import capt_kernels as ck
from capt_kernels.capsule import fused

OP = torch.ops.capt_kernels.capsule_refresh.default


@torch.library.custom_op("capt_benchmarks::refresh", mutates_args=())
def _refresh(hidden: Tensor, prompt: Tensor) -> Tensor:
    return OP(hidden, prompt, None, None, 0, True)


@_refresh.register_fake
def _(hidden, prompt):
    return torch.empty_like(hidden)


def _keep(ctx, inputs, output):
    ctx.slots = inputs[1].shape[1]


def _backward(ctx, grad):
    return torch.ops.capt_kernels.capsule_refresh_backward(grad, ctx.slots, None, None, 0, True, True)


_refresh.register_autograd(_backward, setup_context=_keep)


@pytest.mark.benchmark(group="one call on one row (capsule_refresh, microseconds)")
@pytest.mark.parametrize("how", ["registered op", "autograd.Function", "public function", "custom_op"])
def test_boundary(benchmark, how):
    if not ck.backends()["cpu"].available:
        pytest.skip("the cost of the C++ kernels' boundary wants the extension")
    hidden, prompt = torch.zeros(1, 2, 8), torch.zeros(1, 1, 8, requires_grad=True)
    kernels = torch.ops.capt_kernels
    call = {
        "registered op": lambda: OP(hidden, prompt.detach(), None, None, 0, True),
        "autograd.Function": lambda: fused.capsule_refresh(kernels, hidden, prompt, None, None, 0, True),
        "public function": lambda: ck.capsule_refresh(hidden, prompt, backend="cpu"),
        "custom_op": lambda: _refresh(hidden, prompt),
    }[how]
    benchmark.pedantic(call, rounds=200, iterations=100, warmup_rounds=20)
    benchmark.extra_info.update(boundary=how, microseconds=1e6 * benchmark.stats.stats.median)
