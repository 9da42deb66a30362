"""Block shapes: how many queries and keys a program has at once, by kernel, head size, dtype and architecture.

The largest that compile without spilling a register (tests compile those for heads up to 128), as the traffic of the
other side falls with the size of a block. Products of Hopper and Blackwell take 64 rows a warpgroup, so two warpgroups
have 128 of the side that a program owns. The side that it walks comes by 64 and less, since a sequence of some hundred
rows would leave much of a longer block empty. A bias costs registers for its addresses and, where loads are staged,
shared memory, hence the rows of their own.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...backends import interpreted


class Blocks(NamedTuple):
    """Queries and keys of a block, warps of a program, and loads in flight."""

    m: int
    n: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, Any]:
        """The launch options of a kernel."""
        return {"BLOCK_M": self.m, "BLOCK_N": self.n, "num_warps": self.warps, "num_stages": self.stages}


_Row = tuple[Blocks, Blocks, Blocks]


def _row(*sizes: tuple[int, int, int, int]) -> _Row:
    """Blocks for head sizes up to 64, 128 and 256."""
    narrow, middle, wide = (Blocks(*size) for size in sizes)
    return narrow, middle, wide


#: fp16 and bf16; "+" is with a bias.
_HALF = {
    "sm_80": {
        "forward": _row((128, 64, 4, 3), (128, 64, 8, 3), (64, 32, 8, 2)),
        "forward+": _row((128, 64, 4, 2), (128, 32, 8, 2), (64, 32, 8, 1)),
        "queries": _row((128, 64, 8, 2), (64, 64, 8, 2), (32, 32, 8, 1)),
        "queries+": _row((64, 32, 4, 2), (64, 64, 8, 2), (32, 32, 8, 1)),
        "keys": _row((64, 64, 4, 2), (32, 64, 8, 2), (32, 32, 8, 1)),
        "keys+": _row((64, 64, 4, 2), (32, 64, 8, 2), (32, 32, 8, 1)),
    },
    "sm_90": {
        "forward": _row((128, 64, 8, 3), (128, 64, 8, 3), (64, 32, 8, 2)),
        "forward+": _row((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2)),
        "queries": _row((128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
        "queries+": _row((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2)),
        "keys": _row((64, 128, 8, 2), (32, 128, 8, 2), (32, 32, 8, 1)),
        "keys+": _row((64, 128, 8, 2), (32, 64, 8, 2), (32, 32, 8, 1)),
    },
    "sm_100": {
        "forward": _row((128, 64, 8, 3), (128, 64, 8, 3), (64, 64, 8, 2)),
        "forward+": _row((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2)),
        "queries": _row((128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
        "queries+": _row((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 1)),
        "keys": _row((64, 128, 8, 2), (64, 128, 8, 2), (32, 64, 8, 1)),
        "keys+": _row((64, 128, 8, 2), (32, 128, 8, 2), (32, 64, 8, 1)),
    },
    "gfx942": {
        "forward": _row((128, 64, 4, 1), (128, 64, 4, 1), (64, 32, 4, 1)),
        "forward+": _row((128, 64, 4, 1), (64, 64, 4, 1), (64, 32, 4, 1)),
        "queries": _row((64, 64, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1)),
        "queries+": _row((64, 64, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1)),
        "keys": _row((64, 64, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1)),
        "keys+": _row((64, 64, 4, 1), (32, 64, 4, 1), (16, 32, 4, 1)),
    },
}
#: fp32 is multiplied without tensor cores, each thread with whole rows of its operands in registers: at head size 128
#: only many warps (of 32 threads, or of 64 on AMD) or few rows leave room for them.
_SINGLE = {
    "sm": {
        "forward": _row((64, 32, 8, 1), (32, 32, 8, 1), (16, 16, 8, 1)),
        "queries": _row((32, 32, 8, 1), (32, 32, 16, 1), (16, 16, 8, 1)),
        "keys": _row((32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 8, 1)),
    },
    "gfx": {
        "forward": _row((64, 32, 4, 1), (32, 16, 8, 1), (16, 16, 4, 1)),
        "queries": _row((32, 32, 4, 1), (16, 16, 8, 1), (16, 16, 4, 1)),
        "keys": _row((32, 32, 4, 1), (16, 32, 8, 1), (16, 16, 4, 1)),
    },
}
#: With dropout the words of a mask take the registers of half the side that is walked, and a block has that half less.
#: Where it is not what fits, by architecture, kernel and row of head sizes:
_DROPOUT = {
    ("sm_80", "keys+", 0): Blocks(32, 64, 4, 1),
    ("sm_100", "forward+", 1): Blocks(128, 32, 8, 2),
    ("sm", "forward", 0): Blocks(32, 32, 8, 1),
    ("sm", "forward", 1): Blocks(16, 16, 8, 1),
    ("sm", "queries", 1): Blocks(16, 16, 8, 1),
    ("sm", "keys", 0): Blocks(32, 32, 8, 1),
    ("gfx", "keys", 1): Blocks(16, 16, 4, 1),
}
#: Small, so that a test of some hundred rows has several; what a step costs in the interpreter is its Python.
_INTERPRETER = {"forward": Blocks(32, 64, 4, 1), "queries": Blocks(32, 64, 4, 1), "keys": Blocks(64, 32, 4, 1)}


@functools.cache
def architecture(kind: str, index: int | None) -> str:
    """The name of a device's architecture: sm_90, gfx942, xpu; "interpreter" in Triton's interpreter."""
    if interpreted():
        return "interpreter"
    if kind != "cuda":
        return kind
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def _nearest(name: str) -> str:
    """The architecture itself, or the one in the tables whose limits are nearest below."""
    if name in _HALF:
        return name
    if name.startswith("sm_"):
        return "sm_100" if name.startswith("sm_10") else "sm_80"
    return "gfx942"


def blocks_for(kernel: str, q: Tensor, biased: bool, drops: bool) -> Blocks:
    """The blocks of ``kernel`` ("forward", "queries" or "keys") for the head size, dtype and device of ``q``."""
    name = architecture(q.device.type, q.device.index)
    if name == "interpreter":
        return _INTERPRETER[kernel]
    size = 0 if q.shape[-1] <= 64 else 1 if q.shape[-1] <= 128 else 2
    if q.dtype == torch.float32:
        name, row = "sm" if name.startswith("sm_") else "gfx", kernel
        blocks = _SINGLE[name][row][size]
    else:
        name, row = _nearest(name), kernel + "+" * biased
        blocks = _HALF[name][row][size]
    if not drops:
        return blocks
    walked = {"m": max(blocks.m // 2, 16)} if kernel == "keys" else {"n": max(blocks.n // 2, 16)}
    return _DROPOUT.get((name, row, size)) or blocks._replace(**walked)
