"""From the processed rows of a base's stack to the output of a task: states, next tokens, classes, text to text."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput, ModelOutput, SequenceClassifierOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from .backbones import Backbone
from .backbones.packed import is_plain
from .config import CaptConfig
from .layout import Layout, Rows, next_token_labels


def infer_task(base: PreTrainedModel, backbone: Backbone, config: CaptConfig) -> str:
    """The task type of an adapter on ``base``: the config's, or what the class of the base is for.

    Raises:
        ValueError: the base cannot do the task that the config names.
        NotImplementedError: a head of the base's own that no task here is for.
    """
    name = type(base).__name__
    generative = base.get_output_embeddings() is not None
    classifier = own_head(base) is not None
    language = "SEQ_2_SEQ_LM" if backbone.is_encoder_decoder else "CAUSAL_LM"
    task = config.task_type
    fills_masks = generative and not (backbone.is_causal or backbone.is_encoder_decoder)
    if fills_masks and (task in (None, language) or config.label_words is not None):
        raise NotImplementedError(
            f"{name}'s language-model head fills masks, and no task here has any; task_type 'SEQ_CLS' without "
            f"label_words, or 'FEATURE_EXTRACTION', leaves it out"
        )
    if task is None:
        if not (classifier or generative or base.base_model is base):
            raise NotImplementedError(
                f"no task here is for the head of {name}; task_type 'SEQ_CLS' or 'FEATURE_EXTRACTION' leaves it out"
            )
        task = "SEQ_CLS" if classifier or config.label_words else language if generative else "FEATURE_EXTRACTION"
    if task in ("CAUSAL_LM", "SEQ_2_SEQ_LM") and (task != language or not generative):
        raise ValueError(f"task_type {task!r} wants a base with such a language-model head, got {name}")
    if task == "SEQ_CLS" and config.label_words is not None:
        if not generative:
            raise ValueError(f"label_words are read from a language-model head, and {name} has none")
        vocabulary = base.get_output_embeddings().weight.shape[0]
        if max(config.label_words) >= vocabulary:
            raise ValueError(
                f"label_words must be below the vocabulary's size {vocabulary}, got {max(config.label_words)}"
            )
    if task == "SEQ_CLS" and config.label_words is None and backbone.is_encoder_decoder and not classifier:
        raise ValueError(
            f"task_type 'SEQ_CLS' on an encoder-decoder wants label_words or a T5ForSequenceClassification, got {name}"
        )
    return task


def own_head(base: PreTrainedModel) -> nn.Module | None:
    """The classification head that ``base`` brings along, if any."""
    # By its class, since a base that labels every token has a `score` or `classifier` too.
    kind: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(base.config), ())
    if not isinstance(base, kind):
        return None
    return next(getattr(base, name) for name in ("score", "classification_head", "classifier") if hasattr(base, name))


def make_head(base: PreTrainedModel, backbone: Backbone, task: str, config: CaptConfig) -> nn.Module | None:
    """A trainable fp32 head for classification without label words: a copy of the base's own, or a linear one.

    Raises:
        ValueError: the base's own head has no values to copy yet, or not all of them here.
        NotImplementedError: the base's config asks for a regression or for several labels a text.
    """
    if task != "SEQ_CLS" or config.label_words is not None:
        return None
    kind = base.config.problem_type or ("regression" if base.config.num_labels == 1 else None)
    if kind not in (None, "single_label_classification"):
        raise NotImplementedError(
            f"SEQ_CLS is trained as a choice of one label of several; the base's config asks for {kind!r} "
            f"(problem_type {base.config.problem_type!r}, num_labels {base.config.num_labels})"
        )
    own = own_head(base)
    if own is not None:
        if any(p.is_meta or isinstance(p, DTensor) for p in own.parameters()):
            raise ValueError(
                "base must hold its whole classification head when it is wrapped, since the adapter trains a copy of "
                "it; got one on the meta device or sharded over processes"
            )
        return copy.deepcopy(own).float().requires_grad_(True)
    head = nn.Linear(backbone.width, base.config.num_labels or 2, bias=False)
    nn.init.normal_(head.weight, std=getattr(backbone.config, "initializer_range", 0.02))
    return head


def hidden_states(rows: Rows) -> BaseModelOutput:
    """The last hidden state of the caller's own T positions."""
    return BaseModelOutput(last_hidden_state=rows.restore(rows.tokens))


def next_tokens(base: PreTrainedModel, rows: Rows, labels: Tensor | None, return_logits: bool) -> CausalLMOutput:
    """The loss of every label from the token before it, and logits ``[B, T, V]`` of the caller's positions if asked.

    Without them only labelled rows go through the head. A slot is never a label.
    """
    head: Any = base.get_output_embeddings()
    tokens, targets = rows.tokens, None
    if labels is not None:
        counts = torch.arange(rows.batch + 1, device=tokens.device)
        cu_tokens = rows.layout.cu_seqlens - rows.layout.slots * counts
        targets = next_token_labels(labels.flatten()[rows.indices], cu_tokens)
        if not return_logits:
            tokens, targets = tokens[targets != -100], targets[targets != -100]
    logits = head(tokens)
    loss = None if targets is None else cross_entropy(_wide(logits), targets)
    return CausalLMOutput(loss=loss, logits=rows.restore(logits) if return_logits else None)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def sentence_features(base: Any, backbone: Backbone, rows: Rows) -> Tensor:
    """``[B, D]`` or ``[B, 1, D]``: what a head classifies of each sequence.

    A decoder's last token, which alone has seen the others. BERT's first: as it is, for a head made here; through the
    base's own pooler and dropout, for the base's own head; in ``[B, 1, D]`` for RoBERTa's, which looks for it there.
    """
    if rows.layout.slots == 0 and not rows.layout.lengths.all():
        raise ValueError("a text of padding alone has no row to classify without a slot; got one in the batch")
    if backbone.is_causal:
        return rows.rows[rows.layout.last_rows]
    first = rows.rows[rows.layout.first_rows]
    if own_head(base) is None:
        return first
    pooler = getattr(base.base_model, "pooler", None)
    return first[:, None] if pooler is None else base.dropout(pooler(first[:, None]))


def classify(logits: Tensor, labels: Tensor | None) -> SequenceClassifierOutput:
    """Cross-entropy over classes.

    Raises:
        ValueError: labels that are not one class id a row (-100: none).
    """
    loss = None
    if labels is not None:
        if labels.is_floating_point() or tuple(labels.shape) != (logits.shape[0],):
            raise ValueError(
                f"labels of SEQ_CLS must be one class id a row, shape ({logits.shape[0]},), "
                f"got {labels.dtype} {tuple(labels.shape)}"
            )
        if labels.device.type == "cpu" and not torch.compiler.is_compiling():  # a look at a GPU's would stall it
            outside = labels[(labels != -100) & ((labels < 0) | (labels >= logits.shape[1]))]
            if len(outside):
                raise ValueError(f"labels of SEQ_CLS must be 0 to {logits.shape[1] - 1}, got {outside[0].item()}")
        loss = cross_entropy(_wide(logits), labels)
    return SequenceClassifierOutput(loss=loss, logits=logits)


def label_word_logits(base: PreTrainedModel, last: Tensor, config: CaptConfig) -> Tensor:
    """``[B, C]`` of the words alone, at ``last [B, D]``: C columns of the head instead of the whole vocabulary."""
    words, head = list(config.label_words or ()), base.get_output_embeddings()
    if type(head) is not nn.Linear or not is_plain(head):
        return head(last)[:, words]  # a quantised, wrapped or hooked head is called as it is
    bias = None if head.bias is None else head.bias[words]
    return nn.functional.linear(last.to(head.weight.dtype), head.weight[words], bias)


def apply_head(heads: list[nn.Module], index: Tensor | None, features: Tensor) -> Tensor:
    """``[B, C]``; with ``index [B]``, every row by its own adapter's head."""

    def run(head: nn.Module, rows: Tensor) -> Tensor:
        return head(rows.to(next(head.parameters()).dtype))

    if index is None:
        return run(heads[0], features)
    done = torch.stack([run(head, features) for head in heads])
    return done[index, torch.arange(len(index), device=index.device)]


def encoder_memory(rows: Rows, expose_slot: bool) -> tuple[BaseModelOutput, Tensor]:
    """What an encoder-decoder's decoder attends to: the padded rows with their slots, and their mask ``[B, L]``."""
    layout = rows.layout
    mask = layout.mask if expose_slot else layout.pad(~layout.is_slot)
    return BaseModelOutput(last_hidden_state=layout.pad(rows.rows)), mask


def first_step_logits(base: PreTrainedModel, rows: Rows, config: CaptConfig) -> Tensor:
    """``[B, C]``: logits of the label words where an encoder-decoder would write its first token."""
    memory, mask = encoder_memory(rows, config.expose_slot)
    start = mask.new_full((rows.batch, 1), base.config.decoder_start_token_id, dtype=torch.long)
    logits = base(encoder_outputs=memory, attention_mask=mask, decoder_input_ids=start, use_cache=False).logits
    return logits[:, 0, list(config.label_words or ())]


def decoded_features(base: PreTrainedModel, rows: Rows, config: CaptConfig, input_ids: Tensor) -> Tensor:
    """``[B, D]``: the last token's state in the decoder, where T5ForSequenceClassification reads the text again."""
    layout = rows.layout
    memory, mask = encoder_memory(rows, config.expose_slot)
    lengths = layout.lengths - layout.slots
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    texts = Layout(cu_seqlens, 0, 0, None)
    ids = texts.pad(input_ids.flatten()[rows.indices])
    start = ids.new_full((rows.batch, 1), base.config.decoder_start_token_id)
    # An all-padding text still has the start token, so that its row is finite.
    decoder_ids = torch.cat([start, ids], 1)[:, : max(texts.longest, 1)]
    states = base.base_model(
        encoder_outputs=memory, attention_mask=mask, decoder_input_ids=decoder_ids, use_cache=False
    ).last_hidden_state
    return states[torch.arange(rows.batch, device=ids.device), (lengths - 1).clamp(min=0)]


def output(
    base: PreTrainedModel,
    backbone: Backbone,
    config: CaptConfig,
    trained: list[nn.Module | None],
    index: Tensor | None,
    rows: Rows,
    input_ids: Tensor | None,
    labels: Tensor | None,
    decoder: dict[str, Tensor],
    return_logits: bool,
) -> ModelOutput:
    """The output of ``config.task_type``; ``trained`` are the batch's adapters' heads, ``index [B]`` a row's own."""
    if config.task_type == "CAUSAL_LM":
        return next_tokens(base, rows, labels, return_logits)
    if config.task_type == "SEQ_CLS":
        refuse_decoder_inputs(decoder)
        if config.label_words is not None and backbone.is_encoder_decoder:
            return classify(first_step_logits(base, rows, config), labels)
        if not backbone.is_encoder_decoder:
            features = sentence_features(base, backbone, rows)
        elif input_ids is None:
            raise ValueError("SEQ_CLS on an encoder-decoder feeds input_ids to the decoder too, got inputs_embeds")
        else:
            features = decoded_features(base, rows, config, input_ids)
        if config.label_words is not None:
            return classify(label_word_logits(base, features, config), labels)
        return classify(apply_head([head for head in trained if head is not None], index, features), labels)
    if not backbone.is_encoder_decoder or not hasattr(base.base_model, "decoder"):
        if labels is not None:
            raise ValueError("labels were given, and task_type 'FEATURE_EXTRACTION' has no loss")
        return hidden_states(rows)
    memory, mask = encoder_memory(rows, config.expose_slot)
    given = decoder if labels is None else decoder | {"labels": labels}
    done = base(encoder_outputs=memory, attention_mask=mask, use_cache=False, **given)
    done["encoder_last_hidden_state"] = rows.restore(rows.tokens)
    return done


def refuse_decoder_inputs(inputs: Mapping[str, Tensor]) -> None:
    """A classifier on an encoder-decoder feeds the decoder itself."""
    given = [name for name in ("decoder_input_ids", "decoder_attention_mask") if name in inputs]
    if given:
        raise ValueError(f"SEQ_CLS feeds the decoder itself, got {', '.join(given)}")


def bare(
    base: PreTrainedModel, backbone: Backbone, config: CaptConfig, inputs: dict[str, Tensor], labels: Tensor | None
) -> ModelOutput:
    """The base without a slot. Label words are picked from its own logits."""
    if config.task_type == "SEQ_CLS" and config.label_words is None and own_head(base) is None:
        raise NotImplementedError(f"{type(base).__name__} has no head of its own to classify with")
    if config.label_words is None:
        return base(**inputs) if labels is None else base(**inputs, labels=labels)
    refuse_decoder_inputs(inputs)
    given = inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"]
    rows = torch.arange(len(given), device=given.device)
    if backbone.is_encoder_decoder:
        start = rows.new_full((len(given), 1), base.config.decoder_start_token_id)
        logits = base(**inputs, decoder_input_ids=start, use_cache=False).logits[:, 0, list(config.label_words)]
        return classify(logits, labels)
    mask = inputs.get("attention_mask")
    place = torch.arange(given.shape[1], device=given.device)
    last = rows.new_full((len(given),), given.shape[1] - 1) if mask is None else (place * (mask != 0)).argmax(1)
    hidden = base.base_model(**inputs, use_cache=False).last_hidden_state
    return classify(label_word_logits(base, hidden[rows, last], config), labels)
