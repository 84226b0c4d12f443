"""One of four ranks: layers on the first two, or on all, trained forward only and held against one process.

Writes by case the largest difference of the weights after 20 steps, and the errors that were raised.
"""

import os
import sys
from datetime import timedelta

import torch
from rank_processes import leave
from torch import distributed, nn
from torch.nn.functional import cross_entropy

import gradfree
from gradfree.errors import ChainError

RANK, STEPS, BATCH = int(os.environ.get("RANK", "0")), 20, 10


class Around(nn.Module):
    """Layers with weights before and behind them, biases, pooling, dropout that is off."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(36, 36)
        stages = [(1, 4), (4, 4), (4, 4), (4, 4)]
        convolutions = [nn.Sequential(nn.Conv2d(a, b, 1), nn.Tanh()) for a, b in stages]
        self.layers = nn.Sequential(*convolutions, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 9))
        self.head = nn.Linear(9, 5)

    def forward(self, x):
        return self.head(self.layers(self.stem(x.flatten(1)).view(-1, 1, 6, 6)).tanh())


def mlp():
    return gradfree.create_model("orthogonal_mlp", in_features=36, num_classes=5, depth=7, width=12)


def convnet():
    return gradfree.create_model(
        "orthogonal_convnet",
        in_channels=1,
        num_classes=5,
        image_size=6,
        channels=(4,),
        stage_depth=4,
        activation="relu",
    )


CASES = {
    "MLP": (mlp, {}, 3, 4),
    "MLP on two ranks": (mlp, {}, 3, 2),
    "one microbatch": (mlp, {"temperature": 2.0, "orthogonalize_every": 3}, 1, 4),
    "streaming convolutions": (convnet, {"streaming": True}, 5, 4),
    "weights around": (Around, {"perturbation": "tangent"}, 4, 4),
}
"""What makes the model, the engine's options, microbatches, ranks."""


def made(make):
    torch.manual_seed(0)
    return make()


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randn(BATCH, 1, 6, 6, generator=generator), torch.randint(5, (BATCH,), generator=generator)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), 0.5, momentum=0.5)


def of_one_process(make, options):
    """Return the model, trained, its losses, and what it returns for the last batch."""
    model = made(make)
    model(torch.zeros(1, 1, 6, 6))
    optimizer, losses = optimizer_of(model), []
    with gradfree.create_engine("foton", **options).attach(model):
        for x, targets in batches():
            losses.append(cross_entropy(model(x), targets))
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        with torch.no_grad():
            out = model(x)
    return model, torch.stack(losses).detach(), out


def of_ranks(make, options, microbatches, group):
    """Return how far weights, losses and outputs are from one process's; and check where there is a loss."""
    whole, its, its_out = of_one_process(make, options)
    model = made(make)
    pipeline = gradfree.forward_pipeline(model, cross_entropy, microbatches=microbatches, mesh=group, **options)
    assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in whole.parameters())
    optimizer, losses = optimizer_of(model), []
    for x, targets in batches():
        optimizer.zero_grad()
        if microbatches > 1:
            # Such a batch, as the last one of an epoch, is left out.
            assert "cannot go" in error_of(pipeline.step, x[: microbatches - 1], targets[: microbatches - 1])
        losses.append(pipeline.step(x, targets))
        optimizer.step()
    out, state = model(x), pipeline.state_dict()
    if distributed.get_world_size(group) - 1 == RANK:
        assert (torch.stack(losses) - its).abs().max() < 1e-9
        assert (out - its_out).abs().max() < 1e-9
    else:
        assert losses == [None] * STEPS
        assert out is None
    start = dict(made(make).named_parameters())
    for name, p in whole.named_parameters():
        assert (p - start[name]).abs().max() > 1e-3, name
    return max([(state[name] - p).abs().max().item() for name, p in whole.named_parameters()] if state else [0.0])


class Tied(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Linear(4, 4) for _ in range(4)))
        self[3].weight = self[0].weight


def refused(group):
    """Return what is said to what cannot be."""
    return [
        error_of(gradfree.forward_pipeline, make(), cross_entropy, mesh=group, **options)
        for make, options in (
            (mlp, {"engine": "highway_bp"}),
            (mlp, {"engine": "dfa"}),
            (mlp, {"refresh_feedback_every": 2}),
            (mlp, {"microbatches": 0}),
            (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh()), {}),
            (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)), {}),
            (Tied, {}),
            (lambda: nn.ModuleDict({"a": mlp(), "b": mlp()}), {}),
        )
    ]


def error_of(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except (ChainError, ValueError) as error:
        return str(error)
    return ""


class Behind(nn.Module):
    """Uses a weight of the first rank once more, behind the layers."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(36, 5, bias=False)
        self.layers = nn.Sequential(*(nn.Linear(5, 5) for _ in range(8)))

    def forward(self, x):
        return self.layers(self.stem(x.flatten(1))) + self.stem.weight.sum()


class Failing(nn.Module):
    """The identity, until call ``last``: each microbatch calls it in both passes."""

    calls, last = 0, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == self.last:
            raise ValueError("the layer's own error")
        return x * 1.0


gradfree.register_layer(Failing, "pointwise")


def failing(last):
    def make():
        model = mlp()
        model.layers.insert(5, Failing())
        model.layers[5].last = last
        return model

    return make


# Of the second step's two microbatches, the second one's: its first pass; its second, when the first rank is done.
STOPPED = {"first pass": failing(6), "second pass": failing(8), "absent": Behind}


def stopped(make, group):
    """Return the errors of this rank where one fails in mid-step, and of the next step."""
    model = made(make)
    pipeline = gradfree.forward_pipeline(model, cross_entropy, microbatches=2, mesh=group)
    optimizer = optimizer_of(model)

    def train():
        for x, targets in batches():
            optimizer.zero_grad()
            pipeline.step(x, targets)
            optimizer.step()

    return error_of(train), error_of(train)


def main(folder):
    torch.set_default_dtype(torch.float64)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    groups = {2: distributed.new_group([0, 1]), 4: distributed.group.WORLD}
    found = {}
    for name, (make, options, microbatches, ranks) in CASES.items():
        if ranks > RANK:
            found[name] = of_ranks(make, options, microbatches, groups[ranks])
    found["refused"] = list(refused(groups[4]))
    torch.save(found, os.path.join(folder, f"{RANK}.pt"))
    leave()


def stop(folder, way):
    """Write what this rank says where one fails in some way, and end as a process does with an error."""
    torch.set_default_dtype(torch.float64)
    distributed.init_process_group("gloo")
    torch.save(stopped(STOPPED[way], distributed.group.WORLD), os.path.join(folder, f"{RANK}.pt"))
    os._exit(0)


if __name__ == "__main__":
    (stop if len(sys.argv) > 2 else main)(*sys.argv[1:])
