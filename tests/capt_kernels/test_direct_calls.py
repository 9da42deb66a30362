"""torch.ops.capt_kernels called past the public functions, on the CPU: what does not fit raises."""

from __future__ import annotations

import pytest
import torch

import capt_kernels as ck

if not ck.backends()["cpu"].available:
    pytest.skip(ck.backends()["cpu"].reason, allow_module_level=True)

ops = torch.ops.capt_kernels
PADDED, PACKED, PROMPT, WEIGHT = torch.zeros(2, 4, 8), torch.zeros(6, 8), torch.zeros(2, 1, 8), torch.ones(8)
CU = torch.tensor([0, 2, 6], dtype=torch.int32)
WHERE = (None, None, 0, True)
PACKED_WHERE = (None, CU, 0, True)
RSTD, HEADS, TABLE = torch.ones(2, 4), torch.zeros(3, 2, 8), torch.zeros(3, 8)
INDICES = torch.tensor([1, 3])


def norm(branch=None, residual=PADDED, weight=WEIGHT, prompt=PROMPT, where=WHERE):
    return ops.add_rms_norm(branch, residual, weight, 1e-6, prompt, *where)


def norm_backward(normed=PADDED, total=PADDED, of_total=None, weight=WEIGHT, rstd=RSTD, slots=1, where=WHERE):
    return ops.add_rms_norm_backward(normed, of_total, total, weight, rstd, slots, *where, True)


CALLS = {
    "flat hidden": (lambda: ops.capsule_refresh(PACKED, PROMPT, *WHERE), "hidden has 2 dimensions"),
    "padded hidden with offsets": (lambda: ops.capsule_prepend(PADDED, PROMPT, *PACKED_WHERE), "hidden has 3 dim"),
    "integer hidden": (lambda: ops.capsule_prepend(PADDED.int(), PROMPT, *WHERE), "hidden must be float32"),
    "flat prompt": (lambda: ops.capsule_refresh(PADDED, PROMPT[0], *WHERE), "prompt has 2 dimensions"),
    "narrow prompt": (lambda: ops.capsule_refresh(PADDED, PROMPT[..., :7], *WHERE), r"\[2, 1, 8\], got \[2, 1, 7\]"),
    "prompts too few": (lambda: ops.capsule_prepend(PADDED, PROMPT[:1], *WHERE), r"\[2, 1, 8\], got \[1, 1, 8\]"),
    "integer prompt": (lambda: ops.capsule_prepend(PADDED, PROMPT.int(), *WHERE), "prompt must be float32"),
    "int64 offsets": (lambda: ops.capsule_refresh(PACKED, PROMPT, None, CU.long(), 0, True), "cu_seqlens must have"),
    "no offsets": (lambda: ops.capsule_refresh(PACKED, PROMPT, None, CU[:0], 0, True), r"\[B\+1\], got \[0\]"),
    "matrix of offsets": (lambda: ops.capsule_refresh(PACKED, PROMPT, None, CU[None], 0, True), "cu_seqlens has 2 dim"),
    "negative lead": (lambda: ops.capsule_refresh(PACKED, PROMPT, None, CU, -2, True), "got 1 and -2"),
    "short mask": (
        lambda: ops.capsule_prepend(PADDED, PROMPT, torch.ones(2, 3, dtype=torch.bool), *WHERE[1:]),
        r"pooled must have shape \[2, 4\], got \[2, 3\]",
    ),
    "mask over slots": (
        lambda: ops.capsule_refresh(PADDED, PROMPT, torch.ones(2, 4, dtype=torch.bool), *WHERE[1:]),
        r"pooled must have shape \[2, 3\], got \[2, 4\]",
    ),
    "short packed mask": (
        lambda: ops.capsule_refresh(PACKED, PROMPT, torch.ones(5, dtype=torch.bool), CU, 0, True),
        r"pooled must have shape \[6\], got \[5\]",
    ),
    "integer mask": (
        lambda: ops.capsule_prepend(PADDED, PROMPT, torch.ones(2, 4).int(), *WHERE[1:]),
        "pooled must have dtype",
    ),
    "gradient too short": (
        lambda: ops.capsule_prepend_backward(PACKED, 4, *PACKED_WHERE, True),
        "the gradient has too few rows",
    ),
    "negative slots": (lambda: ops.capsule_refresh_backward(PADDED, -1, *WHERE, True), "got -1 and 0"),
    "flat gradient": (lambda: ops.capsule_refresh_backward(PACKED, 1, *WHERE, True), "grad has 2 dimensions"),
    "short branch": (lambda: norm(PADDED[:, :3]), r"branch must have shape \[2, 4, 8\], got \[2, 3, 8\]"),
    "half branch": (lambda: norm(PADDED.half()), "branch must have dtype Float, got Half"),
    "narrow weight": (lambda: norm(weight=WEIGHT[:7]), r"weight must have shape \[8\], got \[7\]"),
    "packed residual": (lambda: norm(residual=PACKED), "residual has 2 dimensions"),
    "scalar residual": (lambda: norm(residual=WEIGHT[0], prompt=None), "residual must have shape"),
    "offsets without slots": (lambda: norm(prompt=None, where=PACKED_WHERE), "residual has 3 dimensions"),
    "short gradient": (lambda: norm_backward(PADDED[:1]), r"grad_normed must have shape .* got \[1, 4, 8\]"),
    "half gradient": (lambda: norm_backward(of_total=PADDED.half()), "grad_total must have dtype Float, got Half"),
    "short rstd": (lambda: norm_backward(rstd=RSTD[:, :3]), r"rstd must have shape \[2, 4\], got \[2, 3\]"),
    "wide rstd": (lambda: norm_backward(rstd=RSTD.double()), "rstd must have dtype Float, got Double"),
    "narrow weight backward": (lambda: norm_backward(weight=WEIGHT[:7]), r"weight must have shape \[8\]"),
    "short up": (lambda: ops.gated_activation(PACKED, PACKED[:5], "silu"), r"up must have .*, got \[5, 8\]"),
    "half up": (lambda: ops.gated_activation(PACKED, PACKED.half(), "silu"), "up must have dtype Float, got Half"),
    "scalar gate": (lambda: ops.gated_activation(WEIGHT[0], WEIGHT[0], "silu"), "gate must have shape"),
    "short gate gradient": (
        lambda: ops.gated_activation_backward(PACKED[:5], PACKED, PACKED, "silu", True, True),
        r"grad must have shape \[6, 8\], got \[5, 8\]",
    ),
    "flat heads": (lambda: ops.rotary(TABLE, None, TABLE, TABLE, False), "q has 2 dimensions"),
    "an odd head": (lambda: ops.rotary(HEADS[..., :7], None, TABLE[:, :7], TABLE[:, :7], False), "even, got 7"),
    "short keys": (lambda: ops.rotary(HEADS, HEADS[:2], TABLE, TABLE, False), r"k must have shape \[3, 2, 8\]"),
    "half keys": (lambda: ops.rotary(HEADS, HEADS.half(), TABLE, TABLE, False), "k must have dtype Float"),
    "short table": (lambda: ops.rotary(HEADS, None, TABLE, TABLE[:2], False), r"sin must have shape \[3, 8\]"),
    "integer table": (lambda: ops.rotary(None, HEADS, TABLE.int(), TABLE, False), "cos must be float32"),
    "flat batch": (lambda: ops.pack(WEIGHT, INDICES), r"hidden must have shape \[B, T, ...\], got \[8\]"),
    "int32 indices": (lambda: ops.pack(PADDED, INDICES.int()), "indices must have dtype Long, got Int"),
    "an index outside": (lambda: ops.pack(PADDED, INDICES + 5), "within 8 positions, got 8"),
    "an index before": (lambda: ops.pack(PADDED, INDICES - 2), "within 8 positions, got -1"),
    "matrix of indices": (lambda: ops.unpack(PACKED[:2], INDICES[None], 2, 4), "indices has 2 dimensions"),
    "indices too many": (lambda: ops.unpack(PACKED[:1], INDICES, 2, 4), r"indices must have shape \[1\], got \[2\]"),
    "negative batch": (lambda: ops.unpack(PACKED[:2], INDICES, -1, 4), "must not be negative, got -1 and 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_does_not_fit_raises(name):
    call, message = CALLS[name]
    with pytest.raises(RuntimeError, match=message):
        call()
