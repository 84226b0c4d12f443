"""Forward gradients: right in the mean, different in each pass, repeated from a checkpoint."""

import pytest
import torch
from torch import nn

import gradfree
from gradfree.testing.cases.models import gradients, plain_model


class PerSample(nn.Module):
    """tanh of a separate linear map for each sample, so that the gradient of each draw is visible."""

    def __init__(self, weights):
        super().__init__()
        self.weight = nn.Parameter(weights)

    def forward(self, x):
        return x + torch.tanh(torch.einsum("nij,nj->ni", self.weight, x))


def test_the_mean_of_20000_draws_is_within_four_standard_errors_of_the_gradient():
    count, width, depth = 20_000, 3, 4
    weights = torch.randn(depth, width, width)
    model = nn.Sequential(*(PerSample(w.expand(count, width, width).clone()) for w in weights))
    x = torch.randn(width).expand(count, width)
    expected = gradients(model, lambda: model(x))
    with gradfree.create_engine("forward_gradient").attach(model, [""]):
        drawn = gradients(model, lambda: model(x))
    for name, exact in expected.items():
        error = drawn[name].std(0) / count**0.5
        off = (drawn[name].mean(0) - exact[0]).abs()
        assert (off <= 4 * error + 1e-12).all(), name
        # There is noise in all blocks but the last, whose cotangent is known.
        assert bool((error > 1e-12).all()) == (name != f"{depth - 1}.weight")


def test_complex_numbers_count_as_two_real_ones():
    """For blocks that are not holomorphic, and each of the two parts: the mean of many draws has the direction of g."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(0.3 * torch.randn(2, dtype=torch.complex128))

        def forward(self, x):
            return x + self.shift * x.abs()

    model, x = nn.Sequential(Block(), Block(), Block()), torch.randn(3, 2, dtype=torch.complex128)
    expected = gradients(model, lambda: model(x).abs().square())
    with gradfree.create_engine("forward_gradient", samples=20_000).attach(model, [""]):
        found = gradients(model, lambda: model(x).abs().square())
    for name, exact in expected.items():
        torch.testing.assert_close(found[name], exact, rtol=0.1, atol=0.0)


def test_directions_differ_between_passes_and_seeds():
    model, x = plain_model(), torch.randn(4, 6)
    found = []
    for seed in (0, 1):
        with gradfree.create_engine("forward_gradient", seed=seed).attach(model):
            found += [gradients(model, lambda: model(x))["stem.weight"] for _ in range(2)]
    for i, one in enumerate(found):
        assert not any(torch.equal(one, other) for other in found[:i])


class Attention(nn.Module):
    def forward(self, x):
        return x + nn.functional.scaled_dot_product_attention(x, x, x)


def test_attention_is_refused_unless_it_runs_on_the_plain_kernel():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = nn.Sequential(nn.Linear(4, 4), Attention(), Attention())
    x = torch.randn(2, 3, 5, 4)
    with gradfree.create_engine("forward_gradient", samples=2).attach(model, [""]):
        with pytest.raises(gradfree.ChainError, match=r"1 cannot be differentiated.*sdpa_kernel"):
            model(x).sum().backward()
        with sdpa_kernel(SDPBackend.MATH):
            model(x).sum().backward()
