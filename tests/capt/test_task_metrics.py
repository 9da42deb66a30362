"""Every metric on an example counted by hand."""

import pytest

from capt.tasks.metrics import accuracy, exact_match, f1, macro_f1, score

# Class 0: 2 right of 3 labelled and 3 predicted; class 1: 1 of 2 and 2; class 2: 0 of 1 and 1.
LABELS, PREDICTED = [0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 2, 0]


def test_accuracy():
    assert accuracy(PREDICTED, LABELS) == 3 / 6


def test_f1_of_a_class():
    assert f1(PREDICTED, LABELS, 0) == pytest.approx(2 * (2 / 3) * (2 / 3) / (2 / 3 + 2 / 3))
    assert f1(PREDICTED, LABELS, 1) == pytest.approx(0.5)
    assert f1(PREDICTED, LABELS, 2) == 0.0
    assert f1([1, 0], [0, 0], 2) == 0.0


def test_cb_is_the_mean_of_macro_f1_and_accuracy():
    found = score("f1_and_accuracy", PREDICTED, LABELS, 3)
    assert found["macro_f1"] == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)
    assert found["score"] == pytest.approx(((2 / 3 + 1 / 2 + 0) / 3 + 1 / 2) / 2)


def test_macro_f1_leaves_out_a_class_that_nobody_names():
    assert macro_f1([0, 1], [0, 1], 3) == 1.0
    assert macro_f1([0, 2], [0, 1], 3) == pytest.approx(1 / 3)


def test_a_text_that_is_no_label_is_wrong_and_no_class():
    # Class 0: precision 1, recall 1/2; class 1: 1. The 3 is what lies outside of the three classes.
    assert score("f1_and_accuracy", [0, 3, 1], [0, 0, 1], 3) == {
        "score": pytest.approx((5 / 6 + 2 / 3) / 2),
        "accuracy": pytest.approx(2 / 3),
        "macro_f1": pytest.approx((2 / 3 + 1) / 2),
    }


def test_multirc_is_f1_over_answers_with_exact_match_beside_it():
    # Question a: all right. b: one answer missed. c: one too many. d: nothing to find, nothing found.
    groups = ["a", "a", "b", "b", "c", "c", "d"]
    labels = [1, 0, 1, 1, 0, 1, 0]
    predicted = [1, 0, 1, 0, 1, 1, 0]
    found = score("multirc", predicted, labels, 2, groups)
    assert found["score"] == found["f1a"] == pytest.approx(2 * 3 / (4 + 4))  # 3 right, 4 predicted, 4 labelled
    assert found["exact_match"] == 2 / 4
    assert found["accuracy"] == pytest.approx(5 / 7)
    # Rows of a question need not stand together.
    order = [6, 2, 0, 4, 1, 5, 3]
    shuffled = ([values[i] for i in order] for values in (predicted, labels, groups))
    assert exact_match(*shuffled) == 2 / 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bleu", [0], [0], 2), "metric must be one of accuracy, f1_and_accuracy, multirc, got 'bleu'"),
        (("accuracy", [], [], 2), "labels must hold at least one row"),
        (("multirc", [0], [0], 2), "metric 'multirc' wants groups"),
    ],
)
def test_what_cannot_be_scored(arguments, message):
    with pytest.raises(ValueError, match=message):
        score(*arguments)
