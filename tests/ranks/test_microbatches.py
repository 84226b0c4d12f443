"""Microbatches through ranks give the results of the whole batch, or raise with the remedy."""

from typing import NamedTuple

import pytest
import torch
from torch import nn

import gradfree
from gradfree.errors import ChainError
from gradfree.testing.cases.models import Model, Plain, plain_model

pytestmark = pytest.mark.usefixtures("alone")


class Result(NamedTuple):
    logits: torch.Tensor
    note: str


class Around(nn.Module):
    """A model with another function after its blocks."""

    def __init__(self, behind):
        super().__init__()
        self.model, self.behind = plain_model(), behind

    def forward(self, x, scale=None):
        return self.behind(self.model(x if scale is None else x * scale))


def parallel(model, microbatches, **options):
    gradfree.layer_parallel(model, "highway_bp", iterations=0, microbatches=microbatches, **options)
    return model


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 99])
def test_outputs_and_gradients_are_those_of_the_whole_batch(microbatches):
    torch.manual_seed(0)
    model, x = Around(lambda out: Result(out, "a note")), torch.randn(5, 6)
    weights = [p for name, p in model.named_parameters() if "heads" not in name]
    expected = model(x, scale=x[:, :1])
    gradients = torch.autograd.grad(expected.logits.square().mean(), weights)
    sizes = []
    model.model.blocks[0].register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    out = parallel(model, microbatches)(x, scale=x[:, :1])
    assert sizes == [len(part) for part in x.tensor_split(min(microbatches, 5))]
    assert out.note == "a note"
    torch.testing.assert_close(out.logits, expected.logits)
    torch.testing.assert_close(torch.autograd.grad(out.logits.square().mean(), weights), gradients)


@pytest.mark.parametrize(
    ("behind", "message"),
    [
        (lambda out: (out, out.mean()), r"a tensor of shape \(\) for 2 samples, .* Compute losses and means after"),
        (lambda out: out.repeat(2), r"a tensor of shape \(4,\) for 2 samples"),
        (lambda out: (out, float(out.detach()[0])), "a tuple with values other than tensors that differ"),
        (lambda out: (out, object()), "a tuple with values other than tensors that differ"),
    ],
)
def test_outputs_without_the_batch_dimension_are_refused(behind, message):
    with pytest.raises(ChainError, match=message):
        parallel(Around(behind), 2)(torch.randn(4, 6))


@pytest.mark.parametrize("scale", [torch.ones(6), torch.ones(()), torch.ones(1, 6)])
def test_inputs_without_the_batch_dimension_are_refused(scale):
    with pytest.raises(ChainError, match=r"their shapes are: \(4, 6\), .*\. Make buffers of tensors for"):
        parallel(Around(lambda out: out), 2)(torch.randn(4, 6), scale=scale)


def test_batch_normalization_is_refused_in_training_only():
    class Normed(Plain):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x):
            return x + self.norm(self.linear(x))

    model, x = parallel(Model([Normed() for _ in range(4)]), 2), torch.randn(4, 6)
    with pytest.raises(ChainError, match=r"blocks.0.norm is a BatchNorm1d in training.*Call eval\(\) on it"):
        model(x)
    assert model.eval()(x).shape == (4,)
