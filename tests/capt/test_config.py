"""CaptConfig: what it accepts, what it makes of depth, and what it says otherwise."""

import json

import pytest

from capt import CaptConfig


@pytest.mark.parametrize(
    ("depth", "layers", "expected"),
    [
        ("all", 5, (0, 1, 2, 3, 4)),
        ("input", 5, (0,)),
        ("first_half", 5, (0, 1)),
        ("latter_half", 5, (2, 3, 4)),
        ("odd", 5, (0, 2, 4)),
        ([1, 3], 5, (1, 3)),
        ((4,), 5, (4,)),
    ],
)
def test_depths(depth, layers, expected):
    assert CaptConfig(depth=depth).prompted_layers(layers) == expected


@pytest.mark.parametrize(("depth", "layers"), [([1, 5], 5), ("first_half", 1), ("all", 0)])
def test_depths_that_a_base_lacks(depth, layers):
    with pytest.raises(ValueError, match=f"does not fit a base with {layers} layers"):
        CaptConfig(depth=depth).prompted_layers(layers)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"variant": "sum"}, "variant must be one of addition, .* got 'sum'"),
        ({"positions": "none"}, "positions must be one of shift, keep, got 'none'"),
        ({"task_type": "QA"}, "task_type must be None or one of .* got 'QA'"),
        ({"depth": "middle"}, "depth must be one of .* got 'middle'"),
        ({"depth": [2, 1]}, r"strictly rising list .* got \[2, 1\]"),
        ({"depth": [1, 1]}, r"strictly rising list .* got \[1, 1\]"),
        ({"depth": [-1]}, r"strictly rising list .* got \[-1\]"),
        ({"depth": []}, r"strictly rising list .* got \[\]"),
        ({"depth": [0.5]}, "strictly rising list"),
        ({"length": 0}, "length must be an int of at least 1, got 0"),
        ({"length": True}, "length must be an int of at least 1, got True"),
        ({"lead": -1}, "lead must be an int of at least 0, got -1"),
        ({"rank": 0}, "rank must be an int of at least 1, got 0"),
        ({"kernel_size": 4}, "kernel_size must be odd, .* got 4"),
        ({"instance": 1}, "instance must be True or False, got 1"),
        ({"instance": False, "task": False}, "leave nothing to put in the slot"),
        ({"variant": "projection", "instance": False}, "'projection' combines .* instance=False, task=True"),
        ({"variant": "extraction", "task": False}, "'extraction' combines .* instance=True, task=False"),
        ({"label_words": [3]}, r"at least two different vocabulary ids, got \[3\]"),
        ({"label_words": [3, 3]}, r"at least two different vocabulary ids, got \[3, 3\]"),
        ({"label_words": ["yes", "no"]}, "at least two different vocabulary ids"),
        ({"label_words": [3, 4], "task_type": "CAUSAL_LM"}, "task_type must be 'SEQ_CLS', got 'CAUSAL_LM'"),
    ],
)
def test_fields_that_do_not_fit(fields, message):
    with pytest.raises(ValueError, match=message):
        CaptConfig(**fields)


def test_unknown_fields_are_named():
    with pytest.raises(
        ValueError, match="CaptConfig has no field lenght; it has base_model_name_or_path, depth, expose_slot"
    ):
        CaptConfig.from_dict({"lenght": 2})


@pytest.mark.parametrize(
    "config", [CaptConfig(), CaptConfig(depth=[0, 2], label_words=[3, 4], variant="prepending", length=2)]
)
def test_json_round_trip(config):
    assert CaptConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.slots == (4 if config.variant == "prepending" else 1)
