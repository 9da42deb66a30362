"""Builds the C++ kernels by CMake. What the package is made of is in pyproject.toml.

The kernels are optional: where something that they need is missing, the install goes on without them.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
COMPILERS = ("c++", "g++", "clang++")


def torch_folder() -> Path | None:
    """The folder of the torch that Python would import, without importing it."""
    spec = importlib.util.find_spec("torch")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def missing() -> list[str]:
    """What the extension needs and this machine lacks."""
    lacks = []
    asked = os.environ.get("CXX")
    if not any(shutil.which(name) for name in ([shlex.split(asked)[0]] if asked else COMPILERS)):
        lacks.append(f"a C++17 compiler ({f'CXX={asked}' if asked else ', '.join(COMPILERS)} not found)")
    if shutil.which("cmake") is None:
        lacks.append("CMake (pip install cmake)")
    torch = torch_folder()
    if torch is None:
        lacks.append("torch (install it first and pass --no-build-isolation)")
    elif not (torch / "include/torch/csrc/stable/c/shim.h").exists():
        lacks.append(f"the headers of torch >= 2.10 (not in {torch})")
    return lacks


class BuildKernels(build_ext):
    """Hands the extension to CMake, or says why it is left out."""

    def get_ext_filename(self, fullname: str) -> str:
        # A library of ops, not a Python module: no interpreter's tag in its name.
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        lacks = missing()
        if lacks:
            self.leave_out("missing: " + "; ".join(lacks))
            return
        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build = Path(self.build_temp).resolve()
        build.mkdir(parents=True, exist_ok=True)
        configure = ["cmake", "-S", str(ROOT), "-B", str(build), f"-DCAPT_TORCH_DIR={torch_folder()}"]
        configure.append(f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}")
        if shutil.which("ninja") and not (build / "CMakeCache.txt").exists():
            configure += ["-G", "Ninja"]
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        for command in (configure, ["cmake", "--build", str(build), "--parallel", jobs]):
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            print(done.stdout)
            if done.returncode:
                self.leave_out(f"{shlex.join(command)} failed, see above")
                return

    def copy_extensions_to_source(self) -> None:
        # Where nothing was built, an earlier library would go on under newer Python code.
        (ROOT / "capt_kernels" / "_C.so").unlink(missing_ok=True)
        super().copy_extensions_to_source()

    def leave_out(self, reason: str) -> None:
        print(
            f"capt_kernels: the C++ kernels are not built ({reason}).\n"
            "capt_kernels: the install goes on; every op works on CPU with backend='reference', only slower.",
            file=sys.stderr,
        )


class Wheel(bdist_wheel):
    """One wheel serves every Python 3 of a platform, as nothing in it binds to an interpreter."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    # optional: an editable install copies what was built, and nothing where nothing was.
    ext_modules=[Extension("capt_kernels._C", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel},
)
