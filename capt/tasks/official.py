"""Rows of a published dataset: from a folder of its official jsonl files, or through ``datasets``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from .readers import Record, read_records


def official(folder: Path, name: str, split: str) -> Iterable[Record]:
    """Rows of ``<split>.jsonl`` in ``folder``, or in its subfolder ``name``.

    Where there is no such file, the only ``<split>_*.jsonl`` of the folder stands in, as CommonsenseQA names its files.

    Raises:
        FileNotFoundError: no such file. ValueError: several that would do, or what :func:`.read_records` raises.
    """
    for place in (folder, folder / name):
        if (place / f"{split}.jsonl").is_file():
            return read_records(place / f"{split}.jsonl")
        others = sorted(place.glob(f"{split}_*.jsonl"))
        if len(others) > 1:
            raise ValueError(
                f"data_dir has no {split}.jsonl in {place}, and several files that might stand in for it: "
                f"{', '.join(path.name for path in others)}"
            )
        if others:
            return read_records(others[0])
    tried = [folder / f"{split}.jsonl", folder / name / f"{split}.jsonl"]
    raise FileNotFoundError(f"data_dir has no {split} split: there is neither {tried[0]} nor {tried[1]}")


def hub(dataset: str, config: str | None, split: str) -> Iterable[Record]:
    """Rows of a split of a dataset on the hub.

    Raises:
        OSError: it cannot be had. ImportError: datasets is missing.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise ImportError("fetching a dataset needs datasets: pip install 'capt-kernels[train]'") from None

    try:
        rows = load_dataset(dataset, config, split=split)
    except OSError as error:
        raise OSError(f"{error}. Without a connection, data_dir names a folder in the official layout") from error
    name = dataset if config is None else f"{dataset} {config}"
    return ((f"{name}, {split} row {number}", row) for number, row in enumerate(rows))
