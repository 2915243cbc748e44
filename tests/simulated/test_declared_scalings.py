"""A scaling that one declaration adds works in the simulator, which checks every access."""

import ml_dtypes
import numpy as np
import pytest

import cuda_kernels
from cuda_kernels.errors import NoKernelsError
from declared_scalings import CHECKED, WITHOUT_GPU_KERNELS, check_declared, declared


@pytest.mark.parametrize("name", CHECKED)
def test_every_call_has_the_reference_s_bits(name):
    check_declared(cuda_kernels, name, ml_dtypes.bfloat16, (48, 48) if "fp4" in name else (37, 43))


@pytest.mark.parametrize("scaling", WITHOUT_GPU_KERNELS, ids=["stochastic", "hadamard", "choice"])
def test_what_no_kernel_makes_is_refused(scaling):
    """Kernels of stochastic rounding, the Hadamard transform and a choice of scales transpose columnwise copies."""
    x = np.ones((32, 64), ml_dtypes.bfloat16)
    with declared():
        for call in (
            lambda: cuda_kernels.quantize(x, scaling),
            lambda: cuda_kernels.quantize(x, scaling, rowwise=False, columnwise=True),
            lambda: cuda_kernels.activation_quantize("gelu", x, scaling, columnwise=True),
        ):
            with pytest.raises(NoKernelsError, match=r"must be one that has kernels: columnwise copies .*; got Along"):
                call()
