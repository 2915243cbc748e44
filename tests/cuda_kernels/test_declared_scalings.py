"""A scaling that one declaration adds works on the CPU: no loop knows it by name."""

import ml_dtypes
import numpy as np
import pytest

from cuda_kernels import host
from declared_scalings import CHECKED, SHAPES, check_declared
from tiers import sampled


@sampled("name", CHECKED, 6, in_all=4)
def test_every_call_has_the_reference_s_bits(name):
    check_declared(host, name, ml_dtypes.bfloat16, SHAPES[name])


@pytest.mark.full
@sampled("name", CHECKED, 6, in_all=6)
def test_float32_too(name):
    check_declared(host, name, np.float32, (256, 384))
