"""Every kernel of the kind that the oracle permits: an arithmetic in which each freedom is an axis of the results.

The formulas of `refops.activations` run on `Branches`: arrays whose first axis are the elements and every other one a
free choice of the hardware, made where it stands and independent of the others. The choices are

    +, -, *, /   rounded; or not: computed more precisely, or contracted into what follows
    exp, tanh    every number of the system within `ulp` units of the truth; the two ends of that range, and the truth
    /            besides, with an `ulp` above CUDA's, off by the rest, up or down, but where it divides by 1

so that the array holds the results of all kernels, each with its own rounding points and its own exp. A choice that no
element depends on has no axis. The number system is float32 or a toy: a `System` with few bits, in which all operands
can be enumerated too. `install` makes the oracle's own code compute in it.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import count

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

import refops.activations
from refops.activations.arithmetic import Arithmetic, TrueArithmetic
from refops.oracle import enclosure, interval
from refops.oracle.interval import CUDA_ULP, IntervalArithmetic

F, D = np.float32, np.float64


@dataclass(frozen=True)
class System:
    """A binary floating-point system with subnormal numbers, infinities and NaN, as IEEE 754 has them.

    All functions take and return float64 arrays.
    """

    exponent_bits: int
    mantissa_bits: int

    def __str__(self):
        return f"1+{self.exponent_bits}+{self.mantissa_bits}"

    @property
    def bias(self):
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def largest(self):
        """Largest finite number."""
        return (2.0 - 2.0**-self.mantissa_bits) * 2.0**self.bias

    @property
    def rounds_to_inf(self):
        """From here on a real number rounds to infinity."""
        return self.largest + self.step(self.largest) / 2

    @property
    def unit(self):
        """Relative error of one rounding to nearest."""
        return 2.0 ** -(self.mantissa_bits + 1)

    @cached_property
    def positive(self):
        """Every positive finite number, ascending."""
        steps = np.arange(1, ((1 << self.exponent_bits) - 1) << self.mantissa_bits)
        exponent, fraction = np.maximum(steps >> self.mantissa_bits, 1), steps & ((1 << self.mantissa_bits) - 1)
        implicit = (steps >> self.mantissa_bits > 0) << self.mantissa_bits
        return np.ldexp((fraction + implicit).astype(D), exponent - self.bias - self.mantissa_bits)

    @cached_property
    def finite(self):
        """Every finite number, ascending; one zero."""
        return np.concatenate([-self.positive[::-1], [0.0], self.positive])

    @cached_property
    def all(self):
        """Every number: the finite ones, -0, both infinities, NaN."""
        return np.concatenate([self.finite, [-0.0, -np.inf, np.inf, np.nan]])

    def step(self, x):
        """Distance of neighbouring numbers in the binade of each x: at most that of the largest."""
        magnitude = np.clip(np.abs(x), 2.0 ** (1 - self.bias), self.largest)
        return np.ldexp(1.0, np.frexp(magnitude)[1] - 1 - self.mantissa_bits)

    def nearest(self, x):
        """x rounded to nearest, ties to even."""
        step = self.step(x)
        return self._within_range(np.rint(x / step) * step)

    def toward(self, x, direction):
        """The number at or next to x in a direction, -inf or inf."""
        step = self.step(x)
        found = self._within_range((np.floor if direction < 0 else np.ceil)(x / step) * step)
        beyond = np.isinf(found) & np.isfinite(x) & (np.sign(found) != np.sign(direction))
        return np.where(beyond, np.copysign(self.largest, found), found)

    def _within_range(self, x):
        return np.where(np.abs(x) > self.largest, np.copysign(np.inf, x), x)


FLOAT32 = System(8, 23)


def install(monkeypatch, system):
    """Make `refops.oracle` compute in a number system: what it rounds to, and the constants of formulas."""

    def as_float32(function):
        return lambda *arguments: function(*arguments).astype(F)

    def ulp_of(true):
        return system.step(system.nearest(np.minimum(np.abs(true), system.largest)))

    class ToyIntervals(IntervalArithmetic):
        def number(self, c):
            return F(system.nearest(D(F(c))))

    class ToyTruth(TrueArithmetic):
        def number(self, c):
            return float(system.nearest(D(F(c))))

    found = {
        (interval, "_nearest"): as_float32(system.nearest),
        (interval, "toward"): as_float32(system.toward),
        (interval, "_LARGEST"): system.largest,
        (interval, "ROUNDS_TO_INF"): system.rounds_to_inf,
        (enclosure, "ROUNDS_TO_INF"): system.rounds_to_inf,
        (interval, "_TANH_IS_ONE"): 0.5 * np.log(system.largest),
        (interval, "ulp_of"): ulp_of,
        (enclosure, "ulp_of"): ulp_of,
        (enclosure, "INTERVALS"): ToyIntervals(),
        (enclosure, "NEAREST"): system.unit,
        (enclosure, "TRUNCATED"): 2 * system.unit,
        (enclosure, "FLT_MAX"): system.largest,
        (refops.activations, "TRUTH"): ToyTruth(),
    }
    for (module, name), value in found.items():
        monkeypatch.setattr(module, name, value)


class Branches(NDArrayOperatorsMixin):
    """Results of every kernel.

    Attributes:
        values: float64 (elements, choices, choices, ...); an axis of 1 where a choice plays no part.
        kind: the `EveryKernel` that the choices are made in.
    """

    def __init__(self, values, kind):
        self.values, self.kind = values, kind

    def __array_ufunc__(self, ufunc, method, *operands, **options):
        if method != "__call__" or options:
            return NotImplemented
        arrays = aligned(*(self.kind.values_of(x) for x in operands))
        exact = ufunc(*arrays)
        if ufunc in (np.add, np.subtract, np.multiply):
            return self.kind.rounded_or_not(exact)
        if ufunc is np.true_divide:
            return self.kind.quotients(exact, arrays[1])
        return Branches(exact, self.kind) if ufunc is np.negative else exact

    def __array_function__(self, function, types, arguments, options):
        if function is np.ones_like:
            return Branches(np.ones_like(self.values), self.kind)
        if function is np.where:
            condition, *choices = arguments
            return Branches(np.where(*aligned(condition, *map(self.kind.values_of, choices))), self.kind)
        return NotImplemented

    def exp(self):
        """e^x."""
        return self.kind.elementary(np.exp(self.values), 0.0, np.inf)

    def tanh(self):
        """Hyperbolic tangent; exactly 1 in magnitude where e^2x overflows."""
        true = np.tanh(self.values)
        exact = np.abs(self.values) > 0.5 * np.log(self.kind.system.largest)
        return self.kind.elementary(true, np.where(exact, true, -np.inf), np.where(exact, true, np.inf))


def aligned(*arrays):
    """The arrays with as many axes each, the new ones behind the others."""
    arrays = [np.asarray(a) for a in arrays]
    most = max(a.ndim for a in arrays)
    return [a.reshape(a.shape + (1,) * (most - a.ndim)) for a in arrays]


class EveryKernel(Arithmetic):
    """The words of formulas on `Branches`.

    Attributes:
        system: the number system.
        ulp: permitted error of exp and tanh; what is above CUDA's is that of division.
        beyond: how much farther exp and tanh are off; above 0 these are kernels of another kind.
    """

    def __init__(self, system, ulp, beyond=0.0):
        self.system, self.ulp, self.beyond = system, ulp, beyond
        self._axes = count(1)

    def operand(self, x):
        return x if isinstance(x, Branches) else Branches(np.asarray(x, D), self)

    def number(self, c):
        return F(self.system.nearest(D(F(c))))

    def values_of(self, x):
        """float64 values of an operand; numbers are the same for every element."""
        return x.values if isinstance(x, Branches) else np.asarray(x, D).reshape(np.shape(x) or (1,))

    def choose(self, options):
        """One of the arrays: an axis for them if they differ."""
        options = [np.asarray(option) for option in options]
        first, *others = options
        if all(np.array_equal(first, other, equal_nan=True) for other in others):
            return Branches(first, self)
        axis = next(self._axes)
        wide = [option.reshape(option.shape + (1,) * (axis - option.ndim)) for option in options]
        return Branches(np.stack(wide, axis=axis), self)

    def rounded_or_not(self, exact):
        """The result rounded, or not."""
        return self.choose([self.system.nearest(exact), exact])

    def quotients(self, exact, divisor):
        """The same of a quotient, which may be off by what `ulp` is above CUDA's."""
        spare = max(self.ulp - CUDA_ULP, 0)
        if not spare:
            return self.rounded_or_not(exact)
        off = np.where((divisor != 1) & np.isfinite(exact), spare * self.system.step(exact), 0.0)
        moved = [exact - off, exact, exact + off]
        return self.choose([*moved, *map(self.system.nearest, moved)])

    def elementary(self, true, least, greatest):
        """The truth; the ends of what is within `ulp` units of it; and every number of the system between.

        A unit is that of the number which the truth rounds to: twice the step just below a power of two.
        """
        step = self.system.step(true)
        off = (self.ulp + self.beyond) * self.system.step(self.system.nearest(true))
        low, high = true - off, true + off
        first = self.system.toward(low, np.inf)
        numbers = [self.system.nearest(first + i * step) for i in range(int(4 * self.ulp) + 2)]
        inside = [np.where((low <= n) & (n <= high), n, self.system.nearest(true)) for n in numbers]
        options = [low, high, true, self.system.nearest(true), *inside]
        return self.choose([np.clip(option, least, greatest) for option in unlike(options)])


class DrawnKernels(EveryKernel):
    """One kernel of the same kind for each element: every choice is drawn."""

    def __init__(self, system, ulp, rng, beyond=0.0):
        super().__init__(system, ulp, beyond)
        self._rng = rng

    def choose(self, options):
        options = np.stack(np.broadcast_arrays(*options))
        drawn = self._rng.integers(len(options), size=(1, *options.shape[1:]))
        return Branches(np.take_along_axis(options, drawn, axis=0)[0], self)


def unlike(options):
    """The arrays without those that repeat an earlier one."""
    kept = []
    for option in options:
        if not any(np.array_equal(option, other, equal_nan=True) for other in kept):
            kept.append(option)
    return kept
