"""A step of every engine on every chain stays on the model's device: found on a machine that has but one, the CPU.

The models are on the meta device. A watcher takes every operation that mixes it with the CPU, as a GPU would refuse to,
for a failure, and every copy between the two that the CPU would wait for; to read a number fails by itself.
"""

import re
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import ClassVar
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradfree
from gradfree.devices.device import mark, seconds
from gradfree.testing import FEATURES
from gradfree.testing.cases.cases import CASES, LAYERS, STANDING_FOR, Specimen
from gradfree.trial.intact import left_intact

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
    """Meta tensors know neither autocast nor pinned memory, and have no numbers to look at when an engine attaches."""
    monkeypatch.setattr("gradfree.devices.device.keeps_pinned", lambda device: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
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
    if not engine.validate(Specimen(case).model, [case.chain]).ok:
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


class NoDoubles(TorchDispatchMode):
    """Refuses float64, as devices do that have none."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(t.dtype is torch.float64 for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            raise TypeError("this device has no float64")
        return out


def test_a_device_without_float64_can_be_tried_and_judged():
    torch.set_default_dtype(torch.float32)
    model, engine = gradfree.create_model("residual_mlp", in_features=6, num_classes=3), ENGINES["highway_bp"]
    x, target = torch.randn(4, 6), torch.randn(4, 3)

    def cosine():
        return gradfree.gradient_fidelity(engine, model, nn.functional.mse_loss, (x, target)).total.cosine

    with NoDoubles():
        report, found = engine.validate(model, batch=x), cosine()
    assert report.ok
    assert found == pytest.approx(cosine(), abs=1e-4)


def test_trying_on_a_device_without_random_numbers_draws_none_on_the_cpu():
    before = torch.get_rng_state()
    with left_intact(nn.Linear(2, 2, device="meta"), []):
        torch.rand(3, device="cpu")
    assert torch.equal(torch.get_rng_state(), before)


class Watched(torch.autograd.Function):
    """Notes in the backward pass whether TF32 is allowed."""

    allowed: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        Watched.allowed.append(torch.backends.cudnn.allow_tf32)
        return g


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + Watched.apply(self.linear(x))


def test_tf32_is_off_in_a_step_in_which_an_engines_gradients_are_compared():
    model = nn.Sequential(Block(), Block())
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True), ENGINES["highway_bp"].attach(model) as handle:
        for compares in (True, False):
            Watched.allowed.clear()
            handle.compare(compares)
            model(torch.randn(3, 4)).sum().backward()
            assert set(Watched.allowed) == {not compares}


@pytest.mark.usefixtures("_a_device_like_any_other")
def test_a_model_that_is_moved_between_two_backward_passes_keeps_its_temperature_on_one_device():
    model = nn.Sequential(nn.Linear(6, 6, device="cpu"), nn.Tanh(), nn.Linear(6, 3, device="cpu"))
    gradfree.orthogonalize(model)
    engine = gradfree.create_engine("foton", temperature="learnt", orthogonalize_every=100)
    watcher = Watcher()
    with engine.attach(model):
        model(torch.randn(4, 6, device="cpu")).sum().backward()
        model.to("meta")
        with watcher:
            model(torch.randn(4, 6, device="meta")).sum().backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
            model(torch.randn(4, 6, device="meta")).sum().backward()


def test_time_on_a_device_without_events_is_taken_behind_its_work(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    monkeypatch.setattr(torch, "Event", Mock(side_effect=RuntimeError("no events")))
    there = torch.device("xpu")
    start = mark(there)
    waited.clear()
    assert seconds(start, mark(there)) >= 0.0
    assert waited == [there]


def test_tf32_is_off_while_gradients_are_compared_and_the_users_own_behind():
    allowed: ClassVar[list[bool]] = []
    model, batch = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)), (torch.randn(4, 6), torch.randn(4, 3))
    # One backend's settings stand for all.
    model.register_forward_hook(lambda *_: allowed.append(torch.backends.cudnn.allow_tf32))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        gradfree.gradient_fidelity(ENGINES["fa"], model, nn.functional.mse_loss, batch)
        assert torch.backends.cudnn.allow_tf32
    assert allowed
    assert not any(allowed)


def test_devices_have_their_names_in_one_file():
    """Triton's kernels are for some devices by their nature; on which they run is asked like everything else."""
    root = Path(gradfree.__file__).parent
    names = re.compile(r"\b(torch\.|is_)?(cuda|mps|xpu|hip|mtia)\b", re.IGNORECASE)
    folders = [root, *(Path(import_module(f"gradfree.{room}").__file__).parent for room in ("algorithms", "models"))]
    files = {file for folder in folders for file in folder.rglob("*.py") if "benchmarks" not in file.parts}
    naming = {file.name for file in files if names.search(file.read_text(encoding="utf-8"))}
    assert naming == {"device.py", "triton_scan.py"}


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
