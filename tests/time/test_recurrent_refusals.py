"""What is refused of recurrent modules, and in which words."""

import pytest
import torch
from oracles import assert_close
from recurrent_tasks import LanguageModel, Task
from torch import nn

import gradfree
from gradfree import ChainError


def refusal(engine, model, chains=None):
    with pytest.raises(ChainError) as error:
        engine.attach(model, chains)
    assert "forward" not in vars(model)
    return str(error.value)


def test_what_cannot_be_supported_is_refused():
    engine = gradfree.create_engine("dsf")
    assert "proj_size=2, which no engine supports" in refusal(engine, nn.LSTM(3, 4, proj_size=2))
    assert "neither an nn.RNN nor an nn.GRU or nn.LSTM" in refusal(engine, nn.RNNBase("GRU", 3, 4))
    module = nn.GRU(3, 4)
    with engine.attach(module), pytest.raises(ChainError, match="has an engine attached already"):
        engine.attach(module)


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


@pytest.mark.parametrize(
    ("feedback", "error", "message"),
    [
        ("gates", ValueError, "feedback must be 'linspace', 'gate', a number or a tensor, not 'gates'"),
        (None, TypeError, "feedback must be 'linspace', 'gate', a number or a tensor, not None"),
        (float("nan"), ValueError, "one finite number, or one for each unit"),
        (True, TypeError, "feedback must be 'linspace', 'gate', a number or a tensor, not True"),
        ([], ValueError, "one finite number, or one for each unit"),
        (torch.rand(2, 2), ValueError, "one finite number, or one for each unit"),
    ],
)
def test_dsf_refuses_other_feedbacks(feedback, error, message):
    with pytest.raises(error, match=message):
        gradfree.create_engine("dsf", feedback=feedback)


def test_torchs_own_checks_of_input_and_state_stay():
    for module, arguments in (
        (nn.GRU(3, 4), (torch.randn(5, 2, 7),)),
        (nn.GRU(3, 4), (torch.randn(5, 2, 3), torch.randn(1, 3, 4))),
        (nn.LSTM(3, 4), (torch.randn(5, 2, 3), (torch.randn(1, 2, 4), torch.randn(1, 3, 4)))),
    ):
        with pytest.raises(RuntimeError) as expected:
            module(*arguments)
        with gradfree.create_engine("dsf").attach(module), pytest.raises(RuntimeError) as actual:
            module(*arguments)
        assert str(actual.value) == str(expected.value)


def test_second_derivatives_are_refused():
    task = Task("gru", 5)
    with gradfree.create_engine("backprop").attach(task.module), pytest.raises(ChainError, match="second derivatives"):
        torch.autograd.grad(task.run()[0].sum(), task.x, create_graph=True)


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
def test_anomaly_detection_names_the_layer_of_a_non_finite_cotangent():
    model, tokens = LanguageModel(), torch.randint(11, (4, 9))
    with gradfree.create_engine("dsf").attach(model), torch.autograd.detect_anomaly():
        out = model.rnn(model.embedding(tokens))[0]
        out.register_hook(lambda grad: grad * float("inf"))
        with pytest.raises(ChainError, match="non-finite cotangent at the output of rnn, layer 1"):
            out.sum().backward()


def test_data_that_is_replaced_between_the_passes_is_not_what_the_gradients_are_taken_at():
    gru, x = nn.GRU(3, 4), torch.randn(5, 2, 3)

    def gradients():
        loss = gru(x)[0].sin().sum()
        held = gru.weight_hh_l0.data
        gru.weight_hh_l0.data = 2 * held
        found = torch.autograd.grad(loss, list(gru.parameters()))
        gru.weight_hh_l0.data = held
        return found

    expected = gradients()
    for engine in ("backprop", "shooting"):
        with gradfree.create_engine(engine).attach(gru):
            assert_close(gradients(), expected)


def test_transforms_and_many_cotangents_at_once_are_refused():
    gru, x = nn.GRU(3, 4), torch.randn(5, 2, 3)
    with gradfree.create_engine("backprop").attach(gru):
        with pytest.raises(ChainError, match="the layer runs inside a transform of torch"):
            torch.func.grad(lambda x: gru(x)[0].sum())(x)
        last = gru(x.requires_grad_())[1]
        with pytest.raises(ChainError, match="layer 0 is run for many cotangents at once"):
            torch.autograd.grad(last, x, torch.eye(8).view(8, 1, 2, 4), is_grads_batched=True)


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
