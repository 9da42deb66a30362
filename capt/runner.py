"""One forward through a base: packed at the door, layer by layer, slots written where they are due."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from capt_kernels import capsule_refresh, pack
from capt_kernels.validation import boolean_mask

from .backbones import HookedBackbone, backbones_of
from .backbones.stream import Stream
from .capsules import Capsules, MixedCapsules, place, refresh
from .config import CaptConfig
from .layout import Layout, Rows

# These ask for numbers of rows, over which torch.compile would break to pieces.
_pack, _place, _refresh = (torch.compiler.disable(function) for function in (pack, place, refresh))

BACKENDS = ("auto", "reference", "fused")
MEMORY = ("full", "min")


class Runner:
    """Runs a base with capsules on one of its two backbones.

    Attributes:
        reference, packed: the base's backbones.
        backend: "auto", "reference" or "fused", see :class:`capt.CaptModel`.
        memory: "full" or "min", see there.
    """

    def __init__(self, base: PreTrainedModel):
        self._base = base
        self.reference, self.packed = backbones_of(base)
        self.backend = "auto"
        self.memory = "full"

    def choose(self, positions: str) -> Any:
        """The backbone of the next forward.

        Raises:
            NotImplementedError: the base cannot be run so as it is now; says why.
        """
        if self.backend == "reference":
            obstacle: str | None = "backend is 'reference'"
        elif self.packed is None:
            obstacle = f"no packed backbone is written for model_type {self.reference.config.model_type!r}"
        else:
            obstacle = self.packed.obstacle(positions)
        if obstacle is None and self.packed is not None:
            self.packed.memory = self.memory
            return self.packed
        if self.backend == "fused":
            raise NotImplementedError(
                f"backend 'fused' cannot run this base: {obstacle}; 'auto' and 'reference' run it"
            )
        if self.memory == "min" and torch.is_grad_enabled():
            raise NotImplementedError(
                f"memory 'min' wants the fused backend: {obstacle}; gradient_checkpointing_enable() works on both"
            )
        if self.backend == "auto" and self.reference.stack.training:
            base = type(self._base).__name__
            warnings.warn(f"{base} trains on the slower reference backend: {obstacle}", stacklevel=2)
        return self.reference

    # torch.compile goes on inside, where a layer has a graph.
    @torch.compiler.disable(recursive=False)
    def run(
        self,
        capsules: Capsules | MixedCapsules | None,
        given: Tensor,
        mask: Tensor | None,
        pool_mask: Tensor | None,
        slots: list[Tensor] | None = None,
        token_types: Tensor | None = None,
        prefixes: Sequence[tuple[Tensor, Tensor]] | None = None,
    ) -> Rows:
        """Processes a batch.

        Args:
            capsules: None for a base without any.
            given: ``[B, T]`` ids or ``[B, T, D]`` embeddings. mask, pool_mask: ``[B, T]`` or None for all.
            slots: collects what the slots hold in front of each prompted layer, ``[B, K, D]`` each.
            token_types: ``[B, T]`` or None for zeros; of bases that have them.
            prefixes: of every layer, keys and values ``[P, Hkv, d]`` in front of each sequence, in place of capsules.
        """
        config, prompted_layers = (CaptConfig(), ()) if capsules is None else (capsules.config, capsules.layers)
        backbone = self.choose(config.positions)
        real = torch.ones(given.shape[:2], dtype=torch.bool, device=given.device) if mask is None else mask
        rows, cu_seqlens, indices = _pack(given, real)
        pooled = None if pool_mask is None else boolean_mask("pool_mask", pool_mask).flatten()[indices]
        layout = Layout(cu_seqlens, 0, config.lead, pooled, None if prefixes is None else prefixes[0])
        ops = "reference" if self.backend == "reference" else "auto"
        if isinstance(backbone, HookedBackbone):
            rows, layout = self._run_hooked(backbone, capsules, rows, layout, ops, slots)
            return Rows(rows, layout, indices, *given.shape[:2])
        shift = config.slots if config.positions == "shift" and 0 in prompted_layers else 0
        rows = backbone.embed(rows, layout, shift, None if token_types is None else token_types.flatten()[indices])
        # transformers lets embeddings require a gradient where it checkpoints, trained or not; then the layers before
        # the first prompted one would keep their rows for nothing.
        if given.dim() == 2 and rows.requires_grad and not any(p.requires_grad for p in self._base.parameters()):
            rows = rows.detach()

        stream, context = Stream(rows), None
        for i in range(backbone.num_layers):
            due = None
            if capsules is not None and i in prompted_layers:
                prompted = prompted_layers.index(i)
                if layout.slots:
                    due = _refresh(capsules, prompted, stream, layout, ops)
                else:
                    rows, layout = _place(capsules, prompted, stream.rows, layout, ops)
                    stream, context = Stream(rows), None
                if slots is not None:
                    if due is not None:
                        stream, due = Stream(capsule_refresh(stream.rows, **due.arguments(layout))), None
                    slots.append(stream.rows[layout.slot_rows])
            if i == 0:
                stream = backbone.start(stream.rows)
            if context is None:
                context = backbone.context(stream.residual, layout, config.positions)
            here = layout if prefixes is None else layout.behind(prefixes[i])
            stream = backbone.layer(i, stream, here, context, due)
        return Rows(backbone.finish(stream), layout, indices, *given.shape[:2])

    def _run_hooked(
        self,
        backbone: HookedBackbone,
        capsules: Any,
        given: Tensor,
        layout: Layout,
        ops: str,
        slots: list[Tensor] | None,
    ) -> tuple[Tensor, Layout]:
        """:meth:`.HookedBackbone.run`, with the slots of every prompted layer written by hooks."""

        def write(prompted: int) -> Callable[[Tensor, Layout], Tensor]:
            def due(rows: Tensor, grown: Layout) -> Tensor:
                if prompted == 0:
                    rows, _ = _place(capsules, 0, rows[grown.token_rows], layout, ops)
                else:
                    slot = _refresh(capsules, prompted, Stream(rows), grown, ops)
                    rows = capsule_refresh(rows, **slot.arguments(grown))
                if slots is not None:
                    slots.append(rows[grown.slot_rows])
                return rows

            return due

        writes = {layer: write(prompted) for prompted, layer in enumerate(capsules.layers)}
        return backbone.run(given, layout, writes, capsules.config.slots, capsules.config.lead)


class RunnerOptions(nn.Module):
    """The part of a wrapped model that says how its :class:`Runner` runs the base."""

    _runner: Runner

    @property
    def _positions(self) -> str:
        """How positions count, which decides what a packed backbone can run."""
        return "shift"

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise NotImplementedError(
            "torch.nn.DataParallel copies a model's modules and not what runs them, so its copies would all run the "
            "first one's base: start one process a GPU, with torchrun or accelerate launch, or show one GPU alone "
            "(CUDA_VISIBLE_DEVICES)"
        )

    @property
    def backend(self) -> str:
        """One of "auto", "reference" and "fused"; see the class."""
        return self._runner.backend

    @backend.setter
    def backend(self, name: str) -> None:
        self._set("backend", name, BACKENDS)

    @property
    def memory(self) -> str:
        """One of "full" and "min"; see the class."""
        return self._runner.memory

    @memory.setter
    def memory(self, name: str) -> None:
        self._set("memory", name, MEMORY)

    def _set(self, option: str, name: str, choices: Sequence[str]) -> None:
        """An option of the runner, unless the base cannot be run so."""
        if name not in choices:
            raise ValueError(f"{option} must be one of {', '.join(choices)}, got {name!r}")
        before = getattr(self._runner, option)
        setattr(self._runner, option, name)
        try:
            self._runner.choose(self._positions)
        except NotImplementedError:
            setattr(self._runner, option, before)
            raise
