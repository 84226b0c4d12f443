"""Trainer(strategy=LayerParallelStrategy(...)) trains as one process does, and its checkpoints are those of one."""

import lightning.pytorch as pl
import pytest
import torch
from rank_processes import results_of_ranks

import gradfree.lightning
from gradfree.errors import ChainError

layered_ranks = pytest.importorskip("layered_ranks")


def assert_same(path, trainer):
    """Assert that a checkpoint equals that of one process."""
    trainer.save_checkpoint(path.with_suffix(".one"))
    found, expected = (torch.load(p, weights_only=False) for p in (path, path.with_suffix(".one")))
    (weights, its), (expected_weights, one) = (
        (checkpoint["state_dict"], *checkpoint["optimizer_states"]) for checkpoint in (found, expected)
    )
    assert list(weights) == list(expected_weights)
    for name, value in expected_weights.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-10, atol=1e-12)
    assert its["param_groups"] == one["param_groups"]
    assert its["state"].keys() == one["state"].keys()
    for number, kept in one["state"].items():
        torch.testing.assert_close(
            its["state"][number]["momentum_buffer"], kept["momentum_buffer"], rtol=1e-10, atol=1e-12
        )


@pytest.mark.processes
@pytest.mark.slow
def test_four_ranks_train_as_one_process(tmp_path):
    """Two copies on two ranks each; four ranks and one process resume them; gradients are clipped by the total norm."""
    found = results_of_ranks(tmp_path, layered_ranks.__file__, ranks=4)
    one, two_epochs = layered_ranks.fitted("auto", 2, devices=1)
    assert_same(tmp_path / "two.ckpt", one)
    one, three_epochs = layered_ranks.fitted("auto", 3, devices=1, resume=tmp_path / "two.ckpt")
    assert_same(tmp_path / "three.ckpt", one)
    for rank in found:
        assert rank["two copies"] == pytest.approx(two_epochs)
        assert rank["resumed"] == pytest.approx(three_epochs)
        assert rank["tested"] == {"seen": 64.0, "total": 64.0}
        # An overflow on one rank skips the step on all.
        assert rank["skipped"] == (4.0, False)
        assert "stages=3, but the Trainer has 4 devices" in rank["stages"]
        assert "'net.stem.weight' is a weight outside of 'net.middle'" in rank["weights outside"]
        assert "StochasticWeightAveraging needs the whole model" in rank["averages"]
        assert "ModelPruning needs the whole model" in rank["pruning"]
        assert "LBFGS computes one step from all weights" in rank["LBFGS"]
        assert "sync_batchnorm=True would make" in rank["sync_batchnorm"]
    two, four = zip(*(rank["held"] for rank in found), strict=True)
    assert two[0] == two[2]
    assert not set(two[0]) & set(two[1])
    assert sorted(name for names in four for name in names) == sorted(two[0] + two[1])


class Several(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.stem, self.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)


def test_a_module_that_has_several_children_and_no_forward_is_refused():
    trainer = pl.Trainer(strategy="layer_parallel", devices=1, accelerator="cpu", logger=False)
    assert isinstance(trainer.strategy, gradfree.lightning.LayerParallelStrategy)
    trainer.strategy.connect(Several())
    with pytest.raises(ChainError, match=r"has \['stem', 'head'\] and no forward: name the module"):
        trainer.strategy.load_model_state_dict({})


@pytest.mark.parametrize("stages", [0, 1.5, True])
def test_wrong_numbers_of_stages_are_refused(stages):
    with pytest.raises(ValueError, match="stages must be a number of devices"):
        gradfree.lightning.LayerParallelStrategy(stages=stages)
