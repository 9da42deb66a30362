"""BERT on packed rows equals BERT on padded ones, with the base's own modules and no more kept than is needed."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, CamembertConfig, CamembertModel, XLMRobertaConfig, XLMRobertaModel

from capt import CaptConfig, get_capt_model
from capt.memory import bytes_kept

from .naive import BERT_SMALL, ENCODERS, batch_of, make_base, randomise
from .small import wrapped
from .test_packed_parity import assert_equal, both

VARIANTS = ("addition", "prepending", "extraction", "projection")
DEPTHS = ("all", "input", "first_half", "latter_half", "odd", [1, 3])


@pytest.mark.parametrize("depth", DEPTHS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_fused_equals_reference(variant, depth):
    """Families in the squares of a chessboard, padding sides likewise."""
    family = ENCODERS[(VARIANTS.index(variant) + DEPTHS.index(depth)) % 2]
    # The only mean is the first one, which these two variants are about.
    means = (True,) if depth == "input" and variant in ("extraction", "projection") else (True, False)
    for length, lead, first_mean in itertools.product((1, 3), (0, 1), means):
        config = CaptConfig(variant=variant, depth=depth, length=length, lead=lead, first_mean=first_mean, rank=3)
        side = ("left", "right")[(length // 2 + lead + first_mean) % 2]
        results = both(family, config, (5, 1, 9, 0, 2), side, torch.float32)
        assert_equal(results, 1e-5)
        assert all(result.abs().max() > 1e-2 for result in results[0][:3])


@pytest.mark.parametrize("backend", ["reference", "fused"])
@pytest.mark.parametrize(
    ("kind", "config"),
    [(XLMRobertaModel, XLMRobertaConfig), (CamembertModel, CamembertConfig)],
    ids=["xlm-r", "camembert"],
)
def test_robertas_kin_is_roberta_by_other_names(kind, config, backend):
    ids, mask = batch_of((4, 7), "left")
    roberta = wrapped("roberta")
    base = kind(config(**BERT_SMALL | {"pad_token_id": 1}), add_pooling_layer=False).double().eval()
    base.load_state_dict(roberta.base.state_dict())
    model = get_capt_model(base, CaptConfig()).double().eval()
    model.adapters.load_state_dict(roberta.adapters.state_dict())
    roberta.backend = model.backend = backend
    want = roberta(input_ids=ids, attention_mask=mask).last_hidden_state
    assert torch.equal(model(input_ids=ids, attention_mask=mask).last_hidden_state, want)


def test_what_makes_auto_fall_back_and_fused_raise():
    model = wrapped("bert")
    choose = model._runner.choose
    assert choose("shift") is choose("keep") is model._runner.packed
    assert model.train()._runner.choose("shift") is model._runner.packed
    model.eval()
    for name in (
        "layer.1",
        "layer.1.attention",
        "layer.1.attention.self",
        "layer.1.attention.output",
        "layer.1.output",
    ):
        seen = []
        module = model.base.encoder.get_submodule(name)
        handle = module.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        with pytest.raises(NotImplementedError, match=f"is registered on its {type(module).__name__}"):
            model.backend = "fused"
        model(input_ids=torch.ones(1, 3, dtype=torch.long))
        handle.remove()
        assert seen == [1]
    assert choose("shift") is model._runner.packed


def test_hidden_dropout_acts_on_packed_rows_too():
    base = BertModel(BertConfig(**BERT_SMALL, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.5))
    model = get_capt_model(base, CaptConfig()).train()
    model.backend = "fused"
    ids, mask = batch_of((5, 3), "left")
    one, two = (model(input_ids=ids, attention_mask=mask).last_hidden_state for _ in range(2))
    assert not torch.equal(one, two)
    one, two = (model.eval()(input_ids=ids, attention_mask=mask).last_hidden_state for _ in range(2))
    assert torch.equal(one, two)


def test_the_bases_own_modules_are_called():
    """A hooked, quantised or LoRA-wrapped Linear goes on working, and so does a norm or an activation."""
    model = wrapped("bert")
    called = []
    for name, module in model.base.encoder.named_modules():
        if isinstance(module, nn.Linear | nn.LayerNorm) or name.endswith("intermediate"):
            module.register_forward_hook(lambda *_, n=name: called.append(n))
    model.backend = "fused"
    model(input_ids=torch.ones(1, 3, dtype=torch.long))
    assert len(called) == len(set(called)) == (6 + 2 + 1) * 4


#: MiniLM's and BERT-base's, but for the number of layers.
SHAPES = {
    "minilm": {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 12},
    "bert-base": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
}


@pytest.mark.parametrize("drops_out", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bytes_kept_for_backward(shape, drops_out):
    """Per row and layer: the rows in front of both norms, q, k, v, and, unless computed again, the rest."""
    torch.manual_seed(0)
    config = BertConfig(**BERT_SMALL | shape | {"num_hidden_layers": 2}, attention_probs_dropout_prob=0.0)
    model = get_capt_model(BertModel(config), CaptConfig()).train(drops_out)
    model.backend = "fused"
    ids, mask = batch_of((40, 63, 17), "left")
    width, heads = config.hidden_size, config.num_attention_heads
    # A dropout on a CPU keeps the factor of each number, in fp32.
    floats = {"full": 10 * width + heads + 4 + drops_out * 2 * width, "min": 5 * width + 2 + drops_out * width}
    kept = {}
    for model.memory in ("full", "min"):
        kept[model.memory] = bytes_kept(model, lambda: model(input_ids=ids, attention_mask=mask)[0].sum())
        needed = 2 * (40 + 63 + 17 + 3) * 4 * floats[model.memory]
        assert needed <= kept[model.memory] <= 1.01 * needed  # offsets and the pooled rows are the rest
    assert kept["min"] <= 0.5 * kept["full"]


@pytest.mark.parametrize("drops_out", [False, True])
def test_memory_min_gives_the_same_gradient(drops_out):
    model = wrapped("roberta", lead=1).train(drops_out)
    for layer in model.base.encoder.layer:
        layer.attention.self.dropout.p = 0.0
    ids, mask = batch_of((5, 9), "left")
    grads = []
    for memory in ("full", "min"):
        model.memory = memory
        model.zero_grad()
        torch.manual_seed(0)
        model(input_ids=ids, attention_mask=mask).last_hidden_state[..., :3].square().sum().backward()
        grads.append(model.adapters["default"].capsules.vectors.grad)
    assert grads[0].abs().max() > 0
    assert torch.equal(*grads)


@pytest.mark.parametrize("backend", ["reference", "fused"])
def test_gradient_checkpointing_gives_the_same_gradient(backend):
    ids, mask = batch_of((4, 6), "left")
    grads = []
    for checkpointing in (False, True):
        base = make_base("bert")
        for module in base.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model = get_capt_model(base, CaptConfig(lead=1)).double().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.backend = backend
        model(input_ids=ids, attention_mask=mask).last_hidden_state[..., :3].square().sum().backward()
        grads.append(model.adapters["default"].capsules.vectors.grad)
    assert grads[0].abs().max() > 0
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True], ids=["cast", "autocast"])
def test_low_precision(dtype, autocast):
    """Fused may err at most twice as much against fp64 as the base's own layers do in the same dtype."""
    ids, mask = batch_of((5, 9), "left")
    results = {}
    for name, kind, backend in (
        ("true", torch.float64, "reference"),
        ("plain", dtype, "reference"),
        ("fused", dtype, "fused"),
    ):
        base = make_base("bert").to(torch.float32 if autocast and name != "true" else kind)
        model = get_capt_model(base, CaptConfig(lead=1)).eval()
        if name == "true":
            model.double()
        torch.manual_seed(1)
        randomise(model)
        model.backend = backend
        with torch.autocast("cpu", dtype, enabled=autocast and name != "true"):
            states = model(input_ids=ids, attention_mask=mask).last_hidden_state
        states[..., :3].double().square().mean().backward()
        results[name] = (states.detach().double(), model.adapters["default"].capsules.vectors.grad.double())
    for true, plain, fused in zip(*results.values(), strict=True):
        allowed = 2 * (plain - true).abs().max() + torch.finfo(dtype).eps * true.abs().max()
        assert (fused - true).abs().max() <= allowed


def test_auto_says_why_training_is_slow():
    model = wrapped("bert").train()
    model.base.encoder.layer[1].register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match=r"trains on the slower reference backend: a hook .* on its BertLayer"):
        model(input_ids=torch.full((1, 3), 5))
    model.backend = "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(input_ids=torch.full((1, 3), 5))
