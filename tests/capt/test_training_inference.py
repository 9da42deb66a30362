"""Class logits of encoded rows, and the metrics of them."""

import pytest
import torch
from transformers import AutoTokenizer

from capt import CaptConfig, get_capt_model
from capt.tasks import Prompt, encode
from capt.training.inference import class_logits
from capt.training.loading import load_base
from capt.training.metrics import Scoring


def test_logits_come_in_the_order_of_the_rows(sources):
    base, _ = load_base(sources["llama"], 2)
    tokenizer = AutoTokenizer.from_pretrained(sources["llama"])
    model = get_capt_model(base, CaptConfig(label_words=(5, 6))).eval()
    texts = ["the film was a story", "fine", "a story about people", "the film", "dull film was"]
    rows = encode([{"text": text} for text in texts], Prompt("{text}", "text", ("a", "b")), tokenizer, 16, "x")
    together = class_logits(model, tokenizer, rows, 2, model.device)
    alone = torch.cat([model(input_ids=torch.tensor([row["input_ids"]])).logits for row in rows])
    torch.testing.assert_close(together, alone.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("predicted", "labels", "classes", "accuracy", "macro_f1"),
    [
        ([0, 1, 1, 0], [0, 1, 1, 0], 2, 1.0, 1.0),
        ([0, 0, 0, 0], [0, 0, 1, 1], 2, 0.5, (2 / 3 + 0) / 2),
        # class 0: 1 right of 2 labelled and 1 predicted; class 1: 1 of 1 and 2; class 2: 1 of 1 and 1
        ([0, 1, 1, 2], [0, 0, 1, 2], 3, 0.75, (2 / 3 + 2 / 3 + 1) / 3),
        # class 2 is neither labelled nor predicted, so it has no F1
        ([0, 1], [0, 0], 3, 0.5, (2 / 3 + 0) / 2),
    ],
)
def test_metrics_by_hand(predicted, labels, classes, accuracy, macro_f1):
    logits = torch.nn.functional.one_hot(torch.tensor(predicted), classes).float()
    found = Scoring()(logits, torch.tensor(labels))
    assert found == pytest.approx({"accuracy": accuracy, "macro_f1": macro_f1, "score": accuracy})


def test_the_task_s_own_metric_in_any_order_of_the_rows():
    """Two questions of two answers each: one is right in both, the other in one."""
    logits, labels = torch.eye(2)[[1, 0, 1, 1]], torch.tensor([1, 0, 1, 0])
    scoring = Scoring("multirc", ["q1", "q1", "q2", "q2"])
    found = scoring(logits, labels)
    assert found == pytest.approx(
        {"accuracy": 0.75, "macro_f1": (2 / 3 + 0.8) / 2, "score": 0.8, "f1a": 0.8, "exact_match": 0.5}
    )
    order = [2, 0, 3, 1]
    assert scoring.of(order)(logits[order], labels[order]) == found
