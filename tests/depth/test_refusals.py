"""A pass that is no chain is refused with the module path and the remedy, and leaves the model as it was."""

import pytest
import torch
from torch import nn
from unchanged import assert_unchanged, snapshot

import gradfree
from gradfree import ChainError
from gradfree.testing.cases.models import Model, Plain, gradients, plain_model

HIGHWAY = gradfree.create_engine("highway_bp")


@pytest.mark.parametrize("path", ["blocks.1", "blocks.1.linear"])
def test_full_backward_hooks_that_come_later(path):
    model, x = plain_model(), torch.randn(4, 6)
    with HIGHWAY.attach(model):
        model(x)
        hook = model.get_submodule(path).register_full_backward_hook(lambda module, before, after: None)
        with pytest.raises(ChainError, match=f"{path} has full backward hooks".replace(".", r"\.")):
            model(x)
        hook.remove()
        model(x).sum().backward()


class Between(Model):
    """Computes something between its blocks."""

    def forward(self, x):
        for block in self.blocks:
            x = 2 * block(x)
        return x


class Twice(Model):
    """Runs a block a second time."""

    def forward(self, x):
        return self.blocks[0](self.blocks[1](self.blocks[0](x)))


class Branching(Model):
    """Feeds one state to two blocks."""

    def forward(self, x):
        h = self.blocks[0](x)
        return self.blocks[1](h) + self.blocks[2](h)


class ReturnsTheStateSecond(Plain):
    def forward(self, x):
        return "weights", super().forward(x)


class InPlace(Plain):
    def forward(self, x):
        return torch.relu_(x) + torch.tanh(self.linear(x))


class TapsInside(Plain):
    """Keeps a loss of its inside that the model adds to the final one."""

    def forward(self, x):
        hidden = self.linear(x)
        self.auxiliary = hidden.pow(2).sum()
        return x + torch.tanh(hidden)


class Widening(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.linear = nn.Linear(before, after)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class UsesAnOutsider(Plain):
    """Uses a parameter that is not its own."""

    def forward(self, x):
        return super().forward(x) * self.outside[0]


def model_with_outsider():
    model = Model([Plain(), UsesAnOutsider()])
    model.blocks[1].outside = [model.heads[0]]
    return model


def keep_gradient(model):
    model.blocks[1].register_forward_hook(lambda module, args, out: out.retain_grad())
    return model


ENGINES = {name: gradfree.create_engine(name) for name in ("highway_bp", "fixed_point", "truncated")}
ENGINES["backprop"] = gradfree.create_engine("backprop", plain=False)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Between([Plain(), Plain()]), "blocks.1 was not given the output of the block before it"),
        (lambda: Twice([Plain(), Plain()]), "blocks.0 runs twice in one forward pass"),
        (lambda: Branching([Plain() for _ in range(3)]), "blocks.2 was given the output of blocks.0"),
        (lambda: Model([ReturnsTheStateSecond(), Plain()]), "blocks.0 returned tuple, in which the next state is not"),
        (lambda: Model([Plain(), InPlace()]), "blocks.1 modifies its input in place"),
        (model_with_outsider, "blocks.1 uses a tensor of shape (6,) that needs a gradient"),
        (lambda: keep_gradient(plain_model(3)), "the output of blocks.1 has a gradient hook or retain_grad()"),
    ],
)
def test_a_forward_pass_that_is_no_chain(name, make, message):
    model = make()
    before = snapshot(model)
    with (
        ENGINES[name].attach(model, ["blocks"]),
        pytest.raises(ChainError) as error,
    ):
        model(torch.randn(4, 6))
    assert message in str(error.value)
    assert_unchanged(model, before)


@pytest.mark.parametrize("name", ENGINES)
def test_a_loss_on_a_tensor_from_inside_a_block(name):
    """Plain autograd would send its gradient through the earlier blocks; a chain cannot."""
    model, x = Model([TapsInside() for _ in range(3)]), torch.randn(4, 6)
    with ENGINES[name].attach(model):
        out = model(x).sum()
        with pytest.raises(ChainError, match=r"a tensor from inside blocks\.1"):
            (out + model.blocks[1].auxiliary).backward()


@pytest.mark.parametrize("name", ENGINES)
def test_an_input_with_a_gradient_that_differs_between_blocks(name):
    model, x = plain_model(3), torch.randn(4, 6)
    scales = [torch.randn(6, requires_grad=True) for _ in range(2)]
    with ENGINES[name].attach(model):
        h = model.blocks[0](model.stem(x), scales[0])
        with pytest.raises(ChainError, match="must be the same for every block"):
            model.blocks[1](h, scales[1])


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("change", [lambda x: x.mul_(2), lambda x: x[0].zero_(), lambda x: x.copy_(torch.randn(6))])
def test_an_input_with_a_gradient_that_is_changed_in_place_between_blocks(name, change):
    """It is the same tensor, but the gradient of each state of it goes another way."""
    model, x = plain_model(3), torch.randn(4, 6)
    with ENGINES[name].attach(model):
        scale = 1.5 * model.heads[0]
        h = model.blocks[0](model.stem(x), scale)
        change(scale)
        with pytest.raises(ChainError, match=r"blocks\.1 .* \(6,\) .* has been changed in place since"):
            model.blocks[1](h, scale)


@pytest.mark.parametrize("name", ENGINES)
def test_gradient_fidelity_refuses_it_too(name):
    """torch.autograd.grad for parameters alone would not run the node that notices."""
    model = Model([TapsInside() for _ in range(3)])

    def loss_fn(out, target):
        return out.sum() + model.blocks[1].auxiliary

    with pytest.raises(ChainError, match=r"a tensor from inside blocks\.1"):
        gradfree.gradient_fidelity(ENGINES[name], model, loss_fn, (torch.randn(4, 6), None))


def test_retain_grad_on_a_state_after_the_pass():
    model, x = plain_model(), torch.randn(4, 6)
    with HIGHWAY.attach(model):
        states = model.states(x)
        states[1].retain_grad()
        with pytest.raises(ChainError, match=r"the output of blocks\.1 has a gradient hook or retain_grad"):
            states[-1].sum().backward()


def test_a_state_that_is_not_the_first_argument():
    class Keyword(Model):
        def forward(self, x, scale):
            h = self.blocks[0](x)
            return self.blocks[1](scale, h)

    model = Keyword([Plain(), Plain()])
    with HIGHWAY.attach(model, ["blocks"]), pytest.raises(ChainError, match="but not as its first argument"):
        model(torch.randn(4, 6), torch.randn(6))


@pytest.mark.parametrize("name", ENGINES)
def test_second_derivatives_are_refused(name):
    model, x = plain_model(), torch.randn(4, 6, requires_grad=True)
    with ENGINES[name].attach(model):
        out = model(x).sum()
        with pytest.raises(ChainError, match="second derivatives"):
            torch.autograd.grad(out, x, create_graph=True)


def test_highway_bp_wants_a_residual_path():
    model, x = Model([Widening(6, 6) for _ in range(3)]), torch.randn(4, 6)
    with HIGHWAY.attach(model):
        out = model(x).sum()
        with pytest.raises(ChainError, match=r"no residual path from 'blocks\.0' to 'blocks\.2'.*'fixed_point'"):
            out.backward()
    assert all(p.grad is None for p in model.blocks.parameters())


def test_one_diagonal_for_all_links_wants_states_of_one_shape():
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 8), nn.Linear(8, 8))
    with gradfree.create_engine("dsf").attach(layers, [""]):
        out = layers(torch.randn(4, 6)).sum()
        with pytest.raises(ChainError, match=r"^1 turns a state of shape \(4, 6\) into one of \(4, 8\)"):
            out.backward()


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_anomaly_detection_names_the_link_of_a_non_finite_direct_cotangent(name, value):
    model, x = plain_model(), torch.randn(4, 6)
    with ENGINES[name].attach(model), torch.autograd.detect_anomaly():
        states = model.states(x)
        loss = states[4].sum() + states[2].sum()
        states[2].register_hook(lambda grad: grad * value)
        with pytest.raises(ChainError, match=r"non-finite cotangent at the output of blocks\.2"):
            loss.backward()
    assert all(p.grad is None for p in model.blocks.parameters())


class Poisoned(Plain):
    """Its backward pass divides by zero."""

    def forward(self, x):
        return super().forward(x) + torch.sqrt(x.sum(1, keepdim=True) * 0)


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
@pytest.mark.parametrize("name", ["backprop", "highway_bp", "fixed_point"])
def test_anomaly_detection_names_the_block_that_makes_a_cotangent_non_finite(name):
    model, x = Model([Plain(), Plain(), Poisoned(), Plain()]), torch.randn(4, 6)
    with ENGINES[name].attach(model, ["blocks"]):
        with torch.autograd.detect_anomaly(), pytest.raises(ChainError, match=r"the backward pass inside blocks\.2"):
            model(x).sum().backward()
        assert all(p.grad is None for p in model.blocks.parameters())
        grads = gradients(model, lambda: model(x))
    assert not all(g.isfinite().all() for g in grads.values() if g is not None), "GradScaler must see the NaN"


def test_a_hook_inside_a_block_that_changes_its_gradient_in_place():
    """Torch forbids it; here the cotangent of the block's whole output is changed, which later sweeps read."""

    class Hooked(Plain):
        def forward(self, x):
            branch = torch.tanh(self.linear(x))
            branch.register_hook(lambda g: g.mul_(0.5))
            return branch + x

    model = Model([Plain(), Hooked(), Plain()])
    with gradfree.create_engine("highway_bp", iterations=1).attach(model, ["blocks"]):
        loss = model(torch.randn(4, 6)).sum()
        with pytest.raises(ChainError, match=r"a hook on a tensor inside blocks\.1 changes its gradient in place"):
            loss.backward()
