"""Cost of narrow recurrences with long memory: a Python loop, ``scan`` by Newton's method, compiled chunks, and JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from gradfree.benchmarks.timing.cells import JaxPass, jax_on_one_thread, loop
from gradfree.benchmarks.timing.side_by_side import PASSES
from gradfree.benchmarks.timing.timed import Timing, timed
from gradfree.scans.scan import scan
from gradfree.time.cell_layer import CellLayer, ElementwiseCell

_CHOICE = 7
"""In how many passes ``scan`` finds whether Newton's method or the loop is faster."""

Step = Callable[[Any, Any, Any, Any], Any]
"""Returns the next state from torch or jax.numpy, parameters, state and input, (B, ·) each."""


def compressor(np: Any, p: Any, s: Any, x: Any) -> Any:
    """The level detector of a compressor, with time constants for attack and release."""
    keep = np.where(x > s, 1 / (1 + np.exp(-p[0])), 1 / (1 + np.exp(-p[1])))
    return keep * s + (1 - keep) * x


def filter_step(np: Any, p: Any, s: Any, x: Any) -> Any:
    """A state variable filter with a saturating resonance."""
    low, band = s[..., :1], s[..., 1:]
    band = band + p[0] * (x - low - p[1] * np.tanh(p[2] * band))
    return np.concatenate([low + p[0] * band, band], -1)


def ladder(np: Any, p: Any, s: Any, x: Any) -> Any:
    """A ladder filter of four saturating stages."""
    first, stages = np.tanh(x - p[1] * s[..., 3:]), np.tanh(s)
    return s + p[0] * (np.concatenate([first, stages[..., :3]], -1) - stages)


def van_der_pol(np: Any, p: Any, s: Any, x: Any) -> Any:
    """Van der Pol's oscillator by Euler steps, for which Newton's method does not converge."""
    place, speed = s[..., :1], s[..., 1:]
    return np.concatenate([place + p[1] * speed, speed + p[1] * (p[0] * (1 - place**2) * speed - place + x)], -1)


_STEPS: dict[str, tuple[Step, int, tuple[float, ...]]] = {
    "compressor": (compressor, 1, (4.0, 7.0)),
    "state variable filter": (filter_step, 2, (0.05, 0.4, 1.0)),
    "ladder filter": (ladder, 4, (0.1, 1.5)),
    "Van der Pol": (van_der_pol, 2, (1.5, 0.02)),
}
"""The step, the numbers of its state, and the values of its parameters."""


@dataclass(frozen=True)
class NarrowSequences:
    """Sequences of one input a step, for a step with a narrow state.

    Attributes:
        step: its name.
        batch: their number.
        steps: T.
    """

    step: str
    batch: int
    steps: int

    def __str__(self) -> str:
        return f"{self.step} ({self.batch}, {self.steps})"


class NarrowPass:
    """A forward and backward pass.

    Args:
        case: the sequences, device and seed.
        run: :func:`~gradfree.benchmarks.timing.cells.loop` or ``scan``.
        before: how many passes run first.
    """

    def __init__(self, case: Timing, run: Callable[..., tuple[Tensor, Tensor]] = loop, before: int = 0):
        torch.manual_seed(case.seed)
        item: NarrowSequences = case.item
        step, width, values = _STEPS[item.step]
        self.run, self.step = run, step
        self.parameters = nn.Parameter(torch.tensor(values, device=case.device))
        self.start = torch.full((item.batch, width), 0.1, device=case.device)
        self.input = torch.randn(item.steps, item.batch, 1, device=case.device)
        for _ in range(before):
            self()

    def __call__(self) -> None:
        """Run both passes."""
        self.parameters.grad = None

        def step(s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            s = self.step(torch, self.parameters.unbind(), s, x)
            return s, s

        self.run(step, self.start, self.input)[1].square().mean().backward()


class Detector(ElementwiseCell):
    """The level detector of :func:`compressor` as an elementwise cell."""

    hidden_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Parameter(torch.tensor(_STEPS["compressor"][2]))

    def fed(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x

    def advance(self, fed: Tensor, state: Any) -> tuple[Tensor, ...]:
        """Return the next level."""
        return (compressor(torch, self.times, state[0], fed),)


class ElementwisePass(NarrowPass):
    """The same passes of the compressor as an elementwise cell under ``newton``."""

    def __init__(self, case: Timing):
        super().__init__(case)
        self.layer = CellLayer(Detector().to(case.device))
        import_module("gradfree").create_engine("newton").attach(self.layer)
        self()

    def __call__(self) -> None:
        """Run both passes."""
        self.layer.zero_grad()
        self.layer(self.input, self.start)[0].square().mean().backward()


def jax_narrow_pass(case: Timing) -> JaxPass:
    """Return the same passes in JAX."""
    jax, same = jax_on_one_thread(), NarrowPass(case)
    return JaxPass(partial(same.step, jax.numpy), same.parameters, same.start, same.input)


@timed(
    kind="narrow steps",
    subject="sequences",
    metric=PASSES,
    rounds=2,
    runs=1,
    names={"sequences": "setting"},
    across="row",
    title="narrow recurrences with long memory",
    legend="Both passes. Sizes: sequences, steps.",
)
def narrow_steps(case: Timing) -> Mapping[str, Callable[[], Any]]:
    """Return, by label, functions that build the passes: the loop, Newton's method, compiled chunks, JAX."""
    compiled = partial(scan, engine="backprop", compile=True)
    passes: dict[str, Callable[[], Any]] = {
        "loop": partial(NarrowPass, case),
        "newton": partial(NarrowPass, case, partial(scan, engine="newton"), _CHOICE),
        "compiled chunks": partial(NarrowPass, case, compiled, 1),
    }
    if case.item.step == "compressor":
        passes["newton, elementwise cell"] = partial(ElementwisePass, case)
    return passes | ({"jax.lax.scan, jitted": partial(jax_narrow_pass, case)} if find_spec("jax") else {})
