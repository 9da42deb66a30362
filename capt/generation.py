"""generate() with a capsule: slots computed once from the prompt, then transformers' own generation.

A prompt is run once to learn what its slots hold in front of every prompted layer. Then the base generates from the
prompt with placeholder tokens where the slots stand; whenever it runs the whole prompt (at prefill, or at every step
without a cache), hooks write the slots over the placeholders. So caches, beams and sampling are transformers' own, and
positions, counted from the attention mask, come out one on.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from capt_kernels.validation import boolean_mask

from . import heads
from .layout import Layout

if TYPE_CHECKING:
    from .model import CaptModel

#: Ways to generate that run parts of a prompt, where the slots would be missed.
_UNSUPPORTED = ("assistant_model", "prompt_lookup_num_tokens", "prefill_chunk_size", "past_key_values", "inputs_embeds")


@torch.no_grad()
def generate(
    model: CaptModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    adapter_names: Sequence[str] | None,
    options: dict[str, Any],
) -> Any:
    """See :meth:`capt.CaptModel.generate`."""
    chosen, index = model._chosen(adapter_names, len(input_ids))
    config = chosen[0].config
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    mask = boolean_mask("attention_mask", mask)
    if model._backbone.is_encoder_decoder:
        rows = model._run(chosen, index, input_ids, mask, None)
        memory, seen = heads.encoder_memory(rows, config.expose_slot)
        return model.base.generate(encoder_outputs=memory, attention_mask=seen.long(), **options)

    _check(model, config, mask, options)
    slots: list[Tensor] = []
    rows = model._run(chosen, index, input_ids, mask, None, slots)
    layout = rows.layout
    ids, real, places = _with_placeholders(input_ids, rows, layout)
    added = ids.shape[1] - input_ids.shape[1]
    options = _longer(model, options, added)
    prompted = dict(zip(chosen[0].capsules.layers, slots, strict=True))
    with _slots_written(model._backbone.stack.layers, prompted, places, ids.shape[1]):
        out = model.base.generate(input_ids=ids, attention_mask=real.long(), **options)
    return _without_placeholders(out, input_ids, ids.shape[1])


def _check(model: CaptModel, config: Any, mask: Tensor, options: dict[str, Any]) -> None:
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            raise NotImplementedError(
                f"generate() with a capsule does not take {name}: it has to run the whole prompt at once"
            )
    if model.base.get_output_embeddings() is None:
        raise NotImplementedError(f"{type(model.base).__name__} has no language-model head to generate with")
    if config.prompted_layers(model._backbone.num_layers)[0] != 0:
        raise NotImplementedError(
            f"generate() wants slots in every layer's cache, so the first layer prompted, got depth {config.depth!r}"
        )
    if config.positions != "shift":
        raise NotImplementedError(f"generate() counts slots as positions ('shift'), got positions {config.positions!r}")
    if not mask[:, -1:].all():
        raise ValueError("generate() wants prompts padded on the left (padding_side='left'), got padding on the right")
    shortest = int(mask.sum(1).min()) if len(mask) else config.lead + 1
    if shortest <= config.lead:
        raise NotImplementedError(
            f"generate() continues from a token behind the slots: lead={config.lead} wants prompts longer than that, "
            f"got one of {shortest} tokens"
        )


def _with_placeholders(input_ids: Tensor, rows: heads.Rows, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """``(ids [B, L], mask [B, L], places [B, K])``: prompts padded on the left, slots in their place.

    A placeholder repeats its prompt's last token: what looks at the ids (a repetition penalty) sees none that is new.
    """
    tokens = input_ids.flatten()[rows.indices]
    last = tokens[(layout.cu_seqlens[1:] - layout.slots * torch.arange(1, rows.batch + 1, device=tokens.device)) - 1]
    packed = torch.repeat_interleave(last, layout.lengths)
    packed = packed.index_copy(0, layout.token_rows, tokens)
    right = layout.longest - layout.lengths
    place = (torch.arange(layout.longest, device=tokens.device) - right[:, None]) % max(layout.longest, 1)
    ids = layout.pad(packed).gather(1, place)
    mask = torch.arange(layout.longest, device=tokens.device) >= right[:, None]
    places = layout.slot_rows - layout.cu_seqlens[:-1, None] + right[:, None]
    return ids, mask, places


def _longer(model: CaptModel, options: dict[str, Any], added: int) -> dict[str, Any]:
    """Limits on the whole sequence's length count the caller's tokens, not the placeholders."""
    given = options.get("generation_config") or model.base.generation_config
    limits = {name: options.get(name, getattr(given, name, None)) for name in ("max_length", "min_length")}
    replaced = {name: value + added for name, value in limits.items() if value}
    if options.get("max_new_tokens") is not None or getattr(given, "max_new_tokens", None) is not None:
        replaced.pop("max_length", None)
    config = copy.deepcopy(given)
    return options | {"generation_config": config} | replaced


@contextlib.contextmanager
def _slots_written(layers: nn.ModuleList, slots: dict[int, Tensor], places: Tensor, length: int) -> Iterator[None]:
    """Inside, every run of a whole prompt finds its slots in front of the prompted layers."""

    def writer(values: Tensor):
        def write(module: nn.Module, args: tuple, kwargs: dict):
            hidden = args[0] if args else kwargs["hidden_states"]
            if hidden.shape[1] < length:  # one more token, behind a cache that holds the slots
                return None
            # Beams of a prompt follow each other.
            beams = hidden.shape[0] // places.shape[0]
            where = places.repeat_interleave(beams, 0)[..., None].expand(-1, -1, hidden.shape[-1])
            hidden = hidden.scatter(1, where, values.repeat_interleave(beams, 0).to(hidden.dtype))
            return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})

        return write

    handles = [layers[i].register_forward_pre_hook(writer(values), with_kwargs=True) for i, values in slots.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _without_placeholders(out: Any, input_ids: Tensor, length: int) -> Any:
    """The caller's own prompts in front of what was generated."""

    def own(sequences: Tensor) -> Tensor:
        copies = sequences.shape[0] // max(input_ids.shape[0], 1)
        return torch.cat([input_ids.repeat_interleave(copies, 0), sequences[:, length:]], 1)

    if isinstance(out, Tensor):
        return own(out)
    out["sequences"] = own(out["sequences"])
    return out
