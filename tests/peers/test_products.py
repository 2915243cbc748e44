"""Products of tensor cores against mmasim: no result may differ, special values and scales included."""

from dataclasses import replace

import numpy as np
import pytest

from peers import mmasim_products as peer
from refops.products import UNITS, matmul
from tiers import sampled

CASES = peer.cases()


@pytest.fixture(scope="module")
def mmasim():
    """Their classes, or skip."""
    pytest.importorskip("mmasim")
    return peer.load()


every_case = {"ids": [peer.label(*case) for case in CASES]}


@sampled("case", CASES, 9, in_all=3, **every_case)
def test_no_result_differs(mmasim, case):
    """20 480 of each case, of each kind of input a fifth."""
    for kind in peer.KINDS_OF_INPUT:
        assert peer.differing(*case, np.random.default_rng(0), kind, 4096) == (0, 4096), kind


@pytest.mark.full
@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES, **every_case)
def test_none_of_a_million_results_differs(mmasim, case):
    for kind in peer.KINDS_OF_INPUT:
        wrong, count = peer.differing(*case, np.random.default_rng(1), kind, 200_000)
        assert wrong == 0 and count >= 200_000, kind


@pytest.mark.parametrize("name", ["fraction_bits", "products"])
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: f"{unit.card} {unit.name}")
def test_the_comparison_sees_a_wrong_number(mmasim, unit, name):
    """Else nothing would be known of results that do not differ."""
    formats, block = peer.pairs(unit)[0], next(iter(unit.scale_blocks), None)

    def wrong(a, b, right, **options):
        return matmul(a, b, replace(right, **{name: getattr(right, name) // 2}), **options)

    found = [
        peer.differing(unit, formats, block, np.random.default_rng(0), kind, 4096, wrong)[0]
        for kind in ("any", "finite", "cancelling")
    ]
    assert max(found) > 40


def test_most_inputs_have_numbers_for_results():
    """Not NaN, of which one is like the other; and of special values some have infinities."""
    rng = np.random.default_rng(0)
    for unit, formats, block in CASES:
        for kind in ("finite", "small", "cancelling"):
            codes = peer.inputs(unit, *formats, block, rng, kind, 16, 16, 2 * unit.products)
            results = peer.ours(unit, *formats, block, codes)
            assert np.isfinite(results.astype(np.float32)).mean() > 0.5, peer.label(unit, formats, block)
