"""Declarations that leave the vocabulary are refused by a sentence; paths that no product scaling has are right."""

from dataclasses import replace

import ml_dtypes
import pytest

import refops
from arrays import assert_same_bits, assert_same_quantized, heavy_tailed
from beyond_words import check_refusals
from cuda_kernels import host
from refops import E4M3


def test_what_only_numpy_computes_is_refused():
    check_refusals(host)


class CastUnrounded(refops.CurrentScaling):
    """A scale of the amax, for values that are cast as they are computed."""

    path = refops.DelayedScaling.path


class SummedRounded(refops.DelayedScaling):
    """A known scale, for values that are cast as they are computed, and summed as they are stored."""

    path = replace(refops.DelayedScaling.path, dbias_rounded=True)


@pytest.mark.parametrize("scaling", [CastUnrounded(E4M3), SummedRounded(E4M3, 3.0)])
def test_paths_that_gpus_refuse(scaling):
    dy, x = (heavy_tailed((9, 48), ml_dtypes.bfloat16, seed) for seed in (1, 2))
    flags = {"columnwise": True, "dbias": True}
    got, sums = host.activation_grad_quantize("relu", dy, x, scaling, **flags)
    expected, expected_sums = refops.activation_grad_quantize("relu", dy, x, scaling, **flags)
    assert_same_quantized(got, expected)
    assert_same_bits(sums, expected_sums)
