"""A LightningModule that bypasses the engine's hooks gives a warning."""

import warnings

import pytest
from lightning_runs import fresh, trainer
from plain_modules import PlainModule

import gradfree


def test_lightning_warns_in_the_first_step(tmp_path):
    class Bypassing(PlainModule):
        def training_step(self, batch, index):
            h = self.net.stem(batch[0])
            for block in self.net.middle:
                h = type(block).forward(block, h)
            return self.net.head(h).pow(2).sum()

    run = trainer(tmp_path, gradfree.create_engine("highway_bp"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the engine on")
        with pytest.raises(UserWarning, match=r"the engine on 'net\.middle' has never run for 4 of its 4 blocks"):
            run.fit(fresh("blocks", Bypassing))
    assert run.global_step < 2
