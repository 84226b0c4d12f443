"""The engine's state in checkpoints, over several fits, with Lightning's tuners and skipped steps."""

from itertools import pairwise

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.tuner import Tuner
from lightning_runs import RUNS, WITH_STATE, fresh, is_bare, over, quiet, strategy, trainer
from plain_modules import PlainModule, weights

pytestmark = quiet


def same(a, b):
    """Return whether two states of engines are bitwise equal."""
    return a.keys() == b.keys() and all(
        a[path].keys() == b[path].keys() and all(torch.equal(a[path][key], b[path][key]) for key in a[path])
        for path in a
    )


def half_precision(name):
    """Return a Trainer's options for ``name``; mixed float16 with a scale that grows during the run."""
    if name != "16-mixed":
        return {"precision": name}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    return {"plugins": MixedPrecision(name, "cpu", scaler)}


@pytest.mark.parametrize("precision", ["bf16-mixed", pytest.param("16-mixed", marks=pytest.mark.slow)])
@over(WITH_STATE | {"highway_bp, blocks": RUNS["highway_bp, blocks"]})
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, engine, kind, precision):
    """Weights and engine are bitwise equal. 8 batches are not a multiple of the engines' step counts."""
    whole, carrier = fresh(kind), strategy(engine)
    trainer(tmp_path, strategy=carrier, max_epochs=3, **half_precision(precision)).fit(whole)

    saving = ModelCheckpoint(tmp_path, filename="half")
    run = trainer(tmp_path, engine, callbacks=[saving], enable_checkpointing=True, **half_precision(precision))
    run.fit(fresh(kind))
    assert "gradfree" in torch.load(tmp_path / "half.ckpt", weights_only=True)  # Plain tensors, no classes of ours.
    resumed, second = PlainModule(kind), strategy(engine)
    trainer(tmp_path, strategy=second, max_epochs=3, **half_precision(precision)).fit(
        resumed, ckpt_path=tmp_path / "half.ckpt"
    )
    assert torch.equal(weights(resumed), weights(whole))
    assert same(second.handle.state_dict(), carrier.handle.state_dict())


def tuned_by_callback(run, module):
    run.callbacks.append(LearningRateFinder(num_training_steps=12, update_attr=False))


def batch_scaled(run, module):
    Tuner(run).scale_batch_size(module, mode="power", max_trials=2, init_val=4, steps_per_trial=4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
@pytest.mark.parametrize("tune", [tuned_by_callback, batch_scaled])
@over(WITH_STATE)
def test_a_tuner_before_training_changes_nothing(tmp_path, engine, kind, tune):
    """Tuners train, then restore weights and optimizer; the engine's count and means are restored as well."""
    untouched, module = fresh(kind), fresh(kind)
    carriers = [strategy(engine), strategy(engine)]
    trainer(tmp_path, strategy=carriers[0]).fit(untouched)
    run = trainer(tmp_path, strategy=carriers[1])
    tune(run, module)
    run.fit(module)
    assert module.hparams.batch_size == 8
    assert torch.equal(weights(module), weights(untouched))
    assert same(*(carrier.handle.state_dict() for carrier in carriers))
    assert is_bare(module)


@over(WITH_STATE)
def test_another_fit_continues_with_the_same_model_and_restarts_with_another(tmp_path, engine, kind):
    module, carrier = fresh(kind), strategy(engine)
    run = trainer(tmp_path, strategy=carrier, max_epochs=1)
    run.fit(module)
    first = carrier.handle.state_dict()
    run.validate(module, verbose=False)
    run.fit_loop.max_epochs = 2
    run.fit(module)
    second = carrier.handle.state_dict()
    assert int(second["net.middle"].get("steps", 16)) == 16
    assert not same(first, second)
    run.fit_loop.max_epochs = 3
    run.fit(fresh(kind))
    assert same(carrier.handle.state_dict(), first)


def test_a_checkpoint_of_a_run_without_an_engine_may_be_resumed_with_one(tmp_path):
    saving = ModelCheckpoint(tmp_path, filename="plain")
    trainer(tmp_path, callbacks=[saving], enable_checkpointing=True, max_epochs=1).fit(fresh("layers"))
    carrier = strategy("foton")
    trainer(tmp_path, strategy=carrier).fit(fresh("layers"), ckpt_path=tmp_path / "plain.ckpt")
    assert int(carrier.handle.state_dict()["net.middle"]["steps: steps"]) == 8


@over(WITH_STATE | {"foton, layers": RUNS["foton, layers"]})
def test_a_step_skipped_by_the_scaler_changes_nothing(tmp_path, engine, kind):
    """The scale overflows: such steps change neither the weights nor the engine's state."""

    class Watched(PlainModule):
        history = ()

        def on_train_batch_start(self, *args):
            self.history = (*self.history, weights(self))

    scale = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    module, carrier = fresh(kind, Watched), strategy(engine)
    plugin = MixedPrecision("16-mixed", "cpu", scale)
    trainer(tmp_path, strategy=carrier, max_epochs=4, plugins=plugin).fit(module)
    skipped = 40 - int(torch.log2(torch.tensor(scale.get_scale())))
    assert 8 < skipped < 30
    assert [torch.equal(*pair) for pair in pairwise((*module.history, weights(module)))].count(True) == skipped
    assert weights(module).isfinite().all()
    (kept,) = carrier.handle.state_dict().values()
    assert all(tensor.isfinite().all() for tensor in kept.values())
    assert int(kept.get("steps", 32 - skipped)) == 32 - skipped
