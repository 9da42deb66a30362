"""generate() with a capsule: slots computed once from the prompt, then transformers' own generation.

A prompt is run once to learn what its slots hold in front of every prompted layer. Then the base generates from the
prompt with placeholder tokens where the slots stand; whenever it runs the whole prompt (at prefill, or at every step
without a cache), hooks write the slots over the placeholders. So caches, beams and sampling are transformers' own, and
positions, counted from the attention mask, come out one on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from capt_kernels.validation import boolean_mask, check_shape

from . import heads
from .backbones.hooks import outside, rewriting
from .layout import Layout, Rows

if TYPE_CHECKING:
    from .model import CaptModel

_WHOLE = "the prompt has to run as a whole"
_PLACEHOLDERS = "it would see the slots' placeholders as tokens"
#: What generate() refuses, and why.
_UNSUPPORTED = {
    "assistant_model": _WHOLE,
    "assistant_early_exit": _WHOLE,
    "use_mtp": _WHOLE,
    "prompt_lookup_num_tokens": _WHOLE,
    "prefill_chunk_size": _WHOLE,
    "past_key_values": _WHOLE,
    "inputs_embeds": "the prompt's ids are wanted",
    "no_repeat_ngram_size": _PLACEHOLDERS,
    "encoder_no_repeat_ngram_size": _PLACEHOLDERS,
    "token_healing": _PLACEHOLDERS,
    "custom_generate": _PLACEHOLDERS,
    "guidance_scale": "the slots of its second prompt are not known",
}


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
    check_shape("attention_mask", mask, tuple(input_ids.shape), "[B, T]")
    mask = boolean_mask("attention_mask", mask)
    if model._backbone.is_encoder_decoder:
        rows = model._run(chosen, index, input_ids, mask, None)
        return write_from(model.base, rows, config.expose_slot, input_ids, options)

    _check(model, config, mask, options)
    slots: list[Tensor] = []
    rows = model._run(chosen, index, input_ids, mask, None, slots)
    layout = rows.layout
    ids, real, places = _with_placeholders(input_ids, rows, layout)
    added = ids.shape[1] - input_ids.shape[1]
    options = _options(model, options, input_ids, added, ids.shape[1])
    written = [_slots_written(values, places, ids.shape[1]) for values in slots]
    with rewriting(model._backbone.blocks, dict(zip(chosen[0].capsules.layers, written, strict=True))):
        out = model.base.generate(input_ids=ids, attention_mask=real.long(), **options)
    return _without_placeholders(out, input_ids, ids.shape[1])


def write_from(base: Any, rows: Rows, expose_slot: bool, input_ids: Tensor, options: dict[str, Any]) -> Any:
    """What an encoder-decoder's decoder generates from the encoder's ``rows``.

    Raises:
        NotImplementedError: embeddings, whose rows these are not.
    """
    if options.get("inputs_embeds") is not None:
        raise NotImplementedError(f"generate() does not take inputs_embeds: {_UNSUPPORTED['inputs_embeds']}")
    memory, seen = heads.encoder_memory(rows, expose_slot)
    # The ids are for what looks at the text that was read (encoder_no_repeat_ngram_size); nothing reads them again.
    return base.generate(inputs=input_ids, encoder_outputs=memory, attention_mask=seen.long(), **options)


def _check(model: CaptModel, config: Any, mask: Tensor, options: dict[str, Any]) -> None:
    if not model._backbone.is_causal or model.base.get_output_embeddings() is None:
        raise NotImplementedError(f"{type(model.base).__name__} has no language-model head to generate with")
    given, rest = _generation_config(model, options)
    for name, why in _UNSUPPORTED.items():
        if rest.get(name) is not None or getattr(given, name, None):
            raise NotImplementedError(f"generate() with a capsule does not take {name}: {why}")
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


def _with_placeholders(input_ids: Tensor, rows: Rows, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """``(ids [B, L], mask [B, L], places [B, K])``: prompts padded on the left, slots in their place.

    Placeholders and padding repeat a prompt's last token: what looks at the ids (a repetition penalty) sees none that
    is new.
    """
    tokens = input_ids.flatten()[rows.indices]
    last = tokens[(layout.cu_seqlens[1:] - layout.slots * torch.arange(1, rows.batch + 1, device=tokens.device)) - 1]
    packed = torch.repeat_interleave(last, layout.lengths)
    packed = packed.index_copy(0, layout.token_rows, tokens)
    right = layout.longest - layout.lengths
    place = (torch.arange(layout.longest, device=tokens.device) - right[:, None]) % max(layout.longest, 1)
    mask = torch.arange(layout.longest, device=tokens.device) >= right[:, None]
    ids = torch.where(mask, layout.pad(packed).gather(1, place), last[:, None])
    places = layout.slot_rows - layout.cu_seqlens[:-1, None] + right[:, None]
    return ids, mask, places


def _generation_config(model: CaptModel, options: dict[str, Any]) -> tuple[GenerationConfig, dict[str, Any]]:
    """The one config that holds every option, and the options that no config holds."""
    config = copy.deepcopy(options.get("generation_config") or model.base.generation_config)
    rest = config.update(**{name: value for name, value in options.items() if name != "generation_config"})
    return config, rest


def _options(model: CaptModel, options: dict[str, Any], input_ids: Tensor, added: int, length: int) -> dict[str, Any]:
    """The caller's options for a prompt of ``length`` with placeholders, which nobody else is to see."""
    config, rest = _generation_config(model, options)
    # Limits on the whole sequence count the caller's tokens.
    for name in ("max_length", "min_length"):
        if getattr(config, name, None) and (name != "max_length" or config.max_new_tokens is None):
            setattr(config, name, getattr(config, name) + added)
    for name, kind in (("logits_processor", LogitsProcessorList), ("stopping_criteria", StoppingCriteriaList)):
        if rest.get(name):
            rest[name] = kind(_OwnIds(each, input_ids, length) for each in rest[name])
    if rest.get("prefix_allowed_tokens_fn") is not None:
        # transformers' versions number the copies of a sampled prompt differently, those of beams alike.
        if (config.num_beams or 1) == 1 and (config.num_return_sequences or 1) > 1:
            raise NotImplementedError(
                "generate() does not take prefix_allowed_tokens_fn with several sampled sequences"
            )
        rest["prefix_allowed_tokens_fn"] = _own_prefix(rest["prefix_allowed_tokens_fn"], input_ids, length)
    if rest.get("streamer") is not None:
        rest["streamer"] = _OwnPrompt(rest["streamer"], input_ids)
    return rest | {"generation_config": config}


def _own(sequences: Tensor, input_ids: Tensor, length: int) -> Tensor:
    """``[B * copies, length + new]`` with the caller's own prompts in front of what was generated."""
    copies = sequences.shape[0] // max(input_ids.shape[0], 1)
    return torch.cat([input_ids.repeat_interleave(copies, 0), sequences[:, length:]], 1)


class _OwnIds:
    """A caller's processor or criterion, shown the caller's ids."""

    def __init__(self, wrapped: Any, input_ids: Tensor, length: int):
        self._wrapped, self._input_ids, self._length = wrapped, input_ids, length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        return outside(self._wrapped, _own(input_ids, self._input_ids, self._length), scores)


def _own_prefix(
    allowed: Callable[[int, Tensor], list[int]], input_ids: Tensor, length: int
) -> Callable[[int, Tensor], list[int]]:
    """A caller's choice of next tokens, shown the caller's ids."""
    return lambda i, ids: outside(allowed, i, torch.cat([input_ids[i], ids[length:]]))


class _OwnPrompt:
    """A caller's streamer, whose first piece is the caller's prompt."""

    def __init__(self, wrapped: Any, input_ids: Tensor):
        self._wrapped: Any = wrapped
        self._prompt: Tensor | None = input_ids

    def put(self, value: Tensor) -> None:
        prompt, self._prompt = self._prompt, None
        outside(self._wrapped.put, value if prompt is None else prompt.cpu())

    def end(self) -> None:
        self._wrapped.end()


def _slots_written(slots: Tensor, places: Tensor, length: int) -> Callable[[Tensor], Tensor]:
    """Writes ``slots [B, K, D]`` into the hidden states of every run of a whole prompt."""

    def write(hidden: Tensor) -> Tensor:
        if hidden.shape[1] < length:  # one more token, behind a cache that holds the slots
            return hidden
        # Beams of a prompt follow each other.
        beams = hidden.shape[0] // places.shape[0]
        where = places.repeat_interleave(beams, 0)[..., None].expand(-1, -1, hidden.shape[-1])
        return hidden.scatter(1, where, slots.repeat_interleave(beams, 0).to(hidden.dtype))

    return write


def _without_placeholders(out: Any, input_ids: Tensor, length: int) -> Any:
    """The caller's own prompts in front of what was generated."""
    if isinstance(out, Tensor):
        return _own(out, input_ids, length)
    out["sequences"] = _own(out["sequences"], input_ids, length)
    return out
