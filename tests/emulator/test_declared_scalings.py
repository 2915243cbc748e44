"""A scaling that one declaration adds works on a GPU: its kernels are compiled and run, or refused by a sentence."""

import ml_dtypes
import numpy as np
import pytest

import cuda_kernels
from beyond_words import check_refusals
from declared_scalings import CHECKED, SHAPES, check_declared
from tiers import sampled


@sampled("name", CHECKED, 6, in_all=12)
def test_every_call_has_the_reference_s_bits(name):
    with cuda_kernels.emulated("sm_90"):
        check_declared(cuda_kernels, name, ml_dtypes.bfloat16, SHAPES[name])


@pytest.mark.full
@sampled("name", CHECKED, 6, in_all=12)
def test_float32_on_another_target(name):
    with cuda_kernels.emulated("sm_100a"):
        check_declared(cuda_kernels, name, np.float32, (128, 256))


def test_what_only_numpy_computes_is_refused():
    with cuda_kernels.emulated("sm_90"):
        check_refusals(cuda_kernels)
