"""The limit: the matrix products that a step cannot do without, and the bytes that its backward cannot do without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from capt.backbones import backbones_of

#: Linear modules that write to the residual stream, by the ends of their names; no backward needs their outputs.
WRITERS = ("o_proj", "down_proj", "SelfAttention.o", "DenseReluDense.wo", "output.dense")
ATTENTION_WRITERS = ("o_proj", "SelfAttention.o", "attention.output.dense")


def _linears(base: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    for layer in backbones_of(base)[1].layers():
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                yield name, module


def matrix_products(base: PreTrainedModel, rows: int, backward: bool, repeats: int = 1) -> Callable[[], None]:
    """A call that multiplies ``rows`` by each weight of the layers, and, for the input's gradient, by its transpose.

    Args:
        repeats: of the whole, as decoding repeats it token by token, and the head with it.
    """
    weights = [module.weight for _, module in _linears(base)]
    head: Any = base.get_output_embeddings()
    if head is not None:
        weights.append(head.weight)
    widths = {weight.shape[1] for weight in weights}
    inputs = {width: torch.randn(rows, width).to(weights[0]) for width in widths}

    @torch.no_grad()
    def run() -> None:
        for _ in range(repeats):
            for weight in weights:
                out = inputs[weight.shape[1]] @ weight.T
                if backward:
                    out @ weight

    return run


def least_bytes(base: PreTrainedModel, rows: int) -> int:
    """Bytes that a backward through the frozen layers reads if nothing is computed twice, each once.

    A layer's two norms read their inputs and one number a row; attention q, k, v, its output and one number a head (the
    log-sum-exp, as in FlashAttention); the feed-forward block what stands in front of its activation.
    """
    reference, packed = backbones_of(base)
    layers = len(packed.layers())
    heads = base.config.get_text_config().num_attention_heads
    numbers = layers * (2 * reference.width + 2 + heads)
    for name, module in _linears(base):
        if not name.endswith(WRITERS):
            numbers += module.out_features
        elif name.endswith(ATTENTION_WRITERS):
            numbers += module.in_features
    # A pre-norm stack ends in one more norm.
    numbers += 0 if reference.has_token_types else reference.width + 1
    return numbers * rows * base.dtype.itemsize
