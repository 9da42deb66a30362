"""A run's config from fields, files and flags."""

import pytest

from capt import CaptConfig
from capt.training import TrainConfig
from capt.training.config import as_flags, read_config_file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"learning_rate": 0.0}, "learning_rate must be a positive number, got 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be a positive number, got nan"),
        ({"epochs": -1}, "epochs must be a positive number, got -1"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"optimizer": "sgd"}, "optimizer must be one of adamw, adafactor, got 'sgd'"),
        ({"variant": "sum"}, "variant must be one of .*got 'sum'"),
        ({"depth": "0,x"}, "depth must be a name or comma-separated layer indices, got '0,x'"),
        ({"depth": "3,1"}, "strictly rising"),
        ({"lerning_rate": 1}, r"unknown field 'lerning_rate'; did you mean 'learning_rate'\?"),
        ({"zzz": 1}, "unknown field 'zzz'$"),
    ],
)
def test_bad_fields(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig.from_dict(changes)


def test_every_capsule_option_arrives():
    config = TrainConfig(
        variant="projection",
        length=2,
        depth="0,2",
        lead=1,
        first_mean=False,
        positions="keep",
        expose_slot=False,
        rank=4,
    )
    capsule = config.capsule([5, 6])
    assert capsule == CaptConfig(
        variant="projection",
        length=2,
        depth=(0, 2),
        lead=1,
        first_mean=False,
        positions="keep",
        expose_slot=False,
        rank=4,
        task_type="SEQ_CLS",
        label_words=(5, 6),
        base_model_name_or_path="smollm2",
    )
    assert TrainConfig(task_vectors=False).capsule().task is False
    assert TrainConfig(instance=False).capsule().instance is False


def test_a_line_break_typed_in_a_shell():
    assert TrainConfig(template=r"Review: {text}\nSentiment:").template == "Review: {text}\nSentiment:"


def test_config_files(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "learning_rate: 1e-3\nbf16: true\ndepth: [0, 2]\nlabel_words: [' a', ' b']\nseed:\n"
    )
    fields = read_config_file(tmp_path / "a.yaml")
    assert as_flags(fields) == ["--learning_rate=1e-3", "--bf16=True", "--depth=0,2", "--label_words", " a", " b"]
    with pytest.raises(ValueError, match=r"label_words must not hold truth values.* got \[True, False\]"):
        as_flags({"label_words": [True, False]})
    (tmp_path / "a.json").write_text('{"task": "trec"}')
    assert read_config_file(tmp_path / "a.json") == {"task": "trec"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", "", "must end in .yaml, .yml or .json"),
        ("a.yaml", "- 1", "a mapping of fields to values is wanted, got list"),
        ("a.yaml", "a: [", r"a\.yaml: not YAML"),
        ("a.json", "{\n,}", r"a\.json, line 2: not JSON"),
    ],
)
def test_bad_config_files(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_config_file(tmp_path / name)
