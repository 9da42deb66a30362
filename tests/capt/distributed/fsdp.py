"""FSDP2 on two processes: the ways to shard a base that the README gives, and one that it warns of."""

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from .models import ADAPTERS, base_of, batch_of, gradients, wrap


def blocks_of(base):
    return [module for module in base.modules() if type(module).__name__.endswith(("DecoderLayer", "T5Block"))]


def shard_linears(base):
    """The Linear modules of a block as one group, gathered and freed together."""
    for block in blocks_of(base):
        fully_shard([module for module in block.modules() if isinstance(module, nn.Linear)])


def shard_blocks(base):
    for block in blocks_of(base):
        fully_shard(block)


SHARDINGS = {"linears": shard_linears, "blocks": shard_blocks}


def sharded_step(name, sharding, before_wrapping, rank):
    """Mean loss, whole gradients, the backbone that "auto" takes, and the largest share a process holds."""
    family, options = ADAPTERS[name]
    base = base_of(family)
    if before_wrapping:
        SHARDINGS[sharding](base)
        model = wrap(base, options)
    else:
        model = wrap(base, options)
        SHARDINGS[sharding](base)
    total = sum(p.numel() for p in model.parameters())
    fully_shard(model)
    local = sum(p.to_local().numel() for p in model.parameters())
    for _ in range(2):  # what was gathered for one step is gathered again for the next
        model.zero_grad()
        loss = model(**batch_of(model, rank, 2)).loss
        loss.backward()
    loss = loss.detach()
    dist.all_reduce(loss)
    return {
        "loss": loss / 2,
        "gradients": {name: grad.full_tensor() for name, grad in gradients(model).items()},
        "backbone": type(model._runner.choose("shift")).__name__,
        "share": local / total,
    }


def without_storage(folder, rank):
    """A base built without weights, wrapped, sharded, and filled from the first process."""
    whole = base_of("llama")
    with init_empty_weights():
        base = type(whole)(whole.config)
    model = wrap(base, {}, fresh=True)
    shard_linears(base)
    fully_shard(model)
    weights = whole.state_dict() if rank == 0 else {}
    set_model_state_dict(base, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    loss = model(**batch_of(model, rank, 2)).loss
    loss.backward()
    torch.optim.SGD(model.adapters.parameters(), lr=1.0).step()
    model.save_pretrained(folder, is_main_process=rank == 0)
    dist.all_reduce(loss := loss.detach())
    return {"loss": loss / 2, "gradients": {name: grad.full_tensor() for name, grad in gradients(model).items()}}
