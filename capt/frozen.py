"""A base is frozen while something trains beside it, and given back as it was."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel


class FrozenBase(nn.Module):
    """A module around a base whose own parameters do not train meanwhile.

    Attributes:
        base: the base, changed in place by :meth:`_freeze` until :meth:`unload`.
    """

    base: Any

    def _freeze(self, base: PreTrainedModel) -> None:
        self._thawed = [p for p in base.parameters() if p.requires_grad]
        self.base = base.requires_grad_(False)

    def unload(self) -> PreTrainedModel:
        """The base as it was given, with the parameters trainable that were."""
        for p in self._thawed:
            p.requires_grad_(True)
        return self.base
