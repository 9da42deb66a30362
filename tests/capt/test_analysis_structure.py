"""Which tokens of a prompt are the template's."""

import pytest
from tokenizers import processors

from capt.analysis import Groups, tokens_of
from capt.tasks import Prompt

from .tiny import EXAMPLES, PROMPT, save_tokenizer


def test_tokens_of_the_template_are_structural_and_a_field_is_one_place(texts):
    first = texts[0]
    assert first.labels == ["rte", "sentence1", ":", "the", "film", "was", "fine", ".", "sentence2", ":", "a", "story"]
    assert [kind == "structural" for kind in first.kinds] == [True] * 3 + [False] * 5 + [True] * 2 + [False] * 2
    assert Groups(texts, 1, 1).labels == [
        "rte",
        "[slot]",
        "sentence1",
        ":",
        "{premise}",
        "sentence2",
        ":",
        "{hypothesis}",
    ]
    assert [tuple(place) for place in first.places[2:4]] == [(0, 2, ":"), (1, 0, "{premise}")]


def test_words_of_the_template_inside_of_a_field_are_text(tokenizer):
    (text,) = tokens_of([{"premise": "rte sentence1:", "hypothesis": "cb"}], PROMPT, tokenizer, 64, "examples")
    assert text.kinds == ["structural"] * 3 + ["text"] * 3 + ["structural"] * 2 + ["text"]


def test_what_the_tokenizer_adds_is_special_and_a_cut_text_keeps_its_template(tmp_path):
    tokenizer = save_tokenizer(tmp_path)
    ends = [("<eos>", 1)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<eos> $A <eos>", None, ends)
    (text,) = tokens_of(EXAMPLES[2:], PROMPT, tokenizer, 10, "examples")
    assert text.labels == ["<eos>", "rte", "sentence1", ":", "cold", "film", "sentence2", ":", "warm", "<eos>"]
    assert [i for i, kind in enumerate(text.kinds) if kind == "special"] == [0, 9]
    assert text.places[0].segment < text.places[1].segment < text.places[8].segment < text.places[9].segment


def test_a_character_shared_by_template_and_field_makes_a_token_text(tokenizer):
    quoted = Prompt("text:{premise}s", "premise", ("yes", "no"))
    (text,) = tokens_of([{"premise": "review"}], quoted, tokenizer, 64, "examples")
    assert (text.labels, text.kinds) == (["text", ":", "reviews"], ["structural", "structural", "text"])


def test_a_place_that_few_texts_have_gets_no_column(texts, tokenizer):
    odd = Prompt("rte sentence1: {premise} cb: {hypothesis}", "premise", ("yes", "no"))
    (other,) = tokens_of(EXAMPLES[:1], odd, tokenizer, 64, "examples")
    assert Groups([*texts, other], 0, 0).labels == Groups(texts, 0, 0).labels
    assert "cb" in Groups([texts[0], other], 0, 0).labels
    assert Groups([*texts, other], 0, 0).members([other], with_slots=False).any(-1).all()


def test_a_template_without_words_is_refused(tokenizer):
    with pytest.raises(ValueError, match="holds no words of its own"):
        tokens_of([{"premise": "a"}], Prompt("{premise}", "premise", ("yes", "no")), tokenizer, 64, "examples")
