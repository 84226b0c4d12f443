"""Every engine with Lightning's precisions equals a plain loop, with clipping and accumulation."""

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning_runs import RUNS, WITH_STATE, fresh, over, quiet, strategy, trainer
from plain_modules import PlainModule, weights
from torch import nn

pytestmark = quiet

TRUE = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def scaler(precision):
    return torch.amp.GradScaler("cpu", init_scale=2.0**10) if precision == "16-mixed" else None


def plain_loop(module, engine, precision):
    """Train for two epochs in a plain loop, as Lightning does with accumulate_grad_batches=2."""
    module = module.to(TRUE.get(precision, torch.float32))
    optimizer, scale = module.configure_optimizers(), scaler(precision)
    autocast = torch.autocast("cpu", MIXED[precision]) if precision in MIXED else nullcontext()
    with engine.attach(module):
        for _ in range(2):
            for index, (x, y) in enumerate(module.train_dataloader()):
                with autocast:
                    loss = module.loss((x.to(TRUE.get(precision, torch.float32)), y)) / 2
                (scale.scale(loss) if scale else loss).backward()
                if index % 2:
                    if scale:
                        scale.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(module.parameters(), 0.1)
                    if scale:
                        scale.step(optimizer)
                        scale.update()
                    else:
                        optimizer.step()
                    optimizer.zero_grad()
    return weights(module)


@pytest.mark.parametrize(
    "precision",
    ["bf16-mixed", "bf16-true", *(pytest.param(p, marks=pytest.mark.slow) for p in ("64-true", "16-mixed", "16-true"))],
)
@over(WITH_STATE)
def test_lightning_trains_like_a_plain_loop(tmp_path, engine, kind, precision):
    """The weights are bitwise equal."""
    # By name Lightning would use bfloat16 on a CPU instead of float16.
    plugin = {"plugins": MixedPrecision(precision, "cpu", scaler(precision))} if precision == "16-mixed" else {}
    chosen = plugin or {"precision": precision}
    module = fresh(kind)
    before = weights(module)
    trainer(tmp_path, engine, accumulate_grad_batches=2, gradient_clip_val=0.1, **chosen).fit(module)
    expected = plain_loop(fresh(kind), engine, precision)
    assert torch.equal(weights(module), expected)
    assert expected.isfinite().all()
    assert not torch.equal(expected.float(), before)


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
