"""Chains of known layers: operations between the layers and the engine that are refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradfree
from gradfree import ChainError
from gradfree.algorithms import DFA, FOTON, PEPITA, OrthogonalBackprop
from gradfree.layers import roles
from gradfree.testing.cases.models import assert_equal_gradients, gradients

ENGINES = {
    "foton": FOTON(),
    "foton, streaming": FOTON(streaming=True),
    "dfa": DFA(),
    "pepita": PEPITA(),
    "orthogonal_backprop": OrthogonalBackprop(),
}
FORWARD_ONLY = [engine for name, engine in ENGINES.items() if name != "orthogonal_backprop"]


@pytest.fixture(params=ENGINES.values(), ids=ENGINES)
def engine(request):
    return request.param


def tanh_net():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def test_hooks_between_the_layer_and_the_engine_are_refused(engine):
    """The engine computes with the layer's map, without a hook that changes the layer's input or output."""
    for register in (
        lambda layer: layer.register_forward_pre_hook(lambda layer, args: (2 * args[0],)),
        lambda layer: layer.register_forward_hook(lambda layer, args, out: 2 * out, prepend=True),
    ):
        net, x = tanh_net(), torch.randn(3, 8)
        with engine.attach(net):
            handle = register(net[2])
            with pytest.raises(ChainError, match="2 has got a forward hook or pre-hook after the engine was attached"):
                net(x)
            handle.remove()
            net(x).sum().backward()


def test_layers_with_another_forward_are_refused(engine):
    net, x = tanh_net(), torch.randn(3, 8)
    with engine.attach(net):
        net[2].forward = lambda x: 3 * F.linear(x, net[2].weight)
        with pytest.raises(ChainError, match="2 was changed after the engine was attached"):
            net(x)
    # DFA then treats it as a chain of any blocks.
    expected = "5 blocks" if isinstance(engine, DFA) else "2 is a Linear, which this engine cannot split"
    assert expected in str(engine.validate(net, [""]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda net: net.__setitem__(0, nn.Linear(8, 8)), "1 does not continue the chain"),
        (lambda net: net.__setitem__(4, nn.Linear(8, 5)), "4 was changed after the engine was attached"),
        (lambda net: net.append(nn.Linear(4, 4)), "5 was changed after the engine was attached"),
        (lambda net: net.__delitem__(4), "4 was changed after the engine was attached"),
    ],
    ids=["first", "last", "added", "removed"],
)
def test_layers_added_replaced_or_removed_later_are_refused(change, message):
    """Engines for layers begin at the first and learn the error behind the last one."""
    for engine in (FOTON(), PEPITA(), OrthogonalBackprop(), DFA()):
        net = tanh_net()
        with engine.attach(net):
            change(net)
            with pytest.raises(ChainError, match=f"^{message}"):
                net(torch.randn(3, 8))


def test_states_changed_in_place_between_layers_are_refused(engine):
    net = tanh_net()
    with engine.attach(net, [""]):
        h = net[1](net[0](torch.randn(3, 8)))
        with torch.no_grad():
            h.clamp_(-0.1, 0.1)
        with pytest.raises(ChainError, match="the output of 1 was changed in place before 2 got it"):
            net[2](h)


@pytest.mark.parametrize("at", [1, 4])
def test_a_state_that_the_next_layer_returns_unchanged_must_not_be_changed(engine, at):
    """A change of it would change the next state, too, whose gradient does not include the change."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Identity(), nn.Linear(8, 8), nn.Tanh(), nn.Flatten(0, -2))
    net.extend([nn.Linear(8, 4)])
    x = torch.randn(3, 2, 8)
    with engine.attach(net, [""]):
        h = x
        for layer in net[: at + 2]:
            before, h = h, layer(h)
        before.mul_(3)
        with pytest.raises(ChainError, match=f"the output of {at + 1} was changed in place"):
            net[at + 2](h)


def with_functions_in_place(net):
    for layer in net:
        vars(layer).update({"inplace": True} if isinstance(layer, nn.ReLU | nn.ELU) else {})
    return net


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_functions_in_place_have_the_gradients_of_functions_out_of_place(engine, dtype):
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.3), nn.ELU(), nn.Linear(8, 4))
    net, x, found = net.to(dtype), torch.randn(5, 8, dtype=dtype), []
    for made in (net, with_functions_in_place(copy.deepcopy(net))):
        torch.manual_seed(3)
        with engine.attach(made):
            found.append(gradients(made, lambda made=made: made(x)))
    assert_equal_gradients(found[1], found[0], tolerance=1e-10 if dtype is torch.float64 else 0.01)


@pytest.mark.parametrize("engine", [FOTON(), PEPITA()], ids=str)
def test_a_function_that_overwrites_a_state_to_compare_is_refused(engine):
    """It writes through a view to the output of the layer with weights, which ends at the view."""
    net = with_functions_in_place(nn.Sequential(nn.Linear(8, 8), nn.Flatten(), nn.ReLU(), nn.Linear(8, 4)))
    with engine.attach(net):
        out = net(torch.randn(5, 8))
        with pytest.raises(ChainError, match=r"the output of 0 were changed in place .* Use the out-of-place"):
            out.sum().backward()


def test_a_loss_only_on_an_inner_state_with_a_freed_graph_is_refused():
    net, x = tanh_net(), torch.randn(3, 8)
    with ENGINES["foton, streaming"].attach(net, [""]):
        inner = net[1](net[0](x))
        net[2](inner)
        with pytest.raises(ChainError, match="the loss uses the output of 1, but no output of the layers after it"):
            inner.sum().backward()


class Kept(nn.Tanh):
    """Stores a tensor from its inside."""

    def forward(self, x):
        self.kept = torch.sin(x)
        return super().forward(x)


@pytest.mark.parametrize("name", ENGINES)
def test_layers_before_the_chain_get_the_gradient_of_a_loss_inside(name, monkeypatch):
    """Requested with or without later weights: exact at the start of the chain, else exact or refused, not dropped."""
    monkeypatch.setattr(roles, "_KNOWN", dict(roles._KNOWN))
    gradfree.register_layer(Kept, "pointwise")
    net = nn.Sequential(Kept(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), Kept(), nn.Linear(8, 4))
    x = torch.randn(4, 8, requires_grad=True)

    def asked(share, *weights):
        loss = net(x).square().sum() + sum(net[i].kept.exp().sum() for i in share)
        return torch.autograd.grad(loss, [x, *weights])[0]

    engine = ENGINES[name]
    exact = {i: asked([i]) - asked([]) for i in (0, 4)}
    for weights in ((), (net[5].weight,)):
        with engine.attach(net, [""]):
            torch.testing.assert_close(asked([0], *weights) - asked([], *weights), exact[0])
            if name == "orthogonal_backprop":
                torch.testing.assert_close(asked([4], *weights) - asked([], *weights), exact[4])
            else:
                with pytest.raises(ChainError, match="the loss uses the output of 3, which lies inside the chain"):
                    asked([4], *weights)


@pytest.mark.parametrize("name", ENGINES)
def test_a_loss_on_a_layers_input_reaches_the_weights_before_it(name):
    """If only weights are requested, by both calls: exact or refused, never dropped."""
    net, x, seen = tanh_net(), torch.randn(4, 8), []
    weights = list(net.parameters())

    def asked(backward):
        loss = net(x).square().sum() + seen[-1].exp().sum()
        if not backward:
            return torch.autograd.grad(loss, weights, retain_graph=True)
        net.zero_grad()
        loss.backward(retain_graph=True, inputs=weights)
        return tuple(p.grad for p in weights)

    def look_on():
        return net[2].register_forward_hook(lambda layer, args, out: seen.append(args[0]))

    with look_on():
        exact = asked(backward=False)
    # The recorder's hooks are registered before that of look_on().
    with ENGINES[name].attach(net, [""]), look_on():
        for backward in (False, True):
            if name == "orthogonal_backprop":
                torch.testing.assert_close(asked(backward), exact)
            else:
                with pytest.raises(ChainError, match="the loss uses the output of 1, which lies inside the chain"):
                    asked(backward)


@pytest.mark.parametrize("engine", FORWARD_ONLY, ids=repr)
@pytest.mark.parametrize(
    ("net", "shape", "where"),
    [
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), (8,), r"'0' returns \(8,\) for an input"),
        (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)), (4, 3, 3), r"'0' returns \(4, 3, 3\)"),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Flatten(0, 1), nn.Linear(8, 4)), (3, 2, 8), r"'1' returns \(6, 8\)"),
    ],
)
def test_the_first_dimension_must_be_the_batch(engine, net, shape, where):
    """Errors are normalised and sent back per sample."""
    net = net()
    with engine.attach(net, [""]):
        out = net(torch.randn(shape))
        with pytest.raises(ChainError, match=f"{where}.* must be the batch"):
            out.sum().backward()


def test_integer_inputs_are_refused(engine):
    net = nn.Sequential(nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 2))
    with engine.attach(net), pytest.raises(ChainError, match=r"1 got an input of torch.int64, .* x.float\(\)"):
        net(torch.ones(4, 2, 4, dtype=torch.int64))


def test_a_layer_that_runs_twice_in_a_pass_is_refused(engine):
    net, x = tanh_net(), torch.randn(3, 8)
    with engine.attach(net, [""]), pytest.raises(ChainError, match="0 runs twice in one forward pass"):
        net[0](net[1](net[0](x)))


def test_replicas_of_data_parallel_are_refused(engine):
    net = tanh_net()
    with engine.attach(net):
        replica = net[0]._replicate_for_data_parallel()
        replica.weight, replica.bias = net[0].weight, net[0].bias
        with pytest.raises(ChainError, match=r"0 runs as one of several replicas of nn\.DataParallel"):
            replica(torch.randn(3, 8))


def test_dropout_switched_off_between_the_passes_is_refused_if_layers_run_again():
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(3, 8)
    for before in (True, False):
        with FOTON(streaming=True).attach(net.train(before), [""]):
            out = net(x).sum()
            net.train(not before)
            with pytest.raises(ChainError, match="1 was switched between training and evaluation"):
                out.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_errors_too_small_to_be_inverted_count_as_zero(dtype):
    """A confident sample's error may be subnormal, and its reciprocal infinite."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    with FOTON().attach(net, [""]):
        net(torch.randn(1, 8, dtype=dtype)).backward(torch.tensor([[torch.finfo(dtype).tiny / 16]], dtype=dtype))
    assert all(p.grad.isfinite().all() for p in net.parameters())


def test_weights_whose_data_are_replaced_between_the_passes_are_refused_by_engines_that_read_them_again():
    for engine in (FOTON(), FOTON(streaming=True), PEPITA()):
        net = tanh_net()
        with engine.attach(net):
            loss = net(torch.randn(6, 8)).sum()
            net[2].weight.data = 2 * net[2].weight.data
            with pytest.raises(ChainError, match="or its data replaced"):
                loss.backward()


def test_weights_converted_after_the_pass_are_refused(engine):
    net = tanh_net()
    with engine.attach(net):
        loss = net(torch.randn(6, 8)).sum()
        net.float()
        with pytest.raises(ChainError, match="got another dtype or device between the forward and"):
            loss.backward()
