"""The engine interface: a configuration that knows how to solve a chain for its gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradfree.attaching import Handle, attach
from gradfree.chain import Chain, ChainGradients
from gradfree.scan import relative_change
from gradfree.site import Removable, Site
from gradfree.validation import KINDS, Report, compiled_around_blocks, validate


@dataclass(frozen=True, kw_only=True)
class Engine(ABC):
    """A way to train a network: turns the direct cotangents of a chain's states into gradients.

    Subclasses are frozen dataclasses whose fields are the options; they implement :meth:`gradients`, or derive
    from :class:`SweepEngine`. An engine holds no state of a model and may be attached to several.

    Raises:
        TypeError: an unknown option; the message names the known ones.
    """

    def __new__(cls, *args: Any, **options: Any) -> Engine:
        """Refuse options that the engine does not have."""
        known = [f.name for f in fields(cls)]
        unknown = sorted(options.keys() - set(known))
        if unknown or args:
            what = f"no option {', '.join(map(repr, unknown))}" if unknown else "only options given by name"
            raise TypeError(f"{cls.__name__} takes {what}; its options are: {', '.join(known) or 'none'}.")
        return super().__new__(cls)

    kinds: ClassVar[tuple[type[Site], ...]] = KINDS
    """The kinds of chains that the engine can solve; the first that accepts a module counts."""

    @property
    def needs_residual(self) -> bool:
        """Whether the engine asks for a chain's residual path."""
        return False

    @property
    def keeps_means(self) -> bool:
        """Whether the engine asks for a chain's ``mean_residual``, which ranks average."""
        return False

    @property
    def streams(self) -> bool:
        """Whether the engine runs a chain of layers again, rather than have its activations stored."""
        return False

    @abstractmethod
    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the gradients of ``chain`` for the direct cotangents e_i of its states.

        Must be linear in ``direct`` (loss scaling and gradient accumulation rely on it) and must not wait for
        the device.
        """

    def validate(self, model: nn.Module, chains: Sequence[str] | None = None) -> Report:
        """Tell whether the engine can be attached to ``model``, and to which chains; changes nothing.

        Args:
            model: any module.
            chains: module paths of the chains: containers (``nn.Sequential``, ``nn.ModuleList``) of blocks, or
                recurrent layers. By default all recurrent layers, and the container if only one looks like a chain.
        """
        report = validate(model, chains, self.kinds)
        if not self.needs_residual:
            return report
        problems = [
            f"{path!r} has no gate that carries its state from step to step, which {self} needs. Use the engine "
            "'fixed_point', 'truncated' or 'dsf', or leave it out: chains=[...]."
            for path, site in report.chains.items()
            if not site.has_residual
        ]
        problems += [
            f"{where} is compiled, which hides the residual path of the blocks in {path!r} that {self} needs. Compile "
            "what lies inside the blocks, or use the engine 'fixed_point' or 'truncated'."
            for path, site in report.chains.items()
            if (where := compiled_around_blocks(model, path, site))
        ]
        return Report(report.chains, [*report.problems, *problems])

    def parts(self, site: Site, memory: dict[str, Tensor], lean: bool) -> Sequence[Removable]:
        """Put the engine on one chain; return what to take off again.

        Args:
            site: the chain.
            memory: what is kept of it from pass to pass; goes into checkpoints.
            lean: as in :meth:`attach`.
        """
        return site.record(self, memory, lean)

    def attach(self, model: nn.Module, chains: Sequence[str] | None = None, *, lean: bool = False) -> Handle:
        """Let this engine compute the gradients of ``model``'s chains in every backward pass from now on.

        Use the handle as a context manager or call its ``detach()``.

        Args:
            model: as in :meth:`validate`.
            chains: likewise.
            lean: whether recurrent layers keep nothing of the forward pass but their states, and recompute the rest
                in the backward pass also where keeping it is faster. The gradients are the same.

        Raises:
            ChainError: what :meth:`validate` reports, or ``lean`` for another chain; the model is unchanged then.
        """
        return attach(self, model, self.validate(model, chains), lean)


class SweepEngine(Engine):
    """An engine that splits each link's Jacobian into F = K + J and iterates δ ← scan(e + pull_J(δ), K).

    With diagonal K the scan is cheap; each sweep pulls through all links at once. After k sweeps δ is exact for
    the last k + 1 states, so k = L - 1 is exact everywhere (Highway-BP, arXiv 2501.17086, eqs. 6 and 7).
    """

    @property
    @abstractmethod
    def sweeps(self) -> int:
        """Return k, the number of sweeps after the first scan."""

    @abstractmethod
    def split(self, chain: Chain) -> Any:
        """Return the factors K_i, made by ``chain.constant`` or ``chain.residual``."""

    def gradients(self, chain: Chain, direct: Any) -> ChainGradients:
        """Return the gradients after :attr:`sweeps` sweeps."""
        factors = self.split(chain)
        delta = chain.scan(direct, factors)
        sweeps = min(self.sweeps, len(chain) - 1)

        def swept() -> Any:
            return chain.scan(chain.pull(direct, delta, factors), factors)

        for _ in range(sweeps):
            delta = swept()
        chain.offer("sweeps", lambda: torch.tensor(float(sweeps)))
        chain.offer("residual", lambda: relative_change(delta, swept()))
        return chain.gradients(delta)


def check_count(engine: Engine, option: str, least: int) -> None:
    """Refuse an option that is not a whole number of at least ``least``.

    Raises:
        TypeError: not an ``int``.
        ValueError: too small.
    """
    value = getattr(engine, option)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{type(engine).__name__}: {option} must be an int of at least {least}, not {value!r}.")
    if value < least:
        raise ValueError(f"{type(engine).__name__}: {option} must be at least {least}, not {value}.")
