"""The derivation in `refops.oracle.enclosure`, point by point, against all kernels of the kind that it permits.

Numbers are few here: toy systems of 5 to 8 bits in which the oracle's own code computes (`every_kernel.install`), or
small sets of float32 around the places where something is decided. So every freedom of the hardware can be enumerated,
and both sides counted: what some kernel may write, which must be accepted, and what is accepted although no kernel
writes it.
"""

import sys
from itertools import combinations, islice, pairwise, product
from types import SimpleNamespace

import every_kernel
import ml_dtypes
import numpy as np
import pytest
from every_kernel import FLOAT32, Branches, DrawnKernels, EveryKernel, System, install
from hypothesis import assume, settings
from hypothesis import given as given_any
from hypothesis import strategies as st
from reference_calls import ALL_SCALINGS

import refops
from refops.activations import ACTIVATIONS, bind_activation
from refops.formats import encode_tile
from refops.oracle import enclosure, interval, scale_rules, verdict
from refops.oracle.enclosure import Bounds
from refops.oracle.geometry import Geometry
from refops.oracle.interval import Interval
from refops.oracle.operation import Case
from refops.scalings import UNFUSED
from refops.scalings.arithmetic import REFERENCE
from tiers import SWEEP, sampled

F, D = np.float32, np.float64
TINY, SMALL, TOY = System(2, 2), System(3, 2), System(4, 3)
#: Parameters that the toy systems hold, small enough that limits and saturation are met.
PARAMETERS = {
    "clamped_swiglu": {"limit": 3.0, "alpha": 1.75, "glu_linear_offset": 1.0},
    "situglu": {"beta1": 4.0, "beta2": 3.0},
}


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):
        yield


def neighbours(centre, below, above):
    """float32 numbers around a positive one: so many below, itself, so many above."""
    return (F(centre).view(np.int32) + np.arange(-below, above + 1, dtype=np.int32)).view(F)


# --- 1: values ------------------------------------------------------------------------------------------------------


def every_interval(numbers):
    """(lo, hi, members): all intervals between numbers of an ascending list, and which of the list lie inside."""
    first, last = np.triu_indices(len(numbers))
    index = np.arange(len(numbers))
    return numbers[first], numbers[last], (first[:, None] <= index) & (index <= last[:, None])


def hulls(results, rows, columns):
    """(least, greatest, NaN) of a table over all pairs of a set of rows and a set of columns, NaN ignored."""

    def fold(reduce, table):
        over_rows = np.stack([reduce(table[inside], axis=0) for inside in rows])
        return np.stack([reduce(over_rows[:, inside], axis=1) for inside in columns], axis=1)

    return fold(np.fmin.reduce, results), fold(np.fmax.reduce, results), fold(np.any, np.isnan(results))


def either_way(exact, system):
    """(..., 3): results as they are and rounded; on a tie to both sides, for float64 cannot tell it from its side."""
    return np.stack([exact, *(system.nearest(exact * (1 + off)) for off in (-(2.0**-50), 2.0**-50))], axis=-1)


def assert_same(found, expected, labels):
    """Equal but for what float64 rounds; infinities and NaN as such."""
    near = np.isclose(found, expected, rtol=2.0**-48, atol=0, equal_nan=True)
    assert near.all(), [(label[~near][:3], found[~near][:3], expected[~near][:3]) for label in labels]


def operands(names, numbers, count, seed):
    """{name: float64 (elements,)}: each of the numbers where there is one operand, else so many elements drawn."""
    rng = np.random.default_rng(seed)
    if len(names) == 1:
        return {names[0]: numbers}
    return {name: rng.choice(numbers, count) for name in names}


def results(name, gradient, arithmetic, values, params):
    """[Results of each half] of a formula, float64 (elements, kernels)."""
    bound = bind_activation(name, params).using(arithmetic)
    numbers = {key: Branches(value, arithmetic) for key, value in values.items()}
    act, gate = numbers["act"], numbers.get("gate")
    if not gradient:
        found = [bound.forward(act, gate)]
    elif not bound.gated:
        found = [bound.backward(numbers["dy"], act)]
    else:
        found = [half(numbers["dy"], act, gate) for half in (bound.backward_act, bound.backward_gate)]
    arrays = [f.values if isinstance(f, Branches) else f for f in found]
    return [np.broadcast_to(a, (len(values["act"]), *a.shape[1:])).reshape(len(values["act"]), -1) for a in arrays]


def truths(name, gradient, values, params):
    """[float64 truth of each half]."""
    bound = bind_activation(name, params).using(interval.INTERVALS)  # a new one: its truth is of the system installed
    act, gate = values["act"], values.get("gate")
    if not gradient:
        return [bound.truth(act, gate)]
    found = bound.truth_grad(values["dy"], act, gate)
    return list(found) if bound.gated else [found]


def accepted(name, gradient, ulp, values, params, dtype=F):
    """[Bounds of each half], (elements,): what the oracle accepts of values stored in `dtype`."""
    x = np.concatenate([values[key] for key in ("act", "gate") if key in values])
    inputs = {"x": x[None].astype(F)}
    if gradient:
        inputs["dy"] = values["dy"][None].astype(F)
    case = Case(("d" if gradient else "") + name, inputs, params=params)
    source = enclosure.bounds_of(case, ulp, stored_float32=dtype == F)
    found = source.read(slice(0, 1), slice(0, source.shape[1])).rounded(dtype)[0]
    count = len(values["act"])
    return [found[at : at + count] for at in range(0, source.shape[1], count)]


def is_inside(bounds, values):
    return Bounds(bounds.lo[:, None], bounds.hi[:, None], bounds.nan[:, None]).contain(values)


def names_of(name, gradient):
    return ["act", *["gate"] * ACTIVATIONS[name].gated, *["dy"] * gradient]


def excess(bounds, right, system):
    """How much wider an interval is than from the least to the greatest of what is right, (elements, any number).

    Returns:
        (steps beyond it on either side, ratio of widths). To what is right two steps are added, one for the rounding of
        each end. Steps are not counted where right results are themselves `CANCELS` apart.
    """
    least, greatest = np.fmin.reduce(right, axis=1), np.fmax.reduce(right, axis=1)
    finite = np.isfinite(least) & np.isfinite(greatest) & np.isfinite(bounds.lo) & np.isfinite(bounds.hi)
    least, greatest, lo, hi = (v[finite].astype(D) for v in (least, greatest, bounds.lo, bounds.hi))
    step = system.step(np.maximum(np.abs(least), np.abs(greatest)))
    beyond = np.where(greatest - least <= CANCELS * step, np.maximum(least - lo, hi - greatest) / step, 0.0)
    return beyond, (hi - lo) / (greatest - least + 2 * step)


def enumerate_kernels(name, gradient, system, ulp, count, *, numbers=None, at_once=8):
    """Check that all kernels, and all that is near the truth, are accepted; return the `excess` of all elements."""
    params, numbers = PARAMETERS.get(name, {}), system.all if numbers is None else numbers
    values = operands(names_of(name, gradient), numbers, count, seed=0)
    elementary = any(function.elementary for function in ACTIVATIONS[name].functions)
    beyond, ratios = [], []
    for start in range(0, len(values["act"]), at_once):
        some = {key: value[start : start + at_once] for key, value in values.items()}
        found = results(name, gradient, EveryKernel(system, ulp), some, params)
        bounds = accepted(name, gradient, ulp, some, params)
        for half, (written, b, truth) in enumerate(
            zip(found, bounds, truths(name, gradient, some, params), strict=True)
        ):
            stored = system.nearest(written)
            inside = is_inside(b, stored)
            if not inside.all():
                at, kernel = np.argwhere(~inside)[0]
                where = {key: float(value[at]) for key, value in some.items()}
                pytest.fail(f"half {half} of {where}: {stored[at, kernel]} is outside [{b.lo[at]}, {b.hi[at]}]")
            slack = ulp * system.step(system.nearest(truth)) * elementary
            near = [system.toward(truth - slack, np.inf), system.toward(truth + slack, -np.inf)]
            defined = elementary & ~np.isnan(b.lo) & (np.abs(truth) < system.largest)
            inside = is_inside(b, np.stack(near, axis=1))[defined]
            assert inside.all()
            steps, ratio = excess(b, np.column_stack([stored, *near]), system)
            beyond.append(steps)
            ratios.append(ratio)
    return np.concatenate(beyond), np.concatenate(ratios)


CANCELS = 16
#: How many steps beyond the outermost kernel a float32 value may be accepted, at ulp=2.
BEYOND_A_VALUE = 3
#: How much wider than all kernels together an interval may be: of a float32 value, and of a gradient. In a toy system
#: results lie on ties all the time, of which both neighbours are accepted: a value's may be wider too.
RATIO_OF_A_VALUE, RATIO_OF_A_GRADIENT, RATIO_WITH_TIES = 2, 6, 3
#: Operations of which one element has a million kernels and more: enumerated for a few elements, drawn for others.
VAST = {("gelu", True), ("geglu", True), ("situglu", False), ("situglu", True)}
#: Operands are tried as near as that to where a truth rounds to another number.
NEARLY = 2.0**-40
ALL = list(product(ACTIVATIONS, (False, True)))
FEASIBLE = [case for case in ALL if case not in VAST]


class TestValues:
    """Point 1."""

    @pytest.mark.parametrize("operation", [np.add, np.subtract, np.multiply, np.true_divide], ids=lambda f: f.__name__)
    def test_an_operation_holds_what_its_operands_may_give_and_no_more(self, operation, monkeypatch):
        """All pairs of intervals: the ends are the outermost of all results, rounded or not, and NaN is flagged."""
        install(monkeypatch, TINY)
        numbers = np.concatenate([[-np.inf], TINY.finite, [np.inf]])
        lo, hi, members = every_interval(numbers)
        right = lo > 0 if operation is np.true_divide else np.ones(len(lo), bool)
        exact = operation(numbers[:, None], numbers[None, :])
        least, greatest, nan = hulls(either_way(exact, TINY), members, members[right])
        least, greatest, nan = least.min(axis=-1), greatest.max(axis=-1), nan.any(axis=-1)
        left = Interval(lo[:, None], hi[:, None].copy(), False, 2)
        out = operation(left, Interval(lo[None, right], hi[None, right].copy(), False, 2))
        pairs = np.broadcast_arrays(lo[:, None], hi[:, None], lo[None, right], hi[None, right])
        np.testing.assert_array_equal(out.nan | np.isnan(out.lo), nan)
        assert_same(out.lo, least, pairs)
        assert_same(out.hi, greatest, pairs)

    def test_a_square_is_of_one_number(self, monkeypatch):
        install(monkeypatch, SMALL)
        lo, hi, members = every_interval(SMALL.finite)
        x = Interval(lo, hi.copy(), False, 2)
        squares = either_way(SMALL.finite**2, SMALL)
        out = x * x
        assert_same(out.lo, np.array([squares[inside].min() for inside in members]), (lo, hi))
        assert_same(out.hi, np.array([squares[inside].max() for inside in members]), (lo, hi))

    @staticmethod
    def tried(numbers, inverse):
        """Operands: the numbers, more between them, and those just beside which a truth rounds to another number."""
        between = np.concatenate([np.linspace(*ends, 9) for ends in pairwise(numbers)])
        middles = (SMALL.finite[1:] + SMALL.finite[:-1]) / 2
        beside = inverse(middles[middles != 0])[:, None] * (1 + np.array([-(2.0**-45), 2.0**-45]))
        beside = beside[(beside > numbers[0]) & (beside < numbers[-1])]  # without NaN
        return np.unique(np.concatenate([numbers, between, beside]))

    @pytest.mark.parametrize("ulp", [0.5, 1, 2, 3])
    @pytest.mark.parametrize("function", ["exp", "tanh"])
    def test_an_elementary_function_holds_its_error_at_every_number_inside(self, function, ulp, monkeypatch):
        """Also past a power of two, where a unit doubles, and beside the numbers whose tanh is exactly 1."""
        install(monkeypatch, SMALL)
        numbers = np.concatenate([[-np.inf], SMALL.finite, [np.inf]])
        inverse = {"exp": np.log, "tanh": np.arctanh}[function]
        x = np.concatenate([[-np.inf], self.tried(SMALL.finite, inverse), [np.inf]])
        lo, hi, _ = every_interval(numbers)
        out = getattr(Interval(lo, hi.copy(), False, ulp), function)()
        true = getattr(np, function)(x)
        off = ulp * SMALL.step(SMALL.nearest(true))
        if function == "tanh":
            off = np.where(np.abs(x) > 0.5 * np.log(SMALL.largest), 0.0, off)
        must, may = (self.outermost(true, off, way, rounded=function == "exp") for way in (-1, 1))
        if function == "exp":
            must, may = np.maximum(must, 0.0), np.maximum(may, 0.0)
        for start, end, first, last in zip(lo, hi, out.lo, out.hi, strict=True):
            at = (start <= x) & (x <= end)
            assert first <= must[0][at].min() and must[1][at].max() <= last
            if 0 < np.count_nonzero(off[at]) < np.count_nonzero(at):
                continue  # in part beyond the numbers whose tanh is 1: a toy's lie farther from 1 than float32's
            assert may[0][at].min() <= first and last <= may[1][at].max()

    @staticmethod
    def outermost(true, off, way, *, rounded=True):
        """(least, greatest) of what is `off` from each truth, as it is or rounded; `NEARLY` farther out or in."""

        def moved(end, direction):
            return end + direction * way * NEARLY * np.clip(np.abs(end), 1, 2.0**32)

        low, high = moved(true - off, -1), moved(true + off, 1)
        if rounded:
            low, high = either_way(low, SMALL).min(axis=-1), either_way(high, SMALL).max(axis=-1)
        return moved(low, -1), moved(high, 1)

    @pytest.mark.parametrize("ulp", [2, 2.75, 3, 4])
    def test_a_quotient_holds_its_error_at_every_divisor_inside(self, ulp, monkeypatch):
        """What `ulp` has above 2, also past a power of two; nothing where the divisor is 1."""
        install(monkeypatch, SMALL)
        x = self.tried(SMALL.positive, np.reciprocal)
        lo, hi, _ = every_interval(SMALL.positive)
        out = Interval.point(F([1]), ulp) / Interval(lo, hi.copy(), False, ulp)
        off = np.where(x == 1, 0.0, (ulp - 2) * SMALL.step(SMALL.nearest(1 / x)))
        must, may = (self.outermost(1 / x, off, way) for way in (-1, 1))
        for start, end, first, last in zip(lo, hi, out.lo, out.hi, strict=True):
            at = (start <= x) & (x <= end)
            assert first <= must[0][at].min() and must[1][at].max() <= last
            if (start == 1) == (end == 1):  # else at one end alone nothing is off
                assert may[0][at].min() <= first and last <= may[1][at].max()

    @sampled(("name", "gradient"), FEASIBLE, 3, in_all=1)
    def test_every_kernel_in_a_toy_system_is_accepted_and_little_else(self, name, gradient, monkeypatch):
        install(monkeypatch, SMALL)
        beyond, ratio = enumerate_kernels(name, gradient, SMALL, 2, 60)
        self.judge(SMALL, gradient, beyond, ratio)
        assert gradient or beyond.max() <= (2 if ACTIVATIONS[name].gated else 1)  # few units make a large step here

    @pytest.mark.parametrize(
        ("name", "gradient", "system", "ulp", "count"),
        [
            *(pytest.param(*case, TOY, ulp, 1000, marks=SWEEP) for case in FEASIBLE for ulp in (0.5, 2)),
            *(pytest.param(*case, SMALL, 4, 60, marks=pytest.mark.full) for case in FEASIBLE[::3]),
            *(pytest.param(name, True, SMALL, 2, 60, marks=SWEEP) for name in ("gelu", "geglu")),
            pytest.param("situglu", False, SMALL, 2, 300, marks=SWEEP),
            pytest.param("situglu", True, SMALL, 0.5, 4, marks=SWEEP),
        ],
        ids=str,
    )
    def test_every_kernel_in_larger_toy_systems(self, name, gradient, system, ulp, count, monkeypatch):
        install(monkeypatch, system)
        at_once = 1 if name == "situglu" and gradient else 8
        beyond, ratio = enumerate_kernels(name, gradient, system, ulp, count, at_once=at_once)
        self.judge(system, gradient, beyond, ratio, ulp)

    @sampled(("name", "gradient"), FEASIBLE[::-1], 4, in_all=1)
    def test_every_kernel_in_float32_is_accepted_and_little_else(self, name, gradient, monkeypatch):
        """The code as it is, at numbers whose exponentials are ordinary."""
        numbers = np.concatenate([np.linspace(-12, 12, 49), [0.0, -0.0, np.inf, -np.inf, np.nan]])
        beyond, ratio = enumerate_kernels(name, gradient, FLOAT32, 2, 60, numbers=numbers)
        self.judge(FLOAT32, gradient, beyond, ratio)

    def test_the_other_neighbour_of_a_tie_leads_beyond_all_kernels(self):
        """1.75 times a quarter of all numbers is a tie, whose exponential all kernels have of the even neighbour."""
        numbers, params = (
            np.random.default_rng(0).uniform(-12, -8, 200).astype(F).astype(D),
            PARAMETERS["clamped_swiglu"],
        )
        act = operands(["act", "gate"], numbers, 60, seed=0)["act"]
        beyond, ratio = enumerate_kernels("clamped_swiglu", False, FLOAT32, 2, 60, numbers=numbers)
        exponent = act * params["alpha"]
        is_tie = np.abs(exponent - FLOAT32.nearest(exponent)) == FLOAT32.step(exponent) / 2
        assert beyond[~is_tie].max() <= BEYOND_A_VALUE < beyond[is_tie].max() <= 13
        assert ratio.max() <= RATIO_OF_A_VALUE

    @staticmethod
    def judge(system, gradient, beyond, ratio, ulp=2):
        """What the docstring says of the widths; what `ulp` has above 2 is added on either side."""
        assert np.median(beyond) <= gradient + max(ulp - 2, 0)
        if ulp > 2:
            return
        assert np.median(ratio) <= 1.05
        if gradient:
            assert ratio.max() <= RATIO_OF_A_GRADIENT
        elif system == FLOAT32:
            assert ratio.max() <= RATIO_OF_A_VALUE and beyond.max() <= BEYOND_A_VALUE
        else:
            assert ratio.max() <= RATIO_WITH_TIES


# --- 2: rounding and casting ----------------------------------------------------------------------------------------

FORMATS = [refops.E4M3, refops.E5M2, refops.E2M1, refops.E3M2, refops.E2M3, refops.INT8]


def points_of(fmt):
    """Positive numbers where a code begins or ends: the format's own, the middles between them, and beyond the last."""
    grid = fmt.grid
    return np.concatenate([grid[1:], (grid[:-1] + grid[1:]) / 2, [grid[-1] * 1.03, grid[-1] * 1.5]]).astype(F)


def accepted_codes(bounds, least, greatest, fmt, random_bits=None):
    """bool (elements, 256): which of all bytes the oracle accepts."""
    ends = enclosure.code_bounds(bounds, least, greatest, fmt, random_bits)
    codes = np.arange(256, dtype=np.uint8)
    lowest, highest = (end[:, None] for end in ends)
    return enclosure.codes_inside(codes, lowest, lowest if ends[1] is ends[0] else highest, bounds.nan[:, None], fmt)


def written_codes(members, fmt, rounding="nearest_even"):
    """bool (elements, 256): which bytes are written for members (elements, any number) of each element's interval."""
    found = np.zeros((len(members), 256), bool)
    np.put_along_axis(found, encode_tile(members, fmt, rounding=rounding).astype(np.intp), True, axis=1)
    return found


class TestRoundingAndCasting:
    """Point 2."""

    @pytest.mark.parametrize("dtype", [ml_dtypes.float6_e3m2fn, ml_dtypes.float8_e4m3], ids=["1+3+2", "1+4+3"])
    def test_stored_values_are_the_roundings_of_the_numbers_inside(self, dtype, monkeypatch):
        """Ends that need be no numbers of the system: all values judged that a narrower one, or itself, can store."""
        install(monkeypatch, TOY)
        real = np.unique(np.concatenate([TOY.finite, (TOY.finite[:-1] + TOY.finite[1:]) / 2, TOY.finite * 1.01]))
        real = real[np.abs(real) <= 28]  # of the narrower one
        lo, hi, _ = every_interval(real[::7])
        inside = (lo[:, None] <= real) & (real <= hi[:, None])
        values = np.arange(1 << (6 if dtype == ml_dtypes.float6_e3m2fn else 8), dtype=np.uint8).view(dtype)
        values = np.unique(values[np.isfinite(values)].astype(F))

        def accepted(inward):
            return is_inside(
                Bounds(*Interval(lo, hi.copy(), False, 2).as_float32(inward=inward)).rounded(dtype), values
            )

        def between(members, x):
            stored = x.astype(dtype).astype(F)
            least, greatest = np.where(members, stored, np.inf).min(1), np.where(members, stored, -np.inf).max(1)
            return (least[:, None] <= values) & (values <= greatest[:, None])

        # What passed through the system: its numbers inside; where there is none, what the ends round to.
        numbers = inside & (TOY.nearest(real) == real)
        numbers |= ~numbers.any(axis=1, keepdims=True) & (real == lo[:, None])
        np.testing.assert_array_equal(accepted(True), between(numbers, TOY.nearest(real)))
        # What did not: any number inside. The ends move out to the system's next numbers, which may lie on a tie.
        right = between(inside, real)
        found = accepted(False)
        assert (found >= right).all()
        assert (found & ~right).sum(axis=1).max() <= 2

    @pytest.mark.parametrize("fmt", FORMATS, ids=str)
    @pytest.mark.parametrize("multiplier", [1.0, 0.75, 2.0**-5, 3.7])
    def test_codes_are_those_of_the_numbers_inside(self, fmt, multiplier):
        """Intervals of up to seven numbers around each place where codes change: of 256 bytes these, and no other."""
        centres = (points_of(fmt) / F(multiplier))[:: 1 + len(fmt.grid) // 24]
        around = np.stack([neighbours(centre, 3, 3) for centre in centres])
        for sign, first in product((F(1), F(-1)), range(7)):
            for last in range(first, 7):
                members = sign * around[:, first : last + 1]
                lo, hi = members.min(axis=1), members.max(axis=1)
                bounds = Bounds(lo, hi, np.zeros(len(lo), bool))
                least = F(multiplier)
                np.testing.assert_array_equal(
                    accepted_codes(bounds, least, least, fmt), written_codes(members * least, fmt)
                )

    @pytest.mark.parametrize("fmt", FORMATS, ids=str)
    def test_codes_under_several_multipliers(self, fmt):
        """Those of every number under every multiplier, and of what lies between: intervals are few numbers wide."""
        multipliers = neighbours(0.83, 0, 3)
        centres = points_of(fmt) / multipliers[1]
        for sign in (F(1), F(-1)):
            members = sign * np.stack([neighbours(centre, 1, 1) for centre in centres])
            bounds = Bounds(members.min(axis=1), members.max(axis=1), np.zeros(len(members), bool))
            products = (members[:, :, None] * multipliers).reshape(len(members), -1)
            found = accepted_codes(bounds, multipliers[0], multipliers[-1], fmt)
            np.testing.assert_array_equal(found, written_codes(products, fmt))

    @pytest.mark.parametrize("fmt", FORMATS, ids=str)
    def test_zeros_and_nan(self, fmt):
        """A number around zero may become either zero. NaN is what NaN is cast to, where it is possible, alone."""
        tiny = F(2.0**-149)
        rows = [(-tiny, tiny, False), (F(0), F(0), False), (F(-0.0), F(-0.0), False), (F(-0.0), F(0), True)]
        rows.append((F(np.nan), F(np.nan), True))
        lo, hi, nan = (np.array(column) for column in zip(*rows, strict=True))
        members = np.stack([lo, hi, *(np.where(nan, F(np.nan), end) for end in (lo, hi))], axis=1)
        expected = written_codes(members, fmt)
        if fmt.nan_code is not None:  # of either sign, and with any payload
            expected[np.ix_(nan, np.isnan(fmt.values))] = True
        np.testing.assert_array_equal(accepted_codes(Bounds(lo, hi, nan), F(1), F(1), fmt), expected)

    @pytest.mark.parametrize("fmt", [refops.E2M1, refops.E4M3], ids=str)
    def test_unknown_random_bits_leave_the_neighbours_on_both_sides(self, fmt):
        members = np.stack([neighbours(centre, 1, 1) for centre in points_of(fmt)])
        bounds = Bounds(members[:, 0], members[:, -1], np.zeros(len(members), bool))
        expected = written_codes(members, fmt, "up") | written_codes(members, fmt, "down")
        np.testing.assert_array_equal(accepted_codes(bounds, F(1), F(1), fmt, "any"), expected)


# --- 3: amax --------------------------------------------------------------------------------------------------------


def given(lo, hi, nan):
    """A source of these bounds."""

    class Given(enclosure.BoundsSource):
        def read(self, rows, columns):
            return Bounds(lo, hi, nan)[rows, columns]

        def rounded(self):
            return self

    return Given(lo.shape, np.dtype(F))


class TestAmax:
    """Point 3."""

    #: Numbers of which every one is in a list: an interval has those between its ends.
    NUMBERS = np.array([-np.inf, -3, -2, -1, 0, 1, 2, 3, np.inf], F)

    def elements(self):
        """(lo, hi, nan, set of magnitudes) of everything that one element may be; 0 where it is missing."""
        rows = [(F(np.nan), F(np.nan), True, frozenset([0.0]))]
        for first, last in combinations(range(len(self.NUMBERS) + 1), 2):
            inside = self.NUMBERS[first:last]
            for nan in (False, True):
                magnitudes = frozenset(map(float, np.abs(inside))) | frozenset([0.0] * nan)
                rows.append((inside[0], inside[-1], nan, magnitudes))
        return rows

    @pytest.mark.parametrize("size", [2, 3])
    def test_the_amax_of_a_block_is_one_of_those_and_no_other(self, size):
        """All blocks of 2 elements, and one in 499 of all of 3; each amax of the list judged."""
        rows = self.elements()
        blocks = list(islice(product(rows, repeat=size), 0, None, {2: 1, 3: 499}[size]))
        lo, hi, nan = (np.array([[element[i] for element in block] for block in blocks]) for i in range(3))
        amaxes = np.array([0, 1, 2, 3, np.inf], F)
        expected = np.array([[self.reachable(block, amax) for amax in amaxes] for block in blocks])
        bounds, source = Bounds(lo, hi, nan), given(lo, hi, nan)
        of_blocks = [end[:, 0] for end in enclosure.block_amax_bounds(bounds, 1, size)]
        for least, greatest in (of_blocks, enclosure.tensor_amax_bounds(source, axis=1)):
            found = (least[:, None] <= amaxes) & (amaxes <= greatest[:, None])
            # Between the least and the greatest of them: exactly, but where an element that may be missing is.
            below, above = (np.logical_or.accumulate(expected[:, ::way], axis=1)[:, ::way] for way in (1, -1))
            np.testing.assert_array_equal(found, below & above)
            np.testing.assert_array_equal(found[~nan.any(axis=1)], expected[~nan.any(axis=1)])
        whole = enclosure.tensor_amax_bounds(source)
        assert whole[0] == of_blocks[0].max() and whole[1] == of_blocks[1].max()

    @staticmethod
    def reachable(block, amax):
        """Whether some choice of magnitudes has this maximum."""
        magnitudes = [element[3] for element in block]
        return any(amax in m for m in magnitudes) and all(min(m) <= amax for m in magnitudes)


# --- 4: scales ------------------------------------------------------------------------------------------------------

#: Scalings whose blocks the tests below fill. Random bits change no scale; 4over6 has a test of its own.
BLOCKS = {
    name: scaling
    for name, scaling in ALL_SCALINGS.items()
    if scaling.layout.block is not None and scaling.random is None and scaling.choice(REFERENCE) is None
}
CODED = {name: scaling for name, scaling in BLOCKS.items() if scaling.layout.scale_format is not None}
#: The amax of tensors, which their first row has.
TENSOR_AMAX = F(16)


def stored_scale(scaling, amax):
    """(stored scales, multipliers) of amaxes under the amax of the tensor."""
    level = scale_rules.tensor_levels(scaling, (TENSOR_AMAX, TENSOR_AMAX))[0]
    return scaling.block_scale(REFERENCE)(np.asarray(amax, F), level, scaling.numbers(np.dtype(F)))


def edge_of(scaling):
    """The first float32 after 1 whose scale is another."""
    low = F(1)
    first, last = int(low.view(np.int32)), int(F(8).view(np.int32))
    while last - first > 1:
        middle = (first + last) // 2
        same = stored_scale(scaling, np.int32(middle).view(F))[0] == stored_scale(scaling, low)[0]
        first, last = (middle, last) if same else (first, middle)
    return np.int32(last).view(F)


class TestScales:
    """Point 4."""

    @pytest.mark.parametrize("scaling", CODED.values(), ids=CODED)
    def test_a_scale_byte_is_right_exactly_where_some_amax_gives_it(self, scaling):
        """Of all 256 bytes; amaxes beside the edge of a byte, far apart, zero, the smallest, the largest, infinite."""
        edge = edge_of(scaling)
        around = neighbours(edge, 3, 3)
        ranges = [around[first : last + 1] for first, last in combinations(range(8), 2) if last < 7]
        wide = np.arange(1, int(F(15).view(np.int32)), 1 << 17, dtype=np.int32).view(F)  # from the smallest number on
        ranges += [F([0]), F([np.inf]), wide[:1], wide, wide[len(wide) // 2 :], np.append(F(0), wide)]
        block = scaling.layout.block
        least, greatest = (np.array([[end(amaxes)] for amaxes in ranges]) for end in (np.min, np.max))
        empty = np.broadcast_to(F(0), (len(ranges) * block[0], block[1]))
        bounds = Bounds(empty, empty, np.zeros(empty.shape, bool))
        geometry, tensor = Geometry(scaling, False), (TENSOR_AMAX.reshape(1, 1),) * 2
        rule = scale_rules.scale_rule(scaling, np.dtype(F), (least, greatest), tensor, geometry, bounds)
        runs = len(rule.to_runs(least))
        bytes_ = np.arange(256, dtype=np.uint8)
        accepted = np.stack(
            [rule.right(np.full((runs, 1), byte))[:: runs // len(ranges), 0] for byte in bytes_], axis=1
        )
        for amaxes, found in zip(ranges, accepted, strict=True):
            some = set(stored_scale(scaling, amaxes)[0].tolist())
            assert set(bytes_[found].tolist()) == some, (amaxes.min(), amaxes.max())

    @pytest.mark.parametrize("power_2", [False, True])
    @pytest.mark.parametrize("fmt", [refops.E4M3, refops.E5M2], ids=str)
    @pytest.mark.parametrize("dtype", [F, np.float16, ml_dtypes.bfloat16], ids=lambda d: np.dtype(d).name)
    def test_a_float32_scale_is_traced_to_every_amax_that_gives_it(self, fmt, power_2, dtype):
        """Intervals of a hundred amaxes, or from 0 or from an overflowing quotient on: multipliers are all in reach."""
        scaling = refops.BlockScaling(fmt, 1, power_2_scale=power_2)
        scale_of = enclosure.encode_scale_of(scaling, np.dtype(dtype))
        for centre in (1.0, 3.7, 1e-3, 6.9e-3, 0.875, 1.35e-36, 1.9e-36, 2.6e-36, 1.7e-34, 3.3e-34, 6e-34, 3e38):
            around = neighbours(centre, 60, 60)
            for amaxes in (around, np.append(around, F(0)), np.append(around, F(2.0**-149))):
                amaxes = np.union1d(amaxes, F(2.0**-149)) if 0 in amaxes else amaxes
                scales = scale_of(amaxes)
                written = np.unique(F(1) / scales)
                ends = (np.full(written.shape, end, F) for end in (amaxes.min(), amaxes.max()))
                right, low, high = enclosure.float_scale_inverses(written, *ends, scale_of, fmt)
                assert right.all(), (centre, written[~right])
                for value, least, greatest in zip(written, low, high, strict=True):
                    mine = scales[F(1) / scales == value]
                    assert least <= mine.min() and mine.max() <= greatest, (centre, value)


# --- 5: codes given the scale that was written ----------------------------------------------------------------------


class Dump:
    """Blocks as a kernel may have written them: each has one scale, a code for each element, and bounds for those.

    In the tensor a second block stands beside each: it holds the tensor's amax (the row's), so that this is known.
    """

    def __init__(self, scaling, elements):
        self.scaling, self.elements = scaling, elements
        self.geometry = Geometry(scaling, False)
        self.block = self.geometry.block

    def tensor(self, count, fill=0.0, dtype=F):
        """(matrix of `count` blocks and those beside them, view of the blocks' elements, one block a row)."""
        rows, columns = self.block
        height = -(-count * rows // 32) * 32 if self.scaling.layout.shape_multiple > 1 else count * rows
        matrix = np.full((height, 2 * columns), fill, dtype)
        return matrix, matrix[: count * rows].reshape(count, rows, 2 * columns)[:, :, :columns]

    def with_amax(self, matrix):
        """The matrix with the tensor's amax in every block beside those that are judged."""
        matrix[:, self.block[1]] = TENSOR_AMAX
        return matrix

    def quantized(self, members):
        """(scales, codes of one element each) that a kernel writes for all choices (n, elements) of the numbers."""
        matrix, blocks = self.tensor(len(members))
        blocks[:, 0, : members.shape[1]] = members
        found = refops.quantize(self.with_amax(matrix), self.scaling)
        whole = (slice(0, matrix.shape[0]), slice(0, matrix.shape[1]))
        codes = self.geometry.codes(found.rowwise_data, matrix.shape, *whole)
        scales = self.geometry.scales(found.rowwise_scale_inv, *whole)[:: self.block[0] // self.geometry.run[0], 0]
        return scales[: len(members)], codes[:: self.block[0]][: len(members), : members.shape[1]]

    def judge(self, scales, codes, monkeypatch):
        """(whether each block's scale is accepted, whether each code (n, elements) is)."""
        count, size = codes.shape
        (x, blocks), (lo, lows), (hi, highs) = (self.tensor(count) for _ in range(3))
        nan, possible = self.tensor(count, False, bool)
        shape = blocks.shape
        for array, name in ((blocks, "lo"), (lows, "lo"), (highs, "hi"), (possible, "nan")):
            column = np.array([getattr(element, name) for element in self.elements])
            array[...] = np.resize(column, shape[1] * shape[2])[: shape[1] * shape[2]].reshape(shape[1:])
        for matrix in (x, lo, hi):
            self.with_amax(matrix)
        source = given(lo, hi, nan)
        monkeypatch.setattr(enclosure, "bounds_of", lambda *_, **__: source)
        right = refops.quantize(np.where(np.isnan(x), F(0), x), self.scaling)
        whole = (slice(0, x.shape[0]), slice(0, x.shape[1]))
        all_codes = self.geometry.codes(right.rowwise_data, x.shape, *whole)
        all_codes[: count * self.block[0]].reshape(count, self.block[0], -1)[:, :, : self.block[1]] = np.resize(
            np.pad(codes, ((0, 0), (0, shape[1] * shape[2] - size))), shape
        )
        step = self.block[0] // self.geometry.run[0]
        of_blocks = self.geometry.scales(right.rowwise_scale_inv, *whole)[::step]
        of_blocks[:count, 0] = scales
        outputs = {
            "rowwise_data": self.geometry.store_codes(all_codes),
            "rowwise_scale_inv": np.ascontiguousarray(self.geometry.store_scales(of_blocks, self.block, x.shape)),
        }
        if right.amax_rowwise is not None:
            outputs["amax_rowwise"] = right.amax_rowwise
        case = Case("quantize", x, self.scaling)
        judge = verdict.Judge(case, *case.fit_outputs(outputs), 2, "ignore", "given")
        judge.run()
        wrong = self.geometry.matrix(judge.tallies["rowwise_data"].wrong, x.shape)
        wrong = np.repeat(wrong, self.geometry.packed, axis=1)[: count * self.block[0]]
        wrong = wrong.reshape(count, self.block[0], -1)[:, :, : self.block[1]].reshape(count, -1)[:, :size]
        wrong_scales = self.geometry.scales(judge.tallies["rowwise_scale_inv"].wrong, *whole)[::step]
        return ~wrong_scales[:count, 0], ~wrong


def element(*members, nan=False):
    """What one element may be: float32 members, the ends among them, and NaN."""
    numbers = np.array(members, F)
    nothing = [] if not nan else [F(np.nan)]
    return SimpleNamespace(lo=numbers.min(), hi=numbers.max(), nan=nan, members=np.append(numbers, nothing).astype(F))


def all_codes_of(dump, fixed):
    """uint8 (blocks, elements): dumped codes such that every code stands somewhere behind `fixed` elements."""
    size, packed = dump.block[0] * dump.block[1], dump.geometry.packed
    codes = np.arange(len(dump.scaling.fmt.values), dtype=np.uint8).repeat(packed)
    each = size - fixed
    blocks = -(-len(codes) // each)
    out = np.zeros((blocks, size), np.uint8)
    out[:, fixed:] = np.resize(codes, (blocks, each))
    return out


class TestCodes:
    """Point 5, with points 3 and 4 before it: whole dumps of quantized blocks, through the oracle's own judge."""

    PROBES = ("beside a middle", "around zero", "an exact number", "-0", "perhaps NaN")

    def probe(self, scaling, edge, kind):
        """An element smaller than those that the amax is of."""
        multiplier = stored_scale(scaling, edge)[1]
        grid = scaling.fmt.grid
        at = int(np.searchsorted(grid, grid[-1] / 4))
        middle = F((grid[at] + grid[at + 1]) / 2) / multiplier
        around = neighbours(middle, 1, 1)
        return {
            "beside a middle": element(*around),
            "around zero": element(-F(2.0**-149), F(-0.0), F(0), F(2.0**-149)),
            "an exact number": element(around[2]),
            "-0": element(F(-0.0)),
            "perhaps NaN": element(*-around, nan=True),
        }[kind]

    def written_scales(self, scaling, amaxes):
        """Scales that dumps have: every byte (for squares some); of float32 right ones, their neighbours, far ones."""
        right = stored_scale(scaling, amaxes)[0]
        if scaling.layout.scale_format is not None:
            some = np.concatenate([right - 2, right - 1, right, right + 1, right + 2, [0, 1, 64, 254, 255]])
            return np.unique(some.astype(np.uint8)) if scaling.layout.is_square else np.arange(256, dtype=np.uint8)
        return np.unique(np.concatenate([*(neighbours(scale, 3, 3) for scale in right), right * 2, right / 4]))

    def multipliers(self, scaling, written, amaxes):
        """What elements are multiplied by under a scale that was written; empty where it says nothing."""
        if scaling.layout.scale_format is None:
            scales, multipliers = stored_scale(scaling, amaxes)
            own = multipliers[scales == written]
            return own if len(own) else np.array([F(1) / written], F)
        code = scaling.layout.scale_format.magnitude_code(np.uint8(written))
        if np.isnan(scaling.layout.scale_format.values[code]):
            return np.empty(0, F)
        level = scale_rules.tensor_levels(scaling, (TENSOR_AMAX, TENSOR_AMAX))[0]
        return np.atleast_1d(np.asarray(scaling.multiplier(REFERENCE)(np.array([code]), level), F))

    @sampled(("name", "kind"), list(product(BLOCKS, PROBES)), 13, in_all=3)
    def test_of_all_scales_and_codes_those_are_accepted_that_a_kernel_writes(self, name, kind, monkeypatch):
        """Two elements decide the amax, beside the edge of a scale; the others may be the same few numbers each.

        All choices of all three are quantized: these scales are right and no other. Every code is judged under every
        scale: under a right one those that were written with it are accepted, under a wrong one those that some right
        value has under it.
        """
        scaling = BLOCKS[name]
        edge = edge_of(scaling)
        deciding, probe = element(*neighbours(edge, 2, 1)), self.probe(scaling, edge, kind)
        dump = Dump(scaling, [deciding, deciding, *[probe] * (scaling.layout.block[0] * scaling.layout.block[1] - 2)])
        choices = np.array(list(product(deciding.members, deciding.members, probe.members)), F)
        scales, codes = dump.quantized(choices)
        written = set(zip(scales.tolist(), codes[:, 2].tolist(), strict=True))
        either_zero = kind == "-0" and scaling.layout.scale_format is not None and not scaling.layout.two_level
        dumped = self.written_scales(scaling, choices.max(axis=1))
        block_codes = all_codes_of(dump, 2)
        right, accepted = dump.judge(
            np.repeat(dumped, len(block_codes)), np.tile(block_codes, (len(dumped), 1)), monkeypatch
        )
        right = right.reshape(len(dumped), -1)
        accepted = accepted.reshape(len(dumped), len(block_codes), -1)
        amaxes = deciding.members
        for number, scale in enumerate(dumped):
            assert right[number].all() == right[number].any() == (scale in scales)
            found = set(block_codes[:, 2:][accepted[number][:, 2:]].tolist())
            multipliers = self.multipliers(scaling, scale, amaxes)
            expected = {code for other, code in written if other == scale or not len(multipliers)}
            if scale not in scales and len(multipliers):
                products = (probe.members[:, None] * multipliers).reshape(1, -1)
                expected = set(np.flatnonzero(written_codes(products, scaling.fmt)[0]).tolist())
            if probe.nan and scaling.fmt.nan_code is not None:
                expected |= set(np.flatnonzero(np.isnan(scaling.fmt.values)).tolist())
            if either_zero:
                expected |= {int(encode_tile(F([0]), scaling.fmt)[0])}
            if len(multipliers):
                assert found == expected, (scale, found ^ expected)
            else:  # the scale says nothing: codes of all right scales, and what lies between them
                order = enclosure.code_order(np.array(sorted(expected), np.uint8), scaling.fmt)
                extra = enclosure.code_order(np.array(sorted(found - expected), np.uint8), scaling.fmt)
                assert found >= expected and ((extra > order.min()) & (extra < order.max())).all()

    @pytest.mark.parametrize("name", [name for name, row in BLOCKS.items() if row.layout.block[0] == 1])
    def test_codes_of_the_elements_that_decide_the_scale(self, name, monkeypatch):
        """Accepted is what any of their numbers has under the scale that was written, be it another that gives it."""
        scaling = BLOCKS[name]
        edge = edge_of(scaling)
        deciding = element(*neighbours(edge, 2, 1))
        dump = Dump(scaling, [deciding, deciding])
        choices = np.array(list(product(deciding.members, repeat=2)), F)
        scales, codes = dump.quantized(choices)
        every = np.arange(len(scaling.fmt.values), dtype=np.uint8)
        for scale in np.unique(scales):
            right, accepted = dump.judge(np.full(len(every), scale), np.stack([every, every], axis=1), monkeypatch)
            assert right.all()
            found = set(every[accepted[:, 0]].tolist())
            written = set(codes[scales == scale, 0].tolist())
            multipliers = self.multipliers(scaling, scale, deciding.members)
            products = (deciding.members[:, None] * multipliers).reshape(1, -1)
            assert written <= found == set(np.flatnonzero(written_codes(products, scaling.fmt)[0]).tolist())
            assert len(found - written) <= 1

    @pytest.mark.parametrize(
        "scaling", [refops.CurrentScaling(refops.E4M3), refops.CurrentScaling(refops.E5M2)], ids=str
    )
    def test_one_scale_of_the_tensor(self, scaling, monkeypatch):
        """Every written scale near the right ones, every code under it."""
        deciding = element(*neighbours(3.7, 1, 2))
        scale_of = enclosure.encode_scale_of(scaling, np.dtype(F))
        probe = self.probe_of_tensor(scaling, scale_of)
        lo = np.array([[deciding.lo, *[probe.lo] * 256]])
        hi = np.array([[deciding.hi, *[probe.hi] * 256]])
        source = given(lo, hi, np.zeros(lo.shape, bool))
        monkeypatch.setattr(enclosure, "bounds_of", lambda *_, **__: source)
        scales = scale_of(deciding.members)
        for written in np.unique(np.concatenate([neighbours(F(1) / scale, 3, 3) for scale in scales])):
            outputs = {"rowwise_data": np.arange(-1, 256).astype(np.uint8)[None], "rowwise_scale_inv": F([written])}
            case = Case("quantize", lo, scaling)
            judge = verdict.Judge(case, *case.fit_outputs(outputs), 2, "ignore", "given")
            judge.run()
            mine = scales[F(1) / scales == written]
            assert judge.tallies["rowwise_scale_inv"].wrong[0] == (not len(mine))
            multipliers = mine if len(mine) else F([F(1) / written])
            products = (probe.members[:, None] * multipliers).reshape(1, -1)
            found = ~judge.tallies["rowwise_data"].wrong[0, 1:]
            np.testing.assert_array_equal(found, written_codes(products, scaling.fmt)[0])

    @staticmethod
    def probe_of_tensor(scaling, scale_of):
        grid = scaling.fmt.grid
        at = len(grid) // 2
        return element(*neighbours(F((grid[at] + grid[at + 1]) / 2) / scale_of(F(3.7)), 1, 1))

    @pytest.mark.parametrize("name", ["nvfp4-4over6", "nvfp4-mse"])
    def test_the_scale_that_is_chosen_by_its_error(self, name, monkeypatch):
        """Of 256 bytes: what some choice of the numbers takes is accepted, and at most the other candidate besides."""
        scaling = ALL_SCALINGS[name]
        rng, besides = np.random.default_rng(0), 0
        level = scale_rules.tensor_levels(scaling, (TENSOR_AMAX, TENSOR_AMAX))[0]
        for _ in range(12):
            numbers = [F(rng.uniform(4, 8)), *rng.uniform(0.1, 4, 3).astype(F)]
            elements = [
                element(*neighbours(number, 0, width)) for number, width in zip(numbers, (1, 1, 0, 2), strict=True)
            ]
            dump = Dump(scaling, [*elements, *[element(F(0))] * 12])
            choices = np.array(list(product(*(e.members for e in elements))), F)
            taken = set(dump.quantized(choices)[0].tolist())
            candidates = set()
            for candidate in scaling.choice(REFERENCE).candidates:
                found = candidate(elements[0].members, level, scaling.numbers(np.dtype(F)))[0]
                candidates |= set(found.tolist())
            bytes_ = np.arange(256, dtype=np.uint8)
            right, _ = dump.judge(bytes_, np.zeros((256, 16), np.uint8), monkeypatch)
            accepted = set(bytes_[right].tolist())
            assert taken <= accepted <= candidates
            besides += len(accepted - taken)
        assert besides <= 1


# --- 6: sums --------------------------------------------------------------------------------------------------------


def trees(leaves):
    """Every way to add up a tuple of leaves: nested pairs; sides do not count."""
    if len(leaves) == 1:
        yield leaves[0]
        return
    first, *others = leaves
    for size in range(len(others)):
        for beside in combinations(others, size):
            rest = tuple(leaf for leaf in others if leaf not in beside)
            yield from product(trees((first, *beside)), trees(rest))


def added(tree, terms, rounding):
    """The sum of rows of `terms` in the order of a tree, each addition rounded."""
    if isinstance(tree, int):
        return terms[tree]
    return rounding(added(tree[0], terms, rounding) + added(tree[1], terms, rounding))


class TestSums:
    """Point 6."""

    def test_there_are_as_many_orders_as_there_should_be(self):
        assert [sum(1 for _ in trees(tuple(range(n)))) for n in range(1, 7)] == [1, 1, 3, 15, 105, 945]

    @staticmethod
    def terms(system, count, seed=0):
        """(count, columns): every number of a small system in every place, for up to 3 terms; drawn ones; bad ones."""
        rng = np.random.default_rng(seed)
        columns = rng.choice(system.finite, (count, 300))
        bad = np.full((count, 4), 2 * system.unit)  # each addition to 1 loses nearly as much as it may
        bad[0] = 1
        bad[1:] *= [0.5, 0.75, 1, -0.5]
        every = np.array(list(product(TINY.finite, repeat=count))).T if count <= 3 else np.empty((count, 0))
        return np.concatenate([columns, bad, every], axis=1)

    @pytest.mark.parametrize("count", [1, 2, 3, 4, 5, pytest.param(6, marks=pytest.mark.full)])
    @pytest.mark.parametrize("system", [TINY, SMALL, TOY], ids=str)
    def test_every_order_is_accepted_and_what_the_bound_excludes_is_not(self, system, count, monkeypatch):
        """All trees of all columns; then every number of the system against the theorem's own words."""
        install(monkeypatch, system)
        terms = self.terms(system, count)
        exact, size = terms.sum(axis=0), np.abs(terms).sum(axis=0)
        slack = (count - 1) * system.unit * size
        fits = size + slack < system.rounds_to_inf
        terms, exact, slack = terms[:, fits], exact[fits], slack[fits]
        found = enclosure.sum_bounds(
            given(terms.astype(F), terms.astype(F), np.zeros(terms.shape, bool)),
            0,
            slice(0, terms.shape[1]),
            stored_float32=True,
        )
        for tree in trees(tuple(range(count))):
            assert found.contain(added(tree, terms, system.nearest)).all(), tree
        within = np.abs(system.finite - exact[:, None]) <= slack[:, None] * (1 + 2.0**-30)
        np.testing.assert_array_equal(is_inside(found, system.finite), within)
        assert not found.nan.any()

    @pytest.mark.parametrize("count", [2, 3, 4, 5])
    def test_terms_that_are_not_rounded_and_sums_that_are_once(self, count, monkeypatch):
        """Products contracted into the additions, and all in higher precision, stored in the system or in less."""
        install(monkeypatch, TOY)
        rng = np.random.default_rng(1)
        lo = rng.choice(TOY.finite[np.abs(TOY.finite) < 16], (count, 400))
        hi = lo + np.abs(lo) * rng.choice([0, 0.1, 1], lo.shape)
        size = np.maximum(np.abs(lo), np.abs(hi)).sum(axis=0)
        lo, hi = (end[:, size * (1 + count * TOY.unit) < TOY.largest] for end in (lo, hi))
        source = given(lo.astype(F), hi.astype(F), np.zeros(lo.shape, bool))
        columns = slice(0, lo.shape[1])
        system_only, anything = (enclosure.sum_bounds(source, 0, columns, stored_float32=w) for w in (True, False))
        narrow = ml_dtypes.float8_e5m2
        stored = anything.rounded(narrow)
        for share in (0.0, 0.3, 0.7, 1.0):
            terms = lo.astype(F).astype(D) + (hi.astype(F).astype(D) - lo.astype(F)) * share
            for tree in trees(tuple(range(count))):
                total = added(tree, terms, TOY.nearest)
                assert system_only.contain(total).all()
                assert stored.contain(total.astype(narrow).astype(F)).all()
            assert system_only.contain(TOY.nearest(terms.sum(axis=0))).all()
            assert stored.contain(terms.sum(axis=0).astype(narrow).astype(F)).all()

    def test_a_hadamard_sum_of_few_terms_in_every_order_truncated_or_not(self):
        """4 of 16 rows; a truncated sum is no larger than the sum of magnitudes, so its bound has no higher order."""
        rng = np.random.default_rng(2)
        terms = np.zeros((16, 40), F)
        terms[[1, 6, 7, 12]] = rng.choice([1, -1, 2.0**-23, 1.9 * 2.0**-24, -(2.0**-24), 3 * 2.0**-25], (4, 40))
        signs = 4 * np.stack([transformed(column) for column in np.eye(16, dtype=F)], axis=1)
        source = Bounds(terms, terms, np.zeros(terms.shape, bool))
        found = enclosure.hadamard_bounds(source, 0xD7E8)

        def toward_zero(x):
            return np.where(x < 0, FLOAT32.toward(x, np.inf), FLOAT32.toward(x, -np.inf))

        for row in range(16):
            signed = (signs[row][:, None] * terms)[[1, 6, 7, 12]].astype(D)
            for tree, rounding in product(trees(tuple(range(4))), (FLOAT32.nearest, toward_zero)):
                assert found[row].contain(F(0.25) * added(tree, signed, rounding)).all()

    def test_sixteen_truncated_terms_one_after_the_other(self):
        """Each of fifteen additions to 1 loses nearly a unit: what is lost is accepted, as much again is not."""
        terms = np.full((16, 1), 0.99 * 2.0**-23, F)
        terms[0] = 1
        found = enclosure.hadamard_bounds(Bounds(terms, terms, np.zeros(terms.shape, bool)), 0)
        row = next(row for row in range(16) if all(transformed(column, 0)[row] > 0 for column in np.eye(16, dtype=F)))
        lost = F(0.25)
        assert found.contain(np.full((16, 1), lost))[row]
        assert not found.contain(np.full((16, 1), lost - F(17 * 2.0**-25)))[row]


def transformed(column, mask=0xD7E8):
    """One group of 16 through the transform, exactly."""
    return enclosure.transform_exactly(column.astype(D).reshape(1, 16, 1), mask).ravel()


# --- any kernel, and kernels of another kind ------------------------------------------------------------------------

OPERATIONS_OF_VALUES = [(name, gradient) for name in ACTIVATIONS for gradient in (False, True)]


def drawn_call(name, gradient, seed, dtype=F, shape=(32, 64), spread=3.0):
    """(inputs, float32 results of a kernel of the permitted kind, drawn for each element) of an operation."""
    rng = np.random.default_rng(seed)
    keys = names_of(name, gradient)
    numbers = {key: (rng.standard_t(3, shape) * spread).astype(dtype) for key in keys}
    values = {key: number.ravel().astype(D) for key, number in numbers.items()}
    halves = results(name, gradient, DrawnKernels(FLOAT32, 2, rng), values, {})
    inputs = {"x": np.concatenate([numbers[key] for key in keys if key != "dy"], axis=1)}
    if gradient:
        inputs = {"dy": numbers["dy"], **inputs}
    found = np.concatenate([FLOAT32.nearest(half).reshape(shape) for half in halves], axis=1)
    return inputs, found.astype(F)


def check(name, gradient, inputs, outputs, scaling=None):
    operation = ("d" if gradient else "") + name
    return refops.oracle.check(operation, inputs, outputs, scaling=scaling, diagnose=False)


def are_free(right, exact, share=2.0**-10):
    """Which numbers lie within a share of themselves of a middle between codes: results near them have either."""
    whole = tuple(slice(0, size) for size in right.matrix_shape)
    codes = Geometry(right.scaling, False).codes(right.rowwise_data, right.matrix_shape, *whole)
    fmt = right.scaling.fmt
    middles = (fmt.grid[1:] + fmt.grid[:-1]) / 2
    size = np.abs(exact / (refops.dequantize(right) / fmt.values[codes]))
    after = np.minimum(np.searchsorted(middles, size), len(middles) - 1)
    nearest = np.minimum(*(np.abs(size / middles[at] - 1) for at in (after, np.maximum(after - 1, 0))))
    return ~(nearest >= share)


class TestAnyKernel:
    """All points at once, for general numbers."""

    @given_any(st.sampled_from(OPERATIONS_OF_VALUES), st.integers(0, 1 << 30), st.sampled_from([0.01, 1.0, 5.0, 40.0]))
    @settings(max_examples=20, deadline=None)
    def test_drawn_kernels_are_right(self, operation, seed, spread):
        inputs, found = drawn_call(*operation, seed, spread=spread)
        report = check(*operation, inputs, {"dx" if operation[1] else "y": found})
        assert report.ok, report

    @given_any(
        st.sampled_from(OPERATIONS_OF_VALUES),
        st.sampled_from(list(ALL_SCALINGS)),
        st.integers(0, 1 << 30),
        st.sampled_from([F, ml_dtypes.bfloat16]),
    )
    @settings(max_examples=20, deadline=None)
    def test_drawn_kernels_that_quantize_are_right(self, operation, name, seed, dtype):
        """What such a kernel computes, cast by the scaling's rules as they are."""
        scaling = ALL_SCALINGS[name]
        dtype = np.dtype(dtype if scaling.path == UNFUSED else F)  # where all is cast that is stored
        inputs, found = drawn_call(*operation, seed, dtype)
        found = found.astype(dtype)
        dump = refops.quantize(found, scaling, columnwise=not scaling.only_rowwise)
        report = check(*operation, inputs, dump, scaling)
        assert report.ok, report

    @given_any(st.sampled_from(list(BLOCKS)), st.sampled_from(["silu", "swiglu", "relu", None]), st.data())
    @settings(max_examples=20, deadline=None)
    def test_one_step_where_nothing_is_free_is_wrong(self, scaling_name, name, data):
        """One code or one scale of a right dump moves to a neighbour: wrong, and of codes no other is."""
        scaling, seed = BLOCKS[scaling_name], data.draw(st.integers(0, 1 << 20))
        x = np.random.default_rng(seed).standard_normal((128, 256)).astype(F)
        if name is None:
            operation, right, exact = "quantize", refops.quantize(x, scaling), x
        else:
            bound = bind_activation(name, {})
            operation, halves = name, np.split(x.astype(D), 2, axis=1) if bound.gated else (x.astype(D),)
            right, exact = refops.activation_quantize(name, x, scaling), bound.truth(*halves)
        dump = {"rowwise_data": right.rowwise_data.copy(), "rowwise_scale_inv": right.rowwise_scale_inv.copy()}
        if right.amax_rowwise is not None:
            dump["amax_rowwise"] = right.amax_rowwise
        where = data.draw(st.sampled_from(list(dump)[:2]))
        if where == "rowwise_data":
            at = tuple(data.draw(st.integers(0, size - 1)) for size in right.shape)
            assume(refops.dequantize(right)[at] != 0 and not are_free(right, exact)[at])
            packed = scaling.layout.packed
            dump[where][at[0], at[1] // packed] ^= 16 if packed == 2 and at[1] % 2 else 1  # the last bit of the code
        else:
            shape = Geometry(scaling, False).valid_scale_shape(right.shape)
            at = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
            # What is free in a float32 scale is the amax: of an activation's few numbers.
            bits = dump[where].view(np.uint32) if dump[where].dtype == F else dump[where]
            bits[at] += 64 if dump[where].dtype == F else 1
        report = refops.oracle.check(operation, {"x": x}, dump, scaling=scaling, diagnose=False)
        wrong = {array.name: array.wrong for array in report.arrays}
        assert wrong[where] == 1 or (where == "rowwise_scale_inv" and wrong[where])
        assert where == "rowwise_scale_inv" or sum(wrong.values()) == 1

    @pytest.mark.parametrize("name", ["silu", "swiglu"])
    def test_a_second_rounding_where_there_is_one_is_wrong_exactly_where_it_shows(self, name):
        """MXFP8 casts the float32 result itself; this kernel stores it in bfloat16 before."""
        scaling = refops.MXFP8Scaling(refops.E4M3)
        x = np.random.default_rng(3).standard_normal((64, 256)).astype(F)
        bound = bind_activation(name, {})
        exact = bound.truth(*(np.split(x.astype(D), 2, axis=1) if bound.gated else (x.astype(D),)))
        right = refops.activation_quantize(name, x, scaling)
        twice = refops.quantize(refops.activation(name, x).astype(ml_dtypes.bfloat16).astype(F), scaling)
        case = Case(name, x, scaling)
        judge = verdict.Judge(case, {"rowwise_data": twice.rowwise_data}, (), 2, "ignore", "given")
        judge.run()
        same_scale = np.repeat(right.rowwise_scale_inv == twice.rowwise_scale_inv, 32, axis=1)
        same_scale = same_scale[: exact.shape[0], : exact.shape[1]]
        shown = (right.rowwise_data != twice.rowwise_data) & same_scale
        surely = shown & ~are_free(right, exact, 2.0**-20)
        wrong = judge.tallies["rowwise_data"].wrong
        assert surely.sum() > 50 and wrong[surely].all()
        assert not wrong[~shown & same_scale].any()

    @pytest.mark.parametrize("name", ["silu", "glu", "swiglu"])
    def test_an_exponential_farther_off_is_wrong_wherever_it_leaves_the_stated_width(self, name):
        """All kernels whose exp is off by up to 8 ulp more: what lies beyond the stated steps is rejected."""
        values = operands(names_of(name, False), np.linspace(-6, -1, 31), 60, seed=2)
        right = results(name, False, EveryKernel(FLOAT32, 2), values, {})[0]
        wrong = FLOAT32.nearest(results(name, False, EveryKernel(FLOAT32, 2, beyond=8.0), values, {})[0])
        truth = truths(name, False, values, {})[0]
        slack = 2 * FLOAT32.step(truth)
        right = np.column_stack([FLOAT32.nearest(right), truth - slack, truth + slack])
        room = (BEYOND_A_VALUE + 0.5) * FLOAT32.step(np.abs(right).max(axis=1))
        outside = (wrong < right.min(1)[:, None] - room[:, None]) | (wrong > right.max(1)[:, None] + room[:, None])
        assert outside.any(axis=1).mean() > 0.5
        assert not is_inside(accepted(name, False, 2, values, {})[0], wrong)[outside].any()


# --- blunt enclosures -----------------------------------------------------------------------------------------------


def wider_units(monkeypatch):
    error = Interval._error
    monkeypatch.setattr(Interval, "_error", lambda self, true: error(self, true) + interval.ulp_of(true))


def narrower_units(monkeypatch):
    monkeypatch.setattr(Interval, "_error", lambda self, true: (self.ulp - 1) * interval.ulp_of(true))


def units_of_the_ends_alone(monkeypatch):
    """Forgets that a unit doubles at a power of two inside."""
    monkeypatch.setattr(Interval, "_least_off", lambda self, lo, hi: lo - self._error(lo))


def tanh_is_one_at_an_end(monkeypatch):
    """Takes the end beyond the numbers whose tanh is 1 for all that lie before it."""

    def tanh(self):
        ends = ((x, np.tanh(x)) for x in (self.lo, self.hi))
        low, high = (np.where(np.abs(x) > interval._TANH_IS_ONE, 0, self._error(true)) for x, true in ends)
        return Interval(np.tanh(self.lo) - low, np.tanh(self.hi) + high, self.nan, self.ulp)

    monkeypatch.setattr(Interval, "tanh", tanh)


def results_a_step_wider(monkeypatch):
    rounded = interval._rounded

    def wider(lo, hi, nan, ulp):
        return rounded(lo, hi, nan, ulp).widened_by(1)

    monkeypatch.setattr(interval, "_rounded", wider)


def contraction_forgotten(monkeypatch):
    def rounded(lo, hi, nan, ulp):
        return Interval(interval._nearest(lo).astype(D), interval._nearest(hi).astype(D), nan, ulp)

    monkeypatch.setattr(interval, "_rounded", rounded)


def the_truth_a_unit_farther(monkeypatch):
    widened = Interval.widened_to
    monkeypatch.setattr(Interval, "widened_to", lambda self, lo, hi: widened(self, lo, hi).widened_by(1))


def the_truth_forgotten(monkeypatch):
    monkeypatch.setattr(Interval, "widened_to", lambda self, lo, hi: self)


def infinity_less_infinity_is_anything(monkeypatch):
    """What addition did once: where an end is NaN, the interval goes on to the other infinity."""

    def add(a, b):
        lo, hi = a.lo + b.lo, a.hi + b.hi
        nan = a.nan | b.nan | np.isnan(lo) | np.isnan(hi) | ((a.hi == np.inf) & (b.lo == -np.inf))
        nan |= (a.lo == -np.inf) & (b.hi == np.inf)
        only = np.isnan(lo) & np.isnan(hi)
        lo, hi = np.where(np.isnan(lo) & ~only, -np.inf, lo), np.where(np.isnan(hi) & ~only, np.inf, hi)
        return interval._rounded(lo, hi, nan, a.ulp)

    monkeypatch.setitem(interval._UFUNCS, np.add, add)


def nan_elements_not_missing(monkeypatch):
    magnitudes = Bounds.magnitudes
    monkeypatch.setattr(
        Bounds, "magnitudes", lambda self: magnitudes(Bounds(self.lo, self.hi, np.zeros(self.nan.shape, bool)))
    )


def moved_amax(which, direction):
    def patch(monkeypatch):
        right = enclosure.block_amax_bounds

        def moved(*arguments):
            ends = right(*arguments)
            ends[which] = np.nextafter(ends[which], F(direction))
            return ends

        monkeypatch.setattr(enclosure, "block_amax_bounds", moved)

    return patch


def neighbouring_codes_accepted(monkeypatch):
    order = enclosure.code_order
    monkeypatch.setattr(enclosure, "code_order", lambda codes, fmt: order(codes, fmt) // 2)


def nan_codes_not_judged(monkeypatch):
    inside = enclosure.codes_inside
    monkeypatch.setattr(enclosure, "codes_inside", lambda *a: inside(*a[:3], np.zeros_like(a[3]), a[4]))


def a_scale_byte_more(monkeypatch):
    codes_of = scale_rules.CodedScales._codes_of

    def one_more(self, scale_code):
        low, high = codes_of(self, scale_code)
        return low, high + np.uint8(1)

    monkeypatch.setattr(scale_rules.CodedScales, "_codes_of", one_more)


def multipliers_of_the_traced_amax_alone(monkeypatch):
    monkeypatch.setattr(enclosure, "ordinary_ends", lambda least, greatest: ())


def bound_of_sums(share):
    """The bound of sums of five with other than n - 1 = 4 roundings."""

    def patch(monkeypatch):
        def installed(own, system):
            every_kernel.install(own, system)
            own.setattr(enclosure, "NEAREST", system.unit * share / 4)

        monkeypatch.setattr(sys.modules[__name__], "install", installed)

    return patch


def truncation_forgotten(monkeypatch):
    monkeypatch.setattr(enclosure, "TRUNCATED", enclosure.NEAREST)


def sums_rounded_outward(monkeypatch):
    right = enclosure.sum_bounds
    monkeypatch.setattr(enclosure, "sum_bounds", lambda source, axis, at, **_: right(source, axis, at))


#: name -> (patch, check that must fail then).
BLUNT = {
    "wider units": (
        wider_units,
        lambda m: TestValues().test_an_elementary_function_holds_its_error_at_every_number_inside("exp", 2, m),
    ),
    "narrower units": (
        narrower_units,
        lambda m: TestValues().test_every_kernel_in_a_toy_system_is_accepted_and_little_else("silu", False, m),
    ),
    "units of the ends alone": (
        units_of_the_ends_alone,
        lambda m: TestValues().test_an_elementary_function_holds_its_error_at_every_number_inside("exp", 2, m),
    ),
    "tanh is 1 at an end": (
        tanh_is_one_at_an_end,
        lambda m: TestValues().test_an_elementary_function_holds_its_error_at_every_number_inside("tanh", 2, m),
    ),
    "results a step wider": (
        results_a_step_wider,
        lambda m: TestValues().test_an_operation_holds_what_its_operands_may_give_and_no_more(np.multiply, m),
    ),
    "contraction forgotten": (
        contraction_forgotten,
        lambda m: TestValues().test_every_kernel_in_a_toy_system_is_accepted_and_little_else("silu", True, m),
    ),
    "the truth a unit farther": (
        the_truth_a_unit_farther,
        lambda m: TestValues().test_every_kernel_in_a_toy_system_is_accepted_and_little_else("silu", False, m),
    ),
    "the truth forgotten": (
        the_truth_forgotten,
        lambda m: TestValues().test_every_kernel_in_a_toy_system_is_accepted_and_little_else("qgelu", True, m),
    ),
    "inf - inf is anything": (
        infinity_less_infinity_is_anything,
        lambda m: TestValues().test_an_operation_holds_what_its_operands_may_give_and_no_more(np.add, m),
    ),
    "NaN not missing": (
        nan_elements_not_missing,
        lambda m: TestAmax().test_the_amax_of_a_block_is_one_of_those_and_no_other(2),
    ),
    "least amax a step lower": (
        moved_amax(0, -1),
        lambda m: TestAmax().test_the_amax_of_a_block_is_one_of_those_and_no_other(2),
    ),
    "greatest amax a step lower": (
        moved_amax(1, -1),
        lambda m: TestAmax().test_the_amax_of_a_block_is_one_of_those_and_no_other(2),
    ),
    "greatest amax a step higher": (
        moved_amax(1, np.inf),
        lambda m: TestCodes().test_of_all_scales_and_codes_those_are_accepted_that_a_kernel_writes(
            "block-1x128-f32", "an exact number", m
        ),
    ),
    "neighbouring codes": (
        neighbouring_codes_accepted,
        lambda m: TestRoundingAndCasting().test_codes_are_those_of_the_numbers_inside(refops.E4M3, 0.75),
    ),
    "NaN codes": (nan_codes_not_judged, lambda m: TestRoundingAndCasting().test_zeros_and_nan(refops.E4M3)),
    "a scale byte more": (
        a_scale_byte_more,
        lambda m: TestScales().test_a_scale_byte_is_right_exactly_where_some_amax_gives_it(BLOCKS["mxfp8"]),
    ),
    "a scale byte more, in a dump": (
        a_scale_byte_more,
        lambda m: TestCodes().test_of_all_scales_and_codes_those_are_accepted_that_a_kernel_writes(
            "nvfp4-1x16", "beside a middle", m
        ),
    ),
    "multipliers of the traced amax": (
        multipliers_of_the_traced_amax_alone,
        lambda m: TestScales().test_a_float32_scale_is_traced_to_every_amax_that_gives_it(
            refops.E5M2, False, np.float16
        ),
    ),
    "n - 2 roundings": (
        bound_of_sums(3),
        lambda m: TestSums().test_every_order_is_accepted_and_what_the_bound_excludes_is_not(TOY, 5, m),
    ),
    "n roundings": (
        bound_of_sums(5),
        lambda m: TestSums().test_every_order_is_accepted_and_what_the_bound_excludes_is_not(TOY, 5, m),
    ),
    "sums rounded outward": (
        sums_rounded_outward,
        lambda m: TestSums().test_every_order_is_accepted_and_what_the_bound_excludes_is_not(SMALL, 3, m),
    ),
    "truncation forgotten": (
        truncation_forgotten,
        lambda m: TestSums().test_sixteen_truncated_terms_one_after_the_other(),
    ),
}


@sampled("name", BLUNT, 4, in_all=1)
def test_a_blunt_enclosure_is_noticed(name, monkeypatch):
    """Each of the checks above can fail: with one piece of the enclosure a little off it does."""
    patch, noticed_by = BLUNT[name]
    patch(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        noticed_by(monkeypatch)
