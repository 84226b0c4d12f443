"""Bad input: every refusal names the module path and the remedy, and leaves the model as it was."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import gradfree
from gradfree import ChainError
from gradfree.testing.cases.models import Model, Plain, gradients, plain_model


def snapshot(model):
    """Return everything of a model that a refused attach or pass might have changed."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return copy.deepcopy(model.state_dict()), hooks, [p.grad is None for p in model.parameters()]


def assert_unchanged(model, before):
    state, hooks, without_grad = snapshot(model)
    assert all(torch.equal(state[key], value) for key, value in before[0].items())
    assert (hooks, without_grad) == before[1:]


def refused(engine, model, chains=None):
    """Return what the engine's report and its attach() both say against ``model``."""
    before = snapshot(model)
    report = engine.validate(model, chains)
    assert not report.ok
    with pytest.raises(ChainError) as error:
        engine.attach(model, chains)
    assert all(problem in str(error.value) and problem in str(report) for problem in report.problems)
    assert_unchanged(model, before)
    return "\n".join(report.problems)


HIGHWAY = gradfree.create_engine("highway_bp")


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        (
            "highway",
            {},
            ValueError,
            "no engine is called 'highway'; there are: backprop, dfa, dsf, ",
        ),
        ("highway_bp", {"iteration": 2}, TypeError, "no option 'iteration'; its options are: iterations, gamma, block"),
        ("highway_bp", {"block": 1}, TypeError, "block must be True or False, not 1"),
        ("highway_bp", {"iterations": -1}, ValueError, "iterations must be at least 0, not -1"),
        ("highway_bp", {"iterations": 2.5}, TypeError, "iterations must be an int of at least 0, not 2.5"),
        ("highway_bp", {"iterations": True}, TypeError, "iterations must be an int of at least 0, not True"),
        ("highway_bp", {"gamma": 1.5}, ValueError, "gamma must be from 0 to 1, not 1.5"),
        ("highway_bp", {"gamma": float("nan")}, ValueError, "gamma must be from 0 to 1, not nan"),
        ("highway_bp", {"gamma": "0.2"}, TypeError, "gamma must be a number from 0 to 1, not '0.2'"),
        ("fixed_point", {"window": 2}, TypeError, "no option 'window'; its options are: iterations"),
        ("truncated", {"window": 0}, ValueError, "window must be at least 1, not 0"),
    ],
)
def test_engine_names_and_options(name, options, error, message):
    with pytest.raises(error) as caught:
        gradfree.create_engine(name, **options)
    assert message in str(caught.value)


def test_options_are_given_by_name():
    with pytest.raises(TypeError, match="takes only options given by name"):
        type(HIGHWAY)(4)


def test_model_names_and_options():
    with pytest.raises(
        ValueError, match="no model is called 'resnet'; there are: gpt, orthogonal_convnet, orthogonal_lenet"
    ):
        gradfree.create_model("resnet")
    with pytest.raises(TypeError, match="preact_resnet has no option 'layers'; its options are: depth, in_channels"):
        gradfree.create_model("preact_resnet", layers=3)


def test_a_path_that_does_not_exist_is_met_with_the_nearest_one():
    assert "the model has no module 'block'. Did you mean 'blocks'?" in refused(HIGHWAY, plain_model(), ["block"])


def test_a_path_that_is_no_container():
    message = refused(HIGHWAY, plain_model(), ["stem"])
    assert "'stem' is of class Linear, but a chain for this engine is an nn.Sequential or nn.ModuleList, or" in message
    assert "What can be one: ['blocks']" in message


def test_a_recurrent_layer_is_no_chain_for_an_engine_for_layers():
    message = refused(gradfree.create_engine("foton"), nn.Sequential(nn.GRU(3, 3)), ["0"])
    assert "'0' is of class GRU, but a chain for this engine is an nn.Sequential or nn.ModuleList. What" in message


@pytest.mark.parametrize("chains", [[], "blocks", ["blocks", "blocks"]])
def test_chains_is_a_list_of_different_paths(chains):
    assert "chains" in refused(HIGHWAY, plain_model(), chains)


def test_an_empty_container():
    model = plain_model()
    model.extra = nn.ModuleList()
    assert "'extra' has no blocks" in refused(HIGHWAY, model, ["extra"])


def test_a_model_without_a_chain():
    assert "no chain that can be found without help" in refused(HIGHWAY, nn.Linear(3, 3))
    assert "chains=['path.to.blocks']" in refused(HIGHWAY, nn.Linear(3, 3))


def test_several_possible_chains_are_ambiguous():
    model = plain_model()
    model.others = nn.ModuleList([Plain(), Plain()])
    assert "2 modules look like chains: 'blocks', 'others'. Say which: chains=" in refused(HIGHWAY, model)


def test_overlapping_chains():
    inner = nn.Sequential(Plain(), Plain())
    model = nn.Sequential(inner, Plain())
    assert "the chains '' and '0' share a " in refused(HIGHWAY, model, ["", "0"])


def test_one_module_in_two_places():
    block = Plain()
    message = refused(HIGHWAY, nn.Sequential(block, Plain(), block))
    assert "0 and 2 are the same module" in message


def test_attaching_twice():
    model = plain_model()
    with HIGHWAY.attach(model):
        assert "blocks.0 has an engine attached already: call detach()" in refused(HIGHWAY, model)
    HIGHWAY.attach(model).detach()


def test_full_backward_hooks():
    model = plain_model()
    model.blocks[1].register_full_backward_hook(lambda module, before, after: None)
    assert "blocks.1 has full backward hooks" in refused(HIGHWAY, model)


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


def test_lazy_parameters():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.LazyLinear(6)

    model = nn.Sequential(Lazy(), Lazy())
    report = HIGHWAY.validate(model)
    assert "0 has uninitialised lazy parameters: run the model once" in str(report)


def test_blocks_sharded_by_fsdp():
    sharded = plain_model()
    for block in sharded.blocks[2:]:
        # As fully_shard does, which needs processes.
        block.linear.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    inner = plain_model()
    inner.blocks[1].linear.register_full_backward_hook(lambda module, before, after: None)
    assert "blocks.1.linear has full backward hooks" in refused(HIGHWAY, inner)
    for engine in (HIGHWAY, gradfree.create_engine("backprop", plain=False)):
        message = refused(engine, sharded)
        assert "blocks.2.linear is sharded by FSDP" in message
        assert "fully_shard(model)" in message
    gradfree.create_engine("backprop").attach(sharded).detach()


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


def test_compiled_blocks_where_the_residual_path_must_be_seen():
    model = plain_model()
    compiled = torch.compile(model, backend="eager")
    assert "'' (the model itself) is compiled, which hides the residual path" in refused(HIGHWAY, compiled)
    model.blocks[1].compile(backend="eager")
    assert "'blocks.1' is compiled, which hides the residual path of the blocks in 'blocks'" in refused(HIGHWAY, model)


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m: gradfree.EngineOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1), m),
            "none of the param",
        ),
        (lambda m: gradfree.EngineOptimizer(m, m), "optimizer must be a torch.optim.Optimizer"),
        (lambda m: gradfree.EngineOptimizer(torch.optim.SGD(m.parameters(), 0.1), m, "sgd"), "no engine is called"),
        (
            lambda m: gradfree.EngineOptimizer(torch.optim.SGD(m.parameters(), 0.1), m, HIGHWAY, gamma=0.2),
            "has its options already; gamma would be ignored",
        ),
        (
            lambda m: gradfree.EngineOptimizer(torch.optim.SGD(m.parameters(), 0.1), m, chains=["x"]),
            "the model has no module 'x'",
        ),
    ],
)
def test_engine_optimizer(call, message):
    model = plain_model()
    before = snapshot(model)
    with pytest.raises((TypeError, ValueError, ChainError)) as error:
        call(model)
    assert message in str(error.value)
    assert_unchanged(model, before)


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
        with pytest.raises(
            ChainError, match=r"a hook on a tensor inside blocks\.1 to blocks\.2 changes its gradient in place"
        ):
            loss.backward()
