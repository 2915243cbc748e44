"""Every test of `fuser` starts and ends without FP8 state: recipe, amax histories, scales."""

import pytest

from fuser.quantization.state import FP8GlobalStateManager


@pytest.fixture(autouse=True)
def fresh_fp8_state():
    FP8GlobalStateManager.reset()
    yield
    FP8GlobalStateManager.reset()
