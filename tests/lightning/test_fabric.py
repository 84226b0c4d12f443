"""Fabric trains with an engine and saves the engine's state."""

import lightning.fabric
import pytest
import torch
from lightning_runs import is_bare
from torch import nn

import gradfree
import gradfree.lightning

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"
    )
]


def gate_fabric():
    base = lightning.fabric.strategies.SingleDeviceStrategy
    strategy = gradfree.lightning.engine_strategy("dsf", base=base, feedback="gate")
    return lightning.fabric.Fabric(accelerator="cpu", strategy=strategy)


def set_up(fabric, units):
    """A GRU, and its wrapper by Fabric."""
    model = nn.GRU(3, units)
    return model, fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))[0]


def means(fabric):
    return [handle.state_dict().get("", {}).get("mean of 0.0.0") for handle in fabric.strategy.handles]


def test_fabric_trains_and_saves_the_engines_state(tmp_path):
    """For each module, whether it is set up before or after the checkpoint is loaded."""
    fabric = gate_fabric()
    models = [set_up(fabric, units)[1] for units in (5, 7)]

    def pass_through():
        for model in models:
            fabric.backward(model(torch.randn(4, 2, 3))[0].sum())

    pass_through()
    fabric.save(tmp_path / "state.pt", dict(zip("ab", models, strict=True)))
    kept = means(fabric)
    assert [len(mean) for mean in kept] == [5, 7]
    pass_through()
    assert not any(map(torch.equal, means(fabric), kept))
    assert fabric.load(tmp_path / "state.pt", dict(zip("ab", models, strict=True))) == {}
    assert all(map(torch.equal, means(fabric), kept))

    late = gate_fabric()
    _, first = set_up(late, 5)
    late.load(tmp_path / "state.pt", {"a": first})
    set_up(late, 7)
    assert all(map(torch.equal, means(late), kept))
    set_up(late, 9)
    assert means(late)[2] is None


def test_fabric_detaches_the_engine_from_all_modules():
    fabric = gate_fabric()
    models = [set_up(fabric, units)[0] for units in (5, 7)]
    assert not any(map(is_bare, models))
    fabric.strategy.teardown()
    assert all(map(is_bare, models))


def test_fabric_loads_a_checkpoint_of_a_trainer(tmp_path):
    torch.save({"gradfree": {"": {"mean of 0.0.0": torch.ones(5)}}}, tmp_path / "state.pt")
    fabric = gate_fabric()
    set_up(fabric, 5)
    fabric.load(tmp_path / "state.pt")
    assert torch.equal(means(fabric)[0], torch.ones(5))
