"""CaptModel on small random bases: padding, masks, classification, language models."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaModel,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5EncoderModel,
    T5ForSequenceClassification,
)

from capt import CaptConfig, get_capt_model

from .naive import FAMILIES, SMALL, T5_SMALL, batch_of, randomise
from .small import classifier, wrapped

# --- padding and positions


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_a_padded_row_equals_the_row_alone(family, side):
    """Positions count real tokens; for T5 physical ones would be far off with three left pads."""
    model = wrapped(family, lead=1)
    ids, mask = batch_of((3, 6), side, longest=6)
    extra = {"decoder_input_ids": torch.tensor([[0, 9]] * 2)} if model.config.is_encoder_decoder else {}
    real = mask[0].bool()
    among = model(input_ids=ids, attention_mask=mask, **extra)
    alone = model(input_ids=ids[:1, real], **{k: v[:1] for k, v in extra.items()})
    name = "encoder_last_hidden_state" if extra else next(iter(alone))
    torch.testing.assert_close(among[name][:1, real], alone[name], rtol=1e-9, atol=1e-9)
    if extra:
        torch.testing.assert_close(among.logits[:1], alone.logits, rtol=1e-9, atol=1e-9)
    assert not among[name][0, ~real].any()
    assert among[name].shape[:2] == ids.shape


@pytest.mark.parametrize("family", ["llama", "t5", "bert"])
def test_an_all_padding_row_is_finite_and_stays_alone(family):
    model = wrapped(family)
    ids, mask = batch_of((4, 0, 6), "right")
    extra = {"decoder_input_ids": torch.tensor([[0, 9]] * 3)} if family == "t5" else {}
    out = model(input_ids=ids, attention_mask=mask, **extra)[0]
    assert out.isfinite().all()
    keep = torch.tensor([0, 2])
    without = model(input_ids=ids[keep], attention_mask=mask[keep], **{k: v[keep] for k, v in extra.items()})[0]
    torch.testing.assert_close(out[keep], without, rtol=1e-9, atol=1e-9)
    out[keep].square().sum().backward()
    grad = model.adapters["default"].capsules.vectors.grad
    model.zero_grad()
    without.square().sum().backward()
    torch.testing.assert_close(model.adapters["default"].capsules.vectors.grad, grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_padding_embeddings_may_hold_anything(family, bad):
    model = wrapped(family)
    ids, mask = batch_of((4, 6), "left")
    embeds = model.base.get_input_embeddings()(ids)
    want = model(inputs_embeds=embeds, attention_mask=mask)[0]
    dirty = embeds.masked_fill(~mask.bool()[..., None], bad).requires_grad_()
    got = model(inputs_embeds=dirty, attention_mask=mask)[0]
    assert torch.equal(got, want)
    got.square().sum().backward()
    assert dirty.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
def test_masks_of_every_dtype(dtype):
    model = wrapped("llama")
    ids, mask = batch_of((4, 6), "left")
    want = model(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(model(input_ids=ids, attention_mask=mask.to(dtype)).logits, want)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 127, 513])
def test_lengths(length):
    torch.manual_seed(0)
    base = LlamaModel(LlamaConfig(**SMALL | {"num_hidden_layers": 2, "max_position_embeddings": 600})).double().eval()
    model = get_capt_model(base, CaptConfig()).double()
    ids, mask = batch_of((length, 3), "left", longest=max(length, 3))
    out = model(input_ids=ids, attention_mask=mask).last_hidden_state
    alone = model(input_ids=ids[:1, mask[0].bool()]).last_hidden_state
    torch.testing.assert_close(out[:1, mask[0].bool()], alone, rtol=1e-8, atol=1e-8)


# --- classification


def test_the_last_token_is_pooled_whatever_the_padding():
    model = classifier()
    embeds = torch.randn(2, 4, 16, dtype=torch.float64)
    rows = []
    for mask in ([[0, 0, 1, 1], [0, 1, 1, 1]], [[1, 1, 0, 0], [1, 1, 1, 0]]):
        mask = torch.tensor(mask)
        packed = [embeds[i, 4 - n :] for i, n in enumerate((2, 3))]
        padded = torch.zeros_like(embeds)
        for i, row in enumerate(packed):
            padded[i, mask[i].bool()] = row
        rows.append(model(inputs_embeds=padded, attention_mask=mask).logits)
        alone = [model(inputs_embeds=row[None]).logits for row in packed]
        torch.testing.assert_close(rows[-1], torch.cat(alone), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (LlamaForSequenceClassification, LlamaConfig),
        (Qwen2ForSequenceClassification, Qwen2Config),
        (BertForSequenceClassification, BertConfig),
        (RobertaForSequenceClassification, RobertaConfig),
    ],
)
def test_ids_and_embeddings_agree_even_where_a_real_token_is_the_pad(kind, config):
    model = classifier(kind, config)
    ids, mask = batch_of((4, 6), "right")
    ids[0, 3] = SMALL["pad_token_id"]
    by_ids = model(input_ids=ids, attention_mask=mask, labels=torch.tensor([2, 0]))
    by_embeds = model(inputs_embeds=model.base.get_input_embeddings()(ids), attention_mask=mask)
    assert torch.equal(by_ids.logits, by_embeds.logits)
    torch.testing.assert_close(by_ids.logits[:1], model(input_ids=ids[:1, :4]).logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(by_ids.loss, cross_entropy(by_ids.logits, torch.tensor([2, 0])))


def test_a_head_is_made_where_the_base_has_none_and_trains_beside_the_vectors():
    base = LlamaModel(LlamaConfig(**SMALL, num_labels=5))
    model = get_capt_model(base, CaptConfig(task_type="SEQ_CLS"))
    assert model(input_ids=torch.ones(2, 3, dtype=torch.long)).logits.shape == (2, 5)
    trainable, total = model.get_nb_trainable_parameters()
    assert trainable == 4 * 16 + 5 * 16
    assert total == trainable + sum(p.numel() for p in base.parameters())
    with pytest.raises(NotImplementedError, match="LlamaModel has no head of its own"), model.disable_adapter():
        model(input_ids=torch.ones(2, 3, dtype=torch.long))


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_label_words_are_the_columns_of_the_language_model(family, capsys):
    words = (7, 12, 3)
    model = wrapped(family, label_words=words)
    ids, mask = batch_of((4, 6), "left")
    labels = torch.tensor([2, 0])
    got = model(input_ids=ids, attention_mask=mask, labels=labels)
    language = copy.deepcopy(model)
    language.adapters["default"].config = CaptConfig.from_dict(
        model.capt_config.to_dict()
        | {"label_words": None, "task_type": "CAUSAL_LM" if family == "llama" else "SEQ_2_SEQ_LM"}
    )
    start = {"decoder_input_ids": torch.zeros(2, 1, dtype=torch.long)} if family == "t5" else {}
    full = language(input_ids=ids, attention_mask=mask, **start).logits[:, -1]
    torch.testing.assert_close(got.logits, full[:, list(words)], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got.loss, cross_entropy(full[:, list(words)], labels), rtol=1e-9, atol=1e-9)
    model.print_trainable_parameters()
    assert capsys.readouterr().out.startswith("trainable params: 64 || all params: ")
    with model.disable_adapter():
        bare = model(input_ids=ids[1:], labels=labels[1:])
    want = model.base(input_ids=ids[1:], **{k: v[1:] for k, v in start.items()}).logits[:, -1, list(words)]
    torch.testing.assert_close(bare.logits, want, rtol=1e-12, atol=1e-12)


def test_t5_for_sequence_classification():
    torch.manual_seed(0)
    base = T5ForSequenceClassification(T5Config(**T5_SMALL, num_labels=3)).double().eval()
    model = get_capt_model(base, CaptConfig(instance=False)).double().eval()
    randomise(model)
    ids, mask = batch_of((4, 6), "left")
    ids[:, -1] = T5_SMALL["eos_token_id"]
    among = model(input_ids=ids, attention_mask=mask, labels=torch.tensor([0, 2]))
    alone = model(input_ids=ids[:1, 2:])
    torch.testing.assert_close(among.logits[:1], alone.logits, rtol=1e-9, atol=1e-9)
    # The base itself, with the same processed encoder rows handed in.
    rows = model._run([model.adapters["default"]], None, ids[:1, 2:], None, None)
    head = model.adapters["default"].head
    base.classification_head.load_state_dict(head.state_dict())
    want = base(input_ids=ids[:1, 2:], encoder_outputs=(rows.rows[None],), attention_mask=torch.ones(1, 5)).logits
    torch.testing.assert_close(alone.logits, want, rtol=1e-9, atol=1e-9)


# --- language models


def test_the_loss_of_a_language_model_is_a_shift_over_its_own_tokens():
    model = wrapped("llama", lead=1)
    ids, mask = batch_of((5, 7), "left")
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :4] = -100
    out = model(input_ids=ids, attention_mask=mask, labels=labels)
    assert out.logits.shape == (*ids.shape, 61)
    manual = cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss, manual)


def test_training_a_language_model_makes_logits_of_labelled_positions_only():
    model = wrapped("llama", lead=1).train()
    ids, mask = batch_of((5, 7), "left")
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :5] = -100
    seen = []
    handle = model.base.lm_head.register_forward_hook(lambda _, args, out: seen.append(out.shape))
    short = model(input_ids=ids, attention_mask=mask, labels=labels)
    full = model(input_ids=ids, attention_mask=mask, labels=labels, return_logits=True)
    handle.remove()
    assert seen == [(4, 61), (12, 61)]
    assert short.logits is None
    torch.testing.assert_close(short.loss, full.loss)
    assert full.logits.shape == (2, 7, 61)


def test_a_mean_does_not_tell_the_answer():
    """By default only rows without a label pool, so that moving a labelled token moves nothing before it."""
    for variant in ("addition", "prepending", "extraction", "projection"):
        model = wrapped("llama", variant=variant, rank=3)
        ids = torch.randint(2, 61, (1, 5))
        labels = ids.clone()
        labels[:, :2] = -100
        changed = ids.clone()
        changed[0, 4] = (ids[0, 4] + 1) % 61
        before = model(input_ids=ids, labels=labels).logits[:, :4]
        assert torch.equal(model(input_ids=changed, labels=labels).logits[:, :4], before)
        everything = torch.ones_like(ids)
        moved = model(input_ids=changed, labels=labels, pool_mask=everything).logits[:, :4]
        assert not torch.allclose(moved, model(input_ids=ids, labels=labels, pool_mask=everything).logits[:, :4])


def test_no_token_may_enter_the_mean():
    model = wrapped("llama")
    ids = torch.randint(2, 61, (2, 5))
    out = model(input_ids=ids, labels=ids)
    nothing = model(input_ids=ids, pool_mask=torch.zeros_like(ids))
    torch.testing.assert_close(out.logits, nothing.logits)
    assert out.loss.isfinite()


def test_training_on_texts_without_a_prompt_is_told_once():
    model = wrapped("llama").train()
    ids, mask = batch_of((3, 5), "left")
    labels = ids.masked_fill(mask == 0, -100)
    prompted = labels.clone()
    prompted[:, :3] = -100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped("llama").train()(input_ids=ids, attention_mask=mask, labels=prompted)
        wrapped("llama", instance=False).train()(input_ids=ids, attention_mask=mask, labels=labels)
        model.eval()(input_ids=ids, attention_mask=mask, labels=labels)
    with pytest.warns(UserWarning, match="labels cover every token of a text, so its mean is empty in training"):
        model.train()(input_ids=ids, attention_mask=mask, labels=labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(input_ids=ids, attention_mask=mask, labels=labels)


def test_seq2seq_loss_and_hidden_states():
    model = wrapped("flan-t5")
    ids, mask = batch_of((4, 6), "left")
    labels = torch.tensor([[5, 7, 1], [9, 1, -100]])
    out = model(input_ids=ids, attention_mask=mask, labels=labels)
    torch.testing.assert_close(out.loss, cross_entropy(out.logits.flatten(0, 1), labels.flatten()))
    assert out.encoder_last_hidden_state.shape == (2, 6, 16)
    encoder = T5EncoderModel(model.base.config).double().eval()
    encoder.load_state_dict(model.base.state_dict(), strict=False)
    features = get_capt_model(encoder, CaptConfig()).double().eval()
    features.adapters["default"].load_state_dict(model.adapters["default"].state_dict())
    hidden = features(input_ids=ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(hidden, out.encoder_last_hidden_state)


def test_dropout_acts_in_training_only():
    model = wrapped("t5")
    ids = torch.randint(2, 61, (2, 5))
    one, two = (model(input_ids=ids, decoder_input_ids=ids).logits for _ in range(2))
    assert torch.equal(one, two)
    model.train()
    one, two = (model(input_ids=ids, decoder_input_ids=ids).logits for _ in range(2))
    assert not torch.equal(one, two)
