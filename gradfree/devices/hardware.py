"""What differs from device to device: the one file that names any.

Everything else asks here, or asks ``torch.accelerator`` and the device's own module through here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

_WITHOUT_QUEUE = ("cpu", "meta")
"""Nothing there is ever under way: an operation has ended when its call returns."""


def runs_triton(device: torch.device) -> bool:
    """Return whether the project's Triton kernels are made for ``device``."""
    return device.type == "cuda"


def runs_cudnn(device: torch.device) -> bool:
    """Return whether torch runs recurrent layers on ``device`` by cuDNN, as far as the device alone tells."""
    return device.type == "cuda" and torch.backends.cudnn.is_available() and torch.backends.cudnn.enabled


def keeps_pinned(device: torch.device) -> bool:
    """Return whether torch keeps pinned host memory alive until ``device`` has read what is copied from it."""
    return device.type in ("cuda", "xpu")


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a CPU tensor on ``device``; waits for the device only if it may still read memory that is freed."""
    return x.pin_memory().to(device, non_blocking=True) if keeps_pinned(device) else x.to(device)


def start_copy_to_cpu(x: Tensor) -> Callable[[], Tensor]:
    """Begin to copy ``x`` to the CPU; return what waits for the copy and returns it."""
    if x.device.type in _WITHOUT_QUEUE:
        return lambda: x
    # Elsewhere memory is not pinned, and the copy itself may wait: its values are right all the same.
    host = torch.empty_like(x, device="cpu", pin_memory=keeps_pinned(x.device))
    host.copy_(x, non_blocking=True)
    copied = _event(x.device, timing=False)

    def wait() -> Tensor:
        if copied is not None:
            copied.synchronize()
        return host

    return wait


def _event(device: torch.device, timing: bool) -> Any:
    """Return an event behind all that is queued on ``device``; wait for that, and return ``None``, if it has none."""
    try:
        event = torch.Event(device, enable_timing=timing)
        event.record(torch.accelerator.current_stream(device))
    except (RuntimeError, NotImplementedError):
        synchronize(device)
        return None
    return event


def mark(device: torch.device) -> Any:
    """Return a point in time: of the CPU or, on another device, of what has been queued on its current stream.

    Waits for a device that has no events.
    """
    event = None if device.type in _WITHOUT_QUEUE else _event(device, timing=True)
    return perf_counter() if event is None else event


def seconds(start: Any, end: Any) -> float:
    """Return the time between two marks of one device; waits until the device has reached the second."""
    if isinstance(start, float):
        return float(end - start)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def synchronize(device: torch.device | str) -> None:
    """Wait until ``device`` has done all that is queued."""
    if torch.device(device).type not in _WITHOUT_QUEUE:
        torch.accelerator.synchronize(device)


def random_state(device: torch.device) -> Tensor | None:
    """Return the state of the device's own generator; ``None`` for the CPU and for what has none."""
    if device.type in _WITHOUT_QUEUE:
        return None
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Set what :func:`random_state` has returned."""
    torch.get_device_module(device).set_rng_state(state, device)


def devices_in_use() -> list[torch.device]:
    """Return the accelerator's devices if a tensor has been made there; to look for more would start it."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or not getattr(torch.get_device_module(kind), "is_initialized", lambda: True)():
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def is_available(name: str) -> bool:
    """Return whether this machine has a device of that name; starts none."""
    try:
        kind = torch.device(name).type
    except RuntimeError:
        return False
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return kind == "cpu" or (accelerator is not None and kind == accelerator.type)


def description(device: torch.device | str) -> str:
    """Return what people call the hardware, if the device's module tells; the device's own name otherwise."""
    tell = getattr(torch.get_device_module(torch.device(device).type), "get_device_name", None)
    return str(device) if tell is None else str(tell(device))


def peak_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """Return how much ``work`` allocates at its worst moment; ``None`` if the device's module counts no peak."""
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


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Multiply matrices without autocast and without TF32, whatever is set outside."""
    with _set(_without_tf32_in_products()), torch.autocast(device.type, enabled=False):
        yield


@contextmanager
def without_tf32() -> Iterator[None]:
    """Compute float32 as float32: matrix products, convolutions and recurrent layers, whatever is set outside."""
    cudnn: Any = torch.backends.cudnn
    try:
        known = hasattr(cudnn, "allow_tf32")
    except RuntimeError:  # A user of the new names may no longer ask for those of old.
        known = False
    parts = (
        [(cudnn, "allow_tf32", False)] if known else [(p, "fp32_precision", "ieee") for p in (cudnn.conv, cudnn.rnn)]
    )
    with _set([_without_tf32_in_products()[0], *parts]):
        yield


_Setting = tuple[Any, str, Any]
"""An object, the name of an attribute, and its value."""


def _without_tf32_in_products() -> list[_Setting]:
    products = torch.backends.cuda.matmul
    # From torch 2.9 on; a user of the new name may no longer ask for that of old.
    new = hasattr(products, "fp32_precision")
    return [(products, "fp32_precision", "ieee") if new else (products, "allow_tf32", False)]


@contextmanager
def _set(settings: Sequence[_Setting]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in settings]
    for owner, name, value in settings:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
