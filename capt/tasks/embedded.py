"""Tasks whose texts come with the embedded defaults: no hub, no file of the user's."""

from __future__ import annotations

from .. import assets
from .task import Prompt, Task, cut_rows, distinct, example

_SHARES = {"train": 0.8, "validation": 0.1, "test": 0.1}


def trec(*, split_seed: int = 0) -> Task:
    """TREC questions by what they ask for: six coarse classes, 5,382 distinct questions, cut 80/10/10."""
    words = {
        "ABBR": " abbreviation",
        "DESC": " description",
        "ENTY": " thing",
        "HUM": " person",
        "LOC": " place",
        "NUM": " number",
    }
    path = assets.fetch(assets.TREC_QUESTIONS)
    rows = []
    for number, line in enumerate(path.read_text(encoding="latin-1").split("\n"), start=1):
        if line.strip():
            kind, _, question = line.partition(" ")
            rows.append(example({"text": question.strip()}, kind.partition(":")[0], f"{path}, line {number}"))
    prompt = Prompt("Question: {text}\nAnswer type:", "text", tuple(words), tuple(words.values()))
    return Task("trec", prompt, cut_rows(distinct(rows), _SHARES, split_seed, "trec"))


def movie_reviews(*, split_seed: int = 0) -> Task:
    """Snippets of film reviews rated beyond +-0.8 on a scale from -4 to 4: positive or negative, cut 80/10/10."""
    path = assets.fetch(assets.MOVIE_REVIEWS)
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").strip().split("\n")[1:], start=2):
        _, rating, text = line.split("\t")
        if abs(float(rating)) > 0.8:
            label = "positive" if float(rating) > 0 else "negative"
            rows.append(example({"text": text.strip()}, label, f"{path}, line {number}"))
    prompt = Prompt("Review: {text}\nSentiment:", "text", ("negative", "positive"), (" negative", " positive"))
    return Task("movie-reviews", prompt, cut_rows(distinct(rows), _SHARES, split_seed, "movie-reviews"))
