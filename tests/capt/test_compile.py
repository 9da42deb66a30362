"""torch.compile of a whole model: equal numbers and gradients, and a number of graphs that nothing makes grow."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel, T5Config, T5EncoderModel

from capt import CaptConfig, get_capt_model

from .naive import SMALL, T5_SMALL, batch_of, randomise

BASES = {
    "llama": lambda layers: LlamaModel(LlamaConfig(**SMALL | {"num_hidden_layers": layers})),
    "t5": lambda layers: T5EncoderModel(T5Config(**T5_SMALL | {"num_layers": layers})),
    "bert": lambda layers: BertModel(BertConfig(**SMALL | {"num_hidden_layers": layers}), add_pooling_layer=False),
}
#: Graphs of a forward: two of layers, and those of the door, the norm behind the last layer, and the outputs.
MOST = 9


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def make(family, layers=2):
    torch.manual_seed(0)
    model = get_capt_model(BASES[family](layers), CaptConfig()).eval()
    randomise(model)
    model.backend = "fused"
    return model


def step(model, run, lengths):
    """States, and the vectors' gradient."""
    torch.manual_seed(1)
    ids, mask = batch_of(lengths, "left")
    states = run(input_ids=ids, attention_mask=mask).last_hidden_state
    (grad,) = torch.autograd.grad(states.square().mean(), [p for p in model.parameters() if p.requires_grad])
    return states, grad


def assert_equal(model, compiled, lengths, tolerance=1e-6):
    for got, want in zip(step(model, compiled, lengths), step(model, model, lengths), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * want.abs().max().item())


# How many graphs there are is decided before a backend sees them, and the ops' backwards are the same in every family.
@pytest.mark.parametrize(
    ("family", "layers", "backend"), [("llama", 2, "aot_eager"), ("t5", 4, "eager"), ("bert", 3, "eager")]
)
def test_equal_numbers_and_no_storm(family, layers, backend):
    model = make(family, layers)
    compiled = torch.compile(model, backend=backend)
    made = []
    for lengths in ((7, 3), (8, 5), (9, 2), (9, 4, 6), (8, 1, 3, 3)):
        assert_equal(model, compiled, lengths)
        made.append(counters["stats"]["unique_graphs"])
    # A second length makes sizes dynamic, a second size of the batch that one; then all are served. The first layer has
    # a graph and the others have one, however many there are.
    assert 0 < made[0] <= MOST
    assert made[1] == made[2] <= 2 * MOST
    assert made[3] == made[4] <= 3 * MOST


def test_the_least_memory():
    model = make("llama")
    model.memory = "min"
    assert_equal(model, torch.compile(model, backend="eager"), (7, 3))


def test_inference_mode():
    model = make("llama")
    compiled = torch.compile(model, backend="eager")
    ids, mask = batch_of((7, 3), "left")
    with torch.inference_mode():
        got = compiled(input_ids=ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(got, model(input_ids=ids, attention_mask=mask).last_hidden_state)
