"""Means and standard errors of what comes in batch by batch, some of it absent."""

from __future__ import annotations

import torch
from torch import Tensor


class Moments:
    """Running mean and squared deviation of each element over samples, in fp64; NaN is an absent sample.

    Batches are merged by Chan, Golub and LeVeque's update (1979), which subtracts no large sums from each other.
    """

    def __init__(self) -> None:
        self._count = self._mean = self._squares = torch.zeros((), dtype=torch.float64)

    def add(self, values: Tensor) -> None:
        """``values [B, ...]``, one sample a row."""
        values = values.double()
        present = ~values.isnan()
        count = present.sum(0).double()
        mean = values.nansum(0) / count.clamp(min=1)
        squares = torch.where(present, values - mean, 0).square().sum(0)
        total = self._count + count
        step = mean - self._mean
        self._squares = self._squares + squares + step.square() * self._count * count / total.clamp(min=1)
        self._mean = self._mean + step * count / total.clamp(min=1)
        self._count = total

    @property
    def mean(self) -> Tensor:
        """NaN where there was no sample."""
        return torch.where(self._count > 0, self._mean, torch.nan)

    @property
    def standard_error(self) -> Tensor:
        """Of the mean over independent samples; NaN where there were fewer than two."""
        return torch.where(self._count > 1, (self._squares / (self._count - 1) / self._count).sqrt(), torch.nan)
