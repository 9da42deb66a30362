"""gated_activation against the activations' formulas in fp64."""

from __future__ import annotations

import math

import pytest
import torch

import capt_kernels as ck

from . import checks

FORMULAS = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: torch.maximum(x, torch.zeros(1, dtype=x.dtype)),
}
KINDS = list(FORMULAS)


def op(kind):
    return lambda gate, up, backend: ck.gated_activation(gate, up, kind, backend=backend)


def formula(kind):
    return lambda gate, up: FORMULAS[kind](gate) * up


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1,), (33,), (5, 3), (2, 3, 80), (17, 96), (1, 769), (513, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_formula(kind, shape, dtype, backend, device):
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("fp64 is for the reference and C++ backends")
    inputs = checks.leaves([3 * torch.randn(shape), torch.randn(shape)], dtype, device)
    checks.compare(op(kind), formula(kind), inputs, backend)


@pytest.mark.parametrize("gradient", checks.GRADIENTS)
@pytest.mark.parametrize("memory", checks.INPUTS)
@pytest.mark.parametrize("shape", [(4, 6), (2, 3, 8)], ids=str)
def test_strides(shape, memory, gradient, backend, device):
    inputs = checks.leaves([torch.randn(shape), torch.randn(shape)], torch.float32, device, memory)
    checks.compare(op("gelu_tanh"), formula("gelu_tanh"), inputs, backend, gradient)


def test_halves_of_one_projection(backend, device):
    """gate and up as views of one [.., 2F] output, and up of other strides than gate."""
    joint = torch.randn(2, 5, 16, device=device)
    gate, up = (x.requires_grad_() for x in joint.chunk(2, -1))
    checks.compare(op("silu"), formula("silu"), [gate, up], backend)
    other = torch.randn(8, 5, 2, device=device).permute(2, 1, 0).requires_grad_()
    checks.compare(op("silu"), formula("silu"), [gate, other], backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_far_out_it_is_the_line_or_zero(kind, dtype, backend, device):
    """An exp or a cube that overflows must not turn into NaN, in the backward either."""
    far = torch.tensor([-60000.0, -1000.0, -100.0, 0.0, 100.0, 1000.0, 60000.0]).to(device, dtype)
    gate, up = far.clone().requires_grad_(), torch.ones_like(far).requires_grad_()
    out = ck.gated_activation(gate, up, kind, backend=backend)
    out.sum().backward()
    line = far.clamp(min=0)
    torch.testing.assert_close(out.detach(), line, rtol=0, atol=1e-6)
    torch.testing.assert_close(up.grad, line, rtol=0, atol=1e-6)
    slope = torch.where(far == 0, 0.0 if kind == "relu" else 0.5, (far > 0).to(dtype))
    torch.testing.assert_close(gate.grad, slope.to(dtype), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_relu_of_what_is_not_finite(dtype, backend, device):
    values = torch.tensor([-torch.inf, torch.inf, torch.nan, -1.0, 1.0]).to(device, dtype)
    gate, up = values.clone().requires_grad_(), torch.full_like(values, 2.0).requires_grad_()
    got = ck.gated_activation(gate, up, "relu", backend=backend)
    want = torch.relu(gate) * up
    given = torch.ones_like(want)
    grads = [torch.autograd.grad(out, (gate, up), given) for out in (got, want)]
    for a, b in zip((got, *grads[0]), (want, *grads[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind, backend):
    if backend == "triton":
        pytest.skip("gradcheck needs fp64: the reference and C++ backends")
    gate, up = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda g, u: ck.gated_activation(g, u, kind, backend=backend), (gate, up))


@pytest.mark.parametrize("wanted", [0, 1])
def test_only_the_gradients_asked_for(wanted, backend, device):
    inputs = [torch.randn(4, 5, device=device) for _ in range(2)]
    both = [x.clone().requires_grad_() for x in inputs]
    inputs[wanted].requires_grad_()
    ck.gated_activation(*inputs, "gelu", backend=backend).square().sum().backward()
    ck.gated_activation(*both, "gelu", backend=backend).square().sum().backward()
    assert inputs[1 - wanted].grad is None
    assert torch.equal(inputs[wanted].grad, both[wanted].grad)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), (2, 0, 5)], ids=str)
def test_empty(shape, backend, device):
    gate, up = (torch.randn(shape, device=device, requires_grad=True) for _ in range(2))
    out = ck.gated_activation(gate, up, backend=backend)
    assert out.shape == shape
    out.sum().backward()
    assert gate.grad.shape == up.grad.shape == shape


def test_keeps_gate_and_up_alone(backend, device):
    if backend == "reference":
        pytest.skip("plain torch keeps what its autograd formulas need")
    gate, up = (torch.randn(4, 5, device=device, requires_grad=True) for _ in range(2))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ck.gated_activation(gate, up, backend=backend)
    assert {t.data_ptr() for t in kept} == {gate.data_ptr(), up.data_ptr()}


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_without_a_break(kind, backend, device):
    if backend == "triton" and device == "cpu":
        pytest.skip("torch.compile cannot look into Triton's interpreter")
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda g, u: ck.gated_activation(g, u, kind, backend=backend), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for length in (7, 8, 9):
        inputs = [torch.randn(length, 6, device=device, requires_grad=True) for _ in range(2)]
        out, want = compiled(*inputs), ck.gated_activation(*inputs, kind, backend=backend)
        given = torch.randn_like(want)
        got_grads, want_grads = (torch.autograd.grad(o, inputs, given) for o in (out, want))
        for a, b in zip((out, *got_grads), (want, *want_grads), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("memory", ["contiguous", "transposed", "sliced"])
def test_opcheck(memory, backend, device):
    if backend == "reference" or (backend == "triton" and device == "cpu"):
        pytest.skip("no kernel is registered for this backend and device")
    grad, gate, up = (checks.strided(torch.randn(4, 6, device=device), memory) for _ in range(3))
    ops = torch.ops.capt_kernels
    torch.library.opcheck(ops.gated_activation.default, (gate, up, "silu"))
    for need in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(ops.gated_activation_backward.default, (grad, gate, up, "gelu", *need))


GATE = torch.randn(3, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((GATE, GATE, "swish"), r"kind must be one of silu, gelu, gelu_tanh, relu, got 'swish'"),
        ((GATE.long(), GATE), r"gate must be float32, float16, bfloat16 or float64, got torch.int64"),
        ((torch.tensor(1.0), torch.tensor(1.0)), r"gate must have shape \[..., F\], got a scalar"),
        ((GATE, GATE[:, :1]), r"up must have shape gate's = \(3, 4\), got \(3, 1\)"),
        ((GATE, GATE.half()), r"up must have gate's dtype torch.float32, got torch.float16"),
        ((GATE, GATE.to("meta")), r"up must be on cpu as gate is, got meta"),
    ],
)
def test_bad_input(arguments, message, backend):
    with pytest.raises(ValueError, match=message):
        ck.gated_activation(*arguments, backend=backend)


def test_unknown_backend():
    with pytest.raises(ValueError, match="backend must be 'auto' or one of reference, cpu, triton, got 'cuda'"):
        ck.gated_activation(GATE, GATE, backend="cuda")
