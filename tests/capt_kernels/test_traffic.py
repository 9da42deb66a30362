"""The capsule kernels move what they must and hardly more, counted in the interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from capt_kernels.backends import interpreted

if not interpreted():
    pytest.skip("bytes are counted in Triton's interpreter", allow_module_level=True)

from benchmarks.traffic import counted, ratios
from capt_kernels.capsule import triton as capsule


@pytest.mark.parametrize("packed", [False, True])
def test_traffic_is_near_the_floor(packed):
    """In bf16, where partial sums, which are fp32, weigh most."""
    found = ratios(1, 512, 2048, torch.bfloat16, packed)
    assert all(1 <= ratio <= 1.05 for ratio in found.values()), found
    for plain, prompted in (
        ("add_rms_norm", "add_rms_norm with a prompt"),
        ("add_rms_norm backward", "add_rms_norm backward with a prompt"),
    ):
        assert found[prompted] <= 1.03 * found[plain], found


def test_prepend_backward_without_hidden_reads_slots_alone():
    grad = torch.randn(3, 65, 96)
    with counted() as traffic:
        capsule.capsule_prepend_backward(grad, 1, None, None, 0, True, False)
    assert traffic.loaded == 3 * 96 * 4
    assert traffic.stored == 3 * 96 * 4


def test_masked_lanes_are_not_counted():
    """33 columns are a block of 64: what is counted are the 33."""
    hidden, prompt = torch.randn(2, 5, 33), torch.randn(2, 1, 33)
    with counted() as traffic:
        capsule.capsule_refresh(hidden, prompt, None, None, 0, False)
    assert traffic.loaded == (2 * 4 + 2) * 33 * 4 + 2 * 33 * 4  # the slot's old row is loaded with its tile
    assert traffic.stored == 2 * 5 * 33 * 4
