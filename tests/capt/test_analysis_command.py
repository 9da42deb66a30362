"""``capt attention``: its folder, and what it refuses."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from capt import CaptConfig, get_capt_model
from capt.analysis import Groups, average_attention, report, tokens_of
from capt.analysis.command import load_capsules
from capt.cli import main
from capt.runner import Runner
from capt.tasks.superglue import SUPERGLUE
from capt.training.loading import load_base

from .small import randomise

ROWS = [
    {"premise": "the film was $ fine $ .", "hypothesis": "a story", "label": "entailment"},
    {"premise": "dull", "hypothesis": "the people and time", "label": "not_entailment"},
    {"premise": "cold film about time", "hypothesis": "warm", "label": "entailment"},
]


def write_rte(folder, times=1):
    (folder / "RTE").mkdir()
    for name in ("train", "val"):
        (folder / "RTE" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS) * times)
    return str(folder)


def save_adapter(source, folder, loader=AutoModelForCausalLM, **fields):
    torch.manual_seed(3)
    model = get_capt_model(loader.from_pretrained(source), CaptConfig(**fields))
    randomise(model)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def adapters(sources, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "capt": save_adapter(sources["llama"], folder / "capt", lead=1, task_type="SEQ_CLS"),
        "deep": save_adapter(sources["llama"], folder / "deep", instance=False),
        "t5": save_adapter(sources["t5"], folder / "t5", AutoModelForSeq2SeqLM, length=2),
    }


def test_a_folder_of_numbers_and_heat_maps(sources, adapters, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["attention", "--model", sources["llama"], "--task", "rte", "--data-dir", write_rte(tmp_path)]
    arguments += ["--adapter", adapters["capt"], "--adapter", f"Deep PT-1={adapters['deep']}", "--output", str(out)]
    assert main([*arguments, "--batch-size", "2"]) == 0
    printed = capsys.readouterr().out
    assert (out / "summary.md").read_text() in printed

    content = json.loads((out / "attention.json").read_text())
    assert list(content["models"]) == ["bare", "capt", "Deep PT-1"]
    assert (content["rows"], content["source"], content["example"]) == (3, "rte test", 2)
    assert content["models"]["capt"]["config"]["lead"] == 1
    bare = content["models"]["bare"]["numbers"]
    assert not any(name.startswith("slot") for name in bare)
    assert 0 < bare["others_give_to_structural"]["uniform"] < 1

    base, tokenizer = load_base(sources["llama"], 2)
    runner = Runner(base.eval())
    texts = tokens_of(ROWS, SUPERGLUE["rte"].prompt, tokenizer, 511, "rte test")
    averages = average_attention(runner, load_capsules(runner, adapters["capt"]), texts, Groups(texts, 1, 1), 2)
    found = content["models"]["capt"]["numbers"]["slot_receives"]
    shares = averages["probabilities"]
    row, column = ([*content["roles"]].index(name) for name in ("tokens", "slot"))
    assert found["mean"] == pytest.approx(shares.whole.mean[row, column].item())
    assert found["standard_error"] == pytest.approx(shares.whole.standard_error[row, column].item())
    np.testing.assert_allclose(found["heads_mean"], shares.heads.mean[..., row, column])
    assert f"{found['mean']:.4f} ± {found['standard_error']:.4f}" in printed
    with np.load(out / "attention.npz") as arrays:
        assert arrays["capt/groups"][column] == "slot"
        np.testing.assert_allclose(arrays["capt/logits/heads/mean"], averages["logits"].heads.mean, rtol=1e-5)

    figures = {path.stem for path in out.glob("*.png")}
    assert {"split_probabilities", "split_logits", "example_probabilities", "example_logits"} <= figures
    assert {"layers_probabilities_bare", "layers_logits_Deep-PT-1", "heads_slot_gives_to_structural"} <= figures
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in out.glob("*.png"))


def test_a_file_of_texts_and_an_encoder(sources, adapters, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "heat_maps", lambda *_: None)
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"left": row["premise"], "right": row["hypothesis"]}) + "\n" for row in ROWS))
    out = tmp_path / "out"
    arguments = ["--model", sources["t5"], "--adapter", f"two={adapters['t5']}", "--output", str(out), "--rows", "2"]
    arguments += ["--data", str(texts), "--template", "review: {left} sentiment: {right}", "--example", "1"]
    assert main(["attention", *arguments]) == 0
    content = json.loads((out / "attention.json").read_text())
    assert content["rows"] == 2
    numbers = content["models"]["two"]["numbers"]
    assert 0 < numbers["slot_gives_to_structural"]["mean"] < 1
    assert numbers["slot_receives"]["standard_error"] > 0
    with np.load(out / "attention.npz") as arrays:
        places = [*arrays["two/groups"][8:]]
    assert places == ["[slot 1]", "[slot 2]", "review", ":", "{left}", "sentiment", ":", "{right}"]


@pytest.mark.parametrize(("family", "classifier"), [("llama", "linear"), ("t5", "label-words"), ("bert", "linear")])
def test_runs_of_capt_train_stand_side_by_side(sources, tmp_path, monkeypatch, family, classifier):
    """By the run's folder, its adapter's, or a checkpoint's."""
    monkeypatch.setattr(report, "heat_maps", lambda *_: None)
    task = ["--model", sources[family], "--task", "rte", "--data-dir", write_rte(tmp_path, 10)]
    for name, instance in (("capt", "true"), ("deep", "false")):
        flags = ["--classifier", classifier, "--instance", instance, "--max-steps", "2", "--batch-size", "2"]
        assert main(["train", *task, *flags, "--output-dir", str(tmp_path / name)]) == 0
    adapters = {"CaPT": "capt", "Deep PT-1": "deep/adapter", "cut short": "deep/checkpoint-2"}
    flags = [word for name, folder in adapters.items() for word in ("--adapter", f"{name}={tmp_path / folder}")]
    assert main(["attention", *task, *flags, "--output", str(tmp_path / "out")]) == 0
    content = json.loads((tmp_path / "out/attention.json").read_text())
    assert [*content["models"]] == ["bare", *adapters]
    assert content["models"]["Deep PT-1"]["numbers"] == content["models"]["cut short"]["numbers"]
    assert content["models"]["Deep PT-1"]["numbers"] != content["models"]["CaPT"]["numbers"]


def test_a_single_row_has_no_standard_error(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "heat_maps", lambda *_: None)
    out = tmp_path / "out"
    arguments = ["--model", sources["llama"], "--task", "rte", "--data", write_rte(tmp_path), "--output", str(out)]
    assert main(["attention", *arguments, "--rows", "1"]) == 0
    number = json.loads((out / "attention.json").read_text())["models"]["bare"]["numbers"]["others_give_to_first"]
    assert number["standard_error"] is None
    assert "±" not in (out / "summary.md").read_text().split("| bare")[1].split("\n")[0]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--adapter", "x={t5}"], "base_model_type 't5', the base has 'llama'"),
        (["--adapter", "bare={capt}"], "other than 'bare'"),
        (["--adapter", "a={capt}", "--adapter", "a={deep}"], "new name"),
        (["--adapter", "a=nowhere"], "nowhere is not a folder"),
        (["--adapter", "a={empty}"], "holds no adapter_config.json"),
        (["--template", "{premise}"], "holds no words of its own"),
        (["--template", "rte {premise} {other}"], "'other'"),
        (["--rows", "0"], "--rows must be at least 1, got 0"),
        (["--example", "9"], "--example must be one of the 3 rows, got 9"),
        (["--max-length", "6"], "nothing of 'premise' is left"),
        (["--data", "{empty}"], "give one of them"),
        (["--data", "{file}"], "--data-dir does not go with a --data file"),
    ],
)
def test_input_that_does_not_fit(sources, adapters, tmp_path, capsys, flags, says):
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts.csv").write_text("text\na\n")
    places = {**adapters, "empty": tmp_path / "empty", "file": tmp_path / "texts.csv"}
    arguments = ["--model", sources["llama"], "--task", "rte", "--data-dir", write_rte(tmp_path)]
    flags = [flag if flag.startswith(("{premise", "rte")) else flag.format(**places) for flag in flags]
    out = tmp_path / "out"
    assert main(["attention", *arguments, "--output", str(out), *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert says in error
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "--task is wanted"),
        (["--data", "{file}"], "wants a --template, or a --task with a fixed one"),
        (["--data", "{file}", "--task", "trec"], "got --task trec"),
        (["--data", "{file}", "--template", "words alone"], "names no field"),
        (["--data", "{file}", "--task", "rte"], "no column 'premise'"),
        (["--data", "{file}", "--template", "a {text}", "--split", "test"], "--split does not go with"),
        (["--data", "nowhere.csv", "--template", "a {text}"], "there is no such file"),
    ],
)
def test_texts_that_do_not_fit(sources, tmp_path, capsys, flags, says):
    (tmp_path / "texts.csv").write_text("text\na\n")
    flags = [str(tmp_path / "texts.csv") if flag == "{file}" else flag for flag in flags]
    assert main(["attention", "--model", sources["llama"], *flags]) == 2
    assert says in capsys.readouterr().err
