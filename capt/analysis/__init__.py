"""What a base attends to, with a capsule and without: attention averaged over heads, layers and a split."""

from __future__ import annotations

from .attention import QUANTITIES, ROLES, Averages, Groups, attention_of, average_attention
from .observe import observing
from .structure import Place, Tokens, tokens_of

__all__ = [
    "QUANTITIES",
    "ROLES",
    "Averages",
    "Groups",
    "Place",
    "Tokens",
    "attention_of",
    "average_attention",
    "observing",
    "tokens_of",
]
