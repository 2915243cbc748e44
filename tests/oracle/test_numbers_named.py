"""What a dump implies and a sentence says: the constant, the parameter, the rows, the part.

That the conventions are named at all is tested in test_mutants.py; here are their numbers.
"""

import numpy as np
import pytest
from mutants import MUTANTS
from mutants.outcome import check

from refops.oracle.conventions.fits import common_ratio, fitted_number, named_constant
from refops.oracle.replay import NotApplicable
from tiers import sampled

SAID = {
    "values-times-an-unknown-number": "The result, y, is the right one times a constant: 1/0.9.",
    "dbias-of-scaled-values": "3.7, the encode scale",
    "current-scale-inv-is-the-amax": "448, the largest value of the elements",
    "nv-scales-lack-a-sixth": "1/6, one by the largest value of the elements",
    "delayed-product-with-a-margin": "multiplied by is the right one times a constant: 0.9.",
    "nv-scale-in-the-amax-slot": "holds the encode scale",
    "dbias-counts-a-chunk-twice": "a part in it twice: rows 64..127",
    "dbias-stored-by-the-last-cta": "rows 192..255",
    "dbias-of-one-warp": "row 0 of every 8",
    "amax-without-the-tail": "column 511: it is the amax of the rows before the last partial tile of 128",
    "clamped-at-an-odd-number": "limit=6.125, where the call has limit=7",
    "gradient-with-alpha-1-3": "alpha=1.3",
    "swiglu-with-a-beta": "The argument of the sigmoid in swiglu has the factor 1.25",
    "gate-clamped-above-only": "at limit alone, not at -limit",
    "tanh-argument-in-half": "The argument of tanh is rounded to float16",
    "e4m3-carry-lost": "248.242 becomes 128",
    "mx-amax-starts-from-one": "starts from 1 (or a number with the same scale)",
    "block-amax-starts-from-a-number": "The amax of each block starts from 3.3, where TE's starts from 0",
    "block-scale-of-last-rows-stays-one": "The scales of blocks are 1 whatever the amax is",
    "mx-stored-scales-of-some-rows-stay-one": "The stored scales are 1 (0x7F) whatever the amax is",
    "mx-byte-without-emax": "without the format's exponent 8",
    "mx-floor-of-the-quotient": "the data are cast with that byte",
    "mx-amax-of-three-quarters": "first 24 of 32 elements alone",
    "swiglu-mx-amax-without-every-fourth": "elements 0 to 2 of every 4 alone",
    "blocks-amax-of-the-middle": "elements 32 to 95 alone",
    "dgeglu-with-the-slope-for-gelu": "the derivative f' of the activation stands where the activation f itself",
    "mx-second-cast-with-the-first-multiplier": "The columnwise codes are cast with the scales of the rowwise blocks",
    "nv-cast-with-the-tensor-scale-alone": "with the tensor's scale alone",
    "mx-tiles-down-the-columns": "the tiles follow each other down the columns",
    "mx-swizzled-twice": "the swizzle is applied twice",
    "rows-amax-by-butterfly": "in a reduction that begins with the far lanes",
    "silu-nv-cut-before-block-amax": "though not before the tensor's amax, where TE rounds it to nearest even",
}


@sampled("name", SAID, 3, in_all=1)
def test_the_sentence_says_what_was_found(name):
    mutant = MUTANTS[name]
    report = check(mutant, mutant.dump()[1], diagnose=True)
    right = [explanation.sentence for explanation in report.diagnosis if mutant.named_right(explanation)]
    assert any(SAID[name] in sentence for sentence in right), [e.sentence for e in report.diagnosis]


def test_a_ratio_is_that_of_what_differs():
    expected = np.array([1, 2, 3, 4, 5], np.float32)
    got = expected.copy()
    got[3:] *= 3
    low, high = common_ratio(got, expected, 0.0)
    assert low <= 3 <= high < 3.001 and low > 2.999
    got[2] = 7
    with pytest.raises(NotApplicable):
        common_ratio(got, expected, 0.0)
    with pytest.raises(NotApplicable):
        common_ratio(expected, expected, 0.0)


def test_a_constant_has_its_name_or_few_digits():
    assert named_constant(0.0039, 0.00391, {"1/256, one by the number of rows": 1 / 256})[1].startswith("1/256")
    assert named_constant(0.8999, 0.9001, {}) == (0.9, "0.9")
    assert named_constant(1.1111, 1.11112, {}) == (1 / 0.9, "1/0.9")
    value, words = named_constant(1.23456780, 1.23456782, {})
    assert words == "1.234568" and abs(value - 1.23456781) < 1e-8


def test_a_number_is_fitted_and_said_in_few_digits():
    assert fitted_number(lambda number: abs(number - 6.125), 7.0) == 6.125
    assert fitted_number(lambda number: abs(np.log(number / 0.3)), 1.0) == 0.3
    with pytest.raises(NotApplicable):  # the more the better: no number is meant
        fitted_number(lambda number: 1 / number, 1.0)
