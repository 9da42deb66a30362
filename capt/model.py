"""CaptModel: a frozen transformers model with capsules between its layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from capt_kernels.validation import check_shape

from . import generation, heads, saving
from .backbones import backbones_of
from .capsules import Capsules, MixedCapsules
from .config import CaptConfig
from .runner import BACKENDS, Runner


class Adapter(nn.Module):
    """One adapter: its capsules, and a head where its task has one that trains."""

    def __init__(self, config: CaptConfig, capsules: Capsules, head: nn.Module | None):
        super().__init__()
        self.config, self.capsules, self.head = config, capsules, head

    def trainable(self) -> list[nn.Parameter]:
        """What trains when the adapter is active: all but the vectors of an instance-only adapter."""
        return [p for p in self.parameters() if self.config.task or p is not self.capsules.vectors]


class CaptModel(nn.Module):
    """A frozen base with capsule adapters, one active. Made by :func:`get_capt_model` or :meth:`from_pretrained`.

    Args:
        base: a transformers model of a supported family. Its parameters are frozen in place; :meth:`unload` undoes
            that.
        config: of the first adapter.
        adapter_name: of the first adapter.

    Attributes:
        backend: ``"reference"`` runs the base's own layers on padded rows and overwrites the slots between them;
            ``"fused"`` runs packed rows through capt_kernels; ``"auto"`` takes the fastest that the base has.
    """

    base: Any

    def __init__(self, base: PreTrainedModel, config: CaptConfig, adapter_name: str = "default"):
        super().__init__()
        self._runner = Runner(base)
        self._backbone = self._runner.reference
        self.base = base
        self.adapters = nn.ModuleDict()
        self._enabled = True
        self.add_adapter(adapter_name, config)
        # Last, so that a config that does not fit leaves the caller's base as it was.
        self._thawed = [p for p in base.parameters() if p.requires_grad]
        base.requires_grad_(False)
        self.set_adapter(adapter_name)

    # --- adapters

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
        fields = config.to_dict() | {"task_type": task}
        if config.base_model_name_or_path is None:
            fields["base_model_name_or_path"] = getattr(self.base, "name_or_path", None) or None
        config = CaptConfig.from_dict(fields)
        capsules = Capsules(config, self._backbone.num_layers, self._backbone.width)
        adapter = Adapter(config, capsules, heads.make_head(self.base, self._backbone, task, config))
        weight: Any = self.base.get_input_embeddings().weight
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.adapters[name] = adapter.to(device=weight.device, dtype=wide).requires_grad_(False)

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

    def unload(self) -> PreTrainedModel:
        """The base as it was given, with the parameters trainable that were."""
        for p in self._thawed:
            p.requires_grad_(True)
        return self.base

    def merge_and_unload(self) -> NoReturn:
        """Impossible.

        Raises:
            NotImplementedError: always; the message says why.
        """
        raise NotImplementedError(
            "a capsule cannot be merged into the base's weights: it is a row of the sequence that depends on the "
            "input's own mean. unload() returns the base without it"
        )

    # --- running

    @property
    def backend(self) -> str:
        return self._runner.backend

    @backend.setter
    def backend(self, name: str) -> None:
        if name not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {name!r}")
        before, self._runner.backend = self._runner.backend, name
        try:
            self._runner.choose(self.capt_config.positions)
        except NotImplementedError:
            self._runner.backend = before
            raise

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        pool_mask: Tensor | None = None,
        adapter_names: Sequence[str] | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        return_logits: bool | None = None,
    ) -> ModelOutput:
        """Runs the base with the active adapter's capsules.

        Args:
            input_ids: ``[B, T]``, or inputs_embeds: ``[B, T, D]``; exactly one of the two.
            attention_mask: ``[B, T]``, 1 = real, padding on any side, holes allowed; None: all real.
            labels: CAUSAL_LM: ``[B, T]`` next-token labels, -100 = none. SEQ_CLS: ``[B]`` class ids. SEQ_2_SEQ_LM: the
                decoder's labels.
            pool_mask: ``[B, T]``: tokens that may enter the mean. None: every real token; with CAUSAL_LM labels, those
                without a label, since a mean over the answer would tell it to every position.
            adapter_names: one adapter a sequence, in place of the active one; their configs must be equal.
            decoder_input_ids, decoder_attention_mask: as the base takes them (encoder-decoders only).
            return_logits: whether CAUSAL_LM returns logits ``[B, T, V]``. None: not in training with labels, where only
                labelled positions go through the head.

        Returns:
            A transformers output: ``last_hidden_state [B, T, D]`` or ``logits``, and ``loss`` with labels. The slot is
            stripped, padding positions are 0.

        Raises:
            ValueError: arguments that do not fit each other.
        """
        given = _the_input(input_ids, inputs_embeds)
        shape = tuple(given.shape[:2])
        for name, mask in (("attention_mask", attention_mask), ("pool_mask", pool_mask)):
            if mask is not None:
                check_shape(name, mask, shape, "[B, T]")
        decoder = _present(decoder_input_ids=decoder_input_ids, decoder_attention_mask=decoder_attention_mask)
        if decoder and not self._backbone.is_encoder_decoder:
            raise ValueError(
                f"{', '.join(decoder)} given to {type(self.base).__name__}, which has no decoder of its own"
            )
        if not self._enabled:
            inputs = _present(input_ids=input_ids, inputs_embeds=inputs_embeds, attention_mask=attention_mask)
            return heads.bare(self.base, self._backbone, self.capt_config, inputs | decoder, labels)

        chosen, index = self._chosen(adapter_names, shape[0])
        config = chosen[0].config
        if config.task_type == "CAUSAL_LM" and labels is not None:
            check_shape("labels", labels, shape, "[B, T]")
            if pool_mask is None:
                pool_mask = labels == -100
        rows = self._run(chosen, index, given, attention_mask, pool_mask)
        trained = [a.head for a in chosen]
        if return_logits is None:
            return_logits = labels is None or not self.training
        return heads.output(
            self.base, self._backbone, config, trained, index, rows, input_ids, labels, decoder, return_logits
        )

    def _chosen(self, names: Sequence[str] | None, batch: int) -> tuple[list[Adapter], Tensor | None]:
        """The adapters of a batch, and which of them each sequence takes (None: the one there is)."""
        if names is None:
            return [self._adapter(self.active_adapter)], None
        if len(names) != batch:
            raise ValueError(f"adapter_names must name one adapter for each of the {batch} sequences, got {len(names)}")
        unique = list(dict.fromkeys(names))
        chosen = [self._adapter(name) for name in unique]
        for name, adapter in zip(unique, chosen, strict=True):
            if adapter.config != chosen[0].config:
                raise ValueError(
                    f"adapters mixed in one batch must have equal configs; {unique[0]!r} and {name!r} differ"
                )
        index = torch.tensor([unique.index(name) for name in names])
        return chosen, index.to(chosen[0].capsules.vectors.device)

    def _run(
        self,
        chosen: list[Adapter],
        index: Tensor | None,
        given: Tensor,
        mask: Tensor | None,
        pool_mask: Tensor | None,
        slots: list[Tensor] | None = None,
    ) -> heads.Rows:
        """:meth:`.Runner.run` with the capsules of the batch's adapters."""
        own = [a.capsules for a in chosen]
        return self._runner.run(own[0] if index is None else MixedCapsules(own, index), given, mask, pool_mask, slots)

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        adapter_names: Sequence[str] | None = None,
        **options: Any,
    ) -> Any:
        """Generates as the base does, with the slots computed once from the prompts and kept.

        Args:
            input_ids: ``[B, T]`` prompts, padded on the left. attention_mask: ``[B, T]``, 1 = real.
            adapter_names: one adapter a prompt, in place of the active one.
            options: as transformers' ``generate`` takes them: ``max_new_tokens``, ``num_beams``, ``do_sample``,
                ``cache_implementation``, ...

        Returns:
            What transformers' ``generate`` returns: ids ``[B, T + new]``, or its output object.

        Raises:
            ValueError: prompts padded on the right.
            NotImplementedError: a way to generate, or an adapter, whose slots cannot be kept in the cache; says why.
        """
        if not self._enabled:
            return self.base.generate(input_ids=input_ids, attention_mask=attention_mask, **options)
        return generation.generate(self, _the_input(input_ids, None), attention_mask, adapter_names, options)

    # --- what transformers and accelerate ask of a model

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

    def get_input_embeddings(self) -> nn.Module:
        return self.base.get_input_embeddings()

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """The base's layers recompute themselves in backward; slots are written outside of them and are kept."""
        self.base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=gradient_checkpointing_kwargs)

    def gradient_checkpointing_disable(self) -> None:
        self.base.gradient_checkpointing_disable()

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """Number of trainable parameters, and of all."""
        parameters = list(self.parameters())
        return sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters)

    def print_trainable_parameters(self) -> None:
        """Prints both and their share, in the words PEFT uses."""
        trainable, total = self.get_nb_trainable_parameters()
        print(f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {100 * trainable / total:.4f}")

    # --- files

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes the active adapter: ``adapter_config.json`` and ``adapter_model.safetensors``, nothing of the base."""
        adapter = self._adapter(self.active_adapter)
        saving.save(Path(directory), adapter.config, adapter.state_dict(), self._backbone)

    @classmethod
    def from_pretrained(
        cls, base: PreTrainedModel, directory: str | Path, adapter_name: str = "default", is_trainable: bool = False
    ) -> CaptModel:
        """``base`` with an adapter from a folder, or from a model hub by its id.

        Raises:
            ValueError: a file that is missing, corrupt, incomplete or made for another base; it names both sides.
        """
        config, tensors = saving.load(directory, backbones_of(base)[0])
        model = cls(base, config, adapter_name)
        try:
            saving.fill(model._adapter(adapter_name), tensors, directory)
        except ValueError:
            model.unload()
            raise
        if not is_trainable:
            model._adapter(adapter_name).requires_grad_(False)
        return model

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


def _present(**tensors: Tensor | None) -> dict[str, Tensor]:
    """Those that were given."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _the_input(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """Whichever of the two was given, its shape checked."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("exactly one of input_ids [B, T] and inputs_embeds [B, T, D] must be given")
    if inputs_embeds is not None:
        if inputs_embeds.dim() != 3:
            raise ValueError(f"inputs_embeds must have shape [B, T, D], got {tuple(inputs_embeds.shape)}")
        return inputs_embeds
    assert input_ids is not None
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids must have shape [B, T], got {tuple(input_ids.shape)}")
    return input_ids


def get_capt_model(base: PreTrainedModel, config: CaptConfig, adapter_name: str = "default") -> CaptModel:
    """Freezes ``base`` and puts a fresh capsule adapter on it.

    Args:
        base: a transformers Llama, Mistral, Qwen2, Qwen3 or T5 model, with or without a head.
        config: see :class:`CaptConfig`.
        adapter_name: a name for the adapter.

    Raises:
        ValueError: a config that does not fit the base. NotImplementedError: a family that is not supported.
    """
    if not isinstance(config, CaptConfig):
        raise ValueError(f"config must be a CaptConfig, got {type(config).__name__}")
    return CaptModel(base, config, adapter_name)
