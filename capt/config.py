"""CaptConfig: what an adapter is, checked when it is made."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

VARIANTS = ("addition", "prepending", "extraction", "projection")
DEPTHS = ("all", "input", "first_half", "latter_half", "odd")
POSITIONS = ("shift", "keep")
TASK_TYPES = ("CAUSAL_LM", "SEQ_CLS", "SEQ_2_SEQ_LM", "FEATURE_EXTRACTION")


@dataclass(frozen=True)
class CaptConfig:
    """How the capsule of every layer is formed (CaPT, arXiv 2510.16670; the defaults are the paper's).

    Args:
        variant: how the slot is made of the vector p and the mean. ``"addition"``: S = p + mean. ``"prepending"``: two
            slots [mean, p]. ``"extraction"``: p + mean(old slots ++ depthwise Conv1d of the real rows).
            ``"projection"``: p + mean @ A @ B with rank ``rank``.
        length: number K of vectors a layer; the mean becomes an adaptive mean pool into K pieces.
        depth: layers that are prompted: ``"all"``, ``"input"`` (the first), ``"first_half"`` (floor(N/2) layers),
            ``"latter_half"`` (the rest), ``"odd"`` (1st, 3rd, ...), or a strictly rising list of 0-based layer indices.
        instance: False leaves the mean out, S = p: deep prompt tuning, "Deep PT-1" for one vector.
        task: False leaves p out, S = mean: nothing trains ("instance only").
        lead: real rows that stay in front of the slots. Decoders do better with 1: it keeps their attention sink in
            place.
        first_mean: whether the first prompted layer adds the mean of the raw embeddings. Decoders do better with False.
        positions: ``"shift"`` counts slots as positions of their own; ``"keep"`` leaves tokens at 0..n-1, slots at 0.
        expose_slot: whether an encoder-decoder's decoder sees the processed slots.
        rank: columns of A for ``"projection"``.
        kernel_size: width of the Conv1d for ``"extraction"``; odd.
        task_type: ``"CAUSAL_LM"``, ``"SEQ_CLS"``, ``"SEQ_2_SEQ_LM"``, ``"FEATURE_EXTRACTION"``, or None to go by the
            base's class.
        label_words: vocabulary ids, one a class: ``"SEQ_CLS"`` by the language-model head's logits of these words, so
            that nothing but the vectors trains.
        base_model_name_or_path: the base an adapter was made for; filled in from the base.

    Raises:
        ValueError: a field out of its range, or fields that contradict each other.
    """

    variant: str = "addition"
    length: int = 1
    depth: str | Sequence[int] = "all"
    instance: bool = True
    task: bool = True
    lead: int = 0
    first_mean: bool = True
    positions: str = "shift"
    expose_slot: bool = True
    rank: int = 8
    kernel_size: int = 5
    task_type: str | None = None
    label_words: Sequence[int] | None = None
    base_model_name_or_path: str | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("variant", VARIANTS), ("positions", POSITIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.task_type is not None and self.task_type not in TASK_TYPES:
            raise ValueError(f"task_type must be None or one of {', '.join(TASK_TYPES)}, got {self.task_type!r}")
        for name, least in (("length", 1), ("lead", 0), ("rank", 1), ("kernel_size", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")
        for name in ("instance", "task", "first_mean", "expose_slot"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.kernel_size % 2 == 0:
            raise ValueError(
                f"kernel_size must be odd, so that a row is in the middle of its window, got {self.kernel_size}"
            )
        if not (self.instance or self.task):
            raise ValueError("instance=False and task=False leave nothing to put in the slot")
        if self.variant != "addition" and not (self.instance and self.task):
            raise ValueError(
                f"variant {self.variant!r} combines mean and vector, got instance={self.instance}, task={self.task}"
            )
        if not isinstance(self.base_model_name_or_path, str | None):
            raise ValueError(f"base_model_name_or_path must be a string or None, got {self.base_model_name_or_path!r}")
        self._check_depth()
        if self.label_words is not None:
            words = tuple(self.label_words) if isinstance(self.label_words, list | tuple) else ()
            if len(words) < 2 or len(set(words)) != len(words) or not all(type(w) is int and w >= 0 for w in words):
                raise ValueError(
                    f"label_words must be at least two different vocabulary ids, got {self.label_words!r}; a "
                    "word's id is tokenizer(' word', add_special_tokens=False).input_ids[0]"
                )
            if self.task_type not in (None, "SEQ_CLS"):
                raise ValueError(
                    f"label_words make a classifier, so task_type must be 'SEQ_CLS', got {self.task_type!r}"
                )
            object.__setattr__(self, "label_words", words)

    def _check_depth(self) -> None:
        if isinstance(self.depth, str):
            if self.depth not in DEPTHS:
                raise ValueError(
                    f"depth must be one of {', '.join(DEPTHS)} or a list of layer indices, got {self.depth!r}"
                )
            return
        layers = tuple(self.depth) if isinstance(self.depth, list | tuple) else ()
        ints = all(type(i) is int and i >= 0 for i in layers)
        if not layers or not ints or any(a >= b for a, b in itertools.pairwise(layers)):
            raise ValueError(f"depth must be a strictly rising list of 0-based layer indices, got {self.depth!r}")
        object.__setattr__(self, "depth", layers)

    @property
    def slots(self) -> int:
        """Rows the capsule takes in every sequence."""
        return 2 * self.length if self.variant == "prepending" else self.length

    def prompted_layers(self, num_layers: int) -> tuple[int, ...]:
        """0-based indices of the prompted layers of a base with ``num_layers`` layers.

        Raises:
            ValueError: an index past the last layer, or a depth that names no layer of so small a base.
        """
        layers: Sequence[int]
        if not isinstance(self.depth, str):
            layers = self.depth
        elif self.depth == "odd":
            layers = range(0, num_layers, 2)
        else:
            half = num_layers // 2
            first, last = {
                "all": (0, num_layers),
                "input": (0, 1),
                "first_half": (0, half),
                "latter_half": (half, num_layers),
            }[self.depth]
            layers = range(first, last)
        if not layers or layers[-1] >= num_layers:
            raise ValueError(f"depth {self.depth!r} does not fit a base with {num_layers} layers")
        return tuple(layers)

    def to_dict(self) -> dict[str, Any]:
        """Every field, as JSON holds it."""
        fields = dataclasses.asdict(self)
        return {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> CaptConfig:
        """The config of such a dict.

        Raises:
            ValueError: a field that no config has, or a value that does not fit.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - known)
        if unknown:
            raise ValueError(f"CaptConfig has no field {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        return cls(**fields)
