"""What ``capt attention`` leaves behind: attention.json, attention.npz, summary.md and heat maps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..markdown import table
from ..staging import staged, write_json
from ..training.report import versions
from .attention import QUANTITIES, ROLES, Averages, Groups, OneText
from .figures import Panel, by_model, heat_maps, numbered

#: Number -> (rows that give attention, rows that receive it), and what it says.
NUMBERS = {
    "slot_receives": (("tokens", "slot"), "of the attention of all other rows, what the slot receives"),
    "slot_receives_from_structural": (("structural", "slot"), "the same of structural tokens' attention alone"),
    "slot_gives_to_structural": (("slot", "structural"), "of the slot's attention, what structural tokens receive"),
    "slot_gives_to_later": (("slot", "later_structural"), "the same without the first token"),
    "others_give_to_structural": (("tokens", "structural"), "of all other rows' attention, what they receive"),
    "others_give_to_later": (("tokens", "later_structural"), "the same without the first token"),
    "others_give_to_first": (("tokens", "first"), "of all other rows' attention, what the first token receives"),
}


@dataclass(frozen=True)
class Measured:
    """One model's attention on a split.

    Args:
        config: the adapter's fields; None for the bare base.
        example: of the row that is drawn token by token.
    """

    config: dict[str, Any] | None
    groups: Groups
    averages: Mapping[str, Averages]
    example: OneText

    def table(self, quantity: str, part: str) -> Tensor:
        """Mean ``[..., P, P]`` between places, NaN where none may see another; ``part`` is of :class:`.Averages`."""
        places = (..., slice(len(ROLES), None), slice(len(ROLES), None))
        visible = getattr(self.averages["uniform"], part).mean[places] > 0
        return getattr(self.averages[quantity], part).mean[places].masked_fill(~visible, torch.nan)

    def numbers(self) -> dict[str, Any]:
        """:data:`NUMBERS` that this model has, each with its standard errors, by layer and by head too."""
        found = {}
        for name, ((query, key), _) in NUMBERS.items():
            at = (..., list(ROLES).index(query), list(ROLES).index(key))
            shares, uniform = self.averages["probabilities"], self.averages["uniform"]
            if shares.whole.mean[at].isnan():
                continue
            found[name] = {
                "mean": _plain(shares.whole.mean[at]),
                "standard_error": _plain(shares.whole.standard_error[at]),
                "uniform": _plain(uniform.whole.mean[at]),
                **{
                    f"{part}_{field}": _plain(getattr(getattr(shares, part), field)[at])
                    for part in ("layers", "heads")
                    for field in ("mean", "standard_error")
                },
                "logit_mean": _plain(self.averages["logits"].whole.mean[at]),
                "logit_standard_error": _plain(self.averages["logits"].whole.standard_error[at]),
            }
        return found


def write(folder: Path, models: Mapping[str, Measured], facts: dict[str, Any]) -> str:
    """Writes the folder and returns the summary.

    Args:
        models: by name, ``"bare"`` among them.
        facts: what was measured on what.
    """
    _write_heat_maps(folder, models, facts)
    with staged(folder / "attention.npz") as target, target.open("wb") as file:
        save: Any = np.savez_compressed  # its stub takes every keyword for an option
        save(file, **_arrays(models))
    summary = _summary(models, facts)
    with staged(folder / "summary.md") as target:
        target.write_text(summary, encoding="utf-8")
    content = {
        **facts,
        "versions": versions(),
        "roles": ROLES,
        "numbers": {name: f"{meaning} ({query} -> {key})" for name, ((query, key), meaning) in NUMBERS.items()},
        "models": {
            name: {"config": model.config, "numbers": model.numbers(), "tables": _role_tables(model)}
            for name, model in models.items()
        },
    }
    write_json(folder / "attention.json", content)  # last: its presence says that the folder is whole
    return summary


def _role_tables(model: Measured) -> dict[str, Any]:
    """Tables ``[query role][key role]`` of the whole stack, in the order of "roles"."""
    roles = (slice(len(ROLES)), slice(len(ROLES)))
    return {
        quantity: {
            "mean": _plain(averages.whole.mean[roles]),
            "standard_error": _plain(averages.whole.standard_error[roles]),
        }
        for quantity, averages in model.averages.items()
    }


def _arrays(models: Mapping[str, Measured]) -> dict[str, np.ndarray]:
    """All tables: ``<model>/<quantity>/{whole,layers,heads}/{mean,standard_error}``, and their ``<model>/groups``."""
    arrays = {}
    for name, model in models.items():
        arrays[f"{name}/groups"] = np.array([*ROLES, *model.groups.labels])
        for quantity in QUANTITIES:
            for part in ("whole", "layers", "heads"):
                moments = getattr(model.averages[quantity], part)
                for field in ("mean", "standard_error"):
                    arrays[f"{name}/{quantity}/{part}/{field}"] = getattr(moments, field).float().numpy()
    return arrays


def _write_heat_maps(folder: Path, models: Mapping[str, Measured], facts: dict[str, Any]) -> None:
    rows_and_columns = ("gives attention", "receives attention")
    for quantity, what in (("probabilities", "attention a token receives"), ("logits", "attention logit")):
        logarithmic = quantity == "probabilities"
        heat_maps(
            folder / f"split_{quantity}.png",
            f"mean {what}: {facts['rows']} rows of {facts['source']}, all heads and layers",
            by_model({name: (m.table(quantity, "whole"), m.groups.labels) for name, m in models.items()}),
            rows_and_columns,
            logarithmic,
        )
        heat_maps(
            folder / f"example_{quantity}.png",
            f"mean {what}: row {facts['example']} of {facts['source']}, all heads and layers",
            by_model({name: (getattr(m.example, quantity), m.example.labels) for name, m in models.items()}),
            rows_and_columns,
            logarithmic,
        )
        for name, model in models.items():
            layers = model.table(quantity, "layers")
            heat_maps(
                folder / f"layers_{quantity}_{name.replace(' ', '-')}.png",
                f"{name}: mean {what} by layer, all heads, {facts['rows']} rows of {facts['source']}",
                by_model({f"layer {i}": (table, model.groups.labels) for i, table in enumerate(layers, start=1)}),
                rows_and_columns,
                logarithmic,
            )
    for number, (_, meaning) in NUMBERS.items():
        panels = []
        for name, model in models.items():
            numbers = model.numbers()
            if number in numbers:
                heads = torch.tensor([[_or_nan(x) for x in layer] for layer in numbers[number]["heads_mean"]])
                panels.append(Panel(name, heads, numbered("layer", heads.shape[0]), numbered("head", heads.shape[1])))
        if panels:
            heat_maps(folder / f"heads_{number}.png", meaning, panels, ("", ""), True)


def _summary(models: Mapping[str, Measured], facts: dict[str, Any]) -> str:
    measured = {name: model.numbers() for name, model in models.items()}
    rows = [[name, *(_shown(numbers.get(number)) for number in NUMBERS)] for name, numbers in measured.items()]
    lines = [
        f"# Attention of {facts['model']}",
        "",
        f"{facts['rows']} rows of {facts['source']}, template `{facts['template']}`. Shares of attention, mean ± "
        "standard error over rows, all heads and layers; in brackets, the share if a row saw all that it may alike.",
        "",
        table(["model", *(name.replace("_", " ") for name in NUMBERS)], rows),
    ]
    lines += ["", *(f"- {name.replace('_', ' ')}: {meaning}" for name, (_, meaning) in NUMBERS.items()), ""]
    return "\n".join(lines)


def _shown(number: dict[str, Any] | None) -> str:
    if number is None:
        return ""
    error = number["standard_error"]
    spread = "" if error is None else f" ± {error:.4f}"
    return f"{number['mean']:.4f}{spread} ({number['uniform']:.4f})"


def _plain(values: Tensor) -> Any:
    """As JSON holds it, which has no NaN."""
    return _without_nan(values.tolist())


def _without_nan(values: Any) -> Any:
    if isinstance(values, list):
        return [_without_nan(value) for value in values]
    return None if values != values else values


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value
