"""A small base of each kind with its texts, and a short run on them."""

import pytest

from capt.analysis import tokens_of
from capt.training import TrainConfig

from .tiny import EXAMPLES, PROMPT, save_bert, save_llama, save_t5, save_tokenizer, write_reviews


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    return {
        "llama": save_llama(folder / "llama"),
        "t5": save_t5(folder / "t5"),
        "bert": save_bert(folder / "bert"),
        "reviews": write_reviews(folder / "reviews.csv"),
    }


@pytest.fixture
def config(sources, tmp_path):
    return TrainConfig(
        model=sources["llama"],
        task="file",
        train_file=sources["reviews"],
        output_dir=str(tmp_path / "run"),
        batch_size=8,
        epochs=3,
        learning_rate=0.1,
        warmup_steps=2,
    )


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def texts(tokenizer):
    """The tokens of ``EXAMPLES``."""
    return tokens_of(EXAMPLES, PROMPT, tokenizer, 64, "examples")
