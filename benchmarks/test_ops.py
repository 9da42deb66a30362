"""Each op, fused against plain torch and ``torch.compile`` of plain torch, forward and forward + backward.

One group a (op, width, pass), its rows timed one after another on the same tensors: padded sequences of RTE's real
lengths, 16 in fp32 on a CPU, 128 in bf16 on a GPU. Row ``move`` is ``torch.add(out=)`` moving the bytes of the op's
floor: rows of D elements read and written once, nothing else. The base is frozen, so no weight has a gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import capt_kernels as ck

from . import plain
from .lengths import lengths

WIDTHS = [
    576,
    pytest.param(2048, marks=pytest.mark.default_size),
    *(pytest.param(width, marks=pytest.mark.slow_size) for width in (768, 4096)),
]
EPS, HEAD = 1e-6, 64
#: Device -> sequences, dtype, and launches between two looks at the clock (a GPU runs behind its host).
SETTINGS = {"cpu": (16, torch.float32, 1), "cuda": (128, torch.bfloat16, 20)}
FUSED = {"cpu": "cpu", "cuda": "triton"}


@dataclass(frozen=True)
class Op:
    """An op under test.

    Args:
        fused, plain: callables of the tensors that ``make`` returns.
        forward, backward: rows of D elements that pass must move a position: the floor of traffic.
    """

    make: Callable[[int, str], list[Tensor]]
    fused: Callable
    plain: Callable
    forward: float
    backward: float


def batch(width: int, device: str, slots: int) -> tuple[Tensor, Tensor]:
    sequences, dtype, _ = SETTINGS[device]
    counts = lengths("rte", sequences)
    mask = torch.arange(int(counts.max())) < counts[:, None]
    return torch.randn(sequences, slots + mask.shape[1], width, device=device).to(dtype), mask.to(device)


def _prepend(width, device):
    hidden, mask = batch(width, device, 0)
    return [hidden.requires_grad_(), torch.zeros(width, device=device, requires_grad=True), mask]


def _refresh(width, device):
    hidden, mask = batch(width, device, 1)
    return [hidden.requires_grad_(), torch.zeros(width, device=device, requires_grad=True), mask]


def _norm(width, device):
    hidden, _ = batch(width, device, 1)
    branch = torch.randn_like(hidden)
    return [branch.requires_grad_(), hidden.requires_grad_(), torch.ones(width, device=device, dtype=hidden.dtype)]


def _norm_with_capsule(width, device):
    return [*_norm(width, device), torch.zeros(width, device=device, requires_grad=True), batch(width, device, 1)[1]]


def _glu(width, device):
    gate, _ = batch(width, device, 1)
    return [gate.requires_grad_(), torch.randn_like(gate).requires_grad_()]


def _rotary(width, device):
    hidden, _ = batch(width, device, 1)
    q = hidden.unflatten(-1, (width // HEAD, HEAD))
    k = torch.randn_like(q[:, :, : max(1, width // HEAD // 3)])
    angle = torch.randn(*hidden.shape[:2], HEAD // 2, device=device)
    cos, sin = (torch.cat([t, t], -1) for t in (angle.cos(), angle.sin()))
    return [q.requires_grad_(), k.requires_grad_(), cos, sin]


OPS = {
    "capsule_prepend": Op(_prepend, ck.capsule_prepend, plain.capsule_prepend, 2, 2),
    "capsule_refresh": Op(_refresh, ck.capsule_refresh, plain.capsule_refresh, 2, 2),
    "add_rms_norm": Op(
        _norm,
        lambda b, r, w, **on: ck.add_rms_norm(b, r, w, EPS, **on),
        lambda b, r, w: plain.add_rms_norm(b, r, w, EPS),
        4,
        4,
    ),
    "add_rms_norm + capsule": Op(
        _norm_with_capsule,
        lambda b, r, w, p, m, **on: ck.add_rms_norm(b, r, w, EPS, prompt=p, mask=m, **on),
        lambda b, r, w, p, m: plain.add_rms_norm_with_capsule(b, r, w, EPS, p, m),
        4,
        4,
    ),
    "gated_activation": Op(_glu, ck.gated_activation, plain.gated_activation, 3, 5),
    "apply_rotary": Op(_rotary, ck.apply_rotary, plain.apply_rotary, 2, 2),
}


def runner(function: Callable, tensors: list[Tensor], backward: bool) -> Callable[[], None]:
    """A call without arguments: the forward alone, without a graph, or with the backward of fixed gradients."""
    if not backward:

        def forward():
            with torch.no_grad():
                function(*tensors)

        return forward
    wanted = [t for t in tensors if t.requires_grad]
    out = function(*tensors)
    incoming = [torch.randn_like(o) for o in (out if isinstance(out, tuple) else (out,))]

    def both():
        torch.autograd.grad(function(*tensors), wanted, incoming)

    return both


def mover(bytes_: float, like: Tensor) -> Callable[[], None]:
    """torch.add(out=) that moves so many bytes: two reads and a write an element."""
    elements = int(bytes_ / 3 / like.element_size())
    a, b, c = (torch.zeros(elements, device=like.device, dtype=like.dtype) for _ in range(3))
    return lambda: torch.add(a, b, out=c)


@pytest.mark.parametrize("how", ["fused", "plain", "compiled", "move"])
@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", OPS)
def test_op(benchmark, name, width, direction, how, device):
    op, backward = OPS[name], direction != "forward"
    torch.manual_seed(0)
    tensors = op.make(width, device)
    # The widest pair of tensors of each op is q and k or two of [B, T, D]; a row is D elements of the first.
    row = tensors[0].numel() * tensors[0].element_size()
    if name == "apply_rotary":
        row += tensors[1].numel() * tensors[1].element_size()
    floor = row * (op.forward + (op.backward if backward else 0))
    if how == "move":
        once = mover(floor, tensors[0])
    else:
        function = {
            # The backend by name: "auto" would time plain torch where the extension is missing.
            "fused": functools.partial(op.fused, backend=FUSED[device]),
            "plain": op.plain,
            "compiled": torch.compile(op.plain, dynamic=False),
        }[how]
        torch._dynamo.reset()
        once = runner(function, tensors, backward)
    launches = SETTINGS[device][2]

    def call():
        for _ in range(launches):
            once()
        if device == "cuda":
            torch.cuda.synchronize()

    benchmark.group = f"{name}, D={width}, {direction}"
    benchmark.extra_info.update(op=name, width=width, direction=direction, how=how, floor_bytes=floor)
    call()
    benchmark.pedantic(call, rounds=12, iterations=2, warmup_rounds=2)
    benchmark.extra_info["gigabytes_per_second"] = launches * floor / benchmark.stats.stats.median / 1e9
