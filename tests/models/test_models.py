"""Models work without an engine, and engines find their chains."""

import pytest
import torch

import gradfree
from gradfree.models.resnet import downsample, upsample
from gradfree.testing.cases.models import assert_equal_gradients, gradients

CASES = {
    "preact_resnet": ({"depth": 14, "in_channels": 1, "num_classes": 3, "width": 4}, lambda: torch.randn(5, 1, 8, 12)),
    "postact_resnet": ({"depth": 14, "in_channels": 2, "num_classes": 3, "width": 4}, lambda: torch.randn(5, 2, 8, 8)),
    "gpt": ({"vocab_size": 11, "context": 9, "layers": 3, "width": 8, "heads": 2}, lambda: torch.randint(11, (4, 7))),
    "residual_mlp": ({"in_features": 12, "num_classes": 3, "depth": 6, "width": 8}, lambda: torch.randn(5, 3, 4)),
    "vit": (
        {"in_channels": 1, "num_classes": 3, "image_size": 6, "patch_size": 2, "layers": 3, "width": 8, "heads": 2},
        lambda: torch.randn(5, 1, 6, 6),
    ),
    "recurrent_lm": ({"vocab_size": 11, "layers": 3, "width": 8}, lambda: torch.randint(11, (4, 7))),
    "pixel_classifier": ({"in_channels": 2, "num_classes": 3, "width": 8}, lambda: torch.randn(5, 2, 3, 4)),
    "lenet": ({"in_channels": 2, "num_classes": 3, "image_size": 16}, lambda: torch.randn(5, 2, 16, 16)),
    "mlp": ({"in_features": 12, "num_classes": 3, "depth": 4, "width": 8}, lambda: torch.randn(5, 3, 4)),
    "orthogonal_mlp": ({"in_features": 12, "num_classes": 3, "depth": 4, "width": 8}, lambda: torch.randn(5, 3, 4)),
    "orthogonal_lenet": ({"num_classes": 3, "image_size": 12}, lambda: torch.randn(5, 1, 12, 12)),
    "orthogonal_convnet": (
        {"in_channels": 2, "num_classes": 3, "image_size": 8, "channels": (8, 16)},
        lambda: torch.randn(5, 2, 8, 8),
    ),
}


def small(name, **options):
    return gradfree.create_model(name, **{**CASES[name][0], **options})


CHAINS = {
    "preact_resnet": ({"blocks": "6 blocks"}, 6),
    "postact_resnet": ({"blocks": "6 blocks"}, 6),
    "gpt": ({"sublayers": "6 blocks"}, 6),
    "residual_mlp": ({"blocks": "6 blocks"}, 6),
    "vit": ({"sublayers": "6 blocks"}, 6),
    "recurrent_lm": ({f"stack.rnns.{n}": "GRU, 1 layer, in time" for n in range(3)}, 7),
    "pixel_classifier": ({"rnn": "GRU, 1 layer, in time"}, 12),
}
"""The chains that are found, and their lengths. Not of LeNet and orthogonal models, which have chains of layers."""

VARIANTS = [
    {"cell": cell, "block": block} for block in ("plain", "transformer") for cell in ("gru", "lstm", "rnn", "para_gru")
]
"""All recurrent language models."""


@pytest.mark.parametrize("name", CASES)
def test_output_shape_and_a_gradient_for_every_parameter(name):
    model, x = small(name), CASES[name][1]()
    assert model(x).shape == ((4, 7, 11) if name in ("gpt", "recurrent_lm") else (5, 3))
    assert all(g is not None and g.any() for g in gradients(model, lambda: model(x)).values())


@pytest.mark.parametrize("name", CHAINS)
def test_highway_bp_finds_the_chains_and_is_exact_at_k_equal_to_their_length(name):
    model, x = small(name), CASES[name][1]()
    expected = gradients(model, lambda: model(x))
    chains, length = CHAINS[name]
    engine = gradfree.create_engine("highway_bp", iterations=length)
    assert {path: str(site) for path, site in engine.validate(model).chains.items()} == chains
    with engine.attach(model):
        assert_equal_gradients(gradients(model, lambda: model(x)), expected)


def test_downsample_inverts_upsample_averages_rows_and_stacks_columns():
    y = torch.randn(2, 6, 4, 5)
    torch.testing.assert_close(downsample(upsample(y, 2), 2), y)
    x = torch.arange(16.0).reshape(1, 1, 4, 4)
    torch.testing.assert_close(downsample(x, 2)[0, :, 0, 0], torch.tensor([2.0, 3.0]))
    torch.testing.assert_close(downsample(x, 2)[0, 0], torch.tensor([[2.0, 4.0], [10.0, 12.0]]))


@pytest.mark.parametrize("name", ["gpt", "recurrent_lm"])
def test_language_models_are_causal(name):
    model = small(name)
    tokens = torch.randint(11, (1, 9))
    changed = tokens.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 11
    assert torch.equal(model(tokens)[:, :5], model(changed)[:, :5])
    assert not torch.equal(model(tokens)[:, 5:], model(changed)[:, 5:])


@pytest.mark.parametrize(
    ("name", "options", "thousands"),
    [
        ("recurrent_lm", {"vocab_size": 210, "cell": "lstm", "width": 512}, 2300),
        ("recurrent_lm", {"vocab_size": 16000, "layers": 3, "width": 512}, 21100),
        ("pixel_classifier", {"in_channels": 3, "num_classes": 10}, 29.8 + 3 * 64 / 1000),
        ("preact_resnet", {"depth": 32}, 464 + 9 * (16 * 32 + 32 * 64) / 1000),
    ],
)
def test_models_have_about_the_papers_number_of_parameters(name, options, thousands):
    """Highway-BP's Table 2; the classifier's is right for a GRU with one bias, and torch's has two.

    The first convolutions of the ResNet's stages 2 and 3 are as wide as the rest.
    """
    with torch.device("meta"):
        model = gradfree.create_model(name, **options)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(1000 * thousands, rel=0.01)


def test_transformer_recurrent_lm_equals_the_dsf_papers_model():
    model, tokens = small("recurrent_lm", block="transformer", layers=2), torch.randint(11, (4, 7))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    p = dict(model.named_parameters())

    def norm(x, name):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        return x * p[f"{name}.weight"] + p[f"{name}.bias"]

    def linear(x, name):
        return x @ p[f"{name}.weight"].t() + p[f"{name}.bias"]

    x = p["embedding.weight"][tokens]
    for n in range(2):
        x = x + linear(model.stack.rnns[n](norm(x, f"stack.norms.{n}"))[0], f"stack.outs.{n}")
        up = linear(norm(x, f"stack.mlps.{n}.0"), f"stack.mlps.{n}.1")
        x = x + linear(up * (1 + torch.erf(up / 2**0.5)) / 2, f"stack.mlps.{n}.3")
    torch.testing.assert_close(model(tokens), linear(norm(x, "stack.norm"), "head"))


def test_transformer_recurrent_lm_is_initialised_as_in_the_dsf_paper():
    model = gradfree.create_model("recurrent_lm", vocab_size=64, layers=2, width=64, block="transformer")
    for name, parameter in model.named_parameters():
        if "rnns" in name:
            assert parameter.abs().max() <= 1 / 8
            assert parameter.std().item() == pytest.approx(1 / 8 / 3**0.5, rel=0.1)
        elif parameter.dim() > 1:
            last = "outs" in name or name.endswith("3.weight")
            assert parameter.std().item() == pytest.approx(0.01 if last else 0.02, rel=0.1), name
        else:
            assert (parameter == (0.0 if name.endswith("bias") else 1.0)).all(), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_windows_with_passed_states_equal_one(variant):
    """Logits and, as states are not detached, gradients of two windows equal those of one long window."""
    model, tokens = small("recurrent_lm", **variant), torch.randint(11, (4, 7))

    def windows():
        first, states = model.unroll(tokens[:, :3])
        assert states.shape == (3, 2 if variant["cell"] == "lstm" else 1, 4, 8)
        return torch.cat([first, model(tokens[:, 3:], states)], 1)

    torch.testing.assert_close(windows(), model(tokens))
    assert not torch.allclose(windows()[:, 3:], model(tokens[:, 3:]))
    expected = gradients(model, lambda: model(tokens))
    assert_equal_gradients(gradients(model, windows), expected)
    with gradfree.create_engine("truncated", window=4).attach(model):
        assert_equal_gradients(gradients(model, windows), expected)


def test_carry_starts_a_training_batch_from_the_previous_final_states():
    model, tokens = small("recurrent_lm", cell="lstm", carry=True), torch.randint(11, (4, 7))
    whole = small("recurrent_lm", cell="lstm")
    whole.load_state_dict(model.state_dict())
    parts = torch.cat([model(tokens[:, :3]), model(tokens[:, 3:])], 1)
    torch.testing.assert_close(parts, whole(tokens))
    assert not model.carried.requires_grad
    torch.testing.assert_close(model(tokens[:2]), whole(tokens[:2]))  # Another batch size starts from zero,
    torch.testing.assert_close(model.eval()(tokens), whole(tokens))  # and so does evaluation.
    assert model.state_dict().keys() == whole.state_dict().keys()


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_memory_lets_the_first_pixel_reach_the_last_state(cell):
    """With torch's initial gates, a change of the first pixel does not reach the last state."""
    images = torch.randn(2, 1, 16, 16)
    other = images.clone()
    other[:, :, 0, 0] += 3
    reached = {}
    for memory in (None, 256):
        torch.manual_seed(0)
        model = small("pixel_classifier", in_channels=1, cell=cell, memory=memory)
        last = [model.rnn(model.stem(x.flatten(2).transpose(1, 2)))[0][:, -1] for x in (images, other)]
        reached[memory] = (last[0] - last[1]).abs().max()
    assert reached[None] < 1e-12 < 1e-4 < reached[256]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small("pixel_classifier", memory=2), "at least 3 steps of a cell 'gru' or 'lstm', not 2 of GRU"),
        (lambda: gradfree.create_model("preact_resnet", depth=33), "depth must be 6n + 2"),
        (lambda: gradfree.create_model("preact_resnet")(torch.randn(1, 3, 30, 32)), "must be multiples of 4"),
        (lambda: small("gpt")(torch.zeros(1, 10, dtype=torch.long)), "10 tokens exceed the context of 9"),
        (lambda: small("recurrent_lm", cell="mgu"), "cell must be one of 'gru', .*, 'para_lstm', not 'mgu'"),
        (lambda: small("lenet", image_size=15), "image_size must be at least 16, not 15"),
    ],
)
def test_wrong_options_and_inputs_are_refused(make, message):
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        make()


@pytest.mark.parametrize("engine", ["fa", "dfa", "foton", "fixed_point", "forward_gradient"])
@pytest.mark.parametrize("model", ["lenet", "mlp"])
def test_plain_networks_are_chains_for_engines_of_layers_and_of_blocks(engine, model):
    assert gradfree.create_engine(engine).validate(small(model), ["layers"]).ok
