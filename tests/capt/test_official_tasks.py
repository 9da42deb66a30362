import json
import os
import sys
from pathlib import Path

import pytest

from capt.tasks import load_task


def write_lines(path: Path, lines) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def superglue_folder(folder: Path, train, val) -> Path:
    folder.mkdir()
    write_lines(folder / "train.jsonl", map(json.dumps, train))
    write_lines(folder / "val.jsonl", map(json.dumps, val))
    return folder


RTE = [
    {"premise": f"it rains {i}", "hypothesis": "it is wet", "label": ("entailment", "not_entailment")[i % 2], "idx": i}
    for i in range(20)
]


def multirc_line(passage, answers=2):
    """A passage with two questions; answer 0 of each is right."""
    questions = [
        {"question": f"what {q}?", "answers": [{"text": f"a{a}", "label": int(a == 0)} for a in range(answers)]}
        for q in range(2)
    ]
    return {"idx": passage, "passage": {"text": f"passage {passage}", "questions": questions}}


def csqa_line(number, key="B"):
    choices = [{"label": letter, "text": f"{letter.lower()}{number}"} for letter in "ABCDE"]
    return {"id": str(number), "answerKey": key, "question": {"stem": f"where {number}?", "choices": choices}}


# --- SuperGLUE --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
def test_official_layout(tmp_path, nested):
    if nested:
        (tmp_path / "data").mkdir()
    superglue_folder(tmp_path / ("data/RTE" if nested else "data"), RTE, RTE[:3])
    task = load_task("rte", data_dir=str(tmp_path / "data"))
    assert {name: len(rows) for name, rows in task.splits.items()} == {"train": 18, "validation": 2, "test": 3}
    assert task.prompt.render(task.splits["test"][0]) == "rte sentence1: it rains 0 sentence2: it is wet"
    assert task.splits["test"][0]["label"] == "entailment"


@pytest.mark.parametrize(
    ("name", "row", "label", "prompt"),
    [
        ("boolq", {"passage": "P", "question": "q", "label": True}, "True", "boolq passage: P question: q"),
        (
            "wic",
            {"sentence1": "A", "sentence2": "B", "word": "w", "label": False},
            "False",
            "wic sentence1: A sentence2: B word: w",
        ),
        (
            "copa",
            {"choice1": "A", "choice2": "B", "premise": "P", "question": "cause", "label": 1},
            "choice2",
            "copa choice1: A choice2: B premise: P question: cause",
        ),
        ("cb", {"premise": "P", "hypothesis": "H", "label": "neutral"}, "neutral", "cb sentence1: P sentence2: H"),
    ],
)
def test_labels_and_templates_of_superglue(tmp_path, name, row, label, prompt):
    folder = superglue_folder(tmp_path / "data", [row] * 4, [row])
    task = load_task(name, data_dir=str(folder))
    assert task.splits["test"][0]["label"] == label
    assert task.prompt.render(task.splits["test"][0]) == prompt
    assert task.prompt.asking().render(task.splits["test"][0]) == f"{prompt} answer:"
    assert load_task(name, data_dir=str(folder), template=task.prompt.template).prompt.cue == ""


def test_hub_rows_carry_integer_labels(monkeypatch):
    asked = []

    def load_dataset(dataset, config, split):
        asked.append((config, split))
        return [{**row, "label": i % 2} for i, row in enumerate(RTE)]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    task = load_task("rte")
    assert asked == [("rte", "train"), ("rte", "validation")]
    assert [row["label"] for row in task.splits["test"][:2]] == ["entailment", "not_entailment"]


def test_no_connection(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(OSError, match=r"Couldn't reach the hub\. Without a connection, data_dir names a folder"):
        load_task("rte")


def test_without_datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"fetching a dataset needs datasets: pip install 'capt-kernels\[train\]'"):
        load_task("rte")


def test_real_folder():
    folder = os.environ.get("CAPT_DATA_DIR", "")
    if not Path(folder, "RTE", "train.jsonl").is_file():
        pytest.skip("CAPT_DATA_DIR names no folder with the official files")
    sizes = {
        name: [len(load_task(name, data_dir=folder).splits[split]) for split in ("train", "validation", "test")]
        for name in ("rte", "cb", "copa", "wic", "multirc", "csqa")
    }
    assert [sum(sizes[name][:2]) for name in sizes] == [2490, 250, 400, 5428, 27243, 9741]
    assert [sizes[name][2] for name in sizes] == [277, 56, 100, 638, 4848, 1221]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"premise": "a", ', r"train\.jsonl, line 2: not JSON"),
        ("[1, 2]", r"train\.jsonl, line 2: a JSON object is wanted, got list"),
        ('{"premise": "a", "label": "entailment"}', r"train\.jsonl, line 2: there is no field 'hypothesis'; there are"),
        (
            '{"premise": "a", "hypothesis": "b", "label": "maybe"}',
            r"line 2: label 'maybe' is none of the task's, which are entailment, not_ent",
        ),
        ('{"premise": "a", "hypothesis": "b", "label": 2}', r"line 2: label '2' is none of the task's"),
        ('{"premise": " ", "hypothesis": "b", "label": 0}', r"train\.jsonl, line 2: premise is empty"),
        ('{"premise": 5, "hypothesis": "b", "label": 0}', r"line 2: premise must be a string, got 5"),
        ('{"premise": "a", "hypothesis": "b", "label": null}', r"line 2: label must be .*got None"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    folder = superglue_folder(tmp_path / "data", RTE, RTE)
    write_lines(folder / "train.jsonl", [json.dumps(RTE[0]), line])
    with pytest.raises(ValueError, match=message):
        load_task("rte", data_dir=str(folder))


def test_missing_and_empty_splits(tmp_path):
    folder = superglue_folder(tmp_path / "data", RTE, [])
    with pytest.raises(ValueError, match=r"val\.jsonl: the file holds no rows"):
        load_task("rte", data_dir=str(folder))
    (folder / "val.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"no val split.*val\.jsonl"):
        load_task("rte", data_dir=str(folder))


# --- MultiRC ----------------------------------------------------------------------------------------------------------


def test_multirc_has_a_row_an_answer_and_scores_by_question(tmp_path):
    folder = superglue_folder(tmp_path / "data", [multirc_line(i) for i in range(20)], [multirc_line(7, answers=3)])
    task = load_task("multirc", data_dir=str(folder))
    assert {name: len(rows) for name, rows in task.splits.items()} == {"train": 72, "validation": 8, "test": 6}
    assert task.metric == "multirc"
    assert task.prompt.render(task.splits["test"][3]) == "multirc paragraph: passage 7 question: what 1? answer: a0"
    assert [row["label"] for row in task.splits["test"]] == ["True", "False", "False"] * 2
    assert [row["group"] for row in task.splits["test"]] == ["0-0"] * 3 + ["0-1"] * 3
    passages = {split: {row["paragraph"] for row in task.splits[split]} for split in ("train", "validation")}
    assert not passages["train"] & passages["validation"]


def test_multirc_of_the_hub_is_flat(monkeypatch):
    rows = [
        {"paragraph": f"p{i // 4}", "question": f"q{i // 2}", "answer": f"a{i}", "label": i % 2}
        | {"idx": {"paragraph": i // 4, "question": i // 2, "answer": i}}
        for i in range(40)
    ]
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: rows)
    test = load_task("multirc").splits["test"]
    assert (test[3]["label"], test[3]["group"], test[3]["answer"]) == ("True", "0-1", "a3")


def test_an_empty_answer_of_multirc_is_a_row(tmp_path):
    line = multirc_line(0)
    line["passage"]["questions"][0]["answers"][1]["text"] = ""
    folder = superglue_folder(tmp_path / "data", [multirc_line(i) for i in range(4)], [line])
    assert load_task("multirc", data_dir=str(folder)).splits["test"][1]["answer"] == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"passage": "text"}, r"train\.jsonl, line 2: an object with a dict 'passage' is wanted, 'passage' is 'text'"),
        ({"passage": {"text": "t"}}, r"line 2: passage: an object with a list 'questions' is wanted"),
        ({"passage": {"text": "t", "questions": ["q"]}}, r"line 2: question 1: .* list 'answers' is wanted, got 'q'"),
        (
            {"passage": {"text": "t", "questions": [{"question": "q", "answers": [{"text": "a"}]}]}},
            r"line 2: question 1, answer 1: there is no field 'label'",
        ),
        (
            {"passage": {"text": "t", "questions": [{"question": "q", "answers": [{"text": "a", "label": 2}]}]}},
            r"line 2: question 1, answer 1: label '2' is none of the task's, which are False, True",
        ),
        ({"paragraph": "p", "label": 1}, r"line 2: an object with a dict 'idx' is wanted, 'idx' is None"),
    ],
)
def test_a_malformed_line_of_multirc_is_named(tmp_path, line, message):
    folder = superglue_folder(tmp_path / "data", [multirc_line(0), line], [multirc_line(1)])
    with pytest.raises(ValueError, match=message):
        load_task("multirc", data_dir=str(folder))


# --- CommonsenseQA and BoolQ, whose files go by other names -----------------------------------------------------------


def test_csqa_of_files_and_hub(tmp_path, monkeypatch):
    write_lines(tmp_path / "train_rand_split.jsonl", [json.dumps(csqa_line(i)) for i in range(20)])
    write_lines(tmp_path / "dev_rand_split.jsonl", [json.dumps(csqa_line(3, "E"))])
    task = load_task("csqa", data_dir=str(tmp_path))
    assert {name: len(rows) for name, rows in task.splits.items()} == {"train": 18, "validation": 2, "test": 1}
    assert task.splits["test"][0]["label"] == "E"
    assert task.prompt.render(task.splits["test"][0]) == "csqa question: where 3? A: a3 B: b3 C: c3 D: d3 E: e3"

    flat = {"question": "where 3?", "answerKey": "E"}
    flat["choices"] = {"label": list("ABCDE"), "text": [f"{letter}3" for letter in "abcde"]}
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: [flat] * 4)
    assert load_task("csqa").splits["test"][0] == task.splits["test"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answerKey": "F"}, r"train\.jsonl, line 2: label 'F' is none of the task's, which are A, B, C, D, E"),
        ({"answerKey": ""}, r"line 2: answerKey must be a non-empty string"),
        ({"question": {"choices": []}}, r"line 2: the question must be a string, got None"),
        ({"question": {"stem": "where?", "choices": 5}}, r"line 2: choices must be labelled texts, got 5"),
        (
            {"question": {"stem": "where?", "choices": [{"label": "A", "text": "x"}]}},
            r"line 2: choices must be labelled A, B, C, D, E, got \['A'\]",
        ),
    ],
)
def test_a_malformed_line_of_csqa_is_named(tmp_path, change, message):
    write_lines(tmp_path / "train.jsonl", [json.dumps(csqa_line(0)), json.dumps(csqa_line(1) | change)])
    write_lines(tmp_path / "dev.jsonl", [json.dumps(csqa_line(0))])
    with pytest.raises(ValueError, match=message):
        load_task("csqa", data_dir=str(tmp_path))


def test_one_file_stands_in_for_a_split_and_two_do_not(tmp_path):
    row = {"question": "is it", "passage": "It is.", "answer": True}
    write_lines(tmp_path / "train_first.jsonl", [json.dumps(row | {"answer": i % 2 == 0}) for i in range(4)])
    write_lines(tmp_path / "val.jsonl", [json.dumps(row | {"label": False})])
    task = load_task("boolq", data_dir=str(tmp_path))
    assert sorted(row["label"] for split in ("train", "validation") for row in task.splits[split]) == [
        *["False"] * 2,
        *["True"] * 2,
    ]
    assert task.splits["test"][0]["label"] == "False"
    write_lines(tmp_path / "train_second.jsonl", [json.dumps(row)])
    with pytest.raises(ValueError, match=r"several files that might .*: train_first\.jsonl, train_second\.jsonl"):
        load_task("boolq", data_dir=str(tmp_path))
