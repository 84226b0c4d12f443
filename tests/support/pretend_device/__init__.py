"""A test device, "pretend", that behaves like a GPU on a machine without one.

The CPU cannot read its memory, mixing devices is an error, it has separate random numbers, and it counts how many times
the host waits for it. It computes on the CPU. ``pytest --device pretend`` builds it once, with g++ and ninja.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

NAME = "pretend"
_HERE = Path(__file__).resolve().parent
_BUILDS = _HERE.parents[2] / "build" / "pretend"


def missing_tools() -> list[str]:
    """Return the missing programs that building the device needs."""
    return [tool for tool in (os.environ.get("CXX", "c++"), "ninja") if shutil.which(tool, path=_path()) is None]


def _path() -> str:
    """Return the search path for programs, with the folder of Python first: an environment's ninja is there."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))


@cache
def register() -> None:
    """Register the device with torch in this process.

    Raises:
        RuntimeError: the compiler is missing or fails.
    """
    if missing := missing_tools():
        raise RuntimeError(f"the device {NAME} is built with {' and '.join(missing)}, not found here")
    from torch.utils import cpp_extension

    folder = _BUILDS / torch.__version__
    folder.mkdir(parents=True, exist_ok=True)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    os.environ["PATH"] = _path()
    # Otherwise autograd's thread for this device uses Python after its shutdown.
    os.environ["TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT"] = "0"
    cpp_extension.load(
        "pretend_device",
        [str(_HERE / "device.cpp")],
        extra_cflags=["-O0"],
        build_directory=str(folder),
        is_python_module=False,
    )
    torch.utils.generate_methods_for_privateuse1_backend()
    from pretend_device import kernels

    kernels.register()


def waits() -> int:
    """Return the number of times the host has waited for the device, as in ``.item()``, ``.cpu()`` and ``bool()``."""
    return int(torch.ops.pretend.waits())


def make_copies_late(late: bool) -> None:
    """Set whether non-blocking copies to the host arrive only when the host waits next."""
    torch.ops.pretend.make_copies_late(late)


def _module() -> ModuleType:
    """Return the module ``torch.pretend``."""
    module = ModuleType(f"torch.{NAME}")
    module._initialized = True
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = module._lazy_init = lambda *args: None
    module.device = lambda device: nullcontext()
    module.synchronize = lambda device=None: torch.ops.pretend.synchronize()
    module.manual_seed = module.manual_seed_all = lambda seed: torch.ops.pretend.seed(seed % 2**63)
    module.get_rng_state = lambda device=NAME: torch.ops.pretend.random_state()
    module.set_rng_state = lambda state, device=NAME: torch.ops.pretend.set_random_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return module
