"""The gate of a gated feed-forward: an activation and a product in one pass."""

from __future__ import annotations

from torch import Tensor

from ..backends import kernels, resolve
from ..validation import check_floating, check_same_device, check_shape
from . import fused, reference


def gated_activation(gate: Tensor, up: Tensor, kind: str = "silu", *, backend: str = "auto") -> Tensor:
    """``act(gate) * up``, the inner step of a gated linear unit (GLU variants, arXiv 2002.05202).

    Computed in fp32 (fp64 for fp64 input) and cast once. The backward recomputes the activation: only ``gate`` and
    ``up`` are kept.

    Args:
        gate, up: ``[..., F]``, one shape and dtype. fp32, fp16, bf16 or fp64.
        kind: "silu" (Llama, Qwen), "gelu" (by erf), "gelu_tanh" (T5 v1.1's gelu_new) or "relu".
        backend: "auto", "reference", "cpu" or "triton".

    Returns:
        A tensor of the shape and dtype of ``gate``.

    Raises:
        ValueError: an unknown ``kind``, or a shape, dtype or device that does not fit.
        ImportError: ``backend`` is not on this machine.
    """
    if kind not in reference.ACTIVATIONS:
        raise ValueError(f"kind must be one of {', '.join(reference.ACTIVATIONS)}, got {kind!r}")
    check_floating("gate", gate)
    if gate.dim() < 1:
        raise ValueError("gate must have shape [..., F], got a scalar")
    check_shape("up", up, tuple(gate.shape), "gate's")
    if up.dtype != gate.dtype:
        raise ValueError(f"up must have gate's dtype {gate.dtype}, got {up.dtype}")
    check_same_device("gate", gate, [("up", up)])
    name = resolve(backend, gate.device)
    if name == "reference":
        return reference.gated_activation(gate, up, kind)
    return fused.gated_activation(kernels("glu", name), gate, up, kind)


__all__ = ["gated_activation"]
