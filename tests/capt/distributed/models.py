"""Models and batches that a job of two processes and the one process it is compared with share."""

import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from capt import CaptConfig, get_capt_model

from ..naive import SMALL, make_base, randomise

#: name of a case -> family of the base and the adapter's options.
ADAPTERS = {
    "causal": ("llama", {}),
    "extraction": ("llama", {"variant": "extraction", "lead": 1}),
    "projection": ("qwen3", {"variant": "projection", "depth": "odd"}),
    "seq2seq": ("t5", {"variant": "prepending"}),
    "label words": ("llama", {"task_type": "SEQ_CLS", "label_words": (5, 6, 7)}),
    "head": ("classifier", {}),
    "head alone": ("classifier", {"task": False}),
}


def base_of(family):
    if family != "classifier":
        return make_base(family, torch.float32)
    torch.manual_seed(0)
    return LlamaForSequenceClassification(LlamaConfig(**SMALL, num_labels=3)).eval()


def wrap(base, options, fresh=False):
    """In eval mode, since dropout would draw differently in two processes; its numbers drawn, unless fresh."""
    torch.manual_seed(2)
    model = get_capt_model(base, CaptConfig(**options)).eval()
    if not fresh:
        randomise(model)
    return model


def batch_of(model, rank=0, world=1):
    """A process's share of a batch of four, so that the mean of the shares' losses is the batch's loss."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(2, 61, (4, 7), generator=draw)
    mask = (torch.arange(7) < torch.tensor([[7], [4], [5], [6]])).long()
    labels = {
        "CAUSAL_LM": torch.where((torch.arange(7) > 1) & (torch.arange(7) < 4), ids, -100),
        "SEQ_CLS": torch.tensor([0, 2, 1, 1]),
        "SEQ_2_SEQ_LM": ids[:, :3].contiguous(),
    }[model.capt_config.task_type]
    own = slice(4 * rank // world, 4 * (rank + 1) // world)
    return {"input_ids": ids[own], "attention_mask": mask[own], "labels": labels[own]}


def gradients(model):
    return {name: p.grad for name, p in model.adapters.named_parameters() if p.requires_grad}


def alone(name, fresh=False):
    """Loss and gradients of one process on the whole batch."""
    family, options = ADAPTERS[name]
    model = wrap(base_of(family), options, fresh)
    loss = model(**batch_of(model)).loss
    loss.backward()
    return loss.detach(), gradients(model)
