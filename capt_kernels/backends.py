"""Which backends this machine has, and which one a call takes.

A backend is a way of computing an op: ``reference`` (plain torch, everywhere), ``cpu`` (the C++ extension),
``triton`` (GPU, or CPU tensors under ``TRITON_INTERPRET=1``) and, for attention alone, ``flash_attn`` and ``sdpa``.
Nothing here imports a backend that is not asked for, so ``import capt_kernels`` works with no GPU, no triton and no
compiler.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from .library import EXTENSION_ERROR

_Function = TypeVar("_Function", bound=Callable)

#: What a user can name; attention has "flash_attn" and "sdpa" besides.
NAMES = ("reference", "cpu", "triton")
#: torch device types that the Triton kernels run on (ROCm calls itself "cuda").
_GPU_DEVICES = ("cuda", "xpu")


def _constant_for_compile(function: _Function) -> _Function:
    """What ``torch.compiler.assume_constant_result`` does, which would import torch._dynamo, triton and sympy: 2 s."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class BackendStatus(NamedTuple):
    """Whether a backend can be used on this machine, and why (not)."""

    available: bool
    reason: str


def interpreted() -> bool:
    """True when Triton kernels run in its interpreter, which takes CPU tensors."""
    # What Triton itself takes for a yes.
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def has_gpu() -> bool:
    """True when this process sees a device that Triton compiles for."""
    return torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())


def _cpu_status() -> BackendStatus:
    if EXTENSION_ERROR is None:
        return BackendStatus(True, "the C++ extension is loaded")
    how = "build it with a C++17 compiler and CMake: pip install --no-build-isolation ."
    return BackendStatus(False, f"{EXTENSION_ERROR}; {how}")


@functools.cache
def _triton_status() -> BackendStatus:
    if importlib.util.find_spec("triton") is None:
        return BackendStatus(False, "triton is not installed: pip install 'capt-kernels[triton]'")
    if interpreted():
        return BackendStatus(True, "triton's interpreter (TRITON_INTERPRET=1), CPU tensors")
    if not has_gpu():
        return BackendStatus(
            False, "no GPU is visible to torch; TRITON_INTERPRET=1 runs the kernels on CPU tensors, slowly"
        )
    return BackendStatus(True, "triton on a GPU")


def flash_attn_status(device: torch.device | None = None) -> BackendStatus:
    """Whether FlashAttention's kernels run on ``device``, or on the current CUDA device where that is none."""
    index = device.index if device is not None and device.type == "cuda" else None
    if index is None and torch.cuda.is_available():
        index = torch.cuda.current_device()
    return _flash_attn_status(index)


@functools.cache
def _flash_attn_status(index: int | None) -> BackendStatus:
    implementation = importlib.import_module(f"{__package__}.attention.flash_attn").implementation()
    if implementation is None:
        return BackendStatus(False, "flash-attn is not installed: pip install 'capt-kernels[flash]'")
    name = "flash-attn" if implementation == "flash_attn" else "torch.nn.attention.varlen"
    if not torch.cuda.is_available():
        return BackendStatus(False, f"{name} is there but needs a CUDA device, and torch sees none")
    if torch.version.hip is not None:
        return BackendStatus(
            False, f"{name} is there, but ROCm's build of it is untested: backend 'triton' serves ROCm"
        )
    if torch.cuda.get_device_capability(index) < (8, 0):
        return BackendStatus(False, f"{name} is there but needs compute capability 8.0 or more")
    return BackendStatus(True, f"{name} on CUDA")


def backends() -> dict[str, BackendStatus]:
    """What this machine has: ``{name: (available, reason)}`` for every backend that an op can be asked for."""
    return {
        "reference": BackendStatus(True, "plain torch, any device"),
        "cpu": _cpu_status(),
        "triton": _triton_status(),
        "flash_attn": flash_attn_status(),
        "sdpa": BackendStatus(True, "torch's scaled_dot_product_attention, any device"),
    }


@_constant_for_compile
def resolve(name: str, device: torch.device) -> str:
    """The backend a call takes: ``name`` itself when it can serve ``device``, or for ``"auto"`` the fastest present.

    Raises:
        ValueError: an unknown name, or a device the named backend cannot serve.
        ImportError: the named backend is not on this machine; the message says how to get it.
    """
    if name == "auto":
        if device.type == "cpu":
            return "cpu" if _cpu_status().available else "reference"
        return "triton" if device.type in _GPU_DEVICES and _triton_status().available else "reference"
    if name not in NAMES:
        raise ValueError(f"backend must be 'auto' or one of {', '.join(NAMES)}, got {name!r}")
    if name == "reference":
        return name
    status = _cpu_status() if name == "cpu" else _triton_status()
    if not status.available:
        raise ImportError(f"backend {name!r} is not available: {status.reason}")
    serves = ("cpu",) if name == "cpu" or interpreted() else _GPU_DEVICES
    if device.type not in serves:
        raise ValueError(f"backend {name!r} serves tensors on {' or '.join(serves)}, got a tensor on {device}")
    return name


@_constant_for_compile
def _load_triton(room: str) -> bool:
    """Imports a room's Triton file, which registers its kernels; True when they run in the interpreter.

    Apart from :func:`kernels`, since torch.compile traces no import by name.
    """
    importlib.import_module(f"{__package__}.{room}.triton")
    return interpreted()


def kernels(room: str, backend: str) -> Any:
    """Where the kernels of a fused backend live: the dispatcher's ops, or the room's Triton file when interpreted."""
    if backend == "triton" and _load_triton(room):
        return sys.modules[f"{__package__}.{room}.triton"]
    return torch.ops.capt_kernels
