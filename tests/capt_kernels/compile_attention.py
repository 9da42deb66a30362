"""Compiles the attention kernels for a GPU that need not be there, and reports what came out.

    python tests/capt_kernels/compile_attention.py sm_90

As :mod:`compile_kernels`, whose recorder it uses: real launches, with the blocks of the architecture that is named.
"""

from __future__ import annotations

import itertools
import json
import sys

import torch
import triton
from compile_kernels import TARGETS, inspect_amd, inspect_nvidia, record, source

from capt_kernels.attention.triton import attention_backward, attention_forward, blocks

#: What a program may have of shared memory. The blocks of sm_80 serve sm_86, sm_89 and sm_120 too, which have less.
SHARED = {"sm_80": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}


def launches(head: int, dtype: torch.dtype, biased: bool, drops: bool):
    """Forward and backward of T5 (bidirectional, with a bias) or of Llama (causal, grouped heads)."""
    heads, key_heads = (12, 12) if biased else (32, 8)
    q, k = (torch.empty(2048, h, head, dtype=dtype) for h in (heads, key_heads))
    cu_seqlens = torch.arange(0, 2049, 512, dtype=torch.int32)
    where = (cu_seqlens, cu_seqlens, not biased, 0.125, torch.empty(heads, 1023) if biased else None, None)
    saved = (q, k, k, q, torch.empty(heads, 2048))
    dropout = (0.1, torch.tensor(1)) if drops else ()

    def call():
        attention_forward(q, k, k, *where, *dropout)
        attention_backward(q, *saved, *where, True, True, *dropout)

    return record(call)


def main(target: str) -> None:
    blocks.architecture = lambda kind, index: target
    inspect = inspect_amd if TARGETS[target].backend == "hip" else inspect_nvidia
    kinds = itertools.product((64, 128), (torch.bfloat16, torch.float32), (False, True), (False, True))
    for head, dtype, biased, drops in kinds:
        for kernel, arguments, options in launches(head, dtype, biased, drops):
            compiled = triton.compile(source(kernel, arguments), target=TARGETS[target], options=options)
            name = (
                f"{kernel.__name__} {head} {dtype}{' with a bias' if biased else ''}{' with dropout' if drops else ''}"
            )
            spare = SHARED[target] - compiled.metadata.shared
            print(json.dumps({"kernel": name, "spare": spare} | inspect(compiled)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
