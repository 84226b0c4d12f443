"""What people put around training in Lightning works with every engine as it does with backpropagation."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging
from lightning_runs import REGISTERED, fresh, in_turns, is_bare, over, quiet, strategy, trainer, turn
from plain_modules import Net, PlainModule, weights
from torch import nn

import gradfree

pytestmark = quiet

# Backprop takes nothing apart: it leaves chains in depth to autograd.
LAYERWISE = {key: run for key, run in REGISTERED.items() if key.endswith("layers") and key != "backprop, layers"}


class Snapshots(pl.Callback):
    """Keeps the weights as they are before every epoch, and behind every step."""

    def __init__(self):
        self.epochs, self.steps = [], []

    def on_train_epoch_start(self, trainer, module):
        self.epochs.append(weights(module))

    def on_train_batch_end(self, trainer, module, *args):
        self.steps.append(weights(module))


class Adversaries(pl.LightningModule):
    """Two nets, two optimizers: one predicts noise from noise, the other learns to tell both apart."""

    automatic_optimization = False

    def __init__(self, kind):
        super().__init__()
        self.maker, self.judge = Net(kind), Net(kind)
        self.widen = nn.Linear(3, 6)

    def configure_optimizers(self):
        made = [*self.maker.parameters(), *self.widen.parameters()]
        return torch.optim.Adam(made, 1e-2), torch.optim.SGD(self.judge.parameters(), 0.1)

    def losses(self, x, y):
        """Yield the maker's loss, which goes through the judge, and then the judge's own."""
        yield nn.functional.cross_entropy(self.judge(self.widen(self.maker(x))), y)
        made = self.widen(self.maker(x)).detach()
        yield nn.functional.cross_entropy(self.judge(x), y) + nn.functional.cross_entropy(self.judge(made), 0 * y)

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
@over(turn(0))
def test_two_optimizers_by_hand_train_as_the_plain_loop_does(tmp_path, engine, kind):
    """A frozen chain passes the error on to the one before it, and each step counts for its own chain alone."""
    chains = ["maker.middle", "judge.middle"]
    module, carrier = fresh(kind, Adversaries), strategy(engine, chains=chains)
    trainer(tmp_path, strategy=carrier, max_epochs=1).fit(module)

    expected = fresh(kind, Adversaries)
    optimizers = expected.configure_optimizers()
    with engine.attach(expected, chains) as handle:
        for x, y in expected.train_dataloader():
            losses = expected.losses(x, y)
            for optimizer, frozen in zip(optimizers, ([expected.judge], [expected.maker, expected.widen]), strict=True):
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
    with pytest.raises(gradfree.ChainError, match=r"Say which: chains=\['maker.middle', 'judge.middle'\]"):
        trainer(tmp_path, strategy="foton").fit(fresh("layers", Adversaries))


@over(REGISTERED)
def test_several_passes_in_one_step_sum_up(engine, kind):
    """Their order does not matter, nor which of them goes backward first."""
    net, inputs = Net(kind), torch.randn(3, 5, 6)

    def gradients(*numbers):
        outs = [net(inputs[n]).pow(2).sum() for n in numbers]
        return torch.autograd.grad(sum(reversed(outs)), list(net.parameters()))

    with engine.attach(net):
        together, alone = gradients(0, 1, 2), [gradients(n) for n in range(3)]
    for total, *parts in zip(together, *alone, strict=True):
        torch.testing.assert_close(total, sum(parts), rtol=1e-10, atol=1e-12)


@over(turn(1))
def test_validation_in_between_changes_nothing(tmp_path, engine, kind):
    """Sanity check, validation twice an epoch; test and predict before and behind; nothing is left on the module."""
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


@pytest.mark.slow
@over(turn(2))
def test_an_averaged_model_is_the_average_of_the_steps(tmp_path, engine, kind):
    """The training itself goes on from its own weights, though validation in between sees the average."""
    averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging", reason="Lightning 2.6")
    plain, watched = Snapshots(), Snapshots()
    trainer(tmp_path, engine, callbacks=[plain]).fit(fresh(kind))
    module = fresh(kind)
    average = weights(module)
    trainer(tmp_path, engine, callbacks=[watched, averaging.EMAWeightAveraging(decay=0.5)]).fit(module)
    assert all(map(torch.equal, watched.steps, plain.steps))
    for step, w in enumerate(plain.steps):
        average = average.lerp(w, 0.5) if step else w
    torch.testing.assert_close(weights(module), average, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@over(turn(3))
def test_stochastic_weight_averaging_averages(tmp_path, engine, kind):
    watched, module = Snapshots(), fresh(kind)
    averaging = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
    trainer(tmp_path, engine, callbacks=[watched, averaging], max_epochs=3).fit(module)
    torch.testing.assert_close(weights(module), torch.stack(watched.epochs).mean(0), rtol=1e-5, atol=1e-6)


def test_stochastic_weight_averaging_counts_batch_statistics_anew(tmp_path):
    """It runs one more epoch without a backward pass, which an exact engine must survive unchanged."""

    class Normalised(PlainModule):
        def __init__(self, kind):
            super().__init__(kind)
            self.net.stem = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))

    def trained(engine):
        module = fresh("blocks", Normalised)
        averaging = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
        trainer(tmp_path, engine, callbacks=[averaging], max_epochs=3).fit(module)
        return module.state_dict()

    expected, found = trained(None), trained(gradfree.create_engine("backprop", plain=False))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def first_part(module):
    return next(module.net.middle.children(), module.net.middle)


class Thawing(BaseFinetuning):
    """Trains the chain's first part from the second epoch on, what lies before the chain never."""

    def freeze_before_training(self, module):
        self.freeze([module.net.stem, first_part(module)])

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(first_part(module), optimizer, 0.1)


@over(turn(4))
def test_parts_of_a_chain_may_be_frozen_and_thawed(tmp_path, engine, kind):
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


@in_turns(
    ["precision"],
    quick=[("32-true",), ("bf16-mixed",)],
    runs={key: run for key, run in REGISTERED.items() if key.endswith("blocks")},
)
def test_checkpointing_inside_blocks_trains_the_same(tmp_path, engine, kind, precision):
    """What runs again in the backward pass runs under the forward pass's autocast.

    Blocks that run again go one by one; in a batch they would round otherwise.
    """
    plain, saving = fresh(kind), fresh(kind, saves_memory=True)
    for module in (plain, saving):
        one_by_one = strategy(engine, batched=False)
        trainer(tmp_path, precision=precision, max_epochs=1, strategy=one_by_one).fit(module)
    assert torch.equal(weights(saving), weights(plain))


@pytest.mark.slow
@over(turn(5))
def test_nets_that_are_built_when_training_begins(tmp_path, engine, kind):
    """In configure_model, as for models that are too large to be built before; and under anomaly detection."""

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
def test_the_trainers_gpu_is_the_strategys(tmp_path, monkeypatch, how):
    """Lightning makes a strategy that it knows by name without a device. With two GPUs that are not there."""
    for name, value in {"is_available": True, "device_count": 2}.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda value=value: value)
    monkeypatch.setattr("lightning.fabric.accelerators.cuda.num_cuda_devices", lambda: 2)
    monkeypatch.setattr("lightning.pytorch.accelerators.cuda.num_cuda_devices", lambda: 2)
    chosen = "foton" if how == "by name" else gradfree.lightning.EngineStrategy("foton")
    run = trainer(tmp_path, strategy=chosen, accelerator="gpu", devices=[1])
    assert run.strategy.root_device == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="on one device, but was given devices=2"):
        trainer(tmp_path, strategy="foton", accelerator="gpu", devices=2)


@over(LAYERWISE)
def test_pruning_layers_that_an_engine_takes_apart_is_refused(tmp_path, engine, kind):
    """It puts hooks between the layer and the engine; blocks and recurrent layers do not mind."""
    module = fresh(kind)
    pruning = pl.callbacks.ModelPruning("l1_unstructured", [(module.net.middle[0], "weight")], amount=0.3)
    with pytest.raises(gradfree.ChainError, match=r"net\.middle\.0 has got a forward hook or pre-hook"):
        trainer(tmp_path, engine, callbacks=[pruning]).fit(module)
