"""Wrapped small random bases, their vectors away from zero."""

import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from capt import CaptConfig, get_capt_model

from .naive import SMALL, make_base, randomise


def wrapped(family, dtype=torch.float64, **fields):
    model = get_capt_model(make_base(family, dtype), CaptConfig(**fields)).eval()
    if dtype == torch.float64:
        model = model.double()
    randomise(model)
    return model


def classifier(kind=LlamaForSequenceClassification, config=LlamaConfig, **fields):
    torch.manual_seed(1)
    base = kind(config(**SMALL, num_labels=3)).double().eval()
    model = get_capt_model(base, CaptConfig(task_type="SEQ_CLS", **fields)).eval().double()
    randomise(model)
    return model
