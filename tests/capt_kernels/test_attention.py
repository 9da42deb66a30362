"""capsule_attention against one dense fp64 softmax over all rows of the batch, and against transformers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import capt_kernels as ck

from . import checks


@pytest.fixture(params=["reference", "cpu", "sdpa", "triton"])
def backend(request):
    """All but "triton" run everywhere. New tensors lie where the backend is tested."""
    status = ck.backends()[request.param]
    if request.param == "triton" and not status.available:
        pytest.skip(f"triton: {status.reason}")
    with torch.device("cuda" if request.param == "triton" and torch.cuda.is_available() else "cpu"):
        yield request.param


@dataclass(frozen=True)
class Case:
    """A packed call; ``keys`` are the lengths of k and v where they differ from those of q."""

    lengths: tuple[int, ...] = (5, 0, 7, 1)
    keys: tuple[int, ...] | None = None
    heads: int = 4
    key_heads: int = 2
    head: int = 8
    causal: bool = True
    scale: float = 0.3
    bias: int = 0
    window: int | None = None
    beyond: int = 0

    def __str__(self):
        return (
            "-".join(f"{k}={v}" for k, v in vars(self).items() if v != getattr(Case(), k)).replace(" ", "") or "default"
        )


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def make(case, dtype=torch.float64, kinds=("contiguous",) * 3):
    """Leaves q, k, v and the keyword arguments of a call."""
    keys = case.lengths if case.keys is None else case.keys
    rows, key_rows = sum(case.lengths) + case.beyond, sum(keys) + case.beyond
    shapes = [(rows, case.heads), (key_rows, case.key_heads), (key_rows, case.key_heads)]
    leaves = [
        checks.leaves([torch.randn(*s, case.head)], dtype, torch.get_default_device(), kind)[0]
        for s, kind in zip(shapes, kinds, strict=True)
    ]
    options = {"cu_seqlens": offsets(case.lengths), "causal": case.causal, "scale": case.scale, "window": case.window}
    if case.keys is not None:
        options["cu_seqlens_k"] = offsets(keys)
    if case.bias:
        options["bias_table"] = torch.randn(case.heads, 2 * case.bias - 1).to(dtype)
    return leaves, options


def places(lengths, others, rows):
    """Of each packed row: its sequence (-1 past the last), and its position, the last rows of q and k being aligned."""
    sequence = torch.full((rows,), -1, device="cpu")
    position = torch.zeros(rows, dtype=torch.long, device="cpu")
    start = 0
    for number, (n, m) in enumerate(zip(lengths, others, strict=True)):
        sequence[start : start + n] = number
        position[start : start + n] = torch.arange(m - n, m, device="cpu")
        start += n
    return sequence, position


def dense(case, options, factors=None):
    """The definition: every row of q against every row of k, other sequences unseen; dropout by ``factors``."""
    keys = case.lengths if case.keys is None else case.keys

    def attention(q, k, v):
        q_sequence, i = places(case.lengths, keys, len(q))
        k_sequence, j = places(keys, keys, len(k))
        distance = j - i[:, None]
        seen = (q_sequence[:, None] == k_sequence) & (q_sequence[:, None] >= 0)
        seen = seen & (distance <= 0) if case.causal else seen
        if case.window is not None:
            seen = seen & (distance > -case.window)
        outputs = []
        for h, factor in enumerate([1] * case.heads if factors is None else factors):
            key_head = h * case.key_heads // case.heads
            scores = case.scale * q[:, h] @ k[:, key_head].T
            if case.bias:
                place = (distance + case.bias - 1).clamp(0, 2 * case.bias - 2)
                scores = scores + options["bias_table"][h].cpu().double()[place]
            weight = torch.where(seen, (scores - scores.detach().max() if scores.numel() else scores).exp(), 0)
            total = weight.sum(-1, keepdim=True)
            outputs.append(weight / total.where(total > 0, 1) * factor @ v[:, key_head])
        return torch.stack(outputs, 1)

    return attention


def op(options):
    return lambda q, k, v, backend: ck.capsule_attention(q, k, v, **options, backend=backend)


SIZES = [
    Case(lengths=(t, 3), heads=2, key_heads=1, causal=c, bias=b and t + 3)
    for t in (1, 2, 15, 16, 17, 127)
    for c in (True, False)
    for b in (0, 1)
]
LONG = [
    Case(lengths=(513,), heads=2, key_heads=1),
    Case(lengths=(512, 2), heads=1, key_heads=1, causal=False, bias=512, scale=1.0),
    Case(lengths=(511,), heads=1, key_heads=1, bias=600, window=129),
    Case(lengths=(600,), heads=1, key_heads=1, window=3),
    Case(lengths=(129,), keys=(640,), heads=2, key_heads=1, window=40),
]
OPTIONS = [
    Case(),
    Case(beyond=3),
    Case(causal=False, beyond=2),
    Case(lengths=(0, 0, 4, 0)),
    Case(lengths=(6,), heads=3, key_heads=3, head=5),
    Case(heads=8, key_heads=1, head=16),
    Case(head=1),
    Case(head=33, causal=False),
    Case(window=2),
    Case(window=3),
    Case(window=2**63),
    Case(bias=7, scale=1.0),
    Case(bias=20, causal=False, scale=1.0, beyond=1),
    Case(bias=7, window=2),
    Case(scale=2),
    Case(keys=(9, 2, 7, 4)),
    Case(keys=(9, 2, 7, 4), causal=False),
    Case(keys=(9, 2, 7, 4), window=3, bias=9, beyond=2),
    Case(lengths=(1, 1, 1), keys=(5, 1, 8)),
    Case(lengths=(1, 1, 1), keys=(5, 1, 8), window=4),
    Case(lengths=(5, 4, 2), keys=(2, 0, 3)),
    Case(lengths=(5, 4, 2), keys=(2, 0, 3), causal=False, bias=5),
    Case(lengths=(5, 4, 2), keys=(2, 0, 3), bias=6),
]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", SIZES + LONG + OPTIONS, ids=str)
def test_equals_one_dense_softmax(case, backend):
    inputs, options = make(case, checks.exact(backend))
    checks.compare(op(options), dense(case, options), inputs, backend)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [*OPTIONS[::3], LONG[0], LONG[2]], ids=str)
def test_other_dtypes(case, dtype, backend):
    if backend == "triton" and not torch.cuda.is_available() and (dtype != torch.float16 or case in LONG):
        pytest.skip("in Triton's interpreter: float32 is tested above, bfloat16 has no product, and it is slow")
    inputs, options = make(case, dtype)
    checks.compare(op(options), dense(case, options), inputs, backend)


# Not k and v expanded over the rows: keys that are all alike have a gradient of 0, and there is nothing to compare.
KINDS = [(k,) * 3 for k in checks.INPUTS if k != "expanded"]
MIXED = [("contiguous", "transposed", "sliced"), ("expanded", "sliced", "every other")]


@pytest.mark.parametrize("gradient", checks.GRADIENTS)
@pytest.mark.parametrize("kinds", KINDS + MIXED, ids=str)
@pytest.mark.parametrize("backend", ["reference", "cpu", "sdpa"])  # Triton's by pairs, in test_attention_triton
@pytest.mark.parametrize("case", [Case(), Case(bias=7, causal=False, beyond=1)], ids=str)
def test_strides(case, kinds, gradient, backend):
    """k and v of different strides among them: a kernel that reads one with the other's passes wherever they agree."""
    inputs, options = make(case, kinds=kinds)
    checks.compare(op(options), dense(case, options), inputs, backend, gradient)


def test_views_of_one_projection(backend):
    joint = torch.randn(12, 4 * 8 + 2 * 2 * 8, dtype=checks.exact(backend))
    q, k, v = (x.unflatten(-1, (-1, 8)).requires_grad_() for x in joint.split([32, 16, 16], -1))
    case = Case(lengths=(5, 7))
    options = make(case)[1]
    checks.compare(op(options), dense(case, options), [q, k, v], backend)


def test_a_window_of_one_sees_itself_alone(backend):
    q, k, v = (torch.randn(7, 2, 4, requires_grad=True) for _ in range(3))
    out = ck.capsule_attention(q, k, v, cu_seqlens=offsets([5, 2]), causal=True, scale=1.0, window=1, backend=backend)
    torch.testing.assert_close(out, v)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    for grad, want in zip(grads, (0.0, 0.0, 1.0), strict=True):
        torch.testing.assert_close(grad, torch.full_like(grad, want), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "cpu", "sdpa"])  # in fp64, which Triton's kernels do not have
@pytest.mark.parametrize("case", [Case(), Case(bias=7, causal=False), Case(keys=(9, 2, 7, 0), window=3)], ids=str)
def test_gradcheck(case, backend):
    inputs, options = make(Case(**{**vars(case), "head": 3}))
    assert torch.autograd.gradcheck(lambda *x: ck.capsule_attention(*x, **options, backend=backend), inputs)


def test_scores_wider_than_fp16(backend):
    """T5 does not scale: scores of 2e5 are inf in fp16, and softmax of inf is NaN."""
    q, k, v = (x.half() for x in (torch.full((2, 1, 8), 160.0), torch.full((2, 1, 8), 160.0), torch.randn(2, 1, 8)))
    k[1] = -160
    bias = torch.zeros(1, 3, dtype=torch.float16)
    out = ck.capsule_attention(
        q, k, v, cu_seqlens=offsets([2]), causal=False, scale=1.0, bias_table=bias, backend=backend
    )
    assert torch.equal(out, v[:1].expand_as(out))


def test_a_bias_that_fp16_cannot_add(backend):
    """2048 + 0.5 is 2048 in fp16; in fp32 the half decides."""
    q = k = torch.full((2, 1, 2), 32.0, dtype=torch.float16)
    v = torch.tensor([[[0.0, 0]], [[1, 1]]]).half()
    bias = torch.tensor([[0.5, 0.0, 0.5]]).half()
    out = ck.capsule_attention(
        q, k, v, cu_seqlens=offsets([2]), causal=False, scale=1.0, bias_table=bias, backend=backend
    )
    high = torch.tensor(0.5).sigmoid().item()
    assert out[:, 0, 0].tolist() == pytest.approx([high, 1 - high], abs=1e-3)


@pytest.mark.parametrize("hidden", ["all", "others"])
def test_a_bias_of_minus_infinity_hides_keys(hidden, backend):
    """All of them, so that the result is 0 as of a query that sees no key; or all but the query's own."""
    q, k, v = (torch.randn(3, 1, 8, dtype=checks.exact(backend), requires_grad=True) for _ in "qkv")
    bias = torch.full((1, 5), -torch.inf)
    bias[0, 2] = -torch.inf if hidden == "all" else 0.0
    out = ck.capsule_attention(
        q, k, v, cu_seqlens=offsets([3]), causal=False, scale=0.3, bias_table=bias, backend=backend
    )
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    own = torch.zeros_like(v) if hidden == "all" else v
    torch.testing.assert_close(out, own, rtol=1e-5, atol=0)
    for gradient, each in zip(gradients, (0.0, 0.0, float(hidden == "others")), strict=True):
        torch.testing.assert_close(gradient, torch.full_like(gradient, each), rtol=0, atol=1e-6)


@pytest.mark.parametrize("is_decoder", [False, True])
def test_equals_t5(is_decoder, backend):
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = transformers.T5Config(d_model=16, d_kv=4, num_heads=3, is_decoder=is_decoder, dropout_rate=0.0)
    config._attn_implementation = "eager"
    layer = modeling.T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    hidden = torch.randn(2, 40, 16)
    unseen = torch.full((40, 40), -torch.inf).triu(1) if is_decoder else torch.zeros(40, 40)
    with torch.no_grad():
        want = layer(hidden, mask=unseen.expand(2, 1, 40, 40))[0]
        q, k, v = (f(hidden).unflatten(-1, (3, 4)) for f in (layer.q, layer.k, layer.v))
        table = ck.t5_bias_table(
            layer.relative_attention_bias.weight, 50, bidirectional=not is_decoder, num_buckets=32, max_distance=128
        )
        out = ck.capsule_attention(q, k, v, causal=is_decoder, scale=1.0, bias_table=table, backend=backend)
        torch.testing.assert_close(layer.o(out.flatten(-2)), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "extra", [{}, {"window": 9}, {"bias_table": torch.randn(4, 255)}], ids=["plain", "window", "bias"]
)
@pytest.mark.parametrize("backend", ["cpu", "sdpa"])
def test_memory_is_linear_in_the_length(extra, backend):
    """Kept for the backward: q, k, v, the result and one number a head and row, bias or not; nothing of T x T."""
    q, k, v = (torch.randn(256, h, 16, requires_grad=True) for h in (4, 2, 2))
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    ):
        out = ck.capsule_attention(
            q, k, v, cu_seqlens=offsets([128, 128]), causal=True, scale=0.3, backend=backend, **extra
        )
    bytes_kept = sum(t.untyped_storage().nbytes() for t in kept.values())
    exact = sum(t.nbytes for t in (q, k, v, out)) + 4 * out.shape[0] * out.shape[1]
    diagonals = 4 * 4 * 255
    assert bytes_kept <= exact + diagonals + 16  # and offsets, or one bool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("case", [Case(), Case(bias=7), Case(window=3), Case(causal=False, bias=7)], ids=str)
def test_takes_the_flash_kernel(case, dtype):
    """torch's fallback has every score in memory, and repeats grouped heads."""
    inputs, options = make(case, dtype, ("every other", "transposed", "sliced"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ck.capsule_attention(*inputs, **options, backend="sdpa")
    names = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    assert "aten::_scaled_dot_product_attention_math" not in names


def test_auto_takes_the_extension():
    inputs, options = make(Case(bias=7))
    got = ck.capsule_attention(*inputs, **options)
    assert torch.equal(got, ck.capsule_attention(*inputs, **options, backend="cpu"))
