"""Cost of a recurrence of one's own: a Python loop over time, ``scan``, and JAX's where it is installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from gradfree.benchmarks.timing.side_by_side import PASSES
from gradfree.benchmarks.timing.timed import Timing, timed
from gradfree.scans.scan import scan

_INPUTS = 32
_CHOICE = 30
"""In how many passes ``scan`` finds its fastest way: three for each that it tries, of which some take longer."""


@dataclass(frozen=True)
class Sequences:
    """Sequences with 32 inputs a step, for a GRU with layer normalization.

    Attributes:
        batch: their number.
        steps: T.
        units: H.
    """

    batch: int
    steps: int
    units: int

    def __str__(self) -> str:
        return f"({self.batch}, {self.steps}, {self.units})"


class LayerNormGRU(nn.Module):
    """The cell of world models (Hafner et al. 2020): one normalization for all gates.

    Args:
        units: H.
    """

    def __init__(self, units: int):
        super().__init__()
        self.read = nn.Linear(_INPUTS + units, 3 * units, bias=False)
        self.norm = nn.LayerNorm(3 * units)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next state (B, H), as carry and as output, from h (B, H) and x (B, 32)."""
        reset, candidate, update = self.norm(self.read(torch.cat([x, h], -1))).chunk(3, -1)
        update = torch.sigmoid(update - 1)
        h = update * torch.tanh(torch.sigmoid(reset) * candidate) + (1 - update) * h
        return h, h


def loop(step: nn.Module, carry: Tensor, xs: Tensor) -> tuple[Tensor, Tensor]:
    """Return what ``scan`` returns, as users write it."""
    ys = []
    for x in xs:
        carry, y = step(carry, x)
        ys.append(y)
    return carry, torch.stack(ys)


class CellPass:
    """A forward and backward pass of the cell over sequences.

    Args:
        case: the sequences, device and seed.
        run: :func:`loop` or ``scan``.
        before: how many passes run first.
    """

    def __init__(self, case: Timing, run: Callable[..., tuple[Tensor, Tensor]] = loop, before: int = 0):
        torch.manual_seed(case.seed)
        item: Sequences = case.item
        self.run = run
        self.cell = LayerNormGRU(item.units).to(case.device)
        self.start = torch.zeros(item.batch, item.units, device=case.device)
        self.input = torch.randn(item.steps, item.batch, _INPUTS, device=case.device)
        for _ in range(before):
            self()

    def __call__(self) -> None:
        """Run both passes."""
        self.cell.zero_grad()
        self.run(self.cell, self.start, self.input)[1].square().mean().backward()


class JaxPass:
    """The same passes by a jitted ``jax.lax.scan``, from the same weights, on one thread of the CPU."""

    def __init__(self, case: Timing):
        os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
        jax = import_module("jax")
        jnp, sigmoid = jax.numpy, jax.nn.sigmoid
        same = CellPass(case)

        def step(p: Any, h: Any, x: Any) -> tuple[Any, Any]:
            z = jnp.concatenate([x, h], -1) @ p["read.weight"].T
            z = (z - z.mean(-1, keepdims=True)) / jnp.sqrt(z.var(-1, keepdims=True) + same.cell.norm.eps)
            reset, candidate, update = jnp.split(z * p["norm.weight"] + p["norm.bias"], 3, -1)
            update = sigmoid(update - 1)
            h = update * jnp.tanh(sigmoid(reset) * candidate) + (1 - update) * h
            return h, h

        def loss(p: Any, start: Any, xs: Any) -> Any:
            return jnp.square(jax.lax.scan(partial(step, p), start, xs)[1]).mean()

        weights = {name: jnp.asarray(weight.detach().numpy()) for name, weight in same.cell.named_parameters()}
        self.arguments = weights, jnp.asarray(same.start.numpy()), jnp.asarray(same.input.numpy())
        self.gradients = jax.jit(jax.value_and_grad(loss))
        self.wait = jax.block_until_ready

    def __call__(self) -> None:
        """Run both passes."""
        self.wait(self.gradients(*self.arguments))


@timed(
    kind="cell",
    subject="sequences",
    metric=PASSES,
    rounds=3,
    runs=1,
    names={"sequences": "setting"},
    across="row",
    title="a recurrence of one's own",
    legend="Both passes of a GRU with layer normalization. Sizes: sequences, steps, units.",
)
def cells(case: Timing) -> Mapping[str, Callable[[], Any]]:
    """Return, by label, functions that build the passes: the loop, ``scan`` as it chose after its first passes, JAX."""
    passes: dict[str, Callable[[], Any]] = {
        "loop": partial(CellPass, case),
        "scan": partial(CellPass, case, scan, _CHOICE),
        "scan, compiled": partial(CellPass, case, partial(scan, compile=True), _CHOICE),
    }
    return passes | ({"jax.lax.scan, jitted": partial(JaxPass, case)} if find_spec("jax") else {})
