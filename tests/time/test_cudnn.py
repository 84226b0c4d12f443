"""Calls of torch's recurrent kernels under the rules of cuDNN, which are pretended on the CPU."""

import warnings
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from oracles import off_by
from recurrent_tasks import everything
from torch import nn

import gradfree
from gradfree.devices import hardware
from gradfree.time import forward, torch_layer_site

STEPS = 15
COPIES = "RNN module weights are not part of single contiguous chunk of memory"


def in_one_piece(weights):
    """Whether they are the whole of their memory, without a gap: matrices first, then biases or room for them."""
    start, size = weights[0].data_ptr(), 0
    ordered = [w for w in weights if w.dim() == 2] + [w for w in weights if w.dim() == 1]
    for weight in ordered:
        if weight.data_ptr() != start + size * weight.itemsize:
            return False
        size += weight.numel()
    if ordered[-1].dim() == 2:
        size += sum(2 * len(weight) for weight in weights) // 2
    return weights[0].untyped_storage().nbytes() == size * weights[0].itemsize


class Rules:
    """Calls of the kernels, which refuse what cuDNN refuses, as long as a ``with`` is open.

    Attributes:
        lengths: the steps of each call.
    """

    def __init__(self, monkeypatch):
        self.monkeypatch, self.lengths = monkeypatch, []

    @contextmanager
    def __call__(self):
        self.lengths.clear()
        with self.monkeypatch.context() as patch, warnings.catch_warnings():
            warnings.filterwarnings("error", message=COPIES)
            patch.setattr(hardware, "CUDNN_STEPS", STEPS)
            for module in (hardware, forward, torch_layer_site):
                patch.setattr(module, "runs_cudnn", lambda device: True)
            for name in ("gru", "lstm"):
                kernel = getattr(torch, name)
                patch.setattr(torch, name, partial(self.run, kernel, True))
                # By modules. Their weights are in one piece on a GPU only.
                patch.setattr(torch._VF, name, partial(self.run, kernel, False), raising=False)
            yield

    def run(self, kernel, checks_weights, x, hx, weights, *options):
        """Run ``kernel`` on sequences that are not packed."""
        _, _, _, train, _, batch_first = options
        self.lengths.append(x.shape[1 if batch_first else 0])
        if self.lengths[-1] > STEPS:
            raise RuntimeError(f"cuDNN takes fewer than {self.lengths[-1]} steps")
        if torch.is_grad_enabled() and not train:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        if checks_weights and not in_one_piece(weights):
            warnings.warn(COPIES, stacklevel=2)
        return kernel(x, hx, weights, *options)


@pytest.fixture
def cudnn(monkeypatch):
    """The rules of cuDNN, with at most 15 steps a call."""
    return Rules(monkeypatch)


LAYERS = {
    "one layer": lambda: nn.GRU(3, 4),
    "two layers": lambda: nn.LSTM(3, 4, 2),
    "both directions": lambda: nn.GRU(3, 4, 2, bidirectional=True),
    "without biases, batch first": lambda: nn.GRU(3, 4, 2, bias=False, batch_first=True),
}


@pytest.mark.parametrize("case", LAYERS)
@pytest.mark.parametrize("engine", ["backprop", "shooting", "dsf", "highway_bp"])
@pytest.mark.parametrize("length", [STEPS, 40])
def test_kernels_are_called_as_cudnn_allows_in_training_and_in_evaluation(case, engine, length, cudnn):
    layer = LAYERS[case]()
    x = torch.randn((2, length, 3) if layer.batch_first else (length, 2, 3), requires_grad=True)
    expected = everything(layer, x)
    exact = len(expected) if engine in ("backprop", "shooting") else 1
    for training in (True, False):
        layer.train(training)
        with gradfree.create_engine(engine).attach(layer), cudnn():
            assert off_by(everything(layer, x)[:exact], expected[:exact]) < 1e-10
            with torch.no_grad():
                assert off_by([layer(x)[0]], expected[:1]) < 1e-10
        assert cudnn.lengths


@pytest.mark.filterwarnings("ignore:.*has long memory")
@pytest.mark.parametrize("layers", [1, 2])
def test_a_paused_layer_is_run_as_cudnn_allows(layers, cudnn):
    """Without sweeps, borders do not settle. From then on layers are left to the kernel, in evaluation mode, too."""
    layer = nn.LSTM(3, 64, layers).float().eval()
    x = torch.randn(STEPS, 16, 3, dtype=torch.float32, requires_grad=True)
    expected = everything(layer, x)
    with gradfree.create_engine("shooting", segments=3, max_sweeps=0).attach(layer), cudnn():
        for _ in range(3):
            assert off_by(everything(layer, x), expected) < 1e-5
        assert cudnn.lengths[-layers:] == [STEPS] * layers
