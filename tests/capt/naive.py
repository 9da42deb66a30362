"""CaPT as a loop over samples, without padding, on transformers' own forward: what the wrapper must equal.

Slots are put into ``inputs_embeds`` and overwritten by hooks in front of each layer, so that nothing of the library
takes part but the numbers of its vectors. A base is cut in two where the first prompted layer is not layer 0.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.functional import adaptive_avg_pool1d, conv1d
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5ForConditionalGeneration,
)

SMALL = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
T5_SMALL = {
    "vocab_size": 61,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 4,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.1,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
BERT_SMALL = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 600,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=3)),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=4, max_window_layers=2)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=8)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**T5_SMALL)),
    "flan-t5": lambda: T5ForConditionalGeneration(
        T5Config(**T5_SMALL, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    ),
    "bert": lambda: BertModel(BertConfig(**BERT_SMALL)),
    # Its positions are counted from behind the padding token's id.
    "roberta": lambda: RobertaModel(RobertaConfig(**BERT_SMALL | {"pad_token_id": 1}), add_pooling_layer=False),
}
DECODERS = ("llama", "mistral", "qwen2", "qwen3")
ENCODERS = ("bert", "roberta")


def make_base(family, dtype=torch.float64):
    """A small random base whose weights are large enough for layers to matter."""
    torch.manual_seed(0)
    base = FAMILIES[family]().to(dtype).eval()
    for name, p in base.named_parameters():
        if p.dim() > 1:
            p.data = torch.randn_like(p) * (
                1.0 if "embed" in name or "shared" in name or "relative" in name else p.shape[-1] ** -0.5
            )
        elif family in ENCODERS:  # biases, and the weights of LayerNorms
            p.data += 0.3 * torch.randn_like(p)
    base.tie_weights()
    return base


def randomise(model):
    """Adapters away from their start: vectors, taps and projections alike; the same ones in every dtype."""
    for adapter in model.adapters.values():
        for p in adapter.parameters():
            p.data = p.data + 0.5 * torch.randn(p.shape).to(p)


def batch_of(lengths, side="right", vocabulary=61, longest=None):
    """Token ids and mask of sequences of these lengths; ``"holes"`` scatters the padding."""
    longest = longest or max(lengths)
    ids, mask = (
        torch.zeros(len(lengths), longest, dtype=torch.long),
        torch.zeros(len(lengths), longest, dtype=torch.long),
    )
    for row, n in enumerate(lengths):
        places = torch.arange(n) if side == "right" else torch.arange(longest - n, longest)
        if side == "holes":
            places = torch.randperm(longest)[:n].sort().values
        ids[row, places] = torch.randint(2, vocabulary, (n,))
        mask[row, places] = 1
    return ids, mask


def _pool(rows, pieces):
    return adaptive_avg_pool1d(rows.T[None], pieces)[0].T if len(rows) else rows.new_zeros(pieces, rows.shape[1])


def slot_values(config, p, old, tokens, member):
    """Slots ``[S, D]`` of one sequence; ``old`` are its processed slots or None; ``p`` the layer's own parameters."""
    vectors, first = p["vectors"], old is None
    pooled = tokens[member]
    if config.variant == "extraction":
        # Centre the odd kernel on every row, zeros beyond the ends.
        taps = p["conv_weight"][:, None]
        pooled = (
            conv1d(pooled.T[None], taps, p["conv_bias"], padding=taps.shape[-1] // 2, groups=len(taps))[0].T
            if len(pooled)
            else pooled
        )
    rows = pooled if first else torch.cat([old, pooled])
    mean = _pool(rows, config.length)
    with_mean = config.instance and (config.first_mean or not first)
    if config.variant == "prepending":
        return torch.cat([mean if with_mean else 0 * mean, vectors])
    if not with_mean:
        return vectors
    if config.variant == "projection":
        mean = mean @ p["down"] @ p["up"]
    return vectors + mean


def _part(stack, layers, last):
    """A copy of the stack with some of its layers (sharing their weights), and its final norm only if ``last``."""
    part = copy.copy(stack)
    part._modules = dict(stack._modules)
    name = "block" if hasattr(stack, "block") else "layers"
    kept = nn.ModuleList([getattr(stack, name)[i] for i in layers])
    part._modules[name] = kept
    part.config = copy.deepcopy(stack.config)
    part.config.num_hidden_layers = len(layers)
    if getattr(stack.config, "layer_types", None):
        part.config.layer_types = [stack.config.layer_types[i] for i in layers]
    if name == "block":
        part.config.num_layers = len(layers)
    if not last:
        part._modules["final_layer_norm" if name == "block" else "norm"] = nn.Identity()
    return part, kept


def _overwriter(config, parameters, lead, member, inserts):
    """A hook in front of a layer that writes the slots; ``inserts``: there are none yet."""

    def overwrite(module, args, kwargs):
        hidden = args[0][0] if args else kwargs["hidden_states"][0]
        slots = 0 if inserts else config.slots
        front, old, behind = hidden.split([lead, slots, len(hidden) - lead - slots])
        new = slot_values(config, parameters, None if inserts else old, torch.cat([front, behind]), member)
        return (torch.cat([front, new, behind])[None], *args[1:]), kwargs

    return overwrite


def _run_encoder(stack, config, prompted, parameters, tokens, member, token_types):
    """BERT's own forward on word embeddings; its layers take slots as they come, since nothing else counts rows."""
    lead = min(config.lead, len(tokens))
    moved = config.slots if config.positions == "shift" and prompted[0] == 0 else 0
    first = stack.config.pad_token_id + 1 if stack.config.model_type == "roberta" else 0
    places = [first + i + (moved if i >= lead else 0) for i in range(len(tokens))]
    handles = [
        stack.encoder.layer[i].register_forward_pre_hook(
            _overwriter(config, parameters[j], lead, member, inserts=j == 0), with_kwargs=True
        )
        for j, i in enumerate(prompted)
    ]
    try:
        out = stack(
            inputs_embeds=tokens[None],
            position_ids=torch.tensor([places]),
            token_type_ids=None if token_types is None else token_types[None],
        ).last_hidden_state[0]
    finally:
        for handle in handles:
            handle.remove()
    return out[lead : lead + config.slots], torch.cat([out[:lead], out[lead + config.slots :]])


def run_sample(base, config, adapter, tokens, member, token_types=None):
    """One sequence of embeddings ``[n, D]`` through the stack: processed slots ``[S, D]``, tokens ``[n, D]``."""
    prompted = list(adapter.capsules.layers)
    parameters = [{k: v[j] for k, v in adapter.capsules.named_parameters(recurse=False)} for j in range(len(prompted))]
    if base.config.model_type in ENCODERS:
        return _run_encoder(base.base_model, config, prompted, parameters, tokens, member, token_types)
    stack = base.encoder if hasattr(base, "encoder") else base.model
    t5 = hasattr(stack, "block")
    total = len(stack.block if t5 else stack.layers)
    lead, slots = min(config.lead, len(tokens)), config.slots
    if prompted[0]:
        part, kept = _part(stack, range(prompted[0]), last=False)
        with _relative_bias(stack, kept, torch.arange(len(tokens))) if t5 else _nothing():
            tokens = part(inputs_embeds=tokens[None]).last_hidden_state[0]
    first = slot_values(config, parameters[0], None, tokens, member)
    rows = torch.cat([tokens[:lead], first, tokens[lead:]])
    places = torch.arange(len(rows))
    if config.positions == "keep":
        places = torch.cat([torch.arange(lead), torch.zeros(slots, dtype=torch.long), torch.arange(lead, len(tokens))])
    part, kept = _part(stack, range(prompted[0], total), last=True)
    handles = [
        kept[i - prompted[0]].register_forward_pre_hook(
            _overwriter(config, parameters[j], lead, member, inserts=False), with_kwargs=True
        )
        for j, i in enumerate(prompted[1:], 1)
    ]
    try:
        # Without a mask transformers takes repeated positions for several sequences packed into one.
        mask = torch.ones(1, len(rows), dtype=torch.long)
        extra = {} if t5 else {"position_ids": places[None], "attention_mask": mask, "use_cache": False}
        with _relative_bias(stack, kept, places) if t5 else _nothing():
            out = part(inputs_embeds=rows[None], **extra).last_hidden_state[0]
    finally:
        for handle in handles:
            handle.remove()
    return out[lead : lead + slots], torch.cat([out[:lead], out[lead + slots :]])


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


class _relative_bias:
    """Lets the first block of a part compute T5's bias at the positions ``places``, with the stack's own table."""

    def __init__(self, stack, kept, places):
        self.attention, self.owner, self.places = (
            kept[0].layer[0].SelfAttention,
            stack.block[0].layer[0].SelfAttention,
            places,
        )

    def __enter__(self):
        owner, places = self.owner, self.places

        def compute(query_length, key_length, device=None, past_seen_tokens=0):
            distance = places[None, :] - places[:, None]
            buckets = owner._relative_position_bucket(
                distance,
                bidirectional=True,
                num_buckets=owner.relative_attention_num_buckets,
                max_distance=owner.relative_attention_max_distance,
            )
            return owner.relative_attention_bias(buckets).permute(2, 0, 1)[None]

        self.before = self.attention.has_relative_attention_bias
        self.attention.has_relative_attention_bias, self.attention.compute_bias = True, compute

    def __exit__(self, *_):
        self.attention.has_relative_attention_bias = self.before
        del self.attention.compute_bias
