"""Every test of `fuser` starts and ends without FP8 state: recipe, amax histories, scales."""

import pytest

from fuser.dispatch import backend
from fuser.quantization.state import FP8GlobalStateManager


@pytest.fixture(autouse=True)
def fresh_fp8_state():
    FP8GlobalStateManager.reset()
    yield
    FP8GlobalStateManager.reset()


@pytest.fixture
def the_reference_quantizes():
    """Nothing is compiled for a test to which the kernels are no matter. test_quantizers.py has those."""
    with backend("reference"):
        yield
