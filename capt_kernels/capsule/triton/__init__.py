"""The capsule ops in Triton, built to the floor of traffic: each row of the batch is read once and written once.

Read :mod:`.layout` first (which program owns which rows), then :mod:`.overwrite` (prepend and refresh), then
:mod:`.add_rms_norm` (the same walk with the residual add and the norm on the way). Every sum has two stages of fixed
order and no atomics, so that two calls agree bit for bit.

Importing this registers the kernels for CUDA (which ROCm shares) and XPU tensors. Triton's interpreter takes CPU
tensors, whose key belongs to C++, so there the functions are called directly.
"""

from __future__ import annotations

from ...library import serve_gpus
from .add_rms_norm import add_rms_norm, add_rms_norm_backward
from .overwrite import capsule_prepend, capsule_prepend_backward, capsule_refresh, capsule_refresh_backward

__all__ = [
    "add_rms_norm",
    "add_rms_norm_backward",
    "capsule_prepend",
    "capsule_prepend_backward",
    "capsule_refresh",
    "capsule_refresh_backward",
]

serve_gpus(*(globals()[name] for name in __all__))
