"""A pass that is no chain is refused with the module path and the remedy, and the model stays unchanged."""

import pytest
import torch
from recomputing import Recomputed
from torch import nn

import gradfree
from gradfree import ChainError
from gradfree.testing.cases.models import Model, Plain, assert_equal_gradients, gradients, plain_model

HIGHWAY = gradfree.create_engine("highway_bp")


@pytest.mark.parametrize("path", ["blocks.1", "blocks.1.linear"])
def test_full_backward_hooks_added_later_are_refused(path):
    model, x = plain_model(), torch.randn(4, 6)
    with HIGHWAY.attach(model):
        model(x)
        hook = model.get_submodule(path).register_full_backward_hook(lambda module, before, after: None)
        with pytest.raises(ChainError, match=f"{path} has full backward hooks".replace(".", r"\.")):
            model(x)
        hook.remove()
        model(x).sum().backward()


class Empty(Plain):
    def forward(self, x):
        super().forward(x)


def test_a_block_that_returns_nothing_is_refused_where_the_program_handles_an_exception():
    model = Model([Plain(), Empty()])
    with HIGHWAY.attach(model, ["blocks"]):
        try:
            raise MemoryError
        except MemoryError:
            with pytest.raises(ChainError, match=r"blocks\.1 returned NoneType"):
                model(torch.randn(4, 6))


class Shared(Plain):
    """Uses what its first block has computed, as layers that share keys and values do."""

    kept = None

    def forward(self, x):
        if self.kept is None:
            Shared.kept = x.tanh()
        return super().forward(x) + self.kept


def test_a_tensor_of_an_earlier_block_is_named_as_one_of_the_chain(monkeypatch):
    monkeypatch.setattr(Shared, "kept", None)
    model, x = Model([Shared() for _ in range(3)]), torch.randn(4, 6, requires_grad=True)
    with (
        HIGHWAY.attach(model),
        pytest.raises(ChainError, match=r"blocks\.1 uses another state of a chain, or a tensor c"),
    ):
        model(x).sum().backward()


ENGINES = {name: gradfree.create_engine(name) for name in ("highway_bp", "fixed_point", "truncated")}
ENGINES["backprop"] = gradfree.create_engine("backprop", plain=False)


def test_one_diagonal_for_all_links_needs_states_of_one_shape():
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


def test_anomaly_detection_says_nothing_of_right_passes(recwarn):
    """What torch cannot batch while it looks for NaN is not tried."""
    model, x = plain_model(), torch.randn(4, 6)
    expected = gradients(model, lambda: model(x))
    with gradfree.create_engine("deeppcr").attach(model), torch.autograd.detect_anomaly():
        assert_equal_gradients(gradients(model, lambda: model(x)), expected)
    assert not [w for w in recwarn if "Error detected" in str(w.message)]


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


@pytest.mark.parametrize("name", ENGINES)
def test_a_function_that_computes_the_gradients_of_parameters_by_itself_is_refused(name):
    class Hiding(Plain):
        def forward(self, x):
            return Recomputed.apply(super().forward, x)

    model, x = Model([Plain(), Hiding(), Plain()]), torch.randn(4, 6)
    with ENGINES[name].attach(model, ["blocks"]):
        with pytest.raises(ChainError, match=r"blocks\.1 has .* function Recomputed, .* 'linear\.weight'"):
            model(x).sum().backward()
        assert all(p.grad is None for p in model.blocks.parameters())


def test_a_hook_that_changes_a_gradient_in_place_inside_a_block_is_refused():
    """Torch forbids it. Here it would change the cotangent of the block's output, which later iterations read."""

    class Hooked(Plain):
        def forward(self, x):
            branch = torch.tanh(self.linear(x))
            branch.register_hook(lambda g: g.mul_(0.5))
            return branch + x

    model = Model([Plain(), Hooked(), Plain()])
    with gradfree.create_engine("highway_bp", iterations=1).attach(model, ["blocks"]):
        loss = model(torch.randn(4, 6)).sum()
        with pytest.raises(ChainError, match=r"a hook on a tensor inside blocks\.1.* changes its gradient in place"):
            loss.backward()


def test_parameters_converted_between_the_passes_are_refused():
    """Autograd collects a converted parameter's gradient in a new node, which the block's graph does not lead to."""
    model, x = plain_model(), torch.randn(4, 6)
    with HIGHWAY.attach(model):
        loss = model(x).sum()
        model.float()
        with pytest.raises(ChainError, match=r"blocks\.4 got another dtype or device between the forward and"):
            loss.backward()
        model.double()
        model(x).sum().backward()


def test_a_block_that_converts_its_parameters_in_its_first_pass_is_refused():
    """As routers of Hugging Face's Switch: autograd would round the gradient to the dtype before."""

    class Converts(Plain):
        def forward(self, x):
            self.linear.float()
            return x + torch.tanh(self.linear(x.float())).to(x.dtype)

    model, x = Model([Converts() for _ in range(3)]), torch.randn(4, 6)
    with HIGHWAY.attach(model):
        with pytest.raises(ChainError, match=r"blocks\.2 got another dtype .* in the block's own forward"):
            model(x).sum().backward()
        with torch.no_grad():
            model(x)
        model(x).sum().backward()
        assert model.blocks[0].linear.weight.grad.dtype == torch.float32


def test_a_block_may_get_what_the_one_before_has_returned_beside_its_state():
    """Then the state is not what the block continues from: a new pass begins."""

    class Beside(Plain):
        def forward(self, x):
            return super().forward(x), torch.sin(self.linear(x))

    class Crossed(Model):
        def forward(self, x):
            state, beside = self.blocks[0](self.stem(x))
            after, _ = self.blocks[1](beside)
            return state + after

    model, x = Crossed([Beside(), Beside()]), torch.randn(4, 6)
    expected = gradients(model, lambda: model(x))
    with HIGHWAY.attach(model, ["blocks"]) as handle:
        assert_equal_gradients(gradients(model, lambda: model(x)), expected)
        assert "extra output" in handle.chains["blocks"].splits["blocks.1"]


def test_a_change_in_place_of_a_view_that_a_block_has_kept_is_refused():
    class Keeping(Plain):
        def forward(self, x):
            out = super().forward(x)
            self.kept = out.view(-1)
            return out

    model, x = Model([Plain(), Keeping(), Plain()]), torch.randn(4, 6)
    with HIGHWAY.attach(model, ["blocks"]):
        state = model.blocks[1](model.blocks[0](model.stem(x)))
        model.blocks[1].kept += model.stem.bias.sum()
        loss = model.blocks[2](state).sum()
        with pytest.raises(ChainError, match=r"the output of blocks\.1 was changed in place"):
            loss.backward()


def test_a_detached_output_needs_no_gradient_under_an_engine_either():
    class Detaching(Plain):
        def forward(self, x):
            return super().forward(x).detach()

    model, x = Model([Plain(), Plain(), Detaching()]), torch.randn(4, 6)
    with HIGHWAY.attach(model, ["blocks"]):
        assert [state.requires_grad for state in model.states(x)] == [True, True, False]


class Conditioned(Plain):
    """Takes a tensor from the model by a closure."""

    def forward(self, x):
        return super().forward(x) * self.of[0].condition


class Conditioning(Model):
    """Computes such a tensor from parameters only, as an embedding of a time step is."""

    def __init__(self, through=lambda t: t):
        super().__init__([Conditioned() for _ in range(4)])
        self.through, self.scale = through, nn.Linear(1, 6)
        for block in self.blocks:
            block.of = [self]

    def forward(self, x):
        self.condition = self.through(self.scale(x.new_ones(1)))
        return super().forward(x)


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.1, 0.1)


EXACT = gradfree.create_engine("fixed_point", iterations=4)


def test_a_tensor_of_parameters_that_blocks_take_by_a_closure_is_right():
    model, x = Conditioning(), torch.randn(4, 6)
    expected = gradients(model, lambda: model(x))
    with EXACT.attach(model, ["blocks"]):
        assert_equal_gradients(gradients(model, lambda: model(x)), expected)


def test_a_function_on_a_tensor_that_blocks_take_by_a_closure_is_refused():
    """It would clip each block's part of the gradient."""
    model = Conditioning(Clipped.apply)
    with EXACT.attach(model, ["blocks"]), pytest.raises(ChainError, match=r"blocks\.1 and a block before it take"):
        model(torch.randn(4, 6)).sum().backward()


def test_the_gradient_of_a_tensor_that_blocks_take_by_a_closure_is_refused():
    model = Conditioning()
    with EXACT.attach(model, ["blocks"]):
        loss = model(torch.randn(4, 6)).sum()
        with pytest.raises(ChainError, match=r"gradient of a tensor that blocks\.0 has computed, or takes from outsi"):
            torch.autograd.grad(loss, [model.condition, model.scale.weight])
