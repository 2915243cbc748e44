"""`cuda_kernels.host.products` has the bits of `refops.products`: any operands, shapes, strides and threads."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import refops.products
from arrays import assert_same_bits, same_bits
from cuda_kernels import host
from cuda_kernels.host import products
from cuda_kernels.host.products import panels
from product_cases import KINDS, MXFP8, NVFP4, UNSEEN, F, any_case, faulty, random_case, small_cases, values_of
from refops import E4M3
from refops.products import UNITS, unit

profile = settings(
    derandomize=True, deadline=None, max_examples=20, database=None, suppress_health_check=[HealthCheck.too_slow]
)
every_unit = pytest.mark.parametrize("row", UNITS, ids=lambda row: f"{row.card} {row.name}")
HOPPER_FP8, HOPPER_16 = unit("hopper", E4M3), unit("hopper", ml_dtypes.bfloat16)
IN_HALF = unit("hopper", np.float16, accumulator=np.float16)
FORMATS = {"a_format": E4M3, "b_format": E4M3}
HALVES = {"a_format": np.float16, "b_format": np.float16}


def reference(row, case):
    with np.errstate(all="ignore"):
        return refops.products.matmul(unit=row, **case)


@pytest.fixture
def threads():
    """Sets the number of threads, which is as it was after the test."""
    before = host.get_num_threads()
    yield host.set_num_threads
    host.set_num_threads(before)


# --- bits -------------------------------------------------------------------------------------------


@pytest.mark.check
@pytest.mark.parametrize("kind", KINDS)
@every_unit
def test_bits_are_those_of_the_reference(row, kind):
    rng = np.random.default_rng(0)
    for promoted in (None, "plain", "scaled"):
        case = any_case(rng, row, (67, 70, 2 * row.products + 5), kind, promoted)
        assert_same_bits(products.matmul(unit=row, **case), reference(row, case))


@every_unit
@profile
@given(
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 130), st.integers(1, 300)),
    kind=st.sampled_from([*KINDS]),
    promoted=st.sampled_from([None, "plain", "scaled"]),
    seed=st.integers(0, 1 << 32),
)
def test_any_shape(row, sizes, kind, promoted, seed):
    m, n, k = sizes
    sizes = (m, n, k) if m * n * k < 100_000 else (m % 8 + 1, n, k)  # the reference takes some 50 ns a product
    case = any_case(np.random.default_rng(seed), row, sizes, kind, promoted)
    assert_same_bits(products.matmul(unit=row, **case), reference(row, case))


@every_unit
def test_pieces_of_k_and_tiles_follow_each_other(row):
    """More than one piece of k, and more than one tile either way."""
    rng = np.random.default_rng(1)
    for sizes in ((2, 3, 2 * panels.DEPTH + 9), (2, 600, row.products), (300, 2, row.products)):
        case = any_case(rng, row, sizes, "any", "scaled")
        assert_same_bits(products.matmul(unit=row, **case), reference(row, case))


def test_exponents_that_an_int8_does_not_hold():
    """Groups whose largest elements meet zeros, or numbers so small that what counts is 2^250 below their product."""
    bf16 = {"a_format": ml_dtypes.bfloat16, "b_format": ml_dtypes.bfloat16}
    for far in (40, 62, 63, 64, 65, 66, 90, 120, 126):
        a = F([[2.0**127, 2.0 ** (127 - far), 2.0 ** (120 - far), 0] + [0] * 12 + [2.0**-60]])
        b = F([[0, 2.0**-far, 2.0 ** (3 - far), 2.0**100] + [0] * 12 + [2.0**-60], [0] * 17, [2.0**-126] * 17])
        case = {"a": np.concatenate([a, b, -a]), "b": np.concatenate([b, a]), **bf16}
        for row in (HOPPER_16, unit("ampere", ml_dtypes.bfloat16)):
            assert_same_bits(products.matmul(unit=row, **case), reference(row, case), str(far))


def test_an_infinity_stays_whatever_follows():
    """Also one that finite products have come to; the opposite one makes it NaN."""
    bf16 = {"a_format": ml_dtypes.bfloat16, "b_format": ml_dtypes.bfloat16}
    large, one = [2.0**127] * 16, [1.0] * 16
    b = F([one + one, one + [-(2.0**127)] * 16, one + [-np.inf] * 16, one + [np.inf] * 16, one + [np.nan] * 16])
    case = {"a": F([large + one]), "b": b, **bf16}
    got = products.matmul(unit=HOPPER_16, **case)
    np.testing.assert_array_equal(got, [[np.inf, np.inf, np.nan, np.inf, np.nan]])
    assert_same_bits(got, reference(HOPPER_16, case))


def is_served(wrong, row):
    """Whether a loop of the unit's own serves it with a wrong number: others would be compiled for this."""
    return (
        wrong.products % 8 == 0
        and wrong.added_exactly == row.added_exactly
        and (wrong.added_exactly > 1 or not wrong.scale_blocks or wrong.products <= min(wrong.scale_blocks))
    )


@every_unit
def test_a_wrong_number_would_be_found(row):
    """Each number of a unit, made wrong in the kernel alone, changes a result, but for those that no product shows."""
    cases = [random_case(row, seed) for seed in range(25)] + small_cases(row)
    right = [reference(row, case) for case in cases]
    unseen = set()
    for name, wrong in faulty(row).items():
        if is_served(wrong, row):
            results = [products.matmul(unit=wrong, **case) for case in cases]
            if name != "smallest exponent -1":  # the reference rounds to what the dtype has, too
                assert all(map(same_bits, results[::5], [reference(wrong, case) for case in cases[::5]])), name
            if all(map(same_bits, results, right)):
                unseen.add(name)
    assert unseen == UNSEEN.get(row.name, set())


def subnormal_case(which):
    """Arguments of `matmul` for Hopper's FP8, of which one operand has subnormal numbers alone."""
    rng = np.random.default_rng(0)
    case = {
        "a": F(2.0**-9) * rng.integers(-7, 8, (40, 64)).astype(F),
        "b": values_of(E4M3, rng.integers(0, 0x7F, (40, 64))),
    }
    return FORMATS | (case if which == "a" else {"a": case["b"], "b": case["a"]})


LEAST_SCALES = {"a_scale": np.full((40, 8), 2.0**-127, F), "b_scale": np.full((40, 8), 2.0**127, F)}
#: Number -> unit, arguments, the wrong number.
WRONG_NUMBERS = {
    "a_smallest": (HOPPER_FP8, lambda: subnormal_case("a"), lambda right: right - 1),
    "b_smallest": (HOPPER_FP8, lambda: subnormal_case("b"), lambda right: right - 1),
    "scale_smallest": (MXFP8, lambda: case_of(MXFP8, "moderate") | LEAST_SCALES, lambda right: right + 1),
    "block": (MXFP8, lambda: case_of(MXFP8, "any"), lambda right: 2 * right),
    "promotion": (HOPPER_FP8, lambda: case_of(HOPPER_FP8, "moderate", "plain"), lambda right: 2 * right),
    "infinity": (IN_HALF, lambda: dict.fromkeys("ab", np.full((1, 16), 128, F)) | HALVES, lambda right: F(np.inf)),
}


def case_of(row, *kinds):
    return any_case(np.random.default_rng(0), row, (40, 40, 8 * row.products), *kinds)


@pytest.mark.parametrize("field", WRONG_NUMBERS)
def test_a_wrong_number_of_the_operands_would_be_found(field, monkeypatch):
    row, make_case, change = WRONG_NUMBERS[field]
    case, numbers_of = make_case(), products.call._numbers_of
    right = products.matmul(unit=row, **case)
    assert_same_bits(right, reference(row, case))

    def wrong(*arguments):
        numbers = numbers_of(*arguments)
        return numbers._replace(**{field: change(getattr(numbers, field))})

    monkeypatch.setattr(products.call, "_numbers_of", wrong)
    assert not same_bits(products.matmul(unit=row, **case), right)


# --- memory, threads, arguments ---------------------------------------------------------------------


def strided(x):
    """Name -> the same matrix, as it may lie in memory."""
    m, k = x.shape
    wide = np.zeros((3 * m, 2 * k), F)
    wide[::3, ::2] = x
    bytes_of = np.zeros(x.nbytes + 1, np.uint8)
    unaligned = bytes_of[1:].view(F).reshape(x.shape)
    unaligned[...] = x
    constant = x.copy()
    constant.flags.writeable = False
    return {
        "transposed": np.asfortranarray(x),
        "every third and second": wide[::3, ::2],
        "backwards": x[::-1, ::-1].copy()[::-1, ::-1],
        "turned": np.ascontiguousarray(x.T[:, ::-1])[:, ::-1].T,
        "unaligned": unaligned,
        "read only": constant,
        "torch": torch.from_numpy(x.copy()),
        "torch, transposed": torch.from_numpy(x.T.copy()).T,
    }


@pytest.mark.parametrize("row", [HOPPER_FP8, MXFP8, NVFP4], ids=lambda row: row.name)
def test_operands_may_lie_in_memory_in_any_order(row):
    case = any_case(np.random.default_rng(0), row, (70, 67, 100), "special", "scaled")
    want = products.matmul(unit=row, **case)
    arrays = {name: strided(value) for name, value in case.items() if isinstance(value, np.ndarray)}
    for order in arrays["a"]:
        given = case | {name: orders[order] for name, orders in arrays.items()}
        assert_same_bits(products.matmul(unit=row, **given), want, order)
    same = np.broadcast_to(case["a"][:1], case["a"].shape)
    assert_same_bits(products.matmul(unit=row, **case | {"a": same}), reference(row, case | {"a": same.copy()}))


def test_results_do_not_depend_on_threads(threads):
    """Which also choose the size of tiles."""
    case = any_case(np.random.default_rng(0), HOPPER_FP8, (520, 515, 70), "special", "plain")
    threads(1)
    want = products.matmul(unit=HOPPER_FP8, **case)
    assert_same_bits(want[::97], reference(HOPPER_FP8, case | {"a": case["a"][::97]}))
    for n in (2, 3, 16):
        threads(n)
        assert_same_bits(products.matmul(unit=HOPPER_FP8, **case), want)


@every_unit
def test_empty_products(row):
    for sizes in ((0, 3, 5), (3, 0, 5), (2, 3, 0)):
        case = any_case(np.random.default_rng(0), row, sizes, "any")
        assert_same_bits(products.matmul(unit=row, **case), np.zeros(sizes[:2], F))


ONE = np.ones((2, 64), F)
WRONG = [
    ((ONE, ONE, "hopper"), FORMATS),
    ((ONE.astype(np.float16), ONE, HOPPER_FP8), FORMATS),
    ((torch.ones(2, 64, dtype=torch.bfloat16), ONE, HOPPER_FP8), FORMATS),
    ((ONE, ONE[0], HOPPER_FP8), FORMATS),
    ((ONE, ONE[:, 1:], HOPPER_FP8), FORMATS),
    ((ONE, ONE + F(0.01), HOPPER_FP8), FORMATS),
    ((ONE, ONE, HOPPER_FP8), FORMATS | {"promotion": 48}),
    ((ONE, ONE, HOPPER_FP8), FORMATS | {"b_format": "x"}),
    ((ONE, ONE, MXFP8), FORMATS),
    ((ONE, ONE, MXFP8), FORMATS | {"a_scale": ONE, "b_scale": ONE}),
]


@pytest.mark.parametrize(("arguments", "options"), WRONG)
def test_errors_are_those_of_the_reference(arguments, options):
    with pytest.raises((TypeError, ValueError)) as mine:
        products.matmul(*arguments, **options)
    arguments = [
        value.float().numpy().astype(ml_dtypes.bfloat16) if torch.is_tensor(value) else value for value in arguments
    ]
    with pytest.raises(mine.type) as theirs:
        refops.products.matmul(*arguments, **options)
    assert str(mine.value) == str(theirs.value)


def test_a_unit_that_no_loop_serves_is_refused():
    scaled = FORMATS | {"a_scale": ONE[:, :2], "b_scale": ONE[:, :2]}
    fp4 = {"a_format": refops.E2M1, "b_format": refops.E2M1, "a_scale": ONE[:, :4], "b_scale": ONE[:, :4]}
    for row, options, message in (
        (replace(HOPPER_FP8, products=512), FORMATS, "at most 256 products at once"),
        (replace(HOPPER_FP8, fraction_bits=30), FORMATS, "at most 29 fraction bits"),
        (replace(NVFP4, fraction_bits=39), fp4, "at most 38 fraction bits"),
        (replace(NVFP4, added_exactly=32), fp4, "at most 16 exactly"),
        (replace(MXFP8, products=64), scaled, "under one scale, of blocks of 32"),
    ):
        with pytest.raises(ValueError, match=rf"unit must .*{message}.*; got Unit"):
            products.matmul(ONE, ONE, row, **options)
