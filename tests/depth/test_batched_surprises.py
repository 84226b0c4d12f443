"""What users do around blocks that go in batches, and blocks do themselves: autograd's gradients, or a refusal."""

import copy
import random

import numpy as np
import pytest
import torch
from pairwise import pairwise
from test_batching import Counting
from torch import nn

import gradfree
from gradfree.depth import batching, ports
from gradfree.errors import ChainError
from gradfree.testing.cases.models import Plain, assert_equal_gradients, gradients

L = 6
CONTAINERS = {"sequential": lambda blocks: nn.Sequential(*blocks), "list": nn.ModuleList}
ENGINES = {
    "backprop": ("backprop", {"plain": False}),
    "deeppcr": ("deeppcr", {}),
    "highway_bp": ("highway_bp", {"iterations": L}),
    "segments": ("highway_bp", {"iterations": 1, "segments": 2}),
    "fixed_point": ("fixed_point", {"iterations": L}),
}
X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, block=Plain, container="list"):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(6, 6)
        self.blocks = CONTAINERS[container](block() for _ in range(L))
        self.double()

    def forward(self, x):
        x = self.stem(x)
        if isinstance(self.blocks, nn.Sequential):
            return self.blocks(x)
        for block in self.blocks:
            x = block(x)
        return x


def engine(name):
    kind, options = ENGINES[name]
    return gradfree.create_engine(kind, **options)


def warm(model):
    """Two passes: behind them, blocks that can be batched are."""
    for _ in range(2):
        gradients(model, lambda: model(X))
    model.zero_grad()


FROZEN = {"the first block": (0,), "one in the middle": (3,), "the last": (5,), "all": tuple(range(L)), "a bias": ()}
BATCHED = ("highway_bp", "segments", "fixed_point")


@pairwise(container=CONTAINERS, name=BATCHED, which=FROZEN)
def test_what_is_frozen_behind_the_forward_pass_takes_no_gradient_from_the_others(container, name, which):
    """As in autograd: a GAN's discriminator may be frozen between the two passes."""

    def run(model):
        warm(model)
        loss = model(X).pow(2).sum()
        model.blocks[0].linear.bias.requires_grad_(False)
        for i in FROZEN[which]:
            model.blocks[i].requires_grad_(False)
        loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    expected, model = run(Net(container=container)), Net(container=container)
    with engine(name).attach(model, batched=True):
        assert_equal_gradients(run(model), expected)


@pytest.mark.parametrize("container", CONTAINERS)
def test_an_empty_batch(container):
    model = Net(container=container)
    expected = gradients(model, lambda: model(X[:0]))
    with engine("highway_bp").attach(model, batched=True):
        warm(model)
        assert_equal_gradients(gradients(model, lambda: model(X[:0])), expected)


class Fading(Counting):
    def forward(self, x):
        self.calls += 1
        return x + torch.tanh(self.linear(x)) / (1 + self.calls)


class Listing(Plain):
    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, x):
        self.calls.append(len(self.calls))
        return x + torch.tanh(self.linear(x)) / (1 + len(self.calls))


class Replacing(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return x + torch.tanh(self.linear(x)) / (1 + self.calls)


class Drawing(Plain):
    def forward(self, x):
        return x + torch.tanh(self.linear(x)) * (1.0 if random.random() + np.random.rand() >= 0 else 2.0)  # noqa: NPY002


@pytest.mark.parametrize("block", [Fading, Listing, Replacing, Drawing])
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_blocks_forward_runs_as_often_as_the_user_calls_it(block, container, monkeypatch):
    """To try whether they can be batched leaves no trace: counters, lists and random numbers are the model's own."""

    def run(model):
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        passes = [gradients(model, lambda: model(X)) for _ in range(4)]
        calls = [copy.copy(getattr(block, "calls", None)) for block in model.blocks]
        return passes, calls, random.random(), np.random.rand()  # noqa: NPY002

    monkeypatch.setattr(batching, "pays", lambda *_: True)
    passes, *state = run(Net(block, container))
    model = Net(block, container)
    with engine("highway_bp").attach(model):
        found, *left = run(model)
    assert left == state
    for actual, expected in zip(found, passes, strict=True):
        assert_equal_gradients(actual, expected)


@pytest.mark.parametrize("name", sorted(ENGINES.keys() - {"segments"}))  # These are not for a chain in pieces.
def test_a_block_that_is_called_with_other_parameters_gives_these_their_gradients(name):
    """Fast weights, equal to the block's own: as in the first step of MAML."""
    model = Net()
    fast = {key: p.detach().clone().requires_grad_() for key, p in model.blocks[1].named_parameters()}

    def run():
        h = model.stem(X)
        for i, block in enumerate(model.blocks):
            h = torch.func.functional_call(block, fast, (h,)) if i == 1 else block(h)
        return h

    def step():
        for tensor in fast.values():
            tensor.grad = None
        return gradients(model, run) | {f"fast {key}": tensor.grad for key, tensor in fast.items()}

    expected = step()
    with engine(name).attach(model):
        warm(model)
        assert_equal_gradients(step(), expected)


class Hooking(Plain):
    copied = False

    def forward(self, x):
        x = x.view_as(x) if self.copied else x
        if x.requires_grad:
            x.register_hook(lambda g: 0.5 * g)
        return super().forward(x)


@pytest.mark.parametrize("name", ENGINES)
def test_a_block_that_puts_a_hook_on_its_state_is_refused_and_on_a_copy_is_exact(name, monkeypatch):
    """The hook would see one part of the gradient after the other."""
    model = Net(Hooking)
    refused = pytest.raises(ChainError, match=r"blocks\.0 puts a gradient hook.*x = x\.view_as\(x\)")
    with engine(name).attach(model), refused:
        gradients(model, lambda: model(X))
    monkeypatch.setattr(Hooking, "copied", True)
    expected = gradients(model, lambda: model(X))
    with engine(name).attach(model):
        for _ in range(3):
            assert_equal_gradients(gradients(model, lambda: model(X)), expected)


ORDERS = (
    "attach wrap detach unwrap",
    "attach wrap unwrap detach",
    "wrap attach detach unwrap",
    "attach keep detach use",
)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("container", CONTAINERS)
def test_who_has_kept_a_blocks_forward_has_the_blocks_own_once_detached(order, container):
    """As accelerate's hooks do, which wrap what they find: an engine that is gone takes part in nothing."""
    model, kept, handles = Net(container=container), {}, []
    expected = gradients(model, lambda: model(X))

    def wrap():
        for block in model.blocks:
            kept[block] = block.forward
            block.forward = lambda *args, own=block.forward: own(*args)

    def unwrap():
        for block in model.blocks:
            block.forward = kept[block]

    def attach():
        # Inexact: whether it solves for the gradients shows.
        handles.append(gradfree.create_engine("highway_bp", iterations=0).attach(model))
        warm(model)

    steps = {"attach": attach, "wrap": wrap, "unwrap": unwrap, "use": unwrap}
    steps |= {"keep": lambda: kept.update({b: b.forward for b in model.blocks}), "detach": lambda: handles[0].detach()}
    for step in order.split():
        steps[step]()
    assert_equal_gradients(gradients(model, lambda: model(X)), expected)
    # Nor does it stand in the way of another.
    with engine("fixed_point").attach(model):
        assert_equal_gradients(gradients(model, lambda: model(X)), expected)


class Again(Plain):
    """Calls itself."""

    limit, directly = 0.0, True

    def forward(self, x):
        if self.training and x.detach().abs().max() < self.limit:
            return self.forward(2 * x) if self.directly else self(2 * x)
        return super().forward(x)


@pytest.mark.parametrize("directly", [True, False])
@pytest.mark.parametrize("name", ENGINES)
def test_a_block_that_calls_itself_is_one_link(name, directly, monkeypatch):
    monkeypatch.setattr(Again, "limit", 3.0)
    monkeypatch.setattr(Again, "directly", directly)
    model = Net(Again)
    expected = gradients(model, lambda: model(X))
    with engine(name).attach(model):
        for _ in range(3):
            assert_equal_gradients(gradients(model, lambda: model(X)), expected)


class Chunked(Plain):
    """Calls itself with parts of a large batch."""

    def forward(self, x):
        if len(x) > len(X):
            return torch.cat([self.forward(part) for part in x.split(len(X))])
        return super().forward(x)


@pytest.mark.parametrize("name", BATCHED)
def test_a_block_that_calls_itself_without_a_graph_is_one_link(name):
    """It goes in batches like any other, also where it calls itself for the first time."""
    model, large = Net(Chunked), torch.cat([X, 2 * X])
    expected = gradients(model, lambda: model(large))
    with engine(name).attach(model, batched=True):
        warm(model)
        assert_equal_gradients(gradients(model, lambda: model(large)), expected)


def test_a_functional_call_of_the_whole_model_goes_in_batches():
    """As it does in meta-learning: the model has its own parameters back by the backward pass."""
    model = Net()
    fast = {key: p.detach().clone().requires_grad_() for key, p in model.named_parameters()}
    grads = torch.autograd.grad(model(X).pow(2).sum(), list(model.parameters()))
    with engine("highway_bp").attach(model, batched=True) as handle:
        for _ in range(3):
            out = torch.func.functional_call(model, fast, (X,))
            found = torch.autograd.grad(out.pow(2).sum(), list(fast.values()))
        assert f"{L} in batches" in str(handle.chains["blocks"])
    assert_equal_gradients(dict(zip(fast, found, strict=True)), dict(zip(fast, grads, strict=True)))


class Interrupted(gradfree.Port):
    now = False

    def take(self, args, kwargs):
        taken = super().take(args, kwargs)

        def put(state, inputs):
            if self.now:
                raise KeyboardInterrupt
            return taken.put(state, inputs)

        return taken._replace(put=put)


class Named(Plain):
    """Has a port of its own."""


def test_what_interrupts_the_recording_of_a_block_leaves_it_with_the_engine(monkeypatch):
    """The next pass is the engine's again, inexact as it is, not autograd's by this block."""
    monkeypatch.setitem(ports._ports, Named, Interrupted)
    model = Net(Named)
    with gradfree.create_engine("highway_bp", iterations=0).attach(model):
        before = gradients(model, lambda: model(X))
        monkeypatch.setattr(Interrupted, "now", True)
        with pytest.raises(KeyboardInterrupt):
            model(X)
        monkeypatch.setattr(Interrupted, "now", False)
        assert_equal_gradients(gradients(model, lambda: model(X)), before)


@pytest.mark.parametrize("container", CONTAINERS)
def test_hooks_on_all_modules_see_tensors_with_a_graph(container):
    """Put on once blocks run without one; a loss on what they keep counts."""
    model, kept = Net(container=container), []

    def run():
        kept.clear()
        return torch.stack([model(X).sum(), *(out.pow(2).sum() for out in kept)])

    def keep(module, args, out):
        if isinstance(module, nn.Linear) and module is not model.stem:
            kept.append(out)

    def step():
        model.zero_grad()
        run().pow(2).sum().backward(retain_graph=True)
        return {name: p.grad for name, p in model.named_parameters()}

    hook = nn.modules.module.register_module_forward_hook(keep)
    expected = step()
    hook.remove()
    with engine("highway_bp").attach(model, batched=True):
        warm(model)
        hook = nn.modules.module.register_module_forward_hook(keep)
        try:
            found = step()
        finally:
            hook.remove()
    assert_equal_gradients(found, expected)
