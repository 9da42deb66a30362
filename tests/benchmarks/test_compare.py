"""The benchmark's own parts, on two layers and two texts."""

import time

import pytest
import torch

pytest.importorskip("peft")

from benchmarks.bases import headless, make_base, make_batch, shell
from benchmarks.compare import Setting, compare, failure
from benchmarks.measure import Replay, Rounds, interleaved, peak_bytes
from benchmarks.methods import BARE, ENTRIES, Method

SETTING = Setting("llama-10x576", "rte", 2, "train", 2)
ONCE = Rounds(1, 1, 0)
#: Every way to build a row but the compiled one.
ROWS = [
    *(f"{method} | {engine}" for method in ("zero slot", "CaPT") for engine in ("transformers", "fused")),
    "CaPT | plain torch, padded",
    "CaPT | fused, memory min",
    *(f"P-Tuning v2 (prefix), 20 | {engine}" for engine in ("transformers", "fused")),
    *(f"P-Tuning v2 (deep prompts), 20 | {engine}" for engine in ("transformers", "fused")),
    "P-Tuning v2 (PEFT prefix), 10 | transformers",
    "prompt tuning (PEFT), 20 | transformers",
    *(f"{method} | {engine}" for method in ("LoRA (PEFT), r 8", "linear head") for engine in ("transformers", "fused")),
    "full fine-tuning | transformers",
]


@pytest.fixture(scope="module")
def base():
    return headless(make_base("llama-10x576", 2))


@pytest.fixture(scope="module")
def batch(base):
    return make_batch(base, "rte", 2)


def test_every_row_is_a_method_and_has_its_numbers():
    rows = compare(SETTING, ROWS, ONCE)
    assert list(rows) == [BARE, *ROWS]
    for name, row in rows.items():
        assert row.reason is None, name
        assert len(row.samples) == 1
        wanted = {
            "bytes_kept",
            "peak_bytes",
            "trained",
            "optimizer_bytes",
            "over_bare",
            "over_products",
            "tokens_per_second",
        }
        assert wanted <= row.info.keys()
        assert row.info["peak_bytes"] >= row.info["bytes_kept"], name
    assert rows[BARE].info["over_bare"] == 1


def test_base_zero_slot_and_capsule_are_three(base, batch):
    real = batch["attention_mask"].bool()
    names = (BARE, "zero slot | fused", "CaPT | fused")
    bare, zero, capsule = (ENTRIES[name].build(shell(base)).forward(batch)[real] for name in names)
    for one, other in ((bare, zero), (bare, capsule), (zero, capsule)):
        assert not torch.allclose(one, other, atol=1e-3)


def test_peft_prefix_reaches_nothing_in_a_t5_encoder():
    name = "P-Tuning v2 (PEFT prefix), 20 | transformers"
    row = compare(Setting("t5-6x768", "rte", 2, "train", 2), [name, "CaPT | fused"], ONCE)[name]
    assert row.reason == "leaves the base's output as it is, and has no gradient"
    assert not row.samples


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (
            lambda m: setattr(m, "forward", lambda b: m.module.base(b["input_ids"]).last_hidden_state),
            "leaves the base's",
        ),
        (lambda m: m.trained.append(torch.nn.Parameter(torch.zeros(1))), "1 of the 2 tensors that it trains have no"),
        (lambda m: setattr(m.module.adapters.default.capsules, "vectors", None), "raises"),
        (lambda m: m.trained[0].data.mul_(2), "differs on one text from the same method on another engine"),
        (lambda m: m.trained[0].data.fill_(torch.nan), "is not finite on one text"),
    ],
    ids=["no effect", "idle tensor", "raises", "another engine", "not finite"],
)
def test_what_is_no_method_is_not_timed(base, batch, break_it, reason, monkeypatch):
    entry = ENTRIES["CaPT | fused"]

    def build(shell) -> Method:
        method = entry.build(shell)
        break_it(method)
        return method

    monkeypatch.setitem(ENTRIES, "CaPT | fused", entry._replace(build=build))
    row = compare(SETTING, ["CaPT | transformers", "CaPT | fused"], ONCE)["CaPT | fused"]
    assert not row.samples
    assert row.reason.startswith(reason) or (reason == "raises" and "Error: " in row.reason)


def test_the_whole_batch_is_compared_as_well(monkeypatch):
    """What the engines agree on for two texts they may still make otherwise of sixteen."""
    entry = ENTRIES["CaPT | fused"]

    def build(shell) -> Method:
        method = entry.build(shell)
        forward = method.forward
        method.forward = lambda batch: forward(batch) * (1 + 0.1 * (len(batch["input_ids"]) > 2))
        return method

    monkeypatch.setitem(ENTRIES, "CaPT | fused", entry._replace(build=build))
    for work in ("train", "prefill"):
        setting = Setting("llama-10x576", "rte", 3, work, 2)
        row = compare(setting, ["CaPT | transformers", "CaPT | fused"], ONCE)["CaPT | fused"]
        assert row.reason == "differs on the batch from the same method on another engine"
        assert not row.samples


def test_a_method_runs_on_the_base_s_own_weights(base, batch):
    method = ENTRIES["CaPT | fused"].build(headless(make_base("llama-10x576", 2)))
    assert failure("CaPT | fused", method, base, batch, {}, SETTING) == "does not run on the base's own weights"


def test_decoding_is_timed_where_it_writes_what_the_forward_would():
    names = ["CaPT | fused", "P-Tuning v2 (PEFT prefix), 20 | transformers", "linear head | transformers"]
    rows = compare(Setting("llama-10x576", "rte", 2, "decode", 2, new_tokens=4), names, ONCE)
    assert [bool(row.samples) for row in rows.values()] == [True, True, True, False]
    assert rows["linear head | transformers"].reason == "generates no text"


def test_rounds_are_interleaved():
    calls = []
    seconds = interleaved({name: lambda name=name: calls.append(name) for name in "ab"}, Rounds(2, 2, 0))
    assert "".join(calls) == "ab" * 2
    assert [len(s) for s in seconds.values()] == [2, 2]


def test_rounds_stop_when_their_time_is_over():
    seconds = interleaved({"a": lambda: time.sleep(0.02)}, Rounds(2, 9, 0.01))
    assert len(seconds["a"]) == 2


def test_peak_counts_what_lives_at_once():
    def call():
        a = torch.empty(1000)
        b = torch.empty(500)
        del a
        c = torch.empty(250)
        return b, c

    assert peak_bytes(call) == 4 * 1500


def test_clock_replays_rounds():
    clock = Replay()
    clock.load([0.5, 0.25])
    ticks = [clock() for _ in range(4)]
    assert [ticks[1] - ticks[0], ticks[3] - ticks[2]] == [0.5, 0.25]
