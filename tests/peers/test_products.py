"""Products of tensor cores against those who measured cards: no result may differ, special values included.

mmasim has every unit. mmaemu replays what cuBLAS 12.8 computed on an H100, scales and rounding included.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import refops
from arrays import assert_same_bits, heavy_tailed
from cuda_kernels.host import products
from peers import mmasim_products as peer
from peers.registry import as_numpy
from refops import E4M3, E5M2
from refops.products import UNITS, matmul
from tiers import sampled

CASES = peer.cases()


@pytest.fixture(scope="module")
def mmasim():
    """Their classes, or skip."""
    pytest.importorskip("mmasim")
    return peer.load()


every_case = {"ids": [peer.label(*case) for case in CASES]}


every_kind = {"ids": [f"{peer.label(*case)}, {kind}" for case, kind in product(CASES, peer.KINDS_OF_INPUT)]}


@sampled(("case", "kind"), product(CASES, peer.KINDS_OF_INPUT), 17, in_all=3, **every_kind)
def test_no_result_differs(mmasim, case, kind):
    """4096 of each case and kind of input."""
    assert peer.differing(*case, np.random.default_rng(0), kind, 4096) == (0, 4096)


@sampled(("case", "kind"), product(CASES, peer.KINDS_OF_INPUT), 61, in_all=9, **every_kind)
def test_no_result_of_the_compiled_loops_differs(mmasim, case, kind):
    """Whose bits are the reference's, too: test_host_products.py."""
    assert peer.differing(*case, np.random.default_rng(2), kind, 4096, products.matmul) == (0, 4096)


@pytest.mark.full
@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES, **every_case)
def test_none_of_a_million_results_differs(mmasim, case):
    """Of the compiled loops, whose bits are the reference's, and which take a hundredth of the time."""
    for kind in peer.KINDS_OF_INPUT:
        wrong, count = peer.differing(*case, np.random.default_rng(1), kind, 200_000, products.matmul)
        assert wrong == 0 and count >= 200_000, kind


@pytest.mark.parametrize("name", ["fraction_bits", "products"])
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: f"{unit.card} {unit.name}")
def test_the_comparison_sees_a_wrong_number(mmasim, unit, name):
    """Otherwise equal results would prove nothing."""
    formats, block = peer.pairs(unit)[0], next(iter(unit.scale_blocks), None)

    def wrong(a, b, right, **options):
        return matmul(a, b, replace(right, **{name: getattr(right, name) // 2}), **options)

    assert any(
        peer.differing(unit, formats, block, np.random.default_rng(0), kind, 4096, wrong)[0] > 40
        for kind in ("any", "finite", "cancelling")
    )


def test_most_inputs_have_numbers_for_results():
    """NaN would tell little, because all NaN compare as equal. Of the special values some give infinities."""
    rng = np.random.default_rng(0)
    for unit, formats, block in CASES:
        for kind in ("finite", "small", "cancelling"):
            codes = peer.inputs(unit, *formats, block, rng, kind, 16, 16, 2 * unit.products)
            results = peer.ours(unit, *formats, block, codes)
            assert np.isfinite(results.astype(np.float32)).mean() > 0.5, peer.label(unit, formats, block)


PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)]


@sampled(
    ("first", "second", "split", "dtype"),
    [(*pair, split, dtype) for pair in PAIRS for split in (False, True) for dtype in ("float32", "bfloat16")],
    5,
    in_all=1,
    ids=str,
)
def test_hopper_s_products_are_those_of_cublas(first, second, split, dtype):
    """Of heavy-tailed tensors, and of all codes; with a forward product's accumulator and a split one."""
    mmaemu, torch = pytest.importorskip("mmaemu"), pytest.importorskip("torch")
    types = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
    for seed, k in enumerate((1024, 160, 160)):
        x, w = (heavy_tailed((32, k), seed=2 * seed), heavy_tailed((48, k), seed=2 * seed + 1))
        qx, qw = refops.quantize(x, refops.CurrentScaling(first)), refops.quantize(w, refops.CurrentScaling(second))
        if seed == 2:
            rng = np.random.default_rng(0)
            qx = replace(qx, rowwise_data=np.where(rng.random(x.shape) < 0.99, qx.rowwise_data, np.uint8(0x7F)))
        (left, left_scale), (right, right_scale) = (
            (torch.from_numpy(q.rowwise_data).view(types[q.scaling.fmt]), torch.from_numpy(q.rowwise_scale_inv)[0])
            for q in (qx, qw)
        )
        theirs = mmaemu.scaled_mm(
            left,
            right.t(),
            left_scale,
            right_scale,
            out_dtype=getattr(torch, dtype),
            use_fast_accum=not split,
            profile="hopper",
            splitk=1,
        )
        ours = refops.gemm(qw, qx, "hopper", use_split_accumulator=split, out_dtype=as_numpy(theirs).dtype)
        assert_same_bits(ours, as_numpy(theirs))
