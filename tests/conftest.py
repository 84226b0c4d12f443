import gc
import logging
import os
import sys
from collections.abc import Iterator

import pretend_device
import pytest
import torch

from gradfree.devices.hardware import without_tf32

pytest_plugins = ["pytester"]

# The tensors are tiny, and threads that wait for each other make a busy machine crawl.
torch.set_num_threads(1)
# To seed what is not there costs torch the stack of the call, some milliseconds of each: it would be for later.
for backend in (torch.cuda, torch.xpu, torch.mtia):
    if not backend.is_available():
        backend.manual_seed_all = lambda seed: None
# Nothing that is made until the tests begin is garbage, but to look for some takes seconds.
gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take a device, and the number of random programs that the slow tests try (``tests/depth/programs``)."""
    parser.addoption("--device", default="cpu", help="the device of the tests' models and batches, by default cpu")
    parser.addoption("--programs", type=int, default=100, help="how many random programs to try against autograd")


def pytest_xdist_auto_num_workers() -> int:
    """One worker more than there are cores: a third of the time tests wait, for ranks, processes and timeouts."""
    return (os.cpu_count() or 1) + 1


def pytest_configure(config: pytest.Config) -> None:
    """Build the device that only these tests have, if it is asked for."""
    if config.getoption("device") == pretend_device.NAME:
        try:
            pretend_device.register()
        except RuntimeError as error:
            raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Skip what torch itself cannot run: ``nn.LSTM`` in bfloat16, on CPUs without AVX-512."""
    try:
        return (yield)
    except RuntimeError as error:
        if "could not create a primitive descriptor for the LSTM" in str(error):
            pytest.skip("torch has no nn.LSTM in bfloat16 on this CPU")
        raise


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """The device of ``--device``."""
    return str(request.config.getoption("device"))


@pytest.fixture(autouse=True)
def float64(device: str, request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test starts from the same random numbers, and computes in float64 unless it says otherwise.

    With another ``--device`` what names none is made there, except in tests that start processes: these compute on the
    CPU, and what they are compared with does, too. On a GPU float32 is not rounded to TF32, and cuDNN adds
    in the same order each time.
    """
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    elsewhere = device != "cpu" and request.node.get_closest_marker("processes") is None
    if elsewhere:
        torch.set_default_device(device)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True), without_tf32():
        yield
    if elsewhere:
        torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The messages that gradfree logs; pytest's own plugin is off, as it goes through 700 loggers six times a test."""
    messages: list[str] = []
    logger, handler = logging.getLogger("gradfree"), logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield messages
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def without_gradfree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every import of gradfree fails, that of a class by pickle among them."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "gradfree":
            monkeypatch.setitem(sys.modules, name, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow features of ``gradfree.testing`` and those of two ranks; begin with tests that start processes.

    One worker has them all then, and the server that they are forked from, unless the others run out of work.
    """
    for item in items:
        feature = item.callspec.params.get("feature") if hasattr(item, "callspec") else None
        if getattr(feature, "slow", False):
            item.add_marker(pytest.mark.slow)
        if getattr(feature, "ranks", False):
            item.add_marker(pytest.mark.processes)
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)


def pytest_collection_finish() -> None:
    """Spare the tests what takes torch and the garbage collector long: to go through all of torch takes it a second."""
    gc.freeze()
    gc.enable()
    # To time the guards of each compiled function torch flushes the cache: 20 ms each.
    if (guards := sys.modules.get("torch._dynamo.guards")) is not None:
        guards.profile_guard_manager = lambda *_: 0.0


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Let the collector not look at what the tests of a file have imported and kept: that took a tenth of all time."""
    if nextitem is None or nextitem.path != item.path:
        gc.freeze()
