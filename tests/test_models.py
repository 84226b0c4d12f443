"""The models are useful without an engine, and their chains are found without help."""

import pytest
import torch
from chains import assert_equal_gradients, gradients

import gradfree
from gradfree.models.resnet import downsample, upsample

CASES = {
    "preact_resnet": ({"depth": 14, "in_channels": 1, "num_classes": 3, "width": 4}, lambda: torch.randn(5, 1, 8, 12)),
    "postact_resnet": ({"depth": 14, "in_channels": 2, "num_classes": 3, "width": 4}, lambda: torch.randn(5, 2, 8, 8)),
    "gpt": ({"vocab_size": 11, "context": 9, "layers": 3, "width": 8, "heads": 2}, lambda: torch.randint(11, (4, 7))),
    "residual_mlp": ({"in_features": 12, "num_classes": 3, "depth": 6, "width": 8}, lambda: torch.randn(5, 3, 4)),
}


def small_gpt(**options):
    return gradfree.create_model("gpt", **CASES["gpt"][0], **options)


OUTPUTS = {"preact_resnet": (5, 3), "postact_resnet": (5, 3), "gpt": (4, 7, 11), "residual_mlp": (5, 3)}


def test_every_registered_model_is_covered():
    assert set(CASES) == set(gradfree.list_models())


@pytest.mark.parametrize("name", CASES)
def test_output_shape_and_a_gradient_for_every_parameter(name):
    options, make_input = CASES[name]
    model = gradfree.create_model(name, **options)
    x = make_input()
    assert model(x).shape == OUTPUTS[name]
    assert all(g is not None and g.any() for g in gradients(model, lambda: model(x)).values())


@pytest.mark.parametrize("name", CASES)
def test_highway_bp_finds_the_chain_and_is_exact_at_k_equal_to_its_length(name):
    options, make_input = CASES[name]
    model, x = gradfree.create_model(name, **options), make_input()
    expected = gradients(model, lambda: model(x))
    engine = gradfree.create_engine("highway_bp", iterations=6)
    (site,) = engine.validate(model).chains.values()
    assert len(site.blocks) == (4 * 3 // 2 if "resnet" in name else 6)
    with engine.attach(model):
        assert_equal_gradients(gradients(model, lambda: model(x)), expected)


@pytest.mark.parametrize("name", CASES)
def test_default_options_make_a_model_of_usual_size(name):
    needed = {"gpt": {"vocab_size": 256}, "residual_mlp": {"in_features": 64, "num_classes": 10}}
    model = gradfree.create_model(name, **needed.get(name, {}))
    assert 1e5 < sum(p.numel() for p in model.parameters()) < 1e7


@pytest.mark.parametrize(("depth", "blocks"), [(32, 15), (56, 27), (110, 54)])
def test_resnet_depths_are_the_papers(depth, blocks):
    assert len(gradfree.create_model("preact_resnet", depth=depth).blocks) == blocks


def test_resnet32_has_about_the_papers_number_of_parameters():
    """464 k in Highway-BP's Table 2, and 23 k as the first convolutions of stages 2 and 3 are as wide as the rest."""
    parameters = sum(p.numel() for p in gradfree.create_model("preact_resnet", depth=32).parameters())
    assert parameters == pytest.approx(464e3 + 9 * (16 * 32 + 32 * 64), rel=0.002)


@pytest.mark.parametrize("s", [1, 2, 4])
def test_downsample_undoes_upsample(s):
    y = torch.randn(2, 3 * s, 4, 5)
    assert upsample(y, s).shape == (2, 3, 4 * s, 5 * s)
    torch.testing.assert_close(downsample(upsample(y, s), s), y)


def test_downsample_averages_rows_and_makes_columns_channels():
    x = torch.arange(16.0).reshape(1, 1, 4, 4)
    torch.testing.assert_close(downsample(x, 2)[0, :, 0, 0], torch.tensor([2.0, 3.0]))
    torch.testing.assert_close(downsample(x, 2)[0, 0], torch.tensor([[2.0, 4.0], [10.0, 12.0]]))


def test_gpt_is_causal():
    model = small_gpt()
    tokens = torch.randint(11, (1, 9))
    changed = tokens.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 11
    assert torch.equal(model(tokens)[:, :5], model(changed)[:, :5])
    assert not torch.equal(model(tokens)[:, 5:], model(changed)[:, 5:])


def test_dropout_is_off_in_eval_mode():
    for name, options in (("gpt", CASES["gpt"][0]), ("residual_mlp", CASES["residual_mlp"][0])):
        model, x = gradfree.create_model(name, dropout=0.5, **options), CASES[name][1]()
        assert not torch.equal(model(x), model(x))
        model.eval()
        assert torch.equal(model(x), model(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gradfree.create_model("preact_resnet", depth=33), "depth must be 6n + 2"),
        (lambda: gradfree.create_model("postact_resnet", depth=2), "depth must be 6n + 2"),
        (lambda: gradfree.create_model("preact_resnet")(torch.randn(1, 3, 30, 32)), "must be multiples of 4"),
        (lambda: gradfree.create_model("gpt", vocab_size=5, width=10, heads=4), "heads must divide width"),
        (lambda: small_gpt()(torch.zeros(1, 10, dtype=torch.long)), "10 tokens exceed the context of 9"),
    ],
)
def test_wrong_options_and_inputs(make, message):
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        make()
