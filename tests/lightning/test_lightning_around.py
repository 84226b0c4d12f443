"""Common uses of Lightning work with every engine: manual optimization, validation, freezing, late models."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_runs import WITH_STATE, fresh, is_bare, over, quiet, trainer
from plain_modules import PlainModule, weights

import gradfree

pytestmark = quiet


class Scored(PlainModule):
    """Keeps the losses of all validations."""

    def __init__(self, kind):
        super().__init__(kind)
        self.scores = []

    def validation_step(self, batch, index):
        self.scores.append(self.training_step(batch, index).item())


@over(WITH_STATE)
def test_validation_during_training_does_not_change_it(tmp_path, engine, kind):
    """Sanity check, validation twice an epoch, test and predict before and after; the module is restored."""
    plain, module = fresh(kind), fresh(kind)
    undisturbed = trainer(tmp_path, engine, limit_val_batches=0)
    undisturbed.fit(plain)
    run = trainer(tmp_path, engine, val_check_interval=0.5, num_sanity_val_steps=2)
    run.test(module, verbose=False)
    run.predict(module)
    run.fit(module)
    assert is_bare(module)
    run.test(module, verbose=False)
    (first, *_) = run.predict(module)
    assert torch.equal(weights(module), weights(plain))
    assert torch.equal(first, undisturbed.predict(plain)[0])
    if kind != "layers":  # There is no temperature.
        assert torch.equal(first, plain.net(next(iter(plain.val_dataloader()))[0]))


@pytest.mark.parametrize("loop", ["validate", "test", "predict"])
@pytest.mark.parametrize("engine", ["shooting", "highway_bp"])
def test_loops_without_training_use_engines_that_evaluate(tmp_path, engine, loop):
    attached, module = [], fresh("time")
    seen = module.net.register_forward_pre_hook(lambda net, _: attached.append("forward" in vars(net.middle)))
    getattr(trainer(tmp_path, gradfree.create_engine(engine)), loop)(module)
    seen.remove()
    assert set(attached) == {engine == "shooting"}
    assert is_bare(module)


@pytest.mark.parametrize("engine", ["foton", "orthogonal_backprop"])
def test_losses_after_training_have_the_temperature_of_those_in_training(tmp_path, engine):
    """By the same Trainer, and by another one from a checkpoint."""
    saving, module = ModelCheckpoint(tmp_path, filename="last"), fresh("layers", Scored)
    run = trainer(tmp_path, engine, callbacks=[saving], enable_checkpointing=True)
    run.fit(module)
    during = module.scores[-1]
    assert run.strategy.handle.state_dict()["net.middle"]["means: log temperature"] != 0
    run.validate(module, verbose=False)
    other = fresh("layers", Scored)
    trainer(tmp_path, engine).validate(other, ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert module.scores[-1] == other.scores[-1] == during
    assert is_bare(module)


@pytest.mark.parametrize("how", ["by name", "as an object"])
def test_the_strategy_uses_the_trainers_gpu(tmp_path, monkeypatch, how):
    """Lightning creates a strategy by name without a device. The two GPUs are mocked."""
    for name, value in {"is_available": True, "device_count": 2}.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda value=value: value)
    monkeypatch.setattr("lightning.fabric.accelerators.cuda.num_cuda_devices", lambda: 2)
    monkeypatch.setattr("lightning.pytorch.accelerators.cuda.num_cuda_devices", lambda: 2)
    chosen = "foton" if how == "by name" else gradfree.lightning.EngineStrategy("foton")
    run = trainer(tmp_path, strategy=chosen, accelerator="gpu", devices=[1])
    assert run.strategy.root_device == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="on one device, but was given devices=2"):
        trainer(tmp_path, strategy="foton", accelerator="gpu", devices=2)
