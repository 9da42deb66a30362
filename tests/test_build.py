"""The build: an install goes on without what the C++ kernels need, and one library serves every x86 CPU and torch."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import capt_kernels

ROOT = Path(__file__).parents[1]
CAPABILITIES = ("default", "avx2", "avx512")
#: torch's namespaces as a C++ symbol spells them.
TORCH = ("2at", "3c10", "5torch")

needs_extension = pytest.mark.skipif(
    not capt_kernels.backends()["cpu"].available, reason=capt_kernels.backends()["cpu"].reason
)


def run_python(arguments, environment, cwd=ROOT):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        capture_output=True,
        text=True,
    )


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def build(tmp_path, environment):
    """``setup.py build_ext`` into ``tmp_path``; it must succeed. Returns what it printed and what it built."""
    built = tmp_path / "built"
    done = run_python(
        ["setup.py", "build_ext", "--build-lib", built, "--build-temp", tmp_path / "temporary"], environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr, list(built.rglob("*.so")) if built.exists() else []


def assert_left_out(printed, built, reason):
    assert not built
    assert "the C++ kernels are not built" in printed
    assert reason in printed
    assert "backend='reference'" in printed


def test_without_compiler_or_cmake(tmp_path):
    empty = tmp_path / "bin"
    empty.mkdir()
    environment = {"PATH": empty, "CXX": ""}
    printed, built = build(tmp_path, environment)
    assert_left_out(printed, built, "a C++17 compiler (c++, g++, clang++ not found)")
    assert "CMake (pip install cmake)" in printed


def test_without_the_compiler_asked_for(tmp_path):
    printed, built = build(tmp_path, {"CXX": "no-such-c++ -m64"})
    assert_left_out(printed, built, "CXX=no-such-c++ -m64 not found")


def test_an_earlier_build_in_place_goes_where_a_new_one_fails(tmp_path):
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for package in ("capt", "capt_kernels"):
        (tree / package).mkdir()
        (tree / package / "__init__.py").touch()
    old = tree / "capt_kernels" / "_C.so"
    for flags, left in ((["--build-lib", "built"], True), (["--inplace"], False)):
        old.touch()
        done = run_python(["setup.py", "build_ext", *flags], {"CXX": "no-such-c++"}, cwd=tree)
        assert done.returncode == 0, done.stderr
        assert old.exists() == left


@pytest.mark.skipif(shutil.which("cmake") is None, reason="CMake is not installed")
def test_with_a_compiler_that_fails(tmp_path):
    printed, built = build(tmp_path, {"CXX": script(tmp_path / "broken-c++", "echo no licence >&2; exit 1")})
    assert_left_out(printed, built, "failed, see above")
    assert "no licence" in printed


def test_with_a_torch_without_headers(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    printed, built = build(tmp_path, {"PYTHONPATH": tmp_path})
    assert_left_out(printed, built, "the headers of torch >= 2.10")


def test_the_package_works_without_the_extension(tmp_path):
    shutil.copytree(
        ROOT / "capt_kernels", tmp_path / "capt_kernels", ignore=shutil.ignore_patterns("*.so", "csrc", "__pycache__")
    )
    program = """
import torch, capt_kernels
status = capt_kernels.backends()["cpu"]
assert not status.available and "was not built" in status.reason and "--no-build-isolation" in status.reason, status
x, prompt = torch.tensor([[1.0, 2], [3, 4], [5, 6]]), torch.tensor([0.5, -0.5])
slot = capt_kernels.capsule_refresh(x, prompt, cu_seqlens=torch.tensor([0, 3], dtype=torch.int32))[0]
assert slot.tolist() == [3.5, 3.5], slot
try:
    capt_kernels.capsule_refresh(x[None], prompt, backend="cpu")
except ImportError as error:
    print(error)
"""
    done = run_python(["-c", program], {"PYTHONPATH": tmp_path}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "backend 'cpu' is not available" in done.stdout


EVERY_OP = """
import sys, torch, capt_kernels
torch.manual_seed(0)
results = {}
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
    for width in (33, 96):
        def leaf(*shape):
            return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()
        offsets = torch.tensor([0, 70, 70, 75, 140], dtype=torch.int32)
        branch, residual, prompt, weight = leaf(143, width), leaf(143, width), leaf(2, width), leaf(width)
        q, k, cos, sin = leaf(143, 3, 96), leaf(143, 1, 96), leaf(143, 96).detach(), leaf(143, 96).detach()
        v, bias = leaf(143, 1, 96), leaf(3, 139).detach()
        where = dict(cu_seqlens=offsets, pool_mask=torch.rand(143) < 0.7, lead=1, backend="cpu")
        outputs = [
            *capt_kernels.add_rms_norm(branch, residual, weight, 1e-5, prompt=prompt, **where),
            capt_kernels.capsule_prepend(residual, prompt, **where),
            capt_kernels.capsule_refresh(residual, prompt, **where),
            *capt_kernels.apply_rotary(q, k, cos, sin, backend="cpu"),
            *[capt_kernels.gated_activation(branch, residual, kind, backend="cpu")
              for kind in ("silu", "gelu", "gelu_tanh", "relu")],
            capt_kernels.capsule_attention(q, k, v, cu_seqlens=offsets, causal=True, scale=0.1, backend="cpu"),
            capt_kernels.capsule_attention(q, k, v, cu_seqlens=offsets, causal=False, scale=0.1, bias_table=bias,
                                           backend="cpu"),
        ]
        grads = torch.autograd.grad(
            [(x.double() * torch.arange(x.shape[-1])).sum() for x in outputs],
            [branch, residual, prompt, weight, q, k, v],
        )
        results[str(dtype), width] = [x.detach() for x in (*outputs, *grads)]
torch.save((torch.ops.capt_kernels.cpu_capability(), results), sys.argv[1])
"""


@pytest.fixture(scope="module")
def by_capability(tmp_path_factory):
    """What every op gives under each instruction set that this CPU has."""
    found = {}
    for capability in CAPABILITIES:
        path = tmp_path_factory.mktemp("capability") / "results.pt"
        done = run_python(["-c", EVERY_OP, path], {"CAPT_KERNELS_CPU_CAPABILITY": capability})
        if done.returncode:
            assert "CAPT_KERNELS_CPU_CAPABILITY must be" in done.stderr, done.stderr
            continue
        found[capability] = torch.load(path)
    return found


@needs_extension
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_instruction_set_gives_the_same(by_capability, capability):
    if capability not in by_capability:
        pytest.skip(f"this CPU has no {capability}")
    used, results = by_capability[capability]
    assert used == capability
    for (dtype, width), tensors in by_capability["default"][1].items():
        # Sums are formed in another order, so a result may be one rounding of its dtype away.
        for index, (expected, got) in enumerate(zip(tensors, results[dtype, width], strict=True)):
            assert got.isfinite().all()
            error = (got.double() - expected.double()).abs().max().item()
            eps = 16 * torch.finfo(torch.float32).eps if got.dtype == torch.float32 else torch.finfo(got.dtype).eps
            allowed = (64 if got.dtype == torch.float64 else 1) * eps * max(expected.double().abs().max().item(), 1)
            assert error <= allowed, f"{dtype} {width} tensor {index}: {error} over {allowed}"


@needs_extension
def test_an_unknown_capability_is_named():
    program = "import torch, capt_kernels; torch.ops.capt_kernels.cpu_capability()"
    done = run_python(["-c", program], {"CAPT_KERNELS_CPU_CAPABILITY": "avx1024"})
    assert done.returncode != 0
    assert "must be default, avx2 or avx512" in done.stderr
    assert "got avx1024" in done.stderr


@needs_extension
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("op", ["capsule_prepend", "capsule_refresh", "add_rms_norm"])
def test_results_do_not_depend_on_the_number_of_threads(op, layout, slots):
    """A long sequence is split along its rows, and its sums are still formed in one order."""
    length, width = 2049, 256
    where = {"pool_mask": torch.rand(length) < 0.7, "backend": "cpu"}
    if layout == "packed":
        hidden = torch.randn(length, width)
        where |= {"cu_seqlens": torch.tensor([0, 40, 40, 2000], dtype=torch.int32), "lead": 1}
    else:
        hidden = torch.randn(1, length, width)
        where["pool_mask"] = where["pool_mask"][None, 0 if op == "capsule_prepend" else slots :]
    prompt, weight, threads = torch.randn(slots, width), torch.randn(width), torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            leaves = [x.clone().requires_grad_() for x in (hidden, prompt)]
            if op == "add_rms_norm":
                outputs = capt_kernels.add_rms_norm(None, leaves[0], weight, 1e-6, prompt=leaves[1], **where)
            else:
                outputs = (getattr(capt_kernels, op)(*leaves, **where),)
            grads = torch.autograd.grad(sum(x.square().sum() for x in outputs), leaves)
            results.append([x.detach() for x in (*outputs, *grads)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@needs_extension
@pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) is not installed")
def test_the_library_wants_no_cpp_symbol_of_torch():
    """Only the stable C interface of torch (and SLEEF's functions), so that one build serves several releases."""
    (library,) = (ROOT / "capt_kernels").glob("_C*.so")
    listed = subprocess.run(["nm", "-D", "-u", str(library)], capture_output=True, text=True, check=True).stdout
    wanted = [line.split()[-1] for line in listed.splitlines()]
    assert any(symbol.startswith("aoti_torch_") for symbol in wanted)
    assert not [symbol for symbol in wanted if symbol.startswith(tuple(f"_ZN{k}{n}" for k in ("", "K") for n in TORCH))]
