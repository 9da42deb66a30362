import io
import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from capt import cli
from capt.cli import main
from capt.staging import write_json

from .tiny import save_tokenizer

FAST = ["--batch-size", "8", "--max-steps", "4", "--eval-steps", "2", "--learning-rate", "0.1"]


@pytest.fixture(scope="module")
def run(sources, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert main(["train", *base_flags(sources), "--output-dir", str(folder), *FAST]) == 0
    return folder


def base_flags(sources):
    return ["--model", sources["llama"], "--task", "file", "--train-file", sources["reviews"]]


def refused(capsys, arguments):
    """The one line on stderr of a command line that must be refused."""
    try:
        code = main(arguments)
    except SystemExit as exit:  # argparse leaves by itself
        code = exit.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert len(err.splitlines()) == 1, err
    return err


def test_train_prints_what_it_reached(sources, tmp_path, capsys):
    assert main(["train", *base_flags(sources), "--output-dir", str(tmp_path / "run"), *FAST]) == 0
    out, err = capsys.readouterr()
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert f"accuracy {results['metrics']['test']['accuracy']:.4f}" in out
    assert "64 trained parameters" in out
    # A line an evaluation and no bar, where stderr is no terminal.
    evaluations = [entry for entry in results["history"] if "eval_loss" in entry]
    assert [line.split(":")[1] for line in err.splitlines()] == [
        f" step {entry['step']} of {results['steps']}" for entry in evaluations
    ]


def test_flags_win_over_the_file(sources, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("max_steps: 9\nlearning_rate: 1e-2\nfirst_mean: false\nlead: 1\nbatch_size: 4\n")
    flags = ["--config", str(config), "--max-steps", "2", "--batch-size", "8", "--output-dir", str(tmp_path / "run")]
    assert main(["train", *base_flags(sources), *flags]) == 0
    used = json.loads((tmp_path / "run/results.json").read_text())["config"]
    assert (used["max_steps"], used["batch_size"], used["learning_rate"]) == (2, 8, 0.01)
    assert (used["first_mean"], used["lead"]) == (False, 1)


def test_evaluate_agrees_with_training(run, sources, tmp_path, capsys):
    assert main(["evaluate", str(run), "--output", str(tmp_path / "metrics.json")]) == 0
    found = json.loads((tmp_path / "metrics.json").read_text())["metrics"]
    assert found == json.loads((run / "results.json").read_text())["metrics"]["test"]
    assert f"accuracy\t{found['accuracy']:.4f}" in capsys.readouterr().out
    assert main(["evaluate", str(run), "--file", sources["reviews"]]) == 0
    assert "rows\t60" in capsys.readouterr().out


def test_predict_reads_texts_a_file_and_stdin(run, tmp_path, capsys, monkeypatch):
    texts = ["the film was great", "dull", "a story about people and time"]
    assert main(["predict", str(run), *(flag for text in texts for flag in ("--text", text))]) == 0
    expected = capsys.readouterr().out
    lines = [line.split("\t") for line in expected.splitlines()]
    assert len(lines) == 3
    assert all(label in ("good", "bad") and 0.5 <= float(probability) <= 1 for label, probability in lines)

    (tmp_path / "texts.txt").write_text("\n".join(texts))
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (tmp_path / "texts.csv").write_text("body\n" + "\n".join(texts))
    for flags in (["texts.txt"], ["texts.jsonl"], ["texts.csv", "--text-column", "body"]):
        assert main(["predict", str(run), "--file", str(tmp_path / flags[0]), *flags[1:]]) == 0
        assert capsys.readouterr().out == expected
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(texts)))
    assert main(["predict", str(run), "--batch-size", "1"]) == 0
    assert capsys.readouterr().out == expected

    # Nothing else ends a line, or answers would fall out of step.
    (tmp_path / "texts.txt").write_text("\ufefffilm was\u2028dull\x0c\ngreat film\n", encoding="utf-8")
    assert main(["predict", str(run), "--file", str(tmp_path / "texts.txt")]) == 0
    from_file = capsys.readouterr().out
    assert main(["predict", str(run), "--text", "film was\u2028dull\x0c", "--text", "great film"]) == 0
    assert capsys.readouterr().out == from_file

    assert main(["predict", str(run), "--text", texts[0], "--format", "jsonl"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["label"] == lines[0][0]
    assert row["probability"] == max(row["probabilities"].values()) == pytest.approx(float(lines[0][1]), abs=1e-4)


def test_help_names_each_option_once(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    told = capsys.readouterr().out
    assert told.count("--max-steps ") == 1
    assert told.count("--first-mean ") == 1
    assert not any(wrong in told for wrong in ("max_steps", "--no-", "default: None"))


def test_a_warning_is_one_line(sources, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(warnings, "showwarning", lambda *given: shown.append(warnings.formatwarning(*given[:4])))
    asks_nothing = ["--template", "{text}", *FAST]
    assert main(["train", *base_flags(sources), "--output-dir", str(tmp_path / "run"), *asks_nothing]) == 0
    (warned,) = (text for text in shown if "asks nothing" in text)
    assert warned.startswith("capt train: warning: label words are read behind the template")
    assert warned.count("\n") == 1
    assert "cli.py" in warnings.formatwarning("elsewhere", UserWarning, "cli.py", 1)


def test_backends_are_listed(capsys):
    assert main(["backends"]) == 0
    assert "reference\tyes\t" in capsys.readouterr().out


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--task", "imdb"], "unknown task 'imdb'; there are trec"),
        (["--task", "trec"], "task 'trec' takes no train_file, got "),
        (["--train-file", "nowhere.csv"], "nowhere.csv: there is no such file"),
        (["--text-column", "body"], "there is no column 'body'; there are 'text', 'label'"),
        (["--batch-size", "0"], "batch_size must be at least 1, got 0"),
        (["--batch-size", "many"], "invalid int value: 'many'"),
        (["--optimizer", "sgd"], "invalid choice: 'sgd'"),
        (["--lerning-rate", "1"], "unrecognized arguments: --lerning-rate 1; did you mean --learning-rate?"),
        (["--variant", "sum"], "variant must be one of"),
        (["--depth", "0,7"], "does not fit a base with 2 layers"),
        (["--label-words", " fine great", " bad"], "label word ' fine great' must be a single token"),
        (["--max-length", "1"], "nothing of 'text' is left"),
        (["--model", "/nowhere"], "model '/nowhere' cannot be loaded"),
        (["--resume"], "holds no run to resume"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: there is no such file"),
        (["--backend", "cuda"], "backend must be one of"),
    ],
)
def test_train_refuses_in_one_line_and_leaves_nothing(sources, tmp_path, capsys, flags, message):
    err = refused(capsys, ["train", *base_flags(sources), "--output-dir", str(tmp_path / "run"), *flags])
    assert err.startswith("capt")
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_train_leaves_a_folder_of_like_names_alone(sources, tmp_path, capsys):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/mine").write_text("by hand")
    err = refused(capsys, ["train", *base_flags(sources), "--output-dir", str(tmp_path)])
    assert f"{tmp_path} holds a run already (adapter)" in err
    assert (tmp_path / "adapter/mine").exists()


def test_a_config_file_with_an_unknown_field(sources, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("lerning_rate: 1")
    err = refused(capsys, ["train", *base_flags(sources), "--config", str(tmp_path / "c.yaml")])
    assert "unknown field 'lerning_rate'; did you mean 'learning_rate'?" in err


def test_bases_of_no_family_here(sources, tmp_path, capsys):
    """A decoder whose layers can be told what to read trains all the same."""
    size = len(save_tokenizer(tmp_path / "gpt2"))
    GPT2LMHeadModel(GPT2Config(vocab_size=size, n_embd=32, n_layer=2, n_head=2)).save_pretrained(tmp_path / "gpt2")
    flags = [*base_flags(sources), "--model", str(tmp_path / "gpt2"), "--output-dir", str(tmp_path / "run")]
    assert main(["train", *flags, *FAST]) == 0
    assert (tmp_path / "run/adapter/adapter_model.safetensors").is_file()
    capsys.readouterr()

    size = len(save_tokenizer(tmp_path / "opt"))
    config = OPTConfig(
        vocab_size=size, hidden_size=32, word_embed_proj_dim=32, num_hidden_layers=1, num_attention_heads=2
    )
    OPTForCausalLM(config).save_pretrained(tmp_path / "opt")
    flags = [*base_flags(sources), "--model", str(tmp_path / "opt"), "--output-dir", str(tmp_path / "other")]
    assert "model_type 'opt' are not supported" in refused(capsys, ["train", *flags])
    assert not (tmp_path / "other").exists()


def test_an_encoder_says_no_words(sources, tmp_path, capsys):
    flags = [*base_flags(sources), "--model", sources["bert"], "--label-words", "good", "bad"]
    err = refused(capsys, ["train", *flags, "--output-dir", str(tmp_path / "run")])
    assert "BertModel has none: take 'linear' (--classifier linear)" in err


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda run: (run / "adapter/adapter_model.safetensors").write_bytes(b"\x00" * 20),
            "adapter_model.safetensors",
        ),
        (lambda run: (run / "adapter/adapter_config.json").write_text("{"), "adapter_config.json"),
        (lambda run: (run / "adapter/adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
        (lambda run: (run / "prompt.json").write_text("{"), "prompt.json is not JSON"),
        (lambda run: (run / "prompt.json").write_text("[]"), "prompt.json must hold a JSON object, got list"),
        (lambda run: (run / "prompt.json").write_text("{}"), "train_config.json or prompt.json does not fit"),
        (lambda run: (run / "train_config.json").write_text('{"depth": 5}'), "train_config.json or prompt.json"),
        (lambda run: (run / "train_config.json").unlink(), "is no run"),
    ],
)
def test_a_damaged_run(run, tmp_path, capsys, damage, message):
    import shutil

    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    damage(copy)
    assert message in refused(capsys, ["predict", str(copy), "--text", "x"])
    assert message in refused(capsys, ["evaluate", str(copy)])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--text", " "], "--text, line 1: text is empty"),
        (["--text", "caf\udce9"], "--text, line 1: text holds half a character"),  # a byte that was not UTF-8
        (["--file", "nowhere.txt"], "nowhere.txt: there is no such file"),
        (["--file", "nowhere.csv"], "nowhere.csv: there is no such file"),
        (["--text", "x", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--text", "x", "--file", "y"], "not allowed with argument --text"),
    ],
)
def test_predict_refuses(run, capsys, flags, message):
    assert message in refused(capsys, ["predict", str(run), *flags])


def test_empty_stdin(run, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "stdin holds no text" in refused(capsys, ["predict", str(run)])


def test_evaluate_leaves_a_folder_alone(run, tmp_path, capsys):
    kept = tmp_path / "kept"
    kept.write_text("mine")
    assert f"--output {tmp_path} is a folder" in refused(capsys, ["evaluate", str(run), "--output", str(tmp_path)])
    with pytest.raises(IsADirectoryError, match="is a folder, where a file is to be written"):
        write_json(tmp_path, {})
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--split", "train", "--file", "a.csv"], "--split train and --file a.csv name two sets of rows"),
        (["--text-column", "body"], "--text-column names a column of --file, and none was given"),
        (["--label-column", "stars"], "--label-column names a column of --file, and none was given"),
    ],
)
def test_evaluate_refuses_flags_without_effect(run, capsys, flags, message):
    assert message in refused(capsys, ["evaluate", str(run), *flags])


def test_numbers_that_json_lacks(tmp_path):
    write_json(tmp_path / "a.json", {"loss": math.nan, "all": (1.5, math.inf, 2), "text": "NaN"})
    assert json.loads((tmp_path / "a.json").read_text()) == {"loss": None, "all": [1.5, None, 2], "text": "NaN"}


def test_evaluate_refuses_an_unknown_label(run, tmp_path, capsys):
    (tmp_path / "a.csv").write_text("text,label\na film,good\na film,ugly\n")
    err = refused(capsys, ["evaluate", str(run), "--file", str(tmp_path / "a.csv")])
    assert "a.csv, line 3: label 'ugly' is none of the task's" in err


def test_a_defect_keeps_its_traceback(run, monkeypatch):
    monkeypatch.setattr(cli.Run, "predict", lambda self, rows: torch.ones(1, 2) @ torch.ones(1, 2))
    with pytest.raises(RuntimeError):
        main(["predict", str(run), "--text", "x"])


# --- as a program -----------------------------------------------------------------------------------------------------


#: ``capt``, and a Ctrl-C in step 6: at a moment that is always the same, in no finalizer, which would swallow it.
INTERRUPTED = """
import signal, sys
from transformers.trainer_callback import DefaultFlowCallback
from capt.cli import main

def interrupt(self, args, state, control, **kwargs):
    if state.global_step == 5:
        signal.raise_signal(signal.SIGINT)

DefaultFlowCallback.on_step_begin = interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started with the signal ignored
sys.exit(main())
"""


def test_ctrl_c_leaves_the_last_checkpoint(sources, tmp_path):
    folder = tmp_path / "run"
    flags = [*base_flags(sources), "--template", "a film: {text}", "--output-dir", str(folder)]
    flags += ["--batch-size", "8", "--eval-steps", "2"]
    command = [sys.executable, "-c", INTERRUPTED, "train", *flags, "--max-steps", "100000"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    program = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment, timeout=240)
    assert program.returncode == 130, program.stderr
    lines = program.stderr.splitlines()
    assert [line.split(": validation loss")[0] for line in lines[:-1]] == [
        f"capt: step {step} of 100000" for step in (2, 4)
    ]
    assert lines[-1] == f"capt: interrupted; {folder / 'checkpoint-4'} is whole, go on with --resume"
    assert all((path / "trainer_state.json").is_file() for path in folder.glob("checkpoint-*"))
    assert not list(folder.glob(".*/*"))  # nothing was begun and left


def test_output_into_a_closed_pipe(run):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "capt", "predict", str(run), "--text", "the film"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    program.stdout.close()
    assert program.stderr.read() == b""
    program.stderr.close()
    assert program.wait(timeout=60) == 0
