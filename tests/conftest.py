"""Shared by all tests: Triton's interpreter where there is no GPU, seeds, and the backends under test."""

import os

import torch

# Triton reads this when a kernel is decorated, so it has to stand before the first import of one.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

import capt_kernels

if capt_kernels.backends()["triton"].available and not torch.cuda.is_available():
    from .interpreter_rounding import round_to_nearest

    round_to_nearest()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=["reference", "cpu", "triton"])
def backend(request):
    """Every backend of the capsule, rotary, glu and packing ops; one that is absent here is skipped with its reason."""
    status = capt_kernels.backends()[request.param]
    if not status.available:
        pytest.skip(f"{request.param}: {status.reason}")
    return request.param


@pytest.fixture
def device(backend):
    """Where tensors of a test lie: Triton takes CPU tensors in its interpreter only."""
    return "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"


@pytest.fixture
def poisoned():
    """Uninitialised memory holds NaN, from Python and C++ alike, and every op must be deterministic."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
