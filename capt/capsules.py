"""The trained vectors of an adapter, and how they become slots in a packed batch: Eq. 2 of CaPT and its variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from capt_kernels import capsule_prepend, capsule_refresh

from .backbones.stream import Refresh, Stream
from .config import CaptConfig
from .layout import Layout


class Capsules(nn.Module):
    """The vectors of every prompted layer, fp32 and zero at first, and what a variant adds.

    Args:
        config: the adapter's config.
        num_layers, width: layers and hidden size of the base.

    Raises:
        ValueError: layers that the base does not have, a rank above its width, a variant without any mean.

    Parameters, with P prompted layers and K = ``config.length``: ``vectors [P, K, D]``; ``"extraction"``:
    ``conv_weight [P, D, k]``, ``conv_bias [P, D]``, the identity at first; ``"projection"``: ``down [P, D, r]``,
    ``up [P, r, D]``, a projection on r directions at first.
    """

    def __init__(self, config: CaptConfig, num_layers: int, width: int):
        super().__init__()
        self.config = config
        self.layers = config.prompted_layers(num_layers)
        prompted = len(self.layers)
        if config.variant in ("extraction", "projection") and prompted == 1 and not config.first_mean:
            raise ValueError(
                f"first_mean=False leaves variant {config.variant!r} no mean to work on, as depth {config.depth!r} "
                "prompts one layer"
            )
        self.vectors = nn.Parameter(torch.zeros(prompted, config.length, width), requires_grad=config.task)
        if config.variant == "extraction":
            tap = torch.zeros(prompted, width, config.kernel_size)
            tap[..., config.kernel_size // 2] = 1
            self.conv_weight = nn.Parameter(tap)
            self.conv_bias = nn.Parameter(torch.zeros(prompted, width))
        elif config.variant == "projection":
            if config.rank > width:
                raise ValueError(f"rank must be at most the base's hidden size {width}, got {config.rank}")
            down = torch.stack([nn.init.orthogonal_(torch.empty(width, config.rank)) for _ in self.layers])
            self.down = nn.Parameter(down)
            self.up = nn.Parameter(down.transpose(1, 2).contiguous())

    def at(self, prompted: int, batch: int) -> dict[str, Tensor]:
        """The parameters of one prompted layer, ``[B, ...]``: the same for every sequence."""
        return {name: p[prompted].expand(batch, *p.shape[1:]) for name, p in self.named_parameters(recurse=False)}


class MixedCapsules:
    """Capsules of several adapters of one config, one a sequence."""

    def __init__(self, capsules: Sequence[Capsules], index: Tensor):
        self.config, self.layers = capsules[0].config, capsules[0].layers
        self._capsules, self._index = capsules, index

    def at(self, prompted: int, batch: int) -> dict[str, Tensor]:
        """As :meth:`Capsules.at`, each sequence with its own adapter's."""
        named = [dict(c.named_parameters(recurse=False)) for c in self._capsules]
        index = self._index.to(named[0]["vectors"].device)
        return {name: torch.stack([n[name][prompted] for n in named])[index] for name in named[0]}


def place(
    capsules: Capsules | MixedCapsules, prompted: int, rows: Tensor, layout: Layout, backend: str
) -> tuple[Tensor, Layout]:
    """Puts the slots of the first prompted layer into ``rows [R, D]``, and returns the rows and their new layout."""
    config = capsules.config
    own = _parameters(capsules, prompted, rows, layout)
    pool = config.instance and config.first_mean
    prompt = own["vectors"]
    if config.variant != "addition":
        prompt = _variant(config, own, rows, layout, backend) if pool else _without_mean(config, prompt)
        pool = False
    rows = capsule_prepend(
        rows,
        prompt,
        cu_seqlens=layout.cu_seqlens,
        pool_mask=layout.pool_mask if pool else None,
        lead=config.lead,
        pool=pool,
        backend=backend,
    )
    return rows, layout.grown(config.slots, config.lead)


def refresh(capsules: Capsules | MixedCapsules, prompted: int, stream: Stream, layout: Layout, backend: str) -> Refresh:
    """What the slots of a later prompted layer are to be overwritten with, as its layer is told.

    With ``"addition"`` the layer takes the mean itself, in the same pass over the rows as its first norm.
    """
    config = capsules.config
    own = _parameters(capsules, prompted, stream.residual, layout)
    if config.variant == "addition":
        return Refresh(own["vectors"], config.instance, backend)
    return Refresh(_variant(config, own, stream.rows, layout, backend), False, backend)


def _parameters(capsules: Capsules | MixedCapsules, prompted: int, rows: Tensor, layout: Layout) -> dict[str, Tensor]:
    return {name: p.to(rows.device) for name, p in capsules.at(prompted, layout.batch).items()}


def _without_mean(config: CaptConfig, vectors: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(vectors), vectors], 1) if config.variant == "prepending" else vectors


def _variant(config: CaptConfig, own: dict[str, Tensor], rows: Tensor, layout: Layout, backend: str) -> Tensor:
    """Slot values ``[B, slots, D]`` of the variants that do more with the mean than add to it."""
    vectors = own["vectors"]
    # Sums and products of a slot are in fp32 (fp64), autocast or not.
    with torch.autocast(rows.device.type, enabled=False):
        if config.variant == "extraction":
            rows = _convolve_tokens(rows, own["conv_weight"], own["conv_bias"], layout)
        mean = _mean(rows, config.length, layout, backend).to(vectors.dtype)
        if config.variant == "prepending":
            return torch.cat([mean, vectors], 1)
        if config.variant == "projection":
            return vectors + mean @ own["down"] @ own["up"]
        return vectors + mean


def _mean(rows: Tensor, pieces: int, layout: Layout, backend: str) -> Tensor:
    """The mean, or the adaptive mean pool, of old slots ++ pooled tokens: ``[B, pieces, D]``.

    It is what a zero vector's slot would hold. Slots lead their sequences here, since all of them pool in front of
    the tokens.
    """
    zeros = rows.new_zeros(pieces, rows.shape[1])
    cu_seqlens = layout.cu_seqlens.long()
    if layout.slots == 0:
        out = capsule_prepend(rows, zeros, cu_seqlens=cu_seqlens, pool_mask=layout.pool_mask, backend=backend)
        cu_seqlens = cu_seqlens + pieces * torch.arange(layout.batch + 1, device=rows.device)
    else:
        order = layout.slots_first
        mask = None if layout.pool_mask is None else layout.pool_mask[order]
        out = capsule_refresh(rows[order], zeros, cu_seqlens=cu_seqlens, pool_mask=mask, backend=backend)
    return out[cu_seqlens[:-1, None] + torch.arange(pieces, device=rows.device)]


def _convolve_tokens(rows: Tensor, weight: Tensor, bias: Tensor, layout: Layout) -> Tensor:
    """A depthwise Conv1d, ``weight [B, D, k]``, over each sequence's pooled tokens, zero-padded; others as they are.

    Only pooled rows enter: in LM training a window must not reach from the prompt into the answer.
    """
    tokens = ~layout.is_slot if layout.pool_mask is None else ~layout.is_slot & layout.pool_mask
    sequence = torch.repeat_interleave(torch.arange(layout.batch, device=rows.device), layout.lengths)[tokens]
    counts = torch.bincount(sequence, minlength=layout.batch)
    pooled = replace(layout, cu_seqlens=pad(counts.cumsum(0), (1, 0)).int(), slots=0, pool_mask=None)
    padded = pooled.pad(rows[tokens].to(weight.dtype)).transpose(1, 2)
    # As windows, not as a grouped convolution: each sequence may have another adapter's taps. One window
    # more than there are tokens, so that the taps have a gradient (0) where no sequence has any.
    taps = weight.shape[-1]
    windows = pad(padded, (taps // 2, taps // 2 + 1)).unfold(2, taps, 1)
    mixed = (torch.einsum("bdtk,bdk->bdt", windows, weight) + bias[..., None])[..., : pooled.longest]
    return rows.to(weight.dtype).index_copy(0, tokens.nonzero().squeeze(1), pooled.unpad(mixed.transpose(1, 2)))
