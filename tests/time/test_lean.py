"""The lean form of recurrent layers: less memory, the same gradients."""

import pytest
import torch
from oracles import assert_close
from recurrent_tasks import LanguageModel
from torch import nn

import gradfree
from gradfree import ChainError
from gradfree.benchmarks.timing.allocations import peak_memory
from gradfree.testing.cases.models import plain_model
from gradfree.time.gru_forward import pays

BATCH, LENGTH, WIDTH = 64, 12, 64
ENGINES = ["backprop", "deeppcr", "highway_bp", "dsf", "fixed_point", "truncated"]


class Task:
    """A GRU of the size at which gates are kept, in training."""

    def __init__(self, layers=1):
        self.module = nn.GRU(WIDTH, WIDTH, num_layers=layers)
        self.x = torch.randn(LENGTH, BATCH, WIDTH, requires_grad=True)
        self.cotangent = torch.randn(LENGTH, BATCH, WIDTH)
        assert pays(self.x, WIDTH)

    def gradients(self):
        out = self.module(self.x)[0]
        return out, torch.autograd.grad(out, [self.x, *self.module.parameters()], self.cotangent)


@pytest.mark.parametrize("name", ENGINES)
def test_lean_changes_no_output_and_no_gradient(name):
    task, engine = Task(layers=2), gradfree.create_engine(name)
    with engine.attach(task.module):
        outputs, expected = task.gradients()
    with engine.attach(task.module, lean=True):
        lean_outputs, actual = task.gradients()
    assert torch.equal(lean_outputs, outputs)
    assert_close(actual, expected)


@pytest.mark.parametrize(
    ("name", "layers"), [("dsf", 1), ("highway_bp", 1), *(pytest.param(n, 4, marks=pytest.mark.slow) for n in ENGINES)]
)
def test_lean_needs_less_memory(name, layers):
    task, engine = Task(layers), gradfree.create_engine(name)
    peaks = []
    for lean in (False, True):
        with engine.attach(task.module, lean=lean):
            task.gradients()
            peaks.append(peak_memory(task.gradients, "cpu"))
    gates = 4 * layers * task.x.nbytes
    assert peaks[1] < peaks[0] - (gates / 2 if layers > 1 else 0)


def test_lean_keeps_nothing_of_the_forward_pass_but_the_states():
    task = Task()
    kept = {}
    for lean in (False, True):
        with gradfree.create_engine("dsf").attach(task.module, lean=lean):
            node = task.module(task.x)[0].grad_fn
            kept[lean] = sum(tensor.nbytes for tensor in node.saved_tensors)
    assert kept[False] - kept[True] == 4 * task.x.nbytes


def saved(module):
    """Return how many tensors a pass through ``module`` keeps."""
    out = module(torch.randn(LENGTH, BATCH, WIDTH))[0]
    return len(out.grad_fn.saved_tensors)


def test_an_optimizer_attaches_the_lean_form():
    module = nn.GRU(WIDTH, WIDTH)
    counts = []
    for lean in (False, True):
        optimizer = gradfree.EngineOptimizer(torch.optim.SGD(module.parameters()), module, "dsf", lean=lean)
        counts.append(saved(module))
        optimizer.detach()
    assert counts[0] - counts[1] == 3


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_strategy_attaches_the_lean_form(tmp_path):
    pl = pytest.importorskip("lightning.pytorch")
    import gradfree.lightning

    class Sequences(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(WIDTH, WIDTH)

        def training_step(self, batch, index):
            self.saved = saved(self.rnn)
            return self.rnn(batch)[0].pow(2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    counts = []
    for lean in (False, True):
        model, strategy = Sequences(), gradfree.lightning.EngineStrategy("dsf", lean=lean)
        trainer = pl.Trainer(
            default_root_dir=tmp_path, strategy=strategy, accelerator="cpu", max_steps=1, barebones=True
        )
        trainer.fit(model, torch.utils.data.DataLoader(torch.randn(2, BATCH, WIDTH), 2))
        counts.append(model.saved)
    assert counts[0] - counts[1] == 3


def test_chains_in_depth_have_no_lean_form():
    engine, message = gradfree.create_engine("highway_bp"), "'blocks' is a chain in depth.*lean=True is for recurrent"
    model = plain_model()
    with pytest.raises(ChainError, match=message):
        engine.attach(model, lean=True)
    with pytest.raises(ChainError, match=message):
        gradfree.EngineOptimizer(torch.optim.SGD(model.parameters()), model, engine, lean=True)
    assert not any(module._forward_hooks for module in model.modules())


def test_layers_that_keep_nothing_anyway_may_be_attached_lean():
    models = [LanguageModel("lstm"), LanguageModel("rnn_tanh"), gradfree.CellLayer(nn.GRUCell(3, 4))]
    for model in models:
        gradfree.create_engine("backprop").attach(model, lean=True).detach()
