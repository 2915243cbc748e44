"""The enclosure is sound (no permitted result lies outside) and tight (little else lies inside), part by part."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interval_widths import widths
from reference_calls import ALL_SCALINGS

import measured
import refops
from refops.activations import ACTIVATIONS, Arithmetic, bind_activation
from refops.oracle import enclosure, scale_rules
from refops.oracle.fairness import Fairness
from refops.oracle.interval import INTERVALS, Interval, are_roundings, ulp_of
from refops.oracle.operation import Case
from refops.quantization.hadamard import sign_vector
from refops.scalings.arithmetic import REFERENCE

F = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
WHOLE = slice(0, 1 << 16)


def all_values(dtype):
    return np.arange(1 << 16, dtype=np.uint16).view(dtype)


# --- intervals -----------------------------------------------------------------------------------------------------

numbers = st.floats(width=32, allow_nan=False, allow_infinity=True)


def interval(a, b):
    a, b = sorted((F(a), F(b)))
    return Interval(np.array([float(a)]), np.array([float(b)]), False, 2)


OPERATIONS = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
}


@pytest.mark.parametrize("name", OPERATIONS)
@given(numbers, numbers, numbers, numbers, st.booleans(), st.booleans())
@settings(max_examples=400, deadline=None)
def test_an_operation_contains_what_it_may_give(name, a, b, c, d, first, second):
    """For either end of both operands: the exact result and the rounded one; NaN is flagged."""
    left, right = interval(a, b), interval(c, d)
    with np.errstate(all="ignore"):
        out = OPERATIONS[name](left, right)
        x, y = F((a, b)[first]), F((c, d)[second])
        rounded, exact = OPERATIONS[name](x, y), OPERATIONS[name](float(x), float(y))
    nan = bool(np.any(out.nan)) or np.isnan(out.lo[0])
    for result in (rounded, exact):
        assert nan if np.isnan(result) else out.lo[0] <= result <= out.hi[0], (name, x, y, result, out.lo, out.hi)


@given(numbers, numbers, st.floats(width=32, min_value=2.0**-100, allow_infinity=False))
@settings(max_examples=300, deadline=None)
def test_division_and_squares(a, b, divisor):
    x = interval(a, b)
    with np.errstate(all="ignore"):
        quotient, square = x / Interval.point(F([divisor]), 2), x * x
        for end in (F(a), F(b)):
            for result in (end / F(divisor), float(end) / float(F(divisor))):
                assert quotient.lo[0] <= result <= quotient.hi[0]
            for result in (end * end, float(end) * float(end)):
                assert square.lo[0] <= result <= square.hi[0]
    assert square.lo[0] >= 0


@pytest.mark.parametrize("word", ["maximum", "at_most", "at_least"])
@pytest.mark.parametrize("number_first", [False, True])
@given(numbers, numbers, numbers, st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_choice_takes_a_number_on_either_side(word, number_first, a, b, number, nan):
    """Of both ends, and of NaN where the interval may be that, the interval holds what the reference chooses."""
    x, c = interval(a, b), F(number)
    x.nan = np.array([nan])
    out = getattr(INTERVALS, word)(*((c, x) if number_first else (x, c)))
    reference = getattr(Arithmetic(), word)
    for end in (F(a), F(b), *[F(np.nan)] * nan):
        chosen = reference(*((c, end) if number_first else (end, c)))
        if np.isnan(chosen):
            assert np.all(out.nan) or np.isnan(out.lo[0])
        else:
            assert out.lo[0] <= chosen <= out.hi[0]
    assert getattr(INTERVALS, word)(c, F(1)) == reference(c, F(1))


@given(st.lists(numbers, min_size=3, max_size=3))
@settings(max_examples=300, deadline=None)
def test_a_contracted_multiply_add_is_inside(values):
    """fma(a, b, c): the exact product plus c, rounded once; both are exact in float64 for these magnitudes."""
    a, b, c = (F(v) for v in values)
    with np.errstate(all="ignore"):
        x, y, z = (Interval.point(np.array([v]), 2) for v in (a, b, c))
        out = x * y + z
        fused = F(float(a) * float(b) + float(c))
    if np.isnan(fused):
        assert np.any(out.nan) or np.isnan(out.lo[0])
    else:
        lo, hi, _ = out.as_float32()
        assert lo[0] <= fused <= hi[0]


@pytest.mark.parametrize("function", ["exp", "tanh"])
@pytest.mark.parametrize("ulp", [0.5, 1, 2, 64])
def test_elementary_functions_contain_their_permitted_error_and_no_more(function, ulp):
    x = all_values(BF16).astype(F)
    x = x[np.isfinite(x)]
    with np.errstate(all="ignore"):
        true = getattr(np, function)(x.astype(np.float64))
        out = getattr(Interval.point(x, ulp), function)()
        representable = np.abs(true) < np.finfo(F).max
        for off in (-ulp, ulp):
            result = true + off * ulp_of(true)
            saturated = (function == "tanh") & (np.abs(x) > 44.4)
            result = np.where(saturated, np.sign(true), np.maximum(result, 0) if function == "exp" else result)
            inside = (out.lo <= result) & (result <= out.hi)
            assert inside[representable].all()
        width = (out.hi - out.lo)[representable] / ulp_of(true)[representable]
    assert width.max() <= 2 * ulp + 1, "an exp also contains its neighbours rounded to float32"
    assert (out.hi[~representable] == np.inf).all()


def test_formulas_branch_on_inputs_only():
    x = Interval(np.array([-1.0]), np.array([1.0]), False, 2)
    with pytest.raises(TypeError, match="is not one answer"):
        bind_activation("relu", {}).forward(x)
    with pytest.raises(ValueError, match="positive"):
        Interval.point(F([1]), 2) / x


@pytest.mark.parametrize("dtype", [np.float16, BF16, F], ids=str)
def test_roundings_of_numbers_beside_a_tie_are_both_neighbours_and_no_more(dtype):
    """A bound of a millionth of a step: one value may be stored between ties, two beside one."""
    one, step = 1.0, float(ml_dtypes.finfo(dtype).eps)
    values = (one + step * np.arange(-1, 4)).astype(dtype)
    for place, stored in ((0.5, [1, 2]), (1.5, [2, 3]), (0.4, [1]), (0.6, [2]), (1.0, [2])):
        number, error = one + step * place, step * 1e-6
        for exact in (number - error / 2, number, number + error / 2):
            found = are_roundings(values, np.full(5, exact - error), np.full(5, exact + error))
            assert np.flatnonzero(found).tolist() == stored
    assert are_roundings(values[1:2], np.float64([1]), np.float64([1])).all()


def test_roundings_of_numbers_that_overflow_and_of_nan():
    largest, nan = np.float16([65504, np.inf, -np.inf, np.nan]), np.full(4, np.nan)
    assert are_roundings(largest, np.full(4, 65519.0), np.full(4, 65520.0)).tolist() == [True, True, False, False]
    assert not are_roundings(largest, nan, nan).any()
    ties_twice = np.full(1, 1 + 2.0**-8 + 2.0**-30)  # float32 would put it on the tie, which goes to 1
    assert not are_roundings(np.ones(1, BF16), ties_twice, ties_twice).any()


# --- formulas --------------------------------------------------------------------------------------------------------


def bounds(op, ulp=2, **inputs):
    case = Case(op, inputs)
    return enclosure.bounds_of(case, ulp, stored_float32=True).read(slice(0, 1), slice(0, case.result_shape[-1]))[0]


@pytest.mark.parametrize("dtype", [np.float16, BF16], ids=str)
@pytest.mark.parametrize("name", [name for name, row in ACTIVATIONS.items() if not row.gated])
def test_the_reference_and_the_truth_are_inside_for_every_16_bit_input(name, dtype):
    x = all_values(dtype)
    dy = np.random.default_rng(0).permutation(x)
    bound = bind_activation(name, {})
    with np.errstate(all="ignore"):
        exact, exact_dy = x.astype(np.float64), dy.astype(np.float64)
        for b, reference, truth in (
            (bounds(name, x=x[None]), bound.forward(x.astype(F)), bound.truth(exact)),
            (
                bounds(f"d{name}", dy=dy[None], x=x[None]),
                bound.backward(dy.astype(F), x.astype(F)),
                bound.truth_grad(exact_dy, exact),
            ),
        ):
            assert b.contain(reference).all()
            representable = np.abs(truth) <= np.finfo(F).max
            assert b.contain(truth.astype(F))[representable].all(), name


@pytest.mark.parametrize("name", [name for name, row in ACTIVATIONS.items() if row.gated])
@pytest.mark.parametrize("ulp", [0.5, 2])
def test_the_reference_is_inside_for_pairs(name, ulp):
    rng = np.random.default_rng(1)
    x = np.concatenate([all_values(BF16), rng.permutation(all_values(BF16))])[None].astype(F)
    dy = rng.permutation(all_values(BF16)).astype(F)[None]
    half = 1 << 16
    bound = bind_activation(name, {})
    act, gate = x[:, :half], x[:, half:]
    with np.errstate(all="ignore"):
        b = bounds(name, ulp, x=x)
        assert b.contain(bound.forward(act, gate)[0]).all()
        b = bounds(f"d{name}", ulp, dy=dy, x=x)
        assert b.contain(np.concatenate(bound.backward(dy, act, gate), axis=1)[0]).all()


#: Median width of the interval at ulp=2, in float32 ulp, over heavy-tailed inputs, as measured.
SCALED_WIDTHS = {"scaled_swiglu": 3, "scaled_dclamped_swiglu": 5, "scaled_dsituglu": 11, "scaled_dsrelu": 0}


def columns_of(source):
    return slice(0, source.shape[1])


@pytest.mark.parametrize("op", SCALED_WIDTHS)
@pytest.mark.parametrize("interleave", [0, 32])
def test_scaled_references_are_inside(op, interleave):
    if "srelu" in op and interleave:
        pytest.skip("unary: nothing to interleave")
    rng = np.random.default_rng(2)
    width = 512
    gated = "srelu" not in op
    inputs = {"x": (rng.standard_t(2, (64, width * (1 + gated))) * 3).astype(F)}
    inputs["row_scales"] = rng.standard_normal(64).astype(F)
    name = op.removeprefix("scaled_")
    options = {"glu_interleave_size": interleave}
    if name.startswith("d"):
        inputs["dy"] = rng.standard_normal((64, width)).astype(F)
        reference = refops.scaled_activation_grad(name[1:], inputs["dy"], inputs["x"], inputs["row_scales"], **options)[
            0
        ]
    else:
        reference = refops.scaled_activation(name, inputs["x"], inputs["row_scales"], **options)
    source = enclosure.bounds_of(Case(op, inputs, params=options), 2)
    assert source.shape == reference.shape
    for rows, columns in ((slice(0, 64), slice(0, source.shape[1])), (slice(3, 9), slice(40, 300))):
        b = source.read(rows, columns)
        assert b.contain(reference[rows, columns]).all()
    b = enclosure.bounds_of(Case(op, inputs, params=options), 2, stored_float32=True).read(
        slice(0, 64), columns_of(source)
    )
    width_in_ulp = (b.hi.astype(np.float64) - b.lo) / ulp_of(reference.astype(np.float64))
    assert np.median(width_in_ulp) == SCALED_WIDTHS[op]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_intervals_are_a_few_ulp_wide(name):
    """The neighbours of the truth within ulp=2 alone are 3 wide; without exp and tanh one value is right."""
    assert widths(name) == measured.activations("interval_widths")[name], measured.COMMAND


# --- scales --------------------------------------------------------------------------------------------------------


def neighbours(value, count):
    """float32 values around `value`, `count` on each side, positive only."""
    bits = F(value).view(np.int32) + np.arange(-count, count + 1, dtype=np.int32)
    return bits[bits >= 0].view(F)


SCALE_SETTINGS = [
    refops.CurrentScaling(refops.E4M3),
    refops.CurrentScaling(refops.E5M2, power_2_scale=True, amax_epsilon=1e-3),
    refops.BlockScaling(refops.E4M3, 1, power_2_scale=False, amax_epsilon=1e-4),
    refops.BlockScaling(refops.E5M2, 2),
]


@pytest.mark.parametrize("scaling", SCALE_SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=str)
@pytest.mark.parametrize("centre", [1.0, 448.0, 3.7, 1e-3, 1e-4, 1.3e-36, 1e-40, 2.9e38, 0.0])
def test_a_float_scale_is_right_exactly_where_some_amax_gives_it(scaling, dtype, centre):
    scale_of = enclosure.encode_scale_of(scaling, np.dtype(dtype))
    around = neighbours(centre, 40)
    with np.errstate(all="ignore"):
        for first, last in ((0, 0), (0, 3), (10, 30), (len(around) - 5, len(around) - 1)):
            inside = around[first : last + 1]
            scales = scale_of(inside)
            image = set((F(1) / scales).tolist())
            candidates = np.unique(np.concatenate([neighbours(v, 3) for v in F(1) / scale_of(around)]))
            least, greatest = (np.full(candidates.shape, v, F) for v in (inside.min(), inside.max()))
            right, low, high = enclosure.float_scale_inverses(candidates, least, greatest, scale_of, scaling.fmt)
            assert set(candidates[right].tolist()) == image
            for candidate, a, b in zip(candidates[right], low[right], high[right], strict=True):
                mine = scales[F(1) / scales == candidate]
                assert a <= mine.min() and mine.max() <= b
            ends = enclosure.float_scale_range(least[:1], greatest[:1], scale_of)
            assert ends[0][0] <= scales.min() and scales.max() <= ends[1][0]


def every_amax():
    """Magnitudes of every exponent in ascending order: ends, middles and their neighbours; no special values."""
    mantissas = np.arange(0, 1 << 23, 1 << 18)
    mantissas = np.unique(np.concatenate([mantissas, mantissas + 1, (mantissas - 1) & 0x7FFFFF]))
    bits = (np.arange(255)[:, None] << 23) + mantissas
    return bits[bits > 0].astype(np.uint32).view(F)


#: The oracle relies on it that scales at the ends of an interval of amaxes bound all between them.
AMAX = every_amax()
SOME_AMAX = AMAX[::331]
CODED = {name: s for name, s in ALL_SCALINGS.items() if s.layout.scale_format is not None}
UNCODED = {name: s for name, s in ALL_SCALINGS.items() if s.layout.scale_format is None and s.given is None}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=str)
@pytest.mark.parametrize("scaling", UNCODED.values(), ids=UNCODED)
def test_declared_float_scales_fall_with_the_amax(scaling, dtype):
    scale_of = enclosure.encode_scale_of(scaling, np.dtype(dtype))
    with np.errstate(all="ignore"):
        overflows = np.isinf(2 * scaling.fmt.max / AMAX)  # there the scale is what the settings say
        assert (np.diff(scale_of(AMAX[~overflows])) <= 0).all()


@pytest.mark.parametrize("scaling", CODED.values(), ids=CODED)
def test_declared_codes_grow_with_the_amax_and_multipliers_fall(scaling):
    numbers, choice = scaling.numbers(np.dtype(F)), scaling.choice(REFERENCE)
    rules = [scaling.scale_code(REFERENCE)]
    if choice is not None:
        rules = [lambda *arguments, c=c: c(*arguments)[0] for c in choice.candidates]
    codes = np.arange(scaling.layout.scale_format.largest_code + 1, dtype=np.uint8)
    with np.errstate(all="ignore"):
        for tensor_amax in SOME_AMAX if scaling.layout.two_level else SOME_AMAX[:1]:
            (level,) = scale_rules.tensor_levels(scaling, (tensor_amax, tensor_amax))
            assert all((np.diff(rule(AMAX, level, numbers).astype(int)) >= 0).all() for rule in rules)
            assert (np.diff(scaling.multiplier(REFERENCE)(codes, level)) <= 0).all()


@pytest.mark.parametrize("name", [name for name, scaling in CODED.items() if scaling.layout.two_level])
def test_declared_codes_fall_with_the_amax_of_the_tensor(name):
    scaling = CODED[name]
    scale_code, numbers = scaling.scale_code(REFERENCE), scaling.numbers(np.dtype(F))
    with np.errstate(all="ignore"):
        (levels,) = scale_rules.tensor_levels(scaling, (AMAX, AMAX))
        for amax in SOME_AMAX:
            assert (np.diff(scale_code(np.full_like(AMAX, amax), levels, numbers).astype(int)) <= 0).all()


@pytest.mark.parametrize("fmt", [refops.E4M3, refops.E5M2, refops.E2M1, refops.E3M2, refops.E2M3], ids=str)
def test_codes_grow_with_the_value(fmt):
    with np.errstate(invalid="ignore"):
        x = all_values(BF16).astype(F)
    x = x[~np.isnan(x)]
    x = x[np.lexsort((~np.signbit(x), x))]  # -0 before +0
    assert (np.diff(enclosure.code_order(refops.encode(x, fmt), fmt)) >= 0).all()
    codes = np.arange(len(fmt.values), dtype=np.uint8)
    order = enclosure.code_order(codes, fmt)
    assert len(set(order.tolist())) == len(codes)
    finite = np.isfinite(fmt.values)
    by_order = fmt.values[finite][np.argsort(order[finite])]
    assert (np.diff(by_order) >= 0).all()


# --- sums, transforms, random bits -----------------------------------------------------------------------------------


class Values(enclosure.BoundsSource):
    """Fixed values as a source."""

    def __init__(self, values):
        super().__init__(values.shape, np.dtype(F))
        self._values = values

    def read(self, rows, columns):
        values = self._values[rows, columns]
        return enclosure.Bounds(values, values, np.isnan(values))


@pytest.mark.parametrize("spread", [0, 4, 30])
def test_float32_sums_in_many_orders_are_inside(spread):
    rng = np.random.default_rng(4)
    terms = (rng.standard_normal((700, 24)) * 2.0 ** rng.integers(-spread, spread + 1, (700, 24))).astype(F)
    terms[0] = -terms[1:].astype(np.float64).sum(axis=0)  # cancels nearly everything
    for axis, matrix in ((0, terms), (1, terms.T)):
        b = enclosure.sum_bounds(Values(np.ascontiguousarray(matrix)), axis, slice(0, 24))
        for order in (*(rng.permutation(700) for _ in range(8)), np.argsort(np.abs(terms[:, 0])), np.arange(700)):
            total = np.zeros(24, F)
            for i in order:
                total += terms[i]
            assert b.contain(total).all()
        assert b.contain(terms.astype(np.float64).sum(axis=0).astype(F)).all()
        slack = 699 * 2.0**-24 * np.abs(terms).astype(np.float64).sum(axis=0)
        assert (b.hi.astype(np.float64) - b.lo <= 2.1 * slack + 4 * ulp_of(b.hi.astype(np.float64))).all()


def test_sums_that_may_overflow_and_sums_of_nan():
    terms = np.array([[3e38, 1, np.nan, np.inf, 5], [3e38, 2, 1, -np.inf, 0], [-3e38, 3, 1, 1, 0]], F)
    with np.errstate(all="ignore"):
        b = enclosure.sum_bounds(Values(terms), 0, slice(0, 5))
    for order in ((0, 1, 2), (0, 2, 1), (2, 1, 0)):
        total = np.zeros(5, F)
        with np.errstate(all="ignore"):
            for i in order:
                total += terms[i]
        assert b.contain(total).all()
    assert not b.contain(np.array([np.nan, np.nan, 2, 1, np.nan], F))[1:].any()


def test_hadamard_sums_in_many_orders_are_inside():
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((16, 64)) * 2.0 ** rng.integers(-12, 12, (16, 64))).astype(F)
    signs = sign_vector(0xD7E8)
    matrix = np.array([[(-1) ** bin(i & j).count("1") for i in range(16)] for j in range(16)])
    b = enclosure.hadamard_bounds(Values(x).read(slice(0, 16), slice(0, 64)), 0xD7E8)
    for _ in range(20):
        order = rng.permutation(16)
        total = np.zeros((16, 64), F)
        for i in order:
            total += (matrix[:, i] * signs[i]).astype(F)[:, None] * x[i]
        assert b.contain(total * F(0.25)).all()
    assert not b.contain(total * F(0.25) * F(1.001)).all()


def test_fair_bits_are_never_called_unfair():
    rng = np.random.default_rng(6)
    fmt = refops.E2M1
    for n, kind in ((200, 0), (5000, 1), (100_000, 2)):
        for seed in range(60):
            values = (rng.standard_normal(n) * (1, 3, 0.1)[kind]).astype(F)
            random_bits = rng.integers(0, 256, n).astype(np.uint8)
            fairness = Fairness()
            fairness.add(values, refops.encode(values, fmt, rounding="stochastic", random_bits=random_bits), fmt)
            assert fairness.bias() == "", (n, kind, seed)
    for rounding in ("nearest_even", "toward_zero", "up"):
        fairness = Fairness()
        values = np.abs(rng.standard_normal(20_000)).astype(F)
        fairness.add(values, refops.encode(values, fmt, rounding=rounding), fmt)
        assert fairness.bias()


def test_nan_and_signs_of_codes():
    b = enclosure.Bounds(F([np.nan, -0.0, 0.0, 1.0]), F([np.nan, 0.0, 0.0, 1.0]), np.array([True, False, False, True]))
    with np.errstate(all="ignore"):
        low, high = enclosure.code_bounds(b, F(1), F(1), refops.E4M3)
    judge = SimpleNamespace(nan=b.nan)
    inside = [
        enclosure.codes_inside(np.full(4, code, np.uint8), low, high, judge.nan, refops.E4M3).tolist()
        for code in (0x7F, 0xFF, 0x80, 0x00, 0x38)
    ]
    assert inside == [
        [True, False, False, True],
        [True, False, False, True],
        [False, True, False, False],
        [False, True, True, False],
        [False, False, False, True],
    ]
