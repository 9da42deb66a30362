"""Bytes that a forward keeps for its backward: no more than it needs, half of that on demand."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralModel,
    Qwen3Config,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
)

from capt import CaptConfig, get_capt_model
from capt.memory import bytes_kept

from .naive import batch_of, make_base, randomise

DECODER = {
    "vocab_size": 100,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
ENCODER = {"vocab_size": 100, "d_model": 256, "d_kv": 32, "num_layers": 3, "num_heads": 8, "dropout_rate": 0.0}
GATED = {"d_ff": 688, "feed_forward_proj": "gated-gelu"}
#: The shapes of the families: as many key heads as query heads or fewer, norms of heads, a window, one hidden or two.
BASES = {
    "llama": lambda **more: LlamaModel(LlamaConfig(**DECODER | more)),
    "llama, all heads": lambda **more: LlamaModel(LlamaConfig(**DECODER | {"num_key_value_heads": 8} | more)),
    "mistral": lambda **more: MistralModel(MistralConfig(**DECODER | {"sliding_window": 50} | more)),
    "qwen3": lambda **more: Qwen3Model(Qwen3Config(**DECODER | {"head_dim": 32} | more)),
    "t5": lambda **more: T5EncoderModel(T5Config(**ENCODER | {"d_ff": 1024} | more)),
    "flan-t5": lambda **more: T5EncoderModel(T5Config(**ENCODER | GATED | more)),
}
LENGTHS = (120, 63, 97, 20)
ROWS = sum(LENGTHS) + len(LENGTHS)


#: A product in place, which FlopCounterMode does not know.
IN_PLACE = {torch.ops.aten.addmm_: lambda total, a, b, **_: 2 * a[0] * a[1] * b[1]}


def needed(config, layers=None, wide=4, narrow=4):
    """Bytes of the rows that a backward through frozen layers needs, each once; ``narrow`` of what a Linear hands out.

    The residual stream twice, q, k, v, the attention's output, gate and up (T5 v1.0 has one hidden), a number for each
    norm and each head's log-sum-exp in fp32. Behind the last layer the sum once more, and its norm. Qwen3 norms q and k
    and then turns them: the norm's backward needs them from before, the attention's from after, and each head has a
    norm's number.
    """
    if hasattr(config, "d_kv"):
        heads, keys, head = config.num_heads, config.num_heads, config.d_kv
        hidden = config.d_ff * (2 if config.is_gated_act else 1)
    else:
        heads, keys, head = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        hidden = 2 * config.intermediate_size
    normed = heads + keys if config.model_type == "qwen3" else 0
    outputs = (2 * (heads + keys) + normed) * head + hidden
    layer = wide * 2 * config.hidden_size + narrow * outputs + 4 * (2 + heads + normed)
    layers = config.num_hidden_layers if layers is None else layers
    return ROWS * (layers * layer + wide * config.hidden_size + 4)


def make(name, dtype=torch.float32, depth="all", **more):
    torch.manual_seed(0)
    model = get_capt_model(BASES[name](**more).to(dtype), CaptConfig(depth=depth)).train()
    randomise(model)
    model.backend = "fused"
    return model


def loss_of(model):
    torch.manual_seed(0)
    ids, mask = batch_of(LENGTHS, "left", 100)
    weights = torch.randn(*ids.shape, model.config.hidden_size)
    return lambda: (model(input_ids=ids, attention_mask=mask).last_hidden_state * weights).sum()


def kept_by(model):
    """Bytes kept of the stack: the loss keeps the weights of its own sum."""
    loss = loss_of(model)
    return bytes_kept(model, loss) - len(LENGTHS) * max(LENGTHS) * model.config.hidden_size * 4


def test_each_storage_counts_once_and_parameters_do_not():
    model = nn.Linear(4, 4, bias=False)
    model.register_buffer("frozen", torch.ones(100, 100))
    x = torch.randn(8, 4)

    def loss():
        hidden = model(x)  # keeps x, and the weight, which lies there anyway
        return (hidden * hidden + hidden.view(-1).view_as(hidden) ** 2).sum()

    assert bytes_kept(model, loss) == 2 * 8 * 4 * 4  # x and hidden, 8 x 4 floats each
    assert model.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BASES)
def test_each_needed_row_is_kept_once(name, dtype):
    """Offsets, masks, the rotary or bias table and the indices of the batch are the rest."""
    model = make(name, dtype)
    size = dtype.itemsize
    # The states of a bf16 base are widened by the loss, which is not the stack's.
    assert (
        needed(model.config, wide=size, narrow=size)
        <= kept_by(model)
        <= 1.03 * needed(model.config, wide=size, narrow=size)
    )


@pytest.mark.parametrize("name", ["llama", "t5", "flan-t5"])
def test_under_autocast_nothing_is_kept_of_a_square_of_rows(name):
    """torch itself keeps a bf16 copy of every frozen fp32 weight, and casts a bias or mask that it is handed."""
    model = make(name)
    with torch.autocast("cpu", torch.bfloat16):
        kept = kept_by(model)
    copies = sum(2 * module.weight.numel() for module in model.base.modules() if isinstance(module, nn.Linear))
    assert kept <= 1.03 * needed(model.config, narrow=2) + copies


def test_the_loss_keeps_logits_of_labelled_rows_alone():
    torch.manual_seed(0)
    model = get_capt_model(LlamaForCausalLM(LlamaConfig(**DECODER)), CaptConfig()).train()
    model.backend = "fused"
    ids, mask = batch_of(LENGTHS, "left", 100)
    labels = torch.where(torch.arange(max(LENGTHS)) < max(LENGTHS) - 3, -100, ids)
    kept = bytes_kept(model, lambda: model(input_ids=ids, attention_mask=mask, labels=labels).loss)
    labelled = 3 * len(LENGTHS) * DECODER["vocab_size"] * 4
    assert kept <= 1.03 * needed(model.config) + labelled


@pytest.mark.parametrize("name", BASES)
def test_min_keeps_half_and_computes_the_same(name):
    model = make(name)
    results, products = [], []
    for memory in ("full", "min"):
        model.memory = memory
        assert kept_by(model) <= needed(model.config) * {"full": 1.03, "min": 0.5}[memory]
        with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
            loss = loss_of(model)()
            results.append((loss, *torch.autograd.grad(loss, list(model.adapters.parameters()))))
        products.append(sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert products[1] <= 1.26 * products[0]


@pytest.mark.parametrize("variant", ["prepending", "extraction", "projection"])
def test_min_of_the_variants(variant):
    model = get_capt_model(make_base("llama", torch.float32), CaptConfig(variant=variant, rank=3)).train()
    randomise(model)
    ids, mask = batch_of((5, 1, 9))
    results = []
    for model.memory in ("full", "min"):
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        results.append((loss, *torch.autograd.grad(loss, list(model.adapters.parameters()))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("family", ["llama", "t5", "flan-t5"])
def test_min_of_a_base_with_trained_and_hooked_linears(family):
    """LoRA inside what is computed again, dropout included, and before the first prompted layer."""
    peft = pytest.importorskip("peft")
    base = make_base(family, torch.float32)
    if family != "llama":
        base.encoder.config.dropout_rate = 0.0
    targets = ["q_proj", "up_proj", "down_proj"] if family == "llama" else ["q", "o", "wi", "wi_0", "wo"]
    lora = peft.LoraConfig(target_modules=targets, init_lora_weights=False, lora_dropout=0.3)
    peft.inject_adapter_in_model(lora, base)
    model = get_capt_model(base, CaptConfig(depth=[1, 2])).train()
    for n, p in base.named_parameters():
        p.requires_grad_("lora_" in n and "decoder" not in n)
    model.backend = "fused"
    trained = [p for p in model.parameters() if p.requires_grad]
    ids, mask = batch_of((5, 1, 9))
    results, calls = [], []
    for module in base.modules():
        if isinstance(module, nn.Linear) and module.in_features == 24:
            module.register_full_backward_hook(lambda *_: calls.append(1))
    for model.memory in ("full", "min"):
        torch.manual_seed(3)
        loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        results.append((loss, *torch.autograd.grad(loss, trained)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert all(grad.abs().max() > 0 for grad in results[1][1:])
    assert len(calls) % 2 == 0
    assert calls


def test_what_memory_takes():
    model = get_capt_model(make_base("t5", torch.float32), CaptConfig()).eval()
    with pytest.raises(ValueError, match="memory must be one of full, min, got 'less'"):
        model.memory = "less"
    assert model.memory == "full"
    model.memory = "min"
    with pytest.raises(NotImplementedError, match="memory 'min' wants the fused backend: backend is 'reference'"):
        model.backend = "reference"
    assert (model.backend, model.memory) == ("auto", "min")
    ids = torch.ones(1, 3, dtype=torch.long)
    model.base.encoder.block[1].register_forward_hook(lambda *_: None)
    with pytest.raises(
        NotImplementedError, match=r"a hook or .* is registered on its T5Block; gradient_checkpointing_enable"
    ):
        model(input_ids=ids, decoder_input_ids=ids)
    with torch.no_grad():  # keeps nothing anyway
        model(input_ids=ids, decoder_input_ids=ids)
    model.memory = "full"
    model(input_ids=ids, decoder_input_ids=ids)
    with pytest.raises(NotImplementedError, match="memory 'min' wants the fused backend"):
        model.memory = "min"


@pytest.mark.parametrize("memory", ["full", "min"])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_layers_before_the_first_prompted_one_keep_nothing(name, memory):
    more = {"num_layers": 4} if name == "t5" else {"num_hidden_layers": 4}
    model = make(name, depth="latter_half", **more)
    model.memory = memory
    # As transformers does where it checkpoints, whatever trains.
    model.base.enable_input_require_grads()
    assert kept_by(model) <= needed(model.config, layers=2) * (1.03 if memory == "full" else 0.5)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_layers_before_the_first_prompted_one_keep_nothing_on_the_reference(name):
    kept = []
    for depth, layers in (("latter_half", 4), ("all", 2), ("all", 4)):
        model = make(name, depth=depth, **{"num_layers" if name == "t5" else "num_hidden_layers": layers})
        model.backend = "reference"
        model.base.enable_input_require_grads()
        kept.append(kept_by(model))
    latter, two, four = kept
    assert latter <= 1.01 * two < 0.6 * four


def test_given_embeddings_have_their_gradient_through_unprompted_layers():
    for backend in ("reference", "fused"):
        model = make("llama", depth=[2])
        model.backend = backend
        embeds = torch.randn(2, 5, 256, requires_grad=True)
        model(inputs_embeds=embeds).last_hidden_state.square().sum().backward()
        assert embeds.grad.abs().min() > 0


def test_counting_frees_what_it_counted():
    """An operation that keeps its own output would hold itself."""
    kept = []

    def forward():
        out = torch.ones(4, requires_grad=True).exp()
        kept.append(weakref.ref(out))
        return out.sum()

    assert bytes_kept(nn.Linear(1, 1), forward) == 16
    assert kept[0]() is None
