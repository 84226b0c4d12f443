"""The device of these tests is one: what a test that runs on it may rely on."""

import signal
import subprocess
import sys
import textwrap

import pretend_device
import pytest
import torch
from places import ROOT
from torch import nn

from gradfree.devices.device import fetched


@pytest.fixture(autouse=True)
def _here(device):
    if device != pretend_device.NAME:
        pytest.skip("this is about --device pretend")


@pytest.fixture
def late_copies():
    pretend_device.make_copies_late(True)
    yield
    pretend_device.make_copies_late(False)


MIXED = {
    "sum": lambda x, y: x + y,
    "product": lambda x, y: x @ y,
    "list": lambda x, y: torch.cat([x, y]),
    "scalar in a list": lambda x, y: torch.stack([x[0, 0], y[0, 0]]),
    "in place": lambda x, y: x.add_(y),
    "layer": lambda x, y: nn.functional.linear(x, y),
    "convolution": lambda x, y: nn.functional.conv1d(x[None], y[None]),
    "memory": lambda x, y: x.set_(y.untyped_storage()),
}


@pytest.mark.parametrize("how", MIXED)
def test_mixing_it_with_the_cpu_is_refused(how):
    with pytest.raises(RuntimeError, match="device"):
        MIXED[how](torch.ones(3, 3), torch.ones(3, 3, device="cpu"))


def test_a_single_number_of_the_cpu_may_be_handed_over():
    assert (torch.ones(3) * torch.tensor(2.0, device="cpu")).tolist() == [2.0] * 3


WAITS = {
    "item": (lambda x: x.sum().item(), 1),
    "bool": (lambda x: bool(x.sum() > 0), 1),
    "cpu": (lambda x: x.cpu(), 1),
    "cpu, late": (lambda x: x.to("cpu", non_blocking=True), 0),
    "to the device": (lambda x: torch.ones(3, device="cpu").to(x.device), 1),
    "to the device, late": (lambda x: torch.ones(3, device="cpu").to(x.device, non_blocking=True), 0),
    "a shape that numbers decide": (lambda x: x.nonzero(), 1),
    "a mask": (lambda x: x[x > 0], 1),
    "what a mask is set to": (lambda x: x.masked_fill(x > 0, 1.0).index_put_((x > 0,), torch.ones(1)), 1),
    "a list of places": (lambda x: x[[0, 2]], 1),
    "synchronize": (lambda x: torch.accelerator.synchronize(), 1),
    "no number is looked at": (lambda x: torch.where(x > 0, x, 0.0).softmax(0).cumsum(0)[1:], 0),
    "backward": (lambda x: nn.Linear(3, 3)(x).sum().backward(), 0),
}


@pytest.mark.parametrize("how", WAITS)
def test_waits_of_the_host_are_counted(how):
    work, expected = WAITS[how]
    x = torch.randn(3)
    before = pretend_device.waits()
    work(x)
    assert pretend_device.waits() - before == expected


def test_random_numbers_are_its_own():
    drawn = []
    for device in ("cpu", "pretend"):
        torch.manual_seed(3)
        alone = torch.rand(4, device=device).tolist()
        torch.manual_seed(3)
        torch.rand(4, device="pretend" if device == "cpu" else "cpu")
        assert torch.rand(4, device=device).tolist() == alone
        drawn.append(alone)
    assert drawn[0] != drawn[1]
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(4, generator=torch.Generator("cpu"))


def test_a_generators_state_can_be_kept():
    generator = torch.Generator("pretend").manual_seed(1)
    state = generator.get_state()
    assert torch.equal(torch.rand(3, generator=generator), torch.rand(3, generator=generator.set_state(state)))


@pytest.mark.parametrize("made", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrent_layers_are_those_of_the_cpu(made):
    layer, x = made(3, 4, 2, bidirectional=True), torch.randn(5, 2, 3, requires_grad=True)
    weights = [*layer.parameters(), x]
    found = [g.cpu() for g in torch.autograd.grad(layer(x)[0].square().sum(), weights)]
    layer, x = layer.cpu(), x.cpu().detach().requires_grad_()
    expected = torch.autograd.grad(layer(x)[0].square().sum(), [*layer.parameters(), x])
    torch.testing.assert_close(found, list(expected))


@pytest.mark.parametrize(("made", "shape"), [(nn.Conv1d, (2, 4, 6)), (nn.ConvTranspose2d, (2, 4, 5, 5))])
def test_convolutions_are_those_of_the_cpu(made, shape):
    layer, x = made(4, 6, 3, groups=2), torch.randn(shape)
    found = [g.cpu() for g in torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))]
    layer, x = layer.cpu(), x.cpu()
    expected = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    torch.testing.assert_close(found, list(expected))


@pytest.mark.usefixtures("late_copies")
def test_late_copies_arrive_when_the_host_waits():
    host = torch.zeros(2, device="cpu")
    host.copy_(torch.ones(2), non_blocking=True)
    event = torch.Event("pretend")
    event.record(torch.accelerator.current_stream())
    assert host.tolist() == [0.0, 0.0]
    assert not event.query()
    event.synchronize()
    assert host.tolist() == [1.0, 1.0]
    assert event.query()


@pytest.mark.usefixtures("late_copies")
def test_what_the_library_fetches_is_waited_for():
    wait = fetched(torch.ones(2))
    assert wait().tolist() == [1.0, 1.0]


def test_the_cpu_cannot_read_its_memory():
    """Whoever does ends, in a process of its own."""
    program = """
        import ctypes, sys
        sys.path.insert(0, "tests/support")
        import pretend_device
        pretend_device.register()
        import torch
        ctypes.string_at(torch.ones(3, device="pretend").data_ptr(), 4)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, check=False)
    assert done.returncode in (-signal.SIGSEGV, -signal.SIGBUS)
