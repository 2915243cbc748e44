"""Declarations that leave the vocabulary are refused by a sentence of their own, not by pages of the compiler's."""

from beyond_words import check_refusals
from cuda_kernels import host


def test_what_only_numpy_computes_is_refused():
    check_refusals(host)
