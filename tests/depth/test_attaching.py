"""What a model may do around and inside its chains, and that the engine changes nothing but the gradients."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradfree
from gradfree.depth.recording import Recording
from gradfree.testing.cases.models import (
    Model,
    NormAndDropout,
    Plain,
    PostLN,
    assert_equal_gradients,
    gradients,
    plain_model,
)
from gradfree.torchside.graph import walk

EXACT = {
    "backprop": gradfree.create_engine("backprop", plain=False),
    "highway_bp": gradfree.create_engine("highway_bp", iterations=9),
    "fixed_point": gradfree.create_engine("fixed_point", iterations=9),
}


@pytest.fixture(params=EXACT)
def engine(request):
    """An engine that is exact on chains of up to 10 links."""
    return EXACT[request.param]


def assert_exact(engine, model, run, chains=None):
    """Assert that the engine's gradients of ``run`` are those of plain autograd with the same random numbers."""
    torch.manual_seed(1)
    expected = gradients(model, run)
    with engine.attach(model, chains):
        torch.manual_seed(1)
        assert_equal_gradients(gradients(model, run), expected)


def test_dropout_uses_the_masks_of_the_forward_pass_in_every_pull(engine):
    model, x = Model([NormAndDropout() for _ in range(4)]), torch.randn(8, 6)
    assert_exact(engine, model, lambda: model(x))


def test_batchnorm_statistics_are_updated_once(engine):
    model, x = Model([NormAndDropout() for _ in range(4)]), torch.randn(8, 6)
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    gradients(model, lambda: model(x))
    with engine.attach(other):
        torch.manual_seed(1)
        gradients(other, lambda: other(x))
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, other.get_buffer(name)), name
    assert other.blocks[0].norm.num_batches_tracked == 1


def test_parameters_tied_between_blocks_and_with_layers_outside(engine):
    model, x = plain_model(), torch.randn(4, 6)
    model.blocks[3].linear.weight = model.blocks[1].linear.weight
    model.blocks[4].linear.weight = model.stem.weight
    assert_exact(engine, model, lambda: model(x))


@pytest.mark.parametrize("frozen", [("stem",), ("blocks.2",), ("stem", "blocks.0", "blocks.1"), ("blocks",)])
def test_frozen_parameters_get_no_gradient_and_the_rest_is_exact(engine, frozen):
    model, x = plain_model(), torch.randn(4, 6)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    assert_exact(engine, model, lambda: model(x))


@pytest.mark.parametrize("before", [True, False])
def test_freezing_between_the_forward_and_the_backward_pass(engine, before):
    """As with the discriminator of a GAN, whose parameters need gradients in some passes only."""
    model, x = plain_model(), torch.randn(4, 6)

    def run():
        model.blocks[2].requires_grad_(before)
        out = model(x)
        model.blocks[2].requires_grad_(not before)
        return out

    assert_exact(engine, model, run)
    assert model.blocks[2].linear.weight.grad is None


def test_a_frozen_prefix_is_not_walked(engine):
    """What needs no gradient in plain PyTorch needs none here: no graph, no sweeps."""
    model, x = plain_model(), torch.randn(4, 6)
    for part in (model.stem, *model.blocks[:2]):
        part.requires_grad_(False)
    with engine.attach(model):
        assert [h.requires_grad for h in model.states(x)] == [False, False, True, True, True]


def test_inputs_that_are_the_same_for_every_block(engine):
    model, x = plain_model(), torch.randn(4, 6)
    mask = torch.randn(6) > 0
    assert_exact(engine, model, lambda: model(x, mask, identity=False))


def test_a_trained_input_of_every_block_gets_its_gradient(engine):
    model, x = plain_model(), torch.randn(4, 6)
    model.scale = nn.Parameter(torch.randn(6))
    assert_exact(engine, model, lambda: model(x, scale=model.scale * 2))
    assert model.scale.grad is not None


def test_the_initial_state_may_also_be_an_input_of_every_block(engine):
    model, x = plain_model(), torch.randn(4, 6)

    def run():
        h = h0 = model.stem(x)
        for block in model.blocks:
            h = block(h, h0)
        return h + h0

    assert_exact(engine, model, run)


def test_options_that_are_no_tensors_and_a_block_that_returns_its_input(engine):
    model, x = plain_model(), torch.randn(4, 6)

    def run():
        h = model.stem(x)
        for i, block in enumerate(model.blocks):
            h = block(h, identity=i == 2)
        return h

    assert_exact(engine, model, run)


def test_blocks_may_be_skipped(engine):
    model, x = plain_model(), torch.randn(4, 6)

    def run():
        h = model.stem(x)
        for i in (0, 1, 3):
            h = model.blocks[i](h)
        return h

    assert_exact(engine, model, run)


def test_a_block_that_ignores_or_detaches_its_input_cuts_the_chain_as_in_autograd(engine):
    class Detached(Plain):
        def forward(self, x):
            return super().forward(x.detach())

    model, x = Model([Plain(), Plain(), Detached(), Plain()]), torch.randn(4, 6)
    assert gradients(model, lambda: model(x))["blocks.1.linear.weight"] is None
    assert_exact(engine, model, lambda: model(x), ["blocks"])
    assert_exact(engine, model, lambda: model(x, taps=(0, 1, 2, 3)), ["blocks"])


def test_states_used_elsewhere_are_direct_cotangents(engine):
    """An auxiliary loss in the middle, a state handed to the caller, and a state used several times."""
    model, x = plain_model(), torch.randn(4, 6)

    def run():
        states = model.states(x)
        return states[1].exp().mean() + (states[2] * states[4]).sum() + states[2].pow(3).sum() * states[0].sum()

    assert_exact(engine, model, run)


def test_the_users_forward_hooks_tap_the_models_own_states(engine):
    """Registered before or after attaching, on outputs or inputs: gradients through the tap are exact."""
    model, x = plain_model(), torch.randn(4, 6)
    taps = []
    model.blocks[1].register_forward_hook(lambda module, args, out: taps.append(out))
    model.blocks[2].register_forward_pre_hook(lambda module, args: taps.append(args[0]))

    def run():
        taps.clear()
        return model(x) + sum(tap.pow(2).sum() for tap in taps)

    assert_exact(engine, model, run)
    with engine.attach(model):
        model.blocks[3].register_forward_hook(lambda module, args, out: taps.append(out))
        actual = gradients(model, run)
    assert_equal_gradients(actual, gradients(model, run))


def test_several_forward_passes_before_one_backward(engine):
    model, x, y = plain_model(), torch.randn(4, 6), torch.randn(3, 6)
    assert_exact(engine, model, lambda: torch.cat([model(x), model(y)]).exp())


def test_passes_that_run_in_lockstep(engine):
    model, x, y = plain_model(), torch.randn(4, 6), torch.randn(4, 6)

    def run():
        a, b = model.stem(x), model.stem(y)
        for block in model.blocks:
            a, b = block(a), block(b)
        return a * b

    assert_exact(engine, model, run)


def test_two_losses_of_one_pass_need_retain_graph_as_ever(engine):
    model, x = plain_model(), torch.randn(4, 6)

    def backward_twice(retain):
        model.zero_grad()
        states = model.states(x)
        states[1].pow(2).sum().backward(retain_graph=retain)
        states[4].pow(2).sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    expected = backward_twice(True)
    with engine.attach(model):
        assert_equal_gradients(backward_twice(True), expected)
        with pytest.raises(RuntimeError, match="second time"):
            backward_twice(False)


def test_a_backward_pass_knows_nothing_of_another_ones_cotangents(engine):
    """A pass that asks for gradients of the head alone collects nothing that a later pass would find."""
    model, x = plain_model(), torch.randn(4, 6)
    expected = gradients(model, lambda: model.states(x)[2])
    with engine.attach(model):
        states = model.states(x)
        with pytest.raises(gradfree.ChainError, match="for the gradient of a state"):
            torch.autograd.grad(states[4].sum(), states[1], retain_graph=True)
        model.zero_grad()
        states[2].pow(2).sum().backward()
    assert_equal_gradients({n: p.grad for n, p in model.named_parameters()}, expected)


def test_a_block_may_return_a_parameter_itself(engine):
    class Constant(Plain):
        def forward(self, x):
            return self.linear.weight

    model, x = Model([Plain(), Constant(), Plain()]), torch.randn(6, 6)
    assert_exact(engine, model, lambda: model(x), ["blocks"])
    assert_exact(engine, model, lambda: model(x, taps=(0, 1, 2)), ["blocks"])


class FromBytes(Plain):
    def forward(self, x):
        return super().forward(x.double() / 255)


@pytest.mark.parametrize(
    ("first", "dtype"), [(lambda: nn.Embedding(2, 6), torch.long), (FromBytes, torch.uint8), (FromBytes, torch.bool)]
)
def test_a_chain_may_begin_with_whole_numbers(engine, first, dtype):
    """Tokens and bytes need no gradient, but the blocks that they enter do."""
    model = nn.Sequential(nn.Sequential(first(), Plain(), Plain()), nn.Linear(6, 1))
    x = torch.randint(2, (4, 6)).to(dtype)
    assert_exact(engine, model, lambda: model(x), ["0"])
    assert all(p.grad.abs().max() > 0 for p in model[0][1].parameters())


def test_gradients_accumulate_over_micro_batches(engine):
    model, x = plain_model(), torch.randn(8, 6)
    expected = gradients(model, lambda: model(x))
    with engine.attach(model):
        model.zero_grad()
        for part in x.chunk(4):
            model(part).pow(2).sum().backward()
    assert_equal_gradients({n: p.grad for n, p in model.named_parameters()}, expected)


def test_hooks_on_parameters_run_once(engine):
    model, x = plain_model(), torch.randn(4, 6)
    model.blocks[2].linear.weight.register_hook(lambda grad: 3 * grad)
    calls = []
    model.blocks[1].linear.weight.register_post_accumulate_grad_hook(calls.append)
    assert_exact(engine, model, lambda: model(x))
    assert len(calls) == 2


def test_hooks_on_parameters_do_not_run_where_there_is_no_gradient(engine):
    """A skipped block's parameters, clipped by hooks that cannot take ``None``; the hooks stay as they are."""
    model, x = plain_model(), torch.randn(4, 6)
    skipped, tied = model.blocks[4].linear.weight, model.blocks[3].linear.bias
    hooks = [p.register_hook(lambda grad: grad.clamp(-0.1, 0.1)) for p in model.parameters()]
    before = dict(skipped._backward_hooks)

    def run():
        h = model.stem(x)
        for block in model.blocks[:3]:
            h = block(h)
        return h + tied  # Behind the chain, by another way.

    assert_exact(engine, model, run)
    assert skipped.grad is None
    assert tied.grad is not None
    assert dict(skipped._backward_hooks) == before
    for hook in hooks:
        hook.remove()
    assert not skipped._backward_hooks


def test_checkpointing_inside_a_block(engine):
    class Checkpointed(Plain):
        def forward(self, x):
            return x + checkpoint(lambda h: torch.tanh(self.linear(h)), x, use_reentrant=False)

    model, x = Model([Checkpointed() for _ in range(3)]), torch.randn(4, 6)
    assert_exact(engine, model, lambda: model(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(engine, dtype):
    """The gradients of an autocast pass agree with autograd's own to the precision of the low dtype."""
    model, x = plain_model().float(), torch.randn(16, 6, dtype=torch.float32)

    def run():
        with torch.autocast("cpu", dtype):
            return model(x).float()

    expected = gradients(model, run)
    with engine.attach(model):
        actual = gradients(model, run)
    assert {g.dtype for g in actual.values() if g is not None} == {torch.float32}
    assert_equal_gradients(actual, expected, tolerance=0.02)


def test_nothing_is_recorded_without_gradients():
    model, x = plain_model(), torch.randn(4, 6)
    with EXACT["highway_bp"].attach(model):
        with torch.no_grad():
            assert not model(x).requires_grad
        with torch.inference_mode():
            assert model(x).is_inference()


@pytest.mark.parametrize("backward", [True, False])
def test_a_pass_is_freed_with_its_last_tensor(backward, monkeypatch):
    """No reference cycle through autograd's C++ nodes, which Python's collector could not see."""
    seen = []
    create = Recording.__init__

    def remember(self, *args):
        create(self, *args)
        seen.append(weakref.ref(self))

    monkeypatch.setattr(Recording, "__init__", remember)
    model, x = plain_model(), torch.randn(4, 6)
    gc.collect()
    gc.disable()
    try:
        with EXACT["highway_bp"].attach(model):
            out = model(x).sum()
            assert seen[0]() is not None
            if backward:
                out.backward()
            del out
            assert seen[0]() is None
    finally:
        gc.enable()


def test_a_step_leaves_no_tensor_to_the_garbage_collector(engine):
    """On a GPU such tensors would hold memory until Python happens to collect."""
    model, x = Model([PostLN(6) for _ in range(4)]), torch.randn(4, 6)
    with engine.attach(model):
        model(x).sum().backward()
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            model(x).sum().backward()
            gc.collect()
            assert not [thing for thing in gc.garbage if isinstance(thing, torch.Tensor)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()


def test_states_are_freed_after_backward_while_the_loss_lives():
    model, x = plain_model(), torch.randn(4, 6)
    with EXACT["highway_bp"].attach(model):
        states = model.states(x)
        loss = states[-1].sum()
        storages = [state.data_ptr() for state in states]
        assert len(set(storages)) == 5
        loss.backward()
        (start,) = {n for n in walk([loss]).nodes if hasattr(n, "recording") and not hasattr(n, "index")}
        assert start.recording.links == []


def test_attach_and_detach_leave_no_trace(engine):
    model = plain_model()
    before = {path: {k: repr(v) for k, v in vars(m).items()} for path, m in model.named_modules()}
    keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    handle = engine.attach(model)
    assert list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] == classes
    handle.detach()
    handle.detach()
    assert {path: {k: repr(v) for k, v in vars(m).items()} for path, m in model.named_modules()} == before


def test_a_pass_recorded_before_detach_keeps_the_engine():
    model, x = plain_model(), torch.randn(4, 6)
    with gradfree.create_engine("truncated", window=1).attach(model):
        expected = gradients(model, lambda: model(x))
        model.zero_grad()
        loss = model(x).pow(2).sum()
    loss.backward()
    assert_equal_gradients({n: p.grad for n, p in model.named_parameters()}, expected)


def test_a_deep_copy_of_an_attached_model_has_the_engine_and_weights_of_its_own():
    model, x = plain_model(), torch.randn(4, 6)
    engine = gradfree.create_engine("truncated", window=1)
    with engine.attach(model):
        approximate = gradients(model, lambda: model(x))
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert_equal_gradients(gradients(other, lambda: other(x)), approximate)
    assert_equal_gradients(gradients(other, lambda: other(x)), approximate)


def test_an_exception_in_a_block_leaves_the_next_pass_whole(engine):
    class Fragile(Plain):
        fail = False

        def forward(self, x):
            if self.fail:
                raise ArithmeticError("on purpose")
            return super().forward(x)

    model, x = Model([Fragile() for _ in range(3)]), torch.randn(4, 6)
    expected = gradients(model, lambda: model(x))
    with engine.attach(model):
        model.blocks[1].fail = True
        with pytest.raises(ArithmeticError):
            model(x)
        model.blocks[1].fail = False
        copy.deepcopy(model)
        assert_equal_gradients(gradients(model, lambda: model(x)), expected)


def hooked(model):
    return [
        path for path, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m)
    ]


@pytest.mark.parametrize("plain", [None, True])
@pytest.mark.parametrize("chains", [None, ["blocks"]])
def test_backprop_leaves_chains_in_depth_to_autograd(plain, chains):
    """Nothing is put on the model, so nothing is refused: here blocks with backward hooks, and one used twice."""
    model = plain_model()
    model.blocks[1].register_full_backward_hook(lambda *_: None)
    model.blocks.append(model.blocks[0])
    engine = gradfree.create_engine("backprop", plain=plain)
    report = engine.validate(model, chains)
    assert str(report) == "note: nothing is attached: autograd computes all gradients"
    with engine.attach(model, chains) as handle:
        assert not hooked(model)
        assert not handle.chains
    for other in (nn.Linear(3, 3), nn.ModuleList([plain_model(), plain_model()])):
        engine.attach(other).detach()


@pytest.mark.parametrize("make", [plain_model, lambda: nn.GRU(3, 4), lambda: gradfree.CellLayer(nn.GRUCell(3, 4))])
def test_backprop_leaves_nothing_to_an_engine_that_is_there_already(make):
    """With one on the model, autograd would not compute the gradients."""
    model, plain = nn.ModuleDict({"net": make()}), gradfree.create_engine("backprop", plain=True)
    with gradfree.create_engine("truncated", window=1).attach(model):
        report = plain.validate(model)
        assert "has an engine attached already: call detach()" in str(report)
        assert "nothing is attached" not in str(report)
        with pytest.raises(gradfree.ChainError, match="attached already"):
            plain.attach(model)
    assert plain.validate(model).ok


def test_what_is_compiled_stays_where_nothing_is_attached(monkeypatch):
    """Only a chain with hooks makes what was compiled wrong."""
    import torch._dynamo

    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(True))
    gradfree.create_engine("backprop").attach(plain_model()).detach()
    assert not resets
    EXACT["backprop"].attach(plain_model()).detach()
    assert resets


def test_backprop_takes_the_recurrent_layers_beside_a_chain_in_depth():
    model = nn.ModuleDict({"net": plain_model(), "rnn": nn.GRU(3, 4)})
    engine = gradfree.create_engine("backprop")
    for chains in (None, ["net.blocks", "rnn"]):
        assert str(engine.validate(model, chains)) == "chain 'rnn': GRU, 1 layer, in time"
        with engine.attach(model, chains):
            assert hooked(model) == ["rnn"]
    with gradfree.create_engine("backprop", plain=False).attach(model, ["net.blocks", "rnn"]) as handle:
        assert list(handle.chains) == ["net.blocks", "rnn"]


def test_backprop_refuses_what_it_would_do_nothing_about():
    model, engine = plain_model(), gradfree.create_engine("backprop")
    with pytest.raises(gradfree.ChainError, match=r"no module 'block'\. Did you mean 'blocks'"):
        engine.attach(model, ["block"])
    with pytest.raises(gradfree.ChainError, match="lean=True is for recurrent layers, of which there are none"):
        engine.attach(model, lean=True)
    for chains in (None, ["blocks"]):
        with (
            EXACT["highway_bp"].attach(model),
            pytest.raises(gradfree.ChainError, match=r"blocks\.0 has an engine att"),
        ):
            engine.attach(model, chains)
    with pytest.raises(TypeError, match="plain must be None, True or False, not 0"):
        gradfree.create_engine("backprop", plain=0)
