"""Options and reporting shared by the benchmarks."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import pytest
import torch

import capt_kernels


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="the smallest sizes only, two rounds: that everything runs")
    parser.addoption("--slow", action="store_true", help="every size and row everywhere, Llama-3.2-1B's shape too")
    parser.addoption("--base", action="append", default=[], help="methods: a base of benchmarks/bases.py, or several")
    parser.addoption("--model", action="append", default=[], help="methods: a model id or folder, or several")


def pytest_configure(config):
    config.not_timed = []


def pytest_collection_modifyitems(config, items):
    option = config.getoption
    marks = [] if option("--slow") else ["slow_size", *["default_size"] * option("--quick")]
    out = [item for item in items if any(map(item.get_closest_marker, marks))]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]


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
    found = {d.name: d.version for d in importlib.metadata.distributions()}
    machine_info["versions"] = {name: found[name] for name in ("transformers", "peft", "triton") if name in found}


def pytest_benchmark_update_json(config, benchmarks, output_json):
    """Rows that have a reason instead of a time."""
    output_json["not_timed"] = config.not_timed
