"""Torch's checkpoints stand beside engines in ``advise``, where some engine takes the model's layers apart."""

import torch
from torch import nn

import gradfree
from gradfree.benchmarks.advice.contest import Contestant, rows_to_try
from gradfree.benchmarks.advice.job import Job
from gradfree.benchmarks.suites.rows import BACKPROP
from gradfree.benchmarks.timing.allocations import peak_memory
from gradfree.testing.cases.models import assert_equal_gradients


def test_they_are_tried_and_take_less_memory_for_the_same_gradient():
    model = gradfree.create_model("orthogonal_mlp", in_features=32, num_classes=5, depth=64)
    _, rows = rows_to_try(model, None)
    (again,) = [row for row in rows if "checkpoints" in row.label]
    assert again is rows[1]
    job = Job("", "", None, None, "cpu")
    batch = torch.randn(256, 32), torch.randint(5, (256,))
    contestants = [Contestant.of(row, model, job) for row in (BACKPROP, again)]
    losses = [contestant.step(batch) for contestant in contestants]
    assert torch.equal(*losses)
    plain, its = ({name: p.grad for name, p in c.model.named_parameters()} for c in contestants)
    assert_equal_gradients(its, plain)
    most, least = (peak_memory(lambda c=c: c.step(batch), "cpu") for c in contestants)
    assert least < 0.5 * most


def test_other_models_have_none():
    assert not [row for row in rows_to_try(nn.GRU(2, 3), None)[1] if "checkpoints" in row.label]
