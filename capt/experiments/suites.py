"""Experiments on the models at hand, sized for a CPU: equal rows, steps and learning rates tried for every method."""

from __future__ import annotations

from .grids import Plan, Row

#: Fields of TrainConfig that all cells of a plan share. SmolLM2 has ten times MiniLM's weights, and a smaller budget.
_BUDGETS = {
    "minilm": {
        "optimizer": "adamw",
        "max_steps": 150,
        "eval_steps": 50,
        "batch_size": 16,
        "warmup_steps": 10,
        "max_length": 96,
        "validation_rows": 100,
        "test_rows": 300,
    },
    # In bfloat16, which a CPU with AMX multiplies in a third of the time; vectors and heads stay fp32.
    "smollm2": {
        "optimizer": "adamw",
        "max_steps": 40,
        "eval_steps": 20,
        "batch_size": 8,
        "warmup_steps": 4,
        "max_length": 64,
        "train_rows": 320,
        "validation_rows": 32,
        "test_rows": 200,
        "bf16": True,
    },
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


def _plan(model: str, answer: str, *tasks: str) -> Plan:
    title = "Methods at one small budget"
    return Plan(f"{model}-{answer}", title, model, tasks, _ROWS, _RATES, answer, _BUDGETS[model])


#: Suite -> its plans, in the order in which they run.
SUITES: dict[str, tuple[Plan, ...]] = {
    "measured": (
        _plan("minilm", "linear", "cb", "copa", "rte", "wic"),
        _plan("smollm2", "label-words", "cb", "copa", "rte", "wic"),
        _plan("smollm2", "linear", "cb", "copa", "rte", "wic"),
    ),
}
