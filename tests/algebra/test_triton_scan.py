"""The scan as a Triton kernel: in Triton's interpreter on a CPU, and compiled on a GPU."""

import importlib.util
from pathlib import Path

import numpy
import pytest
import torch
from oracles import FACTORS, WIDTH, loop
from torch.torch_version import TorchVersion

from gradfree.algebra import time_scan


@pytest.fixture
def interpreted(monkeypatch):
    """The kernel's module for Triton's interpreter; the imported module stays unchanged."""
    triton = pytest.importorskip("triton")
    if TorchVersion(triton.__version__) < "3.7" and TorchVersion(numpy.__version__) >= "2.5":
        pytest.skip("the interpreter of this Triton does not run with this numpy")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec = importlib.util.spec_from_file_location("interpreted", Path(time_scan.__file__).with_name("triton_scan.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_solves(scan, terms, factors, reverse, tolerance=1e-12):
    expected = loop(terms.double(), factors.double(), reverse)
    actual = scan(terms, factors, reverse)
    assert actual.dtype == terms.dtype
    assert actual.is_contiguous()
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("kind", FACTORS)
def test_the_kernel_equals_a_loop(interpreted, kind, length, reverse):
    assert_solves(interpreted.scan, torch.randn(length, 3, WIDTH), FACTORS[kind](length), reverse)


def test_several_programs_share_the_columns_of_operands_that_are_not_contiguous(interpreted):
    wide = torch.randn(33, 7, 70).transpose(0, 1)
    assert_solves(interpreted.scan, wide, torch.rand(70, 33, 7).permute(2, 1, 0), True)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_low_precision_sums_are_in_float32(interpreted, dtype, tolerance):
    terms, factors = torch.rand(300, 1, WIDTH).to(dtype), torch.full((WIDTH,), 0.99).to(dtype)
    assert_solves(interpreted.scan, terms, factors, True, tolerance)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", ["fp32", "fp64", "bf16"])
def test_the_kernel_compiles_for_an_absent_gpu(dtype, tmp_path, monkeypatch):
    """The interpreter accepts code that the compiler refuses. Prefetched loads compile to asynchronous copies."""
    triton = pytest.importorskip("triton", "3.3")  # The oldest whose compiler takes these arguments.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.backends.compiler import GPUTarget

    from gradfree.algebra.triton_scan import _BLOCK, _kernel

    accumulator = triton.language.float64 if dtype == "fp64" else triton.language.float32
    constants = {"ACCUMULATOR": accumulator, "BLOCK": _BLOCK}
    kinds = [f"*{dtype}"] * 3 + ["i32"] * 6 + ["constexpr"] * 2
    source = triton.compiler.ASTSource(_kernel, dict(zip(_kernel.arg_names, kinds, strict=True)), constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": 1})
    # 16-bit numbers are copied in pairs, so only if the width is known to be even.
    assert dtype == "bf16" or "cp.async" in compiled.asm["ptx"]


def test_a_kernel_that_triton_cannot_compile_warns_and_is_not_used():
    pytest.importorskip("triton")
    with pytest.warns(UserWarning, match="Triton cannot compile the scan for cpu"):
        assert time_scan._kernel.__wrapped__(torch.device("cpu")) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", [(1, 3, 5), (33, 3, 5), (4096, 1, 64), (257, 8, 200)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_compiled_kernel_equals_a_loop_on_a_gpu(dtype, shape, reverse):
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    terms = torch.randn(shape, dtype=dtype)
    for factors in (torch.linspace(0, 1, shape[-1], dtype=dtype), torch.rand(shape, dtype=dtype)):
        expected = loop(terms.double(), factors.double(), reverse)
        actual = time_scan.scan(terms.cuda(), factors.cuda(), reverse)
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=tolerance, atol=tolerance)
