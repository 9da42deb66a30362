"""Rewriting what a base's layers read while the base runs by its own forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

#: Whose rewriting, if anybody's, the forwards of this thread belong to.
_owner: ContextVar[object] = ContextVar("_owner", default=None)


@contextlib.contextmanager
def rewriting(layers: nn.ModuleList, rewrite: Mapping[int, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Inside, layer ``i`` reads ``rewrite[i](hidden)`` in place of its hidden states ``[B, L, D]``.

    It does in forwards of this context alone, not in those of another thread or of :func:`outside`.
    """
    here = object()

    def hook(function: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
        def before_layer(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            if _owner.get() is not here:
                return None
            hidden = function(args[0] if args else kwargs["hidden_states"])
            return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})

        return before_layer

    handles = [layers[i].register_forward_pre_hook(hook(f), with_kwargs=True) for i, f in rewrite.items()]
    token = _owner.set(here)
    try:
        yield
    finally:
        _owner.reset(token)
        for handle in handles:
            handle.remove()


def outside(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the caller's code, which may run the same base on texts of its own."""
    token = _owner.set(None)
    try:
        return function(*arguments)
    finally:
        _owner.reset(token)
