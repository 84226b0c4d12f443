"""If a block's input is not the state of the block before it, a new chain starts; the outer graph connects both."""

import pytest
import torch
from exact_engines import EXACT, assert_exact
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradfree
from gradfree import ChainError
from gradfree.testing.cases.models import Model, Plain

LENGTH = 5


class Outsider(Plain):
    """Uses tensors that are neither its arguments nor its parameters."""

    def forward(self, x):
        return super().forward(x) + torch.sin(self.outside())


@pytest.mark.parametrize("what", ["an input of the model", "an older state", "its own state"])
def test_tensors_outside_of_the_pass_are_refused(engine, what):
    """Their gradients would be lost: they are neither arguments of the block nor parameters of the model."""
    model = Model([Outsider() for _ in range(LENGTH)])
    x = torch.randn(4, 6, requires_grad=what == "an input of the model")
    states = {}
    for n, block in enumerate(model.blocks):
        block.outside = {
            "an input of the model": lambda: x,
            "an older state": lambda n=n: states[max(0, n - 2)],
            "its own state": lambda n=n: states[n],
        }[what]

    def run():
        h = model.stem(x)
        for n, block in enumerate(model.blocks):
            states[n] = h
            h = block(h)

    with (
        engine.attach(model, ["blocks"]),
        pytest.raises(ChainError, match=r"blocks\.\d uses .* Pass it as"),
    ):
        run()


def test_a_skip_between_chains_as_in_a_u_net_is_exact(engine):
    class Up(Plain):
        def forward(self, x, skip):
            return super().forward(x + skip)

    model = nn.ModuleDict({"down": nn.ModuleList(Plain() for _ in range(3)), "up": nn.ModuleList(Up() for _ in "abc")})
    x = torch.randn(4, 6)

    def run():
        h, skips = x, []
        for block in model["down"]:
            h = block(h)
            skips.append(h)
        for block in model["up"]:
            h = block(h, skips.pop())
        return h

    assert_exact(engine, model, run, ["down", "up"])


class Checkpointed(Model):
    """Runs each block under a checkpoint."""

    reentrant = False

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=self.reentrant)
        return h * self.heads[0]


class Dropping(Plain):
    """Draws a mask, and counts its calls."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) + nn.functional.dropout(torch.relu(self.linear(x)), 0.5)


def test_reading_the_residual_path_recomputes_no_block():
    """Each block runs forward, in the iteration, and for its parameters; the mask is not on the path of x."""
    model = Checkpointed([Dropping() for _ in range(LENGTH)])
    with gradfree.create_engine("highway_bp", iterations=1).attach(model, ["blocks"], batched=False):
        model(torch.randn(4, 6)).sum().backward()
    assert [block.calls for block in model.blocks] == [2, *[3] * (LENGTH - 1)]


def test_a_checkpoint_that_is_not_reentrant_splits_nothing():
    model, x = Checkpointed([Dropping() for _ in range(LENGTH)]), torch.randn(4, 6)
    with EXACT["highway_bp"].attach(model, ["blocks"]) as handle:
        model(x).sum().backward()
        assert not handle.chains["blocks"].splits
        assert all(block.calls > 1 for block in model.blocks), "nothing was recomputed"
        model.reentrant = True
        model(x).sum().backward()
        assert len(handle.chains["blocks"].splits) == LENGTH - 1
