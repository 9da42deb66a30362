"""Language models and a tokenizer small enough to train in a test, as transformers loads them, and texts."""

import csv
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from capt.tasks import Prompt

GOOD = ["fine", "great", "lovely", "superb", "warm"]
BAD = ["awful", "dull", "cold", "dreary", "weak"]
OTHER = [
    *("the", "film", "was", "a", "story", "about", "people", "and", "time", "slowly"),
    *("rte", "cb", "sentence1", "sentence2", "text", "review", "sentiment", "Review", "Sentiment"),
]
#: A task of two texts, in words of the tokenizer.
PROMPT = Prompt("rte sentence1: {premise} sentence2: {hypothesis}", "premise", ("yes", "no"))
EXAMPLES = [
    {"premise": "the film was fine.", "hypothesis": "a story"},
    {"premise": "dull", "hypothesis": "the people and time slowly"},
    {"premise": "cold film about a time and a story", "hypothesis": "warm"},
]
ANSWERS = ["positive", "negative", "yes", "no", "maybe", "good", "bad"]


def save_tokenizer(folder: Path, with_pad: bool = True) -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *GOOD, *BAD, *OTHER, *ANSWERS, ":", ".", "{", "}"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    special = {"unk_token": "<unk>", "eos_token": "<eos>"} | ({"pad_token": "<pad>"} if with_pad else {})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **special)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_llama(folder: Path, with_pad: bool = True) -> str:
    tokenizer = save_tokenizer(folder, with_pad)
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
        initializer_range=0.2,  # at the usual 0.02 a random model hardly hears its prompt
        **sizes,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def save_t5(folder: Path) -> str:
    tokenizer = save_tokenizer(folder)
    torch.manual_seed(1)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    T5ForConditionalGeneration(config).save_pretrained(folder)
    return str(folder)


def save_bert(folder: Path) -> str:
    tokenizer = save_tokenizer(folder)
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertModel(BertConfig(vocab_size=len(tokenizer), pad_token_id=0, **sizes)).save_pretrained(folder)
    return str(folder)


def write_reviews(path: Path, rows: int = 60) -> str:
    """Texts of unequal lengths, half of them "good", half "bad", as CSV."""
    draw = random.Random(0)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for i in range(rows):
            words = draw.choices(OTHER[:10], k=draw.randint(1, 8)) + draw.choices(GOOD if i % 2 else BAD, k=3)
            writer.writerow([" ".join(draw.sample(words, len(words))), "good" if i % 2 else "bad"])
    return str(path)
