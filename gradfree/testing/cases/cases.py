"""The models that engines are tried on: small, one chain each, of three families."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradfree.chains.handle import Handle
from gradfree.devices.hardware import cpu_threads, devices_in_use, without_tf32
from gradfree.engines.engine import Engine
from gradfree.testing.cases.models import (
    BLOCKS,
    LayeredModel,
    Model,
    NormAndDropout,
    OwnCell,
    Plain,
    RecurrentModel,
    layered_model,
)
from gradfree.time.cell_layer import CellLayer
from gradfree.torchside.random_state import RandomState

RESIDUAL, RECURRENT, LAYERS = FAMILIES = ("residual blocks", "recurrent layers", "plain layers")
"""What chains consist of."""


@dataclass(frozen=True)
class ModelCase:
    """A model with a chain, and a batch for it.

    Attributes:
        name: says what is special about it.
        family: one of :data:`FAMILIES`.
        make: returns a new model; it gives one number a sample.
        shape: of a batch; the first dimension is that of the samples.
        chain: module path of the chain.
        device: where model and batch are.
    """

    name: str
    family: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    chain: str = "blocks"
    device: str = "cpu"


def _residual(name: str, make: Callable[[], nn.Module], shape: tuple[int, ...]) -> ModelCase:
    return ModelCase(name, RESIDUAL, lambda: Model([make() for _ in range(4)], shape[-1]), (8, *shape[1:]))


def _recurrent(name: str, layer: Callable[[], nn.Module], outputs: int = 4, packed: bool = False) -> ModelCase:
    return ModelCase(name, RECURRENT, lambda: RecurrentModel(layer(), outputs, packed), (8, 12, 6), "layer")


def _layers(name: str, shape: tuple[int, ...], outputs: int, *layers: Callable[[], nn.Module]) -> ModelCase:
    def make() -> nn.Module:
        return LayeredModel(*(layer() for layer in layers), width=shape[-1], outputs=outputs)

    return ModelCase(name, LAYERS, make, shape)


_LINEAR: Callable[[], nn.Module] = partial(nn.Linear, 6, 6)

CASES = (
    ModelCase("x + g(x)", RESIDUAL, lambda: LayeredModel(*(Plain() for _ in range(5))), (8, 6)),
    *(_residual(name, *BLOCKS[name]) for name in BLOCKS if name != "plain"),
    _residual("batch norm and dropout", NormAndDropout, (8, 6)),
    _recurrent("GRU, two layers", lambda: nn.GRU(6, 4, 2, batch_first=True)),
    _recurrent("LSTM", lambda: nn.LSTM(6, 4, batch_first=True)),
    _recurrent("RNN", lambda: nn.RNN(6, 4, batch_first=True)),
    _recurrent("bidirectional LSTM", lambda: nn.LSTM(6, 4, batch_first=True, bidirectional=True), outputs=8),
    _recurrent("LSTM with projections", lambda: nn.LSTM(6, 4, batch_first=True, proj_size=3), outputs=3),
    _recurrent("GRU with dropout", lambda: nn.GRU(6, 4, 2, batch_first=True, dropout=0.5)),
    _recurrent("GRU, packed sequences", lambda: nn.GRU(6, 4, batch_first=True), packed=True),
    _recurrent("CellLayer of any cell", lambda: CellLayer(OwnCell(6), batch_first=True), outputs=6),
    ModelCase("linear layers", LAYERS, layered_model, (8, 6)),
    _layers("linear layers, dropout", (8, 6), 6, _LINEAR, nn.ReLU, nn.Dropout, _LINEAR, nn.ReLU, _LINEAR),
    _layers("linear layers on sequences", (8, 3, 6), 6, _LINEAR, nn.Tanh, _LINEAR, nn.Tanh, _LINEAR),
    _layers(
        "convolutions and pools",
        (8, 16),
        3,
        partial(nn.Unflatten, 1, (1, 4, 4)),
        partial(nn.Conv2d, 1, 3, 3, padding=1),
        nn.ReLU,
        partial(nn.MaxPool2d, 2),
        nn.Flatten,
        partial(nn.Linear, 12, 3),
    ),
    _layers("linear layers, LayerNorm", (8, 6), 6, _LINEAR, partial(nn.LayerNorm, 6), nn.Tanh, _LINEAR),
)
"""All of them; the first of each family stands for it."""

STANDING_FOR = {family: next(case for case in CASES if case.family == family) for family in FAMILIES}
"""The case that stands for each family."""


class Specimen:
    """A new model of a case, the same each time, and a batch.

    Args:
        case: of which.
        dtype: of weights and batch.

    Attributes:
        model: the model.
        x: the batch.
        chains: the model's only one, as ``Engine.attach`` takes it.
        start: copies of the weights by name.
        handle: of the engine that is attached, which gets targets and loss; ``None``: none gets them.
    """

    handle: Handle | None = None

    def __init__(self, case: ModelCase, dtype: torch.dtype = torch.float64):
        with isolated():
            self.model: Any = case.make().to(case.device, dtype)
            self.x = torch.randn(case.shape).to(case.device, dtype)
        self.chains = [case.chain]
        self.start = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    @property
    def chain(self) -> Any:
        """The chain's container or layer."""
        return self.model.get_submodule(self.chains[0])

    def loss(self, x: Tensor | None = None) -> Tensor:
        """Return the sum over the samples of the batch, or of ``x``."""
        return self.model(self.x if x is None else x).pow(2).sum()

    @contextmanager
    def attached(self, engine: Engine) -> Iterator[None]:
        """Attach the engine; what it would learn for itself stays as it is at first."""
        with engine.attach(self.model, self.chains) as self.handle, self.handle.frozen():
            yield

    def gradients(self, loss: Tensor | Callable[[], Tensor] | None = None) -> dict[str, Tensor | None]:
        """Return copies of all parameters' gradients by name, of the batch's loss if no other is given."""
        self.model.zero_grad()
        self.backward(loss)
        return self.collected()

    def backward(self, loss: Tensor | Callable[[], Tensor] | None = None) -> None:
        """Add the gradients of ``loss``; an engine that needs the loss itself gets it if it is a function."""
        loss = self.loss if loss is None else loss
        function = None if isinstance(loss, Tensor) else loss
        targets = torch.arange(len(self.x), device=self.x.device) % 3
        with self.handle.lesson(targets, function) if self.handle else nullcontext():
            (loss if isinstance(loss, Tensor) else loss()).backward()

    def collected(self) -> dict[str, Tensor | None]:
        """Return copies of the gradients that are there, by name."""
        return {name: None if p.grad is None else p.grad.clone() for name, p in self.model.named_parameters()}


@contextmanager
def attached(engine: Engine, case: ModelCase, dtype: torch.dtype = torch.float64) -> Iterator[Specimen]:
    """Give a new specimen with the engine attached."""
    specimen = Specimen(case, dtype)
    with specimen.attached(engine):
        yield specimen


@contextmanager
def isolated() -> Iterator[None]:
    """Compute in float64, in one thread, from the same random numbers, and leave torch's settings as they were.

    On a GPU cuDNN adds in the same order each time, and float32 is not rounded to TF32. What names no device is made on
    the CPU, so that an engine that forgets to is found out.
    """
    dtype = torch.get_default_dtype()
    cudnn = torch.backends.cudnn.flags(enabled=True, deterministic=True)
    elsewhere = torch.empty(0).device.type != "cpu"
    # The tensors are tiny, and threads that wait for each other make a busy machine crawl.
    with (
        torch.device("cpu") if elsewhere else nullcontext(),
        cpu_threads(1),
        RandomState(*devices_in_use()).restored(),
        cudnn,
        without_tf32(),
    ):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
