"""Calls of capsule_prepend, capsule_refresh and add_rms_norm: made, run, differentiated, held against the oracle."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import capt_kernels as ck

from . import oracle

OPS = ("capsule_prepend", "capsule_refresh", "add_rms_norm")


@dataclass(frozen=True)
class Case:
    """A call: its sizes, layout and options."""

    width: int = 33
    lengths: tuple[int, ...] = (5, 0, 17, 1)
    layout: str = "packed"
    slots: int = 1
    lead: int = 0
    pool: bool = True
    per_row: bool = False
    pool_mask: bool = False
    beyond: int = 0
    branch: bool = True

    def __str__(self):
        return (
            "-".join(f"{k}={v}" for k, v in vars(self).items() if v != getattr(Case(), k)).replace(" ", "") or "default"
        )


def make(case, op, dtype, device="cpu", prompt_dtype=torch.float32, weight_dtype=None):
    """Leaf tensors of a call, its keyword arguments, and the mask of pooled rows over ``hidden`` for the oracle."""
    held = op != "capsule_prepend"
    extra = case.slots if held else 0
    lengths = torch.tensor(case.lengths, dtype=torch.int64)
    batch = len(lengths)
    options = {"lead": case.lead, "pool": case.pool}
    if case.layout == "packed":
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), (lengths + extra).cumsum(0)]).int()
        rows = int(cu_seqlens[-1]) + case.beyond
        hidden = torch.randn(rows, case.width)
        pooled = None
        if case.pool_mask:
            pooled = torch.rand(rows) < 0.6
            options["pool_mask"] = pooled.to(device)
        options["cu_seqlens"] = cu_seqlens.to(device)
    else:
        cu_seqlens = None
        longest = max(case.lengths, default=4)
        place = torch.arange(longest)
        mask = place < lengths[:, None]
        if case.layout == "left":
            mask = mask.flip(1)
        elif case.layout == "holes":
            mask = torch.rand(batch, longest) < 0.5
        options["mask"] = mask.to(device)
        pooled = mask
        if case.pool_mask:
            narrowed = torch.rand(batch, longest) < 0.6
            options["pool_mask"] = narrowed.to(device)
            pooled = mask & narrowed
        pooled = torch.cat([pooled.new_ones(batch, extra), pooled], 1)
        hidden = torch.randn(batch, extra + longest, case.width)
    prompt = torch.randn(*([batch] if case.per_row else []), case.slots, case.width)
    tensors = {"hidden": hidden.to(dtype), "prompt": prompt.to(prompt_dtype)}
    if op == "add_rms_norm":
        tensors["branch"] = torch.randn_like(hidden).to(dtype) if case.branch else None
        tensors["weight"] = (torch.rand(case.width) + 0.5).to(weight_dtype or dtype)
    tensors = {k: None if v is None else v.to(device).requires_grad_() for k, v in tensors.items()}
    return tensors, options, (pooled, cu_seqlens)


def call(op, tensors, options, backend):
    """The outputs of the library's op, as a list."""
    if op != "add_rms_norm":
        return [getattr(ck, op)(tensors["hidden"], tensors["prompt"], backend=backend, **options)]
    t = tensors
    return list(
        ck.add_rms_norm(
            t["branch"], t["hidden"], t["weight"], oracle.EPS, prompt=t["prompt"], backend=backend, **options
        )
    )


def truth(op, tensors, options, where):
    """The outputs in fp64 by the oracle, and its leaves."""
    leaves = {k: None if v is None else v.detach().cpu().double().requires_grad_() for k, v in tensors.items()}
    pooled, cu_seqlens = where
    one = oracle.prepend if op == "capsule_prepend" else oracle.refresh
    x = leaves["hidden"]
    if op == "add_rms_norm" and leaves["branch"] is not None:
        x = x + leaves["branch"]
    done = oracle.batched(one, x, leaves["prompt"], pooled, cu_seqlens, options["lead"], options["pool"])
    return ([oracle.rms_norm(done, leaves["weight"]), done] if op == "add_rms_norm" else [done]), leaves


def gradients(outputs, incoming, leaves, again=False):
    wanted = {k: v for k, v in leaves.items() if v is not None}
    got = torch.autograd.grad(outputs, list(wanted.values()), incoming, allow_unused=True, retain_graph=again)
    return {k: torch.zeros_like(v) if g is None else g for (k, v), g in zip(wanted.items(), got, strict=True)}


def compare(op, case, dtype, backend, device, prompt_dtype=None, weight_dtype=None):
    """Outputs and gradients of a call against the oracle; nothing given is changed, and two calls are bit-equal."""
    prompt_dtype = prompt_dtype or (torch.float64 if dtype == torch.float64 else torch.float32)
    tensors, options, where = make(case, op, dtype, device, prompt_dtype, weight_dtype)
    before = {k: None if v is None else v.detach().clone() for k, v in tensors.items()}
    outputs = call(op, tensors, options, backend)
    incoming = [torch.randn(o.shape).to(o) for o in outputs]
    kept = [g.clone() for g in incoming]
    grads = gradients(outputs, incoming, tensors)
    again = call(op, tensors, options, backend)
    again_grads = gradients(again, incoming, tensors)

    plain = call(op, tensors, options, "reference")
    plain_grads = gradients(plain, incoming, tensors)
    true, leaves = truth(op, tensors, options, where)
    true_grads = gradients(true, [g.cpu().double() for g in incoming], leaves)
    for name, got, want, simple in zip(("out", "residual"), outputs, true, plain, strict=False):
        assert got.dtype == dtype
        oracle.assert_close(f"{op} {name}", got.cpu(), want, simple.cpu(), dtype)
    for name, want in true_grads.items():
        assert grads[name].dtype == tensors[name].dtype
        oracle.assert_close(f"{op} d{name}", grads[name].cpu(), want, plain_grads[name].cpu(), dtype)
    for name, value in before.items():
        assert value is None or torch.equal(value, tensors[name]), f"{name} was changed"
    assert all(torch.equal(a, b) for a, b in zip(kept, incoming, strict=True)), "an incoming gradient was changed"
    assert all(torch.equal(a, b) for a, b in zip(outputs, again, strict=True)), "two calls differ"
    assert all(torch.equal(grads[k], again_grads[k]) for k in grads), "two backward passes differ"
