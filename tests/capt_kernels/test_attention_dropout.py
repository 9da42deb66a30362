"""Dropout inside attention: one seed has one mask on every backend, and backward has the mask of the forward."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import capt_kernels as ck
from capt_kernels.attention import dropout

from . import checks
from .test_attention import Case, dense, make, offsets, op

SEED = -(2**62) + 12345
needs_cpu = pytest.mark.skipif(not ck.backends()["cpu"].available, reason="the C++ extension is not built")


@pytest.fixture(params=["reference", "cpu", "triton"])
def backend(request):
    """New tensors lie where the backend is tested."""
    status = ck.backends()[request.param]
    if not status.available:
        pytest.skip(f"{request.param}: {status.reason}")
    with torch.device("cuda" if request.param == "triton" and torch.cuda.is_available() else "cpu"):
        yield request.param


def words(seed, *counter):
    """Philox-4x32-7 in Python's own integers."""
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    c0, c1, c2, c3 = counter
    for _ in range(7):
        one, two = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (two >> 32) ^ c1 ^ low, two & 0xFFFFFFFF, (one >> 32) ^ c3 ^ high, one & 0xFFFFFFFF
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def factors_of(case, p, seed=SEED):
    """``[H, R, Rk]``: 0 where a weight is dropped, 1 / (1 - p) where it is kept, by the layout that is documented."""
    keys = case.lengths if case.keys is None else case.keys
    factors = torch.zeros(case.heads, sum(case.lengths) + case.beyond, sum(keys) + case.beyond, device="cpu")
    row = first = 0
    for n, m in zip(case.lengths, keys, strict=True):
        for h in range(case.heads):
            for r in range(row, row + n):
                for j in range(m):
                    word = words(seed, j // 4, r, h, 0)[j % 4]
                    factors[h, r, first + j] = (word ^ 2**31) - 2**31 >= round(p * 2**32) - 2**31
        row, first = row + n, first + m
    return factors.double() / (1 - p)


PUBLISHED = {  # key, counter and words of Random123's known answers for seven rounds
    "zeros": ((0, 0), (0, 0, 0, 0), "5f6fb709 0d893f64 4f121f81 4f730a48"),
    "ones": ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    "pi": (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        "4dfccaba 190a87f0 c47362ba b6b5242a",
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_generator_gives_its_published_words(name):
    (low, high), counter, want = PUBLISHED[name]
    seed = low | high << 32
    seed -= 2**64 * (seed >= 2**63)
    got = dropout.philox(torch.tensor(seed), *map(torch.tensor, counter))
    assert " ".join(f"{int(word):08x}" for word in got) == want
    assert words(seed, *counter) == tuple(int(word) for word in got)


FEW = {"heads": 2, "key_heads": 1}
CASES = [
    Case(),
    Case(**FEW, causal=False, bias=7, beyond=2),
    Case(**FEW, keys=(9, 2, 7, 4), window=3, bias=9),
    Case(**FEW, lengths=(5, 4, 2), keys=(2, 0, 3)),
    Case(**FEW, lengths=(35, 3), head=33, causal=False),
    Case(lengths=(66,), heads=1, key_heads=1),
]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_dense_softmax_and_its_mask(case, backend):
    inputs, options = make(case, checks.exact(backend))
    options |= {"dropout_p": 0.3, "seed": SEED}
    checks.compare(op(options), dense(case, options, factors_of(case, 0.3)), inputs, backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(dtype, backend):
    if backend == "triton" and not torch.cuda.is_available() and dtype != torch.float16:
        pytest.skip("in Triton's interpreter float32 is tested above, and bfloat16 has no product")
    case = Case(**FEW, bias=7, causal=False)
    inputs, options = make(case, dtype)
    options |= {"dropout_p": 0.1, "seed": SEED}
    checks.compare(op(options), dense(case, options, factors_of(case, 0.1)), inputs, backend)


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=needs_cpu)])
@pytest.mark.parametrize("case", [Case(), Case(bias=7, causal=False), Case(keys=(5, 2, 1), window=2)], ids=str)
def test_gradcheck(case, backend):
    small = FEW | {"lengths": (3, 0, 2), "head": 3}
    inputs, options = make(Case(**vars(case) | small))
    call = lambda *x: ck.capsule_attention(*x, **options, dropout_p=0.4, seed=7, backend=backend)  # noqa: E731
    assert torch.autograd.gradcheck(call, inputs)


def test_weights_drop_out_independently():
    """The share that is kept, and that no two of heads, queries, keys and seeds agree more than chance has it."""
    p, n = 0.25, 256
    kept = torch.stack([dropout.kept(torch.tensor(s), p, 4, 100, n, n) for s in (0, 1)]).double()
    sigma = (p * (1 - p) / n) ** 0.5
    assert abs(kept.mean() - (1 - p)) < 4 * sigma / (8 * n) ** 0.5
    for axis in (2, 3):
        assert (kept.mean((0, 1, axis)) - (1 - p)).abs().max() < 5 * sigma / 8**0.5
    centred = (kept - (1 - p)) / (p * (1 - p)) ** 0.5
    for shifted in (
        centred.roll(1, 0),
        centred.roll(1, 1),
        centred.roll(1, 2),
        *(centred.roll(i, 3) for i in range(1, 5)),
    ):
        assert abs((centred * shifted).mean()) < 5 / (2 * 4 * n * n) ** 0.5


def call(backend, p=0.5, rows=24, **options):
    """Output and gradients of one call; q, k and v are the same in each."""
    torch.manual_seed(0)
    leaves = [torch.randn(rows, h, 8, requires_grad=True) for h in (2, 1, 1)]
    torch.manual_seed(options.pop("manual_seed", 1))
    options = {"cu_seqlens": offsets([rows - 9, 9]), "causal": False, "scale": 0.3} | options
    out = ck.capsule_attention(*leaves, dropout_p=p, backend=backend, **options)
    return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))


def test_what_a_seed_may_be(backend):
    want = call(backend, seed=-3)
    for same in (torch.tensor(-3), torch.tensor([[-3]])):
        assert all(map(torch.equal, call(backend, seed=same), want))
    for other in (-4, 2**32 - 3):  # the last has the same low half
        assert not torch.equal(call(backend, seed=other)[0], want[0])


def test_a_seed_is_drawn_where_none_is_given(backend):
    one, again, other = (call(backend, manual_seed=s) for s in (1, 1, 2))
    assert all(map(torch.equal, one, again))
    assert not torch.equal(one[0], other[0])


def test_without_dropout_nothing_is_drawn(backend):
    plain = call(backend, 0.0)
    state = torch.get_rng_state()
    assert all(map(torch.equal, call(backend, 0, seed=5), plain))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_mean_over_seeds_is_the_result_without():
    outs = torch.stack([call("auto", 0.3, seed=s)[0] for s in range(400)]).detach()
    error = (outs.mean(0) - call("reference", 0.0)[0]).abs()
    assert (error < 5.5 * outs.std(0) / 400**0.5).all()


def test_all_may_drop_out(backend):
    for got in call(backend, 1 - 1e-12, seed=0):
        assert torch.equal(got, torch.zeros_like(got))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_has_the_same_mask_twice(reentrant, backend):
    leaves = [torch.randn(20, 2, 8, requires_grad=True) for _ in range(3)]
    options = {"cu_seqlens": offsets([20]), "causal": True, "scale": 0.3, "dropout_p": 0.5, "backend": backend}
    results = []
    for run in (lambda f, *x: f(*x), lambda f, *x: checkpoint(f, *x, use_reentrant=reentrant)):
        torch.manual_seed(3)
        out = run(lambda q, k, v: ck.capsule_attention(q, k, v, **options), *leaves)
        torch.manual_seed(4)  # and what is drawn in between does not matter
        results.append(
            (out, *torch.autograd.grad(out.square().sum(), leaves)) if not reentrant else (out, *back(out, leaves))
        )
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def back(out, leaves):
    """Gradients by ``backward``, which alone reentrant checkpointing serves."""
    for leaf in leaves:
        leaf.grad = None
    out.square().sum().backward()
    return [leaf.grad for leaf in leaves]


@needs_cpu
def test_a_compiled_call_draws_anew():
    torch._dynamo.reset()
    options = {"cu_seqlens": offsets([20]), "causal": False, "scale": 0.3, "dropout_p": 0.5, "backend": "cpu"}
    leaves = [torch.randn(20, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def loss(*leaves):
        return ck.capsule_attention(*leaves, **options).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        first, second = compiled(*leaves), compiled(*leaves)
        assert first != second
        results.append((first, second, *torch.autograd.grad(second, leaves)))
    assert all(map(torch.equal, results[0], results[1]))
    assert results[0][0] != results[2][0]
    torch.manual_seed(1)
    loss(*leaves)
    eager = loss(*leaves)
    for got, want in zip(results[0][1:], (eager, *torch.autograd.grad(eager, leaves)), strict=True):
        assert torch.equal(got, want)


def test_nothing_of_t_by_t_is_kept(backend):
    if backend == "reference":
        pytest.skip("it has every score in memory")
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    ):
        out = call(backend, rows=128)[0]
    bytes_kept = sum(t.untyped_storage().nbytes() for t in kept.values())
    assert bytes_kept == 4 * (128 * 8 * (2 + 1 + 1 + 2) + 128 * 2 + 3) + 8
    assert out.shape == (128, 2, 8)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_sequence_of_nan_stays_alone(value, backend):
    q, k, v = (torch.randn(30, h, 8) for h in (4, 2, 2))
    options = {"cu_seqlens": offsets([12, 18]), "causal": True, "scale": 0.3, "dropout_p": 0.5, "seed": 2}
    clean = ck.capsule_attention(q, k, v, **options, backend=backend)
    for x in (q, k, v):
        x[:12] = value
    dirty = ck.capsule_attention(q, k, v, **options, backend=backend)
    assert torch.equal(clean[12:], dirty[12:])
    assert not dirty[:12].isfinite().any()


@pytest.mark.parametrize("p", [1, 1.0, -0.1, 2, float("nan"), True, "0.1", None], ids=str)
def test_a_probability_that_is_none(p):
    with pytest.raises(ValueError, match=r"dropout_p must be a number from 0 up to, but not, 1, got "):
        call("auto", p)


@pytest.mark.parametrize(
    "seed", [1.5, True, 2**63, torch.tensor(1.0), torch.tensor([1, 2]), torch.tensor(1).int()], ids=str
)
def test_a_seed_that_is_none(seed):
    with pytest.raises(ValueError, match=r"seed must be an int"):
        call("auto", seed=seed)


def test_backends_that_have_masks_of_their_own():
    with pytest.raises(ValueError, match=r"backend 'sdpa' takes no dropout_p: "):
        call("sdpa")
    assert call("sdpa", 0.0)[0].shape == (24, 2, 8)


def test_auto_without_the_extension(monkeypatch):
    monkeypatch.setattr("capt_kernels.attention.resolve", lambda name, device: "reference")
    assert all(map(torch.equal, call("auto", seed=1), call("reference", seed=1)))


@needs_cpu
def test_opcheck_and_direct_calls():
    ops = torch.ops.capt_kernels
    q, k, v = (torch.randn(12, h, 8) for h in (4, 2, 2))
    where, drops = (offsets([7, 5]), None, False, 0.3, None, None), (0.5, torch.tensor(3))
    torch.library.opcheck(ops.attention_forward.default, (q, k, v, *where, *drops))
    out, lse = ops.attention_forward(q, k, v, *where, *drops)
    torch.library.opcheck(ops.attention_backward.default, (q, q, k, v, out, lse, *where, True, True, *drops))
    whole = ops.attention_forward(q, k, v, *where)
    assert not torch.equal(out, whole[0])
    assert torch.equal(lse, whole[1])
    for p, seed, message in (
        (1.0, torch.tensor(3), "dropout_p must be from 0"),
        (0.5, None, "seed must be given where dropout_p is not 0"),
        (0.0, torch.tensor(3), "and only there"),
        (0.5, torch.tensor([3]), r"seed must have shape \[\], got \[1\]"),
        (0.5, torch.tensor(3.0), "seed must have dtype Long"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.attention_forward(q, k, v, *where, p, seed)
