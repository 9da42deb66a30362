"""Where the rows of a packed batch lie: which are slots, which are tokens, and where a position counts from."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_rows

from capt_kernels import unpack


@dataclass(frozen=True)
class Layout:
    """A packed batch of B sequences, each ``[lead tokens, slots, other tokens]``; slots = 0 before the first prompt.

    Args:
        cu_seqlens: ``[B+1]`` int32, slots included.
        slots: rows a sequence holds for its capsule.
        lead: real rows in front of them; a sequence with fewer has its slots behind what it has.
        pool_mask: ``[R]`` bool: rows that may enter the mean (entries at slots are True and say nothing), or None
            for all.
        prefix: keys and values ``[P, Hkv, d]`` in front of every sequence of one layer (P-Tuning v2), or None.
    """

    cu_seqlens: Tensor
    slots: int
    lead: int
    pool_mask: Tensor | None
    prefix: tuple[Tensor, Tensor] | None = None

    def behind(self, prefix: tuple[Tensor, Tensor]) -> Layout:
        """The same with a prefix of the same length, of another layer; what is known of the rows stays known."""
        other = copy.copy(self)
        object.__setattr__(other, "prefix", prefix)
        return other

    @property
    def front(self) -> int:
        """Keys in front of a sequence's own, which positions count."""
        return 0 if self.prefix is None else self.prefix[0].shape[0]

    @property
    def batch(self) -> int:
        return self.cu_seqlens.shape[0] - 1

    @functools.cached_property
    def lengths(self) -> Tensor:
        """``[B]`` rows of each sequence."""
        return self.cu_seqlens.diff().long()

    @functools.cached_property
    def longest(self) -> int:
        """Columns of the padded batch; one where all texts are padding, as transformers' layers want one."""
        return max(int(self.lengths.max()), 1)

    @functools.cached_property
    def slot_rows(self) -> Tensor:
        """``[B, slots]`` row numbers of the slots."""
        first = self.cu_seqlens[:-1].long() + (self.lengths - self.slots).clamp(max=self.lead)
        return first[:, None] + torch.arange(self.slots, device=first.device)

    @functools.cached_property
    def is_slot(self) -> Tensor:
        """``[R]`` bool."""
        rows = self.lengths.sum()
        return torch.zeros(int(rows), dtype=torch.bool, device=rows.device).index_fill(
            0, self.slot_rows.flatten(), True
        )

    @functools.cached_property
    def token_rows(self) -> Tensor:
        """Row numbers of the real tokens, sequence after sequence."""
        return (~self.is_slot).nonzero().squeeze(1)

    @functools.cached_property
    def first_rows(self) -> Tensor:
        """``[B]`` row number of each sequence's first token; of its first slot where it has no token."""
        first = self.cu_seqlens[:-1].long()
        return first + self.slots * (self.lengths > self.slots) if self.lead == 0 else first

    @functools.cached_property
    def last_rows(self) -> Tensor:
        """``[B]`` row number of each sequence's last token; of its first slot where it has no token but slots."""
        last = self.cu_seqlens[1:].long() - 1
        if self.slots == 0:
            return last
        # With no more tokens than `lead`, the slots stand behind the last token.
        tokens = self.lengths - self.slots
        return torch.where(
            (tokens <= self.lead) & (tokens > 0), last - self.slots, torch.where(tokens > 0, last, self.slot_rows[:, 0])
        )

    @functools.cached_property
    def slots_first(self) -> Tensor:
        """``[R]`` order of rows in which every sequence's slots lead it."""
        sequence = torch.repeat_interleave(torch.arange(self.batch, device=self.lengths.device), self.lengths)
        return torch.argsort(2 * sequence + (~self.is_slot).long(), stable=True)

    def grown(self, slots: int, lead: int) -> Layout:
        """The layout once ``slots`` slots stand in a batch that has none."""
        counts = torch.arange(self.batch + 1, device=self.cu_seqlens.device, dtype=torch.int32)
        larger = Layout(self.cu_seqlens + slots * counts, slots, lead, None)
        if self.pool_mask is None:
            return larger
        mask = larger.is_slot.clone().index_copy(0, larger.token_rows, self.pool_mask)
        return Layout(larger.cu_seqlens, slots, lead, mask)

    def positions(self, mode: str) -> Tensor:
        """``[B, longest]`` position of every row of the padded batch; padding rows count on.

        ``"shift"``: slots have positions of their own. ``"keep"``: tokens are numbered as without slots, slots are 0.
        """
        place = torch.arange(self.front, self.front + self.longest, device=self.lengths.device).expand(self.batch, -1)
        if mode == "shift" or not self.slots:
            return place
        first = (self.slot_rows - self.cu_seqlens[:-1, None])[:, :1]
        kept = torch.where(place < first, place, place - self.slots)
        return torch.where((place >= first) & (place < first + self.slots), 0, kept)

    @functools.cached_property
    def mask(self) -> Tensor:
        """``[B, longest]`` bool: the rows of the padded batch that are there. Padding is on the right."""
        return torch.arange(self.longest, device=self.lengths.device) < self.lengths[:, None]

    def pad(self, rows: Tensor) -> Tensor:
        """``[R, ...] -> [B, longest, ...]``."""
        return unpack(rows, self._indices, self.batch, self.longest)

    def unpad(self, padded: Tensor) -> Tensor:
        """``[B, longest, ...] -> [R, ...]``."""
        return padded.flatten(0, 1)[self._indices]

    @functools.cached_property
    def _indices(self) -> Tensor:
        return self.mask.flatten().nonzero().squeeze(1)


@dataclass(frozen=True)
class Rows:
    """The processed rows of one forward, and what the caller's batch looked like.

    Args:
        rows: ``[R, D]`` behind the last norm. layout: theirs.
        indices: ``[N]`` places of the tokens in the caller's ``[B * T]``.
        batch, length: B and T.
    """

    rows: Tensor
    layout: Layout
    indices: Tensor
    batch: int
    length: int

    @property
    def tokens(self) -> Tensor:
        """``[N, D]``, slots left out."""
        return self.rows[self.layout.token_rows]

    def restore(self, tokens: Tensor) -> Tensor:
        """``[N, ...]`` to the caller's ``[B, T, ...]``, padding 0."""
        return unpack(tokens, self.indices, self.batch, self.length)


def next_token_labels(labels: Tensor, cu_seqlens: Tensor, ignore: int = -100) -> Tensor:
    """Labels of packed tokens, each moved to the token that predicts it: the one before it in its own sequence."""
    shifted = pad_rows(labels, (0, 1), value=ignore)[1:]
    ends = cu_seqlens[1:].long() - 1
    return shifted.index_fill(0, ends[ends >= 0], ignore)
