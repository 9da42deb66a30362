"""Attention over packed rows in Triton: forward, and a backward that recomputes every score.

Read :mod:`.layout` first (which program owns which rows, which keys a row sees), then :mod:`.forward`, then
:mod:`.backward`; :mod:`.blocks` holds the block shapes of each architecture. Nothing of T x T is ever in memory: the
bias of a score is read from its table of diagonals, and the backward has q, k, v, the output and one fp32 a head and
row. A program writes its own rows alone, so that sums have one order and two calls agree bit for bit.

Rotary is not applied here. A query would be rotated once, but a key again in every block of queries and every head of
its group, in an inner loop that would then load 56 bytes where it loads 16 (its partner, cos and sin besides); the
rotary op reads and writes q and k once.

Importing this registers the kernels for CUDA (which ROCm shares) and XPU tensors. Triton's interpreter takes CPU
tensors, whose key belongs to C++, so there the functions are called directly.
"""

from __future__ import annotations

from ...library import serve_gpus
from .backward import attention_backward
from .forward import attention_forward

__all__ = ["attention_backward", "attention_forward"]

serve_gpus(*(globals()[name] for name in __all__))
