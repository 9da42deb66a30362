"""The capsule ops as called wrongly, compiled, checked by opcheck, and called past their public functions."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import capt_kernels as ck
from capt_kernels.backends import kernels

from . import checks
from .capsule_cases import OPS, Case, call, gradients, make


def test_nothing_of_the_size_of_hidden_is_kept(backend, device):
    """add_rms_norm keeps its own output and one number a row; the other two keep masks and offsets."""
    if backend == "reference":
        pytest.skip("plain torch keeps what its autograd formulas need")
    kept = []
    for op in OPS:
        tensors, options, _ = make(Case(width=96, lengths=(64, 64), layout="right"), op, torch.float32, device)
        tensors = {k: v if k in ("hidden", "prompt") else v.detach() for k, v in tensors.items()}
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            out = call(op, tensors, options, backend)
        held = {o.untyped_storage().data_ptr() for o in (*out, *(v for v in tensors.values()))}
        new = sum(t.nbytes for t in kept if t.untyped_storage().data_ptr() not in held)
        rows = out[0].shape[0] * out[0].shape[1]
        assert new <= rows * 4 + options["mask"].numel() + 64, f"{op} keeps {new} bytes"


@pytest.mark.parametrize("op", OPS)
def test_compiles_without_a_break_and_without_a_storm(op, backend, device):
    if backend == "triton" and device == "cpu":
        pytest.skip("torch.compile cannot look into Triton's interpreter")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda t, o: call(op, t, o, backend), fullgraph=True, dynamic=None, backend=counter)
    for length in (7, 8, 9, 12):
        for case in (Case(width=8, layout="right", lengths=(length, 3)), Case(width=8, lengths=(length, 3), lead=1)):
            tensors, options, _ = make(case, op, torch.float32, device)
            out, want = compiled(tensors, options), call(op, tensors, options, backend)
            incoming = [torch.randn_like(o) for o in want]
            got_grads, want_grads = gradients(out, incoming, tensors), gradients(want, incoming, tensors)
            for a, b in zip([*out, *got_grads.values()], [*want, *want_grads.values()], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert counter.frame_count <= 4, f"{counter.frame_count} compilations for two layouts"


def test_a_norm_alone_compiles_without_a_break(backend, device):
    if backend == "triton" and device == "cpu":
        pytest.skip("torch.compile cannot look into Triton's interpreter")
    torch._dynamo.reset()
    weight = torch.rand(8, device=device)
    compiled = torch.compile(
        lambda b, x: ck.add_rms_norm(b, x, weight, 1e-6, backend=backend), fullgraph=True, backend="aot_eager"
    )
    for with_branch in (False, True):
        x = torch.randn(6, 3, 8, device=device, requires_grad=True)
        branch = torch.randn_like(x) if with_branch else None
        out, want = compiled(branch, x), ck.add_rms_norm(branch, x, weight, 1e-6, backend=backend)
        assert (out[1] is x) == (not with_branch)
        incoming = [torch.randn_like(o) for o in want]
        got_grad, want_grad = (torch.autograd.grad(o, x, incoming)[0] for o in (out, want))
        for a, b in zip((*out, got_grad), (*want, want_grad), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("view", ["contiguous", "transposed", "sliced"])
@pytest.mark.parametrize("op", OPS)
def test_opcheck(op, view, backend, device):
    if backend == "reference" or (backend == "triton" and device == "cpu"):
        pytest.skip("plain Python: nothing is registered with the dispatcher")
    namespace = torch.ops.capt_kernels
    for case in (Case(width=8, layout="right", slots=2), Case(width=8, lead=1)):
        tensors, _, where = make(case, op, torch.float32, device)
        pooled, cu_seqlens = (None if x is None else x.to(device) for x in where)
        values = {k: checks.strided(v.detach(), view) for k, v in tensors.items()}
        batch = len(case.lengths)
        mask = None if pooled is None else (pooled[:, case.slots :] if op != "capsule_prepend" else pooled)
        where = (mask, cu_seqlens, case.lead, True)
        prompt = values["prompt"].expand(batch, -1, -1)
        if op == "add_rms_norm":
            arguments = (values["branch"], values["hidden"], values["weight"], 1e-5, prompt, *where)
            normed, total, rstd = namespace.add_rms_norm(*arguments)
            grad = checks.strided(torch.randn_like(normed), view)
            back = (grad, None, total, values["weight"], rstd, case.slots, *where)
        else:
            arguments = (values["hidden"], prompt, *where)
            out = getattr(namespace, op)(*arguments)
            back = (checks.strided(torch.randn_like(out), view), case.slots, *where)
        torch.library.opcheck(getattr(namespace, op).default, arguments)
        for need_rows in (True, False):
            torch.library.opcheck(getattr(namespace, op + "_backward").default, (*back, need_rows))


H, PROMPT = torch.zeros(2, 4, 8), torch.zeros(8)
FLAT, CU = torch.zeros(6, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
BAD = {
    "prompt of another width": (lambda f, b: f(H, torch.zeros(9), backend=b), r"prompt must .* D = 8 .* \(9,\)"),
    "prompt of another batch": (lambda f, b: f(H, torch.zeros(3, 1, 8), backend=b), "B = 2 sequences .* got 3"),
    "no slots": (lambda f, b: f(H, torch.zeros(0, 8), backend=b), "at least one slot, got K = 0"),
    "integer hidden": (lambda f, b: f(H.long(), PROMPT, backend=b), "must be float32.* got torch.int64"),
    "integer prompt": (lambda f, b: f(H, PROMPT.int(), backend=b), "prompt must be float32.* got torch.int32"),
    "flat hidden": (lambda f, b: f(FLAT, PROMPT, backend=b), r"must have shape \[B, T, D\] .* \(6, 8\)"),
    "padded hidden with offsets": (lambda f, b: f(H, PROMPT, cu_seqlens=CU, backend=b), r"must have shape \[R, D\]"),
    "mask of another shape": (
        lambda f, b: f(H, PROMPT, torch.ones(2, 9), backend=b),
        r"mask must have shape \[B, T\].*\(2, 9\)",
    ),
    "mask and offsets": (
        lambda f, b: f(FLAT, PROMPT, torch.ones(6), cu_seqlens=CU, backend=b),
        "mask and cu_seqlens were both given",
    ),
    "offsets that fall": (
        lambda f, b: f(FLAT, PROMPT, cu_seqlens=torch.tensor([0, 4, 2]), backend=b),
        r"never fall, got \[0, 4, 2\]",
    ),
    "offsets that start late": (
        lambda f, b: f(FLAT, PROMPT, cu_seqlens=torch.tensor([1, 4]), backend=b),
        "start at 0, got 1",
    ),
    "offsets past the rows": (
        lambda f, b: f(FLAT, PROMPT, cu_seqlens=torch.tensor([0, 7]), backend=b),
        "6 rows given, got 7",
    ),
    "float offsets": (
        lambda f, b: f(FLAT, PROMPT, cu_seqlens=CU.float(), backend=b),
        "cu_seqlens must be int32, got torch.float32",
    ),
    "matrix offsets": (lambda f, b: f(FLAT, PROMPT, cu_seqlens=CU[None], backend=b), r"shape \[B\+1\], got \(1, 3\)"),
    "negative lead": (lambda f, b: f(FLAT, PROMPT, cu_seqlens=CU, lead=-1, backend=b), "lead must be .* got -1"),
    "padded lead": (lambda f, b: f(H, PROMPT, lead=1, backend=b), "wants a packed call .* got lead=1"),
    "pool that is no bool": (lambda f, b: f(H, PROMPT, pool=1, backend=b), "pool must be a bool, got 1"),
    "pool_mask of another shape": (
        lambda f, b: f(FLAT, PROMPT, cu_seqlens=CU, pool_mask=torch.ones(5), backend=b),
        r"pool_mask .*\(5,\)",
    ),
    "other device": (lambda f, b: f(H, PROMPT.to("meta"), backend=b), "prompt must be on cpu .* got meta"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("op", OPS)
def test_bad_input(op, name, backend):
    def function(hidden, prompt, mask=None, **options):
        if op != "add_rms_norm":
            return getattr(ck, op)(hidden, prompt, mask, **options)
        return ck.add_rms_norm(None, hidden, torch.ones(8), 1e-5, prompt=prompt, mask=mask, **options)

    use, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        use(function, backend)


@pytest.mark.parametrize("value", [-torch.inf, 0.5, 2.0, -1.0, torch.nan])
def test_masks_that_are_not_masks(value, backend):
    mask = torch.ones(2, 4)
    mask[1, 2] = value
    with pytest.raises(ValueError, match="mask must hold only 0 and 1"):
        ck.capsule_prepend(H, PROMPT, mask, backend=backend)


def test_bad_norm_arguments(backend):
    weight = torch.ones(8)
    with pytest.raises(ValueError, match=r"weight must have shape \[D\] = \(8,\), got \(7,\)"):
        ck.add_rms_norm(None, H, torch.ones(7), 1e-5, backend=backend)
    with pytest.raises(ValueError, match="branch must have shape"):
        ck.add_rms_norm(H[:1], H, weight, 1e-5, backend=backend)
    with pytest.raises(ValueError, match=r"branch must have residual's dtype torch.float32, got torch.float16"):
        ck.add_rms_norm(H.half(), H, weight, 1e-5, backend=backend)
    for name, value in (
        ("mask", torch.ones(2, 4)), ("cu_seqlens", CU), ("pool_mask", torch.ones(2, 4)), ("lead", 1), ("pool", False),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name} tells where a prompt's slots are .* without a prompt"):
            ck.add_rms_norm(None, H, weight, 1e-5, **{name: value}, backend=backend)
    for eps in (-1e-6, torch.nan, torch.inf, None, True, torch.tensor(1e-6)):
        with pytest.raises(ValueError, match="eps must be a non-negative finite number, got "):
            ck.add_rms_norm(None, H, weight, eps, backend=backend)
    with pytest.raises(ValueError, match="slots of prompt in front, got 4"):
        ck.capsule_refresh(H, torch.zeros(5, 8), backend=backend)


def test_integer_masks_under_compile_are_read_and_float_masks_refused():
    torch._dynamo.reset()
    compiled = torch.compile(lambda h, m: ck.capsule_prepend(h, PROMPT, m), fullgraph=True, backend="aot_eager")
    hidden, mask = torch.randn(2, 4, 8), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    assert torch.equal(compiled(hidden, mask), ck.capsule_prepend(hidden, PROMPT, mask))
    with pytest.raises(Exception, match=r"must be bool or an integer under torch\.compile"):
        compiled(hidden, mask.float())


@pytest.mark.parametrize("lead", [4, 2**31, 2**40, 2**70])
@pytest.mark.parametrize("op", OPS)
def test_a_lead_beyond_every_sequence_puts_slots_last(op, lead, backend, device):
    tensors, options, _ = make(Case(width=3, lengths=(2, 0, 3), slots=2), op, torch.float32, device)
    want = call(op, tensors, {**options, "lead": 5}, backend)
    for got, expected in zip(call(op, tensors, {**options, "lead": lead}, backend), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.usefixtures("poisoned")
def test_rows_that_a_kernel_does_not_write_are_seen(backend, device):
    """What the other tests build on: memory that a kernel allocates holds NaN, in C++ too.

    Offsets that start at row 2, which the public functions refuse, leave two rows unwritten.
    """
    if backend == "reference":
        pytest.skip("plain torch allocates nothing that it does not write")
    hidden, offsets = torch.ones(6, 3, device=device), torch.tensor([2, 6], dtype=torch.int32, device=device)
    out = kernels("capsule", backend).capsule_refresh(
        hidden, torch.zeros(1, 1, 3, device=device), None, offsets, 0, True
    )
    assert out[:2].isnan().all()
    assert (out[2:] == 1).all()
