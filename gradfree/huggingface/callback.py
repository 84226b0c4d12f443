"""An engine as a callback of Hugging Face's Trainer."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from gradfree.chains.handle import Handle
from gradfree.engines.discovery import Chains
from gradfree.engines.engine import Engine, named_baseline
from gradfree.registry import resolve_engine


class EngineCallback(TrainerCallback, ExportableState):
    """Trains with an engine, which is attached to the model during ``Trainer.train()``.

    Accumulation, clipping, mixed precision, gradient checkpointing, PEFT and DDP are those of the Trainer. Checkpoints
    contain the engine's state, which ``resume_from_checkpoint`` restores.

    Args:
        engine: an engine's name, or an engine.
        chains: as in :meth:`gradfree.Engine.attach`.
        residual: as in :meth:`gradfree.Engine.attach`.
        **options: the engine's options, if it is given by name.

    Attributes:
        engine: the engine.
        handle: of the attached engine, during a training and after one that an exception has ended.

    Raises:
        ValueError: unknown engine.
        TypeError: unknown option.
    """

    def __init__(
        self,
        engine: str | Engine,
        chains: Chains | None = None,
        residual: float | None = None,
        **options: Any,
    ):
        self.engine, self.chains, self.residual = resolve_engine(engine, options), chains, residual
        self.handle = Handle()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Attach the engine.

        Raises:
            ChainError: the engine cannot be attached.
        """
        before = self.handle
        before.detach()
        with named_baseline():
            self.handle = self.engine.attach(model, self.chains, residual=self.residual)
        # A checkpoint from a training without the engine has no entry, which the Trainer needs to save the next one.
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        # A Trainer that does not resume has saved the state of the last model just now: not for another one.
        if state.global_step or before.blocks in ({}, self.handle.blocks):
            self._load(saved if isinstance(saved, list) else [saved])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Call :meth:`Handle.watch` and, on several ranks, :meth:`Handle.average_over_ranks`."""
        self.handle.watch()
        if distributed.is_available() and distributed.is_initialized():
            self.handle.average_over_ranks()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach the engine."""
        self.handle.detach()

    def state(self) -> dict[str, Any]:
        """Return the callback's arguments and the engine's state, as lists, for a checkpoint."""
        name = f"{type(self.engine).__module__}:{type(self.engine).__qualname__}"
        options = {f.name: getattr(self.engine, f.name) for f in fields(self.engine)}
        where = {"chains": self.chains, "residual": self.residual}
        kept = {
            path: {key: _listed(value) for key, value in own.items()} for path, own in self.handle.state_dict().items()
        }
        return {"args": {"engine": name, **where, **options}, "attributes": {"kept": kept}}

    def _load(self, saved: list[dict[str, Any]]) -> None:
        """Load the saved state of this engine's chains; other callbacks may have engines on other chains."""
        kept = {
            path: {key: _unlisted(value) for key, value in own.items()}
            for each in saved
            for path, own in each["attributes"]["kept"].items()
        }
        self.handle.load_own(kept)


def _listed(value: Any) -> Any:
    """Return a tensor as a list with its dtype; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return {"dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}


def _unlisted(value: Any) -> Any:
    """Undo :func:`_listed`."""
    is_tensor = isinstance(value, dict) and value.keys() == {"dtype", "values"}
    return torch.tensor(value["values"], dtype=getattr(torch, value["dtype"])) if is_tensor else value
