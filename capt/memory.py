"""What a training step keeps in memory for its backward, in bytes: exact, and the same on every machine."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def bytes_kept(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps between the forward and the backward of ``forward()``, a scalar loss.

    Every storage counts once and whole, however many views of it are saved. Parameters and buffers of ``model`` do not:
    they lie there anyway.
    """
    resident = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in resident:
            kept[storage.data_ptr()] = storage.nbytes()
        # Held while the graph lives, so that no other storage can take its address; without its own place in the graph,
        # since an output that its own node holds is a cycle that nothing frees.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    total = sum(kept.values())
    del loss
    return total
