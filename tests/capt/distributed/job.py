"""Runs every check in this process, one of two that ``accelerate launch`` started; each leaves a file in the folder."""

import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState

from .fsdp import SHARDINGS, sharded_step, without_storage
from .models import ADAPTERS
from .trainers import accelerated, capt_train, data_parallel, stock_trainer

SHARDED = ("causal", "projection", "seq2seq", "label words")


def checks(folder, model, reviews, rank):
    for name in ADAPTERS:
        yield f"ddp {name}", lambda name=name: data_parallel(name, rank)
    yield "accelerate", lambda: accelerated(2)
    for name in SHARDED:
        for sharding in SHARDINGS:
            for before in (True, False):
                yield (
                    f"fsdp {name} {sharding} {before}",
                    lambda n=name, s=sharding, b=before: sharded_step(n, s, b, rank),
                )
    yield "fsdp without storage", lambda: without_storage(folder / "adapter", rank)
    yield "trainer", lambda: stock_trainer(folder / "trainer", 2)
    yield "capt train", lambda: capt_train(str(folder / "run"), model, reviews, 2)


def run(folder, model, reviews):
    torch.set_num_threads(1)
    rank = PartialState(cpu=True).process_index
    for name, check in checks(folder, model, reviews, rank):
        try:
            found = check()
        except Exception:
            # The other process may wait for this one for ever: the job ends here, and says why.
            (folder / f"error {rank}").write_text(f"{name}: {traceback.format_exc()}")
            raise
        torch.save(found, folder / f"{name} {rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    run(Path(sys.argv[1]), *sys.argv[2:])
