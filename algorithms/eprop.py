"""Eligibility propagation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from gradfree.algebra.block_scan import Blocks
from gradfree.algorithms.fa import FA
from gradfree.chains.handle import Handle
from gradfree.chains.report import Report
from gradfree.dry_runs.dry_run import Batch
from gradfree.engines.discovery import Chains
from gradfree.engines.online import UnitEngine
from gradfree.engines.options import check_choice, check_count
from gradfree.feedback.feedback_layers import FeedbackLayers
from gradfree.time.time_chain import TimeChain

_FEEDBACK: Mapping[str, str] = {"symmetric": "", "random": "random", "adaptive": "learned"}


@dataclass(frozen=True, kw_only=True)
class EProp(UnitEngine):
    """e-prop: errors reach the past through each unit's own memory only, and never through W_hh; K is the gates' part.

    Bellec et al., "A solution to the learning dilemma for recurrent networks of spiking neurons", 2020, eqs. 1 to 4:
    the gradient is the sum over steps of a learning signal, here e_t, times an eligibility trace ε_t = K_t ε_{t-1} +
    ∂f_t/∂θ. K is the part of F_t that bypasses W_hh: z of a GRU, where e-prop equals ``highway_bp(iterations=0)``; of
    an LSTM f for c, which also reaches h. A cell without gates, such as ``nn.RNN``, has none.

    Needs gates; costs one scan a pass. In a stream the traces take the memory of the weights for each sequence and part
    of the state, whatever the length.

    Args:
        feedback: how the learning signal comes through the readout: all linear layers and convolutions outside of the
            recurrent ones. "symmetric": by their own weights. "random": by fixed random ones, as in ``fa`` and in RFLO
            (Murray 2019). "adaptive": by random ones that get the weights' own updates and decay towards them,
            ``fa(feedback="learned")``.
        seed: of the random weights.
        stream: see :class:`~gradfree.engines.online.StreamEngine`.
    """

    feedback: str = "symmetric"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "seed", least=0)
        check_choice(self, "feedback", _FEEDBACK)

    @property
    def needs_residual(self) -> bool:
        """True: K is the gates' part."""
        return True

    def blocks(self, chain: TimeChain) -> Blocks:
        """Return the gates' part of each F_t, unit by unit."""
        return chain.unit_blocks(carried=True)

    def validate(
        self, model: nn.Module, chains: Chains | None = None, *, batch: Batch | None = None, **options: Any
    ) -> Report:
        """Return the engine's report, with a problem if feedback is for a readout that the model does not have."""
        report = super().validate(model, chains, **options)
        blocks = [block for site in report.chains.values() for block in site.blocks.values()]
        if not report.ok or not _FEEDBACK[self.feedback] or _readout(model, blocks):
            return report if batch is None else super().validate(model, chains, batch=batch, **options)
        problem = (
            f"feedback={self.feedback!r} is for a readout, but the model has no linear layer outside of its recurrent "
            "layers. Attach the engine to the model with the readout, or use feedback='symmetric'."
        )
        return replace(report, problems=[problem])

    def attach(self, model: nn.Module, chains: Chains | None = None, **options: Any) -> Handle:
        """Attach the engine and, unless feedback is symmetric, ``fa`` to the layers outside of its chains."""
        handle = super().attach(model, chains, **options)
        if rule := _FEEDBACK[self.feedback]:
            with ExitStack() as stack:
                stack.callback(handle.detach)
                readout = _readout(model, list(handle.blocks.values()))
                handle.add(FA(feedback=rule, seed=self.seed).attach(model, readout))
                stack.pop_all()
        return handle


def _readout(model: nn.Module, blocks: Sequence[nn.Module]) -> list[str]:
    """Return the paths of the layers of ``model`` that ``fa`` can train outside of ``blocks``."""
    inside = {module for block in blocks for module in block.modules()}
    return [path for path, m in FeedbackLayers("", model).blocks.items() if m not in inside]
