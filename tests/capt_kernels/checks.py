"""Inputs and gradients in unusual memory, and one comparison of an op with its fp64 definition."""

from __future__ import annotations

import torch

from . import oracle

INPUTS = ("contiguous", "sliced", "every other", "transposed", "expanded", "expanded inside")
GRADIENTS = ("contiguous", "sum", "expanded", "every other", "cat", "transposed")


def exact(backend):
    """The widest dtype that every op of a backend has."""
    return torch.float32 if backend == "triton" else torch.float64


def strided(tensor, kind):
    """``tensor`` in memory of another order, NaN in the gaps; its values too, but for the expanded kinds (stride 0)."""
    if kind == "sliced":
        return torch.cat([tensor, torch.full_like(tensor, torch.nan)], -1)[..., : tensor.shape[-1]]
    if kind == "every other":
        return torch.stack([tensor, torch.full_like(tensor, torch.nan)], -1).flatten(-2)[..., ::2]
    if kind == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == "expanded":
        return tensor[:1].expand_as(tensor)
    if kind == "expanded inside":
        return tensor[:, :1].expand_as(tensor)
    return tensor


def incoming(output, kind):
    """A gradient for ``output`` as autograd hands it in: from .sum() (stride 0), [..., ::2], cat, a transpose."""
    gradient = torch.randn(output.shape, dtype=torch.float64).to(output)
    if kind == "sum":
        return torch.ones((), dtype=output.dtype, device=output.device).expand(output.shape)
    if kind == "cat":
        return torch.cat([gradient, gradient], 0)[len(gradient) :]
    return strided(gradient, kind)


def leaves(tensors, dtype, device, kind="contiguous"):
    """Each of ``tensors`` in ``dtype`` and the memory of ``kind``, asking for a gradient."""
    return [strided(t.to(device, dtype), kind).requires_grad_() for t in tensors]


def compare(op, truth, inputs, backend, gradient="contiguous"):
    """``op(*inputs, backend=)`` and its gradients against ``truth(*fp64 inputs)``, by the oracle's rule.

    Inputs and incoming gradients have to be bit-unchanged afterwards, and two calls bit-equal.
    """

    def run(name):
        outputs = op(*inputs, backend=name)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return outputs, (lambda given: torch.autograd.grad(outputs, inputs, given))

    before = [x.detach().clone() for x in inputs]
    outputs, back = run(backend)
    given = [incoming(o, gradient) for o in outputs]
    kept = [g.clone() for g in given]
    grads = back(given)
    assert all(map(torch.equal, before, inputs)), "an input was changed"
    assert all(map(torch.equal, kept, given)), "an incoming gradient was changed"
    again, back_again = run(backend)
    assert all(map(torch.equal, outputs, again)), "two calls differ"
    assert all(map(torch.equal, grads, back_again(given))), "two backward passes differ"

    plain, plain_back = run("reference")
    exact = [x.detach().cpu().double().requires_grad_() for x in inputs]
    true = truth(*exact)
    true = true if isinstance(true, tuple) else (true,)
    true_grads = torch.autograd.grad(true, exact, [g.cpu().double() for g in given])
    dtype = inputs[0].dtype
    for kind, got, want, simple in (("out", outputs, true, plain), ("gradient", grads, true_grads, plain_back(given))):
        for number, (a, b, c) in enumerate(zip(got, want, simple, strict=True)):
            assert a.dtype == dtype
            oracle.assert_close(f"{kind} {number}", a.cpu(), b, c.cpu(), dtype)
