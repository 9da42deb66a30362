"""What a run measures: settings, and the rows that each has."""

from __future__ import annotations

import dataclasses

from .compare import Setting
from .measure import Rounds
from .methods import CURVE, ENTRIES, FUSED, FUSED_MIN, TRANSFORMERS

#: Rows of a task's batch: some hundred real tokens each.
ROWS = {"rte": 16, "boolq": 4, "multirc": 2}
LENGTHS = (64, 128, 256, 512, 1024, 2048)
LAYERS = (2, 4, 8, 16)

ALL = tuple(ENTRIES)
CORE = tuple(name for name, entry in ENTRIES.items() if entry.core)
#: Left to ``--slow``, as another row stands for it: further lengths of a form or an engine, the slot without a mean on
#: the slower engine, and plain torch that is not compiled.
_STOOD_FOR = {
    *(f"P-Tuning v2 ({form}), {n} | {FUSED}" for form in ("prefix", "deep prompts") for n in (10, 50)),
    f"zero slot | {TRANSFORMERS}",
    f"P-Tuning v2 (deep prompts), 100 | {FUSED}",
    f"prompt tuning (PEFT), 100 | {TRANSFORMERS}",
    "CaPT | plain torch, padded",
}
MOST = tuple(name for name in ALL if name not in _STOOD_FOR)
#: For bases and texts beside the main one.
FEW = tuple(name for name in CURVE if name not in (f"CaPT | {TRANSFORMERS}", f"CaPT | {FUSED_MIN}"))
DECODES = tuple(name for name, entry in ENTRIES.items() if entry.decodes)
#: Decoding takes longest; behind the prompt CaPT's is the base's own on either engine.
DECODES_FEW = tuple(name for name in DECODES if name in FEW)

Plan = dict[Setting, tuple[str, ...]]


def default(quick: bool = False, slow: bool = False) -> Plan:
    """The plan of a run that names no base.

    Args:
        quick: shapes of two layers, a few texts: to see that everything runs.
        slow: Llama-3.2-1B's shape too, and every row on every base and task.
    """
    if quick:
        small = {"layers": 2}
        return {
            Setting("llama-10x576", "rte", 2, "train", **small): ALL,
            Setting("llama-10x576", "rte", 2, "prefill", **small): CURVE,
            Setting("llama-10x576", "rte", 2, "decode", **small, new_tokens=8): DECODES,
            Setting("t5-6x768", "rte", 2, "train", **small): CURVE,
            **{Setting("llama-10x576", f"full {t}", 1, "train", **small, axis="T"): CURVE[:3] for t in LENGTHS[:2]},
            **{Setting("llama-10x576", "rte", 2, "train", n, axis="N"): CURVE[:3] for n in LAYERS[:2]},
        }
    plan: Plan = {
        Setting("llama-10x576", "rte", ROWS["rte"], "train"): ALL if slow else MOST,
        **{Setting("llama-10x576", t, ROWS[t], "train"): ALL if slow else FEW for t in ("boolq", "multirc")},
        Setting("llama-10x576", "rte", ROWS["rte"], "prefill"): ALL if slow else FEW,
        Setting("smollm2", "rte", 4, "train"): ALL if slow else FEW,
        Setting("smollm2", "rte", 2, "decode"): DECODES if slow else DECODES_FEW,
        Setting("t5-6x768", "rte", ROWS["rte"], "train"): ALL if slow else CURVE,
        Setting("minilm", "rte", ROWS["rte"], "train"): ALL if slow else FEW,
        **{Setting("llama-10x576", f"full {t}", 1, "train", 2, axis="T"): CURVE for t in LENGTHS},
        **{Setting("llama-10x576", "rte", 2, "train", n, axis="N"): CURVE for n in LAYERS},
    }
    if slow:  # full fine-tuning of this one wants 20 GB
        plan |= of_base("llama-3.2-1b", rows=2, names=tuple(name for name in CORE if not name.startswith("full")))
    return plan


def of_base(base: str, quick: bool = False, rows: int | None = None, names: tuple[str, ...] = ALL) -> Plan:
    """The plan of one base that the user names: a training step on each task, prefill and decoding on RTE."""
    counts = {"rte": 2} if quick else {task: rows or count for task, count in ROWS.items()}
    return {
        **{Setting(base, task, count, "train"): names for task, count in counts.items()},
        Setting(base, "rte", counts["rte"], "prefill"): names,
        Setting(base, "rte", 2, "decode", new_tokens=8 if quick else 64): DECODES,
    }


def scaled(plan: Plan, times: int) -> Plan:
    """``plan`` with so many times the texts."""
    return {dataclasses.replace(setting, rows=times * setting.rows): names for setting, names in plan.items()}


def rounds_of(setting: Setting, names: tuple[str, ...], quick: bool) -> Rounds:
    """Three rounds at least, and up to nine where calls are short; most time goes to the main comparison's."""
    if quick:
        return Rounds(2, 2, 0)
    seconds_a_row = 1.0 if setting.axis else 7.0 if len(names) > len(CURVE) else 3.0
    return Rounds(3, 9, len(names) * seconds_a_row)
