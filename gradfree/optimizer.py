"""An engine and an optimizer as one object."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from gradfree.choosing.watching import GradientWatch
from gradfree.engines.discovery import Chains
from gradfree.engines.engine import Engine, named_baseline
from gradfree.registry import resolve_engine
from gradfree.wording import one

_WATCH = "gradfree watch"


class EngineOptimizer(Optimizer):
    """Wraps an optimizer and attaches an engine that computes its gradients.

    The engine is attached to ``model`` at once. Everything else is the wrapped optimizer's: LR schedulers,
    ``GradScaler``, closures, hooks and ``state_dict`` see its groups and its state.

    Args:
        optimizer: any optimizer over parameters of ``model``.
        model: the model to attach to.
        engine: an engine's name, or an engine.
        chains: as in :meth:`gradfree.Engine.attach`.
        batched: as in :meth:`gradfree.Engine.attach`.
        residual: as in :meth:`gradfree.Engine.attach`.
        watch: compares the engine's gradients with exact ones every few steps, and reacts if they are too far off.
        **options: the engine's options, if it is given by name.

    Attributes:
        optimizer: the wrapped optimizer.
        engine: the engine.
        handle: of the attached engine.

    Raises:
        ChainError: the engine cannot be attached.
        ValueError: the optimizer has none of the model's parameters, or ``watch`` checks another engine.
    """

    _step_supports_amp_scaling = False
    """``GradScaler`` unscales, also for fused optimizers: it would set the scale here, where they do not read it."""

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        engine: str | Engine,
        *,
        chains: Chains | None = None,
        batched: Literal["auto"] | bool = "auto",
        residual: float | None = None,
        watch: GradientWatch | None = None,
        **options: Any,
    ):
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {one(type(optimizer).__name__)}.")
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, not {one(type(model).__name__)}.")
        if watch is not None and not isinstance(watch, GradientWatch):
            raise TypeError(f"watch must be a gradfree.GradientWatch(every=100), not {watch!r}.")
        if watch is not None and watch.is_used:
            raise ValueError("this GradientWatch checks another engine already: make one for each EngineOptimizer.")
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if own.isdisjoint(map(id, model.parameters())):
            raise ValueError(
                f"the optimizer holds none of the parameters of {type(model).__name__}. Pass the model that it trains."
            )
        # Optimizer.__init__ is not called: it would build separate groups.
        self.optimizer = optimizer
        self.engine = resolve_engine(engine, options)
        with named_baseline():
            self.handle = self.engine.attach(model, chains, batched=batched, residual=residual)
        self.gradient_watch = watch
        if watch is not None:
            with ExitStack() as undo:
                undo.callback(self.handle.detach)
                watch.start(self.handle)
                undo.pop_all()

    def detach(self) -> None:
        """Detach the engine; the optimizer continues with autograd's gradients."""
        self.handle.detach()

    def __getstate__(self) -> Any:
        """Raise: a copy's engine would not be attached to a model."""
        raise TypeError("an EngineOptimizer cannot be copied; copy the model and its .optimizer, and wrap them again.")

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped optimizer, also those that ``Optimizer.__init__`` sets."""
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's parameter groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state by parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step of the wrapped optimizer.

        Warns, once, if gradients have bypassed the engine; see :meth:`gradfree.chains.handle.Handle.watch`.
        """
        loss = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        self.handle.watch()
        if self.gradient_watch is not None:
            self.gradient_watch.after_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state with the engine's; the wrapped optimizer can load it, too."""
        watched = {} if self.gradient_watch is None else {_WATCH: self.gradient_watch.state_dict()}
        return self.optimizer.state_dict() | {"gradfree": self.handle.state_dict()} | watched

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an ``EngineOptimizer`` or of a plain optimizer.

        Raises:
            ValueError: the groups of parameters differ, the state has chains that are not here, or its engine had
                options that this one has risen above (see :class:`GradientWatch`); then nothing changes.
        """
        if self.gradient_watch is not None and _WATCH in state_dict:
            self.gradient_watch.check_state(state_dict[_WATCH])
        before = self.optimizer.state_dict()
        self.optimizer.load_state_dict(state_dict)
        try:
            self.handle.load_state_dict(state_dict.get("gradfree", {}))
        except ValueError:
            self.optimizer.load_state_dict(before)
            raise
        if self.gradient_watch is not None and _WATCH in state_dict:
            self.gradient_watch.load_state_dict(state_dict[_WATCH])
