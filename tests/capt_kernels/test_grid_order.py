"""Programs of a grid may run in any order: shuffled in the interpreter, every op gives the same bits."""

import random

import pytest
import torch

pytest.importorskip("triton")

import capt_kernels
from capt_kernels.backends import interpreted

if not interpreted():
    pytest.skip("the grid is shuffled in Triton's interpreter", allow_module_level=True)

from triton.runtime import interpreter


@pytest.fixture
def shuffled(monkeypatch):
    """A switch: from then on programs get the ids of a random permutation of the grid. It returns the grids seen."""
    grids = []

    def switch_on(seed):
        order = random.Random(seed)
        ids = {}

        def set_grid_dim(self, *grid):
            places = [(x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])]
            ids["of"] = dict(zip(places, order.sample(places, len(places)), strict=True))
            grids.append(grid)
            self.grid_dim = grid

        def set_grid_idx(self, *place):
            self.grid_idx = ids["of"][place]

        monkeypatch.setattr(interpreter.InterpreterBuilder, "set_grid_dim", set_grid_dim)
        monkeypatch.setattr(interpreter.InterpreterBuilder, "set_grid_idx", set_grid_idx)
        return grids

    return switch_on


def run(op, hidden, slots, lead):
    """Outputs and gradients of ``op`` over three packed sequences, one of several chunks, and two rows behind them."""
    torch.manual_seed(1)
    offsets = torch.tensor([0, 50, 50, 70], dtype=torch.int32)
    where = {"cu_seqlens": offsets, "pool_mask": torch.rand(72) < 0.7, "lead": lead, "backend": "triton"}
    hidden, prompt = hidden.clone().requires_grad_(), torch.randn(slots, 33, requires_grad=True)
    if op == "add_rms_norm":
        branch = torch.randn(72, 33)
        outputs = capt_kernels.add_rms_norm(branch, hidden, torch.randn(33), 1e-6, prompt=prompt, **where)
    else:
        outputs = (getattr(capt_kernels, op)(hidden, prompt, **where),)
    return (*outputs, *torch.autograd.grad(outputs, (hidden, prompt), [torch.randn_like(out) for out in outputs]))


@pytest.mark.parametrize(("slots", "lead"), [(1, 0), (3, 1)])
@pytest.mark.parametrize("op", ["capsule_prepend", "capsule_refresh", "add_rms_norm"])
def test_order_of_programs_does_not_matter(op, slots, lead, shuffled, monkeypatch):
    # Chunks of 16 rows, so that a sequence has several.
    monkeypatch.setattr("capt_kernels.capsule.triton.layout._processors", lambda device: 132)
    hidden = torch.randn(72, 33)
    straight = run(op, hidden, slots, lead)
    grids = shuffled(seed=7)
    for _ in range(2):
        for a, b in zip(straight, run(op, hidden, slots, lead), strict=True):
            assert torch.equal(a, b)
    assert max(x * y * z for x, y, z in grids) >= 7


@pytest.mark.parametrize("options", [{"causal": True, "window": 40}, {"causal": False, "biased": True}], ids=str)
def test_order_of_attention_programs_does_not_matter(options, shuffled):
    options = dict(options)
    if options.pop("biased", False):
        options["bias_table"] = torch.randn(2, 199)
    q, k, v = (torch.randn(112, heads, 8, requires_grad=True) for heads in (2, 1, 1))
    given, offsets = torch.randn(112, 2, 8), torch.tensor([0, 9, 9, 109], dtype=torch.int32)

    def attend():
        out = capt_kernels.capsule_attention(q, k, v, cu_seqlens=offsets, scale=0.3, backend="triton", **options)
        return (out, *torch.autograd.grad(out, (q, k, v), given))

    straight = attend()
    grids = shuffled(seed=7)
    for a, b in zip(straight, attend(), strict=True):
        assert torch.equal(a, b)
    assert max(x * y * z for x, y, z in grids) >= 7
