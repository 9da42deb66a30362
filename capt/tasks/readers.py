"""Rows of JSON Lines, CSV and TSV files, each with the place to name when something is wrong with it."""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from .task import Example, example

#: (where it stands, what it holds)
Record = tuple[str, dict[str, Any]]

# A field may be a whole document; the module's own limit is 128 KiB.
csv.field_size_limit(1 << 30)


def read_records(path: Path) -> Iterator[Record]:
    """The rows of a ``.jsonl``, ``.csv`` or ``.tsv`` file (UTF-8, with or without a byte-order mark).

    Raises:
        ValueError: another kind of file, an empty one, or a malformed line; names the file and the line.
        FileNotFoundError: there is no such file.
    """
    readers = {".jsonl": read_jsonl, ".csv": _read_csv, ".tsv": _read_csv}
    if path.suffix.lower() not in readers:
        raise ValueError(f"{path}: a file must end in {', '.join(readers)}, got {path.suffix or 'no ending'!r}")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    empty = True
    for record in readers[path.suffix.lower()](path):
        empty = False
        yield record
    if empty:
        raise ValueError(f"{path}: the file holds no rows")


def read_jsonl(path: Path) -> Iterator[Record]:
    """One JSON object a line; blank lines are passed over."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in _lines(file, path):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON: {error.msg} at column {error.colno}") from None
            except (ValueError, RecursionError) as error:  # a number of thousands of digits, as many brackets
                raise ValueError(f"{path}, line {number}: not read as JSON: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: a JSON object is wanted, got {type(row).__name__}")
            yield f"{path}, line {number}", row


def _read_csv(path: Path) -> Iterator[Record]:
    # Not through pandas or datasets: they guess types, so a text "NA" becomes missing and a label "01" the number 1.
    with path.open(encoding="utf-8-sig", newline="") as file:
        delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
        reader = csv.reader((line for _, line in _lines(file, path)), delimiter=delimiter, strict=True)
        header: list[str] | None = None
        while True:
            line = reader.line_num + 1
            try:
                row = next(reader, None)
            except csv.Error as error:
                raise ValueError(f"{path}, line {line}: {error}") from None
            if row is None:
                return
            if not row:
                continue
            if header is None:
                header = row
                # Unnamed ones are what a spreadsheet leaves behind.
                twice = sorted({name for name in row if name and row.count(name) > 1})
                if twice:
                    raise ValueError(f"{path}, line {line}: there are several columns {', '.join(map(repr, twice))}")
            elif len(row) != len(header):
                raise ValueError(
                    f"{path}, line {line}: {len(header)} columns are wanted as in the header, got {len(row)}"
                )
            else:
                yield f"{path}, line {line}", dict(zip(header, row, strict=True))


def _lines(file: TextIO, path: Path) -> Iterator[tuple[int, str]]:
    number = 1
    try:
        for line in file:
            yield number, line
            number += 1
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line {number} or soon after: not UTF-8: {error.reason}") from None


def read_examples(
    path: Path, columns: Mapping[str, str], label_column: str | None, labels: Collection[str] | None = None
) -> list[Example]:
    """Examples of a file's rows: field ``name`` out of column ``columns[name]``, the label out of ``label_column``.

    ``label_column=None`` reads unlabelled texts. A label may be a string, an integer or a truth value; ``labels`` are
    those allowed, None for all.

    Raises:
        ValueError: a column that is not there, an empty text, a label not allowed, a value of another kind; names the
            file and the line.
    """
    examples = []
    for where, row in read_records(path):
        for column in (*columns.values(), *([] if label_column is None else [label_column])):
            if column not in row:
                raise ValueError(f"{where}: there is no column {column!r}; there are {', '.join(map(repr, row))}")
        fields = {name: text_of(row[column], f"{where}: {column}") for name, column in columns.items()}
        label = None
        if label_column is not None:
            label = label_of(row[label_column], f"{where}: {label_column}")
            check_label(label, labels, where)
        examples.append(example(fields, label, where))
    return examples


def text_of(value: Any, what: str) -> str:
    """``value`` if it is a string, else a ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a string, got {value!r}")
    return value


def check_label(label: str, labels: Collection[str] | None, where: str) -> None:
    """``label`` must be one of ``labels``, where these are given."""
    if labels is not None and label not in labels:
        raise ValueError(f"{where}: label {label!r} is none of the task's, which are {', '.join(labels)}")


def label_of(value: Any, what: str) -> str:
    """A label's name."""
    if not isinstance(value, str | int) or value == "":
        raise ValueError(f"{what} must be a non-empty string, an integer or a truth value, got {value!r}")
    return str(value)
