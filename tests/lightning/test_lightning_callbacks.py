"""Callbacks log fidelity and figures, and do not change the training."""

import lightning.pytorch as pl
import pytest
import torch
from lightning_runs import fit, fresh, quiet, trainer

import gradfree
import gradfree.lightning

pytestmark = quiet


class Logged(pl.Callback):
    """Records the logs of every step."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, *args):
        wanted = ("fidelity", "delta", "engine")
        self.steps.append({k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith(wanted)})


@pytest.mark.parametrize("engine", ["highway_bp", "truncated"])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}])
def test_the_fidelity_callback_logs_and_changes_nothing(tmp_path, engine, options):
    logged = Logged()
    callbacks = [gradfree.lightning.GradientFidelity(every_n_steps=2), logged]
    watched = fit(tmp_path, engine, callbacks=callbacks, **options)
    assert torch.equal(watched, fit(tmp_path, engine, **options))
    first = logged.steps[0]
    assert {"fidelity/cosine", "fidelity/norm_ratio", "fidelity/cosine/net.middle.0.branch.0"} <= first.keys()
    assert {"delta/cosine/net.middle.0", "delta/norm_ratio/net.middle.0"} <= first.keys()
    assert 0.2 < first["fidelity/cosine"] < 0.9999
    assert len({step["fidelity/cosine"] for step in logged.steps}) == (4 if options else 8)


@pytest.mark.parametrize("callback", [gradfree.lightning.GradientFidelity, gradfree.lightning.EngineFigures])
def test_callbacks_raise_without_an_engine(tmp_path, callback):
    with pytest.raises(TypeError, match=r"which SingleDeviceStrategy is not: use Trainer\(strategy='<engine>'\)"):
        trainer(tmp_path, callbacks=[callback()]).fit(fresh("blocks"))
    with pytest.raises(ValueError, match=r"every_n_steps must be at least 1, not 0"):
        callback(every_n_steps=0)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}])
def test_engine_figures_are_logged_every_n_steps_and_change_nothing(tmp_path, options):
    """In other steps engines compute none."""
    logged, shown = Logged(), []

    class Shown(pl.Callback):
        def on_before_zero_grad(self, trainer, *args):
            shown.append("engine/residual/net.middle" in trainer.progress_bar_metrics)

    callbacks = [gradfree.lightning.EngineFigures(every_n_steps=3, prog_bar=True), logged, Shown()]
    watched = fit(tmp_path, "highway_bp", callbacks=callbacks, **options)
    assert torch.equal(watched, fit(tmp_path, "highway_bp", **options))
    assert {"engine/sweeps/net.middle", "engine/residual/net.middle"} == logged.steps[0].keys()
    residuals = [step["engine/residual/net.middle"] for step in logged.steps]
    assert all(0.0 < residual < 1.0 for residual in residuals)
    assert len(set(residuals)) == (3 if options else 6)
    assert shown[-1]
