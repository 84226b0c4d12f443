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
CHOICE = 36
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


def jax_on_one_thread() -> Any:
    """Return the module ``jax``, which computes on one thread of the CPU if this imports it first."""
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
    return import_module("jax")


class JaxPass:
    """Both passes by a jitted ``jax.lax.scan``, on one thread of the CPU.

    Args:
        step: returns the next state from the parameters, the state and the input of a step.
        parameters: tensors, in any structure.
        start: the first state.
        xs: the inputs, (T, ...).
    """

    def __init__(self, step: Callable[[Any, Any, Any], Any], parameters: Any, start: Tensor, xs: Tensor):
        jax = jax_on_one_thread()

        def loss(p: Any, start: Any, xs: Any) -> Any:
            def with_output(h: Any, x: Any) -> tuple[Any, Any]:
                h = step(p, h, x)
                return h, h

            return jax.numpy.square(jax.lax.scan(with_output, start, xs)[1]).mean()

        self.arguments = jax.tree.map(lambda t: jax.numpy.asarray(t.detach().numpy()), (parameters, start, xs))
        self.gradients, self.wait = jax.jit(jax.value_and_grad(loss)), jax.block_until_ready
        self()

    def __call__(self) -> None:
        """Run both passes."""
        self.wait(self.gradients(*self.arguments))


def jax_cell_pass(case: Timing) -> JaxPass:
    """Return the passes of :class:`CellPass` in JAX, from the same weights."""
    jax, same = jax_on_one_thread(), CellPass(case)
    jnp, sigmoid = jax.numpy, jax.nn.sigmoid

    def step(p: Any, h: Any, x: Any) -> Any:
        z = jnp.concatenate([x, h], -1) @ p["read.weight"].T
        z = (z - z.mean(-1, keepdims=True)) / jnp.sqrt(z.var(-1, keepdims=True) + same.cell.norm.eps)
        reset, candidate, update = jnp.split(z * p["norm.weight"] + p["norm.bias"], 3, -1)
        update = sigmoid(update - 1)
        return update * jnp.tanh(sigmoid(reset) * candidate) + (1 - update) * h

    return JaxPass(step, dict(same.cell.named_parameters()), same.start, same.input)


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
        "scan": partial(CellPass, case, scan, CHOICE),
        "scan, compiled": partial(CellPass, case, partial(scan, compile=True), CHOICE),
    }
    with_jax = case.threads == 1 and find_spec("jax")
    return passes | ({"jax.lax.scan, jitted": partial(jax_cell_pass, case)} if with_jax else {})
