"""Cells of the experiments: methods, answers, and what a cell's results tell."""

import csv
import dataclasses
import json

import pytest
import torch
from transformers import AutoTokenizer

from capt.experiments import METHODS, Bench, Cell, run_cell
from capt.experiments.answers import TextToText, answer_of
from capt.experiments.cells import build, slots_of
from capt.experiments.fit import better
from capt.methods import PrefixModel
from capt.tasks import Prompt
from capt.training import TrainConfig
from capt.training.loading import load_base

from .tiny import BAD, GOOD, save_llama


@pytest.fixture
def config(sources):
    return TrainConfig(
        model=sources["llama"],
        task="file",
        train_file=sources["reviews"],
        batch_size=8,
        max_steps=4,
        eval_steps=2,
        learning_rate=0.1,
        warmup_steps=0,
        max_length=40,
    )


def weights(base):
    return {name: tensor.clone() for name, tensor in base.state_dict().items()}


def test_what_decides_a_task_s_rows_is_not_taken_from_another_cell(config, sources):
    bench, tokenizer = Bench(), AutoTokenizer.from_pretrained(sources["llama"])
    ids = []
    for template in ("{text}", "a film: {text}"):
        cell = Cell("capt", dataclasses.replace(config, template=template), answer="linear")
        ids.append(bench.rows(cell, "test", 40, tokenizer)[0]["input_ids"])
        assert bench.task(cell.config).prompt.template == template
    assert len(ids[1]) > len(ids[0])


def test_label_words_are_asked_for(tmp_path, sources):
    rows = [
        {"premise": "a film", "hypothesis": "fine", "label": ("entailment", "not_entailment")[i % 2]} for i in range(20)
    ]
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bench, tokenizer = Bench(), AutoTokenizer.from_pretrained(sources["llama"])
    config = TrainConfig(model=sources["llama"], task="rte", data_dir=str(tmp_path))
    linear, words = (
        bench.rows(Cell("capt", config, answer=answer), "test", 400, tokenizer)[0]["input_ids"]
        for answer in ("linear", "label-words")
    )
    assert len(words) > len(linear)


def test_a_prefix_takes_positions_of_bert_s_table(sources):
    for family, taken in (("bert", 3), ("llama", 0)):
        base, _ = load_base(sources[family], 2)
        assert slots_of(PrefixModel(base, 3, task_type="SEQ_CLS")) == taken


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("family", "answer"), [("llama", "linear"), ("llama", "label-words"), ("t5", "text"), ("bert", "linear")]
)
def test_every_method_leaves_the_base_as_it_was(config, sources, family, answer, method):
    config = dataclasses.replace(config, model=sources[family], max_steps=2)
    bench = Bench()
    base = bench.base(config, 2)[0]
    before, names = weights(base), [name for name, _ in base.named_parameters()]
    results = run_cell(Cell(method, config, answer=answer), bench)
    assert [name for name, p in base.named_parameters() if p.requires_grad] == names
    after = base.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert results["steps"] == (2 if results["parameters"]["trainable"] else 0)
    assert 0 <= results["metrics"]["test"]["score"] <= 1
    assert results["rows"] == {"train": 48, "validation": 6, "test": 6}


@pytest.mark.parametrize(
    ("method", "answer", "trainable"),
    [
        ("bare", "linear", 64),
        ("bare", "label-words", 0),
        ("capt", "label-words", 64),
        ("capt", "linear", 128),
        ("instance-only", "label-words", 0),
        ("instance-only", "linear", 64),
        # rank 8 on q (32 to 32) and v (32 to 16) of two layers
        ("lora", "label-words", 2 * 8 * (32 + 32 + 32 + 16)),
    ],
)
def test_what_trains(config, method, answer, trainable):
    module = build(Cell(method, config, answer=answer), Bench())
    assert sum(p.numel() for p in module.parameters() if p.requires_grad) == trainable


def test_lora_and_a_capsule_learn_and_the_best_step_is_kept(config):
    start = dataclasses.replace(config, max_steps=1, eval_steps=1, learning_rate=1e-9)
    config = dataclasses.replace(config, max_steps=16, learning_rate=0.03, eval_steps=4)
    for method in ("lora", "capt"):
        untrained = run_cell(Cell(method, start, answer="linear"), Bench())["metrics"]["validation"]
        results = run_cell(Cell(method, config, answer="linear"), Bench())
        marks, best = results["history"], results["metrics"]["validation"]
        assert [mark["step"] for mark in marks] == [4, 8, 12, 16]
        assert best in marks
        assert not any(better(mark, best) for mark in marks)
        assert min(mark["loss"] for mark in marks) < untrained["loss"]


def test_early_stopping_and_a_rate_that_is_too_high(config):
    config = dataclasses.replace(config, max_steps=30, eval_steps=1, patience=2, learning_rate=1e-9)
    assert run_cell(Cell("bare", config), Bench())["steps"] < 30
    results = run_cell(Cell("bare", dataclasses.replace(config, learning_rate=3e37)), Bench())
    assert results["metrics"] == {"validation": None, "test": None}
    assert results["steps"] == 1
    json.dumps(results, allow_nan=False)


def test_the_same_cell_gives_the_same_numbers(config):
    cells = [Cell("capt", dataclasses.replace(config, seed=seed), answer="linear") for seed in (0, 0, 1)]
    first, again, other = (run_cell(cell, Bench()) for cell in cells)
    clock = ("seconds", "cpu_seconds")
    assert {k: v for k, v in first.items() if k not in clock} == {k: v for k, v in again.items() if k not in clock}
    assert other["history"] != first["history"]


def test_a_bare_classifier_sees_no_padding(config):
    module = build(Cell("bare", config, answer="linear"), Bench())
    ids = torch.tensor([[7, 8, 9, 0, 0], [7, 8, 9, 10, 11]])
    both = module(input_ids=ids, attention_mask=torch.tensor([[1, 1, 1, 0, 0], [1] * 5]))["logits"]
    alone = module(input_ids=ids[:1, :3], attention_mask=torch.ones(1, 3, dtype=torch.long))["logits"]
    torch.testing.assert_close(both[:1], alone)


# --- answers ----------------------------------------------------------------------------------------------------------


def test_text_to_text_learns_to_write_the_labels(config, sources):
    config = dataclasses.replace(
        config, model=sources["t5"], max_steps=60, eval_steps=20, learning_rate=0.03, optimizer="adamw"
    )
    results = run_cell(Cell("lora", config), Bench())
    losses = [mark["loss"] for mark in results["history"]]
    assert losses[-1] < losses[0]
    assert max(mark["score"] for mark in results["history"]) > 0


def test_a_label_of_several_tokens_has_to_be_written_whole(sources):
    base, tokenizer = load_base(sources["t5"], 3)
    prompt = Prompt("{text}", "text", ("good film", "good", "bad"))
    answer = answer_of(None, prompt, base, tokenizer)
    good, film, bad, end = (tokenizer.convert_tokens_to_ids(word) for word in ("good", "film", "bad", "<eos>"))
    assert answer.targets.tolist() == [[good, film, end], [good, end, -100], [bad, end, -100]]

    class Writer(torch.nn.Module):
        def generate(self, input_ids, max_new_tokens, **_):
            assert max_new_tokens == 3
            return torch.tensor([[0, good, end, 0], [0, good, film, end], [0, bad, bad, end], [0, good, film, bad]])

    ids = torch.ones(4, 2, dtype=torch.long)
    logits = TextToText(Writer(), answer)(input_ids=ids, attention_mask=ids)["logits"]
    assert logits.argmax(-1).tolist() == [1, 0, 3, 3]


@pytest.mark.parametrize(
    ("family", "answer", "message"),
    [
        ("llama", "text", "answer 'text' does not fit LlamaForCausalLM: only an encoder-decoder writes"),
        ("t5", "linear", "answer 'linear' does not fit T5ForConditionalGeneration"),
        ("bert", "label-words", "answer 'label-words' does not fit BertModel: there is no language-model head"),
        ("llama", "essay", "answer must be 'text', 'linear' or 'label-words', got 'essay'"),
    ],
)
def test_answers_that_do_not_fit(config, sources, family, answer, message):
    with pytest.raises(ValueError, match=message):
        build(Cell("bare", dataclasses.replace(config, model=sources[family]), answer=answer), Bench())


def test_labels_that_are_one_text_to_the_tokenizer(sources):
    base, tokenizer = load_base(sources["t5"], 2)
    with pytest.raises(ValueError, match="the labels zebra, okapi are not all different to this tokenizer"):
        answer_of("text", Prompt("{text}", "text", ("zebra", "okapi")), base, tokenizer)


# --- what a cell trains on --------------------------------------------------------------------------------------------


def test_noise_and_shots_change_the_training_rows_alone(config):
    bench, plain = Bench(), Cell("capt", config)
    noisy, few = dataclasses.replace(plain, noise=0.3), dataclasses.replace(plain, shots=4)
    assert bench.examples(noisy, "train") != bench.examples(plain, "train")
    assert len(bench.examples(few, "train")) == 4
    for split in ("validation", "test"):
        assert bench.examples(noisy, split) == bench.examples(few, split) == bench.examples(plain, split)
    tokenizer = bench.base(config, 2)[1]
    assert bench.rows(noisy, "train", 40, tokenizer) != bench.rows(plain, "train", 40, tokenizer)
    other = dataclasses.replace(few, config=dataclasses.replace(config, seed=1))
    assert bench.rows(other, "train", 40, tokenizer) != bench.rows(few, "train", 40, tokenizer)


def test_the_slot_is_within_max_length(config):
    bench = Bench()
    config = dataclasses.replace(config, max_length=8)
    longest = {}
    for method, options in (("bare", {}), ("capt", {}), ("capt", {"length": 3})):
        module = build(Cell(method, config, options), bench)
        rows = run_cell(Cell(method, dataclasses.replace(config, max_steps=1), options), bench)["rows"]
        assert rows["train"] == 48
        longest[method, len(options)] = max(
            len(row["input_ids"]) for key, kept in bench._rows.items() for row in kept if key[3] == 8 - slots_of(module)
        )
    assert longest == {("bare", 0): 8, ("capt", 0): 7, ("capt", 1): 5}


def test_the_majority_class_is_that_of_training(config, tmp_path):
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text", "label"], *[[f"the film {GOOD[i % 5]}", "good"] for i in range(30)]])
        csv.writer(file).writerows([[BAD[i % 5], "bad"] for i in range(10)])
    (tmp_path / "b.csv").write_text("text,label\nfine,good\ndull,bad\nawful,bad\ncold,bad\n")
    config = dataclasses.replace(config, train_file=str(tmp_path / "a.csv"), eval_file=str(tmp_path / "b.csv"))
    results = run_cell(Cell("bare", dataclasses.replace(config, max_steps=1), answer="linear"), Bench())
    assert results["majority"] == {"score": 0.25}


# --- descriptions -----------------------------------------------------------------------------------------------------


def test_a_cell_is_told_apart_by_what_decides_its_numbers(config):
    cell = Cell("capt", config)
    different = [
        dataclasses.replace(cell, **change)
        for change in (
            {"method": "lora"},
            {"options": {"length": 2}},
            {"answer": "label-words"},
            {"shots": 4},
            {"noise": 0.1},
            {"config": dataclasses.replace(config, learning_rate=0.2)},
            {"config": dataclasses.replace(config, seed=1)},
            {"config": dataclasses.replace(config, max_length=41)},
        )
    ]
    assert len({one.file for one in [cell, *different]}) == 9
    moved = dataclasses.replace(cell, config=dataclasses.replace(config, output_dir="elsewhere", data_dir="there"))
    assert moved.file == cell.file
    assert cell.file.startswith("file--capt--lr=0.1--seed=0--")
    assert "there" not in json.dumps(moved.describe())


# --- bad input, before anything trains --------------------------------------------------------------------------------


def test_a_model_with_nothing_to_pad_with(config, tmp_path):
    folder = save_llama(tmp_path / "llama", with_pad=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match="has neither a padding nor an end-of-sequence token to pad with"):
        build(Cell("capt", dataclasses.replace(config, model=folder)), Bench())


def test_an_unknown_method_and_options_it_does_not_have(config):
    with pytest.raises(ValueError, match="unknown method 'adapters'; there are bare, capt"):
        build(Cell("adapters", config), Bench())
    with pytest.raises(TypeError, match="rank"):
        build(Cell("capt-lead", config, {"ranks": 3}), Bench())
