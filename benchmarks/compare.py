"""One comparison: a base, a batch, a kind of work, and every method on them in one run.

A method is timed after it was seen to be one (:func:`failure`); one that is not gets its reason instead of a time.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from capt.memory import bytes_kept

from .bases import Batch, headless, make_base, make_batch, shell
from .floor import least_bytes, matrix_products
from .measure import Rounds, interleaved, peak_bytes, settled
from .methods import BARE, ENTRIES, Method, loss_of

#: The floor's name beside the methods', in the same rounds.
PRODUCTS = "matrix products alone"


@dataclass(frozen=True)
class Setting:
    """What a group of rows shares.

    Args:
        base, layers: as :func:`.bases.make_base` takes them. task, rows: as :func:`.lengths.lengths` does.
        work: "train" (forward, backward, AdamW), "prefill" (forward alone) or "decode" (``new_tokens`` behind prompts).
        axis: "T" or "N" where the setting is a point of a curve.
    """

    base: str
    task: str
    rows: int
    work: str
    layers: int | None = None
    axis: str | None = None
    new_tokens: int = 64

    def __str__(self) -> str:
        layers = "" if self.layers is None else f" ({self.layers} layers)"
        work = f"decode {self.new_tokens}" if self.work == "decode" else self.work
        over = "" if self.axis is None else f", over {self.axis}"
        return f"{self.base}{layers}, {self.task} x {self.rows}, {work}{over}"


@dataclass
class Row:
    """A method's result: ``samples`` in seconds, or the reason why there are none."""

    samples: list[float] = field(default_factory=list)
    reason: str | None = None
    info: dict[str, Any] = field(default_factory=dict)


@settled()
def compare(setting: Setting, names: Iterable[str], rounds: Rounds, device: str = "cpu") -> dict[str, Row]:
    """A :class:`Row` for each method of ``names``, and for the bare base.

    ``info`` of a row: real tokens and samples a second; ``over_bare`` and ``over_products``, medians of the rounds' own
    ratios; ``bytes_kept`` and ``peak_bytes`` of a step; ``trained`` numbers, ``trained_bytes`` of a file of them,
    ``optimizer_bytes``; ``least_bytes`` of the floor.
    """
    base = make_base(setting.base, setting.layers, device)
    if setting.work != "decode":
        base = headless(base)
    elif not base.can_generate():
        return {name: Row(reason=f"{type(base).__name__} generates no text") for name in names}
    torch.manual_seed(1)
    batch = make_batch(base, setting.task, setting.rows, "left" if setting.work == "decode" else "right")
    tokens = int(batch["attention_mask"].sum())
    rows, calls, references = {}, {}, {}
    for name in dict.fromkeys((BARE, *names)):
        row = rows[name] = Row(info={"least_bytes": least_bytes(base, tokens)})
        try:
            method = ENTRIES[name].build(shell(base))
            row.reason = failure(name, method, base, batch, references, setting)
            if row.reason is None:
                call, out = _call(setting, method, batch, row.info)
                row.reason = None if out is None else _odd(name, out, batch, "the batch", references)
                if row.reason is None:
                    calls[name] = call
        except Exception as error:  # whatever a peer raises is its result; the bare base has to run
            if name == BARE:
                raise
            row.reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if BARE not in calls:  # what everything is compared with
        for row in rows.values():
            row.reason = row.reason or f"the bare base {rows[BARE].reason}"
        return rows
    products = _products(setting, base, tokens)
    products()
    seconds = interleaved({PRODUCTS: products, **calls}, rounds)
    for name in calls:
        own = rows[name].samples = seconds[name]
        made = setting.rows * setting.new_tokens if setting.work == "decode" else tokens
        median = statistics.median(own)
        rows[name].info |= {
            "over_bare": statistics.median(a / b for a, b in zip(own, seconds[BARE], strict=True)),
            "over_products": statistics.median(a / b for a, b in zip(own, seconds[PRODUCTS], strict=True)),
            "samples_per_second": setting.rows / median,
            "tokens_per_second": made / median,
            "products_seconds": statistics.median(seconds[PRODUCTS]),
        }
    return rows


def failure(
    name: str, method: Method, base: PreTrainedModel, batch: Batch, references: dict[str, Tensor], setting: Setting
) -> str | None:
    """Why ``method`` is not to be timed, or None.

    It has to change the bare base's output and to train all that it says it trains, on the shortest text alone and
    padded beside the longest; to run on the base's own weights and attention; and to give on this engine what it gives
    on another. :func:`compare` holds what it makes of the whole batch to the same.

    Args:
        references: outputs of the methods before this one, by text and method; its own are added.
    """
    shared = {p.data_ptr() for p in base.parameters()}
    frozen = [p for p in method.module.parameters() if not p.requires_grad]
    if any(p.data_ptr() not in shared for p in frozen):
        return "does not run on the base's own weights"
    kinds = {m.config._attn_implementation for m in method.module.modules() if isinstance(m, PreTrainedModel)}
    if kinds - {base.config._attn_implementation}:
        return f"runs on attention {kinds}, the base on {base.config._attn_implementation}"
    mask = batch["attention_mask"]
    counts = mask.sum(1)
    shortest, longest = int(counts.argmin()), int(counts.argmax())
    alone = {name: tensor[shortest, mask[shortest].bool()][None] for name, tensor in batch.items()}
    if setting.work == "decode":
        return _decodes_otherwise(method, alone)
    parts = {"one text": alone}
    if len(mask) > 1:
        parts["two texts"] = {name: tensor[[shortest, longest]] for name, tensor in batch.items()}
    for where, part in parts.items():
        whole = method.forward(part)
        loss = loss_of(whole)
        odd = _odd(name, whole.detach(), part, where, references)
        if odd is not None:
            return odd + ("" if loss.requires_grad else ", and has no gradient")
        if not loss.requires_grad:
            return f"has no gradient on {where}"
        grads = torch.autograd.grad(loss, method.trained, allow_unused=True)
        still = sum(grad is None or not grad.any() for grad in grads)
        if still:
            return f"{still} of the {len(grads)} tensors that it trains have no gradient on {where}"
    return None


def _odd(name: str, out: Tensor, batch: Batch, where: str, references: dict[str, Tensor]) -> str | None:
    """What is wrong with ``out``, what method ``name`` makes of ``batch``, or None."""
    if out.dim() == 3:
        out = out[batch["attention_mask"].bool()]
    if not out.isfinite().all():
        return f"is not finite on {where}"
    own, base = ENTRIES[name].method, ENTRIES[BARE].method
    if own != base:
        bare = references[f"{where} | {base}"]
        if out.shape == bare.shape and torch.allclose(out, bare, rtol=1e-4, atol=1e-5):
            return "leaves the base's output as it is"
    same = references.setdefault(f"{where} | {own}", out)
    if _distance(out, same) > (0.05 if out.dtype == torch.bfloat16 else 1e-3):
        return f"differs on {where} from the same method on another engine"
    return None


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).float().norm() / b.float().norm())


def _decodes_otherwise(method: Method, alone: Batch, new: int = 4) -> str | None:
    """Whether greedy decoding writes what the method's own forward over the finished text finds likeliest.

    Args:
        alone: one text without padding, whose positions nobody can count in another way.
    """
    if method.generate is None:
        return "generates no text"
    with torch.no_grad():
        text = method.generate(**alone, **_greedy(new))
        real = torch.ones_like(text)
        prompt = real.clone()
        prompt[:, -new:] = 0
        logits = method.forward({"input_ids": text, "attention_mask": real, "pool_mask": prompt})[:, -new - 1 : -1]
    written = logits.gather(-1, text[:, -new:, None])[..., 0]
    # Two tokens may be equally likely but for rounding.
    if (written < logits.amax(-1) - 1e-3 * logits.abs().amax(-1)).any():
        return "decodes with its cache what its own forward would not"
    return None


def _greedy(new: int) -> dict[str, Any]:
    return {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}


def _call(
    setting: Setting, method: Method, batch: Batch, info: dict[str, Any]
) -> tuple[Callable[[], object], Tensor | None]:
    """What is timed, and what it makes of the batch (decoding: None).

    Its memory goes into ``info``, and measuring that warms it up. The first step makes the optimizer's state.
    """
    info["trained"] = sum(p.numel() for p in method.trained)
    info["trained_bytes"] = sum(p.nbytes for p in method.trained)
    if setting.work == "decode":
        return lambda: method.generate(**batch, **_greedy(setting.new_tokens)), None
    if setting.work == "prefill":
        forward = torch.no_grad()(functools.partial(method.forward, batch))
        info["peak_bytes"] = peak_bytes(forward)
        return forward, forward()
    # A step costs the same at any rate; at 0 the method stays the one that is checked.
    optimizer = torch.optim.AdamW(method.trained, lr=0.0)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        method.loss(batch).backward()
        optimizer.step()

    info["peak_bytes"] = peak_bytes(step)
    state = [t for each in optimizer.state.values() for t in each.values() if isinstance(t, Tensor)]
    info["optimizer_bytes"] = sum(t.nbytes for t in state)
    made: list[Tensor] = []

    def loss() -> Tensor:
        out = method.forward(batch)
        made.append(out.detach())
        return loss_of(out)

    info["bytes_kept"] = bytes_kept(method.module, loss)
    return step, made[0]


def _products(setting: Setting, base: PreTrainedModel, tokens: int) -> Callable[[], None]:
    if setting.work == "decode":
        return matrix_products(base, setting.rows, backward=False, repeats=setting.new_tokens)
    return matrix_products(base, tokens, backward=setting.work == "train")
