"""What transformers, accelerate and users of PEFT ask of a model, answered by the base."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .backbones import HookedBackbone
from .frozen import FrozenBase
from .runner import Runner


class PretrainedInterface(FrozenBase):
    """The part of :class:`capt.CaptModel` that trainers talk to."""

    _runner: Runner

    @property
    def config(self) -> Any:
        """The base's config."""
        return self.base.config

    @property
    def device(self) -> torch.device:
        return self.base.device

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @property
    def generation_config(self) -> Any:
        """The base's; of one that does not generate, None."""
        return getattr(self.base, "generation_config", None)

    def can_generate(self) -> bool:
        return self.base.can_generate()

    def get_input_embeddings(self) -> nn.Module:
        return self.base.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module | None:
        return self.base.get_output_embeddings()

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Backward recomputes the base's layers from the rows in front of them; slots are recomputed with them.

        Works on both backends, in training mode, as transformers has it.

        Args:
            activation_checkpointing_kwargs: of ``torch.utils.checkpoint.checkpoint``; ``use_reentrant`` is False unless
                given.
            options: ``every_n_layers`` and ``offload``, where the installed transformers knows them.

        Raises:
            NotImplementedError: a decoder that runs by hooks.
        """
        if isinstance(self._runner.reference, HookedBackbone):
            self._runner.reference.refuse_checkpointing()
        newer = getattr(self.base, "activation_checkpointing_enable", None)
        (newer or self.base.gradient_checkpointing_enable)(activation_checkpointing_kwargs, **options)

    def activation_checkpointing_disable(self) -> None:
        newer = getattr(self.base, "activation_checkpointing_disable", None)
        (newer or self.base.gradient_checkpointing_disable)()

    @property
    def is_activation_checkpointing(self) -> bool:
        """Whether it is on for any layer."""
        return any(getattr(module, "gradient_checkpointing", False) for module in self.base.modules())

    # Older names of the same three.

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    def gradient_checkpointing_disable(self) -> None:
        self.activation_checkpointing_disable()

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.is_activation_checkpointing

    @property
    def supports_gradient_checkpointing(self) -> bool:
        return self.base.supports_gradient_checkpointing

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """Number of trainable parameters, and of all."""
        parameters = list(self.parameters())
        return sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters)

    def print_trainable_parameters(self) -> None:
        """Prints both and their share, in the words PEFT uses."""
        trainable, total = self.get_nb_trainable_parameters()
        print(f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {100 * trainable / total:.4f}")
