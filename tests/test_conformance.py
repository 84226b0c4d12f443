"""What every registered engine keeps to, other packages' included, with default options where these attach it."""

import copy
import pickle

import pytest
import torch
from chains import BLOCKS, Model, assert_equal_gradients, gradients, layered_model, plain_model
from torch.utils._python_dispatch import TorchDispatchMode

import gradfree

# By default `backprop` has nothing to attach to these models.
OPTIONS = {"backprop": {"plain": False}}


@pytest.fixture(params=gradfree.list_engines())
def engine(request):
    return gradfree.create_engine(request.param, **OPTIONS.get(request.param, {}))


@pytest.fixture(params=[*BLOCKS, "layers"])
def model_and_input(request, engine):
    """A model of each kind that the engine takes; of some kind it must take one."""
    if request.param == "layers":
        model, x = layered_model(), torch.randn(4, 6)
    else:
        make, shape = BLOCKS[request.param]
        model, x = Model([make() for _ in range(4)], shape[-1]), torch.randn(shape)
    if not engine.validate(model).ok:
        pytest.skip("not a chain for this engine")
    return model, x


@pytest.fixture
def model(engine):
    """The first kind of model that the engine takes; its input is (N, 6)."""
    return next(model for model in (plain_model(), layered_model()) if engine.validate(model).ok)


def test_outputs_are_bitwise_those_of_the_model_alone(engine, model_and_input):
    model, x = model_and_input
    expected = model(x)
    with engine.attach(model):
        assert torch.equal(model(x), expected)


def test_the_same_parameters_get_a_gradient_as_from_backprop(engine, model_and_input):
    """DDP waits for all of them, and an optimizer skips those without."""
    model, x = model_and_input
    for taps in ((-1,), (0,), (0, 2)) if isinstance(model, Model) else ((-1,),):
        expected = gradients(model, lambda taps=taps: model(x, taps=taps))
        with engine.attach(model):
            actual = gradients(model, lambda taps=taps: model(x, taps=taps))
        assert [g is None for g in actual.values()] == [g is None for g in expected.values()]


@pytest.mark.parametrize("scale", [1e-4, 65536.0])
def test_gradients_are_linear_in_the_loss(engine, model_and_input, scale):
    """Loss scaling and accumulation rely on it: grads(s·loss)/s = grads(loss)."""
    model, x = model_and_input

    def scaled(s):
        model.zero_grad()
        (s * model(x).pow(2).sum()).backward()
        return {name: None if p.grad is None else p.grad / s for name, p in model.named_parameters()}

    with engine.attach(model):
        assert_equal_gradients(scaled(scale), scaled(1.0), tolerance=1e-12)


def test_the_same_pass_twice_gives_the_same_gradients_and_they_accumulate(engine, model_and_input):
    model, x = model_and_input
    with engine.attach(model):
        once = gradients(model, lambda: model(x))
        once = {name: None if g is None else g.clone() for name, g in once.items()}
        model(x).pow(2).sum().backward()
    twice = {name: None if p.grad is None else p.grad / 2 for name, p in model.named_parameters()}
    assert_equal_gradients(twice, once, tolerance=1e-14)


def test_micro_batches_sum_to_the_batch(engine, model):
    x = torch.randn(8, 6)
    with engine.attach(model):
        expected = gradients(model, lambda: model(x))
        expected = {name: None if g is None else g.clone() for name, g in expected.items()}
        model.zero_grad()
        for part in x.chunk(4):
            model(part).pow(2).sum().backward()
    assert_equal_gradients({n: p.grad for n, p in model.named_parameters()}, expected)


def test_eval_mode_trains_too(engine, model_and_input):
    model, x = model_and_input
    model.eval()
    expected = model(x)
    with engine.attach(model):
        actual = gradients(model, lambda: model(x))
        assert torch.equal(model(x), expected)
    assert all(g.isfinite().all() for g in actual.values() if g is not None)


def test_validate_changes_nothing_and_reports_the_chain(engine, model):
    before = copy.deepcopy(model.state_dict())
    report = engine.validate(model)
    assert report.ok
    assert list(report.chains["blocks"].blocks) == [f"blocks.{i}" for i in range(5)]
    assert str(report).splitlines()[0] in (
        "chain 'blocks': 5 blocks",
        "chain 'blocks': 5 layers, 3 of them with weights",
    )
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_step_never_waits_for_the_device(engine, model):
    """No .item() or other host sync: each would stall a GPU's queue."""

    class NoSync(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func not in {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}, func
            return func(*args, **(kwargs or {}))

    x = torch.randn(4, 6)
    with engine.attach(model), NoSync():
        model(x).sum().backward()


def test_the_class_is_at_hand_in_gradfree_algorithms():
    engine = gradfree.create_engine("highway_bp", iterations=4)
    assert gradfree.algorithms.HighwayBP(iterations=4) == engine
    with pytest.raises(AttributeError, match="module 'gradfree' has no attribute 'algorithm'"):
        gradfree.algorithm  # noqa: B018


def test_engines_are_values(engine):
    """Equal options, equal engines; they pickle, print their options and cannot be changed."""
    assert pickle.loads(pickle.dumps(engine)) == copy.deepcopy(engine) == engine
    assert repr(engine).startswith(type(engine).__name__ + "(")
    with pytest.raises(AttributeError):
        engine.iterations = 3


def test_one_engine_may_be_attached_to_several_models(engine, model):
    a, b, x = model, copy.deepcopy(model), torch.randn(4, 6)
    with engine.attach(a):
        expected = gradients(a, lambda: a(x))
    with engine.attach(b), engine.attach(a):
        gradients(b, lambda: b(x))
        assert_equal_gradients(gradients(a, lambda: a(x)), expected, tolerance=0.0)
