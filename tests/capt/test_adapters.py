"""Adapters of a CaptModel: dtypes, what trains, several on one base; and input that does not fit."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from transformers import (
    ElectraConfig,
    ElectraModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaModel,
)

from capt import CaptConfig, CaptModel, get_capt_model
from capt.capsules import Capsules

from .naive import SMALL, batch_of, make_base, randomise
from .small import classifier, wrapped

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
    with model.disable_adapter(), pytest.raises(ValueError, match="no adapter 'x'"):
        model(input_ids=ids, adapter_names=["default", "x"])
    with model.disable_adapter(), pytest.raises(ValueError, match="each of the 2 sequences, got 1"):
        model.generate(input_ids=ids, adapter_names=["default"], max_new_tokens=1)


def test_what_adapters_of_a_batch_may_differ_in():
    """Where the base was loaded from, but not the classes of a head."""
    model = classifier()
    model.add_adapter("elsewhere", replace(model.capt_config, base_model_name_or_path="a/folder"))
    ids = torch.ones(2, 3, dtype=torch.long)
    assert model(input_ids=ids, adapter_names=["default", "elsewhere"]).logits.shape == (2, 3)
    model.adapters["elsewhere"].head = torch.nn.Linear(16, 2)
    with pytest.raises(ValueError, match="equal configs and heads; 'default' and 'elsewhere' differ"):
        model(input_ids=ids, adapter_names=["default", "elsewhere"])


def test_set_adapter_trains_that_one_only():
    model = get_capt_model(make_base("llama"), CaptConfig())
    model.add_adapter("b", CaptConfig())
    assert [n for n, p in model.named_parameters() if p.requires_grad] == ["adapters.default.capsules.vectors"]
    model.set_adapter("b")
    assert [n for n, p in model.named_parameters() if p.requires_grad] == ["adapters.b.capsules.vectors"]


def test_a_loaded_adapter_does_not_train_unless_asked(tmp_path):
    """Nor does dropout act, even where the base was in training mode."""
    base = make_base("bert")
    base.train()
    get_capt_model(base, CaptConfig()).save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CaptModel.from_pretrained(base, tmp_path, is_trainable=True).train().training
        model = CaptModel.from_pretrained(base, tmp_path)
    assert not any(module.training for module in model.modules())
    with pytest.warns(UserWarning, match="adapter 'default' is frozen: load it with is_trainable=True"):
        model.train()
    model.set_adapter("default")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train()


def test_a_deleted_adapter_is_gone_and_its_name_free():
    model = get_capt_model(make_base("llama"), CaptConfig())
    model.add_adapter("b", CaptConfig(length=2))
    with pytest.raises(ValueError, match="'default' is the active one"):
        model.delete_adapter("default")
    with pytest.raises(ValueError, match="no adapter 'x'; adapters: default, b"):
        model.delete_adapter("x")
    model.delete_adapter("b")
    assert list(model.adapters) == ["default"]
    assert list(model.state_dict()) == ["adapters.default.capsules.vectors"]
    model.add_adapter("b", CaptConfig())


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
    electra = ElectraModel(ElectraConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(NotImplementedError, match=r"'electra' are not supported: .* ElectraModel is no causal decoder"):
        get_capt_model(electra, CaptConfig())
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
    for asked in ({"num_labels": 1}, {"problem_type": "multi_label_classification"}):
        base = LlamaForSequenceClassification(LlamaConfig(**SMALL, **asked))
        with pytest.raises(NotImplementedError, match=r"one label of several; the base's config asks for '(reg|multi)"):
            get_capt_model(base, CaptConfig())
    for variant in ("extraction", "projection"):  # their own parameters would train with nothing
        with pytest.raises(ValueError, match=f"first_mean=False leaves variant '{variant}' no mean to work on"):
            get_capt_model(make_base("llama"), CaptConfig(variant=variant, depth="input", first_mean=False))


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
    for outside in (3, -1):
        with pytest.raises(ValueError, match=f"labels of SEQ_CLS must be 0 to 2, got {outside}"):
            classifier()(input_ids=ids, labels=torch.tensor([0, outside]))
    assert classifier()(input_ids=ids, labels=torch.tensor([0, -100])).loss.isfinite()
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
