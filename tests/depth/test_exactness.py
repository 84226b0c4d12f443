"""Exact engines against autograd in float64, for every kind of block, length and loss."""

import pytest
import torch
from oracles import Halving
from pairwise import pairwise
from torch import nn

import gradfree
from gradfree.testing.cases.models import BLOCKS, Model, Plain, assert_equal_gradients, gradients, plain_model

EXACT = {
    "backprop": lambda length: gradfree.create_engine("backprop", plain=False),
    "deeppcr": lambda length: gradfree.create_engine("deeppcr"),
    "highway_bp": lambda length: gradfree.create_engine("highway_bp", iterations=length - 1),
    "highway_bp, gamma 0.3": lambda length: gradfree.create_engine("highway_bp", iterations=length - 1, gamma=0.3),
    "highway_bp, gamma 1": lambda length: gradfree.create_engine("highway_bp", iterations=length - 1, gamma=1.0),
    "fixed_point": lambda length: gradfree.create_engine("fixed_point", iterations=length - 1),
    "truncated": lambda length: gradfree.create_engine("truncated", window=length),
}

TAPS = {
    "the last state": lambda length: (length - 1,),
    "every state (deep supervision)": lambda length: tuple(range(length)),
    "the first state, the rest unused": lambda length: (0,),
    "all but the last state": lambda length: tuple(range(max(1, length - 1))),
}


@pairwise(engine=EXACT, kind=BLOCKS, length=[1, 2, 5, 12], taps=TAPS)
def test_gradients_equal_backprop_and_outputs_are_bitwise_the_same(engine, kind, length, taps):
    make, shape = BLOCKS[kind]
    model, x = Model([make() for _ in range(length)], shape[-1]), torch.randn(shape)
    # Not with batch statistics, which mix samples: the engine refuses them.
    model.train(engine != "deeppcr")
    taps = TAPS[taps](length)
    expected_out, expected = model(x, taps=taps).detach(), gradients(model, lambda: model(x, taps=taps))
    with EXACT[engine](length).attach(model, ["blocks"]):
        assert torch.equal(model(x, taps=taps), expected_out)
        assert_equal_gradients(gradients(model, lambda: model(x, taps=taps)), expected)


@pytest.mark.parametrize("engine", EXACT)
def test_blocks_may_change_the_shape_of_the_state(engine):
    """Residual blocks of three widths with a plain layer between: K is zero for the layer, its VJP is exact."""
    widths = [nn.Linear(6, 4), nn.Linear(4, 9)]
    blocks = nn.Sequential(Plain(6), Plain(6), widths[0], Plain(4), Plain(4), widths[1], Plain(9))
    x = torch.randn(5, 6)
    expected = gradients(blocks, lambda: blocks(x))
    with EXACT[engine](7).attach(blocks, [""]):
        assert_equal_gradients(gradients(blocks, lambda: blocks(x)), expected)


@pytest.mark.parametrize("gamma", [0.0, 0.2])
@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_highway_bp_follows_the_papers_recurrence(k, gamma):
    """w^{k+1} = scan(e + w^k J, K) with dense Jacobians, K = (1-γ)I and J = F - K (eqs. 10 and 11)."""
    length, width = 4, 6
    model, x = plain_model(length), torch.randn(1, width)
    states = [model.stem(x), *model.states(x)]
    jacobians = [
        torch.autograd.functional.jacobian(block, h.detach()).reshape(width, width)
        for block, h in zip(model.blocks, states, strict=False)
    ]
    direct = [torch.zeros(width)] * (length - 1) + [2 * model(x).item() * model.heads[-1].detach()]
    K = (1 - gamma) * torch.eye(width)
    w = [torch.zeros(width)] * length
    for sweep in range(k + 1):
        v = [w[i + 1] @ (jacobians[i + 1] - K) if sweep else 0.0 for i in range(length - 1)] + [0.0]
        u = list(direct)
        for i in reversed(range(length)):
            u[i] = direct[i] + v[i] + (u[i + 1] @ K if i + 1 < length else 0.0)
        w = u
    with gradfree.create_engine("highway_bp", iterations=k, gamma=gamma).attach(model):
        actual = gradients(model, lambda: model(x))
    for i, (block, h) in enumerate(zip(model.blocks, states, strict=False)):
        weight, bias = torch.autograd.grad(block(h.detach()), list(block.parameters()), w[i][None])
        torch.testing.assert_close(actual[f"blocks.{i}.linear.weight"], weight, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(actual[f"blocks.{i}.linear.bias"], bias, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_truncated_equals_a_graph_cut_by_hand(window):
    """The loss after state i reaches only the last ``window`` blocks; everything before them is detached."""
    model, x = plain_model(5), torch.randn(3, 6)

    def cut_by_hand():
        with torch.no_grad():
            inputs = [model.stem(x), *model.states(x)]
        total = 0.0
        for i in range(5):
            first = max(0, i + 1 - window)
            h = inputs[first] if i + 1 > window else model.stem(x)
            for block in model.blocks[first : i + 1]:
                h = block(h)
            total = total + (h * model.heads[i]).sum(1)
        return total

    expected = gradients(model, cut_by_hand)
    if window < 5:
        assert expected["stem.weight"] is not None
    with gradfree.create_engine("truncated", window=window).attach(model):
        actual = gradients(model, lambda: model(x, taps=(0, 1, 2, 3, 4)))
    assert_equal_gradients(actual, expected)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("engine", EXACT)
def test_torchs_transformer_encoder_is_exact(engine, norm_first):
    """Two sublayers per block, mask and flags by keyword, pre-LN and post-LN: K is read from the graph."""
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True, norm_first=norm_first)
    model, x = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(2, 5, 6)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    expected = gradients(model, lambda: model(x, mask=mask, is_causal=True))
    with EXACT[engine](4).attach(model):
        assert_equal_gradients(gradients(model, lambda: model(x, mask=mask, is_causal=True)), expected)


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("engine", ["highway_bp", "fixed_point", "truncated", "backprop"])
def test_jagged_nested_tensors_are_exact(engine):
    model, samples = nn.Sequential(nn.Linear(6, 6), *[Plain() for _ in range(3)]), [torch.randn(n, 6) for n in (2, 5)]

    def loss():
        return model(torch.nested.nested_tensor(samples, layout=torch.jagged)).values().square().sum()

    expected = gradients(model, loss)
    with EXACT[engine](4).attach(model, [""], residual=1.0 if engine == "highway_bp" else None):
        assert_equal_gradients(gradients(model, loss), expected)


class Writing(Plain):
    """A block whose output comes from a function that changes its cotangent in place."""

    def forward(self, x):
        return Halving.apply(super().forward(x))


DSF = {"dsf": lambda length: gradfree.create_engine("dsf", feedback=0.7, iterations=length)}


@pytest.mark.parametrize("taps", TAPS)
@pytest.mark.parametrize("engine", EXACT | DSF)
def test_a_custom_function_may_write_to_its_cotangent(engine, taps):
    """Each δ is read several times: by the scan, the next VJP, the parameter gradients, and a second backward pass."""
    model, x = Model([Writing(), Plain(), Writing(), Writing(), Plain(), Writing()]), torch.randn(4, 6)

    def twice():
        loss = model(x, taps=TAPS[taps](6)).pow(2).sum()
        loss.backward(retain_graph=True)
        first = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        second = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        model.zero_grad()
        return dict(enumerate([*first, *second]))

    expected = twice()
    with (EXACT | DSF)[engine](6).attach(model):
        assert_equal_gradients(twice(), expected)


@pytest.mark.parametrize("engine", ["backprop", "fixed_point", "truncated"])
def test_a_function_beside_the_chain_may_write_to_a_cotangent_that_the_last_state_shares(engine):
    """A sum sends one tensor to both of its terms, and autograd is done with the last block before it is changed."""
    model, x = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6)) for _ in range(3)]), torch.randn(4, 6)
    side = torch.randn(4, 6, requires_grad=True)

    def run():
        h = model[0](x)
        beside = Halving.apply(side)
        return model[2](model[1](h)) + beside

    expected = gradients(model, run)
    with EXACT[engine](3).attach(model, [""]):
        assert_equal_gradients(gradients(model, run), expected)


def test_chains_with_more_links_than_separate_walks_are_exact():
    torch.manual_seed(0)
    model, x = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(40)]), torch.randn(5, 3)
    expected = torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters()))
    with gradfree.create_engine("fixed_point", iterations=39).attach(model, [""], batched=False):
        found = torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters()))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
