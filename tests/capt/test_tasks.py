import json
import os
from pathlib import Path

import pytest

from capt import assets, tasks
from capt.tasks import Prompt, encode, label_word_ids, load_task
from capt.tasks.task import cut_rows

from .tiny import save_tokenizer, write_reviews


@pytest.fixture
def tokenizer(tmp_path):
    return save_tokenizer(tmp_path / "tokenizer")


def write_lines(path: Path, lines) -> str:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def superglue_folder(folder: Path, train, val) -> Path:
    folder.mkdir()
    write_lines(folder / "train.jsonl", map(json.dumps, train))
    write_lines(folder / "val.jsonl", map(json.dumps, val))
    return folder


RTE = [
    {"premise": f"it rains {i}", "hypothesis": "it is wet", "label": ("entailment", "not_entailment")[i % 2], "idx": i}
    for i in range(20)
]


# --- splits -----------------------------------------------------------------------------------------------------------


def test_rows_are_cut_once_each_and_the_seed_decides():
    rows = [{"text": str(i), "label": "a"} for i in range(100)]
    cut = cut_rows(rows, {"train": 0.8, "validation": 0.1, "test": 0.1}, 0, "file")
    assert {name: len(part) for name, part in cut.items()} == {"train": 80, "validation": 10, "test": 10}
    assert sorted(int(row["text"]) for part in cut.values() for row in part) == list(range(100))
    assert cut == cut_rows(rows, {"train": 0.8, "validation": 0.1, "test": 0.1}, 0, "file")
    assert cut != cut_rows(rows, {"train": 0.8, "validation": 0.1, "test": 0.1}, 1, "file")


def test_no_split_is_left_empty():
    rows = [{"text": str(i), "label": "a"} for i in range(3)]
    assert all(cut_rows(rows, {"train": 0.8, "validation": 0.1, "test": 0.1}, 0, "file").values())
    with pytest.raises(ValueError, match=r"x\.csv has 2 rows: too few to cut into train, validation, test"):
        cut_rows(rows[:2], {"train": 0.8, "validation": 0.1, "test": 0.1}, 0, "x.csv")


# --- embedded tasks ---------------------------------------------------------------------------------------------------


def test_trec_drops_duplicates_before_the_cut(tmp_path, monkeypatch):
    lines = [
        f"{kind}:fine Question {i} caf\u00e9 ?"
        for i, kind in enumerate(["ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM"] * 5)
    ]
    path = tmp_path / "questions.txt"
    path.write_bytes("\n".join([*lines, *lines, ""]).encode("latin-1"))
    monkeypatch.setattr(assets, "fetch", lambda member: path)
    task = load_task("trec")
    texts = [row["text"] for split in task.splits.values() for row in split]
    assert len(texts) == len(set(texts)) == 30
    assert all("caf\u00e9" in text for text in texts)
    assert task.prompt.labels == ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")


def test_movie_reviews_keep_ratings_beyond_the_threshold(tmp_path, monkeypatch):
    path = tmp_path / "reviews.txt"
    ratings = [3.2, -2.0, 0.8, -0.8, 0.81, -0.9, 0.0]
    rows = "".join(f"{i}\t{rating}\tfilm {i}\r\n" for i, rating in enumerate(ratings))
    path.write_bytes(("id\tsentiment\ttext\r\n" + rows).encode())
    monkeypatch.setattr(assets, "fetch", lambda member: path)
    rows = [row for split in load_task("movie-reviews").splits.values() for row in split]
    assert {row["text"]: row["label"] for row in rows} == {
        "film 0": "positive",
        "film 1": "negative",
        "film 4": "positive",
        "film 5": "negative",
    }


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


def test_real_superglue_folder():
    folder = os.environ.get("CAPT_DATA_DIR", "")
    if not Path(folder, "RTE", "train.jsonl").is_file():
        pytest.skip("CAPT_DATA_DIR names no folder with the official SuperGLUE files")
    sizes = {name: {k: len(v) for k, v in load_task(name, data_dir=folder).splits.items()} for name in ("rte", "cb")}
    assert sizes == {
        "rte": {"train": 2241, "validation": 249, "test": 277},
        "cb": {"train": 225, "validation": 25, "test": 56},
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"premise": "a", ', r"train\.jsonl, line 2: not JSON"),
        ("[1, 2]", r"train\.jsonl, line 2: a JSON object is wanted, got list"),
        ('{"premise": "a", "label": "entailment"}', r"train\.jsonl, line 2: there is no field 'hypothesis'; there are"),
        (
            '{"premise": "a", "hypothesis": "b", "label": "maybe"}',
            r"line 2: label 'maybe' was not seen .*entailment, not_ent",
        ),
        ('{"premise": "a", "hypothesis": "b", "label": 2}', r"line 2: label '2' was not seen"),
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


# --- files ------------------------------------------------------------------------------------------------------------


def test_csv_values_stay_what_they_are(tmp_path):
    rows = ["text,label", '"NA",01', '"one, ""two""\nthree",true', "null,01", "x,true", "y,01", "z,true"]
    task = load_task("file", train_file=write_lines(tmp_path / "a.csv", rows))
    found = {row["text"]: row["label"] for split in task.splits.values() for row in split}
    assert found == {"NA": "01", 'one, "two"\nthree': "true", "null": "01", "x": "true", "y": "01", "z": "true"}
    assert task.prompt.labels == ("01", "true")


def test_jsonl_columns_and_a_test_file(tmp_path):
    train = write_lines(tmp_path / "a.jsonl", [json.dumps({"body": f"t{i}", "y": i % 2}) for i in range(20)])
    test = write_lines(tmp_path / "b.jsonl", [json.dumps({"body": "u", "y": 1})])
    task = load_task("file", train_file=train, eval_file=test, text_column="body", label_column="y")
    assert {name: len(rows) for name, rows in task.splits.items()} == {"train": 18, "validation": 2, "test": 1}
    assert task.splits["test"] == [{"text": "u", "label": "1"}]
    assert task.prompt.label_words == (" 0", " 1")


def test_tsv_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_bytes(b"\xef\xbb\xbftext\tlabel\n" + b"".join(b"t, %d\t%d\n" % (i, i % 2) for i in range(5)))
    assert load_task("file", train_file=str(path)).splits["train"][0]["text"].startswith("t, ")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text,label\nx,a\ny\n", r"a\.csv, line 3: 2 columns are wanted as in the header, got 1"),
        ("a.csv", 'text,label\nx,a\n"y,b\n', r"a\.csv, line 3: unexpected end of data"),
        ("a.csv", "body,label\nx,a\n", r"a\.csv, line 2: there is no column 'text'; there are 'body', 'label'"),
        ("a.csv", "text,label\n ,a\n", r"a\.csv, line 2: text is empty"),
        ("a.csv", "text,label\nx,\n", r"a\.csv, line 2: label must be a non-empty string"),
        ("a.csv", "text,label\nx,a\ny,a\nz,a\n", r"must hold at least two labels, got \['a'\]"),
        ("a.csv", "text,label\n", r"a\.csv: the file holds no rows"),
        ("a.csv", "", r"a\.csv: the file holds no rows"),
        ("a.jsonl", '{"text": "x", "label": 1}\n{oops\n', r"a\.jsonl, line 2: not JSON"),
        ("a.txt", "x", r"a\.txt: a file must end in \.jsonl, \.csv, \.tsv, got '\.txt'"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_task("file", train_file=str(tmp_path / name))


def test_bytes_that_are_not_utf8(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"text,label\nx,a\n\xff,b\n")
    with pytest.raises(ValueError, match=r"a\.csv, line \d or soon after: not UTF-8"):
        load_task("file", train_file=str(tmp_path / "a.csv"))


def test_a_label_not_seen_in_training(tmp_path):
    train = write_reviews(tmp_path / "train.csv")
    test = write_lines(tmp_path / "test.csv", ["text,label", "a film,good", "a film,ugly"])
    with pytest.raises(ValueError, match=r"test\.csv, line 3: label 'ugly' was not seen in training, .*bad, good"):
        load_task("file", train_file=train, eval_file=test)


# --- the registry -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("imdb", {}, "unknown task 'imdb'; there are trec, movie-reviews, file, rte"),
        ("trec", {"data_dir": "x"}, "task 'trec' takes no data_dir, got 'x'"),
        ("file", {}, "task 'file' needs train_file"),
    ],
)
def test_tasks_and_their_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        load_task(name, **options)


def test_template_and_words_can_be_replaced(tmp_path):
    train = write_reviews(tmp_path / "train.csv")
    task = load_task("file", train_file=train, template="Review: {text}", label_words=[" negative", " positive"])
    assert task.prompt.render({"text": "x"}) == "Review: x"
    assert task.prompt.label_words == (" negative", " positive")
    for changes, message in (
        ({"template": "Review:"}, r"template must name the field \{text\}"),
        ({"template": "{text} {title}"}, r"field 'title', which file does not have; it has \['text'\]"),
        ({"template": "{text} {label}"}, r"field 'label', which file does not have"),
        ({"template": "{text"}, "is not a format string"),
        ({"label_words": [" one"]}, "label_words must be 2 words, for bad, good in this order, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            load_task("file", train_file=train, **changes)


def test_every_task_is_listed():
    assert set(tasks.TASKS) == {"trec", "movie-reviews", "file", "rte", "cb", "boolq", "wic", "copa"}


# --- label words and truncation ---------------------------------------------------------------------------------------


def test_label_words_are_single_tokens(tokenizer):
    assert label_word_ids(tokenizer, ["yes", "no"]) == tokenizer.convert_tokens_to_ids(["yes", "no"])
    two = tokenizer.encode("yes no", add_special_tokens=False)
    with pytest.raises(
        ValueError, match=rf"label word 'yes no' must be a single token .*2 tokens: \[{two[0]}, {two[1]}\]"
    ):
        label_word_ids(tokenizer, ["yes no", "no"])
    with pytest.raises(ValueError, match=r"label word 'zebra' must be a single token .*an unknown word"):
        label_word_ids(tokenizer, ["zebra", "no"])
    with pytest.raises(ValueError, match=r"label words 'no' and ' no' are the same token"):
        label_word_ids(tokenizer, ["no", " no"])


@pytest.mark.parametrize("max_length", range(5, 14))
def test_truncation_cuts_the_text_and_nothing_else(tokenizer, max_length):
    prompt = Prompt("review: {text} sentiment:", "text", ("a", "b"))
    text = "the film was a story about people and time"  # 9 tokens, and 4 of the template
    (row,) = encode([{"text": text, "label": "b"}], prompt, tokenizer, max_length, "train")
    ids = row["input_ids"]
    kept = min(9, max_length - 4)
    assert ids[:2] == tokenizer("review:")["input_ids"]
    assert ids[-2:] == tokenizer("sentiment:")["input_ids"]
    assert ids[2:-2][: kept - 1] == tokenizer(text)["input_ids"][: kept - 1]
    assert len(ids) == kept + 4 <= max_length
    assert row["labels"] == 1


def test_the_other_field_stays_whole(tokenizer):
    prompt = Prompt("rte sentence1: {premise} sentence2: {hypothesis}", "premise", ("a", "b"))
    example = {"premise": "the film was a story about people", "hypothesis": "a dull story", "label": "a"}
    (row,) = encode([example], prompt, tokenizer, 12, "train")
    assert tokenizer.decode(row["input_ids"]).endswith("sentence2 : a dull story")
    assert len(row["input_ids"]) <= 12


def test_text_that_truncates_to_nothing(tokenizer):
    prompt = Prompt("review: {text} sentiment:", "text", ("a", "b"))
    rows = [{"text": "fine", "label": "a"}, {"text": "the film was fine", "label": "a"}]
    with pytest.raises(ValueError, match=r"train, example 1: max_length leaves 4 tokens, and the template .* takes 4"):
        encode(rows, prompt, tokenizer, 4, "train")


def test_unlabelled_texts_have_no_labels(tokenizer):
    prompt = Prompt("{text}", "text", ("a", "b"))
    assert encode([{"text": "the film"}], prompt, tokenizer, 8, "x") == [
        {"input_ids": tokenizer("the film")["input_ids"]}
    ]
    assert encode([], prompt, tokenizer, 8, "x") == []
