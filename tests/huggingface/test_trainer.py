"""An engine in the Trainer: exact engines do not change a bit, and a resumed training continues."""

import json
from importlib.metadata import version
from itertools import cycle

import pytest
import torch
from torch.torch_version import TorchVersion

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tiny_hugging_face import bart, bert, gpt2, mixtral, train, vit, weights
from transformers import TrainerState

import gradfree
from gradfree.huggingface import EngineCallback

MODELS = {"gpt2": gpt2, "vit": vit}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 3}
SETTINGS = {
    "accumulation, evaluation in between": {"gradient_accumulation_steps": 2, **EVALUATED},
    "checkpoints": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "bf16": {"bf16": True},
}
ENGINES = {
    "backprop": lambda: EngineCallback("backprop"),
    "link by link": lambda: EngineCallback("backprop", plain=False),
    "k = L": lambda: EngineCallback("highway_bp", iterations=3),
}


def losses(trainer):
    names = ("loss", "eval_loss")
    return torch.tensor([entry[name] for entry in trainer.state.log_history for name in names if name in entry])


def test_a_loss_on_what_hooks_keep_from_inside_blocks_needs_a_graph_that_is_retained(tmp_path):
    """The router loss of Mixtral: the error says so, and the documentation has the remedy."""
    with pytest.raises(gradfree.ChainError, match=r"retain_graph=True"):
        train(mixtral(), tmp_path, [ENGINES["k = L"]()])


def test_reentrant_checkpoints_are_refused_by_the_blocks_name(tmp_path):
    reentrant = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    if TorchVersion(version("transformers")) < "5.23":
        pytest.skip("checkpoints of older versions lie around the blocks, which splits the chain there")
    with pytest.raises(gradfree.ChainError, match=r"^transformer\.h\.0 has a checkpoint .* Use use_reentrant=False"):
        train(gpt2(), tmp_path, [ENGINES["k = L"]()], **reentrant)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "setting", "steps"), list(zip(cycle(MODELS), SETTINGS, (20, 15, 15))))
def test_many_steps_equal_training_without_an_engine(model, setting, steps, tmp_path):
    """Bitwise."""
    build, settings = MODELS[model], SETTINGS[setting]
    plain = train(build(), tmp_path, steps=steps, **settings)
    for name, make in ENGINES.items():
        callback = make()
        trainer = train(build(), tmp_path, [callback], steps=steps, **settings)
        assert not callback.handle.attached
        assert len(losses(trainer)) == len(losses(plain)) >= steps // 2
        assert torch.equal(losses(trainer), losses(plain)), name
        assert torch.equal(weights(trainer.model), weights(plain.model)), name


def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path):
    """With the engine's state: without the running mean the later steps would differ."""

    def callback():
        return EngineCallback("dsf", feedback="gate")

    whole = train(bert(), tmp_path, [callback()], save_strategy="steps", save_steps=3)
    checkpoint = tmp_path / "checkpoint-3"
    resumed = train(bert(), tmp_path, [callback()], resume=str(checkpoint))
    assert torch.equal(weights(resumed.model), weights(whole.model))
    state = checkpoint / "trainer_state.json"
    text = state.read_text()
    assert '"means: residual"' in text
    state.write_text(text.replace('"means: residual"', '"means: something else"'))
    forgotten = train(bert(), tmp_path, [callback()], resume=str(checkpoint))
    assert not torch.equal(weights(forgotten.model), weights(whole.model))


def test_the_engine_state_goes_on_with_its_model_and_not_with_another(tmp_path):
    def callback():
        return EngineCallback("dsf", feedback="gate")

    kept = callback()
    first, other = (weights(train(bert(), tmp_path, [kept]).model) for _ in range(2))
    assert torch.equal(other, first)
    going_on, anew = (
        train(train(bert(), tmp_path, [begun]).model, tmp_path, [then]).model
        for begun, then in ((kept, kept), (callback(), callback()))
    )
    assert not torch.equal(weights(going_on), weights(anew))


@pytest.mark.filterwarnings("ignore:.*has long memory")
def test_a_choice_is_in_checkpoints_and_a_resumed_training_times_nothing():
    def begun(saved):
        callback, state = EngineCallback("auto"), TrainerState(stateful_callbacks=saved)
        callback.on_train_begin(None, state, None, model=layer)
        return callback

    layer, x = torch.nn.GRU(3, 4), torch.randn(128, 1, 3)
    optimizer, first = torch.optim.SGD(layer.parameters(), 0.01), begun({})
    while first.handle.chosen is None:
        layer(x)[0].square().sum().backward()
        optimizer.step()
    saved = json.loads(json.dumps({"EngineCallback": first.state()}))
    kept = first.handle.state_dict()
    first.on_train_end(None, None, None)
    resumed = begun(saved)
    assert (resumed.handle.chosen, resumed.handle.times) == (first.handle.chosen, first.handle.times)
    assert resumed.handle.state_dict().keys() == kept.keys()
    resumed.on_train_end(None, None, None)


@pytest.mark.slow
def test_two_engines_on_separate_chains_have_separate_states(tmp_path):
    def callbacks():
        paths = (f"model.{part}.layers" for part in ("encoder", "decoder"))
        return [EngineCallback("dsf", chains=[path], feedback="gate") for path in paths]

    whole = train(bart(), tmp_path, callbacks(), save_strategy="steps", save_steps=3)
    resumed = train(bart(), tmp_path, callbacks(), resume=str(tmp_path / "checkpoint-3"))
    assert torch.equal(weights(resumed.model), weights(whole.model))
    assert len((tmp_path / "checkpoint-3" / "trainer_state.json").read_text().split('"means: residual"')) == 3
