"""Memory, trained numbers and traffic are what the committed baseline says; times are asserted nowhere."""

import json

import pytest

import capt_kernels

pytest.importorskip("peft")

from benchmarks import baseline
from capt_kernels.backends import interpreted

HELD = json.loads(baseline.FILE.read_text(encoding="utf-8"))
ANEW = "; where a change means this, `python -m benchmarks.baseline` writes the file anew"


@pytest.fixture(scope="module")
def found():
    return baseline.methods()


@pytest.mark.skipif(not capt_kernels.backends()["cpu"].available, reason="plain torch keeps more than the C++ ops")
@pytest.mark.parametrize("base", baseline.BASES)
def test_bytes_kept_and_trained_numbers(found, base):
    """What a method trains exactly, bytes within 1 % (attention of another torch release saves other sums)."""
    assert found[base].keys() == HELD["methods"][base].keys()
    for row, figures in found[base].items():
        held = HELD["methods"][base][row]
        assert figures.get("trained") == held.get("trained"), row + ANEW
        assert figures["bytes_kept"] == pytest.approx(held["bytes_kept"], rel=0.01), row + ANEW


@pytest.mark.skipif(not capt_kernels.backends()["cpu"].available, reason="plain torch keeps more than the C++ ops")
@pytest.mark.parametrize("base", baseline.BASES)
def test_fused_keeps_what_backward_needs_and_less_than_transformers(found, base):
    kept = {row: figures["bytes_kept"] for row, figures in found[base].items()}
    assert kept["CaPT | fused"] <= 1.1 * kept["each needed row once"]
    assert kept["CaPT | fused, memory min"] <= 0.6 * kept["CaPT | fused"]
    assert kept["CaPT | fused"] < 0.7 * kept["bare base | transformers"]


@pytest.mark.skipif(not interpreted(), reason="bytes are counted in Triton's interpreter")
def test_traffic():
    """Bytes of loads and stores, exactly but for what the file's four digits round away."""
    assert baseline.traffic() == pytest.approx(HELD["traffic"], abs=1e-4), ANEW
