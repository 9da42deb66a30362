"""Which tokens of a prompt are structural: those that the template wrote, and not one of its fields."""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from ..tasks import Example, Prompt
from ..tasks.encoding import fitted

Kind = Literal["structural", "text", "special"]


#: What tokens without a visible character are called.
_SPACES = {" ": "␣", "\n": "↵"}


class Place(NamedTuple):
    """Where in the template a token stands: the same in every prompt, however long its fields are.

    Args:
        segment: counts the template's literals and fields; -1 and one past the last hold what the tokenizer adds.
        number: counts the tokens of a literal; 0 for all tokens of a field.
        label: the token, or ``{field}``.
    """

    segment: int
    number: int
    label: str


@dataclass(frozen=True)
class Tokens:
    """The tokens of a prompt: ``ids``, what each is called on an axis, of which kind it is, and where it stands.

    "structural": none of the token's characters but spaces comes from a field. "text": one does. "special": added by
    the tokenizer.
    """

    ids: list[int]
    labels: list[str]
    kinds: list[Kind]
    places: list[Place]


def tokens_of(
    examples: Sequence[Example], prompt: Prompt, tokenizer: PreTrainedTokenizerBase, max_length: int, source: str
) -> list[Tokens]:
    """The tokens of each example's prompt, cut to ``max_length`` as :func:`capt.tasks.encode` cuts it.

    Raises:
        ValueError: a template without words of its own, a tokenizer that does not tell where its tokens stand, or a
            prompt that cannot be cut to fit.
    """
    if not any(literal.strip() for literal, *_ in string.Formatter().parse(prompt.template)):
        raise ValueError(
            f"template {prompt.template!r} holds no words of its own, so that no token is structural: give another"
        )
    if not tokenizer.is_fast:
        raise ValueError(
            f"model must come with a fast tokenizer, which tells where its tokens stand, got {type(tokenizer).__name__}"
        )
    return [
        _tokens(fitted(row, prompt, tokenizer, max_length, f"{source}, example {number}"), prompt, tokenizer)
        for number, row in enumerate(examples, start=1)
    ]


def _tokens(row: Example, prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    names, pieces = _pieces(row, prompt.template)
    text = "".join(pieces)
    segment_of = [segment for segment, piece in enumerate(pieces) for _ in piece]
    encoded = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True, verbose=False)

    found: list[tuple[str, Kind, Place]] = []
    seen: dict[int, itertools.count] = {}
    segment_before = -1
    for i, (token_id, (start, end), special) in enumerate(
        zip(encoded["input_ids"], encoded["offset_mapping"], encoded["special_tokens_mask"], strict=True)
    ):
        raw = str(tokenizer.convert_ids_to_tokens(token_id))
        if special:
            at_end = any(not other for other in encoded["special_tokens_mask"][:i])
            kind: Kind = "special"
            segment, label = len(pieces) if at_end else -1, raw
        else:
            segment = _segment(text, start, end, segment_of, names, segment_before)
            segment_before = segment
            kind = "structural" if names[segment] is None else "text"
            label = text[start:end].strip() or _SPACES.get(text[start:end], raw)
        if kind == "text":
            place = Place(segment, 0, f"{{{names[segment]}}}")
        else:
            place = Place(segment, next(seen.setdefault(segment, itertools.count())), label)
        found.append((label, kind, place))
    labels, kinds, places = (list(column) for column in zip(*found, strict=True))
    return Tokens(list(encoded["input_ids"]), labels, kinds, places)


def _pieces(row: Example, template: str) -> tuple[list[str | None], list[str]]:
    """The rendered literals and fields of the template, and the name of each field (None: a literal)."""
    names: list[str | None] = []
    pieces: list[str] = []
    for literal, name, spec, conversion in string.Formatter().parse(template):
        names.append(None)
        pieces.append(literal)
        if name is not None:
            form = f"{{{name}{f'!{conversion}' if conversion else ''}{f':{spec}' if spec else ''}}}"
            names.append(name)
            pieces.append(form.format_map(row))
    return names, pieces


def _segment(text: str, start: int, end: int, segment_of: list[int], names: list[str | None], before: int) -> int:
    """The segment of the token ``text[start:end]``: the first field that it shares a character with, else a literal."""
    written = [segment_of[c] for c in range(start, end) if not text[c].isspace()]
    # A token of spaces alone belongs where they stand; one of no characters goes with the token before it.
    segments = written or [segment_of[c] for c in range(start, end)] or [max(before, 0)]
    return next((segment for segment in segments if names[segment] is not None), segments[0])
