"""A training step of CaPT, reference and fused, beside P-Tuning v2, prompt tuning and the bare frozen base.

Forward and backward of 16 texts of RTE's real lengths in fp32. In front of every round the pure matrix products of the
real rows are timed too, so that a row's ``over_matrix_products`` holds although the machine drifts. A method is timed
only after its output was seen to differ from the base's and all that it trains was seen to have a gradient.
"""

from __future__ import annotations

import statistics
import time

import pytest
import torch

from capt.memory import bytes_kept

from .methods import BARE, METHODS, gemms, make_batch


@pytest.mark.benchmark(group="training step, RTE lengths, batch 16, fp32")
@pytest.mark.parametrize("name", METHODS)
def test_training_step(benchmark, name, request):
    torch.manual_seed(0)
    batch = make_batch()
    real = batch["attention_mask"].bool()
    method = METHODS[name]()

    def loss():
        return method.forward(batch).square().mean()

    if name != BARE:
        bare = METHODS[BARE]().forward(batch)[real]
        assert not torch.allclose(method.forward(batch)[real], bare), f"{name} leaves the base's output alone"
    for grad in torch.autograd.grad(loss(), method.trained):
        assert grad.abs().max() > 0, f"{name} trains a tensor that has no gradient"

    floor, floors = gemms(int(real.sum())), []

    def time_the_floor():
        start = time.perf_counter()
        floor()
        floors.append(time.perf_counter() - start)

    rounds = 2 if request.config.getoption("--quick") else 7
    benchmark.pedantic(
        lambda: torch.autograd.grad(loss(), method.trained), setup=time_the_floor, rounds=rounds, warmup_rounds=1
    )
    ratios = [own / pure for own, pure in zip(benchmark.stats.stats.data, floors[-rounds:], strict=True)]
    benchmark.extra_info.update(
        method=name,
        over_matrix_products=statistics.median(ratios),
        texts_per_second=len(real) / benchmark.stats.stats.median,
        bytes_kept=bytes_kept(method.model, loss),
        trained=sum(p.numel() for p in method.trained),
    )
