"""Why gradients of the fused ops cannot be differentiated again, said where it would otherwise go unnoticed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Marks the backward of an ``autograd.Function`` whose kernels have no derivative.

    torch's ``once_differentiable`` lets a second differentiation pass, with the op's term left out and no word said,
    where the incoming gradient needs no gradient itself.

    Raises:
        NotImplementedError: from the backward, where it is to be differentiated again (``create_graph=True``).
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        # Autograd enables gradients in a backward for create_graph alone.
        if torch.is_grad_enabled():
            raise NotImplementedError(
                'gradients of a fused backend are of first order, so that create_graph=True wants backend="reference"'
            )
        return backward(ctx, *grads)

    return checked
