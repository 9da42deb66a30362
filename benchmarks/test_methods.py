"""CaPT beside P-Tuning v2 and everything else a user would pick: time and memory of training, prefill and decoding.

pytest-benchmark times one test after another, and a machine drifts in between. So the first test of a setting measures
all of its selected rows in interleaved rounds (:mod:`.compare`), and each test hands its own rounds on, by a clock that
tells them (:class:`.measure.Replay`). A row that is no method at all on this base is skipped with the reason, which the
JSON holds under ``not_timed``.
"""

from __future__ import annotations

import pytest
import torch

from . import plan
from .compare import Row, Setting, compare
from .measure import Replay

CLOCK = Replay()
_MEASURED: dict[Setting, dict[str, Row]] = {}


def pytest_generate_tests(metafunc):
    option = metafunc.config.getoption
    quick, slow, bases = option("--quick"), option("--slow"), [*option("--base"), *option("--model")]
    chosen: plan.Plan = {}
    for base in bases:
        chosen |= plan.of_base(base, quick)
    # A GPU is idle on a batch that keeps two cores busy.
    chosen = plan.scaled(chosen or plan.default(quick, slow), 8 if torch.cuda.is_available() else 1)
    rows = [(setting, name) for setting, names in chosen.items() for name in names]
    metafunc.parametrize(("setting", "name"), rows, ids=[f"{setting}: {name}" for setting, name in rows])


@pytest.mark.benchmark(timer=CLOCK)
def test_method(benchmark, setting, name, request, device):
    if benchmark.disabled:
        pytest.skip("measures, and nothing else")
    if setting not in _MEASURED:
        parameters = [item.callspec.params for item in request.session.items if item.originalname == "test_method"]
        selected = tuple(p["name"] for p in parameters if p["setting"] == setting)
        rounds = plan.rounds_of(setting, selected, request.config.getoption("--quick"))
        _MEASURED[setting] = compare(setting, selected, rounds, device)
    row = _MEASURED[setting][name]
    method, engine = name.split(" | ")
    told = {
        "setting": str(setting),
        "base": setting.base,
        "task": setting.task,
        "work": setting.work,
        "axis": setting.axis,
        "value": {"T": setting.task.removeprefix("full "), "N": setting.layers}.get(setting.axis),
        "method": method,
        "engine": engine,
    }
    if row.reason is not None:
        request.config.not_timed.append(told | {"reason": row.reason})
        pytest.skip(row.reason)
    benchmark.group = str(setting)
    benchmark.extra_info.update(told, **row.info, rounds=row.samples)
    CLOCK.load(row.samples)
    benchmark.pedantic(lambda: None, rounds=len(row.samples))
