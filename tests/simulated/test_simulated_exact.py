"""`arithmetic="exact"` in the simulator: the bits of `refops`, for every bfloat16 and float16 and for many float32."""

import pytest

import cuda_kernels
import refops
from exactness import DTYPES, assert_exact
from tiers import sampled

pytestmark = pytest.mark.sweep


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@sampled("name", tuple(refops.ACTIVATIONS), 12)
def test_bits_are_the_reference_s(name, dtype):
    assert_exact(cuda_kernels, name, dtype, count=1 << 13, sums=False)
