"""Compiles what the Triton launchers launch, for a GPU that need not be there, and reports what came out.

    python tests/capt_kernels/compile_kernels.py sm_90

The launchers run on CPU tensors with ``JITFunction.run`` replaced by a recorder, so block shapes, specialisations and
constants are those of a real launch. Has to run outside the interpreter (``TRITON_INTERPRET`` unset), hence a script.
Prints one JSON object a kernel.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from capt_kernels.capsule import triton as capsule
from capt_kernels.glu import triton as glu
from capt_kernels.packing import triton as packing
from capt_kernels.rotary import triton as rotary

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int32: "*i32", torch.int64: "*i64", torch.int16: "*i16", torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "maxnreg")


def record(call: Callable[[], Any]) -> list[tuple[JITFunction, dict[str, Any], dict[str, int]]]:
    """The launches of ``call``: kernel, arguments by name, launch options."""
    launches = []

    def run(self, *args, grid, warmup, **kwargs):
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        launches.append((self, dict(zip(self.arg_names, args, strict=False)) | kwargs, options))

    original, JITFunction.run = JITFunction.run, run
    try:
        call()
    finally:
        JITFunction.run = original
    return launches


def source(kernel: JITFunction, arguments: dict[str, Any]) -> ASTSource:
    """The kernel specialised as by Triton's launcher: None, 1, constexprs are constants, multiples of 16 are told."""
    signature, constants, attributes = {}, {}, {}
    fixed = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    for i, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if name in fixed or value is None or (type(value) is int and value == 1):
            signature[name] = "constexpr"
            constants[name] = value
            continue
        aligned = True  # torch's allocators align every tensor
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
        elif isinstance(value, float):
            signature[name], aligned = "fp32", False
        else:
            signature[name], aligned = "i32" if abs(value) < 2**31 else "i64", value % 16 == 0
        if aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def inspect_nvidia(compiled: Any) -> dict[str, int]:
    """Spills and stack out of the cubin, widths of global accesses out of the PTX."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ptx = compiled.asm["ptx"]
    accesses = re.findall(r"\b(ld|st)\.global((?:\.[\w:]+)*)", ptx)
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]) + int(re.search(r"LOCAL:(\d+)", usage)[1]),
        "wide_loads": sum(kind == "ld" and is_wide(width) for kind, width in accesses),
        "wide_stores": sum(kind == "st" and is_wide(width) for kind, width in accesses),
        "narrow": sum(not is_wide(width) for _, width in accesses),
    }


def is_wide(suffix: str) -> bool:
    """Whether a PTX access moves 128 bits a thread."""
    return any(form in suffix for form in (".v4.b32", ".v2.b64", ".b128"))


def inspect_amd(compiled: Any) -> dict[str, int]:
    """The same out of the assembly, whose metadata tells spills and scratch memory."""
    text = compiled.asm["amdgcn"]
    field = lambda name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1])  # noqa: E731
    loads = re.findall(r"(?:global|buffer)_load_(\w+)", text)
    stores = re.findall(r"(?:global|buffer)_store_(\w+)", text)
    return {
        "registers": field("vgpr_count"),
        "stack": field("private_segment_fixed_size") + field("vgpr_spill_count") + field("sgpr_spill_count"),
        "wide_loads": loads.count("dwordx4"),
        "wide_stores": stores.count("dwordx4"),
        "narrow": len(loads) + len(stores) - loads.count("dwordx4") - stores.count("dwordx4"),
    }


def capsule_calls(width: int, dtype: torch.dtype, slots: int) -> list[tuple[str, Callable[[], Any]]]:
    """Every capsule op, padded without a mask, where nothing but rows is read, and packed with one."""
    batch, length = 4, 512
    rows = batch * length
    hidden, prompt = torch.empty(rows, width, dtype=dtype), torch.empty(slots, width).expand(batch, -1, -1)
    weight, rstd = torch.empty(width, dtype=dtype), torch.empty(rows)
    calls = []
    for kind in ("padded", "packed"):
        if kind == "padded":
            x, where, grown = hidden.view(batch, length, width), (None, None, 0, True), (batch, length + slots)
        else:
            offsets = torch.arange(0, rows + 1, length, dtype=torch.int32)
            x, where, grown = hidden, (torch.ones(rows, dtype=torch.bool), offsets, 1, True), (rows + batch * slots,)
        grad = torch.empty(*grown, width, dtype=dtype)
        saved = (x, x, x, weight, rstd.view(x.shape[:-1]), slots)
        calls += [
            (f"{kind} prepend", partial(capsule.capsule_prepend, x, prompt, *where)),
            (f"{kind} prepend_backward", partial(capsule.capsule_prepend_backward, grad, slots, *where, True)),
            (f"{kind} refresh", partial(capsule.capsule_refresh, x, prompt, *where)),
            (f"{kind} refresh_backward", partial(capsule.capsule_refresh_backward, x, slots, *where, True)),
            (f"{kind} add_rms_norm", partial(capsule.add_rms_norm, x, x, weight, 1e-6, prompt, *where)),
            (f"{kind} add_rms_norm_backward", partial(capsule.add_rms_norm_backward, *saved, *where, True)),
        ]
    return calls


def room_calls(dtype: torch.dtype) -> list[tuple[str, Callable[[], Any]]]:
    """Rotary, gated activation and packing at the sizes of a 1B Llama."""
    q, k = torch.empty(2, 512, 32, 64, dtype=dtype), torch.empty(2, 512, 8, 64, dtype=dtype)
    table = torch.empty(2, 512, 64)
    gate = torch.empty(2, 512, 8192, dtype=dtype)
    hidden, indices = torch.empty(2, 512, 2048, dtype=dtype), torch.arange(1024)
    calls = [
        ("rotary", partial(rotary.rotary, q, k, table, table, False)),
        ("rotary_backward", partial(rotary.rotary, q, k, table, table, True)),
        ("pack", partial(packing.pack, hidden, indices)),
        ("unpack", partial(packing.unpack, hidden[0], indices[:512], 2, 512)),
    ]
    for kind in ("silu", "gelu_tanh"):
        calls.append((f"{kind}", partial(glu.gated_activation, gate, gate, kind)))
        calls.append((f"{kind}_backward", partial(glu.gated_activation_backward, gate, gate, gate, kind, True, True)))
    return [(f"padded {op}", call) for op, call in calls]


def report(target: str, calls: list[tuple[str, Callable[[], Any]]], size: dict[str, Any]) -> None:
    """Compiles every kernel that ``calls`` launch and prints what came out."""
    amd = TARGETS[target].backend == "hip"
    for op, call in calls:
        for kernel, arguments, options in record(call):
            if amd:
                options.pop("maxnreg", None)  # launchers give it to NVIDIA alone, and CPU tensors do not tell
            compiled = triton.compile(source(kernel, arguments), target=TARGETS[target], options=options)
            found = inspect_amd(compiled) if amd else inspect_nvidia(compiled)
            print(json.dumps({"op": op, "kernel": kernel.__name__} | size | found), flush=True)


def main(target: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        report(target, room_calls(dtype), {"dtype": str(dtype)})
    # Tiles of prepend and refresh are the same at every width beyond their block of columns; those of the norm are not.
    for width, dtype, slots, only in (
        (2048, torch.bfloat16, 1, ""),
        (2048, torch.float32, 1, "padded"),
        (576, torch.bfloat16, 1, "padded"),
        (576, torch.float32, 1, "padded add_rms_norm"),
        (4096, torch.bfloat16, 1, "padded add_rms_norm"),
        (4096, torch.float32, 1, "padded add_rms_norm"),
        (8192, torch.float32, 1, "padded add_rms_norm"),
        (12288, torch.bfloat16, 1, "padded add_rms_norm"),
        (2048, torch.bfloat16, 4, "packed"),
    ):
        calls = [(op, call) for op, call in capsule_calls(width, dtype, slots) if only in op]
        report(target, calls, {"width": width, "dtype": str(dtype), "slots": slots})


if __name__ == "__main__":
    main(sys.argv[1])
