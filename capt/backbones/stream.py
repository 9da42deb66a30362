"""What passes between the layers of a backbone: the residual stream of a packed batch, and slots that are due."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..layout import Layout


@dataclass(frozen=True)
class Stream:
    """``residual [R, D]``, and the last ``branch [R, D]`` while nobody has added it: the next norm does as it reads."""

    residual: Tensor
    branch: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        """The sum."""
        # Under autocast a Linear hands back less than the residual stream holds.
        return self.residual if self.branch is None else self.residual + self.branch.to(self.residual.dtype)


@dataclass(frozen=True)
class Refresh:
    """Slots to be overwritten in front of a layer, in the terms of :func:`capt_kernels.capsule_refresh`."""

    prompt: Tensor
    pool: bool
    backend: str

    def arguments(self, layout: Layout) -> dict:
        """Keyword arguments of ``capsule_refresh`` and ``add_rms_norm``."""
        return {
            "prompt": self.prompt,
            "cu_seqlens": layout.cu_seqlens,
            "pool_mask": layout.pool_mask if self.pool else None,
            "lead": layout.lead,
            "pool": self.pool,
            "backend": self.backend,
        }
