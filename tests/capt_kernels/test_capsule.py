"""capsule_prepend, capsule_refresh and add_rms_norm against the fp64 oracle: every backend, dtype, size and option."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

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


WIDTHS = [Case(width=d, layout=layout) for d in (1, 3, 80, 96, 769) for layout in ("packed", "left", "right")]
LENGTHS = [
    Case(lengths=(t, 2), layout=layout) for t in (0, 1, 2, 15, 16, 17, 127, 513) for layout in ("packed", "right")
]
OPTIONS = [
    Case(layout="left"),
    Case(layout="holes", pool_mask=True),
    Case(layout="right", slots=4, per_row=True, pool_mask=True),
    Case(layout="left", slots=3, pool=False),
    Case(lead=1),
    Case(lead=2, slots=2, pool_mask=True),
    Case(lead=3, slots=5, per_row=True, beyond=3),
    Case(lead=1, pool=False),
    Case(slots=4, pool_mask=True, beyond=2),
    Case(beyond=4, branch=False),
    Case(lengths=(), layout="packed"),
    Case(lengths=(), layout="right"),
    Case(lengths=(), layout="packed", beyond=3, slots=2),
    Case(lengths=(0, 0), layout="packed", lead=1),
    Case(lengths=(6,), layout="right"),
    Case(lengths=(1,) * 33, layout="packed", width=3),
    Case(lengths=(3,) * 17, layout="right", width=1),
]


def make(case, op, dtype, device="cpu", prompt_dtype=torch.float32):
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
        tensors["weight"] = torch.rand(case.width).to(dtype) + 0.5
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


def gradients(outputs, incoming, leaves):
    wanted = {k: v for k, v in leaves.items() if v is not None}
    got = torch.autograd.grad(outputs, list(wanted.values()), incoming, allow_unused=True)
    return {k: torch.zeros_like(v) if g is None else g for (k, v), g in zip(wanted.items(), got, strict=True)}


def compare(op, case, dtype, backend, device):
    prompt_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    tensors, options, where = make(case, op, dtype, device, prompt_dtype)
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


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", WIDTHS + LENGTHS + OPTIONS, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_equals_the_oracle(op, case, backend, device):
    compare(op, case, torch.float32, backend, device)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "case", [OPTIONS[2], OPTIONS[6], Case(width=96, layout="left"), Case(width=80, lead=1)], ids=str
)
@pytest.mark.parametrize("op", OPS)
def test_other_dtypes(op, case, dtype, backend, device):
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("fp64 is for the reference and C++ backends")
    compare(op, case, dtype, backend, device)


@pytest.mark.parametrize(
    "case", [Case(width=3, lead=1, slots=2), Case(width=2, layout="left", slots=2, lengths=(3, 0, 4))], ids=str
)
@pytest.mark.parametrize("op", OPS)
def test_gradcheck(op, case, backend):
    if backend == "triton":
        pytest.skip("gradcheck needs fp64: the reference and C++ backends")
    tensors, options, _ = make(case, op, torch.float64, prompt_dtype=torch.float64)
    names = list(tensors)
    assert torch.autograd.gradcheck(
        lambda *v: tuple(call(op, dict(zip(names, v, strict=True)), options, backend)), tuple(tensors.values())
    )


def strided(tensor, kind):
    """The values of ``tensor`` in memory of another order."""
    if kind == "sliced":
        return torch.cat([tensor, torch.full_like(tensor, torch.nan)], -1)[..., : tensor.shape[-1]]
    if kind == "every other":
        return torch.stack([tensor, torch.full_like(tensor, torch.nan)], -1).flatten(-2)[..., ::2]
    if kind == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    return tensor


def expanded_gradient(outputs, kind):
    """A gradient as autograd hands it in: from .sum() (stride 0), from [..., ::2], from cat, from a transpose."""
    if kind == "sum":
        return [torch.ones((), device=o.device).expand(o.shape) for o in outputs]
    if kind == "row":
        return [torch.randn(o.shape[-1], device=o.device).expand(o.shape) for o in outputs]
    return [strided(torch.randn(o.shape, device=o.device), kind) for o in outputs]


@pytest.mark.parametrize("kind", ["sliced", "every other", "transposed"])
@pytest.mark.parametrize("case", [Case(width=16, lead=1), Case(width=16, layout="left", slots=2)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_strides(op, case, kind, backend, device):
    tensors, options, _ = make(case, op, torch.float32, device)
    views = {k: strided(v.detach(), kind).requires_grad_() for k, v in tensors.items()}
    out, expected = call(op, views, options, backend), call(op, tensors, options, backend)
    for got, want in zip(out, expected, strict=True):
        assert torch.equal(got, want)
    for gradient_kind in ("sum", "row", "every other", "transposed", "sliced"):
        incoming = expanded_gradient(out, gradient_kind)
        got = gradients(call(op, views, options, backend), incoming, views)
        want = gradients(call(op, tensors, options, backend), [g.contiguous() for g in incoming], tensors)
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"d{n}: {m}")


@pytest.mark.parametrize("op", OPS)
def test_only_the_gradients_asked_for(op, backend, device):
    tensors, options, _ = make(Case(), op, torch.float32, device)
    frozen = {k: v.detach() for k, v in tensors.items()}
    frozen["prompt"].requires_grad_()
    out = call(op, frozen, options, backend)
    sum(o.square().sum() for o in out).backward()
    full = call(op, tensors, options, backend)
    want = gradients(full, [2 * o.detach() for o in full], tensors)
    torch.testing.assert_close(frozen["prompt"].grad, want["prompt"], rtol=1e-5, atol=1e-5)
    assert all(v.grad is None for k, v in frozen.items() if k != "prompt")


def test_one_output_without_a_gradient(backend, device):
    tensors, options, _ = make(Case(lead=1), "add_rms_norm", torch.float32, device)
    for chosen in (0, 1):
        got = gradients(call("add_rms_norm", tensors, options, backend)[chosen].sum(), None, tensors)
        want = gradients(call("add_rms_norm", tensors, options, "reference")[chosen].sum(), None, tensors)
        for name in want:
            torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-5)


def test_add_rms_norm_without_a_prompt(backend, device):
    branch, residual, weight = (torch.randn(*s, device=device) for s in ((2, 5, 33), (2, 5, 33), (33,)))
    normed, total = ck.add_rms_norm(branch, residual, weight, 1e-6, backend=backend)
    assert torch.equal(total, residual + branch)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(total, (33,), weight, 1e-6), rtol=1e-5, atol=1e-6)
    residual.requires_grad_()
    normed, total = ck.add_rms_norm(None, residual, weight, 1e-6, backend=backend)
    assert torch.equal(total, residual)
    torch.autograd.backward([normed, total], [branch, branch])
    want = residual.detach().requires_grad_()
    plain = torch.nn.functional.rms_norm(want, (33,), weight, 1e-6)
    torch.autograd.backward([plain, want * 1], [branch, branch])
    torch.testing.assert_close(residual.grad, want.grad, rtol=1e-5, atol=1e-5)


# --- inputs that broke others ---------------------------------------------------------------------------------------

ROWS = torch.tensor([[[1.0, 2], [3, 4], [5, 6], [100, 100]]])
MASK = torch.tensor([[1, 1, 0]])
P = torch.tensor([0.5, -0.5])


def test_the_small_example_by_hand(backend, device):
    hidden, prompt = ROWS.to(device, copy=True).requires_grad_(), P.to(device, copy=True).requires_grad_()
    out = ck.capsule_refresh(hidden, prompt, MASK.to(device), backend=backend)
    assert out[0, 0].tolist() == [3.5, 3.5]
    assert torch.equal(out[0, 1:], hidden[0, 1:])
    out[0, 0].backward(torch.tensor([3.0, 6.0], device=device))
    assert prompt.grad.tolist() == [3.0, 6.0]
    torch.testing.assert_close(hidden.grad[0].cpu(), torch.tensor([[1.0, 2], [1, 2], [1, 2], [0, 0]]))
    assert hidden.grad[0, 3].tolist() == [0.0, 0.0]


def test_a_sequence_of_padding_keeps_its_slot_and_stays_alone(backend, device):
    hidden = torch.cat([ROWS, ROWS]).to(device)
    mask = torch.cat([MASK, 0 * MASK]).to(device)
    prompt = P.to(device, copy=True).requires_grad_()
    out = ck.capsule_refresh(hidden, prompt, mask, backend=backend)
    assert out[:, 0].tolist() == [[3.5, 3.5], [1.5, 1.5]]
    out[0].sum().backward()
    assert prompt.grad.tolist() == [1.0, 1.0]
    first = ck.capsule_prepend(hidden[:, 1:], prompt, mask, backend=backend)
    assert first[1, 0].tolist() == P.tolist()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("op", OPS)
def test_padding_may_hold_anything(op, bad, backend, device):
    tensors, options, _ = make(Case(layout="left", lengths=(3, 0, 6)), op, torch.float32, device)
    held = 0 if op == "capsule_prepend" else 1
    real = torch.cat([torch.ones(3, held, dtype=torch.bool), options["mask"].cpu()], 1).to(device)
    shown = torch.cat([torch.ones(3, 1, dtype=torch.bool), options["mask"].cpu()], 1).to(device)
    clean, dirty = dict(tensors), dict(tensors)
    for store, value in ((clean, 0.0), (dirty, bad)):
        store["hidden"] = tensors["hidden"].detach().masked_fill(~real[..., None], value).requires_grad_()
    results = []
    for store in (clean, dirty):
        out = call(op, store, options, backend)
        incoming = [torch.where(shown[..., None], 1.0, 0.0).expand_as(o) for o in out]
        grads = gradients(out, incoming, store)
        results.append(([o[shown] for o in out], grads["prompt"], grads["hidden"][real]))
    for got, want in zip(results[1][0], results[0][0], strict=True):
        assert torch.equal(got, want)
    assert torch.equal(results[1][1], results[0][1])
    assert torch.equal(results[1][2], results[0][2])


def test_sums_are_wide(backend, device):
    hundred = torch.full((1, 1024, 2), 100.0, dtype=torch.float16, device=device)
    zero = torch.zeros(2, device=device)
    assert ck.capsule_prepend(hundred, zero, backend=backend)[0, 0].tolist() == [100.0, 100.0]
    ones = torch.ones(1, 4096, 2, dtype=torch.bfloat16, device=device)
    assert ck.capsule_prepend(ones, zero, backend=backend)[0, 0].tolist() == [1.0, 1.0]


def test_a_count_that_bf16_cannot_hold(backend, device):
    """257 is not a bf16 number: a count rounded to 256 would give 255/256."""
    rows = torch.full((1, 257, 2), 1.0, dtype=torch.bfloat16, device=device)
    rows[:, 0] = -1.0
    slot = ck.capsule_refresh(rows.float(), torch.zeros(2, device=device), backend=backend)[0, 0]
    torch.testing.assert_close(slot.cpu(), torch.full((2,), 255 / 257))
    low = ck.capsule_refresh(rows, torch.zeros(2, device=device), backend=backend)[0, 0]
    assert low.tolist() == torch.full((2,), 255 / 257).bfloat16().tolist()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32, torch.float16])
def test_masks_of_every_dtype(dtype, backend, device):
    tensors, options, _ = make(Case(layout="left"), "capsule_refresh", torch.float32, device)
    want = call("capsule_refresh", tensors, options, backend)[0]
    got = call("capsule_refresh", tensors, {**options, "mask": options["mask"].to(dtype)}, backend)[0]
    assert torch.equal(got, want)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_sequence_is_the_same_alone_and_among_others(side, backend, device):
    tensors, options, _ = make(Case(layout=side, lengths=(4, 9)), "capsule_refresh", torch.float32, device)
    hidden, prompt = tensors["hidden"].detach(), tensors["prompt"].detach()
    among = ck.capsule_refresh(hidden, prompt, options["mask"], backend=backend)[0]
    real = torch.cat([torch.tensor([True]), options["mask"][0].cpu()]).to(device)
    alone = ck.capsule_refresh(hidden[:1, real], prompt, backend=backend)[0]
    torch.testing.assert_close(among[real], alone, rtol=1e-6, atol=1e-6)
    ones = torch.ones(1, 4, dtype=torch.int64, device=device)
    assert torch.equal(alone, ck.capsule_refresh(hidden[:1, real], prompt, ones, backend=backend)[0])


def test_packed_equals_padded(backend, device):
    lengths = torch.tensor([3, 0, 5])
    mask = torch.arange(5) < lengths[:, None]
    hidden, prompt = torch.randn(3, 5, 8, device=device), torch.randn(2, 8, device=device)
    cu_seqlens = torch.tensor([0, 3, 3, 8], dtype=torch.int32, device=device)
    padded = ck.capsule_prepend(hidden, prompt, mask.to(device), backend=backend)
    packed = ck.capsule_prepend(hidden[mask.to(device)], prompt, cu_seqlens=cu_seqlens, backend=backend)
    real = torch.cat([torch.ones(3, 2, dtype=torch.bool), mask], 1).to(device)
    torch.testing.assert_close(padded[real], packed, rtol=1e-6, atol=1e-6)


def test_rows_past_the_last_offset(backend, device):
    tensors, options, _ = make(Case(beyond=3), "capsule_refresh", torch.float32, device)
    out = call("capsule_refresh", tensors, options, backend)[0]
    assert torch.equal(out[-3:], tensors["hidden"][-3:])
    grads = gradients([out[:-3].sum()], None, tensors)
    assert not grads["hidden"][-3:].any()


def test_the_saved_output_of_another_op(backend, device):
    """softmax keeps its output for backward: an op that wrote into it would spoil the gradient."""
    x, prompt = torch.randn(2, 5, 8, device=device).requires_grad_(), torch.zeros(8, device=device)
    out = ck.capsule_refresh(x.softmax(-1), prompt, backend=backend)
    incoming = torch.randn_like(out)
    got = torch.autograd.grad(out, x, incoming)[0]
    soft = x.softmax(-1)
    want = torch.autograd.grad(torch.cat([soft.mean(1, keepdim=True), soft[:, 1:]], 1), x, incoming)[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_lead_with_fewer_real_rows(backend, device):
    rows = torch.tensor([[1.0], [2], [3], [4]], device=device)
    cu_seqlens = torch.tensor([0, 1, 1, 4], device=device)
    out = ck.capsule_prepend(
        rows, torch.tensor([9.0], device=device), cu_seqlens=cu_seqlens, lead=2, pool=False, backend=backend
    )
    assert out.flatten().tolist() == [1, 9, 9, 2, 3, 9, 4]


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


@pytest.mark.parametrize("view", ["contiguous", "transposed", "sliced"])
@pytest.mark.parametrize("op", OPS)
def test_opcheck(op, view, backend, device):
    if backend == "reference" or (backend == "triton" and device == "cpu"):
        pytest.skip("plain Python: nothing is registered with the dispatcher")
    namespace = torch.ops.capt_kernels
    for case in (Case(width=8, layout="right", slots=2), Case(width=8, lead=1)):
        tensors, _, (pooled, cu_seqlens) = make(case, op, torch.float32, device)
        values = {k: strided(v.detach(), view) for k, v in tensors.items()}
        batch = len(case.lengths)
        mask = None if pooled is None else (pooled[:, case.slots :] if op != "capsule_prepend" else pooled)
        where = (mask, cu_seqlens, case.lead, True)
        prompt = values["prompt"].expand(batch, -1, -1)
        if op == "add_rms_norm":
            arguments = (values["branch"], values["hidden"], values["weight"], 1e-5, prompt, *where)
            normed, total, rstd = namespace.add_rms_norm(*arguments)
            back = (strided(torch.randn_like(normed), view), None, total, values["weight"], rstd, case.slots, *where)
        else:
            arguments = (values["hidden"], prompt, *where)
            out = getattr(namespace, op)(*arguments)
            back = (strided(torch.randn_like(out), view), case.slots, *where, True)
        torch.library.opcheck(getattr(namespace, op).default, arguments)
        torch.library.opcheck(getattr(namespace, op + "_backward").default, back)


# --- bad input ------------------------------------------------------------------------------------------------------

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
    with pytest.raises(ValueError, match="mask tells where a prompt's slots are"):
        ck.add_rms_norm(None, H, weight, 1e-5, mask=torch.ones(2, 4), backend=backend)
    with pytest.raises(ValueError, match="slots of prompt in front, got 4"):
        ck.capsule_refresh(H, torch.zeros(5, 8), backend=backend)


def test_integer_masks_under_compile_are_read_and_float_masks_refused():
    torch._dynamo.reset()
    compiled = torch.compile(lambda h, m: ck.capsule_prepend(h, PROMPT, m), fullgraph=True, backend="aot_eager")
    hidden, mask = torch.randn(2, 4, 8), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    assert torch.equal(compiled(hidden, mask), ck.capsule_prepend(hidden, PROMPT, mask))
    with pytest.raises(Exception, match="must be bool or an integer under torch.compile"):
        compiled(hidden, mask.float())
