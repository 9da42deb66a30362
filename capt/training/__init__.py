"""Training, evaluation and prediction on transformers' Trainer."""

from .config import TrainConfig
from .run import Run, Training, prepare, train

__all__ = ["Run", "TrainConfig", "Training", "prepare", "train"]
