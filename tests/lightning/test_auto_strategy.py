"""``strategy="auto_engine"``: Lightning's checkpoint has the choice, and a resumed run has no turns."""

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import StrategyRegistry
from lightning_runs import fresh, quiet, trainer
from plain_modules import PlainModule

import gradfree
import gradfree.lightning
from gradfree.choosing.turns import Turns

pytestmark = quiet


class Seen(Callback):
    """Records the engine on the layer in each batch."""

    def __init__(self):
        self.engines = []

    def on_train_batch_start(self, trainer, *args):
        sites = trainer.strategy.handle.chains
        self.engines.append(next(iter(trainer.strategy.handle._attachments.values())).engine if sites else None)


@pytest.fixture
def last_is_fastest(monkeypatch):
    monkeypatch.setattr(Turns, "times", lambda self: [float(-index) for index in range(len(self._times))])


def fit(folder, epochs, ckpt_path=None, strategy="auto_engine", module=None):
    seen = Seen()
    run = trainer(folder, strategy=strategy, max_epochs=epochs, callbacks=[seen])
    run.fit(module or fresh("time"), ckpt_path=ckpt_path)
    return run, seen.engines


def test_a_checkpoint_has_the_choice_and_a_second_fit_continues_with_it(tmp_path, last_is_fastest):
    module = fresh("time")
    run, seen = fit(tmp_path, 8, module=module)
    assert len(set(map(str, seen[:36]))) == 4
    assert run.strategy.handle.chosen == "Shooting()"
    run.save_checkpoint(tmp_path / "chosen.ckpt")
    _, seen = fit(tmp_path, 9, tmp_path / "chosen.ckpt", module=PlainModule("time"))
    assert {type(engine).__name__ for engine in seen} == {"Shooting"}
    (seen,) = (callback for callback in run.callbacks if isinstance(callback, Seen))
    seen.engines.clear()
    run.fit_loop.max_epochs = 9
    run.fit(module)
    assert {type(engine).__name__ for engine in seen.engines} == {"Shooting"}


def test_lightnings_strategy_auto_is_unchanged():
    assert {"auto_engine", "auto_engine_ddp"} <= set(StrategyRegistry)
    assert "auto" not in StrategyRegistry
    assert not isinstance(Trainer(strategy="auto", logger=False).strategy, gradfree.lightning.engine_mixins.EngineMixin)
    assert torch.get_default_dtype() == torch.float64
