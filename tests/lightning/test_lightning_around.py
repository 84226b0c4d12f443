"""Common uses of Lightning work with every engine: manual optimization, validation, freezing, late models."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning_runs import WITH_STATE, fresh, is_bare, over, quiet, strategy, trainer
from plain_modules import Net, PlainModule, weights
from torch import nn

import gradfree

pytestmark = quiet


class Adversaries(pl.LightningModule):
    """Two nets with two optimizers, as in a GAN."""

    automatic_optimization = False

    def __init__(self, kind):
        super().__init__()
        self.generator, self.discriminator = Net(kind), Net(kind)
        self.widen = nn.Linear(3, 6)

    def configure_optimizers(self):
        made = [*self.generator.parameters(), *self.widen.parameters()]
        return torch.optim.Adam(made, 1e-2), torch.optim.SGD(self.discriminator.parameters(), 0.1)

    def losses(self, x, y):
        """Yield the generator's loss, which passes through the discriminator, and then the discriminator's loss."""
        yield nn.functional.cross_entropy(self.discriminator(self.widen(self.generator(x))), y)
        made = self.widen(self.generator(x)).detach()
        yield nn.functional.cross_entropy(self.discriminator(x), y) + nn.functional.cross_entropy(
            self.discriminator(made), 0 * y
        )

    def training_step(self, batch, index):
        losses = self.losses(*batch)
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(next(losses))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    train_dataloader = PlainModule.train_dataloader

    @property
    def hparams(self):
        return pl.utilities.AttributeDict(batch_size=8)


@pytest.mark.slow
@over(WITH_STATE)
def test_manual_optimization_with_two_optimizers_equals_a_plain_loop(tmp_path, engine, kind):
    """A frozen chain passes the error to the chain before it, and each step counts for one chain only."""
    chains = ["generator.middle", "discriminator.middle"]
    module, carrier = fresh(kind, Adversaries), strategy(engine, chains=chains)
    trainer(tmp_path, strategy=carrier, max_epochs=1).fit(module)

    expected = fresh(kind, Adversaries)
    optimizers = expected.configure_optimizers()
    with engine.attach(expected, chains) as handle:
        for x, y in expected.train_dataloader():
            losses = expected.losses(x, y)
            for optimizer, frozen in zip(
                optimizers, ([expected.discriminator], [expected.generator, expected.widen]), strict=True
            ):
                for part in frozen:
                    part.requires_grad_(False)
                optimizer.zero_grad()
                next(losses).backward()
                optimizer.step()
                for part in frozen:
                    part.requires_grad_(True)
    assert torch.equal(weights(module), weights(expected))
    assert carrier.handle.state_dict().keys() == handle.state_dict().keys()
    assert all(int(kept.get("steps", 8)) == 8 for kept in carrier.handle.state_dict().values())


def test_two_chains_in_depth_must_be_named(tmp_path):
    with pytest.raises(gradfree.ChainError, match=r"Say which: chains=\['generator.middle', 'discriminator.middle'\]"):
        trainer(tmp_path, strategy="foton").fit(fresh("layers", Adversaries))


@over(WITH_STATE)
def test_validation_during_training_does_not_change_it(tmp_path, engine, kind):
    """Sanity check, validation twice an epoch, test and predict before and after; the module is restored."""
    plain, module = fresh(kind), fresh(kind)
    trainer(tmp_path, engine, limit_val_batches=0).fit(plain)
    run = trainer(tmp_path, engine, val_check_interval=0.5, num_sanity_val_steps=2)
    run.test(module, verbose=False)
    run.predict(module)
    run.fit(module)
    assert is_bare(module)
    run.test(module, verbose=False)
    (first, *_) = run.predict(module)
    assert torch.equal(weights(module), weights(plain))
    assert torch.equal(first, plain.net(next(iter(plain.val_dataloader()))[0]))


def first_part(module):
    return next(module.net.middle.children(), module.net.middle)


class Thawing(BaseFinetuning):
    """Trains the chain's first part from the second epoch on, and the modules before the chain never."""

    def freeze_before_training(self, module):
        self.freeze([module.net.stem, first_part(module)])

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(first_part(module), optimizer, 0.1)


@over(WITH_STATE)
def test_parts_of_a_chain_can_be_frozen_and_unfrozen(tmp_path, engine, kind):
    class Frozen(PlainModule):
        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1)

    module, expected = fresh(kind, Frozen), fresh(kind, Frozen)
    trainer(tmp_path, engine, callbacks=[Thawing()]).fit(module)

    first = first_part(expected).requires_grad_(False)
    expected.net.stem.requires_grad_(False)
    optimizer = expected.configure_optimizers()
    with engine.attach(expected):
        for epoch in range(2):
            if epoch == 1:
                optimizer.add_param_group({"params": list(first.requires_grad_().parameters())})
            for batch in expected.train_dataloader():
                optimizer.zero_grad()
                expected.loss(batch).backward()
                optimizer.step()
    assert torch.equal(weights(module), weights(expected))
    assert torch.equal(module.net.stem.weight, fresh(kind).net.stem.weight)


@pytest.mark.slow
@over(WITH_STATE)
def test_nets_built_in_configure_model_train(tmp_path, engine, kind):
    """As for models that are too large to be built before; with anomaly detection."""

    class Late(PlainModule):
        def __init__(self, kind):
            super().__init__(kind)
            self.built, self.net = self.net, None

        def configure_model(self):
            self.net = self.net or self.built

    plain, late = fresh(kind), fresh(kind, Late)
    trainer(tmp_path, engine, max_epochs=1).fit(plain)
    trainer(tmp_path, engine, max_epochs=1, detect_anomaly=True).fit(late)
    assert torch.equal(weights(late.net), weights(plain.net))


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


def test_pruning_the_layers_of_a_layer_engine_is_refused(tmp_path):
    """Pruning adds hooks between the layer and the engine; blocks and recurrent layers support these."""
    module = fresh("layers")
    pruning = pl.callbacks.ModelPruning("l1_unstructured", [(module.net.middle[0], "weight")], amount=0.3)
    with pytest.raises(gradfree.ChainError, match=r"net\.middle\.0 has got a forward hook or pre-hook"):
        trainer(tmp_path, strategy="dfa", callbacks=[pruning]).fit(module)
