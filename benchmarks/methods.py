"""The methods that are compared, each on an engine: what a user would pick, and how it runs.

To add one, write a function of a base that returns a :class:`Method`, and put it into :data:`ENTRIES`. The base is
headless where hidden states are compared, and has its language-model head where tokens are decoded; its modules are the
method's own, its weights are shared by all.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from capt import CaptConfig, get_capt_model
from capt.methods import PrefixModel
from capt.runner import Runner

from .bases import Batch
from .padded import PaddedCapt


@dataclass
class Method:
    """A model at work.

    Args:
        module: holds all its parameters.
        trained: those that train.
        forward: of a batch, to hidden states ``[B, T, D]``, logits ``[B, T, V]`` of a base with its head, or ``[B, C]``
            of a classifier.
        generate: as transformers' ``generate``, where tokens can be decoded.
    """

    module: nn.Module
    trained: list[nn.Parameter]
    forward: Callable[[Batch], Tensor]
    generate: Callable[..., Tensor] | None = None

    def loss(self, batch: Batch) -> Tensor:
        """:func:`loss_of` what forward returns."""
        return loss_of(self.forward(batch))


Build = Callable[[PreTrainedModel], Method]


def loss_of(out: Tensor) -> Tensor:
    """A scalar that depends on all of ``out``; every method has this one."""
    return out.float().square().mean()


def _start(trained: list[nn.Parameter], std: float) -> None:
    """The same random values on each engine. Zeros are where training starts, but a zero has no typical norm."""
    values = torch.randn(sum(p.numel() for p in trained), generator=torch.Generator().manual_seed(0)) * std
    with torch.no_grad():
        for p, value in zip(trained, values.split([p.numel() for p in trained]), strict=True):
            p.copy_(value.view_as(p))


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def _result(out: Any) -> Tensor:
    return out["logits"] if "logits" in out else out["last_hidden_state"]


def _given(batch: Batch) -> Batch:
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def _packed(base: PreTrainedModel) -> Callable[..., Tensor]:
    """The base without a slot on the fused engine: rows are packed at the door, and that is all that changes."""
    runner = Runner(base)
    runner.backend = "fused"

    def forward(batch: Batch, shift: Tensor | None = None) -> Tensor:
        given = batch["input_ids"]
        if shift is not None:
            given = base.get_input_embeddings()(given) + shift
        rows = runner.run(None, given, batch["attention_mask"], None)
        return rows.restore(rows.tokens)

    return forward


def bare(base: PreTrainedModel, fused: bool = False) -> Method:
    """The base itself. A gradient reaches the embeddings, so that backward runs through every layer, as for p."""
    shift = nn.Parameter(torch.zeros(base.config.hidden_size, device=base.device, dtype=base.dtype))
    if fused:
        packed = _packed(base)
        return Method(base, [shift], lambda batch: packed(batch, shift))

    def forward(batch: Batch) -> Tensor:
        embeds = base.get_input_embeddings()(batch["input_ids"]) + shift
        return _result(base(inputs_embeds=embeds, attention_mask=batch["attention_mask"]))

    return Method(base, [shift], forward, base.generate if base.can_generate() else None)


def capsule(base: PreTrainedModel, backend: str, memory: str = "full", std: float = 0.5, **fields: Any) -> Method:
    """This library's model. The mean covers ``batch["pool_mask"]``, or every real token."""
    model = get_capt_model(base, CaptConfig(**fields)).eval()
    model.backend, model.memory = backend, memory
    trained = _trained(model)
    _start(trained, std)
    generates = model.generate if base.can_generate() else None
    return Method(model, trained, lambda batch: _result(model(**batch)), generates)


def prefix(base: PreTrainedModel, backend: str, tokens: int) -> Method:
    """This library's P-Tuning v2: keys and values in front of every layer's own, on every family."""
    model = PrefixModel(base, tokens).eval()
    model.backend = backend
    trained = _trained(model)
    _start(trained, 0.5)
    return Method(model, trained, lambda batch: _result(model(**_given(batch))))


def padded(base: PreTrainedModel, compiled: bool) -> Method:
    """CaPT without this library."""
    module = PaddedCapt(base, compiled).eval()
    trained = list(module.vectors)
    _start(trained, 0.5)
    return Method(module, trained, lambda batch: module(**_given(batch)))


def peft(base: PreTrainedModel, config: Callable[..., PeftConfig], fused: bool = False, **fields: Any) -> Method:
    """A method of PEFT's; LoRA runs on the fused engine too, which calls the base's own Linear modules."""
    headed = base.get_output_embeddings() is not None
    model: Any = get_peft_model(base, config(task_type="CAUSAL_LM" if headed else "FEATURE_EXTRACTION", **fields))
    model.eval()
    trained = _trained(model)
    _start(trained, 0.05 if config is LoraConfig else 0.5)
    if fused:
        return Method(model, trained, _packed(base))

    def forward(batch: Batch) -> Tensor:
        # Prompt tuning returns its own positions too, in front.
        return _result(model(**_given(batch)))[:, -batch["input_ids"].shape[1] :]

    return Method(model, trained, forward, model.generate)


def linear_head(base: PreTrainedModel, fused: bool = False) -> Method:
    """A linear classifier on the last token's (BERT and T5: the first's) state. No gradient enters the base."""
    head = nn.Linear(base.config.hidden_size, 2, bias=False, device=base.device, dtype=base.dtype)
    _start(list(head.parameters()), 0.02)
    states = _packed(base) if fused else lambda batch: base(**_given(batch)).last_hidden_state
    causal = base.config.model_type in ("llama", "mistral", "qwen2", "qwen3")

    def forward(batch: Batch) -> Tensor:
        with torch.no_grad():
            hidden = states(batch)
        mask = batch["attention_mask"]
        place = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1) if causal else mask.argmax(1)
        return head(hidden[torch.arange(len(hidden), device=hidden.device), place])

    return Method(nn.ModuleList([base, head]), list(head.parameters()), forward)


def fine_tuning(base: PreTrainedModel) -> Method:
    """Every weight trains, so this one holds weights of its own, moved as a few steps would move them."""
    own = copy.deepcopy(base).requires_grad_(True)
    generator = torch.Generator(base.device).manual_seed(0)
    with torch.no_grad():
        for p in own.parameters():
            p += 1e-3 * torch.randn(p.shape, generator=generator, device=p.device, dtype=p.dtype)
    return Method(own, list(own.parameters()), lambda batch: _result(own(**_given(batch))))


class Entry(NamedTuple):
    """A row of the table.

    Args:
        method, engine: what it is and what runs it; the same method on two engines has the same output.
        core: whether every base and every task has this row, or the main comparison alone.
        decodes: whether it writes text, and does so otherwise than the rows that do.
    """

    method: str
    engine: str
    build: Build
    core: bool = False
    decodes: bool = False

    @property
    def name(self) -> str:
        return f"{self.method} | {self.engine}"


TRANSFORMERS, COMPILED, FUSED, FUSED_MIN = "transformers", "torch.compile", "fused", "fused, memory min"
LENGTHS = (10, 20, 50, 100)


def _entries() -> list[Entry]:
    p = functools.partial
    entries = [
        Entry("bare base", TRANSFORMERS, bare, core=True, decodes=True),
        Entry("bare base", FUSED, p(bare, fused=True), core=True),
        Entry("zero slot", TRANSFORMERS, p(capsule, backend="reference", instance=False, std=0.0)),
        Entry("zero slot", FUSED, p(capsule, backend="fused", instance=False, std=0.0)),
        Entry("CaPT", TRANSFORMERS, p(capsule, backend="reference"), core=True, decodes=True),
        Entry("CaPT", "plain torch, padded", p(padded, compiled=False)),
        Entry("CaPT", COMPILED, p(padded, compiled=True), core=True),
        Entry("CaPT", FUSED, p(capsule, backend="fused"), core=True, decodes=True),
        Entry("CaPT", FUSED_MIN, p(capsule, backend="fused", memory="min"), core=True),
    ]
    for n in LENGTHS:
        cached = p(peft, config=PrefixTuningConfig, num_virtual_tokens=n)
        entries.append(Entry(f"P-Tuning v2 (PEFT prefix), {n}", TRANSFORMERS, cached, n == 20, decodes=True))
    for n in LENGTHS:
        for engine, backend in ((TRANSFORMERS, "reference"), (FUSED, "fused")):
            if engine == FUSED or n == 20:
                own = p(prefix, backend=backend, tokens=n)
                entries.append(Entry(f"P-Tuning v2 (prefix), {n}", engine, own, core=n == 20))
    for n in LENGTHS:
        for engine, backend in ((TRANSFORMERS, "reference"), (FUSED, "fused")):
            if engine == FUSED or n == 20:
                deep = p(capsule, backend=backend, instance=False, length=n)
                decodes = engine == FUSED and n == 20
                entries.append(Entry(f"P-Tuning v2 (deep prompts), {n}", engine, deep, decodes=decodes))
    for n in (20, 100):
        prompt = p(peft, config=PromptTuningConfig, num_virtual_tokens=n)
        entries.append(Entry(f"prompt tuning (PEFT), {n}", TRANSFORMERS, prompt, n == 20, decodes=n == 20))
    lora = p(peft, config=LoraConfig, r=8, lora_alpha=16)
    return [
        *entries,
        Entry("LoRA (PEFT), r 8", TRANSFORMERS, lora, core=True, decodes=True),
        Entry("LoRA (PEFT), r 8", FUSED, p(lora, fused=True)),
        Entry("linear head", TRANSFORMERS, linear_head, core=True),
        Entry("linear head", FUSED, p(linear_head, fused=True)),
        Entry("full fine-tuning", TRANSFORMERS, fine_tuning, core=True),
    ]


ENTRIES: dict[str, Entry] = {entry.name: entry for entry in _entries()}
#: The row that every other is compared with.
BARE = f"bare base | {TRANSFORMERS}"
#: Rows of the curves over T and N.
CURVE = (
    BARE,
    f"CaPT | {TRANSFORMERS}",
    f"CaPT | {FUSED}",
    f"CaPT | {FUSED_MIN}",
    f"P-Tuning v2 (PEFT prefix), 20 | {TRANSFORMERS}",
    f"P-Tuning v2 (prefix), 20 | {FUSED}",
)
