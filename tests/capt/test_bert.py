"""BERT and RoBERTa as bases: absolute positions, token types, the sentence's first token, a packed post-norm layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from capt import CaptConfig, CaptModel, assets, get_capt_model
from capt.training.inference import class_logits

from .naive import BERT_SMALL, ENCODERS, batch_of, make_base, randomise, run_sample
from .small import wrapped
from .test_packed_parity import assert_equal
from .tiny import save_tokenizer


def classifier(kind, config, **fields):
    torch.manual_seed(1)
    base = kind(config(**BERT_SMALL, num_labels=3)).double().eval()
    model = get_capt_model(base, CaptConfig(**fields)).double().eval()
    randomise(model)
    return model


def alone(model, ids, token_types=None):
    """Tokens ``[n, D]`` of one unpadded row, by the independent implementation."""
    member = torch.ones(len(ids), dtype=torch.bool)
    words = model.get_input_embeddings()(ids)
    return run_sample(model.base, model.capt_config, model.adapters["default"], words, member, token_types)[1]


# --- positions


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({}, [1, 2, 3]),
        ({"length": 2, "lead": 1}, [0, 3, 4]),
        ({"lead": 3}, [0, 1, 2]),
        ({"variant": "prepending"}, [2, 3, 4]),
        ({"positions": "keep", "length": 4}, [0, 1, 2]),
        ({"depth": "latter_half"}, [0, 1, 2]),
        ({"depth": [0, 3], "length": 5}, [5, 6, 7]),
    ],
    ids=["default", "lead", "lead past the end", "prepending", "keep", "later layers", "listed"],
)
@pytest.mark.parametrize("side", ["left", "right", "holes"])
@pytest.mark.parametrize(("family", "first"), [("bert", 0), ("roberta", 2)])
def test_positions_count_real_tokens_and_slots(family, first, side, fields, want):
    model = wrapped(family, **fields)
    seen = []
    model.base.embeddings.position_embeddings.register_forward_hook(lambda _, args, __: seen.append(args[0]))
    ids, mask = batch_of((3, 0), side, longest=6)
    model(input_ids=ids, attention_mask=mask)
    assert seen[0].flatten().tolist() == [first + place for place in want]


@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_a_text_may_fill_the_table_of_positions_and_no_more(backend):
    sizes = BERT_SMALL | {"max_position_embeddings": 10, "pad_token_id": 1}
    for name, room in (("roberta", 8), ("bert", 10)):
        kind, config = {"roberta": (RobertaForSequenceClassification, RobertaConfig)}.get(name, (BertModel, BertConfig))
        base = kind(config(**sizes)).eval()
        model = get_capt_model(base, CaptConfig(length=3, task_type="FEATURE_EXTRACTION"))
        model.backend = backend
        model(input_ids=torch.full((1, room - 3), 5))
        with pytest.raises(
            ValueError, match=f"has {room} positions, .* of {room - 2} tokens and 3 slots wants {room + 1}"
        ):
            model(input_ids=torch.full((1, room - 2), 5))
        later = get_capt_model(base, CaptConfig(length=3, depth=[1], task_type="FEATURE_EXTRACTION"))
        later(input_ids=torch.full((1, room), 5))
        with pytest.raises(ValueError, match=f"of {room + 1} tokens and 0 slots wants {room + 1}"):
            later(input_ids=torch.full((1, room + 1), 5))


def test_layers_in_front_of_the_first_prompt_are_the_bare_bases():
    model = wrapped("bert", depth=[2])
    seen = []
    model.base.encoder.layer[1].register_forward_hook(lambda _, __, out: seen.append(out))
    ids, _ = batch_of((6,))
    model(input_ids=ids)
    with model.disable_adapter():
        model(input_ids=ids)
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-12, atol=1e-12)


# --- token types


@pytest.mark.parametrize("side", ["left", "right", "holes"])
@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_token_types(family, side, backend):
    model = wrapped(family, lead=1)
    model.backend = backend
    ids, mask = batch_of((5, 8, 1), side)
    kinds = torch.randint(0, 2, ids.shape).masked_fill(mask == 0, 7)
    kinds[1, -3:] = 1
    got = model(input_ids=ids, attention_mask=mask, token_type_ids=kinds).last_hidden_state
    for row, real in enumerate(mask.bool()):
        torch.testing.assert_close(got[row, real], alone(model, ids[row, real], kinds[row, real]), rtol=1e-8, atol=1e-8)
    plain = model(input_ids=ids, attention_mask=mask).last_hidden_state
    assert not torch.allclose(got, plain)
    zeros = torch.zeros_like(ids)
    assert torch.equal(model(input_ids=ids, attention_mask=mask, token_type_ids=zeros).last_hidden_state, plain)
    embeds = model.get_input_embeddings()(ids)
    by_embeds = model(inputs_embeds=embeds, attention_mask=mask, token_type_ids=kinds).last_hidden_state
    assert torch.equal(by_embeds, got)


def test_token_types_go_through_batches_of_rows(tmp_path):
    model = classifier(BertForSequenceClassification, BertConfig)
    rows = [{"input_ids": [5, 7, 9], "token_type_ids": [0, 1, 1]}, {"input_ids": [8], "token_type_ids": [1]}]
    got = class_logits(model, save_tokenizer(tmp_path), rows, 2, model.device)
    for logits, row in zip(got, rows, strict=True):
        want = model(**{name: torch.tensor([values]) for name, values in row.items()}).logits[0]
        torch.testing.assert_close(logits, want.float())
        assert not torch.allclose(logits, model(input_ids=torch.tensor([row["input_ids"]])).logits[0].float())


def test_token_types_that_do_not_fit():
    model, ids = wrapped("bert"), torch.full((2, 3), 5)
    with pytest.raises(ValueError, match=r"token_type_ids must have shape \[B, T\] = \(2, 3\), got \(2, 4\)"):
        model(input_ids=ids, token_type_ids=torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="token_type_ids must be from 0 to 1, got 2"):
        model(input_ids=ids, token_type_ids=torch.full_like(ids, 2))
    with pytest.raises(ValueError, match="token_type_ids must be integers, got"):
        model(input_ids=ids, token_type_ids=torch.zeros(2, 3))
    for family, name in (("llama", "LlamaForCausalLM"), ("t5", "T5ForConditionalGeneration")):
        with pytest.raises(ValueError, match=f"token_type_ids given to {name}, which has no token types"):
            wrapped(family)(input_ids=ids, token_type_ids=torch.zeros_like(ids))


# --- tasks


@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["bert", "roberta", "bare"])
def test_the_first_token_is_classified(kind, side, lead):
    """By the way of the base's own pooler, head or neither."""
    model = {
        "bert": lambda: classifier(BertForSequenceClassification, BertConfig, lead=lead),
        "roberta": lambda: classifier(RobertaForSequenceClassification, RobertaConfig, lead=lead),
        "bare": lambda: classifier(BertModel, BertConfig, lead=lead, task_type="SEQ_CLS"),
    }[kind]()
    assert model.capt_config.task_type == "SEQ_CLS"
    ids, mask = batch_of((4, 1, 6, 0), side)
    got = model(input_ids=ids, attention_mask=mask, labels=torch.tensor([2, 0, 1, 1]))
    head = model.adapters["default"].head
    for row, real in enumerate(mask.bool()[:3]):
        tokens = alone(model, ids[row, real])
        if kind == "roberta":
            want = head(tokens[None])
        else:
            want = head(model.base.bert.pooler(tokens[None]) if kind == "bert" else tokens[:1])
        torch.testing.assert_close(got.logits[row : row + 1], want, rtol=1e-8, atol=1e-8)
    assert got.logits.isfinite().all()
    got.loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None}
    assert trained == {f"adapters.default.{name}" for name, _ in model.adapters["default"].named_parameters()}


def test_the_bases_own_dropout_stands_in_front_of_its_classifier():
    model = classifier(BertForSequenceClassification, BertConfig).train()
    for module in model.base.bert.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ids, _ = batch_of((4, 4))
    one, two = (model(input_ids=ids).logits for _ in range(2))
    assert not torch.equal(one, two)
    model.base.dropout.p = 0.0
    one, two = (model(input_ids=ids).logits for _ in range(2))
    assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("kind", "config"), [(BertForSequenceClassification, BertConfig), (RobertaForSequenceClassification, RobertaConfig)]
)
def test_an_adapter_can_be_left_out_mixed_and_saved(kind, config, tmp_path):
    model = classifier(kind, config)
    ids, mask = batch_of((4, 6), "right")
    inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.randint(0, 2, ids.shape)}
    labels = torch.tensor([2, 0])
    before = model(**inputs).logits
    with model.disable_adapter():
        bare = model(**inputs, labels=labels)
    want = model.base(**inputs, labels=labels)
    assert torch.equal(bare.logits, want.logits)
    assert torch.equal(bare.loss, want.loss)

    model.add_adapter("other", model.capt_config)
    model.adapters["other"].double()
    randomise(model)
    first, second = model(**inputs).logits, None
    model.set_adapter("other")
    second = model(**inputs).logits
    mixed = model(**inputs, adapter_names=["other", "default"]).logits
    torch.testing.assert_close(mixed, torch.stack([second[0], first[1]]), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(first, second)
    assert not torch.allclose(first, before)

    model.save_pretrained(tmp_path)
    again = CaptModel.from_pretrained(model.base, tmp_path).double().eval()
    torch.testing.assert_close(again(**inputs).logits, second, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"was made for base_model_type .* the base has 'llama'"):
        CaptModel.from_pretrained(make_base("llama"), tmp_path)


def test_bases_and_tasks_that_do_not_fit():
    sizes = BERT_SMALL
    with pytest.raises(NotImplementedError, match=r"BertModel is supported as an encoder, .* got is_decoder=True"):
        get_capt_model(BertModel(BertConfig(**sizes, is_decoder=True)), CaptConfig())
    masked = BertForMaskedLM(BertConfig(**sizes)).eval()
    for fields in (
        {},
        {"task_type": "CAUSAL_LM"},
        {"label_words": [1, 2]},
        {"task_type": "SEQ_CLS", "label_words": [1, 2]},
    ):
        with pytest.raises(NotImplementedError, match="BertForMaskedLM's language-model head fills masks"):
            get_capt_model(masked, CaptConfig(**fields))
    assert get_capt_model(masked, CaptConfig(task_type="SEQ_CLS"))(input_ids=torch.full((2, 3), 5)).logits.shape == (
        2,
        2,
    )
    features = get_capt_model(masked, CaptConfig(task_type="FEATURE_EXTRACTION"))
    assert features(input_ids=torch.full((2, 3), 5)).last_hidden_state.shape == (2, 3, 16)
    with pytest.raises(NotImplementedError, match="BertForMaskedLM has no language-model head to generate with"):
        features.generate(torch.full((2, 3), 5))
    with pytest.raises(NotImplementedError, match="no task here is for the head of BertForTokenClassification"):
        get_capt_model(BertForTokenClassification(BertConfig(**sizes)), CaptConfig())
    with pytest.raises(ValueError, match="'CAUSAL_LM' wants a base with such a language-model head, got BertModel"):
        get_capt_model(BertModel(BertConfig(**sizes)), CaptConfig(task_type="CAUSAL_LM"))


# --- real weights


def test_minilm():
    """A trained BERT: fused equals reference, a padded text equals itself alone, and the bare base is left alone."""
    try:
        folder = assets.minilm()
    except OSError as error:
        pytest.skip(f"the weights cannot be fetched: {error}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModel.from_pretrained(folder).eval()
    texts = ["a capsule", "The vectors of every prompted layer are trained, and nothing else of the model is.", "so"]
    model = get_capt_model(base, CaptConfig()).eval()
    randomise(model)
    for side in ("left", "right"):
        tokenizer.padding_side = side
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        results = []
        for backend in ("fused", "reference"):
            model.backend = backend
            states = model(**batch).last_hidden_state
            (grad,) = torch.autograd.grad(states[..., :50].square().sum(), model.adapters["default"].capsules.vectors)
            results.append((states, grad))
        assert_equal(results, 1e-5)
        short = model(**tokenizer(texts[:1], return_tensors="pt")).last_hidden_state
        among = results[1][0][:1, batch["attention_mask"][0].bool()]
        assert (among - short).abs().max() <= 1e-5 * short.abs().max()
    with model.disable_adapter():
        assert torch.equal(model(**batch).last_hidden_state, base(**batch).last_hidden_state)
