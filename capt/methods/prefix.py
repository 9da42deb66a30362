"""P-Tuning v2 (Liu et al., arXiv 2110.07602): trained keys and values in front of every layer's own.

PEFT has it for decoders, through a cache of past keys, which does not reach T5's encoder and which BERT lacks. Here it
runs on both backbones of every family that CaPT runs on, so that the methods are compared on one engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import ModelOutput

from .. import heads
from ..adapters import place_of
from ..config import CaptConfig
from ..generation import write_from
from ..inputs import check_fit, present, the_input
from ..layout import Rows
from ..pretrained import PretrainedInterface
from ..runner import Runner, RunnerOptions


class PrefixModel(RunnerOptions, PretrainedInterface):
    """A frozen base whose every layer attends to P trained keys and values in front of a sequence.

    As in transformers' caches, on which others build it: a prefix has positions 0 .. P-1 and tokens follow; rotary does
    not turn its keys; a sliding window and T5's relative bias (of the encoder, the only prompted stack) see it there.

    Args:
        base: a transformers model of a family that :func:`capt.get_capt_model` takes; frozen in place until
            :meth:`unload`.
        length: P, keys and values a layer.
        task_type, label_words: as in :class:`capt.CaptConfig`.
        init_std: of the normal distribution that keys and values start from; 1 is an embedding's default, as published.

    Attributes:
        keys, values: ``[N, P, Hkv, d]``, fp32. head: of "SEQ_CLS" without label words.
        backend, memory: as of :class:`capt.CaptModel`.

    Raises:
        ValueError: an argument that does not fit the base. NotImplementedError: a family that is not supported.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        length: int = 20,
        *,
        task_type: str | None = None,
        label_words: Sequence[int] | None = None,
        init_std: float = 1.0,
    ):
        super().__init__()
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(f"length must be a positive int, got {length!r}")
        self._runner = Runner(base)
        backbone = self._runner.reference
        if self._runner.packed is None:
            raise NotImplementedError(f"P-Tuning v2 is not written for bases of model_type {base.config.model_type!r}")
        words = None if label_words is None else tuple(label_words)
        asked = CaptConfig(task_type=task_type, label_words=words)
        task = heads.infer_task(base, backbone, asked)
        self._config = CaptConfig(task_type=task, label_words=words)
        shape = (backbone.num_layers, length, *_key_heads(backbone.config))
        self.keys, self.values = (nn.Parameter(torch.empty(shape).normal_(std=init_std)) for _ in range(2))
        self.head = heads.make_head(base, backbone, task, self._config)
        self.to(**place_of(base))
        self._freeze(base)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        return_logits: bool | None = None,
        token_type_ids: Tensor | None = None,
    ) -> ModelOutput:
        """Arguments, output and errors are those of :meth:`capt.CaptModel.forward`."""
        given, backbone = the_input(input_ids, inputs_embeds), self._runner.reference
        per_token = present(attention_mask=attention_mask, token_type_ids=token_type_ids)
        if labels is not None and self._config.task_type == "CAUSAL_LM":
            per_token["labels"] = labels
        decoder = present(decoder_input_ids=decoder_input_ids, decoder_attention_mask=decoder_attention_mask)
        check_fit(self.base, backbone, tuple(given.shape[:2]), per_token, decoder)
        rows = self._run(given, attention_mask, token_type_ids)
        if return_logits is None:
            return_logits = labels is None or not self.training
        return heads.output(
            self.base, backbone, self._config, [self.head], None, rows, input_ids, labels, decoder, return_logits
        )

    def _run(self, given: Tensor, mask: Tensor | None, token_types: Tensor | None = None) -> Rows:
        prefixes = list(zip(self.keys, self.values, strict=True))
        return self._runner.run(None, given, mask, None, token_types=token_types, prefixes=prefixes)

    @torch.no_grad()
    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Any:
        """Generates as the base does, an encoder-decoder's decoder from what its prefixed encoder read.

        Raises:
            NotImplementedError: a decoder, whose prefix would have to stand in the caller's cache.
        """
        if not self._runner.reference.is_encoder_decoder:
            raise NotImplementedError(
                f"P-Tuning v2 of {type(self.base).__name__} does not generate here, as its prefix would have to stand "
                "in the cache; PEFT's PrefixTuningConfig does"
            )
        rows = self._run(the_input(input_ids, None), attention_mask)
        return write_from(self.base, rows, True, input_ids, options)

    @property
    def slots(self) -> int:
        """Positions that the prefix takes from a text: P of BERT, whose positions are a table of so many; else none."""
        return self.keys.shape[1] if self._runner.reference.has_token_types else 0


def _key_heads(config: Any) -> tuple[int, int]:
    """Key heads of a layer, and their size."""
    heads_of_queries = config.num_attention_heads
    size = getattr(config, "d_kv", None) or getattr(config, "head_dim", None)
    return (
        getattr(config, "num_key_value_heads", None) or heads_of_queries,
        size or config.hidden_size // heads_of_queries,
    )
