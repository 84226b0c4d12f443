"""Training loops with accelerate, and adapters of peft."""

import pytest
import torch

import gradfree

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import accelerate
from tiny_hugging_face import Examples, bert, gpt2, weights

STEPS = 6


def batches(model, size=4):
    return torch.utils.data.DataLoader(Examples(model), batch_size=size)


def trained(options=None, by="optimizer", folder=None, stop=None):
    """Return the weights after an accelerate loop, with accumulation and clipping; save or load its state."""
    model = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if options and by == "optimizer":
        optimizer = gradfree.EngineOptimizer(optimizer, model, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, batches(model), scheduler)
    handle = gradfree.create_engine(**options).attach(model) if options and by == "attach" else None
    if folder and stop is None:
        accelerator.load_state(folder)
    for step, batch in enumerate(loader):
        if step >= 2 * STEPS or (folder and stop is None and step < STEPS):
            continue
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step + 1 == stop:
            accelerator.save_state(folder)
    if handle:
        handle.detach()
    return weights(accelerator.unwrap_model(model))


@pytest.mark.parametrize("by", ["optimizer", "attach"])
def test_a_loop_with_accelerate_equals_a_plain_loop(by):
    plain = trained()
    exact = {"engine" if by == "optimizer" else "name": "highway_bp", "iterations": 3}
    torch.testing.assert_close(trained(exact, by), plain, rtol=1e-5, atol=1e-5)
    if by == "optimizer":
        rough = trained(exact | {"iterations": 0}, by)
        assert not torch.allclose(rough, plain, rtol=1e-5, atol=1e-5)


def test_accelerate_saves_and_loads_the_optimizer_with_its_engine(tmp_path):
    """With ``dsf``, whose running mean is part of the optimizer's state."""
    options = {"engine": "dsf", "feedback": "gate"}
    whole = trained(options, folder=tmp_path, stop=STEPS)
    assert torch.equal(trained(options, folder=tmp_path), whole)


@pytest.fixture
def adapted():
    peft = pytest.importorskip("peft")

    def build():
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
        return peft.get_peft_model(gpt2(), config)

    return build


def gradients(model):
    batch = next(iter(batches(model.get_base_model())))
    torch.manual_seed(1)
    model(**batch).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_only_adapters_are_trained_with_exact_gradients(adapted):
    """LoRA freezes everything else, also modules before the chain."""
    expected = gradients(adapted())
    assert all("lora" in name for name in expected)
    model = adapted()
    engine = gradfree.create_engine("highway_bp", iterations=3)
    with engine.attach(model) as handle:
        actual = gradients(model)
    assert list(handle.chains) == ["base_model.model.transformer.h"]
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)
