"""deeppcr on chains that mix samples, with too large Jacobians, and in low precision."""

import pytest
import torch
from torch import nn

import gradfree
from gradfree import ChainError
from gradfree.testing.cases.models import Model, NormAndDropout, Plain, assert_equal_gradients, gradients, plain_model

ENGINE = gradfree.create_engine("deeppcr")


def exact(model, x):
    return gradients(model, lambda: model(x))


class Rolling(Plain):
    """Each sample depends only on the sample two places before it: even ones on even ones."""

    def forward(self, x):
        return super().forward(x) + 1e-6 * x.roll(2, 0)


class Taking(Plain):
    """The first sample depends on the second."""

    def forward(self, x):
        return super().forward(x) + 1e-6 * torch.cat([x[1:2], torch.zeros_like(x[1:])])


class Giving(Plain):
    """All samples depend on the first one."""

    def forward(self, x):
        return super().forward(x) + 1e-6 * torch.cat([torch.zeros_like(x[:1]), x[:1].expand_as(x[1:])])


MIXING = [(NormAndDropout, (8, 6)), (Rolling, (8, 6)), (Taking, (2, 6)), (Giving, (4, 6))]


@pytest.mark.parametrize(("block", "shape"), MIXING)
def test_blocks_that_mix_samples_are_refused(block, shape):
    model = Model([Plain(), Plain(), block(), Plain()])
    with ENGINE.attach(model, ["blocks"]):
        for _ in range(2):
            with pytest.raises(ChainError, match=r"^blocks\.2 mixes the samples of a batch"):
                gradients(model, lambda: model(torch.randn(shape)))
    assert all(p.grad is None for p in model.blocks.parameters())


def test_a_block_is_checked_again_when_its_mode_changes():
    model, x = Model([Plain(), NormAndDropout(), NormAndDropout()]), torch.randn(8, 6)
    model.eval()
    expected = exact(model, x)
    with ENGINE.attach(model, ["blocks"]):
        assert_equal_gradients(exact(model, x), expected)
        model.blocks[2].norm.train()
        with pytest.raises(ChainError, match=r"^blocks\.2 mixes"):
            exact(model, x)
        model.eval()
        actual = exact(model, x)
    assert_equal_gradients(actual, exact(model, x))


class LateMixing(Plain):
    """A block that mixes samples once it is warm: no mode, layer or attribute changes."""

    warm = False

    def forward(self, x):
        return super().forward(x + 0.3 * x.mean(0) if LateMixing.warm else x)


@pytest.mark.parametrize("name", ["deeppcr", "forward_gradient"])
def test_a_block_that_begins_to_mix_samples_later_is_refused(name, monkeypatch):
    model, x = Model([Plain(), LateMixing(), LateMixing()]), torch.randn(8, 6)
    with gradfree.create_engine(name).attach(model, ["blocks"]):
        for _ in range(2):
            before = exact(model, x)
        monkeypatch.setattr(LateMixing, "warm", True)
        for _ in range(2):
            with pytest.raises(ChainError, match=r"^blocks\.1 (to blocks\.2 )?mixes"):
                exact(model, x)
        monkeypatch.setattr(LateMixing, "warm", False)
        after = exact(model, x)
    if name == "deeppcr":
        assert_equal_gradients(after, before)


@pytest.mark.parametrize("kind", ["depth", "time"])
def test_jacobians_above_the_memory_limit_are_refused_with_their_size(kind):
    """4 links, 3 samples, 6 x 6 numbers of 8 bytes, three times; an LSTM's state has h and c."""
    if kind == "depth":
        model, x, size, path = plain_model(5), torch.randn(3, 6), 3 * 4 * 3 * 6 * 6 * 8, "blocks"
    else:
        model, x, size, path = nn.LSTM(6, 3), torch.randn(5, 3, 6), 3 * 4 * 3 * 6 * 6 * 8, "l0"

    def run():
        out = model(x)
        return out if kind == "depth" else out[0]

    expected = gradients(model, run)
    with gradfree.create_engine("deeppcr", memory_limit=size / 2**30).attach(model):
        assert_equal_gradients(gradients(model, run), expected)
    model.zero_grad()
    words = (
        rf"would need 9.66e-06 GiB for '{path}': 4 links of 3 samples with dense Jacobians of 6 x 6 in torch.float64"
    )
    smaller = gradfree.create_engine("deeppcr", memory_limit=0.99 * size / 2**30)
    with smaller.attach(model), pytest.raises(ChainError, match=words):
        run().sum().backward()


class Hooked(Plain):
    """A block with a hook on a tensor inside it."""

    hook = None

    def forward(self, x):
        h = self.linear(x)
        h.register_hook(self.hook)
        return x + torch.tanh(h)


def test_a_backward_pass_that_is_not_linear_gives_nan():
    """Clamping is not linear, and NaN is better than a silently wrong gradient."""
    model, x = Model([Hooked() for _ in range(4)]), torch.randn(4, 6)
    for block in model.blocks:
        block.hook = lambda g: g.clamp(-0.3, 0.3)
    with ENGINE.attach(model, ["blocks"]):
        actual = exact(model, x)
    assert all(g.isnan().all() for name, g in actual.items() if name.endswith("linear.weight"))
