"""Audit of the capsule kernels' memory traffic: bytes that their loads and stores move, over the least possible.

    python -m benchmarks.traffic

The kernels run in Triton's interpreter, whose loads and stores are counted, lanes that are masked off left out; no GPU
is needed. The least possible is, in rows of D elements: prepend and refresh 1 read + 1 write, forward and backward;
add_rms_norm 2 reads + 2 writes forward and 3 reads + 1 write backward, with or without a prompt. Slot rows, weights,
masks and partial sums come on top, and are what a ratio above 1 shows.

Programs have 128 rows here, as on a GPU of 132 multiprocessors with 35,000 rows of add_rms_norm or more. Fewer rows are
dealt out in shorter chunks, down to 16 rows, to occupy every multiprocessor; that makes up to eight times the partial
sums, which are so few bytes then that they are read back out of the cache.
"""

from __future__ import annotations

import os

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so it stands before the import of one

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from triton.runtime.interpreter import InterpreterBuilder

from capt.markdown import table
from capt_kernels.capsule import triton as capsule


@dataclass
class Traffic:
    """Bytes that kernels have loaded and stored."""

    loaded: int = 0
    stored: int = 0

    @property
    def total(self) -> int:
        return self.loaded + self.stored


@contextmanager
def counted() -> Iterator[Traffic]:
    """Counts the bytes that kernels move while it is open."""
    traffic = Traffic()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def moved(pointers, mask) -> int:
        return int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8

    # An unmasked access comes through here too, with a mask of ones.
    def counting_load(self, pointers, mask, *rest):
        traffic.loaded += moved(pointers, mask)
        return load(self, pointers, mask, *rest)

    def counting_store(self, pointers, value, mask, *rest):
        traffic.stored += moved(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    InterpreterBuilder.create_masked_load = counting_load
    InterpreterBuilder.create_masked_store = counting_store
    try:
        yield traffic
    finally:
        InterpreterBuilder.create_masked_load = load
        InterpreterBuilder.create_masked_store = store


def traffic_of(call: Callable[[], Any]) -> int:
    """Bytes that the kernels launched by ``call`` move."""
    with counted() as traffic:
        call()
    return traffic.total


def cases(
    batch: int, length: int, width: int, dtype: torch.dtype, packed: bool
) -> dict[str, tuple[Callable[[], Any], int]]:
    """Every op by name: a call of its kernels, and the least number of rows that it has to move.

    Padded calls pool every row; packed ones a random half, their slots behind the first token.
    """
    rows = batch * (length + 1)
    plain = where = held = (None, None, 0, True)
    shape, held_shape = (batch, length), (batch, length + 1)
    if packed:
        where, held = (
            (torch.rand(batch * n) < 0.5, torch.arange(0, batch * n + 1, n, dtype=torch.int32), 1, True)
            for n in (length, length + 1)
        )
        shape, held_shape = (batch * length,), (rows,)
    tokens = torch.randn(*shape, width, dtype=dtype)
    hidden, branch, grad = (torch.randn(*held_shape, width, dtype=dtype) for _ in range(3))
    prompt, weight = torch.randn(1, width).expand(batch, 1, -1), torch.ones(width, dtype=dtype)
    rstd = torch.ones(held_shape)
    return {
        "capsule_prepend": (partial(capsule.capsule_prepend, tokens, prompt, *where), 2 * batch * length),
        "capsule_prepend backward": (
            partial(capsule.capsule_prepend_backward, grad, 1, *where, True),
            2 * batch * length,
        ),
        "capsule_refresh": (partial(capsule.capsule_refresh, hidden, prompt, *held), 2 * rows),
        "capsule_refresh backward": (partial(capsule.capsule_refresh_backward, grad, 1, *held, True), 2 * rows),
        "add_rms_norm": (partial(capsule.add_rms_norm, branch, hidden, weight, 1e-6, None, *plain), 4 * rows),
        "add_rms_norm with a prompt": (
            partial(capsule.add_rms_norm, branch, hidden, weight, 1e-6, prompt, *held),
            4 * rows,
        ),
        "add_rms_norm backward": (
            partial(capsule.add_rms_norm_backward, grad, branch, hidden, weight, rstd, 0, *plain, True),
            4 * rows,
        ),
        "add_rms_norm backward with a prompt": (
            partial(capsule.add_rms_norm_backward, grad, branch, hidden, weight, rstd, 1, *held, True),
            4 * rows,
        ),
    }


def ratios(batch: int, length: int, width: int, dtype: torch.dtype, packed: bool) -> dict[str, float]:
    """For every op, the bytes that its kernels move over the least possible."""
    row_bytes = width * dtype.itemsize
    return {
        name: traffic_of(call) / (least * row_bytes)
        for name, (call, least) in cases(batch, length, width, dtype, packed).items()
    }


def main() -> None:
    torch.manual_seed(0)
    columns = {
        "bf16, padded": ratios(2, 512, 2048, torch.bfloat16, packed=False),
        "fp32, padded": ratios(2, 512, 2048, torch.float32, packed=False),
        "bf16, packed, pool_mask": ratios(2, 512, 2048, torch.bfloat16, packed=True),
    }
    print("Bytes moved over the least possible, B = 2, T = 512, D = 2048:\n")
    names = next(iter(columns.values()))
    print(table(["op", *columns], [[name, *(f"{column[name]:.3f}" for column in columns.values())] for name in names]))


if __name__ == "__main__":
    main()
