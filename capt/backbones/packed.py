"""What the packed backbones share: which activations are fused, and when a base has to run as transformers runs it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from capt_kernels import add_rms_norm

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


def is_plain(module: nn.Module) -> bool:
    """Whether calling the module is no more than its class's own forward."""
    return "forward" not in vars(module) and not any(getattr(module, hooks) for hooks in HOOKS)


def obstacle_in(stack: Any, bypassed: Iterable[nn.Module]) -> str | None:
    """Why modules that a packed backbone does not call have to be called, or None.

    ``bypassed`` are the layers, attentions, MLPs and norms around the Linear modules. A hook or another norm on one of
    them would be ignored without a word.
    """
    for module in bypassed:
        if stack.training and getattr(module, "gradient_checkpointing", False):
            return f"gradient checkpointing recomputes its {type(module).__name__}"
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
