"""Random recurrent programs as data: a layer, its inputs, a loss, how the backward pass runs, and an engine."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass, replace
from random import Random
from typing import Any

import torch
from cell_tasks import CELLS as OWN
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from gradfree import CellLayer

FUSED = {"rnn_tanh": nn.RNN, "rnn_relu": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "backprop": ("backprop", {}),
    "backprop, not plain": ("backprop", {"plain": False}),
    "deeppcr": ("deeppcr", {}),
    "fixed_point": ("fixed_point", {"iterations": 40}),
    "truncated": ("truncated", {"window": 40}),
    "dsf linspace": ("dsf", {"iterations": 40, "feedback": "linspace"}),
    "dsf 0.7": ("dsf", {"iterations": 40, "feedback": 0.7}),
    "dsf gate": ("dsf", {"iterations": 40, "feedback": "gate"}),
    "highway_bp": ("highway_bp", {"iterations": 40}),
    "highway_bp, γ": ("highway_bp", {"iterations": 40, "gamma": 0.3}),
    "shooting 2": ("shooting", {"segments": 2, "tolerance": 1e-12}),
    "shooting 5": ("shooting", {"segments": 5, "tolerance": 1e-5, "burn": 0}),
    "shooting 64": ("shooting", {"segments": 64, "tolerance": 1e-12, "burn": 3, "corrector": None}),
    "newton gate": ("newton", {"jacobian": "gate", "tolerance": 1e-12, "max_sweeps": 99}),
    "newton diagonal": ("newton", {"jacobian": "diagonal", "tolerance": 1e-5, "max_sweeps": 99}),
}
AXES: dict[str, tuple[Any, ...]] = {
    "layer": (*FUSED, *FUSED, *OWN),
    "engine": tuple(ENGINES),
    "length": (1, 2, 7, 33),
    "layers": (1, 2, 3),
    "wide": (False, False, False, True),
    "both": (False, True),
    "batch_first": (False, True),
    "bias": (True, False),
    "dropout": (0.0, 0.0, 0.5),
    "weights": ("own", "own", "own", "spectral norm", "tied"),
    "frozen": ("nothing", "nothing", "ih", "hh", "between the passes"),
    "given": (
        "a batch",
        "a batch",
        "packed",
        "packed, sorted",
        "packed, even",
        "one step each",
        "no batch",
        "one",
        "nobody",
    ),
    "layout": ("chosen", "whole", "grid", "runs", "padded runs"),
    "strides": ("dense", "dense", "turned", "every second"),
    "initial": (True, False),
    "input": (True, True, False),
    "loss": ("all", "all", "outputs", "final", "a step", "products"),
    "calls": ("one", "one", "one after the other", "two, one loss", "two losses", "two steps"),
    "backward": ("backward", "backward", "grad of all", "retained twice", "cotangents"),
    "around": ("nothing", "nothing", "checkpoint", "hooks on parameters", "saved tensors' hooks", "final in place"),
    "dtype": ("float64", "float64", "float64", "float32"),
}
"""The settings of each axis; common settings appear more than once."""

Program = make_dataclass("Program", list(AXES), frozen=True)
PROGRAMS = st.builds(Program, **{name: st.sampled_from(values) for name, values in AXES.items()})


def drawn(count: int) -> list[tuple[Any, ...]]:
    """Return the settings of ``count`` programs, the same at each call."""
    choose = Random(0).choice
    return [tuple(choose(values) for values in AXES.values()) for _ in range(count)]


@dataclass
class Recurrence:
    """The layer of a program, and its inputs.

    Args:
        program: its settings.
    """

    program: Any

    def __post_init__(self) -> None:
        if self.program.around == "checkpoint" and self.program.frozen == "between the passes":
            self.program = replace(self.program, frozen="nothing")  # Torch would save other tensors.
        torch.manual_seed(1)
        self.layer = self._layer().to(self.dtype)
        self.parameters = list(self.layer.parameters())
        if self.program.frozen in ("ih", "hh"):
            for name, parameter in self.layer.named_parameters():
                parameter.requires_grad_(self.program.frozen not in name)
        self.x = self._input()
        self.states = self._states()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all tensors."""
        return getattr(torch, self.program.dtype)

    @property
    def fused(self) -> bool:
        """Whether the layer is one of torch's recurrent modules."""
        return self.program.layer in FUSED

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return the widths of inputs and states, and the number of sequences; a wide GRU keeps its gates."""
        return (64, 64, 64) if self.program.wide and self.program.layer == "gru" else (3, 4, 4)

    @property
    def batch(self) -> tuple[int, ...]:
        """Return the shape of a batch."""
        shape = {"no batch": (), "one": (1,), "nobody": (0,)}.get(self.program.given, (self.sizes[2],))
        return shape if shape or self.fused else (self.sizes[2],)

    def _layer(self) -> nn.Module:
        p = self.program
        if self.fused:
            options = {"nonlinearity": "relu"} if p.layer == "rnn_relu" else {}
            made = FUSED[p.layer](
                *(*self.sizes[:2], p.layers),
                bias=p.bias,
                batch_first=p.batch_first,
                dropout=p.dropout if p.layers > 1 else 0.0,
                bidirectional=p.both,
                **options,
            )
            if p.weights == "spectral norm":
                parametrizations.spectral_norm(made, "weight_hh_l0")
            elif p.weights == "tied" and p.bias:
                made.bias_ih_l0 = made.bias_hh_l0
            return made
        return CellLayer(OWN[p.layer][0](), p.batch_first)

    def _input(self) -> torch.Tensor:
        p = self.program
        shape = (*self.batch, p.length) if p.batch_first and self.batch else (p.length, *self.batch)
        units = self.sizes[0]
        if p.strides == "every second":
            x = torch.randn(*shape, 2 * units)[..., ::2]
        elif p.strides == "turned" and len(shape) > 1:
            x = torch.randn(*shape[::-1], units).transpose(0, 1)
        else:
            x = torch.randn(*shape, units)
        return x.to(self.dtype).detach().requires_grad_(p.input)

    def _states(self) -> list[torch.Tensor]:
        p = self.program
        if self.fused:
            directions = p.layers * (1 + p.both)
            shapes = [(directions, *self.batch, self.sizes[1])] * (2 if p.layer == "lstm" else 1)
        else:
            shapes = [(*self.batch, width) for width in OWN[p.layer][1]]
        needed = p.initial or not self.fused
        return [torch.randn(shape, dtype=self.dtype).requires_grad_(p.initial) for shape in shapes] if needed else []

    @property
    def lengths(self) -> torch.Tensor | None:
        """Return the lengths of packed sequences; ``None`` if not packed."""
        length = self.program.length
        known = {
            "packed": [max(1, length - 2), length, 1, length],
            "packed, sorted": [length, length, max(1, length // 2), 1],
            "packed, even": [length] * 4,
            "one step each": [1] * 4,
        }
        if not self.fused or self.program.given not in known:
            return None
        return torch.tensor(known[self.program.given], device="cpu").repeat_interleave(self.sizes[2] // 4)

    def call(self, x: torch.Tensor, states: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return outputs and final states."""
        if self.lengths is not None:
            x = pack_padded_sequence(
                *(x, self.lengths),
                batch_first=self.program.batch_first,
                enforce_sorted=self.program.given == "packed, sorted",
            )
        state = None if not states else tuple(states) if len(states) > 1 else states[0]
        out, final = self.layer(x, state)
        out = out.data if isinstance(out, PackedSequence) else out
        return [out, *(final if isinstance(final, tuple) else [final])]

    def run(self, scale: float = 1.0) -> list[torch.Tensor]:
        """Run a forward pass; return outputs and final states."""
        x = self.x * scale
        if self.program.around == "checkpoint":
            found = checkpoint(
                lambda x, *states: tuple(self.call(x, list(states))), x, *self.states, use_reentrant=False
            )
        elif self.program.around == "saved tensors' hooks":
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
                found = self.call(x, self.states)
        else:
            found = self.call(x, self.states)
        if self.program.calls == "one after the other":
            return self.call(x.flip(-1), list(found[1:]))
        return list(found)

    def loss(self, found: list[torch.Tensor]) -> torch.Tensor:
        """Return the program's loss of outputs and final states."""
        out, *final = found
        if self.program.around == "final in place":
            final = [part.mul_(2) for part in final]
        weighted = [
            (part * torch.linspace(-1, 2, part.numel()).to(part).view(part.shape)).sum() for part in (out, *final)
        ]
        return {
            "all": sum(weighted),
            "outputs": weighted[0],
            "final": weighted[-1],
            "a step": out[len(out) // 2 :].sin().sum(),
            "products": (out.sum() * final[0].sin()).sum() + weighted[0],
        }[self.program.loss]

    def outcome(self) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Run the program; return the results of all passes, and all gradients and buffers."""
        p = self.program
        hooked = [q for q in self.parameters if q.requires_grad] if p.around == "hooks on parameters" else []
        hooks = [q.register_hook(lambda g: None if g is None else 3 * g) for q in hooked]
        given = [t for t in (self.x, *self.states, *self.layer.parameters()) if t.requires_grad]
        seen: list[torch.Tensor] = []
        found: list[torch.Tensor | None] = []
        for step in range(1 + (p.calls == "two steps")):
            for tensor in given:
                tensor.grad = None
            torch.manual_seed(step)
            outputs = self.run(1.0 + step)
            seen += [part.detach().clone() for part in outputs]
            if p.calls == "two losses":
                self.loss(self.run(0.9)).backward()
            if p.backward == "cotangents":
                cotangents = [torch.ones_like(part) for part in outputs]
                torch.autograd.backward(outputs, cotangents)
                assert "writing" in p.layer or all(c.eq(1).all() for c in cotangents), "a cotangent was written to"
            else:
                loss = self.loss(outputs) + (self.loss(self.run(0.9)) if p.calls == "two, one loss" else 0.0)
                if p.frozen == "between the passes":
                    self.parameters[0].requires_grad_(False)
                if p.backward == "grad of all":
                    found += torch.autograd.grad(loss, [t for t in given if t.requires_grad], allow_unused=True)
                else:
                    loss.backward(retain_graph=p.backward == "retained twice")
                    if p.backward == "retained twice":
                        loss.backward()
                self.parameters[0].requires_grad_(p.frozen not in ("ih", "hh") or self.parameters[0].requires_grad)
            found += [None if t.grad is None else t.grad.clone() for t in given]
        for hook in hooks:
            hook.remove()
        return seen, [*found, *(b.clone() for b in self.layer.buffers())]
