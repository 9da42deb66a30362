"""Class logits of encoded rows, in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase


@torch.inference_mode()
def class_logits(
    model: Callable[..., Any],
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, Any]],
    batch_size: int,
    device: torch.device,
) -> Tensor:
    """``[N, C]`` fp32 on the CPU: what ``model`` (in eval mode) makes of N > 0 rows with ``input_ids``.

    ``token_type_ids`` are handed on where rows have them. Rows of like length share a batch, so little is padded. A bar
    shows progress on a terminal.
    """
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))
    names = [name for name in ("input_ids", "token_type_ids") if name in rows[0]]
    inputs = [{name: rows[i][name] for name in names} for i in order]
    batches: DataLoader[Any] = DataLoader(
        inputs,  # type: ignore[arg-type]
        batch_size=batch_size,
        collate_fn=DataCollatorWithPadding(tokenizer),
    )
    # disable=None: quiet unless stderr is a terminal
    bar = tqdm(batches, desc="evaluating", leave=False, disable=None)
    logits = torch.cat([model(**batch.to(device))["logits"].float().cpu() for batch in bar])
    return logits[torch.tensor(order).argsort()]
