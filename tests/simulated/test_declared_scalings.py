"""A scaling that one declaration adds works in the simulator, which checks every access."""

import ml_dtypes
import pytest

import cuda_kernels
from declared_scalings import CHECKED, check_declared


@pytest.mark.parametrize("name", CHECKED)
def test_every_call_has_the_reference_s_bits(name):
    check_declared(cuda_kernels, name, ml_dtypes.bfloat16, (48, 48) if "fp4" in name else (37, 43))
