"""CaptModel: a frozen transformers model with capsules between its layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from capt_kernels.validation import check_shape

from . import generation, heads, saving
from .adapters import Adapter, AdapterSet
from .backbones import backbones_of
from .capsules import MixedCapsules
from .config import CaptConfig
from .inputs import check_fit, present, the_input, warn_of_empty_pools
from .layout import Rows
from .pretrained import PretrainedInterface
from .runner import Runner, RunnerOptions


class CaptModel(AdapterSet, RunnerOptions, PretrainedInterface):
    """A frozen base with capsule adapters, one active. Made by :func:`get_capt_model` or :meth:`from_pretrained`.

    Args:
        base: a transformers model of a supported family. Its parameters are frozen in place; :meth:`unload` undoes
            that.
        config: of the first adapter.
        adapter_name: of the first adapter.

    Attributes:
        backend: ``"reference"`` runs the base's own layers on padded rows and overwrites the slots between them;
            ``"fused"`` runs packed rows through capt_kernels; ``"auto"`` takes the fastest that the base has.
        memory: what the fused backend keeps for its backward. ``"full"``: each row that it needs, once. ``"min"``:
            at most half of that, since gate and up of each layer (of T5, and where they are not the larger half, what
            attention makes of q, k and v as well) are computed again. The layers' matrix products grow to 1.25 times
            theirs (Llama at 3 heads to a key head and 2.7 times the width between gate and down), 1.22 (T5 v1.1), 1.21
            (T5 v1.0), for 0.47, 0.45 and 0.41 of the bytes. :meth:`gradient_checkpointing_enable` keeps less (0.12)
            and computes more (1.33 to 1.39 times), and works on the reference backend, which ``"min"`` does not.
    """

    base: Any

    def __init__(self, base: PreTrainedModel, config: CaptConfig, adapter_name: str = "default"):
        super().__init__()
        self._runner = Runner(base)
        self._backbone = self._runner.reference
        self.base = base
        self.adapters = nn.ModuleDict()
        self._enabled, self._pool_seen = True, False
        saving.leave_base_out(self)
        self.add_adapter(adapter_name, config)
        # Last, so that a config that does not fit leaves the caller's base as it was.
        self._freeze(base)
        self.set_adapter(adapter_name)

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
    def _positions(self) -> str:
        return self.capt_config.positions

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
        token_type_ids: Tensor | None = None,
    ) -> ModelOutput:
        """Runs the base with the active adapter's capsules; without any inside :meth:`disable_adapter`, where
        ``adapter_names`` and ``pool_mask`` are checked and change nothing.

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
            token_type_ids: ``[B, T]`` segment of each token (BERT and its kin only); None: all 0.

        Returns:
            A transformers output: ``last_hidden_state [B, T, D]`` or ``logits``, and ``loss`` with labels. The slot is
            stripped, padding positions are 0.

        Raises:
            ValueError: arguments that do not fit each other.
        """
        given = the_input(input_ids, inputs_embeds)
        shape = tuple(given.shape[:2])
        per_token = present(attention_mask=attention_mask, pool_mask=pool_mask, token_type_ids=token_type_ids)
        decoder = present(decoder_input_ids=decoder_input_ids, decoder_attention_mask=decoder_attention_mask)
        check_fit(self.base, self._backbone, shape, per_token, decoder)
        chosen, index = self._chosen(adapter_names, shape[0])
        if not self._enabled:
            inputs = present(
                input_ids=input_ids,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                token_type_ids=token_type_ids,
            )
            return heads.bare(self.base, self._backbone, self.capt_config, inputs | decoder, labels)

        config = chosen[0].config
        if config.task_type == "CAUSAL_LM" and labels is not None:
            check_shape("labels", labels, shape, "[B, T]")
            if pool_mask is None:
                pool_mask = labels == -100
                if self.training and config.instance and not (self._pool_seen or torch.compiler.is_compiling()):
                    self._pool_seen = True  # once, as the look stalls a GPU
                    warn_of_empty_pools(pool_mask, attention_mask)
        rows = self._run(chosen, index, given, attention_mask, pool_mask, token_types=token_type_ids)
        trained = [a.head for a in chosen]
        if return_logits is None:
            return_logits = labels is None or not self.training
        return heads.output(
            self.base, self._backbone, config, trained, index, rows, input_ids, labels, decoder, return_logits
        )

    def _run(
        self,
        chosen: list[Adapter],
        index: Tensor | None,
        given: Tensor,
        mask: Tensor | None,
        pool_mask: Tensor | None,
        slots: list[Tensor] | None = None,
        token_types: Tensor | None = None,
    ) -> Rows:
        """:meth:`.Runner.run` with the capsules of the batch's adapters."""
        own = [a.capsules for a in chosen]
        capsules = own[0] if index is None else MixedCapsules(own, index)
        return self._runner.run(capsules, given, mask, pool_mask, slots, token_types)

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        adapter_names: Sequence[str] | None = None,
        **options: Any,
    ) -> Any:
        """Generates as the base does, with the slots computed once from the prompts and kept.

        Args:
            input_ids: ``[B, T]`` prompts, padded on the left. attention_mask: ``[B, T]``, 1 = real; None: all real.
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
            self._chosen(adapter_names, len(input_ids))
            return self.base.generate(input_ids=input_ids, attention_mask=attention_mask, **options)
        return generation.generate(self, the_input(input_ids, None), attention_mask, adapter_names, options)

    # --- files

    @classmethod
    def from_pretrained(
        cls, base: PreTrainedModel, directory: str | Path, adapter_name: str = "default", is_trainable: bool = False
    ) -> CaptModel:
        """``base`` with an adapter from a folder, or from a model hub by its id.

        Args:
            is_trainable: whether the adapter is to train on. Else it is frozen, and the model with its base in eval
                mode, as in PEFT.

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
            model.eval()
        return model


def get_capt_model(base: PreTrainedModel, config: CaptConfig, adapter_name: str = "default") -> CaptModel:
    """Freezes ``base`` and puts a fresh capsule adapter on it.

    Args:
        base: a transformers Llama, Mistral, Qwen2, Qwen3, T5, BERT, RoBERTa, XLM-RoBERTa or CamemBERT model, with or
            without a head; or another causal decoder, which runs on the reference backend.
        config: see :class:`CaptConfig`.
        adapter_name: a name for the adapter.

    Raises:
        ValueError: a config that does not fit the base. NotImplementedError: a family that is not supported.
    """
    if not isinstance(config, CaptConfig):
        raise ValueError(f"config must be a CaptConfig, got {type(config).__name__}")
    return CaptModel(base, config, adapter_name)
