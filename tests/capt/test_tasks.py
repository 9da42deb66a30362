import json
import string
from pathlib import Path

import pytest

from capt import assets, tasks
from capt.tasks import Prompt, encode, few, label_word_ids, load_task, with_noise
from capt.tasks.task import cut_rows

from .tiny import save_tokenizer, write_reviews


@pytest.fixture
def tokenizer(tmp_path):
    return save_tokenizer(tmp_path / "tokenizer")


def write_lines(path: Path, lines) -> str:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


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


def test_rows_of_one_group_stay_together():
    rows = [{"text": str(i), "page": str(i // 5), "label": "a"} for i in range(100)]
    cut = cut_rows(rows, {"train": 0.9, "validation": 0.1}, 0, "file", together="page")
    pages = {name: {row["page"] for row in part} for name, part in cut.items()}
    assert {name: len(part) for name, part in cut.items()} == {"train": 90, "validation": 10}
    assert len(pages["validation"]) == 2
    assert not pages["train"] & pages["validation"]
    with pytest.raises(ValueError, match="x has 1 different pages: too few to cut into train, validation"):
        cut_rows(rows[:5], {"train": 0.9, "validation": 0.1}, 0, "x", together="page")


# --- training rows made noisy, or few ---------------------------------------------------------------------------------


def test_noise_is_special_characters_at_random_places():
    prompt = Prompt("rte {a} {b}", "a", ("x", "y"))
    rows = [{"a": "it rains in the valley " * 4, "b": "wet", "label": "x", "group": "g.1"}] * 3
    noisy = with_noise(rows, prompt, 0.25, seed=3)
    for row in noisy:
        added = [c for c in row["a"] if c in string.punctuation]
        assert len(added) == round(0.25 * len(rows[0]["a"])) == 23
        assert "".join(c for c in row["a"] if c not in string.punctuation) == rows[0]["a"]
        assert len(row["b"]) == 4
        assert (row["label"], row["group"]) == ("x", "g.1")
    assert len({row["a"] for row in noisy}) == 3
    assert noisy == with_noise(rows, prompt, 0.25, seed=3) != with_noise(rows, prompt, 0.25, seed=4)
    assert with_noise(rows, prompt, 0.0, seed=3) == rows
    with pytest.raises(ValueError, match="noise must be a share of the text of at least 0, got -1"):
        with_noise(rows, prompt, -1, seed=0)


def test_few_rows_hold_every_label():
    rows = [{"text": str(i), "label": "rare" if i < 3 else "often"} for i in range(60)]
    four = few(rows, 4, seed=1)
    assert sorted(row["label"] for row in four) == ["often", "often", "rare", "rare"]
    assert len({row["text"] for row in few(rows, 32, seed=1)}) == 32
    assert sum(row["label"] == "rare" for row in few(rows, 32, seed=1)) == 3
    assert few(rows, 4, seed=1) == four != few(rows, 4, seed=2)
    for count in (0, 61):
        with pytest.raises(ValueError, match=f"shots must be between 1 and the 60 training rows, got {count}"):
            few(rows, count, seed=0)


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
        ("a.csv", "text,label,text\nx,a,y\n", r"a\.csv, line 1: there are several columns 'text'"),
        ("a.jsonl", '{"text": "x", "label": 1}\n{oops\n', r"a\.jsonl, line 2: not JSON"),
        ("a.jsonl", '{"text": "x", "label": ' + 5000 * "1" + "}", r"a\.jsonl, line 1: not read as JSON"),
        ("a.jsonl", '{"text": "so \\ud83d", "label": 1}', r"a\.jsonl, line 1: text holds half a character: '\\ud83d'"),
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
    with pytest.raises(ValueError, match=r"test\.csv, line 3: label 'ugly' is none of the task's, which are bad, good"):
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
    assert set(tasks.TASKS) == {"trec", "movie-reviews", "file", "rte", "cb", "boolq", "wic", "copa", "multirc", "csqa"}


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


def test_a_prompt_of_which_nothing_may_be_cut(tokenizer):
    prompt = Prompt("review: {text} sentiment:", None, ("a", "b"))
    rows = [{"text": "fine", "label": "a"}, {"text": "the film was fine", "label": "a"}]
    assert len(encode(rows, prompt, tokenizer, 8, "train")[1]["input_ids"]) == 8
    with pytest.raises(
        ValueError, match=r"train, example 2: max_length leaves 7 tokens, the prompt takes more, and it m"
    ):
        encode(rows, prompt, tokenizer, 7, "train")


def test_unlabelled_texts_have_no_labels(tokenizer):
    prompt = Prompt("{text}", "text", ("a", "b"))
    assert encode([{"text": "the film"}], prompt, tokenizer, 8, "x") == [
        {"input_ids": tokenizer("the film")["input_ids"]}
    ]
    assert encode([], prompt, tokenizer, 8, "x") == []
