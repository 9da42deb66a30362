"""Training, evaluation and prediction on transformers' Trainer."""

from .config import TrainConfig
from .run import Run, Training, prepare, train
from .trainer import SaveAdapter

__all__ = ["Run", "SaveAdapter", "TrainConfig", "Training", "prepare", "train"]
