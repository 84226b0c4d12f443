"""Cost of layers that stay orthogonal: engines, and torch's parametrization with each of its maps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.nn.utils.parametrizations import orthogonal

from gradfree.benchmarks.tables.column import column
from gradfree.benchmarks.tables.facts import Fact, fact
from gradfree.benchmarks.timing.nets import build_trainee
from gradfree.benchmarks.timing.side_by_side import RATIO, STEP, Trainee
from gradfree.benchmarks.timing.timed import Timing, timed
from gradfree.orthogonal.weights import drift

PLAIN = "not orthogonal"
MAPS = ("matrix_exp", "cayley", "householder")
"""The maps of ``torch.nn.utils.parametrizations.orthogonal``, its default first."""
_DRIFT = "drift of the weights"


def _parametrized(case: Timing, name: str) -> Trainee:
    """Return the network in training whose layers have torch's parametrization."""
    trainee = build_trainee(case.item, None, case.device, case.seed)
    for layer in trainee.model.modules():
        if isinstance(layer, nn.Linear):
            orthogonal(layer, orthogonal_map=name)
    # The parameters are others now.
    trainee.optimizer.param_groups[0]["params"] = list(trainee.model.parameters())
    return trainee


def _drift(case: Timing, step: Trainee, turns: Sequence[float]) -> dict[str, Any]:
    """Return the largest ‖W Wᵀ - I‖ of the layers after all steps."""
    layers = [layer for layer in step.model.modules() if isinstance(layer, nn.Linear)]
    return {"drift": drift([layer.weight.detach() for layer in layers]).max().item()}


def _drift_fact(cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
    if "drift" in cost:
        yield fact(_DRIFT, "1", cost["drift"])


@timed(
    kind="orthogonal layers",
    subject="network",
    rounds=3,
    runs=2,
    title="training steps of layers that stay orthogonal",
    legend="A step with SGD of an orthogonal_mlp by width. matrix_exp, cayley, householder: the layers with "
    "torch.nn.utils.parametrizations.orthogonal and that map. Drift: the largest ‖W Wᵀ - I‖ after all steps.",
    names={"layers": "row"},
    columns=[
        column("(ms)", STEP, "{value:.1f}", "s", factor=1e3),
        column("(×)", STEP, unit=RATIO),
        column("drift", _DRIFT, "{value:.0e}"),
    ],
    across="setting",
    costs=_drift,
    facts=_drift_fact,
)
def orthogonal_layers(case: Timing) -> Mapping[str, Callable[[], Trainee]]:
    """Return, by label, functions that build the network in training: unconstrained, with each map and engine."""
    torchs = {name: partial(_parametrized, case, name) for name in MAPS}
    engines = {row.label: partial(build_trainee, case.item, row, case.device, case.seed) for row in case.rows}
    return {PLAIN: partial(build_trainee, case.item, None, case.device, case.seed), **torchs, **engines}
