"""A device of the tests' own, "pretend": not the CPU, as a GPU is not, on a machine that has none.

Its memory is unreadable to the CPU, to mix the two is an error, its random numbers are its own, and it counts how often
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
    """Return what is needed to build the device and is not there."""
    return [tool for tool in (os.environ.get("CXX", "c++"), "ninja") if shutil.which(tool, path=_path()) is None]


def _path() -> str:
    """Return where programs are looked for: an environment's ninja is beside its Python."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))


@cache
def register() -> None:
    """Make the device known to torch in this process.

    Raises:
        RuntimeError: there is no compiler, or it fails.
    """
    if missing := missing_tools():
        raise RuntimeError(f"the device {NAME} is built with {' and '.join(missing)}, not found here")
    from torch.utils import cpp_extension

    folder = _BUILDS / torch.__version__
    folder.mkdir(parents=True, exist_ok=True)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    os.environ["PATH"] = _path()
    # Or autograd's thread of this device asks for Python once more when there is none any longer.
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
    """Return how often the host has waited for the device: each ``.item()``, ``.cpu()``, ``bool()`` does."""
    return int(torch.ops.pretend.waits())


def make_copies_late(late: bool) -> None:
    """Let copies to the host that need not be waited for arrive when the host waits next, not before."""
    torch.ops.pretend.make_copies_late(late)


def _module() -> ModuleType:
    """Return ``torch.pretend``: what torch looks up by a device's name."""
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
