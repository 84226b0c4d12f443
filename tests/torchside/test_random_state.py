"""Random states are saved and restored, on devices with and without a random generator."""

import torch

from gradfree.torchside.random_state import RandomState, torch_states_kept


def test_a_state_is_restored_on_the_device_and_on_the_cpu(device):
    state = RandomState.of(torch.device(device))
    assert not state.moved
    drawn = [torch.rand(3, device=where) for where in (device, "cpu")]
    assert state.moved
    with state.restored():
        again = [torch.rand(3, device=where) for where in (device, "cpu")]
        assert all(map(torch.equal, again, drawn))
    after = [torch.rand(3, device=where) for where in (device, "cpu")]
    assert not any(map(torch.equal, after, drawn))


def test_a_device_without_a_random_state_restores_only_the_cpu():
    state = RandomState.of(torch.device("meta"))
    with torch_states_kept([torch.device("meta"), torch.device("cpu")]):
        torch.rand(3, device="cpu")
        assert state.moved
    assert not state.moved
