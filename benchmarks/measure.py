"""How things are measured: interleaved rounds behind a warm-up, and the peak of live bytes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler says on stderr when it starts and stops

import torch
from torch.profiler import ProfilerActivity, profile


class Rounds(NamedTuple):
    """As many rounds as ``seconds`` allow, ``least`` or more, ``most`` at the most."""

    least: int
    most: int
    seconds: float


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """Inside, a collection of garbage looks at what calls have left, not at all that was loaded before."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def reset_allocator() -> None:
    """What earlier calls have freed goes back: each method finds the memory that any other finds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def interleaved(calls: Mapping[str, Callable[[], object]], rounds: Rounds) -> dict[str, list[float]]:
    """Seconds of each call, round by round: A B C A B C, so that a machine that drifts drifts for all of them alike.

    The calls have run before.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    started = time.perf_counter()
    for done in range(rounds.most):
        if done >= rounds.least and (time.perf_counter() - started) * (done + 1) > rounds.seconds * done:
            break
        for name, call in calls.items():
            seconds[name].append(_timed(call))
    return seconds


def _timed(call: Callable[[], object]) -> float:
    gc.collect()
    gc.disable()
    try:
        _synchronize()
        start = time.perf_counter()
        call()
        _synchronize()
        return time.perf_counter() - start
    finally:
        gc.enable()


def peak_bytes(call: Callable[[], object]) -> int:
    """Most bytes that tensors held at once during ``call``, over what they held before it.

    On a GPU torch's allocator keeps count. On a CPU its profiler reports what is taken and given back, the C++ kernels'
    own buffers included.
    """
    reset_allocator()
    if torch.cuda.is_available():
        _synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        _synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    events = recorded.profiler.kineto_results.events()
    moves = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    live = peak = 0
    for _, moved in moves:
        live += moved
        peak = max(peak, live)
    return peak


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Replay:
    """A clock for pytest-benchmark, which times one test after another: it tells the times of rounds run before.

    Every round reads the clock twice, so a round lasts what the next recorded one lasted.
    """

    def __init__(self) -> None:
        self._ticks: list[float] = []

    def load(self, seconds: list[float]) -> None:
        self._ticks = [tick for lasted in reversed(seconds) for tick in (lasted, 0.0)]

    def __call__(self) -> float:
        return self._ticks.pop()
