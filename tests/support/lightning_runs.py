"""Shared by the tests of Lightning: all engines on all kinds of nets that they accept, and quiet trainers."""

import lightning.pytorch as pl
import pytest
import torch
from plain_modules import KINDS, Net, PlainModule, weights

import gradfree
import gradfree.lightning

WITH_STATE = {
    "forward_gradient, blocks": (("forward_gradient", {}), "blocks"),
    "dsf gate, time": (("dsf", {"feedback": "gate"}), "time"),
    "foton kept F, layers": (("foton", {"refresh_feedback_every": 3, "orthogonalize_every": 3}), "layers"),
}
"""Engines with a state that earlier steps change."""

REGISTERED = {
    f"{name}, {kind}": ((name, {}), kind)
    for name in gradfree.list_engines()
    for kind in KINDS
    if name not in ("auto", "forward_gradient", "mezo", "uoro") and gradfree.create_engine(name).validate(Net(kind)).ok
}
"""Every engine with default options, except ``auto``, which depends on the clock, and random ones."""

RUNS = REGISTERED | {"foton streaming, layers": (("foton", {"streaming": True}), "layers")} | WITH_STATE

quiet = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def over(runs):
    """Parametrize a test by ``engine`` and ``kind`` over ``runs``."""
    return pytest.mark.parametrize(
        ("engine", "kind"),
        [(gradfree.create_engine(name, **options), kind) for (name, options), kind in runs.values()],
        ids=list(runs),
    )


def strategy(engine, **options):
    return gradfree.lightning.EngineStrategy(engine, **options)


def fresh(kind, make=PlainModule, **options):
    """Return a new float32 module, equal at every call."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    return make(kind, **options)


def trainer(folder, engine=None, **options):
    """Return a quiet Trainer for two epochs; without an engine, with Lightning's default strategy."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    quiet |= {"limit_val_batches": 1, "num_sanity_val_steps": 0}
    usual = {"max_epochs": 2, "enable_checkpointing": False, "strategy": strategy(engine) if engine else "auto"}
    return pl.Trainer(default_root_dir=folder, **(quiet | usual | options))


def fit(folder, engine="auto", **options):
    """Return the weights after two epochs of a net of blocks; ``engine`` is a strategy or its name."""
    module, run = fresh("blocks"), trainer(folder, strategy=engine, **options)
    run.fit(module)
    chains = run.strategy.handle.chains if hasattr(run.strategy, "handle") else {}
    assert list(chains) == ([] if engine in ("auto", "backprop") else ["net.middle"])
    assert all(site.solved for site in chains.values())
    assert is_bare(module)
    return weights(module)


def is_bare(module):
    """Return whether no engine is attached to ``module``."""
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
    return not hooked and not any("forward" in vars(m) for m in module.modules())
