"""Triton kernels compiled for GPUs that need not be there: no spills, no stack, 128-bit accesses."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("triton")

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
SCRIPT = Path(__file__).with_name("compile_kernels.py")
#: 128-bit accesses fold what a thread has of a tile, 16 elements or 8 (AMD), into 2 or 4; element by element it would
#: take as many as it has. Norms have a few 32-bit accesses besides, one fp32 a row.
FEW = 12


def compile_for(target, script=SCRIPT):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(SCRIPT.parents[2])
    command = [sys.executable, "-W", "ignore", str(script), target]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def reports():
    """What came out for each target, compiled two at a time."""
    with ThreadPoolExecutor(2) as pool:
        yield {target: pool.submit(compile_for, target) for target in TARGETS}


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_fit_in_registers_and_move_128_bits(reports, target):
    report = reports[target].result()
    kernels = {(kernel["op"].split()[1], kernel["kernel"], kernel["dtype"]) for kernel in report}
    for op, kernel in (
        ("prepend", "carry_kernel"),
        ("prepend_backward", "backward_kernel"),
        ("refresh", "carry_kernel"),
        ("refresh_backward", "backward_kernel"),
        ("add_rms_norm", "carry_kernel"),
        ("add_rms_norm", "slot_kernel"),
        ("add_rms_norm_backward", "backward_kernel"),
        ("rotary", "rotary_kernel"),
        ("silu", "forward_kernel"),
        ("silu_backward", "backward_kernel"),
        ("pack", "pack_kernel"),
        ("unpack", "unpack_kernel"),
    ):
        assert {(op, kernel, "torch.bfloat16"), (op, kernel, "torch.float32")} <= kernels
    for kernel in report:
        assert kernel["stack"] == 0, kernel
        # A slot is one row, spread over as many threads as add up its partial sums: too few elements each to be wide.
        if kernel["kernel"] != "slot_kernel":
            assert kernel["wide_loads"] > 0, kernel
            assert kernel["wide_stores"] > 0, kernel
        # In a packed call offsets and masks are read besides, by 32 bits.
        if kernel["op"].startswith("padded"):
            assert kernel["narrow"] < FEW, kernel
