"""Memory of chains: a namespace for each owner, and the checkpoint format of version 0.1.0."""

import pytest
import torch
from torch import nn

import gradfree
from gradfree.chains.memory import Memory, running_mean
from gradfree.testing.cases.models import layered_model, plain_model

MATRICES = [f"blocks.{n} (6, 6)" for n in (0, 2, 4)]
SAVED = {
    "dsf in time": ("dsf", {"feedback": "gate"}, "", {"mean of 0.0.1": (2,), "mean of 0.1.1": (2,)}),
    "dsf in depth": ("dsf", {"feedback": "gate"}, "blocks", {"mean of residual": ()}),
    "dfa": ("dfa", {}, "blocks", dict.fromkeys(MATRICES, (6, 6))),
    "foton": (
        "foton",
        {"refresh_feedback_every": 5, "temperature": 1.0},
        "blocks",
        {"F to blocks.4": (6, 6), "steps": (), "drifts": (3,)}
        | {f"drift probe of blocks.{n}": (6, 1) for n in (0, 2, 4)},
    ),
}
"""Engine, options, chain, and the keys and shapes that version 0.1.0 wrote into checkpoints."""


def trained(name, options, model, x, state=None):
    """Return the engine's state at once, and after three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with gradfree.create_engine(name, **options).attach(model) as handle:
        handle.load_state_dict(state or {})
        before = handle.state_dict()
        for _ in range(3):
            out = model(x)
            (out[0] if isinstance(out, tuple) else out).pow(2).sum().backward()
            optimizer.step()
        return before, handle.state_dict()


def model_for(case):
    if case == "dsf in time":
        return nn.LSTM(3, 2, bidirectional=True), torch.randn(4, 2, 3)
    return plain_model() if case == "dsf in depth" else layered_model(), torch.randn(4, 6)


@pytest.mark.parametrize("case", SAVED)
def test_an_old_checkpoint_loads_and_is_saved_again_as_it_was(case):
    """The engine continues from it: matrices stay, counts continue, means move from there."""
    name, options, path, shapes = SAVED[case]
    old = {key: torch.rand(shape) for key, shape in shapes.items()}
    if "steps" in old:
        old["steps"] = torch.tensor(6)
    before, after = trained(name, options, *model_for(case), {path: old})
    assert before[path].keys() == old.keys()
    assert all(before[path][key] is tensor for key, tensor in old.items())
    _, fresh = trained(name, options, *model_for(case))
    assert {key: tuple(tensor.shape) for key, tensor in fresh[path].items()} == shapes
    assert after[path].keys() == old.keys()
    if case == "dfa":
        assert all(torch.equal(after[path][key], old[key]) for key in old)
    else:
        assert not any(torch.equal(after[path][key], fresh[path][key]) for key in old if key != "drifts")
    if "steps" in old:
        assert after[path]["steps"] == 9


def test_owners_have_separate_namespaces():
    """Also if two owners use the same name: checkpoints add the name of new owners."""
    memory = Memory()
    one, other = torch.zeros(1), torch.ones(1)
    memory.of("one")["x"], memory.of("other")["x"] = one, other
    memory.of("means")["mean of x"] = one
    assert memory.of("one") == {"x": one}
    assert memory.of("retraction") == {}
    state = memory.state_dict()
    assert state == {"one: x": one, "other: x": other, "mean of x": one}
    again = Memory()
    held = again.of("other")
    again.load_state_dict(state)
    assert held == {"x": other}
    assert again.state_dict() == state
    again.load_state_dict({})
    assert held == again.state_dict() == {}


def test_a_running_mean_moves_by_the_momentum_towards_each_new_value():
    """The first mean is the first value; then it moves by the momentum, 0.1, towards each value."""
    memory = Memory()
    assert running_mean(memory, "gate", torch.tensor([2.0, 4.0]), 0.1).tolist() == [2.0, 4.0]
    torch.testing.assert_close(running_mean(memory, "gate", torch.tensor([12.0, 4.0]), 0.1), torch.tensor([3.0, 4.0]))
    torch.testing.assert_close(
        running_mean(memory, "gate", torch.tensor([torch.inf, 14.0]), 0.1), torch.tensor([3.0, 5.0])
    )
