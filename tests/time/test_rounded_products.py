"""Sweeps to a tolerance where matrix products round their factors, as in TF32, which is simulated here."""

import pytest
import torch
from oracles import off_by
from recurrent_tasks import everything
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradfree
from gradfree.devices import hardware
from gradfree.devices.hardware import product_rounding, without_tf32

FLOAT32, TF32 = 1e-5, 8 * 2.0**-11
PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm")


class InTF32(TorchDispatchMode):
    """Rounds the factors of all matrix products to ten bits."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in PRODUCTS:
            *terms, a, b = args
            args = (*terms, rounded(a), rounded(b))
        return func(*args, **(kwargs or {}))


def rounded(x):
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.fixture(autouse=True)
def on_the_cpu():
    """Rounding is simulated there, whatever the device of the other tests is."""
    with torch.device("cpu"):
        yield


@pytest.fixture
def precision():
    """Set the precision of products in float32."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def wide(kind, scale):
    layer = kind(8, 64).float()
    with torch.no_grad():
        layer.weight_hh_l0.mul_(scale)
    return layer


@pytest.mark.filterwarnings("ignore:.*has long memory")
@pytest.mark.parametrize(
    ("kind", "scale", "tolerance"), [(nn.GRU, 2.0, None), (nn.GRU, 2.0, 1e-6), (nn.RNN, 1.0, None)]
)
def test_borders_settle_to_what_the_products_allow(kind, scale, tolerance, precision):
    engine = gradfree.create_engine("shooting", segments=32, tolerance=tolerance)
    layer, x = wide(kind, scale), torch.randn(2048, 1, 8, dtype=torch.float32, requires_grad=True)
    exact = everything(layer.double(), x.detach().double().requires_grad_())
    layer.float()
    figures = {}
    for setting in ("high", "highest"):
        precision(setting)
        with engine.attach(layer), InTF32(), gradfree.engine_figures() as by_chain:
            found = everything(layer, x)
        figures[setting] = by_chain["l0"]
        assert off_by([f.double() for f in found], exact) < 2e-2
    for prefix in ("", "forward "):
        assert figures["high"][f"{prefix}tolerance"] == TF32
        assert figures["high"][f"{prefix}sweeps"] <= 2
        assert figures["high"][f"{prefix}sequential"] == 0
    # If the setting does not say that products are rounded, borders never settle.
    assert figures["highest"]["forward sequential"] == 1


def test_a_setting_without_an_effect_leaves_the_tolerance(precision):
    """Few CPUs have such products."""
    precision("high")
    layer, x = wide(nn.GRU, 1.0), torch.randn(512, 1, 8, dtype=torch.float32)
    a = torch.randn(64, 64, dtype=torch.float32)
    is_exact = off_by([(a @ a).double()], [a.double() @ a.double()]) < 1e-5
    with gradfree.create_engine("shooting", segments=8).attach(layer), gradfree.engine_figures() as figures:
        layer(x)[0].sum().backward()
    assert figures["l0"]["tolerance"] == pytest.approx(FLOAT32 if is_exact else TF32)


def test_autocast_counts_as_rounding_in_the_forward_pass_only():
    layer, x = wide(nn.GRU, 1.0), torch.randn(512, 1, 8, dtype=torch.float32)
    with gradfree.create_engine("shooting", segments=8).attach(layer), gradfree.engine_figures() as figures:
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x)[0]
        out.sum().backward()
    found = {name: figure.item() for name, figure in figures["l0"].items()}
    assert found["forward tolerance"] == 8 * 2.0**-8
    assert found["tolerance"] == pytest.approx(FLOAT32)
    assert found["forward sequential"] == found["sequential"] == 0


def test_on_cuda_torchs_settings_decide(precision, monkeypatch):
    """Recurrent layers of cuDNN have a setting of their own, which allows TF32 by default."""
    monkeypatch.setattr(hardware, "runs_cudnn", lambda device: True)
    device, capability = torch.device("cuda"), (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    def found():
        return [product_rounding(device, torch.float32, by_kernel) for by_kernel in (True, False)]

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        precision("highest")
        assert found() == [2.0**-11, 0.0]
        precision("high")
        assert found() == [2.0**-11, 2.0**-11]
        with without_tf32():
            assert found() == [0.0, 0.0]
        assert product_rounding(device, torch.float64, by_kernel=True) == 0.0
        capability = (7, 5)
        assert found() == [0.0, 0.0]
