"""Cost of a forward and backward pass of one recurrent layer with each engine, also on long sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradfree import CellLayer, engine_figures
from gradfree.benchmarks.records.case import ADDED, Row
from gradfree.benchmarks.tables.column import column
from gradfree.benchmarks.tables.facts import Fact, fact
from gradfree.benchmarks.timing.cells import CHOICE
from gradfree.benchmarks.timing.side_by_side import PASSES
from gradfree.benchmarks.timing.timed import Timing, timed
from gradfree.models import ParaGRU, ParaLSTM

COMPILED, PLAIN, LOOP = "compiled loop", "plain", "loop over cells"
SWEEPS, FORWARD_SWEEPS, SEQUENTIAL = "sweeps", "forward sweeps", "sequential"
"""Figures that engines report if they solve chains to a tolerance."""
GRADIENT_ERROR = "gradient error"
_CELLS: dict[str, type[nn.GRUCell] | type[nn.LSTMCell] | type[nn.RNNCell]] = {
    "GRU": nn.GRUCell,
    "LSTM": nn.LSTMCell,
    "RNN_TANH": nn.RNNCell,
}
_MODULES: dict[str, Callable[..., nn.Module]] = {
    "GRU": nn.GRU,
    "LSTM": nn.LSTM,
    "RNN": nn.RNN,
    "ParaGRU": ParaGRU,
    "ParaLSTM": ParaLSTM,
}
_FORMER_DEFAULTS: dict[str, dict[str, Any]] = {"dsf": {"feedback": "linspace"}}
"""Options of rows whose records, by label, name none: the engine's default has changed since."""
_LEGEND = "Forward and backward pass as a multiple of the plain module's; in brackets, peak memory. Sizes: sequences, "
_LEGEND += "steps, units."


class CellLoop(nn.Module):
    """The computation of a fused recurrent layer as a Python loop over torch's cell."""

    def __init__(self, layer: nn.RNNBase, compiled: bool = False):
        super().__init__()
        cell = _CELLS[layer.mode](layer.input_size, layer.hidden_size).to(next(layer.parameters()))
        cell.load_state_dict({name.removesuffix("_l0"): value for name, value in layer.state_dict().items()})
        # Not Module.compile: it silently compiles nothing of torch's own modules.
        self.cell = torch.compile(cell) if compiled else cell
        self.steps = 1 if layer.batch_first else 0

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the outputs for inputs ``x``, both as the layer has them, and the final states (parts, B, H)."""
        parts = None if state is None else tuple(state)
        outputs = []
        for step in x.unbind(self.steps):
            h = self.cell(step, parts if parts is None or len(parts) > 1 else parts[0])
            parts = h if isinstance(h, tuple) else (h,)
            outputs.append(parts[0])
        return torch.stack(outputs, self.steps), torch.stack(parts or ())


class Chunked(nn.Module):
    """A fused recurrent layer called on chunks of steps: cuDNN refuses 65,536 steps and more."""

    max_steps: ClassVar[int] = 2**15

    def __init__(self, layer: nn.RNNBase):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return the outputs and the final states; the autograd graph connects all chunks."""
        steps = 1 if self.layer.batch_first else 0
        state, outputs = None, []
        for chunk in x.split(self.max_steps, steps):
            out, state = self.layer(chunk, state)
            outputs.append(out)
        return torch.cat(outputs, steps), state


def replace_layers(model: nn.Module, loop: Callable[[nn.RNNBase], nn.Module]) -> None:
    """Replace each fused recurrent layer of the model by ``loop(layer)``."""
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.RNNBase):
            model.set_submodule(path, loop(layer))


@dataclass(frozen=True)
class RecurrentLayer:
    """A recurrent layer, and a batch of sequences that have as many features as the layer has units."""

    cell: str
    batch: int
    steps: int
    units: int
    dtype: str = field(default="float32", metadata=ADDED)
    batch_first: bool = field(default=True, metadata=ADDED)

    def __str__(self) -> str:
        others = ("" if self.dtype == "float32" else self.dtype), ("" if self.batch_first else "time first")
        return ", ".join([f"{self.cell} ({self.batch}, {self.steps}, {self.units})", *filter(None, others)])


def _plain(layer: RecurrentLayer) -> nn.Module:
    return _MODULES[layer.cell](layer.units, layer.units, batch_first=layer.batch_first)


class LayerPass:
    """A forward and backward pass of a layer: unchanged, as a loop over cells, or with an engine."""

    def __init__(
        self,
        case: Timing,
        row: Row | None = None,
        loop: Callable[[Any], nn.Module] | None = None,
    ):
        torch.manual_seed(case.seed)
        layer: RecurrentLayer = case.item
        sizes = (layer.batch, layer.steps) if layer.batch_first else (layer.steps, layer.batch)
        dtype = getattr(torch, layer.dtype)
        # Drawn in the default precision, so that all dtypes get the same numbers.
        self.x, self.cotangent = (torch.randn(*sizes, layer.units).to(case.device, dtype) for _ in range(2))
        self.x.requires_grad_()
        self.layer = layer
        plain = _plain(layer).to(case.device, dtype)
        self.module: nn.Module = plain if loop is None else loop(plain)
        if row is not None:
            row.create_engine().attach(self.module, [""])
            for _ in range(CHOICE if isinstance(self.module, CellLayer) else 0):
                self()

    def run(self) -> Tensor:
        """Return the outputs."""
        out: Tensor = self.module(self.x)[0]
        return out

    def __call__(self) -> None:
        """Run both passes."""
        self.run().backward(self.cotangent)
        self.x.grad = None
        self.module.zero_grad()


class LayerEvaluation(LayerPass):
    """A forward pass of a layer without gradients."""

    def __call__(self) -> None:
        """Run the forward pass."""
        with torch.no_grad():
            self.run()


@timed(
    kind="layer",
    subject="layer",
    metric=PASSES,
    with_memory=True,
    title="recurrent layers",
    legend=_LEGEND,
    names={"layer": "setting"},
    across="row",
    display_names={"dsf": "dsf linspace"},
    fits=lambda row, layer: layer.cell != "RNN" or row.engine != "highway_bp",
)
def layers(case: Timing) -> Mapping[str, Callable[[], LayerPass]]:
    """Return, by label, functions that build the passes: plain, as a loop over cells, and with each engine."""
    passes = {PLAIN: partial(LayerPass, case), LOOP: partial(LayerPass, case, loop=CellLoop)}
    rows = [replace(row, options={**_FORMER_DEFAULTS.get(row.label, {}), **row.options}) for row in case.rows]
    passes |= {row.label: partial(LayerPass, case, row) for row in rows}
    return passes


def _figures(case: Timing, step: LayerPass, turns: Sequence[float]) -> dict[str, Any]:
    """Return the engine's figures of a pass."""
    with engine_figures() as figures:
        step()
    return {"figures": {name: float(figure) for chain in figures.values() for name, figure in chain.items()}}


def _convergence_facts(cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
    """Yield the sweeps of a row, and whether it fell back to the sequential pass."""
    for name in (SWEEPS, FORWARD_SWEEPS, SEQUENTIAL):
        if name in cost.get("figures", {}):
            yield fact(name, "count", cost["figures"][name])


@timed(
    kind="long layer",
    subject="layer",
    metric=PASSES,
    with_memory=True,
    rounds=5,
    runs=1,
    title="recurrent layers, long sequences",
    legend=f"{_LEGEND} Beyond {Chunked.max_steps} steps the plain module is called piece by piece: "
    "cuDNN refuses 65,536.",
    names={"layer": "setting"},
    across="row",
    costs=_figures,
    facts=_convergence_facts,
)
def long_layers(case: Timing) -> Mapping[str, Callable[[], LayerPass]]:
    """Return, by label, functions that build the passes: plain, with each engine, and a compiled loop if asked for."""
    loops = {COMPILED: partial(LayerPass, case, loop=partial(CellLoop, compiled=True))}
    return {
        PLAIN: partial(LayerPass, case, loop=Chunked if case.item.steps > Chunked.max_steps else None),
        **(loops if case.more.get("compiled") else {}),
        **{row.label: partial(LayerPass, case, row) for row in case.rows},
    }


@timed(
    kind="evaluated layer",
    subject="layer",
    metric="time of the forward pass",
    rounds=5,
    runs=1,
    title="recurrent layers, evaluation",
    legend="Forward pass without gradients as a multiple of the plain module's. Sizes: sequences, steps, units.",
    names={"layer": "setting"},
    across="row",
)
def evaluated_layers(case: Timing) -> Mapping[str, Callable[[], LayerPass]]:
    """Return, by label, functions that build the forward passes: plain, and with each engine."""
    passes = {PLAIN: partial(LayerEvaluation, case)}
    return passes | {row.label: partial(LayerEvaluation, case, row) for row in case.rows}


class LayerPrecision(LayerPass):
    """Both passes of a layer in its dtype, whose gradients are compared with those in float64."""

    def error(self) -> float:
        """Return ‖g − g*‖ / ‖g*‖ of the recurrent weights' gradient g; g* is torch's of the same numbers in float64."""
        self.run().backward(self.cotangent)
        found = self.module.weight_hh_l0.grad
        assert isinstance(found, Tensor)
        self.module.zero_grad()
        exact = _plain(self.layer).double()
        exact.load_state_dict(self.module.state_dict())
        exact(self.x.detach().double())[0].backward(self.cotangent.double())
        expected = exact.weight_hh_l0.grad
        assert isinstance(expected, Tensor)
        return float((found.double() - expected).norm() / expected.norm())


def _errors(case: Timing, step: LayerPrecision, turns: Sequence[float]) -> dict[str, Any]:
    return {GRADIENT_ERROR: step.error()}


def _error_facts(cost: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[Fact]:
    yield fact(GRADIENT_ERROR, "relative", cost[GRADIENT_ERROR])


@timed(
    kind="precision",
    subject="layer",
    metric=PASSES,
    rounds=3,
    runs=1,
    title="recurrent layers, precision of gradients",
    legend="Relative error of the gradient of the recurrent weights, beside float64. Sizes: sequences, steps, units.",
    names={"layer": "setting", "engine": "row"},
    columns=(column("error of the gradient", GRADIENT_ERROR, "{value:.1e}"),),
    costs=_errors,
    facts=_error_facts,
)
def layer_precision(case: Timing) -> Mapping[str, Callable[[], LayerPrecision]]:
    """Return, by label, functions that build the passes: plain, and with each engine."""
    return {PLAIN: partial(LayerPrecision, case)} | {row.label: partial(LayerPrecision, case, row) for row in case.rows}
