"""Which weights of attention drop out: a pure function of a seed and of where a weight stands.

So backward forms the mask again instead of keeping it, and every backend forms the same one. The generator is
Philox-4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) of seven rounds, the fewest that pass
their tests, and FlashAttention's number. Its key is the seed, its counter ``(j // 4, row, head, 0)`` for key j of its
sequence, the packed row of the query, and the query's head; the four words it gives are those of four neighbouring
keys. A weight is kept where its word, read as a signed number, is at least :func:`threshold`.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
_WORD = 0xFFFFFFFF


def threshold(dropout_p: float) -> int:
    """The least signed 32-bit word of a weight that is kept."""
    return min(round(dropout_p * 2**32), _WORD) - 2**31


def seed_of(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """A seed as an int64 tensor ``[]`` on ``device``.

    None draws one from the device's default generator: ``torch.manual_seed`` reproduces it, a checkpoint that restores
    random states draws it again, a compiled graph draws in every call, and the host waits for nothing.

    Raises:
        ValueError: no int of 64 bits, or no int64 tensor of one element.
    """
    if seed is None:
        return torch.randint(2**63 - 1, (), device=device)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise ValueError(
                f"seed must be an int64 tensor of one element, got {seed.dtype} of shape {tuple(seed.shape)}"
            )
        return seed.reshape(()).to(device, non_blocking=True)
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed must be an int of 64 bits, an int64 tensor of one element or None, got {seed!r}")
    return torch.full((), seed, dtype=torch.int64, device=device)


def philox(seed: Tensor, *counter: Tensor) -> tuple[Tensor, ...]:
    """Four words of 32 bits, in int64, for each of the broadcast counters of four such words."""
    low, high = seed & _WORD, seed >> 32 & _WORD
    c0, c1, c2, c3 = counter
    for _ in range(ROUNDS):
        # Products of 64 bits wrap around in int64, which leaves their bits as they are.
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1 = second >> 32 & _WORD ^ c1 ^ low, second & _WORD
        c2, c3 = first >> 32 & _WORD ^ c3 ^ high, first & _WORD
        low, high = low + 0x9E3779B9 & _WORD, high + 0xBB67AE85 & _WORD
    return c0, c1, c2, c3


def kept(seed: Tensor, dropout_p: float, heads: int, row: int, queries: int, keys: int) -> Tensor:
    """``[heads, queries, keys]`` bool: which weights are kept in a sequence that starts at packed row ``row``."""
    head, query, quad = (torch.arange(n, device=seed.device) for n in (heads, queries, (keys + 3) // 4))
    words = philox(seed, quad, row + query[:, None], head[:, None, None], torch.zeros_like(seed))
    word = torch.stack(torch.broadcast_tensors(*words), -1).flatten(-2)[..., :keys]
    return (word ^ 2**31) - 2**31 >= threshold(dropout_p)
