"""Figures that no machine changes: ``python -m benchmarks.baseline`` writes them to ``baseline.json``.

Bytes that each method keeps for backward, what it trains, and the bytes that the Triton kernels move over the least
possible. The test suite holds the code to them; a change that means to move one writes the file anew, and the commit
shows it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so it stands before the import of one

import torch

from capt.memory import bytes_kept

from .bases import Batch, headless, make_base, make_batch, shell
from .floor import least_bytes
from .methods import ENTRIES, FUSED, FUSED_MIN, TRANSFORMERS, Method

FILE = Path(__file__).with_suffix(".json")
#: Base -> rows held; torch.compile's depend on its release.
BASES = {
    "llama-10x576": [name for name, entry in ENTRIES.items() if entry.engine in (TRANSFORMERS, FUSED, FUSED_MIN)],
    "t5-6x768": [f"bare base | {TRANSFORMERS}", *(f"CaPT | {engine}" for engine in (TRANSFORMERS, FUSED, FUSED_MIN))],
}


def methods() -> dict[str, dict[str, dict[str, int]]]:
    """Base -> row -> ``bytes_kept`` and ``trained``, on two layers and three texts of RTE's lengths; CPU, fp32."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for name, rows in BASES.items():
        base = headless(make_base(name, layers=2))
        torch.manual_seed(1)
        batch = make_batch(base, "rte", 3)
        tokens = int(batch["attention_mask"].sum())
        found[name] = {"each needed row once": {"bytes_kept": least_bytes(base, tokens)}}
        found[name] |= {row: _figures(ENTRIES[row].build(shell(base)), batch) for row in rows}
    return found


def _figures(method: Method, batch: Batch) -> dict[str, int]:
    kept = bytes_kept(method.module, lambda: method.loss(batch))
    return {"bytes_kept": kept, "trained": sum(p.numel() for p in method.trained)}


def traffic() -> dict[str, float]:
    """Of small batches, where partial sums weigh more than in :mod:`.traffic`'s table."""
    from .traffic import ratios

    torch.manual_seed(0)
    padded, packed = (ratios(1, 256, 256, torch.bfloat16, packed=kind) for kind in (False, True))
    return {
        **{f"{op}, padded": round(ratio, 4) for op, ratio in padded.items()},
        **{f"{op}, packed": round(ratio, 4) for op, ratio in packed.items()},
    }


def main() -> None:
    figures: dict[str, Any] = {"methods": methods(), "traffic": traffic()}
    FILE.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
