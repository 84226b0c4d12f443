"""What is refused of recurrent modules, and in which words."""

import pytest
import torch
from recurrent_tasks import LanguageModel, Task
from torch import nn

import gradfree
from gradfree import ChainError


def refusal(engine, model, chains=None):
    with pytest.raises(ChainError) as error:
        engine.attach(model, chains)
    assert "forward" not in vars(model)
    return str(error.value)


@pytest.mark.parametrize(("name", "options"), [("highway_bp", {}), ("dsf", {"feedback": "gate"})])
def test_engines_that_need_a_gate_refuse_a_cell_without(name, options):
    engine, model = gradfree.create_engine(name, **options), LanguageModel("rnn_tanh")
    assert "'rnn' has no gate that carries its state from step to step" in str(engine.validate(model))
    assert "'fixed_point'" in refusal(engine, model)


def test_dsf_refuses_a_feedback_of_another_width():
    task = Task("gru", 5)
    with (
        gradfree.create_engine("dsf", feedback=torch.rand(3)).attach(task.module),
        pytest.raises(ChainError, match="feedback has 3 numbers, but the states have 4 units"),
    ):
        task.gradients()


def test_what_shooting_returns_may_be_changed_in_place_as_far_as_the_backward_pass_does_not_need_it():
    gru, x = nn.GRU(3, 4), torch.randn(6, 2, 3)
    with gradfree.create_engine("shooting", segments=3).attach(gru):
        out, h = gru(x)
        h.mul_(2)
        out.sum().backward()
        out, h = gru(x)
        out.mul_(2)
        with pytest.raises(ChainError, match="were changed in place"):
            out.sum().backward()
