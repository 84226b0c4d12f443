"""``run_with_resets``: sequences with resets in one call.

Outputs, final states and gradients equal those of a loop that calls the layer step by step with masked states.
"""

from contextlib import nullcontext

import pytest
import torch
from cell_tasks import HIDDEN, INPUT, Leaky, Projecting
from oracles import off_by
from pairwise import pairwise
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import gradfree
from gradfree import CellLayer, ChainError, run_with_resets

pytestmark = pytest.mark.filterwarnings("ignore:.*has long memory")


def cell_layer(cell):
    return lambda **options: CellLayer(cell(), batch_first=options.get("batch_first", False))


LAYERS = {
    "tanh": lambda **options: nn.RNN(INPUT, HIDDEN, **options),
    "relu": lambda **options: nn.RNN(INPUT, HIDDEN, nonlinearity="relu", **options),
    "gru": lambda **options: nn.GRU(INPUT, HIDDEN, **options),
    "lstm": lambda **options: nn.LSTM(INPUT, HIDDEN, **options),
    "own cell": cell_layer(Leaky),
    "lstm cell with an output": cell_layer(Projecting),
    "gru cell": cell_layer(lambda: nn.GRUCell(INPUT, HIDDEN)),
    "lstm cell": cell_layer(lambda: nn.LSTMCell(INPUT, HIDDEN)),
}
OPTIONS = {
    "one layer": {},
    "three layers": {"num_layers": 3},
    "no bias, batch first": {"bias": False, "batch_first": True},
    "two layers, batch first": {"num_layers": 2, "batch_first": True},
}
RESETS = {
    "none": lambda steps, batch: torch.zeros(steps, batch, dtype=torch.bool),
    "all": lambda steps, batch: torch.ones(steps, batch, dtype=torch.bool),
    "first": lambda steps, batch: (torch.arange(steps) == 0)[:, None].expand(steps, batch),
    "last": lambda steps, batch: (torch.arange(steps) == steps - 1)[:, None].expand(steps, batch),
    "some": lambda steps, batch: torch.rand(steps, batch) < 0.1,
}


def loop(layer, x, state, resets):
    """Call the layer step by step with masked states: the reference."""
    along = 1 if layer.batch_first else 0
    outs = []
    for step, reset in zip(x.split(1, along), resets.unbind(along), strict=True):
        kept = (~reset).to(x.dtype)[:, None]
        state = tuple(part * kept for part in state) if isinstance(state, tuple) else state * kept
        out, state = layer(step, state)
        outs.append(out)
    return torch.cat(outs, along), state


class Task:
    """A layer, an input and an initial state, and a loss on all outputs and final states."""

    def __init__(self, layer, options, resets, steps=33, batch=5, state=True):
        torch.manual_seed(0)
        self.layer = LAYERS[layer](**OPTIONS[options])
        recurrent = isinstance(self.layer, nn.RNNBase)
        shape = (self.layer.num_layers, batch, HIDDEN) if recurrent else (batch, HIDDEN)
        self.states = [torch.randn(shape, requires_grad=True) for _ in range(2 if layer.startswith("lstm") else 1)]
        self.x, self.resets = torch.randn(steps, batch, INPUT), RESETS[resets](steps, batch)
        if self.layer.batch_first:
            self.x, self.resets = self.x.transpose(0, 1), self.resets.t()
        self.x.requires_grad_()
        if not state:
            self.states = [torch.zeros(shape) for _ in self.states]
        self.state = tuple(self.states) if len(self.states) > 1 else self.states[0]

    def everything(self, run, state="own"):
        """Return outputs, final states and the gradients of input, initial states and weights."""
        out, final = run(self.layer, self.x, self.state if state == "own" else state, self.resets)
        found = [out, *(final if isinstance(final, tuple) else [final])]
        loss = sum((part * torch.linspace(-1, 2, part.numel()).view(part.shape)).sum() for part in found)
        wanted = [self.x, *(part for part in self.states if part.requires_grad), *self.layer.parameters()]
        return [*found, *torch.autograd.grad(loss, wanted)]


@pairwise(layer=LAYERS, options=OPTIONS, resets=RESETS, steps=[1, 2, 33], batch=[1, 5], state=[True, False])
def test_run_with_resets_equals_a_loop_with_masked_states(layer, options, resets, steps, batch, state):
    task = Task(layer, options, resets, steps, batch, state)
    found = task.everything(run_with_resets, "own" if state else None)
    assert off_by(found, task.everything(loop)) < 1e-12


@pytest.mark.parametrize("layer", ["tanh", "gru", "lstm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions_and_autocast_equal_the_loop(layer, dtype):
    task = Task(layer, "three layers", "some", steps=12)
    task.layer.float()
    task.x = task.x.detach().float().requires_grad_()
    task.states = [part.detach().float().requires_grad_() for part in task.states]
    task.state = tuple(task.states) if len(task.states) > 1 else task.states[0]
    with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
        found, expected = task.everything(run_with_resets), task.everything(loop)
    assert off_by(found, expected) < (1e-5 if dtype is torch.float32 else 0.05)


@pytest.mark.parametrize("engine", ["backprop", "shooting", "newton", "fixed_point"])
@pytest.mark.parametrize("layer", [name for name in LAYERS if "lstm cell" not in name])
def test_an_engine_on_the_layer_solves_the_pieces(engine, layer):
    task = Task(layer, "two layers, batch first", "some")
    expected = task.everything(loop)
    options = {"shooting": {"segments": 4}, "newton": {"max_sweeps": 40}, "fixed_point": {"iterations": 40}}
    with gradfree.create_engine(engine, **options.get(engine, {})).attach(task.layer) as handle:
        assert off_by(task.everything(run_with_resets), expected) < 1e-10
        assert all(site.solved for site in handle.chains.values())


@pytest.mark.parametrize("engine", [None, "shooting"])
def test_weights_that_no_padding_outweighs_are_exact(engine):
    task = Task("lstm", "two layers, batch first", "some", steps=300)
    with torch.no_grad():
        task.layer.bias_ih_l1[HIDDEN : 2 * HIDDEN] = -2e4
    expected = task.everything(loop)
    with gradfree.create_engine(engine).attach(task.layer) if engine else nullcontext():
        assert off_by(task.everything(run_with_resets), expected) < 1e-10


def test_inputs_that_are_larger_than_the_saturated_gates_are_exact():
    """Padding repeats an input, which would open the gates that keep c."""
    task = Task("lstm", "two layers, batch first", "some", steps=300)
    task.x = (3e4 * task.x.detach()).requires_grad_()
    expected = task.everything(loop)
    with gradfree.create_engine("shooting", segments=4).attach(task.layer):
        assert off_by(task.everything(run_with_resets), expected) < 1e-10


@pytest.mark.parametrize("layer", ["gru", "lstm"])
def test_long_pieces_are_cut_into_segments_in_both_passes(layer):
    task = Task(layer, "three layers", "none", steps=700, batch=2)
    task.resets[300, 0] = task.resets[20, 1] = True
    expected = task.everything(loop)
    with gradfree.create_engine("shooting").attach(task.layer), gradfree.engine_figures() as figures:
        assert off_by(task.everything(run_with_resets), expected) < 1e-10
    assert {"forward sweeps", "sweeps"} <= figures["l0"].keys()


def test_approximations_stop_at_resets_and_dropout_and_no_grad_apply():
    task = Task("gru", "one layer", "all")
    expected = task.everything(loop)
    with gradfree.create_engine("dsf", feedback=0.9).attach(task.layer):
        assert off_by(task.everything(run_with_resets), expected) < 1e-12
    layer, resets = nn.LSTM(INPUT, HIDDEN, num_layers=2, dropout=0.5), RESETS["some"](9, 2)
    outs = [run_with_resets(layer, torch.ones(9, 2, INPUT), None, resets)[0] for _ in range(2)]
    assert not torch.equal(*outs)
    with torch.no_grad():
        outs = [run_with_resets(layer.eval(), torch.ones(9, 2, INPUT), None, resets)[0] for _ in range(2)]
    assert torch.equal(*outs)
    assert not outs[0].requires_grad


class Doubled(nn.GRU):
    def forward(self, x, hx=None):
        return super().forward(2 * x, hx)


def hooked(kind, layer=None):
    layer = nn.GRU(3, 4) if layer is None else layer
    getattr(layer, f"register_{kind}")(lambda *_: None)
    return layer


def patched():
    layer = nn.GRU(3, 4)
    layer.forward = lambda x, hx=None: nn.GRU.forward(layer, 2 * x, hx)
    return layer


X, NONE = torch.randn(7, 2, 3), torch.zeros(7, 2, dtype=torch.bool)


@pytest.mark.parametrize(
    ("layer", "arguments", "error", "message"),
    [
        (nn.GRU(3, 4, bidirectional=True), (X, None, NONE), ChainError, "both directions"),
        (nn.LSTM(3, 4, proj_size=2), (X, None, NONE), ChainError, "proj_size=2"),
        (Doubled(3, 4), (X, None, NONE), ChainError, "another forward"),
        (patched(), (X, None, NONE), ChainError, "another forward"),
        (hooked("forward_hook"), (X, None, NONE), ChainError, "hooks"),
        (hooked("full_backward_hook"), (X, None, NONE), ChainError, "hooks"),
        (hooked("full_backward_pre_hook", CellLayer(nn.GRUCell(3, 4))), (X, None, NONE), ChainError, "hooks"),
        (CellLayer(nn.Sequential(nn.BatchNorm1d(4))), (X, torch.zeros(2, 4), NONE), ChainError, "normalises over the"),
        (nn.Linear(3, 4), (X, None, NONE), TypeError, "not Linear"),
        (nn.GRU(3, 4), (pack_sequence([torch.randn(7, 3)]), None, NONE), TypeError, "PackedSequence"),
        (nn.GRU(3, 4), (X[:, 0], None, NONE[:, 0]), ValueError, r"\(T, B, I\).*\(7, 3\)"),
        (nn.GRU(3, 4), (X, None, NONE.float()), TypeError, "torch.bool, not of torch.float"),
        (nn.GRU(3, 4), (X, None, NONE.t()), ValueError, r"must be \(7, 2\).*not \(2, 7\)"),
        (nn.GRU(3, 4), (X, None, NONE.to("meta")), ValueError, "resets are on meta"),
        (nn.GRU(3, 4), (X, torch.zeros(1, 3, 4), NONE), ValueError, r"\(1, 3, 4\)|\[1, 3, 4\]"),
        (nn.GRU(3, 4), (X, torch.zeros(2, 4), NONE), ValueError, r"\(layers, B, H\)"),
        (nn.LSTM(3, 4), (X, torch.zeros(1, 2, 4), NONE), ValueError, "tuple of two"),
        (CellLayer(nn.GRUCell(3, 4)), (X, torch.zeros(3, 4), NONE), ValueError, "2 sequences"),
    ],
)
def test_bad_layers_and_arguments_are_refused_before_anything_runs(layer, arguments, error, message):
    with pytest.raises(error, match=message):
        run_with_resets(layer, *arguments)


def test_a_cell_with_several_state_tensors_is_refused_by_engines_that_linearise():
    layer = CellLayer(nn.LSTMCell(3, 4))
    with (
        gradfree.create_engine("fixed_point").attach(layer),
        pytest.raises(ChainError, match="Use 'shooting', 'backprop', 'newton'"),
    ):
        run_with_resets(layer, X, None, NONE)
