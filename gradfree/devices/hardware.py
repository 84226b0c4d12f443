"""What torch does differently on each device: events, copies, random states, kernels, rounding.

Other modules call the functions here, which use ``torch.accelerator`` and torch's module of the device. No other file
names an accelerator; rules of cost, and choices that are for CPUs only, compare with ``"cpu"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

_WITHOUT_QUEUE = ("cpu", "meta")
"""Devices without a queue: an operation is complete when its call returns."""


def runs_triton(device: torch.device) -> bool:
    """Return whether gradfree has Triton kernels for ``device``."""
    return device.type == "cuda"


def runs_cudnn(device: torch.device) -> bool:
    """Return whether torch can run recurrent layers on ``device`` by cuDNN; dtypes and sizes may still prevent it."""
    return device.type == "cuda" and torch.backends.cudnn.is_available() and torch.backends.cudnn.enabled


CUDNN_STEPS = 2**16 - 1
"""The most steps of a sequence that cuDNN's recurrent layers take in one call."""


def steps_a_call(length: int, device: torch.device) -> int:
    """Return how many of ``length`` steps torch's recurrent kernel can take in one call: all, or pieces of 2¹⁵."""
    return (CUDNN_STEPS + 1) // 2 if length > CUDNN_STEPS and runs_cudnn(device) else length


def keeps_pinned(device: torch.device) -> bool:
    """Return whether torch keeps pinned host memory alive until ``device`` has finished copying from it."""
    return device.type in ("cuda", "xpu")


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to ``device``, without a sync where pinned memory stays alive until it is copied."""
    return x.pin_memory().to(device, non_blocking=True) if keeps_pinned(device) else x.to(device)


def start_copy_to_cpu(x: Tensor) -> Callable[[], Tensor]:
    """Start copying ``x`` to the CPU; return a function that waits for the copy and returns it."""
    if x.device.type in _WITHOUT_QUEUE:
        return lambda: x
    # Without pinned memory the copy itself may wait; its values are right in any case.
    host = torch.empty_like(x, device="cpu", pin_memory=keeps_pinned(x.device))
    host.copy_(x, non_blocking=True)
    copied = _event(x.device, timing=False)

    def wait() -> Tensor:
        if copied is not None:
            copied.synchronize()
        return host

    return wait


def _event(device: torch.device, timing: bool) -> Any:
    """Record and return an event on ``device``'s current stream; without events, synchronize and return ``None``."""
    try:
        event = torch.Event(device, enable_timing=timing)
        event.record(torch.accelerator.current_stream(device))
    except (RuntimeError, NotImplementedError):
        synchronize(device)
        return None
    return event


def mark(device: torch.device) -> Any:
    """Return a time mark: the CPU's clock or, on another device, an event on its current stream.

    Synchronizes a device that has no events.
    """
    event = None if device.type in _WITHOUT_QUEUE else _event(device, timing=True)
    return perf_counter() if event is None else event


def seconds(start: Any, end: Any) -> float:
    """Return the seconds between two marks of one device; waits until the device has reached the second."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def synchronize(device: torch.device | str) -> None:
    """Wait until ``device`` has finished all queued work."""
    if torch.device(device).type not in _WITHOUT_QUEUE:
        torch.accelerator.synchronize(device)


def random_state(device: torch.device) -> Tensor:
    """Return the state of the device's random generator; the meta device has the CPU's."""
    if device.type in _WITHOUT_QUEUE:
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Restore a state that :func:`random_state` returned."""
    if device.type in _WITHOUT_QUEUE:
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def devices_in_use() -> list[torch.device]:
    """Return the accelerator's devices if it is initialized, else none; does not initialize it."""
    kind = _accelerator()
    if kind is None or not getattr(torch.get_device_module(kind), "is_initialized", lambda: True)():
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def is_available(name: str) -> bool:
    """Return whether this machine has a device of that name; initializes none."""
    try:
        kind = torch.device(name).type
    except RuntimeError:
        return False
    accelerator = _accelerator()
    return kind == "cpu" or (accelerator is not None and kind == accelerator.type)


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def description(device: torch.device | str) -> str:
    """Return the hardware's name if torch knows it, else the device's name."""
    get_name = getattr(torch.get_device_module(torch.device(device).type), "get_device_name", None)
    return str(device) if get_name is None else str(get_name(device))


def peak_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """Return the peak number of bytes that ``work`` allocates; ``None`` if torch counts no peak on the device."""
    module = torch.get_device_module(device)
    if not hasattr(module, "reset_peak_memory_stats"):
        return None
    before = module.memory_allocated(device)
    module.reset_peak_memory_stats(device)
    work()
    return int(module.max_memory_allocated(device) - before)


def widest_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 if ``device`` does not compute in float64."""
    try:
        torch.ones(1, dtype=torch.float64, device=device).neg()
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def product_rounding(device: torch.device, dtype: torch.dtype, by_kernel: bool = False) -> float:
    """Return the relative error to which matrix products round their factors; 0.0 if no more than ``dtype`` does.

    It depends on torch's settings: autocast and, in float32, those that allow TF32 (2⁻¹¹) or bfloat16 (2⁻⁸).

    Args:
        device: where the product is computed.
        dtype: of its factors.
        by_kernel: whether it is a part of torch's recurrent kernel; cuDNN has a setting of its own, which is TF32 by
            default.
    """
    if dtype is not torch.float32:
        return 0.0
    if torch.is_autocast_enabled(device.type):
        return torch.finfo(torch.get_autocast_dtype(device.type)).eps / 2
    if device.type == "cpu":
        return _rounding_on_cpu()
    return 2.0**-11 if _allows_tf32(device, by_kernel) else 0.0


def _allows_tf32(device: torch.device, by_kernel: bool) -> bool:
    """Return whether torch's settings allow TF32 on ``device``, which needs compute capability 8."""
    if device.type != "cuda" or torch.get_device_module(device).get_device_capability(device) < (8, 0):
        return False
    owner: Any = torch.backends.cudnn if by_kernel and runs_cudnn(device) else torch.backends.cuda.matmul
    # The new setting exists from torch 2.9 on; cuDNN has one for recurrent layers.
    owner = getattr(owner, "rnn", owner)
    return owner.fp32_precision == "tf32" if hasattr(owner, "fp32_precision") else bool(owner.allow_tf32)


def _rounding_on_cpu() -> float:
    """Return the rounding error of a product's factors on the CPU, where a setting has an effect on few processors."""
    products: Any = getattr(torch.backends.mkldnn, "matmul", None)
    setting = torch.get_float32_matmul_precision() if products is None else products.fp32_precision
    if setting in ("highest", "none", "ieee"):
        return 0.0
    one = torch.eye(64, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        return next((u for u in (2.0**-8, 2.0**-11) if (one * (1 + u / 2) @ one)[0, 0] == 1.0), 0.0)


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Set the number of torch's threads on the CPU.

    Not ``torch.utils.benchmark.set_torch_threads``: some versions of torch ask for an accelerator when that is
    imported, and CUDA then refuses to work in forked processes.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def without_tf32() -> Iterator[None]:
    """Disable TF32 in matrix products, convolutions and recurrent layers, regardless of the user's settings."""
    products: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    # The new setting exists from torch 2.9 on; once it is set, torch forbids reading the old one.
    of_products = ("fp32_precision", "ieee") if hasattr(products, "fp32_precision") else ("allow_tf32", False)
    settings: list[tuple[Any, str, Any]] = [(products, *of_products)]
    try:
        old = hasattr(cudnn, "allow_tf32")
    except RuntimeError:
        old = False
    if old:
        settings.append((cudnn, "allow_tf32", False))
    else:
        settings += [(part, "fp32_precision", "ieee") for part in (cudnn.conv, cudnn.rnn)]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in settings]
    for owner, name, value in settings:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
