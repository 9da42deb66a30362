"""Experiments on the models at hand, sized for a CPU: equal rows, steps and learning rates tried for every method."""

from __future__ import annotations

from .grids import Plan, Row

#: Fields of TrainConfig that all cells of ``measured`` share.
_BUDGET = {
    "optimizer": "adamw",
    "max_steps": 40,
    "eval_steps": 20,
    "batch_size": 8,
    "warmup_steps": 4,
    "max_length": 64,
    "train_rows": 320,
    "validation_rows": 32,
    "test_rows": 200,
}

_ROWS = (
    Row("base alone", "bare"),
    Row("LoRA", "lora"),
    Row("P-Tuning v2, 20", "p-tuning-v2"),
    Row("Deep PT-1", "deep-pt"),
    Row("instance only", "instance-only"),
    Row("CaPT", "capt"),
    Row("CaPT, lead=1, first_mean=False", "capt-lead"),
)

#: As many for each method.
_RATES = {
    "bare": (1e-2, 1e-3),
    "lora": (1e-3, 3e-4),
    "p-tuning-v2": (1e-2, 3e-3),
    "deep-pt": (3e-3, 1e-3),
    "instance-only": (1e-2, 1e-3),
    "capt": (1e-2, 3e-3),
    "capt-lead": (1e-2, 3e-3),
}


def _plan(model: str, answer: str, tasks: tuple[str, ...], **settings: object) -> Plan:
    title = "Methods at one small budget"
    return Plan(f"{model}-{answer}", title, model, tasks, _ROWS, _RATES, answer, {**_BUDGET, **settings})


#: Suite -> its plans, in the order in which they run.
SUITES: dict[str, tuple[Plan, ...]] = {
    # SmolLM2 runs in bfloat16, which a CPU with AMX multiplies in a third of the time; vectors and heads stay fp32.
    "measured": (
        _plan("minilm", "linear", ("cb", "copa", "rte", "wic")),
        _plan("smollm2", "label-words", ("cb", "copa", "rte", "wic"), bf16=True),
        _plan("smollm2", "linear", ("cb", "copa", "wic"), bf16=True),
    ),
}
