"""DistributedDataParallel, accelerate, transformers' Trainer and ``capt train``, in as many processes as there are."""

import json
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from capt import CaptConfig, get_capt_model
from capt.cli import main
from capt.training import SaveAdapter

from ..naive import make_base
from .models import ADAPTERS, base_of, batch_of, gradients, wrap


def data_parallel(name, rank):
    """Gradients after two steps; an unused parameter would raise at the second."""
    family, options = ADAPTERS[name]
    model = wrap(base_of(family), options)
    parallel = DistributedDataParallel(model)
    for _ in range(2):
        model.zero_grad()
        parallel(**batch_of(model, rank, 2)).loss.backward()
    return gradients(model)


def rows(count):
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(2, 61, (count, 6), generator=draw)
    return [{"input_ids": row, "labels": torch.where(torch.arange(6) > 2, row, -100)} for row in ids]


def accelerated(processes):
    """Gradients of three steps of accelerate's own loop, four rows a step over all processes."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = get_capt_model(make_base("llama", torch.float32), CaptConfig())
    vectors = model.adapters["default"].capsules.vectors
    optimizer = torch.optim.AdamW([vectors], lr=0.1)
    loader = DataLoader(rows(12), batch_size=4 // processes)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(prepared(**batch).loss)
        seen.append(vectors.grad.clone())
        optimizer.step()
    return seen


def stock_trainer(folder, processes):
    """The log and the last state of transformers' Trainer, four rows a step over all processes."""
    torch.manual_seed(0)
    model = get_capt_model(make_base("llama", torch.float32), CaptConfig())
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=4 // processes,
        per_device_eval_batch_size=4 // processes,
        learning_rate=0.1,
        logging_steps=1,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=2,
        save_steps=2,
        load_best_model_at_end=True,
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows(16), eval_dataset=rows(8), callbacks=[SaveAdapter()])
    trainer.train()
    log = [(e["step"], name, e[name]) for e in trainer.state.log_history for name in ("loss", "eval_loss") if name in e]
    return {"log": log, "state": {name: tensor.clone() for name, tensor in model.state_dict().items()}}


def capt_train(folder, model, reviews, processes):
    """``results.json`` of ``capt train``, eight rows a step over all processes."""
    flags = {
        "model": model,
        "task": "file",
        "train_file": reviews,
        "output_dir": folder,
        "batch_size": 8 // processes,
        "epochs": 2,
        "learning_rate": 0.1,
    }
    assert main(["train", *(f"--{name}={value}" for name, value in flags.items())]) == 0
    return json.loads(Path(folder, "results.json").read_text())
