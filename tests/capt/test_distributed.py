"""Two processes on gloo, started by ``accelerate launch``, against one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file

from capt import CaptConfig, get_capt_model

from .distributed.fsdp import SHARDINGS
from .distributed.job import SHARDED
from .distributed.models import ADAPTERS, alone, base_of
from .distributed.trainers import accelerated, capt_train, stock_trainer


@pytest.fixture(scope="module")
def job(tmp_path_factory, sources):
    """What both processes made of every check: a function of its name."""
    folder = tmp_path_factory.mktemp("job")
    launch = "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"
    launch += " --dynamo_backend no --main_process_port 0 -m tests.capt.distributed.job"
    done = subprocess.run(
        [sys.executable, "-m", *launch.split(), str(folder), sources["llama"], sources["reviews"]],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    errors = [path.read_text() for path in sorted(folder.glob("error *"))]
    assert done.returncode == 0, "\n".join(errors) or done.stderr[-5000:]
    assert done.stdout.count("trained parameters in") == 1  # of two `capt train`, one speaks
    return lambda name: [torch.load(folder / f"{name} {rank}.pt") for rank in (0, 1)], folder


def same(found, expected, rtol=1e-5):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=rtol * tensor.abs().max().item())


@pytest.mark.parametrize("name", ADAPTERS)
def test_gradients_are_the_average(job, name):
    _, expected = alone(name)
    assert all(grad.abs().max() > 0 for grad in expected.values())
    for found in job[0](f"ddp {name}"):
        same(found, expected)


def test_accelerate_is_one_process_with_the_doubled_batch(job):
    expected = accelerated(1)
    assert len(expected) == 3
    for found in job[0]("accelerate"):
        for step, grad in enumerate(expected):
            torch.testing.assert_close(found[step], grad, rtol=1e-4, atol=1e-6)


def test_trainer_is_one_process_with_the_doubled_batch(job, tmp_path):
    expected = stock_trainer(tmp_path, 1)
    for found in job[0]("trainer"):
        assert [entry[:2] for entry in found["log"]] == [entry[:2] for entry in expected["log"]]
        assert [entry[2] for entry in found["log"]] == pytest.approx([entry[2] for entry in expected["log"]], rel=1e-4)
        same(found["state"], expected["state"], 1e-3)
    kept = load_file(job[1] / "trainer/checkpoint-4/adapter_model.safetensors")
    assert kept.keys() == {"capsules.vectors"}


def test_capt_train_is_one_process_with_the_doubled_batch(job, sources, tmp_path):
    expected = capt_train(str(tmp_path / "run"), sources["llama"], sources["reviews"], 1)
    losses = [entry["loss"] for entry in expected["history"] if "loss" in entry]
    assert len(losses) == 12
    for found in job[0]("capt train"):
        assert [e["loss"] for e in found["history"] if "loss" in e] == pytest.approx(losses, rel=1e-3)
        assert found["metrics"]["test"] == pytest.approx(expected["metrics"]["test"], rel=1e-3)
    ours, theirs = (load_file(path / "run/adapter/adapter_model.safetensors") for path in (job[1], tmp_path))
    same(ours, theirs, 1e-2)


@pytest.mark.parametrize("before_wrapping", [True, False])
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("name", SHARDED)
def test_a_sharded_base(job, name, sharding, before_wrapping):
    loss, expected = alone(name)
    for found in job[0](f"fsdp {name} {sharding} {before_wrapping}"):
        torch.testing.assert_close(found["loss"], loss, rtol=1e-5, atol=1e-6)
        same(found["gradients"], expected)
        # Sharded by the block, the base's own layers have to be called, which gather what they need.
        assert found["backbone"].startswith("Packed") == (sharding == "linears")
        assert found["share"] < 0.55


def test_a_base_that_gets_its_weights_later(job):
    (first, second), folder = job[0]("fsdp without storage"), job[1]
    loss, expected = alone("causal", fresh=True)
    for found in (first, second):
        torch.testing.assert_close(found["loss"], loss, rtol=1e-5, atol=1e-6)
        same(found["gradients"], expected)
    kept = load_file(folder / "adapter/adapter_model.safetensors")
    same(kept, {"capsules.vectors": -expected["default.capsules.vectors"]})


def test_a_head_without_values_is_refused():
    with init_empty_weights():
        base = base_of("classifier")
    with pytest.raises(ValueError, match="base must hold its whole classification head"):
        get_capt_model(base, CaptConfig())
    assert all(p.requires_grad for p in base.parameters())
