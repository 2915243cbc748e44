"""These tests run the real kernels in the simulator, by an invocation of their own: `pytest tests/simulated`.

Whether kernels are simulated is decided when `cuda_kernels` is first imported, so the variable is set here, before any
test module; a process that has imported the package unsimulated cannot run them.
"""

import os
import sys

import pytest

if "cuda_kernels.simt" in sys.modules and not sys.modules["cuda_kernels.simt"].SIMULATED:
    raise pytest.UsageError(
        "cuda_kernels was imported unsimulated in this process: run tests/simulated by itself, "
        "`python -m pytest tests/simulated`"
    )
os.environ["NUMBA_ENABLE_CUDASIM"] = "1"


@pytest.fixture
def backward():
    """The launcher, with the threads of every block and the blocks themselves from the last to the first."""
    from cuda_kernels.launch import Simulated

    Simulated.order = "backward"
    yield
    Simulated.order = "forward"
