"""Options and reporting shared by the benchmarks."""

from __future__ import annotations

import os
import platform

import pytest
import torch

import capt_kernels


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="the smallest sizes only, a few rounds")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--quick"):
        return
    slow = [item for item in items if item.get_closest_marker("slow_size")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


def pytest_benchmark_update_machine_info(config, machine_info):
    """Who measured: a number without its machine and versions says nothing; the machine's name says nothing either."""
    machine_info.pop("node", None)
    machine_info["torch"] = torch.__version__
    machine_info["threads"] = torch.get_num_threads()
    machine_info["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    machine_info["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    machine_info["backends"] = {name: status.available for name, status in capt_kernels.backends().items()}
    machine_info["python_build"] = platform.python_version()
    machine_info["cores"] = os.cpu_count()
