"""One of two ranks; runs each program that is refused across ranks and writes the message."""

import os
import sys
from contextlib import nullcontext
from datetime import timedelta

import torch
from rank_processes import leave
from torch import distributed, nn

import gradfree
from gradfree.errors import ChainError
from gradfree.testing.cases.models import Plain

RANK = int(os.environ.get("RANK", "0"))
# If one rank refuses the program, the other one waits this long.
TIMEOUT = timedelta(seconds=1)


class Net(nn.Module):
    """Four blocks, two on each rank; subclasses define what the model does with them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Plain() for _ in range(4)])
        self.head = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.head(self.states(self.stem(x))[-1])

    def states(self, x):
        found = [x]
        for block in self.blocks:
            found.append(block(found[-1]))
        return found[1:]


class Between(Net):
    def states(self, x):
        first, second, third, last = self.blocks
        return [last(third(1.0 * second(first(x))))]


class OtherOrder(Net):
    def states(self, x):
        first, second, third, last = self.blocks
        return [last(third(first(second(x))))]


class LeftOut(Net):
    def states(self, x):
        return [self.blocks[2](self.blocks[1](self.blocks[0](x)))]


class Keywords(Net):
    def states(self, x):
        return [self.blocks[0](None, x)]


class Nested(Net):
    def states(self, x):
        return [self.blocks[0](torch.nested.as_nested_tensor([x, x[:2]]))]


class Distributed(Net):
    """Returns an object of which nothing is known."""

    def forward(self, x):
        return torch.distributions.Categorical(logits=super().forward(x))


class Scaled(Net):
    def states(self, x):
        return [self.blocks[0](x, self.scale)]


class Two(Plain):
    def forward(self, x, *_):
        state = super().forward(x)
        return state, 2.0 * state


class Returning(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Two() for _ in range(4)])

    def states(self, x):
        for block in self.blocks:
            x, _ = block(x)
        return [x]


class Weighed(Net):
    """Its output depends on the weight of the first block, which is on another rank."""

    def forward(self, x):
        return super().forward(x) + self.blocks[0].linear.weight.sum()


class Tied(Net):
    """Its first and last layer share one weight."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 6)
        self.head.weight = self.stem.weight


class Decides(Net):
    """Its values decide what runs, so that it cannot be traced."""

    def states(self, x):
        return super().states(x if x.isfinite().all() else 0 * x)


class HeadFirst(Decides):
    """Its head is registered before the blocks."""

    def forward(self, x):
        return nn.functional.linear(self.states(x)[-1], self.stem.weight)


class Frozen(HeadFirst):
    def __init__(self):
        super().__init__()
        self.stem.requires_grad_(False)


class Late(Decides):
    """A module that runs before the blocks is registered after them."""

    def forward(self, x):
        return self.states(x @ self.head.weight.T @ self.head.weight)[-1]


class Around(Net):
    """A skip connection around all blocks."""

    def forward(self, x):
        entering = self.stem(x)
        return self.head(self.states(entering)[-1] + entering)


class Tapped(Net):
    """Its output depends on the output of the first rank's last block."""

    def forward(self, x):
        states = self.states(self.stem(x))
        return self.head(states[-1] + states[1])


class NotANumber(Net):
    def forward(self, x):
        return super().forward(x) * float("nan")


PROGRAMS = {
    "INPUT_WITH_GRADIENT": Net,
    "BETWEEN": Between,
    "BLOCK_ORDER": OtherOrder,
    "BLOCK_ORDER, left out": LeftOut,
    "NO_STATE": Keywords,
    "NESTED": Nested,
    "NO_OUTPUT": Distributed,
    "SECOND_INPUT": Scaled,
    "SECOND_OUTPUT": Returning,
    "SHARED_WEIGHT": Tied,
    "ELSEWHERE": Weighed,
    "ELSEWHERE, a head that is registered first": HeadFirst,
    "ELSEWHERE, a stem that is registered last": Late,
    "ELSEWHERE, a skip connection around the blocks": Around,
    "LOSS_ELSEWHERE": Tapped,
    "NAN_FROM_ELSEWHERE": NotANumber,
    "NAN_FROM_ELSEWHERE, a frozen head that is registered first": Frozen,
    "EXACT_ON_RANKS": Net,
    "EXACT_ON_RANKS, a watch": Net,
}


def said(name, make):
    torch.manual_seed(0)
    distributed.barrier()
    group = distributed.new_group(timeout=TIMEOUT)
    distributed.barrier()
    try:
        model = make()
        stage = gradfree.layer_parallel(model, "backprop", mesh=group, chains=["blocks"], costs=[1] * 4)
        if name == "EXACT_ON_RANKS, a watch":
            gradfree.GradientWatch().start(stage.handle)
        # An error in a backward pass stops the other rank in the next pass.
        for _ in range(2):
            with stage.handle.exactly() if name == "EXACT_ON_RANKS" else nullcontext():
                x = torch.randn(4, 6, requires_grad=name == "INPUT_WITH_GRADIENT")
                model(x).sum().backward()
    except ChainError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = {name: said(name, make) for name, make in PROGRAMS.items()}
    torch.save(found, os.path.join(sys.argv[1], f"{RANK}.pt"))
    leave()
