"""Packed attention against a padded batch: SDPA with a mask, SDPA with T5's bias spelled out, FlexAttention.

16 sequences of real lengths (RTE, BoolQ, MultiRC), head size 64. FLOPs are those of useful positions alone:
``4 * d * H * sum(n^2)`` forward, halved where causal, and 2.5 times that backward. FlexAttention has no backward on a
CPU.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import capt_kernels as ck

from .lengths import lengths

BATCH, HEAD = 16, 64
#: Shape -> heads, kv heads, causal, T5 bias.
SHAPES = {"Llama (9/3 heads, causal)": (9, 3, True, False), "T5 (12 heads, relative bias)": (12, 12, False, True)}
DEFAULT, SLOW = pytest.mark.default_size, pytest.mark.slow_size
#: Task -> the sizes it belongs to, as marks.
TASKS = {"rte": (), "boolq": DEFAULT, "multirc": DEFAULT, "full 129": SLOW, "full 257": SLOW, "full 513": SLOW}
#: One group's ways stand side by side. Compiling FlexAttention takes longest, and each length anew.
RUNS = [
    pytest.param(task, *run, how, marks=SLOW if how == "FlexAttention" and marks else marks)
    for task, marks in TASKS.items()
    for run in itertools.product(SHAPES, ("forward", "forward+backward"))
    for how in ("packed", "padded SDPA", "FlexAttention")
]


class Case:
    """One batch in both layouts, with the same leaves for every method."""

    def __init__(self, task: str, shape: str, device: str):
        torch.manual_seed(0)
        heads, kv_heads, self.causal, biased = SHAPES[shape]
        counts = lengths(task, BATCH)
        self.longest = int(counts.max())
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.mask = (torch.arange(self.longest) < counts[:, None]).to(device)
        self.cu_seqlens = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(device)
        self.padded = [
            torch.randn(BATCH, self.longest, h, HEAD, device=device, dtype=dtype) for h in (heads, kv_heads, kv_heads)
        ]
        self.packed = [t[self.mask] for t in self.padded]
        for tensor in (*self.padded, *self.packed):
            tensor.requires_grad_()
        self.scale = 1.0 if biased else HEAD**-0.5
        self.table = torch.randn(heads, 2 * self.longest - 1, device=device) if biased else None
        self.flops = 4 * HEAD * heads * int((counts**2).sum()) / (2 if self.causal else 1)

    def bias(self) -> Tensor:
        """``[1, H, T, T]``."""
        place = torch.arange(self.longest, device=self.mask.device)
        return self.table[:, place[None, :] - place[:, None] + self.longest - 1][None]

    def run_packed(self) -> Tensor:
        q, k, v = self.packed
        return ck.capsule_attention(
            q, k, v, cu_seqlens=self.cu_seqlens, causal=self.causal, scale=self.scale, bias_table=self.table
        )

    def run_padded(self) -> Tensor:
        """As transformers does: one mask tensor, T5's bias added to it."""
        q, k, v = (t.transpose(1, 2) for t in self.padded)
        seen = self.mask[:, None, None, :]
        if self.causal:
            seen = seen & torch.ones(self.longest, self.longest, dtype=torch.bool, device=q.device).tril()
        if self.table is not None:
            seen = self.bias().to(q.dtype).masked_fill(~seen, torch.finfo(q.dtype).min)
        return scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )

    def flex(self):
        """FlexAttention over the padded batch, its block mask made once."""
        mask, table, reach, causal = self.mask, self.table, self.longest - 1, self.causal

        def visible(b, h, i, j):
            return mask[b, j] & (j <= i) if causal else mask[b, j]

        def biased(score, b, h, i, j):
            return score + table[h, j - i + reach]

        block_mask = create_block_mask(visible, BATCH, None, self.longest, self.longest, device=mask.device)
        compiled = torch.compile(flex_attention, dynamic=False)
        # Tensors that want a gradient are refused on a CPU even where none is computed.
        leaves = self.padded if mask.is_cuda else [t.detach() for t in self.padded]
        q, k, v = (t.transpose(1, 2) for t in leaves)
        grouped = q.shape[1] != k.shape[1]
        modify = biased if table is not None else None
        return lambda: compiled(q, k, v, score_mod=modify, block_mask=block_mask, scale=self.scale, enable_gqa=grouped)


@pytest.mark.parametrize(("task", "shape", "direction", "how"), RUNS)
def test_attention(benchmark, task, shape, direction, how, device):
    backward = direction != "forward"
    if how == "FlexAttention" and backward and device == "cpu":
        pytest.skip("torch has no backward of FlexAttention on a CPU")
    case = Case(task, shape, device)
    torch._dynamo.reset()
    forward = {"packed": lambda: case.run_packed, "padded SDPA": lambda: case.run_padded, "FlexAttention": case.flex}[
        how
    ]()
    leaves = case.packed if how == "packed" else case.padded

    def call():
        if backward:
            out = forward()
            torch.autograd.grad(out, leaves, torch.ones((), device=device, dtype=out.dtype).expand(out.shape))
        else:
            with torch.no_grad():
                forward()
        if device == "cuda":
            torch.cuda.synchronize()

    call()
    benchmark.group = f"attention, {task}, {shape}, {direction}"
    benchmark.pedantic(call, rounds=10, iterations=2, warmup_rounds=2)
    flops = case.flops * (3.5 if backward else 1)
    benchmark.extra_info.update(
        task=task, shape=shape, direction=direction, how=how, gigaflops=flops / benchmark.stats.stats.median / 1e9
    )
