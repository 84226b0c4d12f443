"""What a user would take in place of a leaner engine: plain backpropagation that runs segments of layers again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import isqrt

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from gradfree.benchmarks.records.case import Row
from gradfree.chains.report import Report


@dataclass(frozen=True)
class SegmentsAgain(Row):
    """``torch.utils.checkpoint`` on √L segments of each of some ``nn.Sequential`` of L layers.

    Attributes:
        chains: their paths.
    """

    chains: tuple[str, ...]

    def put_on(self, model: nn.Module) -> None:
        """Let ``model`` keep of each what enters its segments, and run these again in the backward pass."""
        for path in self.chains:
            layers = model.get_submodule(path)
            assert isinstance(layers, nn.Sequential)
            segments: Callable[[Tensor], Tensor] = partial(
                checkpoint_sequential, list(layers), isqrt(len(layers)), use_reentrant=False
            )
            object.__setattr__(layers, "forward", lambda x, run=segments: run(input=x))


def segments_again(model: nn.Module, reports: Iterable[Report]) -> list[SegmentsAgain]:
    """Return the row, if some engine would take the layers of such a chain apart."""
    sites = {path: site for report in reports if report.ok for path, site in report.chains.items()}
    chains = [p for p, site in sites.items() if site.of_layers and type(model.get_submodule(p)) is nn.Sequential]
    return [SegmentsAgain("backprop, √L checkpoints", "backprop", {"plain": True}, tuple(chains))] if chains else []
