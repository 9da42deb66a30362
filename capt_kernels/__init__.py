"""Fused kernels for Capsule Prompt-Tuning (CaPT, arXiv 2510.16670) as drop-in autograd ops.

Every function takes ``backend="auto" | "reference" | "cpu" | "triton"``; :func:`backends` tells which this machine has.
"""

from .backends import backends
from .capsule import add_rms_norm, capsule_prepend, capsule_refresh

__all__ = ["add_rms_norm", "backends", "capsule_prepend", "capsule_refresh"]
