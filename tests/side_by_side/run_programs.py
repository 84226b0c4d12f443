"""Run drawn programs with and without their engines, and write down what came of them.

``python run_programs.py FIRST LAST FILE`` takes gradfree from where Python finds it.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from drawn_networks import network
from drawn_programs import Drawn, Layers, drawn
from torch import Tensor, nn

import gradfree


class Gradients:
    """The gradients of a program's passes, as they are asked for."""

    def __init__(self, program: Drawn, net: Any):
        self.program, self.net = program, net
        self.trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
        self.found: dict[str, Tensor | None] = {}

    def collect(self) -> dict[str, Tensor | None]:
        """Run all passes; return losses and gradients by name."""
        model = self.program.model
        self.net.seen = []
        optimizer = torch.optim.SGD(self.net.parameters(), 0.01) if isinstance(model, Layers) else None
        for step in range(model.steps):
            self.net.zero_grad()
            torch.manual_seed(model.seed + step)
            x = self.net.inputs(step).requires_grad_(model.input)
            self.step(step, x)
            if optimizer is not None:
                optimizer.step()
        self.found |= {f"buffer {name}": b for name, b in self.net.named_buffers()}
        return {name: None if t is None else t.detach().clone() for name, t in self.found.items()}

    def step(self, step: int, x: Tensor) -> None:
        """Run one pass and ask for its gradients."""
        net, asked = self.net, self.program.asked
        loss = self.loss(x)
        if asked == "two passes, one loss":
            loss = loss + self.loss(x * 0.9)
        elif asked == "two losses":
            self.loss(x * 0.9).backward()
        if self.program.around == "evaluation behind":
            with torch.no_grad():
                net.run(x)
        elif self.program.around == "frozen behind":
            net.trained_blocks[0].requires_grad_(False)
        leaves = {**self.trained, **({"x": x} if x.requires_grad else {})}
        returned = self.ask(loss, leaves)
        gradients = {name: leaf.grad for name, leaf in leaves.items()}
        for name, gradient in [("loss", loss), *gradients.items(), *returned.items()]:
            self.found[f"step {step}: {name}"] = gradient if gradient is None else gradient.detach().clone()
        for n, gradient in enumerate(net.watched()):
            self.found[f"step {step}: watched {n}"] = gradient
        if self.program.around == "frozen behind":
            for p in self.trained.values():
                p.requires_grad_(True)

    def loss(self, x: Tensor) -> Tensor:
        """Return the loss of a pass, with what else the model does."""
        net, around = self.net, self.program.around
        if around == "evaluation before":
            with torch.no_grad():
                net.run(x)
        elif around == "pass let go of":
            net.run(x)
        elif around == "weight before":
            x = x * net.weight.mean().cos()
        first: list[Tensor] = []
        block = net.trained_blocks[0]
        handle = (
            block.register_forward_pre_hook(lambda _, given: first.append(given[0]))
            if (around == "first state")
            else None
        )
        loss = net.run(x * 1.0)
        if handle is not None:
            handle.remove()
        if around == "weight behind":
            return loss * net.weight.mean().cos()
        if around == "penalty":
            return loss + sum(p.pow(2).sum() for p in net.parameters())
        if around == "closure of a state":
            return loss * torch.sigmoid(net.states[0]).mean()
        return loss + sum(h.sin().sum() for h in first)

    def ask(self, loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor | None]:
        """Ask for gradients; return those that are not collected at the leaves."""
        asked, states = self.program.asked, self.net.states
        tap = torch.cos(states[len(states) // 2]).sum()
        if asked in ("grad of parameters", "grad of all"):
            given = leaves if asked == "grad of all" else {n: p for n, p in leaves.items() if n != "x"}
            found = torch.autograd.grad(loss, list(given.values()), allow_unused=True)
            return {f"returned {name}": g for name, g in zip(given, found, strict=True)}
        if asked in ("gradient of a state", "gradient of the last state", "gradient of a state, then backward"):
            state = states[-1] if "last" in asked else states[0]
            if "then" not in asked:
                (found,) = torch.autograd.grad(loss, [state])
                return {"returned": found}
            try:
                returned = {"returned": torch.autograd.grad(loss, [state], retain_graph=True)[0]}
            except RuntimeError as error:
                if not isinstance(error, gradfree.ChainError) and "use_reentrant=True" not in str(error):
                    raise
                # What has not been asked for in vain alone has other hooks to call.
                returned, self.net.seen = {}, []
            loss.backward()
            return returned
        if asked == "tap alone":
            tap.backward()
            return {}
        before, last = {
            "tap first": ([tap], loss),
            "freed tap": ([], tap + 0 * loss),
            "tap last": ([loss], tap),
            "two losses of one pass": ([loss.sin()], loss.cos()),
            "thrice": ([loss, loss], loss),
            "twice": ([loss], loss),
        }.get(asked, ([], loss))
        for one in before:
            one.backward(retain_graph=True)
        last.backward(retain_graph=asked == "retained")
        if asked == "freed":
            loss.backward()
        elif asked == "freed tap":
            tap.backward()
        return {}


def attempted(program: Drawn, net: nn.Module) -> tuple[str, Any]:
    """Return what kind of end a program came to, and its gradients or the error's text."""
    try:
        return "gradients", Gradients(program, net).collect()
    except gradfree.ChainError as error:
        return "refused", str(error)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, AssertionError) as error:
        return "error", f"{type(error).__name__}: {error}"


def with_engine(program: Drawn) -> tuple[str, Any]:
    """Return the same of a program with its engine."""
    net = network(program)
    engine = gradfree.create_engine(program.engine, **program.options)
    more = {} if program.residual is None else {"residual": program.residual}
    try:
        handle = engine.attach(net, net.chains, batched=program.batched, **more)
    except gradfree.ChainError as error:
        return "refused", str(error)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, AssertionError) as error:
        return "error", f"attaching, {type(error).__name__}: {error}"
    with handle:
        return attempted(program, net)


def both(number: int) -> tuple[int, tuple[str, Any], tuple[str, Any]]:
    """Return what came of a program without its engine and with it."""
    program = drawn(number)
    return number, attempted(program, network(program)), with_engine(program)


def main(first: int, last: int, file: Path) -> None:
    """Run the programs from ``first`` to ``last``, this one left out."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.save([both(number) for number in range(first, last)], file)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
