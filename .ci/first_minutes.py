"""What is worth most in the first minutes on a GPU: engines beside cuDNN, loops and autograd, the best first.

    python .ci/first_minutes.py FILE --seconds 300 --device cuda --of TEXT

Each case is one line of FILE, written at once, so that a process that is killed loses one case. Started again, the
script goes on behind the last line. A case that did not end twice is recorded as too long. ``make gpu`` runs it.

Times are medians of milliseconds of a forward and a backward pass. Errors are relative, the largest of the output and
all gradients, against autograd in float64. Values on a device that computes nothing are meaningless.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from progress import Progress
from torch import Tensor, nn

import gradfree
from gradfree.algebra.time_scan import scan
from gradfree.devices.hardware import CUDNN_STEPS, mark, peak_bytes, runs_cudnn, seconds, without_tf32

GRU_SHAPES = (1, 16384, 64), (1, 16384, 256), (8, 4096, 256), (32, 1024, 512), (1, 131072, 128)
CELL_SHAPES = (1, 1024, 64), (32, 365, 256)
"""Batch, steps and width."""
BLOCKS, WIDTH = 256, 256
_ENDING = 5.0
"""Seconds at the end in which no case is begun."""

Found = dict[str, Any]
Case = tuple[str, Callable[[], Found]]


def run(cases: Sequence[Case], progress: Progress, end: float) -> bool:
    """Run the cases without a result until ``end`` or an error; return whether all have been visited."""
    for name, measure in cases:
        if name in progress.died_twice:
            progress.end(name, error="too long: its process was ended twice before it was done")
        if name in progress.ended:
            continue
        if monotonic() > end - _ENDING:
            return False
        progress.begin(name)
        found = attempt(measure)
        progress.end(name, **found)
        if "error" in found:
            # It may have harmed what torch keeps of the device, as a failed capture of CUDA graphs does.
            return False
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return True


def attempt(measure: Callable[[], Found]) -> Found:
    """Return what ``measure`` returns, with its warnings, or its error."""
    begin = monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = measure()
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    said = sorted({str(warning.message)[:150] for warning in caught})
    return {**found, **({"warnings": said} if said else {}), "seconds": round(monotonic() - begin, 1)}


def time_ms(step: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    """Return the median milliseconds of a step, after two to warm up."""
    step(), step()
    marks = []
    for _ in range(rounds):
        start = mark(device)
        step()
        marks.append((start, mark(device)))
    return round(1e3 * statistics.median(seconds(*pair) for pair in marks), 3)


def gradients(run: Callable[[], Tensor], module: nn.Module, x: Tensor, cotangent: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of the input and of all parameters."""
    output = run()
    return [output.detach(), *torch.autograd.grad(output, [x, *module.parameters()], cotangent)]


def largest_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest relative error of any of them."""
    pairs = zip(found, exact, strict=True)
    return max(float((a.double() - b).norm() / b.norm().clamp_min(1e-300)) for a, b in pairs)


def run_in_pieces(module: nn.Module, x: Tensor) -> Tensor:
    """Return the output of torch's own layer; cuDNN takes fewer than 65,536 steps a call."""
    steps = 2**15 if runs_cudnn(x.device) and x.shape[1] > CUDNN_STEPS else x.shape[1]
    outs, state = [], None
    for piece in x.split(steps, 1):
        out, state = module(piece, state)
        outs.append(out)
    return torch.cat(outs, 1)


def compare(baseline: Callable[[], object], step: Callable[[], object], device: torch.device) -> Found:
    """Return times, the speed-up, memory, and what the engine reports of its chains: sweeps, mismatch, tolerance."""
    with gradfree.engine_figures() as by_chain:
        step()
    figures = {name: float(value) for chain in by_chain.values() for name, value in chain.items()}
    memory = {name: peak_bytes(work, device) for name, work in (("baseline", baseline), ("engine", step))}
    baseline_ms, ms = (time_ms(work, device) for work in (baseline, step))
    found = {"baseline_ms": baseline_ms, "ms": ms, "speedup": round(baseline_ms / ms, 2), "figures": figures}
    return {**found, "MiB": {name: None if size is None else size >> 20 for name, size in memory.items()}}


def layer(
    kind: str, shape: tuple[int, int, int], engine: str, options: Found, precisions: Sequence[str], device: torch.device
) -> Found:
    """Compare an engine with torch's own layer, in full float32 and in TF32."""
    batch, steps, width = shape
    torch.manual_seed(0)
    plain, module = (getattr(nn, kind)(width, width, batch_first=True).to(device) for _ in range(2))
    module.load_state_dict(plain.state_dict())
    x = torch.randn(batch, steps, width, device=device)
    cotangent = torch.randn_like(x) / steps
    double = getattr(nn, kind)(width, width, batch_first=True).to(device, torch.float64)
    double.load_state_dict(plain.state_dict())
    wide = x.double().requires_grad_()
    exact = gradients(lambda: run_in_pieces(double, wide), double, wide, cotangent.double())
    x.requires_grad_()
    gradfree.create_engine(engine, **options).attach(module, [""])

    def of_torch() -> list[Tensor]:
        return gradients(lambda: run_in_pieces(plain, x), plain, x, cotangent)

    def of_engine() -> list[Tensor]:
        return gradients(lambda: module(x)[0], module, x, cotangent)

    found: Found = {}
    for precision in precisions:
        with without_tf32() if precision == "float32" else nullcontext():
            errors = {
                name: largest_error(run(), exact) for name, run in (("baseline", of_torch), ("engine", of_engine))
            }
            found[precision] = {**compare(of_torch, of_engine, device), "errors": errors}
    return found


def triton_scan(shrink: int, device: torch.device) -> Found:
    """Return the scan's largest error for each dtype, and its time beside that of reading and writing its tensors."""
    worst: dict[str, float] = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for shape in ((1, 5), (2, 1), (1000, 65), (max(1, 16384 // shrink), 64)):
            terms, factors = torch.randn(shape, dtype=dtype), torch.rand(shape, dtype=dtype)
            rows = [terms[0].double()]
            for term, factor in zip(terms[1:].double(), factors[1:].double(), strict=True):
                rows.append(term + factor * rows[-1])
            found = scan(terms.to(device), factors.to(device)).cpu().double()
            worst[str(dtype)] = max(worst.get(str(dtype), 0.0), float((found - torch.stack(rows)).abs().max()))
    terms = torch.randn(max(1, 131072 // shrink), 128, device=device)
    factors, out = torch.rand_like(terms), torch.empty_like(terms)
    copied = time_ms(lambda: torch.add(terms, factors, out=out), device)
    return {"errors": worst, "ms": time_ms(lambda: scan(terms, factors), device), "elementwise_ms": copied}


class NormalizedCell(nn.Module):
    """A GRU cell with layer normalization, of which no kernel exists."""

    def __init__(self, width: int):
        super().__init__()
        self.hidden_size = width
        self.cell, self.norm = nn.GRUCell(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        """Return the next state."""
        return self.norm(self.cell(x, h))


class Loop(nn.Module):
    """A cell in a Python loop over the steps."""

    def __init__(self, cell: nn.Module):
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        """Return the states, (B, T, H)."""
        h, states = torch.zeros_like(x[:, 0]), []
        for step in x.unbind(1):
            h = self.cell(step, h)
            states.append(h)
        return torch.stack(states, 1)


def own_cell(shape: tuple[int, int, int], graphs: bool, device: torch.device) -> Found:
    """Compare a cell of one's own under ``shooting`` with its loop or, with ``graphs``, that loop in CUDA graphs."""
    batch, steps, width = shape
    torch.manual_seed(0)
    loop = Loop(NormalizedCell(width).to(device))
    cells = gradfree.CellLayer(NormalizedCell(width).to(device), batch_first=True)
    cells.cell.load_state_dict(loop.cell.state_dict())
    x = torch.randn(batch, steps, width, device=device, requires_grad=True)
    cotangent = torch.randn_like(x) / steps
    gradfree.create_engine("shooting").attach(cells, [""])
    expected = [part.double() for part in gradients(lambda: loop(x), loop, x, cotangent)]
    called = torch.cuda.make_graphed_callables(loop, (x,)) if graphs else loop  # type: ignore[no-untyped-call]

    def of_loop() -> list[Tensor]:
        return gradients(lambda: called(x), loop, x, cotangent)

    def of_engine() -> list[Tensor]:
        return gradients(lambda: cells(x)[0], cells, x, cotangent)

    return {**compare(of_loop, of_engine, device), "errors": {"engine": largest_error(of_engine(), expected)}}


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` and what the block adds to it."""
        return x + self.second(torch.relu(self.first(self.norm(x))))


def blocks(
    make: Callable[[], nn.Module], batch: int, engine: str, options: Found, graphs: bool, device: torch.device
) -> Found:
    """Compare an engine on a deep net with autograd or, with ``graphs``, autograd in CUDA graphs."""
    torch.manual_seed(0)
    plain, module = (nn.Sequential(make()).to(device) for _ in range(2))
    module.load_state_dict(plain.state_dict())
    x = torch.randn(batch, WIDTH, device=device, requires_grad=True)
    cotangent = torch.randn_like(plain(x))
    gradfree.create_engine(engine, **options).attach(module)
    exact = gradients(lambda: plain(x), plain, x, cotangent)
    called = torch.cuda.make_graphed_callables(plain, (x,)) if graphs else plain  # type: ignore[no-untyped-call]

    def of_engine() -> list[Tensor]:
        return gradients(lambda: module(x), module, x, cotangent)

    flat, expected = (torch.cat([part.flatten() for part in parts[2:]]) for parts in (of_engine(), exact))
    found = compare(lambda: gradients(lambda: called(x), plain, x, cotangent), of_engine, device)
    return {**found, "cosine": float(torch.cosine_similarity(flat, expected, dim=0))}


def cases(device: torch.device, shrink: int = 1) -> Iterator[Case]:
    """Yield all cases, the most valuable first; ``shrink`` divides their sizes, to see that everything runs."""

    def small(shape: tuple[int, int, int]) -> tuple[int, int, int]:
        return shape[0], max(8, shape[1] // shrink), max(4, shape[2] // shrink)

    def recurrent(kind: str, shape: tuple[int, int, int], engine: str = "shooting", **options: object) -> Case:
        precisions = ("float32", "TF32") if kind == "GRU" and engine == "shooting" else ("float32",)
        measure = partial(layer, kind, small(shape), engine, options, precisions, device)
        return f"{kind} {shape} {engine}", measure

    depth, graphed = max(4, BLOCKS // shrink), (False, True) if device.type == "cuda" else (False,)

    def residual() -> nn.Module:
        return nn.Sequential(*[Block(WIDTH) for _ in range(depth)])

    def orthogonal() -> nn.Module:
        made: nn.Module = gradfree.create_model(
            "orthogonal_mlp", in_features=WIDTH, num_classes=10, depth=16, width=WIDTH
        )
        return made

    yield from (recurrent("GRU", shape) for shape in GRU_SHAPES)
    yield "scan", partial(triton_scan, shrink, device)
    yield from (recurrent(kind, shape) for shape in GRU_SHAPES[:4] for kind in ("RNN", "LSTM"))
    for shape in CELL_SHAPES:
        for graphs in graphed:
            against = "its loop in CUDA graphs" if graphs else "its loop"
            yield f"cell {shape} shooting beside {against}", partial(own_cell, small(shape), graphs, device)
    yield recurrent("GRU", GRU_SHAPES[0], "newton")
    yield recurrent("GRU", GRU_SHAPES[0], "dsf")
    yield recurrent("GRU", GRU_SHAPES[0], "highway_bp", iterations=1)
    for batch in (1, 64):
        for iterations in (0, 2):
            for graphs in graphed:
                name = f"{BLOCKS} blocks, batch {batch}, highway_bp k={iterations}{' beside CUDA graphs' * graphs}"
                options = {"iterations": iterations}
                yield name, partial(blocks, residual, batch, "highway_bp", options, graphs, device)
    yield "orthogonal net of 16 layers, batch 256, foton", partial(blocks, orthogonal, 256, "foton", {}, False, device)


def main() -> None:
    """Run cases within the given seconds, or up to an error; exit 3 if some may be left."""
    end = monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--of", required=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    all_done = run(list(cases(device)), Progress(options.file, options.of), end + options.seconds)
    raise SystemExit(0 if all_done else 3)


if __name__ == "__main__":
    main()
