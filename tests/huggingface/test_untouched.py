"""Other outputs of Hugging Face models are the same while an engine is attached."""

import pytest
import torch

pytest.importorskip("transformers")

from tiny_hugging_face import LENGTH, bart, bert, gpt2, vit

import gradfree

TOKENS = torch.arange(2 * LENGTH).reshape(2, LENGTH) % 50
IMAGES = torch.linspace(-9, 9, 2 * 3 * 8 * 8).sin().reshape(2, 3, 8, 8)
MODELS = {
    "gpt2": (lambda: gpt2(attn_implementation="eager"), {"input_ids": TOKENS, "labels": TOKENS}),
    "bert": (bert, {"input_ids": TOKENS, "labels": TOKENS}),
    "bart": (bart, {"input_ids": TOKENS, "labels": TOKENS}),
    "vit": (vit, {"pixel_values": IMAGES, "labels": torch.tensor([1, 2])}),
}


def both(build, use):
    """Return the results of ``use`` on the model without and with an engine."""
    results = []
    for attached in (False, True):
        model = build()
        handle = gradfree.create_engine("highway_bp", iterations=4).attach(model) if attached else None
        torch.manual_seed(1)
        results.append(use(model))
        if handle:
            handle.detach()
    return results


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for entry in entries for tensor in tensors(entry)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_and_attentions_are_bitwise_the_same(name, training):
    build, batch = MODELS[name]

    def run(model):
        model.train(training)
        model.set_attn_implementation("eager")
        return model(**batch, output_hidden_states=True, output_attentions=True)

    plain, attached = both(build, run)
    assert type(plain) is type(attached)
    assert plain.keys() == attached.keys()
    assert any("hidden_states" in key for key in plain)
    assert any("attentions" in key for key in plain)
    pairs = list(zip(tensors(dict(plain)), tensors(dict(attached)), strict=True))
    assert len(pairs) > 6
    assert all(torch.equal(a, b) for a, b in pairs)
    assert all(a.requires_grad == b.requires_grad for a, b in pairs)


def loss_inside(model, batch):
    """A loss on everything that the model returns, including hidden states and attentions."""
    model.set_attn_implementation("eager")
    out = model(**batch, output_hidden_states=True, output_attentions=True)
    return sum((t * torch.cos(t.detach())).mean() for t in tensors(dict(out)) if t.requires_grad)


@pytest.mark.parametrize("name", MODELS)
def test_a_loss_on_hidden_states_and_attentions_has_the_same_gradients(name):
    """The library's hooks store attentions inside blocks, so these graphs must be retained."""
    build, batch = MODELS[name]

    def run(model):
        loss_inside(model, batch).backward(retain_graph=True)
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, attached = both(build, run)
    assert plain.keys() == attached.keys()
    for key in plain:
        torch.testing.assert_close(attached[key], plain[key], rtol=1e-4, atol=1e-6)
