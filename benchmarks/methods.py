"""The methods that are compared, all on one frozen base: each takes a batch to its last hidden state.

The base is a Llama of 10 layers, 576 wide (a third of SmolLM2-135M), with random weights: time and memory do not depend
on what weights hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from capt import CaptConfig, get_capt_model

from .lengths import lengths

LAYERS, WIDTH, BATCH = 10, 576, 16


def make_base() -> LlamaModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=WIDTH,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=9,
        num_key_value_heads=3,
        pad_token_id=0,
        use_cache=False,
    )
    return LlamaModel(config).requires_grad_(False).eval()


def make_batch(task: str = "rte") -> dict[str, Tensor]:
    """Right-padded ids and mask of the task's real lengths."""
    counts = lengths(task, BATCH)
    mask = (torch.arange(int(counts.max())) < counts[:, None]).long()
    return {"input_ids": torch.randint(1, 1000, mask.shape) * mask, "attention_mask": mask}


@dataclass
class Method:
    """A model, what trains in it, and its forward to ``[B, T, D]``."""

    model: nn.Module
    trained: list[Tensor]
    forward: Callable[[dict[str, Tensor]], Tensor]


def _bare() -> Method:
    """The base as transformers runs it; a gradient reaches the embeddings, so backward runs through every layer."""
    base = make_base()
    shift = torch.zeros(WIDTH, requires_grad=True)

    def forward(batch: dict[str, Tensor]) -> Tensor:
        embeds = base.get_input_embeddings()(batch["input_ids"]) + shift
        return base(inputs_embeds=embeds, attention_mask=batch["attention_mask"]).last_hidden_state

    return Method(base, [shift], forward)


def _capt(backend: str, **fields) -> Method:
    model = get_capt_model(make_base(), CaptConfig(**fields)).eval()
    model.backend = backend
    # Zero vectors are where training starts, but an empty slot's norm is far from typical.
    for p in model.adapters.parameters():
        nn.init.normal_(p, std=0.5)
    return Method(model, [p for p in model.parameters() if p.requires_grad], lambda b: model(**b).last_hidden_state)


def _peft(config) -> Method:
    model = get_peft_model(make_base(), config).eval()
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        nn.init.normal_(p, std=0.5)
    length = int(lengths("rte", BATCH).max())
    return Method(model, trained, lambda b: model(**b).last_hidden_state[:, -length:])


def _prefix(tokens: int) -> Method:
    return _peft(PrefixTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=tokens))


def _prompt(tokens: int) -> Method:
    return _peft(PromptTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=tokens))


#: The row that every other is compared with.
BARE = "bare frozen base (transformers)"
METHODS: dict[str, Callable[[], Method]] = {
    BARE: _bare,
    "CaPT, reference": lambda: _capt("reference"),
    "CaPT, fused": lambda: _capt("fused"),
    "deep prompts, 20 a layer, fused": lambda: _capt("fused", instance=False, length=20),
    "P-Tuning v2 (PEFT prefix), 20": lambda: _prefix(20),
    "P-Tuning v2 (PEFT prefix), 100": lambda: _prefix(100),
    "prompt tuning (PEFT), 20": lambda: _prompt(20),
    "prompt tuning (PEFT), 100": lambda: _prompt(100),
}


def gemms(rows: int) -> Callable[[], None]:
    """The floor: the matrix products of a step alone, forward and for the input's gradient, on so many real rows."""
    shapes = [(WIDTH, WIDTH), (192, WIDTH), (192, WIDTH), (WIDTH, WIDTH), (1536, WIDTH), (1536, WIDTH), (WIDTH, 1536)]
    weights = [torch.randn(*shape) for _ in range(LAYERS) for shape in shapes]
    inputs = {WIDTH: torch.randn(rows, WIDTH), 1536: torch.randn(rows, 1536)}

    def run() -> None:
        for weight in weights:
            (inputs[weight.shape[1]] @ weight.T) @ weight

    return run
