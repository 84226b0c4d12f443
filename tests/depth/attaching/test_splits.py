"""If a block's input is not the state of the block before it, a new chain starts; the outer graph connects both."""

import pytest
import torch
from exact_engines import EXACT, assert_exact
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradfree
from gradfree import ChainError
from gradfree.benchmarks.timing.allocations import peak_memory
from gradfree.testing.cases.models import Model, Plain, plain_model

LENGTH = 5


class Outsider(Plain):
    """Uses tensors that are neither its arguments nor its parameters."""

    def forward(self, x, parts=None):
        given = self.outside() if parts is None else parts[0]
        return super().forward(x) + torch.sin(given)


@pytest.mark.parametrize("what", ["a parameter", "tuples"])
def test_computed_tensors_that_are_no_arguments_are_exact(engine, what):
    model, x = Model([Outsider() for _ in range(LENGTH)]), torch.randn(4, 6, requires_grad=True)
    states = {}
    for n, block in enumerate(model.blocks):
        block.outside = {
            "a parameter": lambda n=n: model.heads[n] * model.heads[0],
        }.get(what)

    def run():
        h, shared = model.stem(x), (torch.tanh(model.heads[0]),)
        for n, block in enumerate(model.blocks):
            states[n] = h
            h = block(h, shared) if what == "tuples" else block(h)
        return h

    assert_exact(engine, model, run, ["blocks"])
    expected = torch.autograd.grad(run().pow(2).sum(), [x, model.stem.weight])
    with engine.attach(model, ["blocks"]):
        actual = torch.autograd.grad(run().pow(2).sum(), [x, model.stem.weight])
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
        (actual,) = torch.autograd.grad(run().pow(2).sum(), x)
        torch.testing.assert_close(actual, expected[0], rtol=1e-10, atol=1e-12)


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


@pytest.mark.slow
def test_checkpoints_around_blocks_save_memory_with_an_engine():
    """Reading a residual path recomputes no block, or keeps nothing of it; a dry run reads it like a step."""
    sizes = {"nhead": 2, "dim_feedforward": 64, "batch_first": True}
    layers = [nn.TransformerEncoderLayer(8, **sizes, norm_first=n % 2 == 0) for n in range(6)]
    model, x = Checkpointed(layers, 8), torch.randn(8, 32, 8)
    plain = nn.Sequential(model.stem, *layers)
    engine = gradfree.create_engine("highway_bp", iterations=1)
    report = engine.validate(model, ["blocks"], batch=x)
    assert report.ok, report
    with engine.attach(model, ["blocks"], batched=False):
        model(x).sum().backward()
        checkpointed = peak_memory(lambda: model(x).sum().backward(), "cpu")
    assert checkpointed < 0.5 * peak_memory(lambda: plain(x).sum().backward(), "cpu")


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


class InPlace(Plain):
    def forward(self, x):
        return torch.relu_(x) + torch.tanh(self.linear(x))


def test_blocks_that_change_their_state_in_place_are_exact(engine):
    model, x = Model([Plain(), InPlace(), nn.ReLU(inplace=True), Plain(), InPlace()]), torch.randn(4, 6)

    def run():
        return model(x.clone())

    assert_exact(engine, model, run, ["blocks"])


def test_a_block_that_returns_its_input_unchanged(engine):
    """The model gets the same tensor back, and its hook sees all uses of it."""
    model, x = plain_model(4), torch.randn(4, 6)

    def run():
        h = model.blocks[0](model.stem(x))
        same = model.blocks[1](h, identity=True)
        assert same is h
        same.register_hook(lambda grad: 3 * grad)
        return model.blocks[3](model.blocks[2](same)) + h**2

    assert_exact(engine, model, run)


class Returning(Plain):
    """Returns its state and another tensor; without ``links`` it returns its input state unchanged."""

    def __init__(self, other, links=True):
        super().__init__()
        self.other, self.links = other, links

    def forward(self, x):
        state = super().forward(x) if self.links else x
        return state, self.other(x, state)


def hooked_states(model, x):
    """A hook on the state after the second block, and a loss on that block's extra output."""
    h = model.stem(x)
    rests = []
    for n, block in enumerate(model.blocks):
        h, rest = block(h)
        rests.append(rest)
        if n == 1:
            h.register_hook(lambda grad: 2 * grad)
    return h + sum(rest.sum(-1, keepdim=True) for rest in rests)


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("engine", EXACT)
def test_a_state_that_a_block_returns_twice_is_one_tensor_to_hooks(engine, links):
    model, x = Model([Returning(lambda x, state: state, links or n == 0) for n in range(4)], 6), torch.randn(4, 6)
    assert_exact(EXACT[engine], model, lambda: hooked_states(model, x))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda x, state: state[:, :2], "the output of blocks.1 has a gradient hook or retain_grad"),
        (lambda x, state: torch.sin(x), "the output of blocks.0 has a gradient hook or retain_grad"),
    ],
    ids=["a view", "inside"],
)
def test_a_hook_that_would_see_a_partial_gradient_is_refused(other, message):
    """Of a view of its state; of a tensor that a block computes from a state that it returns unchanged."""
    links = "blocks.1" in message
    model, x = Model([Returning(other, links or n != 1) for n in range(4)], 6), torch.randn(4, 6)
    with EXACT["highway_bp"].attach(model, ["blocks"]), pytest.raises(ChainError, match=message):
        hooked_states(model, x).pow(2).sum().backward()
