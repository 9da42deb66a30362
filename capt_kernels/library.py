"""Schemas and fake (meta) kernels of every op in one place, but ``cpu_capability``, which C++ keeps to itself.

C++ registers its kernels for the CPU key, Triton for the CUDA and XPU keys, so the dispatcher picks by device. An op
computes a forward or a backward and nothing else: what is saved between the two, and which gradients are wanted, is
decided by the ``autograd.Function`` in the op's ``fused.py``. A registered op inside an outer Function costs a third of
a ``custom_op`` with ``register_autograd`` at every call.

Conventions: ``prompt`` is always ``[B, K, D]`` (a shared one is expanded with stride 0); ``pooled`` is a bool mask of
the rows that may enter the pool (``[B, T]`` padded, ``[R]`` packed, None for all); ``cu_seqlens`` is int32, or None for
a padded call; a gradient that is not asked for comes back as an empty tensor ``[0]``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("capt_kernels", "DEF")

_LIBRARY.define(
    "capsule_prepend(Tensor hidden, Tensor prompt, Tensor? pooled, Tensor? cu_seqlens, int lead, bool pool) -> Tensor"
)
_LIBRARY.define(
    "capsule_prepend_backward(Tensor grad, int slots, Tensor? pooled, Tensor? cu_seqlens, int lead, bool pool,"
    " bool need_hidden) -> (Tensor grad_hidden, Tensor grad_slots)"
)
_LIBRARY.define(
    "capsule_refresh(Tensor hidden, Tensor prompt, Tensor? pooled, Tensor? cu_seqlens, int lead, bool pool) -> Tensor"
)
_LIBRARY.define(
    "capsule_refresh_backward(Tensor grad, int slots, Tensor? pooled, Tensor? cu_seqlens, int lead, bool pool,"
    " bool need_hidden) -> (Tensor grad_hidden, Tensor grad_slots)"
)
_LIBRARY.define(
    "add_rms_norm(Tensor? branch, Tensor residual, Tensor weight, float eps, Tensor? prompt, Tensor? pooled,"
    " Tensor? cu_seqlens, int lead, bool pool) -> (Tensor normed, Tensor total, Tensor rstd)"
)
_LIBRARY.define(
    "add_rms_norm_backward(Tensor? grad_normed, Tensor? grad_total, Tensor total, Tensor weight, Tensor rstd,"
    " int slots, Tensor? pooled, Tensor? cu_seqlens, int lead, bool pool, bool need_rows)"
    " -> (Tensor grad_rows, Tensor grad_slots)"
)

# The transpose of the rotation is its backward, so one op serves both; a tensor that is None comes back empty.
# q, k [R, H, d] with cos, sin [R, d], or [B, T, H, d] with [B, T, d].
_LIBRARY.define("rotary(Tensor? q, Tensor? k, Tensor cos, Tensor sin, bool transposed) -> (Tensor, Tensor)")
# gate, up [..., F]; kind is "silu", "gelu", "gelu_tanh" or "relu".
_LIBRARY.define("gated_activation(Tensor gate, Tensor up, str kind) -> Tensor")
_LIBRARY.define(
    "gated_activation_backward(Tensor grad, Tensor gate, Tensor up, str kind, bool need_gate, bool need_up)"
    " -> (Tensor grad_gate, Tensor grad_up)"
)
# Each is the other's backward. hidden [B, T, ...] and rows [N, ...] of any dtype; indices [N] rise strictly within B*T.
_LIBRARY.define("pack(Tensor hidden, Tensor indices) -> Tensor")
_LIBRARY.define("unpack(Tensor rows, Tensor indices, SymInt batch, SymInt length) -> Tensor")
# q [R, H, d], k and v [Rk, Hkv, d], whose offsets are q's where cu_seqlens_k is None; bias_table [H, 2*Tmax-1]; lse is
# the base-2 log-sum-exp [H, R], fp32 (fp64 for fp64 input), which dropout does not change; it is +inf for a query that
# sees no key, so that its weights come back as 0. seed is an int64 of one
# element, None where dropout_p is 0; from the forward's seed the backward forms the forward's mask.
_LIBRARY.define(
    "attention_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor? cu_seqlens_k, bool causal, float scale,"
    " Tensor? bias_table, SymInt? window, float dropout_p=0., Tensor? seed=None) -> (Tensor out, Tensor lse)"
)
_LIBRARY.define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens,"
    " Tensor? cu_seqlens_k, bool causal, float scale, Tensor? bias_table, SymInt? window, bool need_q, bool need_keys,"
    " float dropout_p=0., Tensor? seed=None) -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)"
)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums, norms and slot gradients have: fp32, or fp64 for fp64 input."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def batch_of(rows: Tensor, cu_seqlens: Tensor | None) -> int:
    """The number of sequences in ``rows``, ``[B, T, ...]`` padded or ``[R, ...]`` packed."""
    return rows.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _slot_gradient(grad: Tensor, slots: int, cu_seqlens: Tensor | None) -> Tensor:
    return grad.new_empty(batch_of(grad, cu_seqlens), slots, grad.shape[-1], dtype=accumulator(grad.dtype))


@torch.library.register_fake("capt_kernels::capsule_prepend")
def _(hidden, prompt, pooled, cu_seqlens, lead, pool):
    batch, slots, width = prompt.shape
    if cu_seqlens is None:
        return hidden.new_empty(batch, slots + hidden.shape[1], width)
    return hidden.new_empty(hidden.shape[0] + batch * slots, width)


@torch.library.register_fake("capt_kernels::capsule_prepend_backward")
def _(grad, slots, pooled, cu_seqlens, lead, pool, need_hidden):
    if not need_hidden:
        grad_hidden = grad.new_empty(0)
    elif cu_seqlens is None:
        grad_hidden = grad.new_empty(grad.shape[0], grad.shape[1] - slots, grad.shape[2])
    else:
        grad_hidden = grad.new_empty(grad.shape[0] - batch_of(grad, cu_seqlens) * slots, grad.shape[1])
    return grad_hidden, _slot_gradient(grad, slots, cu_seqlens)


@torch.library.register_fake("capt_kernels::capsule_refresh")
def _(hidden, prompt, pooled, cu_seqlens, lead, pool):
    return hidden.new_empty(hidden.shape)


@torch.library.register_fake("capt_kernels::capsule_refresh_backward")
def _(grad, slots, pooled, cu_seqlens, lead, pool, need_hidden):
    grad_hidden = grad.new_empty(grad.shape) if need_hidden else grad.new_empty(0)
    return grad_hidden, _slot_gradient(grad, slots, cu_seqlens)


@torch.library.register_fake("capt_kernels::add_rms_norm")
def _(branch, residual, weight, eps, prompt, pooled, cu_seqlens, lead, pool):
    # Without a branch and a prompt the sum is the residual itself, and none is written.
    total = residual.new_empty(residual.shape if branch is not None or prompt is not None else 0)
    rstd = residual.new_empty(residual.shape[:-1], dtype=accumulator(residual.dtype))
    return residual.new_empty(residual.shape), total, rstd


@torch.library.register_fake("capt_kernels::add_rms_norm_backward")
def _(grad_normed, grad_total, total, weight, rstd, slots, pooled, cu_seqlens, lead, pool, need_rows):
    return total.new_empty(total.shape if need_rows else 0), _slot_gradient(total, slots, cu_seqlens)


@torch.library.register_fake("capt_kernels::rotary")
def _(q, k, cos, sin, transposed):
    given = k if q is None else q
    return tuple(given.new_empty(0 if heads is None else heads.shape) for heads in (q, k))


@torch.library.register_fake("capt_kernels::gated_activation")
def _(gate, up, kind):
    return gate.new_empty(gate.shape)


@torch.library.register_fake("capt_kernels::gated_activation_backward")
def _(grad, gate, up, kind, need_gate, need_up):
    return gate.new_empty(gate.shape if need_gate else 0), up.new_empty(up.shape if need_up else 0)


@torch.library.register_fake("capt_kernels::pack")
def _(hidden, indices):
    return hidden.new_empty(indices.shape[0], *hidden.shape[2:])


@torch.library.register_fake("capt_kernels::unpack")
def _(rows, indices, batch, length):
    return rows.new_empty(batch, length, *rows.shape[1:])


@torch.library.register_fake("capt_kernels::attention_forward")
def _(q, k, v, cu_seqlens, cu_seqlens_k, causal, scale, bias_table, window, dropout_p=0.0, seed=None):
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=accumulator(q.dtype))


@torch.library.register_fake("capt_kernels::attention_backward")
def _(
    grad, q, k, v, out, lse, cu_seqlens, cu_seqlens_k, causal, scale, bias_table, window, need_q, need_keys,
    dropout_p=0.0, seed=None,
):  # fmt: skip
    wanted = ((q, need_q), (k, need_keys), (v, need_keys))
    return tuple(x.new_empty(x.shape if needed else 0) for x, needed in wanted)


def serve_gpus(*kernels: Callable) -> None:
    """Registers Triton kernels, each under its own name, for the CUDA key (which ROCm shares) and the XPU key."""
    for kernel in kernels:
        for key in ("CUDA", "XPU"):
            _LIBRARY.impl(kernel.__name__, kernel, key)


def _load_extension() -> str | None:
    """Loads the C++ kernels. Returns None, or why they cannot be loaded."""
    built = sorted(Path(__file__).parent.glob("_C*.so"))
    if not built:
        return "the C++ extension was not built when this package was installed"
    try:
        torch.ops.load_library(str(built[0]))
    except OSError as error:
        return f"the C++ extension {built[0].name} does not load ({error})"
    return None


#: Why the C++ kernels are missing, or None when they are registered.
EXTENSION_ERROR = _load_extension()
