"""Any other causal decoder of transformers: run by its own forward, slots written in front of its layers by hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from ..config import CaptConfig
from ..layout import Layout
from .hooks import rewriting


class HookedBackbone:
    """Runs a decoder that no backbone here was written for, where its forward can be told what its layers read.

    Raises:
        NotImplementedError: ``base`` is no such decoder.
    """

    is_encoder_decoder = False
    is_causal = True
    has_token_types = False

    def __init__(self, base: PreTrainedModel):
        self.stack = cast(Any, base.base_model)
        self.config = self.stack.config
        kind = self.config.model_type
        blocks = next((m for m in (getattr(self.stack, n, None) for n in ("layers", "h")) if m is not None), None)
        decoder = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES
        if not decoder or self.config.is_encoder_decoder or not isinstance(blocks, nn.ModuleList):
            raise NotImplementedError(
                f"bases of model_type {kind!r} are not supported: no backbone is written for them, and "
                f"{type(self.stack).__name__} is no causal decoder with its layers in .layers or .h, which needs none"
            )
        self.blocks = blocks
        self.num_layers = len(blocks)
        self.width: int = self.config.hidden_size

    def check_head(self, base: Any) -> None:
        """Whether the head's Linear alone makes the base's logits, as it is called here.

        Raises:
            NotImplementedError: the base scales or caps them.
        """
        head = base.get_output_embeddings()
        if head.weight.is_meta:
            return
        modes = {module: module.training for module in base.modules()}
        base.eval()
        try:
            with torch.no_grad():
                ids = torch.arange(2, device=base.device)[None]
                want = base(input_ids=ids).logits.float()
                got = head(self.stack(input_ids=ids).last_hidden_state).float()
        finally:
            for module, training in modes.items():
                module.training = training
        close = (got - want).abs().max() <= 10 * torch.finfo(head.weight.dtype).eps * want.abs().max()
        # A cap leaves small logits nearly as they are.
        if getattr(self.config, "final_logit_softcapping", None) or not close:
            raise NotImplementedError(
                f"{type(base).__name__} changes its logits behind its language-model head, which nothing here knows "
                "of; a linear head (task_type 'SEQ_CLS') reads none"
            )

    def check(self, config: CaptConfig) -> None:
        """Whether slots can be written as ``config`` asks.

        Raises:
            NotImplementedError: says why not.
        """
        if config.prompted_layers(self.num_layers)[0] != 0:
            raise NotImplementedError(
                f"a base of model_type {self.config.model_type!r} runs with slots from its first layer on, "
                f"got depth {config.depth!r}"
            )
        if config.positions != "shift":
            raise NotImplementedError(
                f"a base of model_type {self.config.model_type!r} counts positions itself, slots too ('shift'), "
                f"got positions {config.positions!r}"
            )

    def refuse_checkpointing(self) -> NoReturn:
        """Raises NotImplementedError: hooks are gone when backward runs a layer again."""
        raise NotImplementedError(
            f"gradient checkpointing would run the layers of a {self.config.model_type!r} again without their slots"
        )

    def run(
        self, given: Tensor, layout: Layout, write: dict[int, Callable[[Tensor, Layout], Tensor]], slots: int, lead: int
    ) -> tuple[Tensor, Layout]:
        """The whole stack.

        Args:
            given: ids ``[N]`` or embeddings ``[N, D]`` of a packed batch without slots. layout: its.
            write: by layer, makes of rows ``[R, D]`` with slots the rows that the layer is to read.
            slots, lead: of the batch that the layers see.

        Returns:
            Rows ``[R, D]`` behind the last norm, and their layout.

        Raises:
            NotImplementedError: gradient checkpointing is on.
        """
        if self.stack.training and any(getattr(m, "gradient_checkpointing", False) for m in self.stack.modules()):
            self.refuse_checkpointing()
        rows = self.stack.get_input_embeddings()(given) if given.dim() == 1 else given
        grown = layout.grown(slots, lead)
        rows = rows.new_zeros(len(rows) + grown.slot_rows.numel(), self.width).index_copy(0, grown.token_rows, rows)

        def rewrite(due: Callable[[Tensor, Layout], Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda hidden: grown.pad(due(grown.unpad(hidden), grown))

        with rewriting(self.blocks, {i: rewrite(due) for i, due in write.items()}):
            done = self.stack(inputs_embeds=grown.pad(rows), attention_mask=grown.mask.long(), use_cache=False)
        return grown.unpad(done.last_hidden_state), grown
