"""An adapter as two files: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .backbones import Backbone
from .config import CaptConfig

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PEFT_TYPE = "CAPT"


def _base_facts(backbone: Backbone) -> dict[str, Any]:
    """What an adapter must find again in the base it is loaded into."""
    return {
        "base_model_type": backbone.config.model_type,
        "base_num_layers": backbone.num_layers,
        "base_hidden_size": backbone.width,
    }


def leave_base_out(model: nn.Module) -> None:
    """Makes ``model.state_dict()`` leave out ``model.base``, and ``model.load_state_dict()`` not ask for it.

    So whatever keeps a model by its state, transformers' Trainer for one, keeps the adapters and no base weight.
    """
    model.register_state_dict_post_hook(_drop_base)
    model.register_load_state_dict_pre_hook(_note_prefix)
    model.register_load_state_dict_post_hook(_forgive_base)


def _drop_base(model: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}base.")]:
        del state[name]


def _note_prefix(model: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    model._loading = f"{prefix}base."  # the hook behind loading is not told where in a larger module it is


def _forgive_base(model: Any, found: Any) -> None:
    found.missing_keys[:] = [name for name in found.missing_keys if not name.startswith(model._loading)]


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` with those that are sharded over processes gathered, which all processes do together."""
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}


def save(directory: Path, config: CaptConfig, tensors: dict[str, Tensor], backbone: Backbone) -> None:
    """Writes both files, each aside first and then moved into place."""
    directory.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": PEFT_TYPE, **config.to_dict(), **_base_facts(backbone)}
    with tempfile.TemporaryDirectory(dir=directory) as aside:
        save_file(
            {k: v.detach().cpu().contiguous() for k, v in tensors.items()}, Path(aside, WEIGHTS_FILE), {"format": "pt"}
        )
        Path(aside, CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n")
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            os.replace(Path(aside, name), directory / name)


def load(source: str | Path, backbone: Backbone) -> tuple[CaptConfig, dict[str, Tensor]]:
    """The config and tensors of an adapter in a folder, or in a hub repository of that id.

    Raises:
        ValueError: a file that is missing or corrupt, of another kind, or made for another base.
    """
    directory = _folder(source)
    path = directory / CONFIG_FILE
    try:
        fields = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(fields, dict) or fields.pop("peft_type", None) != PEFT_TYPE:
        raise ValueError(f"{path} does not describe a CaPT adapter (peft_type {PEFT_TYPE!r})")
    for name, found in _base_facts(backbone).items():
        saved = fields.pop(name, None)
        if saved != found:
            raise ValueError(f"the adapter in {directory} was made for {name} {saved!r}, the base has {found!r}")
    try:
        config = CaptConfig.from_dict(fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    weights = directory / WEIGHTS_FILE
    try:
        return config, load_file(weights)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{weights} is corrupt or truncated: {error}") from None


def _folder(source: str | Path) -> Path:
    directory = Path(source)
    if not directory.is_dir():
        if isinstance(source, Path) or source.count("/") > 1 or source.startswith((".", "/", "~")):
            raise ValueError(f"{source} is not a folder")
        try:
            directory = Path(snapshot_download(source, allow_patterns=[CONFIG_FILE, WEIGHTS_FILE]))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
            raise ValueError(
                f"{source} is neither a folder nor a hub repository that can be reached ({error})"
            ) from None
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (directory / name).is_file():
            hint = "; a Trainer's save_model writes no adapter, model.save_pretrained does"
            raise ValueError(
                f"{directory} holds no {name}{hint if (directory / 'model.safetensors').is_file() else ''}"
            )
    return directory


def fill(adapter: nn.Module, tensors: dict[str, Tensor], source: str | Path) -> None:
    """Copies ``tensors`` into the parameters of ``adapter``, whatever their dtype on file.

    Raises:
        ValueError: a tensor that is missing (the head's, say), not wanted, or of another shape.
    """
    wanted = adapter.state_dict()
    for problem, names in (("holds no", set(wanted) - set(tensors)), ("holds an unknown", set(tensors) - set(wanted))):
        if names:
            raise ValueError(f"the adapter in {source} {problem} {', '.join(sorted(names))}")
    for name, parameter in wanted.items():
        if tensors[name].shape != parameter.shape:
            raise ValueError(
                f"{name} in {source} has shape {tuple(tensors[name].shape)}, the base wants {tuple(parameter.shape)}"
            )
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(tensors[name])
