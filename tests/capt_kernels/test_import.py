"""``import capt_kernels`` with nothing but torch: no triton, no extension, and none of torch's compiler."""

import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "capt_kernels"
PROGRAM = """
import sys
for name in {blocked}:
    sys.modules[name] = None
import capt_kernels
for name in ("torch._dynamo", "triton", "sympy"):
    assert sys.modules.get(name) is None, name

import torch
status = capt_kernels.backends()
assert not status["triton"].available or "triton" not in {blocked}, status
x, prompt = torch.tensor([[1.0, 2], [3, 4], [5, 6]]), torch.tensor([0.5, -0.5], requires_grad=True)
out = capt_kernels.capsule_refresh(x, prompt, cu_seqlens=torch.tensor([0, 3]))
assert out[0].tolist() == [3.5, 3.5], out
out.sum().backward()
assert prompt.grad.tolist() == [1.0, 1.0]
print(status["cpu"].available)
"""


def run(folder, blocked):
    program = PROGRAM.format(blocked=blocked)
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_takes_neither_triton_nor_dynamo():
    run(PACKAGE.parent, [])


def test_without_triton_and_without_the_extension(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("*.so", "csrc", "__pycache__"))
    assert run(tmp_path, ["triton"]) == "False"
