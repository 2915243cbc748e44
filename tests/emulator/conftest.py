"""These tests run compiled kernels on the software GPU, by an invocation of their own: `pytest tests/emulator`.

A process that has loaded the software GPU keeps it, and other tests say what happens without a GPU. Device 0 is sm_90,
then come sm_80, sm_100a and sm_120a.
"""

import os

import pytest

from cuda_kernels.emulator import loading

if os.environ.get("NUMBA_ENABLE_CUDASIM"):
    raise pytest.UsageError("tests/emulator runs compiled kernels: unset NUMBA_ENABLE_CUDASIM")
loading.load()

ORDERS = {
    "eager": {"deferred": False, "backward": False},
    "deferred": {"deferred": True, "backward": False},
    "deferred, backward": {"deferred": True, "backward": True},
}


@pytest.fixture(autouse=True)
def unbroken():
    """Each test starts with nothing that another one left: no fault, no work, no report, the settings as they were."""
    before = loading.settings()
    loading.forget()
    yield
    loading.reset()
    loading.load(before)


@pytest.fixture(params=ORDERS)
def order(request):
    """The software GPU does its work at once, or when somebody waits for it; returns the name of the order."""
    loading.behaviour(**ORDERS[request.param])
    return request.param


@pytest.fixture
def driver():
    """The driver's calls, with device 0 current."""
    from driver import Driver

    made = Driver()
    made.use(0)
    return made
