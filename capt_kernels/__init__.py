"""Fused kernels for Capsule Prompt-Tuning (CaPT, arXiv 2510.16670) as drop-in autograd ops.

Every op takes ``backend="auto" | "reference" | "cpu" | "triton"`` (attention "flash_attn" besides); :func:`backends`
tells which this machine has. Gradients of the fused backends "cpu" and "triton" are of first order: their backward
raises NotImplementedError under ``create_graph=True``.
"""

from .attention import capsule_attention, t5_bias_table
from .backends import backends
from .capsule import add_rms_norm, capsule_prepend, capsule_refresh
from .glu import gated_activation
from .packing import pack, unpack
from .rotary import apply_rotary

__all__ = [
    "add_rms_norm",
    "apply_rotary",
    "backends",
    "capsule_attention",
    "capsule_prepend",
    "capsule_refresh",
    "gated_activation",
    "pack",
    "t5_bias_table",
    "unpack",
]
