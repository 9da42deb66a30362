"""Bytes that a forward keeps for its backward."""

import torch
from torch import nn

from capt.memory import bytes_kept


def test_each_storage_counts_once_and_parameters_do_not():
    model = nn.Linear(4, 4, bias=False)
    model.register_buffer("frozen", torch.ones(100, 100))
    x = torch.randn(8, 4)

    def loss():
        hidden = model(x)  # keeps x, and the weight, which lies there anyway
        return (hidden * hidden + hidden.view(-1).view_as(hidden) ** 2).sum()

    assert bytes_kept(model, loss) == 2 * 8 * 4 * 4  # x and hidden, 8 x 4 floats each
    assert model.weight.grad is None
