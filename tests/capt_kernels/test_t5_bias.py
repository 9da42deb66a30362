"""t5_bias_table against transformers' bias at every pair of positions."""

from __future__ import annotations

import pytest
import torch

import capt_kernels as ck

SIZES = {"bidirectional": True, "num_buckets": 32, "max_distance": 128}


def square(table):
    """``[H, T, T]``: the table read at every (i, j)."""
    length = (table.shape[1] + 1) // 2
    i, j = torch.arange(length)[:, None], torch.arange(length)
    return table[:, j - i + length - 1]


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (32, 20), (16, 64), (6, 300), (4, 9)])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("length", [1, 2, 17, 513])
def test_equals_transformers(length, bidirectional, num_buckets, max_distance):
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = transformers.T5Config(
        d_model=8,
        d_kv=4,
        num_heads=3,
        is_decoder=not bidirectional,
        relative_attention_num_buckets=num_buckets,
        relative_attention_max_distance=max_distance,
    )
    theirs = modeling.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    weight = theirs.relative_attention_bias.weight.detach()
    table = ck.t5_bias_table(
        weight, length, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance
    )
    assert table.shape == (3, 2 * length - 1)
    assert torch.equal(square(table), theirs.compute_bias(length, length)[0].detach())


def test_the_published_buckets():
    """32 buckets, 128 positions. Where the weight of a bucket is its number, the bias is the bucket."""
    bucket = square(ck.t5_bias_table(torch.arange(32.0)[:, None], 200, **SIZES))[0]
    assert bucket[0, :6].tolist() == [0, 17, 18, 19, 20, 21]
    assert bucket[1, :6].tolist() == [1, 0, 17, 18, 19, 20]
    assert bucket[[7, 8, 16, 127], 0].tolist() == [7, 8, 10, 15]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtype_and_gradient(dtype):
    weight = torch.randn(32, 2).to(dtype).requires_grad_()
    table = ck.t5_bias_table(weight, 3, **SIZES)
    assert table.dtype == dtype
    table.sum().backward()
    used = [0, 1, 2, 17, 18]  # distances 0, -1, -2, 1, 2
    assert weight.grad[used].tolist() == [[1.0, 1.0]] * 5
    assert weight.grad.sum() == 10


@pytest.mark.parametrize(
    ("weight", "length", "changed", "message"),
    [
        (torch.randn(31, 2), 4, {}, r"weight must have shape \[num_buckets, H\] with num_buckets = 32, got \(31, 2\)"),
        (torch.randn(32), 4, {}, r"weight must have shape \[num_buckets, H\] .*, got \(32,\)"),
        (torch.ones(32, 2).long(), 4, {}, r"weight must be float32, float16, bfloat16 or float64, got torch.int64"),
        (torch.randn(32, 2), 0, {}, r"max_length must be an int of at least 1, got 0"),
        (torch.randn(32, 2), 2.0, {}, r"max_length must be an int of at least 1, got 2.0"),
        (torch.randn(2, 2), 4, {"num_buckets": 2}, r"num_buckets must be an int of at least 4, got 2"),
        (torch.randn(1, 2), 4, {"num_buckets": 1, "bidirectional": False}, r"num_buckets must be .* at least 2, got 1"),
        (torch.randn(32, 2), 4, {"max_distance": 8}, r"max_distance must be an int of at least 9, got 8"),
        (torch.randn(32, 2), 4, {"max_distance": 16, "bidirectional": False}, r"max_distance .* at least 17, got 16"),
    ],
)
def test_bad_input(weight, length, changed, message):
    with pytest.raises(ValueError, match=message):
        ck.t5_bias_table(weight, length, **{**SIZES, **changed})
