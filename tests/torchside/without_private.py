"""Train a step of several models without one of torch's private functions; print "exact" or the error of each.

Takes the names of functions. Each is absent in one process, and takes other arguments, where it is a function, in
another one; both are forked before gradfree is imported.
"""

import gc
import os
import pkgutil
import sys
import traceback
import types

import torch
import torch._dynamo  # Which checkpoints import: once here, and not in each process.
from torch import nn
from torch.utils.checkpoint import checkpoint


def block(_):
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(map(block, range(4)))

    def forward(self, x):
        total = 0.0
        for block in self.blocks:
            x = x + block(x)
            total = total + x.pow(2).mean()
        return total


class Checkpointed(Blocks):
    """Has checkpoints around two blocks, and inside another."""

    def __init__(self):
        super().__init__()
        self.blocks[2] = Inner()

    def forward(self, x):
        first, second, *others = self.blocks
        x = checkpoint(lambda x: second(first(x)), x, use_reentrant=False)
        for block in others:
            x = x + block(x)
        return x.pow(2).mean()


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = block(0)

    def forward(self, x):
        return x + checkpoint(self.layers, x, use_reentrant=False)


class Recurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(4, 1)

    def forward(self, x):
        out, state = self.layer(x.unsqueeze(1).expand(-1, 3, -1))
        return self.head(out).sin().sum() + state.pow(2).sum()


def take_away(name, changed):
    """Let the lookup miss ``name`` or find a changed one; torch itself needs it, and built-ins cannot be deleted."""
    find = pkgutil.resolve_name

    def found(asked):
        if asked != name:
            return find(asked)
        if changed and isinstance(find(asked), FUNCTIONS):
            return lambda *, another_argument: None
        raise AttributeError(asked)

    pkgutil.resolve_name = found


FUNCTIONS = types.FunctionType, types.BuiltinFunctionType


def trained():
    """Yield the name and the result of a step for each model and engine."""
    import gradfree

    cases = {
        "blocks": (Blocks, ["blocks"], "highway_bp", {"iterations": 3}),
        "checkpoints": (Checkpointed, ["blocks"], "highway_bp", {"iterations": 3}),
        "a row": (lambda: nn.Sequential(*map(block, range(4))), None, "fixed_point", {"iterations": 3}),
        "GRU": (lambda: Recurrent(nn.GRU(4, 4)), None, "backprop", {}),
        "a cell": (lambda: Recurrent(gradfree.CellLayer(nn.GRUCell(4, 4))), None, "truncated", {"window": 9}),
        "layers": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), None, "fa", {}),
    }
    for name, (make, chains, engine, options) in cases.items():
        torch.manual_seed(0)
        model, x = make().double(), torch.randn(5, 4, dtype=torch.float64)
        params = [*model.parameters()]
        expected = torch.autograd.grad(model(x).sum(), params)
        try:
            with gradfree.create_engine(engine, **options).attach(model, chains):
                loss = model(x).sum()
                for _ in range(2):
                    loss.backward(retain_graph=True)
                found = torch.autograd.grad(model(x).sum(), params)
            if engine == "fa":  # Which is not exact: the last layer's gradients are.
                params, expected, found = params[-2:], expected[-2:], found[-2:]
            torch.testing.assert_close([p.grad for p in params], [2 * g for g in expected])
            torch.testing.assert_close(found, expected)
            yield name, "exact"
        except gradfree.ChainError as error:
            yield name, f"refused: {error}"
        except Exception:
            yield name, traceback.format_exc()


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # A collection in a fork would copy all that torch has imported.
    for name in sys.argv[1:]:
        for fault in ("absent", "with other arguments"):
            sys.stdout.flush()
            if os.fork() == 0:
                take_away(name, changed=fault != "absent")
                for case, result in trained():
                    print(name, fault, case, result, sep="\x1f", end="\x1e", flush=True)
                os._exit(0)
            os.wait()
