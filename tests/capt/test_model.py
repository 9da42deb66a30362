"""CaptModel on small random bases: tasks, padding, masks, adapters, and inputs that broke others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaModel,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    T5Config,
    T5EncoderModel,
    T5ForSequenceClassification,
)

from capt import CaptConfig, get_capt_model
from capt.capsules import Capsules

from .naive import DECODERS, FAMILIES, SMALL, T5_SMALL, batch_of, make_base, randomise


def wrapped(family, dtype=torch.float64, **fields):
    model = get_capt_model(make_base(family, dtype), CaptConfig(**fields)).eval()
    if dtype == torch.float64:
        model = model.double()
    randomise(model)
    return model


def classifier(kind=LlamaForSequenceClassification, config=LlamaConfig, **fields):
    torch.manual_seed(1)
    base = kind(config(**SMALL, num_labels=3)).double().eval()
    model = get_capt_model(base, CaptConfig(task_type="SEQ_CLS", **fields)).eval().double()
    randomise(model)
    return model


# --- padding and positions


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_a_padded_row_equals_the_row_alone(family, side):
    """Positions count real tokens; for T5 physical ones would be far off with three left pads."""
    model = wrapped(family, lead=1)
    ids, mask = batch_of((3, 6), side, longest=6)
    extra = {"decoder_input_ids": torch.tensor([[0, 9]] * 2)} if family not in DECODERS else {}
    real = mask[0].bool()
    among = model(input_ids=ids, attention_mask=mask, **extra)
    alone = model(input_ids=ids[:1, real], **{k: v[:1] for k, v in extra.items()})
    name = "logits" if family in DECODERS else "encoder_last_hidden_state"
    torch.testing.assert_close(among[name][:1, real], alone[name], rtol=1e-9, atol=1e-9)
    if extra:
        torch.testing.assert_close(among.logits[:1], alone.logits, rtol=1e-9, atol=1e-9)
    assert not among[name][0, ~real].any()
    assert among[name].shape[:2] == ids.shape


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_an_all_padding_row_is_finite_and_stays_alone(family):
    model = wrapped(family)
    ids, mask = batch_of((4, 0, 6), "right")
    extra = {"decoder_input_ids": torch.tensor([[0, 9]] * 3)} if family == "t5" else {}
    out = model(input_ids=ids, attention_mask=mask, **extra).logits
    assert out.isfinite().all()
    keep = torch.tensor([0, 2])
    without = model(input_ids=ids[keep], attention_mask=mask[keep], **{k: v[keep] for k, v in extra.items()}).logits
    torch.testing.assert_close(out[keep], without, rtol=1e-9, atol=1e-9)
    out[keep].square().sum().backward()
    grad = model.adapters["default"].capsules.vectors.grad
    model.zero_grad()
    without.square().sum().backward()
    torch.testing.assert_close(model.adapters["default"].capsules.vectors.grad, grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_padding_embeddings_may_hold_anything(bad):
    model = wrapped("llama")
    ids, mask = batch_of((4, 6), "left")
    embeds = model.base.get_input_embeddings()(ids)
    want = model(inputs_embeds=embeds, attention_mask=mask).logits
    dirty = embeds.masked_fill(~mask.bool()[..., None], bad)
    assert torch.equal(model(inputs_embeds=dirty, attention_mask=mask).logits, want)


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
    ("kind", "config"), [(LlamaForSequenceClassification, LlamaConfig), (Qwen2ForSequenceClassification, Qwen2Config)]
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


# --- dtypes and training


def test_vectors_and_their_gradients_stay_fp32_on_a_bf16_base():
    model = get_capt_model(make_base("llama", torch.bfloat16), CaptConfig())
    vectors = model.adapters["default"].capsules.vectors
    vectors.data.fill_(1.0)
    model(input_ids=torch.randint(2, 61, (2, 5))).logits.float().square().sum().backward()
    assert vectors.dtype == vectors.grad.dtype == torch.float32
    optimizer = torch.optim.SGD([vectors], lr=1.0)
    vectors.grad.fill_(1e-3)
    optimizer.step()
    assert (vectors != 1.0).all()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_gradient_checkpointing_gives_the_same_gradient(family, when, reentrant):
    ids, mask = batch_of((4, 6), "left")
    labels = ids.masked_fill(mask == 0, -100)
    grads, kept = [], []
    for checkpointing in (False, True):
        base = make_base(family)
        for module in base.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if checkpointing and when == "before":
            base.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model = get_capt_model(base, CaptConfig(lead=1)).double().train()
        if checkpointing and when == "after":
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.backend = "reference"
        count = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, c=count: c.append(t.nbytes) or t, lambda t: t):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        grads.append(model.adapters["default"].capsules.vectors.grad)
        kept.append(sum(count))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-9, atol=1e-9)
    assert grads[0].abs().max() > 0
    assert kept[1] < kept[0]


def test_only_the_capsules_train():
    model = wrapped("llama")
    model(input_ids=torch.randint(2, 61, (2, 5))).logits.sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["adapters.default.capsules.vectors"]
    assert model.get_nb_trainable_parameters()[0] == 4 * 16
    instance_only = get_capt_model(make_base("llama"), CaptConfig(task=False))
    assert instance_only.get_nb_trainable_parameters()[0] == 0


def test_sizes_of_the_paper():
    """Trainable shares of T5-base, T5-large, Llama-3.2-1B and Qwen2.5-1.5B, on the meta device."""
    with torch.device("meta"):
        for layers, width, total, percent in ((12, 768, 222_903_552, 0.004), (24, 1024, 737_668_096, 0.003)):
            vectors = sum(p.numel() for p in Capsules(CaptConfig(), layers, width).parameters())
            assert vectors == layers * width
            assert round(100 * vectors / total, 3) == percent
        t5_base = {
            v: sum(p.numel() for p in Capsules(CaptConfig(variant=v), 12, 768).parameters())
            for v in ("extraction", "projection")
        }
    assert round(100 * t5_base["extraction"] / 222_903_552, 2) == 0.03
    assert round(100 * t5_base["projection"] / 222_903_552, 2) == 0.07


# --- adapters


def test_disabling_is_the_base_bit_for_bit_and_ends_however_it_is_left():
    model = wrapped("llama")
    ids, mask = batch_of((4, 6), "right")
    before = model(input_ids=ids, attention_mask=mask).logits
    with model.disable_adapter():
        assert torch.equal(
            model(input_ids=ids, attention_mask=mask).logits, model.base(input_ids=ids, attention_mask=mask).logits
        )
        with model.disable_adapter():
            pass
        assert torch.equal(model(input_ids=ids).logits, model.base(input_ids=ids).logits)
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, before)
    with pytest.raises(RuntimeError, match="out of the context"), model.disable_adapter():
        raise RuntimeError("out of the context")
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, before)


@pytest.mark.parametrize("variant", ["addition", "prepending", "extraction", "projection"])
def test_adapters_mixed_in_a_batch(variant):
    model = classifier(variant=variant, rank=3)
    config = model.capt_config
    for name in ("b", "unused"):
        model.add_adapter(name, config)
        model.adapters[name].double()
    randomise(model)
    for adapter in model.adapters.values():
        adapter.requires_grad_(True)
    ids, mask = batch_of((4, 6, 2), "left")
    names = ["default", "b", "default"]
    mixed = model(input_ids=ids, attention_mask=mask, adapter_names=names).logits
    for row, name in enumerate(names):
        model.set_adapter(name)
        alone = model(input_ids=ids[row : row + 1], attention_mask=mask[row : row + 1]).logits
        torch.testing.assert_close(mixed[row : row + 1], alone, rtol=1e-9, atol=1e-9)
    for adapter in model.adapters.values():
        adapter.requires_grad_(True)
    model(input_ids=ids, attention_mask=mask, adapter_names=names).logits.sum().backward()
    assert all(p.grad is not None for n in ("default", "b") for p in model.adapters[n].parameters())
    assert all(p.grad is None for p in model.adapters["unused"].parameters())


def test_adapter_errors():
    model = wrapped("llama")
    ids = torch.ones(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="no adapter 'x'; adapters: default"):
        model(input_ids=ids, adapter_names=["default", "x"])
    with pytest.raises(ValueError, match="each of the 2 sequences, got 1"):
        model(input_ids=ids, adapter_names=["default"])
    with pytest.raises(ValueError, match="'default' exists already"):
        model.add_adapter("default", CaptConfig())
    with pytest.raises(ValueError, match="no adapter 'x'"):
        model.set_adapter("x")
    model.add_adapter("longer", CaptConfig(length=2))
    with pytest.raises(ValueError, match="'default' and 'longer' differ"):
        model(input_ids=ids, adapter_names=["default", "longer"])


def test_set_adapter_trains_that_one_only():
    model = get_capt_model(make_base("llama"), CaptConfig())
    model.add_adapter("b", CaptConfig())
    assert [n for n, p in model.named_parameters() if p.requires_grad] == ["adapters.default.capsules.vectors"]
    model.set_adapter("b")
    assert [n for n, p in model.named_parameters() if p.requires_grad] == ["adapters.b.capsules.vectors"]


def test_unloading_gives_the_base_back_and_merging_says_why_not():
    base = make_base("llama")
    base.lm_head.weight.requires_grad_(False)
    trained = [n for n, p in base.named_parameters() if p.requires_grad]
    ids = torch.ones(1, 4, dtype=torch.long)
    want = base(input_ids=ids).logits
    model = get_capt_model(base, CaptConfig())
    model(input_ids=ids)
    with pytest.raises(NotImplementedError, match="depends on the input's own mean"):
        model.merge_and_unload()
    back = model.unload()
    assert back is base
    assert [n for n, p in base.named_parameters() if p.requires_grad] == trained
    assert torch.equal(base(input_ids=ids).logits, want)
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in base.modules())


# --- bad input


def test_bases_that_do_not_fit():
    with pytest.raises(NotImplementedError, match="model_type 'bert' are not supported; supported: llama"):
        get_capt_model(
            BertModel(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)),
            CaptConfig(),
        )
    with pytest.raises(ValueError, match="PreTrainedModel, got Linear"):
        get_capt_model(torch.nn.Linear(2, 2), CaptConfig())
    with pytest.raises(ValueError, match="CaptConfig, got dict"):
        get_capt_model(make_base("llama"), {})
    with pytest.raises(ValueError, match=r"'SEQ_2_SEQ_LM' wants a base .* got LlamaForCausalLM"):
        get_capt_model(make_base("llama"), CaptConfig(task_type="SEQ_2_SEQ_LM"))
    with pytest.raises(ValueError, match="wants label_words or a T5ForSequenceClassification, got T5ForCond"):
        get_capt_model(make_base("t5"), CaptConfig(task_type="SEQ_CLS"))
    with pytest.raises(ValueError, match="below the vocabulary's size 61, got 61"):
        get_capt_model(make_base("llama"), CaptConfig(label_words=[1, 61]))
    with pytest.raises(ValueError, match=r"label_words are read from a language-model head, and LlamaModel has none"):
        get_capt_model(LlamaModel(LlamaConfig(**SMALL)), CaptConfig(label_words=[1, 2]))
    with pytest.raises(ValueError, match=r"depth \(4,\) does not fit a base with 4 layers"):
        get_capt_model(make_base("llama"), CaptConfig(depth=[4]))
    with pytest.raises(ValueError, match="rank must be at most the base's hidden size 16, got 17"):
        get_capt_model(make_base("llama"), CaptConfig(variant="projection", rank=17))


def test_inputs_that_do_not_fit():
    model = wrapped("llama")
    ids = torch.ones(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="exactly one of input_ids"):
        model(input_ids=ids, inputs_embeds=torch.zeros(2, 3, 16))
    with pytest.raises(ValueError, match="exactly one of input_ids"):
        model(attention_mask=ids)
    with pytest.raises(ValueError, match=r"attention_mask must have shape \[B, T\] = \(2, 3\), got \(2, 4\)"):
        model(input_ids=ids, attention_mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match="mask must hold only 0 and 1"):
        model(input_ids=ids, attention_mask=torch.full((2, 3), -1e4))
    with pytest.raises(ValueError, match=r"labels must have shape \[B, T\] = \(2, 3\), got \(2,\)"):
        model(input_ids=ids, labels=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="decoder_input_ids given to LlamaForCausalLM, which has no decoder"):
        model(input_ids=ids, decoder_input_ids=ids)
    with pytest.raises(ValueError, match=r"one class id a row, shape \(2,\), got"):
        classifier()(input_ids=ids, labels=torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(TypeError, match="output_attentions"):
        model(input_ids=ids, output_attentions=True)
    with pytest.raises(ValueError, match="backend must be one of auto, reference, fused, got 'x'"):
        model.backend = "x"


def test_reference_and_auto_backends_agree():
    model = wrapped("llama", lead=1, length=2)
    ids, mask = batch_of((4, 6), "left")
    auto = model(input_ids=ids, attention_mask=mask).logits
    model.backend = "reference"
    assert (model(input_ids=ids, attention_mask=mask).logits - auto).abs().max() <= 1e-6 * auto.abs().max()
