"""Adapters of one base: how they are made, picked, mixed in a batch, saved and loaded."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import heads, saving
from .backbones import HookedBackbone
from .capsules import Capsules
from .config import CaptConfig


def place_of(base: PreTrainedModel) -> dict[str, Any]:
    """Device and dtype of what trains beside ``base``: fp32, or fp64 on a base of that."""
    weight: Any = base.get_input_embeddings().weight
    # A base without storage gets it later; its weights are not looked at here.
    device = "cpu" if weight.is_meta else weight.device
    return {"device": device, "dtype": torch.float64 if weight.dtype == torch.float64 else torch.float32}


class Adapter(nn.Module):
    """One adapter: its capsules, and a head where its task has one that trains."""

    def __init__(self, config: CaptConfig, capsules: Capsules, head: nn.Module | None):
        super().__init__()
        self.config, self.capsules, self.head = config, capsules, head

    def kind(self) -> tuple[CaptConfig, list[torch.Size]]:
        """What adapters that share a batch have in common: the config but for its base's name, and shapes."""
        return replace(self.config, base_model_name_or_path=None), [p.shape for p in self.parameters()]

    def trainable(self) -> list[nn.Parameter]:
        """What trains when the adapter is active: all but the vectors of an instance-only adapter."""
        return [p for p in self.parameters() if self.config.task or p is not self.capsules.vectors]


class AdapterSet(nn.Module):
    """The part of :class:`capt.CaptModel` that keeps its adapters, one of them active.

    Attributes:
        adapters: by name.
        active_adapter: the name of the one that runs and trains.
    """

    base: Any
    adapters: nn.ModuleDict
    active_adapter: str
    _backbone: Any
    _enabled: bool

    def add_adapter(self, name: str, config: CaptConfig) -> None:
        """Adds a fresh adapter, frozen until :meth:`set_adapter` makes it the active one.

        Raises:
            ValueError: a name that is taken or not fit for a module, or a config that does not fit the base.
        """
        if isinstance(name, str) and name in self.adapters:
            raise ValueError(f"adapter {name!r} exists already; adapters: {', '.join(self.adapters)}")
        if not isinstance(name, str) or not name or "." in name or hasattr(self.adapters, name):
            raise ValueError(f"adapter_name must be a string that can name a torch submodule, got {name!r}")
        task = heads.infer_task(self.base, self._backbone, config)
        if isinstance(self._backbone, HookedBackbone):
            self._backbone.check(config)
            if task == "CAUSAL_LM" or config.label_words is not None:
                self._backbone.check_head(self.base)
        fields = config.to_dict() | {"task_type": task}
        if config.base_model_name_or_path is None:
            fields["base_model_name_or_path"] = getattr(self.base, "name_or_path", None) or None
        config = CaptConfig.from_dict(fields)
        capsules = Capsules(config, self._backbone.num_layers, self._backbone.width)
        adapter = Adapter(config, capsules, heads.make_head(self.base, self._backbone, task, config))
        self.adapters[name] = adapter.to(**place_of(self.base)).requires_grad_(False)

    def set_adapter(self, name: str) -> None:
        """Makes an adapter the active one, whose parameters train.

        Raises:
            ValueError: there is no such adapter.
        """
        self._adapter(name)
        self.active_adapter = name
        for other in self.adapters:
            for p in self._adapter(other).trainable():
                p.requires_grad_(other == name)

    def train(self, mode: bool = True) -> Self:
        """As torch has it. Warns where nothing would train, of which a backward pass later says less."""
        own = self._adapter(self.active_adapter).trainable()
        if mode and own and not any(p.requires_grad for p in own):
            warnings.warn(
                f"adapter {self.active_adapter!r} is frozen: load it with is_trainable=True, or call "
                f"set_adapter({self.active_adapter!r}), to train it",
                stacklevel=2,
            )
        return super().train(mode)

    def delete_adapter(self, name: str) -> None:
        """Removes an adapter that is not the active one.

        Raises:
            ValueError: there is no such adapter, or it is the active one.
        """
        self._adapter(name)
        if name == self.active_adapter:
            raise ValueError(f"adapter {name!r} is the active one: set_adapter another first")
        del self.adapters[name]

    def _adapter(self, name: str) -> Any:
        if name not in self.adapters:
            raise ValueError(f"there is no adapter {name!r}; adapters: {', '.join(self.adapters)}")
        return self.adapters[name]

    @property
    def capt_config(self) -> CaptConfig:
        """The active adapter's config."""
        return self._adapter(self.active_adapter).config

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Inside, the model is the bare base, bit for bit; label words and their head's logits are still picked."""
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    def _chosen(self, names: Sequence[str] | None, batch: int) -> tuple[list[Adapter], Tensor | None]:
        """The adapters of a batch, and which of them each sequence takes (None: the one there is)."""
        if names is None:
            return [self._adapter(self.active_adapter)], None
        if len(names) != batch:
            raise ValueError(f"adapter_names must name one adapter for each of the {batch} sequences, got {len(names)}")
        unique = list(dict.fromkeys(names))
        chosen = [self._adapter(name) for name in unique]
        for name, adapter in zip(unique, chosen, strict=True):
            if adapter.kind() != chosen[0].kind():
                raise ValueError(
                    f"adapters mixed in one batch must have equal configs and heads; {unique[0]!r} and {name!r} differ"
                )
        index = torch.tensor([unique.index(name) for name in names])
        return chosen, index.to(chosen[0].capsules.vectors.device)

    def save_pretrained(self, directory: str | Path, is_main_process: bool = True) -> None:
        """Writes the active adapter: ``adapter_config.json`` and ``adapter_model.safetensors``, nothing of the base.

        Args:
            is_main_process: whether this process writes. Where FSDP shards the vectors every process has to call, since
                each holds a part of them.
        """
        adapter = self._adapter(self.active_adapter)
        tensors = saving.whole(adapter.state_dict())
        if is_main_process:
            saving.save(Path(directory), adapter.config, tensors, self._backbone)

    def load_adapter(self, directory: str | Path, adapter_name: str, is_trainable: bool = False) -> None:
        """Adds an adapter from a folder or a hub id; with ``is_trainable`` it becomes the active one.

        Errors as :meth:`from_pretrained`.
        """
        config, tensors = saving.load(directory, self._backbone)
        self.add_adapter(adapter_name, config)
        try:
            saving.fill(self._adapter(adapter_name), tensors, directory)
        except ValueError:
            del self.adapters[adapter_name]
            raise
        if is_trainable:
            self.set_adapter(adapter_name)
