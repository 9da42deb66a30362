"""Where rows, slots and pool bins are: the geometry that every capsule kernel shares.

A program owns ``CHUNK`` rows of one sequence, so that long sequences spread over the device. Nothing about a batch is
read back to the host: in a packed call sequence b's programs start at ``cu_seqlens[b] // CHUNK + b``, which leaves
room for a last, partly filled chunk of each, and a program finds its sequence by counting the starts up to its own id.
What lies past the last offset counts as sequence B, which has no slots.

Rows of a sequence are numbered in pool order: slots that the input holds first, then the tokens, whatever ``lead`` does
to their places in memory. Ranks, and with them the bins of the adaptive mean pool, then rise along a sequence: bin k of
n pooled rows covers the ranks floor(k*n/K) .. ceil((k+1)*n/K)-1, so the row of rank r is in the bins
floor(r*K/n) .. ceil((r+1)*K/n)-1. The first of them owns the row, and so do programs that loop over bins.

Consecutive chunks share one bin at most. Chunk c's partial sum of bin k therefore has a place of its own at
``c + k`` behind the sequence's first, and a buffer of partial sums needs ``programs + K*(B+1)`` rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Sequence starts that a program looks through at once.
_SEARCH = tl.constexpr(256)
#: Elements of a tile and its warps: 16 elements a thread.
TILE = 4096
WARPS = 8
#: The same for partial sums, of which one program may have many to add up: more in flight, as latency is all it costs.
SUM_TILE = 16384
SUM_WARPS = 16


@triton.jit
def span(sequence, cu_ptr, batch, rows):
    """First row of a sequence among all rows, and its number of rows."""
    rows = tl.cast(rows, tl.int32)
    if cu_ptr is None:
        start = tl.cast(sequence, tl.int64) * rows
        length = rows
    else:
        # Offsets on a GPU are not looked at before a launch: wrong ones must not lead outside the tensor.
        begin = tl.minimum(tl.maximum(tl.load(cu_ptr + sequence), 0), rows)
        stop = tl.load(cu_ptr + sequence + 1, mask=sequence < batch, other=rows)
        length = tl.maximum(tl.minimum(stop, rows) - begin, 0)
        start = tl.cast(begin, tl.int64)
    return start, length


@triton.jit
def first_program(sequence, start, cu_ptr, rows, CHUNK: tl.constexpr):
    """The program that has a sequence's first chunk."""
    if cu_ptr is None:
        program = sequence * tl.maximum(tl.cdiv(tl.cast(rows, tl.int32), CHUNK), 1)
    else:
        program = sequence + tl.cast(start // CHUNK, tl.int32)
    return program


@triton.jit
def find_sequence(program, cu_ptr, batch, rows, CHUNK: tl.constexpr):
    """The sequence whose rows a program owns."""
    if cu_ptr is None:
        sequence = program // tl.maximum(tl.cdiv(tl.cast(rows, tl.int32), CHUNK), 1)
    else:
        sequence = -1
        for i in range(0, batch + 1, _SEARCH):
            index = i + tl.arange(0, _SEARCH)
            offset = tl.load(cu_ptr + index, mask=index <= batch, other=0)
            begun = tl.minimum(tl.maximum(offset, 0), rows) // CHUNK + index <= program
            sequence += tl.sum((begun & (index <= batch)).to(tl.int32), 0)
        sequence = tl.maximum(sequence, 0)
    return sequence


@triton.jit
def slot_span(sequence, length, cu_ptr, batch, lead, SLOTS: tl.constexpr, HELD: tl.constexpr):
    """How many slots the output has in a sequence, how many the input holds, and how many tokens stand before them."""
    slots = tl.cast(SLOTS, tl.int32)
    if cu_ptr is not None:
        # A sequence too short to hold its slots has none.
        has = sequence < batch
        if HELD:
            has = has & (length >= SLOTS)
        slots = tl.where(has, slots, 0)
    held = slots if HELD else slots * 0
    return slots, held, tl.minimum(lead, length - held)


@triton.jit
def base(sequence, start, cu_ptr, stride_b, stride_r):
    """Offset in elements of a sequence's first row in a strided input."""
    return tl.cast(sequence, tl.int64) * stride_b if cu_ptr is None else start * stride_r


@triton.jit
def place(index, held, first):
    """Where the row of pool order ``index`` stands in its sequence."""
    token = index - held
    return tl.where(index < held, first + index, tl.where(token < first, token, index))


@triton.jit
def rank(index, start, held, first, before_ptr):
    """How many pooled rows come before ``index`` (0 .. length) in pool order."""
    if before_ptr is None:
        return index
    else:
        # What the mask says at slot rows does not count: slots always pool.
        behind = tl.load(before_ptr + start + first + held)
        at_slots = behind - tl.load(before_ptr + start + first)
        passed = tl.load(before_ptr + start + place(index, held, first)) - tl.load(before_ptr + start)
        passed -= tl.where(index - held >= first, at_slots, 0)
        return tl.where(index < held, index, held + passed)


@triton.jit
def chunk_bins(chunk, count, start, length, held, first, before_ptr, SLOTS: tl.constexpr, CHUNK: tl.constexpr):
    """First and last bin that a chunk's rows meet; past the last row, none: last < first."""
    begin = tl.minimum(chunk * CHUNK, length)
    if SLOTS <= 1:
        lowest = begin * 0
        highest = lowest
    else:
        members = tl.maximum(count, 1)
        before = rank(begin, start, held, first, before_ptr)
        after = rank(tl.minimum(begin + CHUNK, length), start, held, first, before_ptr)
        lowest = tl.minimum(before * SLOTS // members, SLOTS - 1)
        highest = tl.maximum((after * SLOTS + members - 1) // members - 1, lowest)
    return lowest, tl.where(begin < length, highest, lowest - 1)


@triton.jit
def row_bins(index, lowest, count, start, length, held, first, before_ptr, SLOTS: tl.constexpr):
    """For rows in pool order: the bin that owns each, the last bin it is in, and whether it is pooled at all.

    Rows in no bin go with ``lowest``, the first bin that their chunk meets.
    """
    pooled = index < length
    if before_ptr is not None:
        row = start + place(index, held, first)
        after = tl.load(before_ptr + row + 1, mask=pooled, other=0)
        pooled = pooled & ((index < held) | (after > tl.load(before_ptr + row, mask=pooled, other=0)))
    if SLOTS <= 1:
        owner = index * 0
        last = owner
    else:
        members = tl.maximum(count, 1)
        position = rank(tl.minimum(index, length), start, held, first, before_ptr)
        owner = tl.where(pooled, position * SLOTS // members, lowest)
        last = ((position + 1) * SLOTS + members - 1) // members - 1
    return owner, last, pooled


@triton.jit
def bin_size(k, count, SLOTS: tl.constexpr, ACC: tl.constexpr):
    """Number of rows in bin k, at least 1, as a divisor."""
    size = count if SLOTS <= 1 else ((k + 1) * count + SLOTS - 1) // SLOTS - k * count // SLOTS
    return tl.maximum(size, 1).to(ACC)


@triton.jit
def locate(
    program, cu_ptr, before_ptr, batch, rows, lead, SLOTS: tl.constexpr, HELD: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """A program's sequence and chunk; the sequence's span, slots and pooled rows; the bins that the chunk meets."""
    sequence = find_sequence(program, cu_ptr, batch, rows, CHUNK)
    start, length = span(sequence, cu_ptr, batch, rows)
    slots, held, first = slot_span(sequence, length, cu_ptr, batch, lead, SLOTS, HELD)
    count = rank(length, start, held, first, before_ptr)
    chunk = tl.maximum(program - first_program(sequence, start, cu_ptr, rows, CHUNK), 0)
    lowest, highest = chunk_bins(chunk, count, start, length, held, first, before_ptr, SLOTS, CHUNK)
    return sequence, chunk, start, length, slots, held, first, count, lowest, highest


@triton.jit
def pooled_mean(
    partial_ptr, columns, inside, k, sequence, count, start, length, held, first, cu_ptr, before_ptr, rows,
    WIDTH: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Bin k's mean out of its chunks' partial sums, added up in a fixed order."""
    origin = tl.cast(first_program(sequence, start, cu_ptr, rows, CHUNK), tl.int64) + sequence * SLOTS + k
    total = tl.zeros([STEP, BLOCK], ACC)
    for i in range(0, tl.cdiv(length, CHUNK), STEP):
        chunk = i + tl.arange(0, STEP)
        lowest, highest = chunk_bins(chunk, count, start, length, held, first, before_ptr, SLOTS, CHUNK)
        met = (lowest <= k) & (k <= highest)
        address = partial_ptr + (origin + chunk)[:, None] * WIDTH + columns[None, :]
        total += tl.load(address, mask=met[:, None] & inside[None, :], other=0)
    return tl.sum(total, 0) / bin_size(k, count, SLOTS, ACC)


@dataclass(frozen=True)
class Plan:
    """How the rows of one call are dealt out to programs."""

    cu_seqlens: Tensor | None
    #: Exclusive running count of the pooled rows, int32 ``[rows + 1]``; None where every row is pooled.
    before: Tensor | None
    batch: int
    rows: int  # of a sequence in a padded call, of all in a packed one
    lead: int
    chunk: int
    programs: int

    @property
    def where(self) -> tuple[Tensor | None, Tensor | None, int, int, int]:
        """The arguments that place a kernel's rows."""
        return self.cu_seqlens, self.before, self.batch, self.rows, self.lead

    def partial_sums(self, slots: int, width: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Room for the partial sums of every chunk and bin."""
        return like.new_empty(self.programs + slots * (self.batch + 1), width, dtype=dtype)


def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 in the interpreter."""
    if device.type == "cpu":
        return 1
    properties = torch.get_device_module(device).get_device_properties(device)
    return properties.max_compute_units if device.type == "xpu" else properties.multi_processor_count


def plan(
    batch: int, rows: int, pooled: Tensor | None, cu_seqlens: Tensor | None, lead: int, device: torch.device, *,
    slots: int = 0, held: bool = True, column_blocks: int = 1, only_slots: bool = False,
) -> Plan:  # fmt: skip
    """Deals out ``rows`` rows: a sequence's in a padded call, all in a packed one, slots too where ``held``.

    Chunks are long enough that their partial sums hardly count (8/128 of a row, or less, a row) and short enough that
    four programs come to each multiprocessor. ``only_slots`` gives every sequence one program, for its slot rows.
    """
    if slots > 1 and (rows + 1) * (slots + 1) >= 2**31:
        raise NotImplementedError(f"bins are found in int32, which {rows} rows times {slots} slots would overflow")
    before = None
    if pooled is not None:
        if held and cu_seqlens is None:  # a padded mask covers the tokens alone
            pooled = torch.nn.functional.pad(pooled, (slots, 0))
        before = torch.zeros(pooled.numel() + 1, dtype=torch.int32, device=device)
        torch.cumsum(pooled.flatten(), 0, dtype=torch.int32, out=before[1:])
    total = rows if cu_seqlens is not None else batch * rows
    wanted = triton.next_power_of_2(max(1, total * column_blocks // (4 * _processors(device))))
    chunk = 1 << 30 if only_slots else min(128, max(16, wanted))
    programs = batch * max(1, triton.cdiv(rows, chunk)) if cu_seqlens is None else rows // chunk + batch + 1
    return Plan(None if cu_seqlens is None else cu_seqlens.contiguous(), before, batch, rows, lead, chunk, programs)


def as_rows(tensor: Tensor) -> Tensor:
    """``[..., D]`` as ``[B, T, D]`` of any strides but the last, which is 1; a packed ``[R, D]`` as ``[1, R, D]``."""
    if tensor.dim() < 3:
        tensor = tensor.reshape(1, -1, tensor.shape[-1]) if tensor.dim() == 1 else tensor[None]
    elif tensor.dim() > 3:
        tensor = tensor.flatten(0, -3)
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def joined(joins: bool, first: Tensor, *others: Tensor | None) -> tuple[Tensor, list[Tensor | None]]:
    """``as_rows`` of each; where it ``joins``, sequences that lie behind one another in all of them as a single one.

    Without slots a row's sequence is nobody's concern, and heads ``[R, H, d]`` would be R sequences of H rows.
    """
    first, rest = as_rows(first), [None if tensor is None else as_rows(tensor) for tensor in others]
    if joins and all(t is None or t.stride(0) == t.shape[1] * t.stride(1) for t in (first, *rest)):
        return first.flatten(0, 1)[None], [None if t is None else t.flatten(0, 1)[None] for t in rest]
    return first, rest


def launch_options(warps: int, device: torch.device) -> dict[str, int]:
    """Warps of a program and, on NVIDIA, a register limit: left to itself, ptxas spills to fit one more program."""
    nvidia = torch.version.hip is None and device.type != "xpu"
    return {"num_warps": warps, "maxnreg": 128} if nvidia else {"num_warps": warps}


def tl_accumulator(dtype: torch.dtype) -> tl.dtype:
    """The dtype of sums, as a kernel's constant."""
    return tl.float64 if dtype == torch.float64 else tl.float32
