"""MultiRC's records as one row an answer, whether they come nested by passage (official) or flat (hub)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from .readers import Record


def one_answer_a_row(records: Iterable[Record]) -> Iterator[Record]:
    """Rows of ``paragraph``, ``question``, ``answer``, ``label`` and the ``group`` they are scored in, the question.

    Raises:
        ValueError: a record of another build; names its file and line and the part.
    """
    for number, (where, record) in enumerate(records):
        if "passage" not in record:
            yield where, {**record, "group": _group_of_flat(record, where)}
            continue
        passage = _part(record, "passage", dict, where)
        for q, question in enumerate(_part(passage, "questions", list, f"{where}: passage")):
            place = f"{where}: question {q + 1}"
            for a, answer in enumerate(_part(question, "answers", list, place), start=1):
                row = {
                    "paragraph": _part(passage, "text", str, f"{where}: passage"),
                    "question": _part(question, "question", str, place),
                    "answer": _part(answer, "text", str, f"{place}, answer {a}"),
                    "group": f"{number}-{q}",
                }
                yield f"{place}, answer {a}", row | ({"label": answer["label"]} if "label" in answer else {})


def _group_of_flat(record: dict[str, Any], where: str) -> str:
    index = _part(record, "idx", dict, where)
    return f"{_part(index, 'paragraph', int, f'{where}: idx')}-{_part(index, 'question', int, f'{where}: idx')}"


def _part(holder: Any, name: str, kind: type, where: str) -> Any:
    if not isinstance(holder, dict) or not isinstance(holder.get(name), kind):
        found = f"{name!r} is {holder.get(name)!r}" if isinstance(holder, dict) else f"got {holder!r}"
        raise ValueError(f"{where}: an object with a {kind.__name__} {name!r} is wanted, {found[:80]}")
    return holder[name]
