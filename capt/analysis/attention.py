"""Attention between groups of rows, averaged over heads, layers and sequences, one layer's matrix at a time.

Sequences differ in length, so no average of ``[L, L]`` matrices exists. What is averaged is a table of groups of rows.
With P the attention of one head on one sequence, its entry for groups q and k is

    share(q, k) = mean over rows i in q of  sum over rows j in k of  P[i, j]

and for logits the mean over the pairs (i, j) in which i may see j. Groups are the :data:`ROLES`, and the places of the
template (:class:`.structure.Place`), where a whole field is one place; between places, it is the mean over j in k in
place of the sum, so that a long field does not outshine a word. Every sequence counts once, whatever its length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..capsules import Capsules
from ..layout import Layout
from ..runner import Runner
from .moments import Moments
from .observe import Observer, observing
from .structure import Place, Tokens

#: Groups that every prompt has. The first four are a partition of the rows; the others overlap with them.
ROLES = {
    "slot": "the capsule's rows",
    "structural": "tokens that the template wrote",
    "text": "tokens of its fields",
    "special": "tokens that the tokenizer added",
    "later_structural": "structural tokens but the first token",
    "first": "the first token, a decoder's usual attention sink",
    "last": "the last token",
    "tokens": "every row but the slot's",
}
#: "uniform" is the share that a row would give if it saw alike all that it may see.
QUANTITIES = ("probabilities", "logits", "uniform")


class Averages:
    """Moments over sequences of tables ``[G, G]``: of the whole stack, by layer, and by layer and head.

    A sequence's table is averaged over heads and layers first, so the standard error is that of independent sequences.
    The whole leaves out the ``first`` layers, those in front of the first prompted one: they have no slot.
    """

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.whole, self.layers, self.heads = Moments(), Moments(), Moments()

    def add(self, tables: Tensor) -> None:
        """``[B, layers, H, G, G]``, NaN where a group is absent."""
        self.whole.add(tables[:, self.first :].flatten(1, 2).nanmean(1))
        self.layers.add(tables.nanmean(2))
        self.heads.add(tables)


class Groups:
    """The groups of a split's rows under one adapter: the columns of a table.

    Args:
        texts: all of the split.
        slots, lead: of the adapter; no slots for the bare base.

    Attributes:
        columns: what each stands for: the :data:`ROLES`, then places and slots in the order of an axis. A place that
            fewer than half of the texts have is left out: a space that the template ends in, say, is a token of its own
            in front of a few words only.
        labels: what those places and slots are called.
    """

    def __init__(self, texts: Sequence[Tokens], slots: int, lead: int):
        having = Counter(place for text in texts for place in set(text.places))
        places = sorted(place for place, count in having.items() if 2 * count >= len(texts))
        self.columns: list[str | Place] = [*ROLES, *places[:lead], *slot_labels(slots), *places[lead:]]
        self.labels = [column if isinstance(column, str) else column.label for column in self.columns[len(ROLES) :]]
        self.slots, self.lead = slots, lead
        self._index = {column: i for i, column in enumerate(self.columns)}

    def members(self, texts: Sequence[Tokens], with_slots: bool) -> Tensor:
        """``[B, L, G]`` bool: which groups each row of the padded batch is in; padding is in none."""
        cu_seqlens = torch.tensor([0, *(len(text.ids) for text in texts)]).cumsum(0).int()
        layout = Layout(cu_seqlens, 0, self.lead, None)
        tokens = torch.cat([self._of_tokens(text) for text in texts])
        if not with_slots:
            return layout.pad(tokens)
        layout = layout.grown(self.slots, self.lead)
        rows = tokens.new_zeros(len(layout.is_slot), len(self.columns))
        rows[layout.token_rows] = tokens
        for i, label in enumerate(slot_labels(self.slots)):
            for name in ("slot", label):
                rows[layout.slot_rows[:, i], self._index[name]] = True
        return layout.pad(rows)

    def _of_tokens(self, text: Tokens) -> Tensor:
        member = torch.zeros(len(text.ids), len(self.columns), dtype=torch.bool)
        for i, (kind, place) in enumerate(zip(text.kinds, text.places, strict=True)):
            for column in (kind, "tokens", place):
                if column in self._index:
                    member[i, self._index[column]] = True
        member[0, self._index["first"]] = True
        member[1:, self._index["later_structural"]] = member[1:, self._index["structural"]]
        member[-1, self._index["last"]] = True
        return member


def slot_labels(slots: int) -> list[str]:
    """What slots are called on an axis."""
    return ["[slot]"] if slots == 1 else [f"[slot {i}]" for i in range(1, slots + 1)]


class _Fold:
    """An observer that makes tables of each layer's attention, and keeps nothing else of it.

    Args:
        members: ``[B, L, G]`` bool of each layer.
    """

    def __init__(self, members: Sequence[Tensor]):
        self.members = members
        self.tables: dict[str, list[Tensor]] = {quantity: [] for quantity in QUANTITIES}

    def __call__(self, probabilities: Tensor, logits: Tensor, visible: Tensor) -> None:
        member = self.members[len(self.tables["logits"])][:, None].to(logits.device, logits.dtype)  # [B, 1, L, G]
        counts = member.sum(2, keepdim=True)
        absent = (counts == 0) | (counts == 0).transpose(2, 3)
        mean_rows = (member / counts.clamp(min=1)).transpose(2, 3)
        roles = len(ROLES)
        keys = torch.cat([member[..., :roles], mean_rows.transpose(2, 3)[..., roles:]], -1)
        seen = visible.to(logits.dtype)
        pairs = member.transpose(2, 3) @ seen @ member
        total = member.transpose(2, 3) @ torch.where(visible, logits, 0) @ member

        self._keep("probabilities", mean_rows @ probabilities @ keys, absent)
        self._keep("logits", total / pairs, absent | (pairs == 0))
        # A padding row may see nothing at all; it is in no group.
        self._keep("uniform", mean_rows @ (seen / seen.sum(-1, keepdim=True).clamp(min=1)) @ keys, absent)

    def _keep(self, quantity: str, table: Tensor, absent: Tensor) -> None:
        self.tables[quantity].append(table.masked_fill(absent, torch.nan).double().cpu())


def average_attention(
    runner: Runner, capsules: Capsules | None, texts: Sequence[Tokens], groups: Groups, batch_size: int
) -> dict[str, Averages]:
    """:data:`QUANTITIES` of ``texts``, by the base's own layers, without a slot where ``capsules`` is None.

    Args:
        runner: of a base in eval mode.
        groups: of these texts and the capsules' config.

    Raises:
        NotImplementedError: as :func:`.observe.observing`.
    """
    first = 0 if capsules is None else capsules.layers[0]
    averages = {quantity: Averages(first) for quantity in QUANTITIES}
    texts = sorted(texts, key=lambda text: len(text.ids))  # so that a batch holds little padding
    for start in range(0, len(texts), batch_size):
        batch = texts[start : start + batch_size]
        without, slotted = (groups.members(batch, with_slots=slots) for slots in (False, capsules is not None))
        fold = _Fold([without if i < first else slotted for i in range(runner.reference.num_layers)])
        _run(runner, capsules, batch, fold)
        for quantity in QUANTITIES:
            averages[quantity].add(torch.stack(fold.tables[quantity], 1))
    return averages


class OneText(NamedTuple):
    """``probabilities [L, L]`` and ``logits [L, L]``, NaN where a row may not see another, and what rows are called."""

    probabilities: Tensor
    logits: Tensor
    labels: list[str]


def attention_of(runner: Runner, capsules: Capsules | None, text: Tokens) -> OneText:
    """Attention on one text, averaged over heads and over the layers that have a slot (of the bare base, all).

    Raises:
        NotImplementedError: as :func:`average_attention`.
    """
    labels = list(text.labels)
    if capsules is not None:
        lead = capsules.config.lead
        labels = [*labels[:lead], *slot_labels(capsules.config.slots), *labels[lead:]]
    layers: list[tuple[Tensor, Tensor]] = []

    def observer(probabilities: Tensor, logits: Tensor, visible: Tensor) -> None:
        if logits.shape[-1] == len(labels):
            hidden = ~visible[0, 0]
            means = (probabilities[0].double().mean(0), logits[0].double().mean(0).masked_fill(hidden, torch.nan))
            layers.append((means[0].cpu(), means[1].cpu()))

    _run(runner, capsules, [text], observer)
    probabilities, logits = (torch.stack(means) for means in zip(*layers, strict=True))
    logits = logits.nanmean(0)  # a sliding window hides more in some layers than in others
    return OneText(probabilities.mean(0).masked_fill(logits.isnan(), torch.nan), logits, labels)


@torch.inference_mode()
def _run(runner: Runner, capsules: Capsules | None, texts: Sequence[Tokens], observer: Observer) -> None:
    device = runner.reference.stack.device
    lengths = torch.tensor([len(text.ids) for text in texts], device=device)
    ids = pad_sequence([torch.tensor(text.ids) for text in texts], batch_first=True).to(device)
    mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
    before, runner.backend = runner.backend, "reference"
    try:
        with observing(runner.reference.stack, observer):
            if capsules is not None:
                runner.run(capsules, ids, mask, None)
            else:
                options = {"use_cache": False} if runner.reference.is_causal else {}
                runner.reference.stack(input_ids=ids, attention_mask=mask.long(), **options)
    finally:
        runner.backend = before
