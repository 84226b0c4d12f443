"""Two layers of snnTorch's Leaky neurons: the loop of its tutorials, and ``gradfree.scan`` with compiled chunks."""

from __future__ import annotations

from typing import Any

import snntorch
import torch
from comparing import Case, Training, compare
from torch import Tensor, nn

import gradfree

LINE = "gradfree.scan(step, (mem1, mem2), x, engine='backprop', compile=True)"
CASES = (
    Case("Leaky, 128 units, 32 sequences of 100 steps", LINE, 200, {"units": 128, "batch": 32, "length": 100}),
    Case("Leaky, 64 units, one sequence of 1000 steps", LINE, 60, {"units": 64, "batch": 1, "length": 1000}),
)


class Net(nn.Module):
    """Linear layers and neurons; returns the spikes of all steps, (T, B, 10)."""

    def __init__(self, units: int, with_line: bool):
        super().__init__()
        self.first, self.second = nn.Linear(40, units), nn.Linear(units, 10)
        self.neurons, self.output = snntorch.Leaky(beta=0.9), snntorch.Leaky(beta=0.9)
        self.with_line = with_line

    def step(self, mems: tuple[Tensor, Tensor], x: Tensor) -> Any:
        """Run one step."""
        spikes, mem1 = self.neurons(self.first(x), mems[0])
        spikes, mem2 = self.output(self.second(spikes), mems[1])
        return (mem1, mem2), spikes

    def forward(self, x: Tensor) -> Tensor:
        """Run all steps of (T, B, 40)."""
        mems = (x.new_zeros(x.shape[1], self.first.out_features), x.new_zeros(x.shape[1], 10))
        if self.with_line:
            return gradfree.scan(self.step, mems, x, engine="backprop", compile=True)[1]
        outputs = []
        for each in x:
            mems, spikes = self.step(mems, each)
            outputs.append(spikes)
        return torch.stack(outputs)


def prepare(with_line: bool, steps: int, units: int, batch: int, length: int) -> Training:
    """Return a function that trains on spikes at random; the first step compiles."""
    net = Net(units, with_line)
    batches, targets = (torch.rand(steps, length, batch, 40) < 0.1).float(), torch.randint(0, 10, (steps, batch))
    net(batches[0]).sum().backward()
    net.zero_grad(set_to_none=True)

    def train() -> None:
        optimizer = torch.optim.Adam(net.parameters(), 1e-3)
        for x, target in zip(batches, targets, strict=True):
            loss = nn.functional.cross_entropy(net(x).sum(0), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return train


if __name__ == "__main__":
    compare("snntorch", CASES, prepare)
