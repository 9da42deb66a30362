"""Results appear whole or not at all: they are written aside, then moved into place."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A path to write a file or folder to; it becomes ``path`` when the block ends, and vanishes if the block raises.

    It lies in the folder of ``path``, since a move is atomic within one file system only.

    Raises:
        IsADirectoryError: ``path`` is a folder and what was written is a file, which is not to replace it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as aside:
        target = Path(aside) / path.name
        yield target
        if path.is_dir() and not target.is_dir():
            raise IsADirectoryError(f"{path} is a folder, where a file is to be written")
        if path.is_dir():  # a folder cannot be moved over a folder that holds files
            os.replace(path, Path(aside) / "replaced")
        os.replace(target, path)


def write_json(path: Path, content: Any) -> None:
    """``content`` as indented JSON at ``path``, staged; numbers that are not finite, which JSON lacks, become null."""
    with staged(path) as target:
        text = json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False)
        target.write_text(text + "\n", encoding="utf-8")


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
