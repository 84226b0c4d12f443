"""Properties of the pretended device that other tests rely on."""

import pretend_device
import pytest
import torch
from torch import nn

from gradfree.devices.hardware import start_copy_to_cpu


@pytest.fixture(autouse=True)
def _here(device):
    if device != pretend_device.NAME:
        pytest.skip("this is about --device pretend")


WAITS = {
    "item": (lambda x: x.sum().item(), 1),
    "bool": (lambda x: bool(x.sum() > 0), 1),
    "cpu": (lambda x: x.cpu(), 1),
    "cpu, late": (lambda x: x.to("cpu", non_blocking=True), 0),
    "a mask": (lambda x: x[x > 0], 1),
    "synchronize": (lambda x: torch.accelerator.synchronize(), 1),
    "no number is read": (lambda x: torch.where(x > 0, x, 0.0).softmax(0).cumsum(0)[1:], 0),
    "backward": (lambda x: nn.Linear(3, 3)(x).sum().backward(), 0),
}


@pytest.mark.parametrize("how", WAITS)
def test_waits_of_the_host_are_counted(how):
    work, expected = WAITS[how]
    x = torch.randn(3)
    before = pretend_device.waits()
    work(x)
    assert pretend_device.waits() - before == expected


def test_the_library_waits_for_the_copies_that_it_reads():
    """Non-blocking copies arrive when the host waits next, not before."""
    pretend_device.make_copies_late(True)
    try:
        assert start_copy_to_cpu(torch.ones(2))().tolist() == [1.0, 1.0]
    finally:
        pretend_device.make_copies_late(False)
