"""What the packed backbones share: what backward recomputes, and when a base has to run as transformers runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from capt_kernels import add_rms_norm, capsule_attention, capsule_prepend
from capt_kernels.first_order import first_order

from ..layout import Layout
from .stream import Refresh, Stream

#: transformers' name of an activation -> ``kind`` of :func:`capt_kernels.gated_activation`.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class PackedBackbone:
    """Runs layers on packed rows, and keeps what the caller asked for.

    Attributes:
        memory: "full" or "min", see :class:`capt.CaptModel`.
    """

    memory = "full"

    def layers(self) -> Any:
        """The base's own layers."""
        raise NotImplementedError

    def process(self, layer: Any, stream: Stream, layout: Layout, context: Any, refresh: Refresh | None) -> Stream:
        """``layer``, one of them; the slots are written while its first norm reads the residual."""
        raise NotImplementedError

    @torch.compiler.disable(recursive=False)  # so that one graph serves all layers, whatever their number
    def layer(self, index: int, stream: Stream, layout: Layout, context: Any, refresh: Refresh | None) -> Stream:
        """The base's layer ``index``, which backward recomputes where transformers' gradient checkpointing is on.

        Then the sum ``[R, D]`` in front of it is all that is kept.
        """
        layer: Any = self.layers()[index]
        if not (layer.training and getattr(layer, "gradient_checkpointing", False)):
            return self.process(layer, stream, layout, context, refresh)
        rows = stream.rows
        if not rows.requires_grad:  # nothing to recompute for, which reentrant checkpointing warns of
            return self.process(layer, Stream(rows), layout, context, refresh)

        # Reentrant checkpointing sees the gradients of positional arguments alone.
        def run(rows: Tensor, prompt: Tensor | None) -> Tensor:
            due = None if refresh is None or prompt is None else replace(refresh, prompt=prompt)
            return self.process(layer, Stream(rows), layout, context, due).rows

        return Stream(layer._gradient_checkpointing_func(run, rows, None if refresh is None else refresh.prompt))

    def kept(self, function: Callable[..., Any], *tensors: Tensor | None, worthwhile: bool = True) -> Any:
        """``function(*tensors)``; with ``memory="min"``, where it is worthwhile, backward keeps ``tensors`` alone.

        The second run finds the random state of the first: a wrapped Linear may drop out.
        """
        trains = any(tensor is not None and tensor.requires_grad for tensor in tensors)
        if self.memory == "full" or not (worthwhile and trains):
            return function(*tensors)
        return checkpoint(function, *tensors, use_reentrant=False)


def project(modules: Sequence[nn.Module], rows: Tensor) -> Sequence[Tensor]:
    """What each of ``modules``, which read the same ``rows [R, D]``, makes of them.

    Plain frozen Linears form the gradient of the rows as one running sum inside their products, where autograd would
    write each module's share and add them in further passes. All others are called as they are.
    """
    kind = rows.device.type
    shared = torch.is_grad_enabled() and rows.requires_grad and not torch.is_autocast_enabled(kind)
    if not (shared and all(_is_frozen_linear(module, rows.dtype) for module in modules)):
        return [module(rows) for module in modules]
    weights: list[Any] = [tensor for module in modules for tensor in (module.weight, module.bias)]
    return _SharedRows.apply(rows, *weights)


def _is_frozen_linear(module: nn.Module, dtype: torch.dtype) -> bool:
    if type(module) is not nn.Linear or not is_plain(module):
        return False
    own = [p for p in (module.weight, module.bias) if p is not None]
    return all(type(p.data) is Tensor and p.dtype == dtype and not p.requires_grad for p in own)


class _SharedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*weights[::2])
        ctx.set_materialize_grads(False)
        pairs = zip(weights[::2], weights[1::2], strict=True)
        return tuple(nn.functional.linear(rows, weight, bias) for weight, bias in pairs)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total: Tensor | None = None
        weights = ctx.saved_tensors
        # The forward ran without autocast; a product in another dtype could not be added to.
        with torch.autocast(weights[0].device.type, enabled=False):
            for grad, weight in zip(grads, weights, strict=True):
                if grad is not None:
                    total = grad @ weight if total is None else total.addmm_(grad, weight)
        return (total, *[None] * (2 * len(grads)))


def attend_packed(q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any) -> Tensor:
    """``[R, H * d]``: each sequence's attention, to the layout's prefix too."""
    # Autocast would cast the bias of all pairs of rows, which is a view of a small table, and so write it out.
    with torch.autocast(q.device.type, enabled=False):
        if layout.prefix is not None:
            k, v = (_behind(own, rows, layout) for own, rows in zip(layout.prefix, (k, v), strict=True))
            counts = torch.arange(layout.batch + 1, device=q.device, dtype=torch.int32)
            options["cu_seqlens_k"] = layout.cu_seqlens + layout.front * counts
        return capsule_attention(q, k, v, cu_seqlens=layout.cu_seqlens, **options).flatten(-2)


def _behind(prefix: Tensor, rows: Tensor, layout: Layout) -> Tensor:
    """``rows [R, Hkv, d]``, each sequence behind ``prefix [P, Hkv, d]``: what a prompt without a mean is put in by."""
    together = capsule_prepend(rows.flatten(1), prefix.flatten(1), cu_seqlens=layout.cu_seqlens, pool=False)
    return together.unflatten(1, rows.shape[1:])


def is_plain(module: nn.Module) -> bool:
    """Whether calling the module is no more than its class's own forward."""
    return "forward" not in vars(module) and not any(getattr(module, hooks) for hooks in HOOKS)


def obstacle_in(stack: Any, bypassed: Iterable[nn.Module]) -> str | None:
    """Why modules that a packed backbone does not call have to be called, or None.

    ``bypassed`` are the layers, attentions, MLPs and norms around the Linear modules. A hook or another norm on one of
    them would be ignored without a word.
    """
    for module in bypassed:
        if not is_plain(module):
            return f"a hook or another forward is registered on its {type(module).__name__}"
        if "Norm" in type(module).__name__ and not (hasattr(module, "weight") and hasattr(module, "variance_epsilon")):
            return f"its norm {type(module).__name__} is not a plain RMSNorm"
    devices = {p.device for p in stack.parameters()}
    if len(devices) > 1:
        return f"its layers lie on {len(devices)} devices"
    return None


def rms_norm(norm: nn.Module, branch: Tensor | None, residual: Tensor, **slots: Any) -> tuple[Tensor, Tensor]:
    """``(normed, residual + branch)`` by the base's own norm; ``slots`` are overwritten on the way."""
    module: Any = norm
    if branch is not None:  # under autocast a Linear hands back less than the residual stream holds
        branch = branch.to(residual.dtype)
    return add_rms_norm(branch, residual, module.weight, module.variance_epsilon, **slots)
