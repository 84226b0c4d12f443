"""Device-dependent behaviour: precision, clocks, names, absent devices."""

import re
from importlib import import_module
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradfree

ENGINES = {name: gradfree.create_engine(name) for name in gradfree.list_engines()}


class NoDoubles(TorchDispatchMode):
    """Raises for float64, as devices without it do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(t.dtype is torch.float64 for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            raise TypeError("this device has no float64")
        return out


def test_validate_and_fidelity_work_without_float64():
    torch.set_default_dtype(torch.float32)
    model, engine = gradfree.create_model("residual_mlp", in_features=6, num_classes=3), ENGINES["highway_bp"]
    x, target = torch.randn(4, 6), torch.randn(4, 3)

    def cosine():
        return gradfree.gradient_fidelity(engine, model, nn.functional.mse_loss, (x, target)).total.cosine

    with NoDoubles():
        report, found = engine.validate(model, batch=x), cosine()
    assert report.ok
    assert found == pytest.approx(cosine(), abs=1e-5)


def test_tf32_is_off_during_fidelity_and_restored_after_it():
    allowed: ClassVar[list[bool]] = []
    model, batch = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)), (torch.randn(4, 6), torch.randn(4, 3))
    # Checks one backend's setting as an example.
    model.register_forward_hook(lambda *_: allowed.append(torch.backends.cudnn.allow_tf32))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        gradfree.gradient_fidelity(ENGINES["fa"], model, nn.functional.mse_loss, batch)
        assert torch.backends.cudnn.allow_tf32
    assert allowed
    assert not any(allowed)


def test_only_one_file_names_device_types():
    """Besides Triton's kernels, which are for some devices only."""
    root = Path(gradfree.__file__).parent
    names = re.compile(r"\b(torch\.|is_)?(cuda|mps|xpu|hip|mtia)\b", re.IGNORECASE)
    folders = [root, *(Path(import_module(f"gradfree.{room}").__file__).parent for room in ("algorithms", "models"))]
    files = {file for folder in folders for file in folder.rglob("*.py") if "benchmarks" not in file.parts}
    naming = {file.name for file in files if names.search(file.read_text(encoding="utf-8"))}
    assert naming == {"hardware.py", "triton_scan.py"}
