"""A step of every engine on every chain stays on the model's device: found on a machine that has but one, the CPU.

The models are on the meta device. A watcher takes every operation that mixes it with the CPU, as a GPU would refuse to,
for a failure, and every copy between the two that the CPU would wait for; to read a number fails by itself.
"""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradfree
from gradfree.testing import FEATURES
from gradfree.testing.cases.cases import CASES, LAYERS, STANDING_FOR, Specimen

ENGINES = {name: gradfree.create_engine(name) for name in gradfree.list_engines()}
BASIC = "forward and backward pass"


class Watcher(TorchDispatchMode):
    """Refuses what a GPU refuses and, from the second step on, what the CPU may have to wait for."""

    may_wait = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        # Torch has the sizes of packed sequences on the CPU, always.
        if func is torch.ops.aten._pack_padded_sequence.default:
            return out
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        # Single numbers on the CPU are handed over with the operation.
        devices = {t.device.type for t in given if t.dim() or t.is_meta}
        made = {t.device.type for t in tree_leaves(out) if isinstance(t, torch.Tensor)}
        assert len(devices) <= 1, f"{func} mixes devices"
        waits = not (self.may_wait or kwargs.get("non_blocking") or made <= devices)
        assert not (devices and waits), f"{func} copies from {devices} to {made}"
        return out


@pytest.fixture
def _a_device_like_any_other(monkeypatch):
    """Meta tensors know neither autocast nor random states, and have no numbers to look at when an engine attaches."""
    states = SimpleNamespace(get_rng_state=lambda device: torch.zeros(1), set_rng_state=lambda state, device: None)
    monkeypatch.setattr(torch, "meta", states, raising=False)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())
    monkeypatch.setattr("gradfree.orthogonal.isometry.drift", lambda weights: [0.0])
    # Once, in the first step.
    monkeypatch.setattr(
        "gradfree.depth.jacobians._looked_at", lambda answers: [not a.is_meta and bool(a) for a in answers]
    )
    monkeypatch.setattr("gradfree.time.unrolled_chain._close", lambda again, state, within: True)


@pytest.mark.usefixtures("_a_device_like_any_other")
@pytest.mark.parametrize(
    "case",
    [case if case in STANDING_FOR.values() else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("name", ENGINES)
def test_a_step_stays_on_the_models_device(name, case, device):
    if device != "cpu":
        pytest.skip("the meta device is compared with the CPU")
    if "packed" in case.name:
        pytest.skip("pad_packed_sequence reads the order back; the test below goes without")
    if case.family == LAYERS and "dropout" in case.name:
        pytest.skip("engines in layers take a state on the meta device for one that was not stored, without its mask")
    engine = ENGINES[name]
    if not engine.examine(Specimen(case).model, [case.chain]).ok:
        pytest.skip("the engine refuses the chain")
    specimen, watcher = Specimen(replace(case, device="meta")), Watcher()
    try:
        with engine.attach(specimen.model, specimen.chains):
            for _ in range(2):
                with watcher:
                    found = specimen.gradients()
                watcher.may_wait = False
    except Exception:
        if FEATURES[BASIC].refusal(engine, case) is None:
            raise
        pytest.skip("the engine refuses the chain")
    assert {g.device.type for g in found.values() if g is not None} == {"meta"}


@pytest.mark.usefixtures("_a_device_like_any_other")
@pytest.mark.parametrize("name", ["backprop", "deeppcr", "dsf", "fixed_point", "highway_bp", "truncated"])
def test_packed_sequences_stay_on_the_models_device(name):
    """But for their sizes, from which the places of the rows are computed and sent, without waiting for it."""
    module, x, watcher = nn.GRU(6, 4, device="meta"), torch.randn(5, 3, 6, device="meta"), Watcher()
    watcher.may_wait = False
    with ENGINES[name].attach(module), watcher:
        out, _ = module(pack_padded_sequence(x, torch.tensor([5, 3, 2], device="cpu")))
        out.data.sum().backward()
    assert module.weight_hh_l0.grad.is_meta


@pytest.mark.parametrize(("given", "message"), [("abacus", "Expected one of cpu, cuda"), ("cuda:99", "")])
def test_a_device_that_is_not_there_is_refused_in_a_line(given, message, pytester):
    pytester.makepyfile("def test_none():\n    raise RuntimeError\n")
    done = pytester.runpytest_inprocess("-q", "-p", "gradfree.testing.device", "--device", given)
    (line,) = filter(None, done.errlines)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert line.startswith(f"ERROR: --device {given} is not there: {message}")


@pytest.mark.slow
@pytest.mark.parametrize(("options", "device"), [(["--device", "meta"], "meta"), ([], "cpu")])
def test_models_and_batches_of_other_peoples_engines_go_to_the_device(options, device, pytester):
    """A conformance test that tells where its model is, in a package of its own."""
    pytester.makeconftest('pytest_plugins = ["gradfree.testing.device"]\n')
    pytester.makepyfile(
        "import gradfree\n"
        "from gradfree.testing import EngineConformance, Feature\n"
        "from gradfree.testing.cases.cases import Specimen\n\n\n"
        "def tell(engine, case):\n"
        "    specimen = Specimen(case)\n"
        "    print(f'on {case.device}: {specimen.x.device} {next(specimen.model.parameters()).device}')\n\n\n"
        "class TestMine(EngineConformance):\n"
        "    engines = (gradfree.create_engine('backprop'),)\n"
        "    features = (Feature('tell', tell),)\n"
    )
    done = pytester.runpytest_inprocess("-q", "-s", "-k", "tell", *options)
    assert f"on {device}: {device} {device}" in done.outlines
