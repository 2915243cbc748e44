"""Implementations that a good kernel author could have written: all of them right, none of them the reference.

What differs between them is what hardware and compilers are free in: the last bits of exp and tanh, contraction of
products into multiply-adds, more precise arithmetic than float32, the order of sums, algebraically equal formulas of
the same quality. What TE fixes (rounding points, scales, casts, layouts) they all do alike. The formulas are
transcribed from docs/spec/activations.md and the casts from docs/spec/quantization.md; from `refops` come only the
settings, the shapes of stored arrays and Philox.

`count_false_alarms` draws tensors of every class, runs a variant on each and asks the oracle: it must reject none.
`Variant.overstepping` makes the same variants wrong, to see that the test can fail. Not here: wrong conventions
(`mutants.py`), speed.
"""

import math
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

import refops
from refops import oracle
from refops.oracle.operation import OPERATIONS
from refops.quantization.result import stored_layout
from refops.rounding import philox_bytes
from refops.survey import SCALINGS

F, D, L = np.float32, np.float64, np.longdouble
FP32, FP16, BF16 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
DTYPES = {"fp32": FP32, "fp16": FP16, "bf16": BF16}
FLT_MAX = np.finfo(np.float32).max
PARAMETERS = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0, "beta1": 4.0, "beta2": 25.0}

# --- exact building blocks ------------------------------------------------------------------------


def odd_float32(high, low=0.0):
    """high + low (float64 or longer, |low| below the last place of high) rounded to float32 *to odd*.

    Rounding that to nearest in any format of at most 22 bits gives the once-rounded sum; see `nearest_float32` for
    float32 itself.
    """
    nearest = np.asarray(high).astype(F)
    difference = (high - nearest.astype(np.asarray(high).dtype)) + low
    inexact = np.isfinite(nearest) & (difference != 0)
    bits = nearest.view(np.int32)
    away = np.where((difference > 0) == (nearest >= 0), 1, -1)
    stepped = np.where(nearest == 0, np.where(difference > 0, 1, -0x7FFFFFFF), bits + away).astype(np.int32).view(F)
    odd = np.where(inexact & (bits & 1 == 0), stepped, nearest).astype(F)
    return np.where(np.isinf(nearest) & np.isfinite(high), np.copysign(FLT_MAX, nearest), odd).astype(F)


def fma(a, b, c):
    """a * b + c of float32 arrays with one rounding: the exact float64 product, a float64 sum rounded to odd."""
    with np.errstate(all="ignore"):
        product, addend = np.multiply(a, b, dtype=D), np.asarray(c, D)
        total = product + addend
        virtual = total - product
        lost = (product - (total - virtual)) + (addend - virtual)
        step = np.isfinite(lost) & (lost != 0) & np.isfinite(total) & (total.view(np.int64) & 1 == 0)
        total = np.where(step, np.nextafter(total, np.where(lost > 0, np.inf, -np.inf)), total)
        return total.astype(F)


def binade_ulp(true):
    """Distance of neighbouring float32 in the binade of each float64: at most what any definition of ulp gives."""
    magnitude = np.clip(np.abs(true), 2.0**-126, float(FLT_MAX))
    return np.exp2(np.floor(np.log2(magnitude)) - 23.0)


# --- what a variant is ----------------------------------------------------------------------------

ELEMENTARY = ("nearest", "random", "up", "down", "alternate")
CONTRACTIONS = ("none", "first", "second", "random")
FORMULAS = ("te", "algebraic", "exact", "exact-once")
ORDERS = ("sequential", "reversed", "pairwise", "permuted", "warps", "chunks", "float64", "kahan", "contracted")
HADAMARDS = ("float64", "permuted", "matrix", "butterflies", "products")


@dataclass(frozen=True)
class Variant:
    """One way to be right.

    Attributes:
        ulp: how far exp and tanh may be off, in units in the last place: what the oracle is told.
        elementary: where in that range they are: correctly rounded, anywhere, always up, always down, up and down in
            turn; "unrounded" exp (its last product contracted into the sum after it) goes with `contract`.
        contract: which multiply-adds are contracted: none, all with the first or second product inside, any.
        formula: TE's order; an algebraically equal one, whose own roundings take up half of `ulp` (at least 4); the
            exact value rounded to float32; or rounded once to the dtype that is stored.
        reciprocal: how far divisions are off, in ulp; 0 is rounding to nearest.
        order: how sums are added up.
        hadamard: how the transform's 16 terms are.
        error: how far exp and tanh really are off, if not by `ulp`: an overstepping variant, which is wrong.
    """

    ulp: float = 2
    elementary: str = "nearest"
    contract: str = "none"
    formula: str = "te"
    reciprocal: float = 0
    order: str = "sequential"
    hadamard: str = "float64"
    error: float | None = None

    def __post_init__(self):
        if self.formula == "algebraic" and self.ulp < 4:
            raise ValueError(f"ulp must be at least 4 for formula='algebraic'; got {self.ulp!r}")

    @property
    def reach(self):
        """How far exp and tanh may be off."""
        if self.error is not None:
            return self.error
        return self.ulp / 2 if self.formula == "algebraic" else self.ulp

    def overstepping(self, error):
        """The same, off by `error` ulp: not right any more."""
        return replace(self, error=error)

    @classmethod
    def draw(cls, rng, **fixed):
        """Any variant."""
        formula = str(rng.choice(FORMULAS, p=[0.55, 0.25, 0.1, 0.1]))
        fields = {
            "ulp": int(rng.choice([4, 8, 64] if formula == "algebraic" else [1, 2, 2, 2, 8, 64])),
            "elementary": str(rng.choice(ELEMENTARY)),
            "contract": str(rng.choice(CONTRACTIONS)),
            "formula": formula,
            "order": str(rng.choice(ORDERS)),
            "hadamard": str(rng.choice(HADAMARDS)),
        }
        return cls(**{**fields, **fixed})


class Arithmetic:
    """float32 arithmetic of one variant. Everything takes and gives float32 arrays."""

    def __init__(self, variant, rng):
        self.variant, self.rng = variant, rng
        self._calls = 0

    # Each contractible place chooses once, as a compiler does.
    def _contracts(self):
        choice = self.variant.contract
        return self.rng.random() < 0.5 if choice == "random" else choice != "none"

    def mad(self, a, b, c):
        """a * b + c."""
        return fma(a, b, c) if self._contracts() else a * b + c

    def mad2(self, a, b, c, d):
        """a * b + c * d: either product may be the one inside."""
        if not self._contracts():
            return a * b + c * d
        choice = self.variant.contract
        first = self.rng.random() < 0.5 if choice == "random" else choice == "first"
        return fma(a, b, c * d) if first else fma(c, d, a * b)

    def one_minus_square(self, t):
        """1 - t * t."""
        return fma(-t, t, F(1)) if self._contracts() else F(1) - t * t

    def _off(self, true):
        """float64 distances from the truth, permitted by the variant."""
        v = self.variant
        reach = v.reach * binade_ulp(true)
        self._calls += 1
        if v.elementary == "random":
            return reach * self.rng.uniform(-1, 1, true.shape)
        sign = {"nearest": 0.0, "up": 1.0, "down": -1.0, "alternate": (-1.0) ** self._calls}[v.elementary]
        return reach * sign

    def _nearby(self, true, off):
        """A float32 between `true` and `true + off`: of those the farthest, but the nearest if there is none."""
        nearest = true.astype(F)
        target = (true + off).astype(F)
        beyond = np.abs(target.astype(D) - true) > np.abs(off)  # rounding carried it out: back towards the truth
        target = np.where(beyond, np.nextafter(target, nearest), target)
        usable = (off != 0) & np.isfinite(true) & np.isfinite(target)
        return np.where(usable, target, nearest).astype(F)

    def exp(self, x):
        """e^x; exactly 0 where that is nearest (no implementation leaves it there)."""
        true = np.exp(np.asarray(x, D))
        nearest = true.astype(F)
        if self.variant.elementary == "nearest":
            return nearest
        return np.where(nearest == 0, nearest, np.maximum(self._nearby(true, self._off(true)), F(0)))

    def tanh(self, x):
        """Hyperbolic tangent; exactly 1 from |x| = 9.71 on (1 - tanh below 2^-27), as in every implementation."""
        true = np.tanh(np.asarray(x, D))
        nearest = true.astype(F)
        if self.variant.elementary == "nearest":
            return nearest
        near = np.clip(self._nearby(true, self._off(true)), F(-1), F(1))
        return np.where(1 - np.abs(true) < 2.0**-27, nearest, near)

    def one_plus_exp(self, x):
        """1 + e^x: the last product inside exp may be contracted into the sum."""
        if not self._contracts():
            return F(1) + self.exp(x)
        true = np.exp(np.asarray(x, D))
        return (1.0 + np.maximum(true + self._off(true), 0.0)).astype(F)

    def divide(self, a, b):
        """a / b, perhaps through an approximate reciprocal."""
        if not self.variant.reciprocal:
            return a / b
        true = np.divide(a, b, dtype=D)
        off = self.variant.reciprocal * binade_ulp(true) * self.rng.uniform(-1, 1, true.shape)
        return np.where(np.isfinite(true) & (true != 0), self._nearby(true, off), a / b)

    def sum(self, terms, factors=None):
        """Sum of float32 `terms` along axis 0 in the variant's order; `factors`: (a, b) with terms = a * b rounded."""
        order, rng = self.variant.order, self.rng
        n = len(terms)
        if n == 0:
            return np.zeros(terms.shape[1:], F)
        if order == "contracted" and factors is not None:
            total = np.zeros(terms.shape[1:], F)
            for a, b in zip(*np.broadcast_arrays(*factors), strict=True):
                total = fma(a, b, total)
            return total
        if order == "float64":
            return terms.astype(D).sum(axis=0).astype(F)
        if order == "kahan":
            total, carry = np.zeros(terms.shape[1:], F), np.zeros(terms.shape[1:], F)
            for term in terms:
                y = term - carry
                new = total + y
                carry = np.where(np.isfinite(new), (new - total) - y, F(0))  # inf - inf would make NaN of inf
                total = new
            return total
        if order == "pairwise":
            while len(terms) > 1:
                odd = terms[-1:] if len(terms) % 2 else terms[:0]
                terms = np.concatenate([terms[0 : len(terms) - len(odd) : 2] + terms[1::2], odd])
            return terms[0]
        if order == "warps":  # a butterfly over each 32 rows, then atomics in any order
            padded = np.zeros((-(-n // 32) * 32, *terms.shape[1:]), F)
            padded[:n] = terms
            lanes = padded.reshape(-1, 32, *terms.shape[1:])
            while lanes.shape[1] > 1:
                half = lanes.shape[1] // 2
                lanes = lanes[:, :half] + lanes[:, half:]
            terms = lanes[rng.permutation(len(lanes)), 0]
        elif order == "chunks":  # each thread strides over the rows, then the threads one after the other
            threads = int(rng.choice([2, 8, 128]))
            terms = np.stack([_in_order(terms[i::threads]) for i in range(min(threads, n))])
        elif order == "reversed":
            terms = terms[::-1]
        elif order == "permuted":
            terms = terms[rng.permutation(n)]
        return _in_order(terms)


def _in_order(terms):
    total = terms[0].copy()
    for term in terms[1:]:
        total = total + term
    return total


# --- float32 formulas -----------------------------------------------------------------------------

HALF, ONE, TWO = F(0.5), F(1), F(2)
C1, C3 = F(0.79788456), F(0.03567741)
RATIO, SLOPE, QALPHA = F(0.044715), F(0.1070322243), F(1.702)


class Gates:
    """Gates that no arithmetic touches but one addition: the same text for float32 and for exact numbers."""

    def gate(self, g):
        return g

    def gate_slope(self, g):
        return np.ones_like(g)

    def clamped_gate(self, g):
        limit = self.p["limit"]
        return np.where(g >= -limit, np.fmin(g, limit), -limit) + self.p["glu_linear_offset"]


class Formulas(Gates):
    """Scalar functions of activations in float32, in TE's order (docs/spec/activations.md, 1.2)."""

    def __init__(self, arithmetic, parameters):
        self.a, self.p = arithmetic, {name: F(value) for name, value in {**PARAMETERS, **parameters}.items()}

    def sigmoid(self, x):
        return self.a.divide(ONE, self.a.one_plus_exp(-x))

    def dsigmoid(self, x):
        s = self.sigmoid(x)
        return s * (ONE - s)

    def gelu(self, x):
        t = self.a.tanh(x * self.a.mad(C3 * x, x, C1))
        return x * self.a.mad(HALF, t, HALF)

    def dgelu(self, x):
        a = self.a
        t = a.tanh((C1 * x) * a.mad(RATIO * x, x, ONE))
        inner = a.one_minus_square(t) * a.mad(SLOPE * x, x, C1)
        return a.mad2(HALF * x, inner, HALF, ONE + t)

    def silu(self, x, alpha=ONE):
        return x * self.sigmoid(alpha * x)

    def dsilu(self, x, alpha=ONE):
        z = alpha * x
        s = self.sigmoid(z)
        return self.a.mad(z, s * (ONE - s), s)

    def qgelu(self, x):
        return self.silu(x, QALPHA)

    def dqgelu(self, x):
        return self.dsilu(x, QALPHA)

    def relu(self, x):
        return np.where(x > 0, x, F(0))

    def drelu(self, x):
        return np.where(x > 0, ONE, F(0))

    def srelu(self, x):
        return np.where(x > 0, x * x, F(0))

    def dsrelu(self, x):
        return np.where(x > 0, TWO * x, F(0))

    def clamped_silu(self, x):
        return self.silu(np.fmin(x, self.p["limit"]), self.p["alpha"])

    def dclamped_silu(self, x):
        return np.where(x <= self.p["limit"], self.dsilu(np.fmin(x, self.p["limit"]), self.p["alpha"]), F(0))

    def situ(self, x):
        return (self.p["beta1"] * self.a.tanh(x / self.p["beta1"])) * self.sigmoid(x)

    def dsitu(self, x):
        t, s = self.a.tanh(x / self.p["beta1"]), self.sigmoid(x)
        return self.a.mad2(self.a.one_minus_square(t), s, (self.p["beta1"] * t) * s, ONE - s)

    def clamped_gate_slope(self, g):
        return np.where((g <= self.p["limit"]) & (g >= -self.p["limit"]), ONE, F(0))

    def situ_gate(self, g):
        return self.p["beta2"] * self.a.tanh(g / self.p["beta2"])

    def situ_gate_slope(self, g):
        return self.a.one_minus_square(self.a.tanh(g / self.p["beta2"]))

    # In the order of the scaled kernels (1.6 i).
    def scaled_dsilu(self, x, alpha=ONE):
        z = alpha * x
        s = self.sigmoid(z)
        return self.a.mad(z * s, ONE - s, s)

    def scaled_dclamped_silu(self, x):
        limit = self.p["limit"]
        return np.where(x <= limit, self.scaled_dsilu(np.fmin(x, limit), self.p["alpha"]), F(0))


class Algebraic(Formulas):
    """Equal functions in other float32 formulas of the same quality.

    gelu as x sigmoid(2 u) is not among them: left of -5.4, where TE's formula gives 0, the rounding of 2 u alone moves
    its tiny results by up to 100 float32 ulp.
    """

    def gelu(self, x):
        """0.5 x (1 + tanh u)."""
        return (HALF * x) * (ONE + self.a.tanh(x * self.a.mad(C3 * x, x, C1)))

    def dgelu(self, x):
        """0.5 (1 + t) + 0.5 x (1 - t^2) u', the two summands the other way round and factored otherwise."""
        a = self.a
        t = a.tanh(x * (C1 * a.mad(RATIO * x, x, ONE)))
        left = HALF * x
        slope = a.mad(SLOPE * x, x, C1)  # x * x first would overflow, and give NaN, earlier than TE's order
        return a.mad2(HALF, ONE + t, left * a.one_minus_square(t), slope)

    def silu(self, x, alpha=ONE):
        """x / (1 + e^-x)."""
        return self.a.divide(x, self.a.one_plus_exp(-(alpha * x)))

    def dsilu(self, x, alpha=ONE):
        """s (1 + x (1 - s))."""
        z = alpha * x
        s = self.sigmoid(z)
        return s * self.a.mad(z, ONE - s, ONE)

    scaled_dsilu = dsilu


class Exact(Gates):
    """The same functions in extended precision, without cancellation: what a correctly rounded kernel rounds."""

    def __init__(self, parameters):
        self.p = {name: L(F(value)) for name, value in {**PARAMETERS, **parameters}.items()}

    def sigmoid(self, x):
        return L(1) / (L(1) + np.exp(-x))

    def dsigmoid(self, x):
        return self.sigmoid(x) * self.sigmoid(-x)

    def gelu(self, x):
        return x * self.sigmoid(2 * x * (L(C1) + L(C3) * x * x))

    def dgelu(self, x):
        u2 = 2 * L(C1) * x * (1 + L(RATIO) * x * x)
        return self.sigmoid(u2) * (1 + 2 * x * self.sigmoid(-u2) * (L(C1) + L(SLOPE) * x * x))

    def silu(self, x, alpha=1):
        return x * self.sigmoid(alpha * x)

    def dsilu(self, x, alpha=1):
        return self.sigmoid(alpha * x) * (1 + alpha * x * self.sigmoid(-alpha * x))

    def qgelu(self, x):
        return self.silu(x, L(QALPHA))

    def dqgelu(self, x):
        return self.dsilu(x, L(QALPHA))

    def relu(self, x):
        return np.where(x > 0, x, L(0))

    def drelu(self, x):
        return np.where(x > 0, L(1), L(0))

    def srelu(self, x):
        return np.where(x > 0, x * x, L(0))

    def dsrelu(self, x):
        return np.where(x > 0, 2 * x, L(0))

    def clamped_silu(self, x):
        return self.silu(np.fmin(x, self.p["limit"]), self.p["alpha"])

    def dclamped_silu(self, x):
        return np.where(x <= self.p["limit"], self.dsilu(np.fmin(x, self.p["limit"]), self.p["alpha"]), L(0))

    def tanh_slope(self, x):
        return 4 * self.sigmoid(2 * x) * self.sigmoid(-2 * x)

    def situ(self, x):
        return self.p["beta1"] * np.tanh(x / self.p["beta1"]) * self.sigmoid(x)

    def dsitu(self, x):
        b = self.p["beta1"]
        return self.tanh_slope(x / b) * self.sigmoid(x) + b * np.tanh(x / b) * self.dsigmoid(x)

    def clamped_gate_slope(self, g):
        return np.where((g <= self.p["limit"]) & (g >= -self.p["limit"]), L(1), L(0))

    def situ_gate(self, g):
        return self.p["beta2"] * np.tanh(g / self.p["beta2"])

    def situ_gate_slope(self, g):
        return self.tanh_slope(g / self.p["beta2"])

    def scaled_dsilu(self, x):
        return self.dsilu(x)

    def scaled_dclamped_silu(self, x):
        return self.dclamped_silu(x)


#: activation -> names of (value, derivative, gate, gate slope); the gate's are None for unary ones.
PARTS = {
    "gelu": ("gelu", "dgelu", None, None),
    "qgelu": ("qgelu", "dqgelu", None, None),
    "relu": ("relu", "drelu", None, None),
    "srelu": ("srelu", "dsrelu", None, None),
    "silu": ("silu", "dsilu", None, None),
    "glu": ("sigmoid", "dsigmoid", "gate", "gate_slope"),
    "geglu": ("gelu", "dgelu", "gate", "gate_slope"),
    "qgeglu": ("qgelu", "dqgelu", "gate", "gate_slope"),
    "reglu": ("relu", "drelu", "gate", "gate_slope"),
    "sreglu": ("srelu", "dsrelu", "gate", "gate_slope"),
    "swiglu": ("silu", "dsilu", "gate", "gate_slope"),
    "clamped_swiglu": ("clamped_silu", "dclamped_silu", "clamped_gate", "clamped_gate_slope"),
    "situglu": ("situ", "dsitu", "situ_gate", "situ_gate_slope"),
}
#: What the scaled kernels compute the derivative of the activated half with.
SCALED_DERIVATIVES = {"swiglu": "scaled_dsilu", "clamped_swiglu": "scaled_dclamped_silu"}


@dataclass
class Values:
    """Unrounded results of an operation.

    Attributes:
        f: float32 (M, K).
        exact: extended precision (M, K) of the same, or None: then rounding goes through `f`.
        factors: two float32 arrays whose rounded product is f, or None.
    """

    f: np.ndarray
    exact: np.ndarray | None = None
    factors: tuple | None = None

    def rounded(self, dtype):
        """As stored in `dtype`, by one rounding."""
        if self.exact is None or dtype == FP32:
            return self.f.astype(dtype)
        return odd_float32(self.exact).astype(dtype)


def evaluate(activation, inputs, variant, rng, *, gradient, scaled=False, interleave=0, params=None):
    """Return (`Values` of the result, `Values` of the terms of drow_scales or None)."""
    x = inputs["x"].reshape(-1, inputs["x"].shape[-1])
    value, derivative, gate, gate_slope = PARTS[activation]
    if scaled:
        derivative = SCALED_DERIVATIVES.get(activation, derivative)
    act_columns, gate_columns = _columns(x.shape[1], interleave) if gate else (slice(None), None)

    def run(functions, convert):
        """Results with one set of functions; `convert` makes its numbers of the inputs."""
        a = convert(x[:, act_columns])
        g = convert(x[:, gate_columns]) if gate else None
        dy = convert(inputs["dy"].reshape(len(x), -1)) if gradient else None
        rows = convert(inputs["row_scales"].reshape(-1, 1)) if scaled else None
        call = {name: getattr(functions, name) for name in (value, derivative, gate, gate_slope) if name}
        if not gradient:
            y, factors = call[value](a), None
            if gate:
                other = call[gate](g)
                y, factors = y * other, (y, other)
            if scaled:
                y, factors = y * rows, (y, rows)
            return y, factors, None, None
        terms = None
        if scaled:
            forward = call[value](a) * call[gate](g) if gate else call[value](a)
            terms = (dy * forward, (dy, forward))
            dy = dy * rows
        if not gate:
            slope = call[derivative](a)
            return slope * dy, (slope, dy), *(terms or (None, None))
        if scaled:
            slope = call[gate_slope](g)
            if activation == "clamped_swiglu":
                slope = np.where(np.isnan(g), slope.dtype.type(1), slope)  # this kernel's mask lets NaN pass
            left = (dy, call[derivative](a) * call[gate](g))
            right = (dy, call[value](a) * slope)
        else:
            left = (call[derivative](a) * dy, call[gate](g))
            right = (call[gate_slope](g) * dy, call[value](a))
        factors = tuple(_joined(x.shape, act_columns, gate_columns, *pair) for pair in zip(left, right, strict=True))
        return factors[0] * factors[1], factors, *(terms or (None, None))

    with np.errstate(all="ignore"):
        kind = Algebraic if variant.formula == "algebraic" else Formulas
        f, factors, terms, term_factors = run(kind(Arithmetic(variant, rng), params or {}), lambda v: v.astype(F))
        exact = exact_terms = None
        if variant.formula.startswith("exact"):
            exact, _, exact_terms, _ = run(Exact(params or {}), lambda v: v.astype(F).astype(L))
            f, exact, terms, exact_terms = (*_settle(exact, f), *_settle(exact_terms, terms))
            factors = term_factors = None
            if variant.formula == "exact":
                exact = exact_terms = None
    return Values(f, exact, factors), None if terms is None else Values(terms, exact_terms, term_factors)


def _settle(exact, f):
    """(float32, extended) of an exact result; NaN where TE's formula gives NaN, which is part of its definition."""
    if exact is None:
        return None, None
    exact = np.where(np.isnan(f), L(np.nan), exact)
    return exact.astype(F), exact


def _columns(width, interleave):
    if not interleave:
        return slice(0, width // 2), slice(width // 2, width)
    column = np.arange(width)
    is_gate = column // interleave % 2 == 1
    return column[~is_gate], column[is_gate]


def _joined(shape, act_columns, gate_columns, left, right):
    out = np.empty(shape, np.result_type(left, right))
    out[:, act_columns], out[:, gate_columns] = left, right
    return out


# --- casts and scales (docs/spec/quantization.md) -------------------------------------------------

CODE_DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def fp8(values, fmt, rng):
    """Saturating codes; NaN comes with either sign."""
    dtype = CODE_DTYPES[fmt.name]
    largest = F(ml_dtypes.finfo(dtype).max)
    codes = np.clip(values, -largest, largest).astype(dtype).view(np.uint8)
    nan = np.isnan(values)
    if nan.any():
        codes = np.where(nan, np.where(rng.random(codes.shape) < 0.5, np.uint8(0x7F), np.uint8(0xFF)), codes)
    return codes


def fp4(values):
    """E2M1 codes by the table of 1.2."""
    a = np.abs(values)
    code = sum((a > t).astype(np.uint8) for t in (0.25, 1.25, 2.5, 5)) + sum(
        (a >= t).astype(np.uint8) for t in (0.75, 1.75, 3.5)
    )
    return np.where(np.isnan(values), 7, code | (np.signbit(values) << 3)).astype(np.uint8)


E2M1_GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], F)
E2M1_VALUES = np.concatenate([E2M1_GRID, -E2M1_GRID])
E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(F)


def int8(values):
    """MXINT8 codes: integers of 1/64, ties to even, no -128; NaN gives 0."""
    counts = np.clip(np.rint(np.where(np.isnan(values), F(0), values).astype(D) * 64), -127, 127)
    return counts.astype(np.int8).view(np.uint8)


#: Values of all UE5M3 codes but NaN's.
UE5M3_VALUES = np.array(
    [(c & 7) / 8 * 2.0**-14 if c < 8 else (1 + (c & 7) / 8) * 2.0 ** ((c >> 3) - 15) for c in range(255)]
)


def ue5m3(values):
    """Saturating codes of magnitudes, ties to the even code."""
    middles = (UE5M3_VALUES[:-1] + UE5M3_VALUES[1:]) / 2
    v = np.minimum(values.astype(D), UE5M3_VALUES[-1])
    below = np.searchsorted(middles, v, side="left")
    tie = (below < len(middles)) & (np.append(middles, np.inf)[below] == v) & (below % 2 == 1)
    return (below + tie).astype(np.uint8)


def fp4_stochastic(values, bits):
    """E2M1 codes of 6.8: add bits / 256 of the step, cut off."""
    a = np.where(np.isnan(values), F(0), np.minimum(np.abs(values), F(8)))
    step = np.select([a < 2, a < 4], [F(0.5), F(1)], F(2))
    dithered = fma(step, bits.astype(F) / F(256), a)
    code = np.minimum(np.searchsorted(E2M1_GRID, dithered, side="right") - 1, 7)
    return np.where(np.isnan(values), 7, code | (np.signbit(values) << 3)).astype(np.uint8)


def scale_from_amax(amax, fmt, epsilon, power_2, value_for_inf):
    """3.1."""
    amax = np.where(amax < F(epsilon), F(epsilon), amax).astype(F)
    scale = F(448 if fmt.name == "e4m3" else 57344) / amax
    scale = np.where(np.isinf(scale), F(value_for_inf), scale).astype(F)
    if power_2:
        scale = np.exp2(np.floor(np.log2(scale.astype(D)))).astype(F)
    return np.where((amax == 0) | ~np.isfinite(amax), ONE, scale)


#: Largest value of each element format.
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0, "int8": 127 / 64}


def e8m0(amax, fmt, rule):
    """Scale byte: TE's (round up) or the OCP specification's floor."""
    if rule == "up":
        v = (amax * (ONE / F(LARGEST[fmt.name]))).astype(D)
        exponent = np.ceil(np.log2(np.maximum(v, 2.0**-200)))
        exponent += (np.exp2(exponent) < v).astype(D) - (np.exp2(exponent - 1) >= v)  # log2 may be an ulp off
    else:
        v = amax.astype(D)
        exponent = np.frexp(np.maximum(v, 2.0**-200))[1] - 1 - int(np.floor(np.log2(LARGEST[fmt.name])))
    byte = np.clip(np.where(np.isinf(v), 127, exponent) + 127, 0, 254)
    return np.where(v == 0, 0, byte).astype(np.uint8)


def maximum(values, axis=None):
    """max |x|, NaN ignored."""
    return np.fmax.reduce(np.abs(values), axis=axis, initial=F(0))


def in_blocks(values, rows, columns):
    """(R, rows, C, columns) view of `values` padded with zeros."""
    m, k = values.shape
    padded = np.zeros((-(-m // rows) * rows, -(-k // columns) * columns), F)
    padded[:m, :k] = values
    return padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)


def spread(scales, shape, rows, columns):
    """Block values repeated over their elements."""
    return np.repeat(np.repeat(scales, rows, 0), columns, 1)[: shape[0], : shape[1]]


@dataclass
class Quantizer:
    """Casts one tensor under one scaling.

    Attributes:
        cast: float32 (M, K), what is cast.
        amax_of: float32 (M, K), what the tensor's amax is of.
        dtype: nominal dtype.
    """

    cast: np.ndarray
    amax_of: np.ndarray
    dtype: np.dtype
    shape: tuple
    scaling: object
    arithmetic: Arithmetic

    def run(self, rowwise, columnwise):
        """name -> array as stored, padding zero."""
        names = {"rowwise": rowwise, "columnwise": columnwise}
        layout = stored_layout(self.scaling, self.shape)
        self.out = {n: np.zeros(s, d) for n, (s, d) in layout.items() if names[n.replace("amax_", "").split("_")[0]]}
        with np.errstate(all="ignore"):
            {
                refops.DelayedScaling: self._per_tensor,
                refops.CurrentScaling: self._per_tensor,
                refops.BlockScaling: self._blocks,
                refops.MXFP8Scaling: self._mxfp8,
                refops.NVFP4Scaling: self._nvfp4,
                refops.Block64Scaling: self._blocks,
                refops.MXFP4Scaling: self._powers_of_two,
                refops.MXINT8Scaling: self._powers_of_two,
                refops.E8M0BlockScaling: self._powers_of_two,
            }[type(self.scaling)](rowwise, columnwise)
        return self.out

    def _put(self, name, values):
        """Write the valid part of an array."""
        if name in self.out:
            target = self.out[name]
            if name.endswith("_data"):
                target[...] = values.reshape(target.shape)
            else:
                target[tuple(slice(n) for n in values.shape)] = values

    def _per_tensor(self, rowwise, columnwise):
        s = self.scaling
        if isinstance(s, refops.DelayedScaling):
            amax, scale = maximum(self.cast), F(s.scale)
        else:
            amax = maximum(self.amax_of)
            scale = scale_from_amax(amax, s.fmt, s.amax_epsilon, s.power_2_scale, FLT_MAX)[()]
        codes = fp8(self.cast * scale, s.fmt, self.arithmetic.rng)
        for direction, data in (("rowwise", codes), ("columnwise", codes.T)):
            self._put(f"{direction}_data", data)
            self._put(f"{direction}_scale_inv", np.array([ONE / scale], F))
            self._put(f"amax_{direction}", np.array([amax], F))

    def _blocks(self, rowwise, columnwise):
        s = self.scaling
        largest = {FP32: FLT_MAX, FP16: 65504.0, BF16: float(ml_dtypes.finfo(BF16).max)}[self.dtype]
        size, lines = s.block_size, getattr(s, "block_dim", 1) == 1
        edges = ((1, size), (size, 1)) if lines else ((size, size),) * 2
        for direction, (rows, columns) in zip(("rowwise", "columnwise"), edges, strict=True):
            amax = maximum(maximum(in_blocks(self.cast, rows, columns), 3), 1)
            scale = scale_from_amax(amax, s.fmt, s.amax_epsilon, s.power_2_scale, largest)
            codes = fp8(self.cast * spread(scale, self.cast.shape, rows, columns), s.fmt, self.arithmetic.rng)
            inverse = ONE / scale
            transposed = direction == "columnwise"
            self._put(f"{direction}_data", codes.T if transposed else codes)
            # Lines: [block, row] rowwise, [block, column] columnwise; squares: [row block, column block], transposed.
            self._put(f"{direction}_scale_inv", inverse.T if lines != transposed else inverse)

    def _mxfp8(self, rowwise, columnwise):
        s = self.scaling
        edges = ((32, 32),) * 2 if s.two_d else ((1, 32), (32, 1))
        for direction, (rows, columns) in zip(("rowwise", "columnwise"), edges, strict=True):
            amax = maximum(maximum(in_blocks(self.cast, rows, columns), 3), 1)
            byte = e8m0(amax, s.fmt, s.scale_rounding)
            multiplier = np.exp2(127.0 - byte).astype(F)
            self._put(
                f"{direction}_data",
                fp8(self.cast * spread(multiplier, self.cast.shape, rows, columns), s.fmt, self.arithmetic.rng),
            )
            if s.two_d:
                byte = np.repeat(byte, 32, 0 if direction == "rowwise" else 1)
                m, k = self.cast.shape
                byte = byte[:m] if direction == "rowwise" else byte[:, :k]
            self._put(f"{direction}_scale_inv", byte)

    def _powers_of_two(self, rowwise, columnwise):
        """Formats with E8M0 scales that TE has not; all but MXINT8 store the columnwise copy as the transpose."""
        s, size = self.scaling, self.scaling.block_size
        square = getattr(s, "two_d", False) or getattr(s, "block_dim", 1) == 2
        transposed, repeated = s.fmt.name != "int8", s.fmt.name == "e2m1"
        epsilon = F(getattr(s, "amax_epsilon", 0))
        for direction in ("rowwise", "columnwise"):
            turned = direction == "columnwise"
            cast = np.ascontiguousarray(self.cast.T) if turned else self.cast
            rows = size if square else 1
            amax = np.maximum(maximum(maximum(in_blocks(cast, rows, size), 3), 1), epsilon)
            byte = e8m0(amax, s.fmt, s.scale_rounding)
            scaled = cast * spread(np.exp2(127.0 - byte).astype(F), cast.shape, rows, size)
            codes = {"e2m1": fp4, "int8": int8}.get(s.fmt.name, lambda v: fp8(v, s.fmt, self.arithmetic.rng))(scaled)
            if s.fmt.name == "e2m1":
                codes = codes[:, 0::2] | codes[:, 1::2] << 4
            if repeated:
                byte = np.repeat(byte, rows, 0)[: len(cast)]
            back = turned and not transposed
            self._put(f"{direction}_data", codes.T if back else codes)
            self._put(f"{direction}_scale_inv", byte.T if back else byte)

    def _nvfp4(self, rowwise, columnwise):
        s, m, k = self.scaling, *self.cast.shape
        if rowwise:
            amax = maximum(self.amax_of, 1) if s.row_scaled else np.array([maximum(self.amax_of)], F)
            self._nvfp4_direction("rowwise", self.cast, amax, 0)
        if columnwise:
            cast = np.ascontiguousarray(self.cast.T)
            if s.rht:
                cast = hadamard(cast, s.sign_mask, self.dtype, self.arithmetic)
                amax = np.array([maximum(cast)], F)
            else:
                amax = maximum(self.amax_of, 0) if s.row_scaled else np.array([maximum(self.amax_of)], F)
            self._nvfp4_direction("columnwise", cast, amax, m * (k // 16))

    def _nvfp4_direction(self, direction, cast, amax, first_block):
        s, edge = self.scaling, (16, 16) if self.scaling.two_d else (1, 16)
        wide = s.scale_format.name == "ue5m3"
        largest = (65536 if s.four_over_six else 114688) if wide else s.e4m3_max
        s_enc = np.fmin(F(largest * 6) / amax, FLT_MAX)
        s_enc = np.where((amax == 0) | (s_enc == 0) | (not s.tensor_level), ONE, s_enc).astype(F)[:, None]
        blocks = in_blocks(cast, *edge)
        block_amax = maximum(maximum(blocks, 3), 1)
        bits, values = None, UE5M3_VALUES.astype(F) if wide else E4M3_VALUES
        if s.stochastic_rounding:
            numbers = first_block + np.arange(cast.size // 16)
            bits = philox_bytes(s.seed, s.offset, numbers).reshape(cast.shape)

        def attempt(scale):
            if wide:
                byte = ue5m3(scale)
            else:
                byte = np.clip(np.fmin(scale, F(448)), 0, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
            multiplier = np.fmin(ONE / (values[byte] * (ONE / s_enc)), FLT_MAX)
            scaled = cast * spread(multiplier, cast.shape, *edge)
            return byte, fp4(scaled) if bits is None else fp4_stochastic(scaled, bits)

        if s.four_over_six is None:
            byte, codes = attempt(np.fmin(block_amax * (s_enc * (ONE / F(6))), FLT_MAX))
        else:
            base = (block_amax / F(6)) * s_enc
            (byte6, codes6), (byte4, codes4) = attempt(base), attempt(base * F(1.5))
            top = F(largest * 6)
            errors = [self._error(values[b], c, cast, amax, edge, top) for b, c in ((byte6, codes6), (byte4, codes4))]
            four = errors[1] < errors[0]
            byte = np.where(four, byte4, byte6)
            codes = np.where(spread(four, cast.shape, *edge), codes4, codes6)
        self._put(f"{direction}_data", codes[:, 0::2] | codes[:, 1::2] << 4)
        self._put(f"{direction}_scale_inv", np.repeat(byte, edge[0], 0))
        self._put(f"amax_{direction}", amax)

    def _error(self, scale, codes, cast, amax, edge, top):
        """Error of each block, its elements added in the variant's order."""
        s = self.scaling
        scale = spread(scale, cast.shape, *edge)
        quotient = ((E2M1_VALUES[codes] * scale) * amax[:, None]) / top
        difference = quotient - cast
        error = np.abs(difference) if s.four_over_six == "mae" else difference * difference
        blocks = in_blocks(error, *edge).transpose(1, 3, 0, 2)
        return self.arithmetic.sum(blocks.reshape(-1, *blocks.shape[2:]))


def hadamard(x, mask, dtype, arithmetic):
    """The 16-point transform along the last axis in float32, in the variant's order, rounded to `dtype`."""
    rng, how = arithmetic.rng, arithmetic.variant.hadamard
    signs = np.where((mask >> np.arange(16)) & 1, F(-1), ONE).astype(F)
    index = np.arange(16)
    parity = np.array([[(int(i) & int(j)).bit_count() & 1 for j in index] for i in index])
    matrix = np.where(parity, F(-1), ONE).astype(F)
    groups = (x.reshape(*x.shape[:-1], -1, 16) * signs).astype(F)
    if how == "float64":
        out = (groups.astype(D) @ matrix.astype(D)) * 0.25
        out = out.astype(F) if dtype == FP32 else odd_float32(out)
    elif how == "matrix":
        out = groups @ (matrix * F(0.25))
    elif how == "butterflies":
        out = groups
        for stride in rng.permutation([1, 2, 4, 8]):
            pairs = out.reshape(*out.shape[:-1], 16 // (2 * stride), 2, stride)
            first, second = pairs[..., 0, :], pairs[..., 1, :]
            out = np.stack([first + second, first - second], axis=-2).reshape(groups.shape)
        out = out * F(0.25)
    else:
        order = rng.permutation(16) if how == "permuted" else index
        weights = matrix * (F(0.25) if how == "products" else ONE)
        out = np.zeros_like(groups)
        for i in order:
            out = out + groups[..., i : i + 1] * weights[i]
        out = out if how == "products" else out * F(0.25)
    return (out + F(0)).astype(dtype).astype(F).reshape(x.shape)


# --- operations -----------------------------------------------------------------------------------


def rounding_points(scaling, kind):
    """(casts rounded, amax rounded, dbias rounded) of the kernels that fuse with `scaling`."""
    if isinstance(scaling, refops.DelayedScaling):
        return False, False, False
    if isinstance(scaling, refops.MXFP8Scaling):
        return True, True, False
    if isinstance(scaling, refops.CurrentScaling):
        return True, False, True
    if isinstance(scaling, refops.NVFP4Scaling) and not (scaling.row_scaled or scaling.rht):
        return True, False, True
    return True, True, True


def run(task, variant, rng):
    """Return the outputs of a `Task` as this variant computes them: name -> array."""
    operation, inputs, params = OPERATIONS[task.op], task.inputs, dict(task.params)
    kind, scaling = operation.kind, task.scaling
    arithmetic = Arithmetic(variant, rng)
    with np.errstate(all="ignore"):
        if kind == "dequantize":
            return {"y": dequantize(inputs["q"], task.out_dtype, arithmetic)}
        if kind == "update_delayed_scale":
            return update_delayed_scale(**inputs, **params)
        x = inputs["x"]
        gradient, terms = kind.endswith("grad"), None
        if kind == "quantize":
            values = Values(x.astype(F).reshape(-1, x.shape[-1]))
        else:
            interleave = params.pop("glu_interleave_size", 0)
            values, terms = evaluate(
                operation.activation,
                inputs,
                variant,
                rng,
                gradient=gradient,
                scaled=kind.startswith("scaled"),
                interleave=interleave,
                params=params,
            )
        shape = (*x.shape[:-1], values.f.shape[1])
        if scaling is None:
            name = "dx" if gradient else "y"
            out = {name: values.rounded(task.out_dtype).reshape(shape)}
            if terms is not None:
                sums = arithmetic.sum(
                    terms.f.T,
                    None if terms.factors is None else [np.broadcast_to(t, terms.f.shape).T for t in terms.factors],
                )
                out["drow_scales"] = sums.astype(inputs["row_scales"].dtype).reshape(inputs["row_scales"].shape)
            elif gradient and task.dbias:
                out["dbias"] = arithmetic.sum(out[name].reshape(values.f.shape).astype(F)).astype(x.dtype)
            return out
        rounded = values.rounded(x.dtype).astype(F)
        casts_rounded, amax_rounded, dbias_rounded = rounding_points(scaling, kind)
        quantizer = Quantizer(
            rounded if casts_rounded else values.f,
            rounded if amax_rounded else values.f,
            x.dtype,
            shape,
            scaling,
            arithmetic,
        )
        out = quantizer.run(task.rowwise, task.columnwise)
        if task.dbias:
            sums = arithmetic.sum(rounded) if dbias_rounded else arithmetic.sum(values.f, values.factors)
            out["dbias"] = sums.astype(x.dtype)
        return out


def dequantize(q, dtype, arithmetic):
    """Section 7; columnwise data alone come back in the tensor's orientation."""
    s, (m, k) = q.scaling, q.matrix_shape
    columnwise = q.rowwise_data is None
    data = q.columnwise_data if columnwise else q.rowwise_data
    scales = q.columnwise_scale_inv if columnwise else q.rowwise_scale_inv
    transposed = columnwise and not isinstance(s, refops.MXFP8Scaling | refops.MXINT8Scaling)
    outer, inner = (k, m) if transposed else (m, k)
    if s.fmt.name == "e2m1":
        packed = data.reshape(outer, inner // 2)
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(outer, inner)
    if isinstance(s, refops.NVFP4Scaling):
        amax = q.amax_columnwise if columnwise else q.amax_rowwise
        stored = scales[:outer, : inner // 16]
        if s.scale_format.name == "e4m3":
            block = (E4M3_VALUES[stored] * amax[:, None]) * (ONE / F(6 * s.e4m3_max))
        else:
            block = np.append(UE5M3_VALUES, np.nan).astype(F)[stored]
            if s.tensor_level:
                block = block * (amax[:, None] * (ONE / F(6 * (65536 if s.four_over_six else 114688))))
        values = E2M1_VALUES[codes] * np.repeat(block, 16, 1)
        if columnwise and s.rht:
            groups = values.reshape(outer, -1, 16).astype(D)
            index = np.arange(16)
            parity = np.array([[(int(i) & int(j)).bit_count() & 1 for j in index] for i in index])
            signs = np.where((s.sign_mask >> index) & 1, -1.0, 1.0)
            values = ((groups @ np.where(parity, -1.0, 1.0)) * 0.25 * signs).reshape(values.shape)
            values = (odd_float32(values) if dtype != FP32 else values.astype(F)) + F(0)
    else:
        if s.fmt.name == "e2m1":
            values = E2M1_VALUES[codes]
        elif s.fmt.name == "int8":
            values = data.reshape(outer, inner).view(np.int8).astype(F) / F(64)
        else:
            table = np.arange(256, dtype=np.uint8).view(CODE_DTYPES[s.fmt.name]).astype(F)
            values = table[data.reshape(outer, inner)]
        if scales.dtype == np.uint8:
            size = s.block_size
            rows, columns = (size, 1) if columnwise and not transposed else (1, size)
            if isinstance(s, refops.E8M0BlockScaling) and s.block_dim == 2:
                rows = size
            power = np.exp2(scales.astype(D) - 127).astype(F)
            values = values * spread(power, (outer, inner), rows, columns)
        elif isinstance(s, refops.BlockScaling | refops.Block64Scaling):
            size = s.block_size
            if getattr(s, "block_dim", 1) == 2:
                values = values * spread(scales, (outer, inner), size, size)
            else:
                values = values * np.repeat(scales[:, :outer].T, size, 1)[:, :inner]
        else:
            values = values * scales
    return (values.T if transposed else values).astype(dtype).reshape(q.shape)


def update_delayed_scale(amax_history, scale, fmt, margin=0, algorithm="max", keep_unused=True):
    """Section 2.2, column by column."""
    new_history, new_scale = amax_history.copy(), np.array(scale, F)
    length = len(amax_history)
    largest = F(448 if fmt.name == "e4m3" else 57344) * F(2.0**-margin)
    for c in range(amax_history.shape[1]):
        h = amax_history[:, c]
        if h[0] == 0 and keep_unused:
            continue
        amax = np.fmax.reduce(h) if algorithm == "max" else h[0]
        new_history[:, c] = np.concatenate([h[1:], h[:1]])
        new_history[0, c] = 0
        if amax > 0 and np.isfinite(amax):
            new_scale[c] = min(largest / amax, FLT_MAX)
    assert length == len(new_history)
    return {"amax_history": new_history, "scale": new_scale}


# --- tensors --------------------------------------------------------------------------------------

CLASSES = (
    "normal",
    "student",
    "log-normal",
    "ties",
    "amax-edges",
    "saturating",
    "subnormal",
    "huge",
    "tiny",
    "zeros",
    "special",
    "corners",
    "16-bit",
    "constant",
)
#: Zeros of the derivatives, minima, ends of exp and tanh, limits.
CORNERS = (
    -0.7524614, -1.2784645, -0.7511445, -3.4, -5.0599, -5.1579, -5.4187, -10.1, -16.6355, 16.6355, -17.33, 17.33,
    -52.13, 52.13, -88.72, 88.72, -103.97, 7.0, -7.0, 9.0109, -9.0109, 0.6, -0.6, 1.0, -1.0, 36.04, 225.27, 250.0,
)  # fmt: skip


def draw_tensor(rng, name, shape, dtype):
    """A tensor of class `name`."""
    with np.errstate(all="ignore"):
        return np.asarray(_draw_values(rng, name, shape, dtype)).astype(F).astype(dtype)


def _draw_values(rng, name, shape, dtype):
    normal = rng.standard_normal(shape)
    sign = np.where(rng.random(shape) < 0.5, -1.0, 1.0)
    if name == "normal":
        values = normal * 2.0 ** rng.integers(-4, 5)
    elif name == "student":
        values = rng.standard_t(1.5, shape)
    elif name == "log-normal":
        values = sign * np.exp2(rng.uniform(-15, 15, shape)) * (1.0 + rng.random(shape))
    elif name == "ties":  # midpoints of E4M3, E5M2, E2M1 and of bfloat16, times powers of two
        mantissa = rng.choice(
            [17 / 16, 19 / 16, 9 / 8, 11 / 8, 5 / 4, 7 / 4, 1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11], shape
        )
        nudge = 1.0 + rng.choice([-1, 0, 0, 0, 1], shape) * 2.0**-23
        values = sign * mantissa * nudge * np.exp2(rng.integers(-6, 7, shape))
    elif name == "amax-edges":  # each row's amax at a power of two times a format's maximum, or beside it
        edge = rng.choice([448.0, 57344.0, 6.0, 1.0, 240.0, 1.75], (shape[0], 1)) * np.exp2(
            rng.integers(-9, 9, (shape[0], 1))
        )
        edge = edge.astype(F).astype(D) * (1.0 + rng.choice([-1, 0, 0, 1], (shape[0], 1)) * 2.0**-23)
        values = np.clip(normal / 3, -1, 1) * edge
        at = rng.random(shape) < 0.05
        values = np.where(at, sign * edge, values)
    elif name == "saturating":
        values = normal * 2.0 ** rng.integers(6, 18)
    elif name == "subnormal":
        values = normal * 2.0 ** (-137 if dtype != FP16 else -18)
    elif name == "huge":
        values = sign * np.exp2(rng.uniform(110, 127.99, shape) if dtype != FP16 else rng.uniform(8, 15.9, shape))
    elif name == "tiny":
        values = normal * np.exp2(
            rng.uniform(-126, -60, (shape[0], 1)) if dtype != FP16 else rng.uniform(-20, -8, (shape[0], 1))
        )
    elif name == "zeros":
        values = np.where(rng.random(shape) < 0.8, 0.0 * sign, normal)
        values[rng.random(shape[0]) < 0.3] = 0.0
    elif name == "special":
        values = normal.copy()
        odd = rng.random(shape) < 0.02
        values[odd] = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38, -3e38, 1e20, 1e-40], int(odd.sum()))
        values[rng.random(shape[0]) < 0.1] = rng.choice([np.nan, np.inf, -np.inf])
    elif name == "corners":
        centre = rng.choice(np.array(CORNERS), shape)
        values = centre * (1.0 + normal * np.exp2(rng.uniform(-26, -4, shape)))
    elif name == "16-bit":
        bits = rng.integers(0, 1 << 16, shape, dtype=np.uint16)
        values = (bits.view(FP16) if dtype == FP16 else bits.view(BF16)).astype(D)
    else:
        values = np.full(shape, float(rng.choice(np.array(CORNERS)))) * np.where(rng.random(shape) < 0.9, 1.0, sign)
    return values


@dataclass
class Task:
    """A call of one operation: what goes into `oracle.check`, and what a variant needs to know."""

    op: str
    inputs: dict
    scaling: object
    params: dict
    out_dtype: np.dtype
    rowwise: bool = True
    columnwise: bool = False
    dbias: bool = False
    label: str = ""

    def check(self, outputs, ulp, **options):
        """The oracle's report."""
        inputs = self.inputs if len(self.inputs) > 1 else next(iter(self.inputs.values()))
        return oracle.check(self.op, inputs, outputs, scaling=self.scaling, params=self.params, ulp=ulp, **options)


def combinations():
    """Every (operation, name of its scaling or None)."""
    rows = []
    for operation in OPERATIONS.values():
        if operation.takes_scaling and operation.kind != "quantize":
            rows.append((operation.name, None))
        if operation.takes_scaling or operation.kind == "dequantize":
            rows += [(operation.name, name) for name in SCALINGS]
        else:
            rows.append((operation.name, None))
    return rows


def draw_shape(rng, scaling, gated):
    """(M, K) of what is quantized or written: ragged where the scaling allows it, one row and one column among them."""
    if scaling is not None and scaling.fmt.name == "e2m1":
        unit = 32 if getattr(scaling, "row_scaled", False) else 16
        return unit * int(rng.integers(1, 9)), unit * int(rng.integers(1, 9))
    m = int(rng.choice([1, 2, 31, 32, 33, 64, 127, 128, 129, 160, int(rng.integers(1, 200))]))
    if isinstance(scaling, refops.MXFP8Scaling) and gated:
        return m, 32 * int(rng.integers(1, 6))
    return m, int(rng.choice([1, 2, 16, 31, 33, 64, 96, 127, 128, 130, 144, int(rng.integers(1, 160))]))


def draw_task(rng, op, scaling_name, tensor_class=None, dtype=None):
    """A task for an operation and scaling, everything else drawn."""
    operation = OPERATIONS[op]
    scaling = None if scaling_name is None else SCALINGS[scaling_name].scaling
    dtype = dtype or DTYPES[str(rng.choice(["fp32", "bf16", "bf16", "fp16"]))]
    tensor_class = tensor_class or str(rng.choice(CLASSES))
    label = f"{op} {scaling_name} {dtype} {tensor_class}"
    if op == "update_delayed_scale":
        return _draw_update(rng, label)
    if isinstance(scaling, refops.DelayedScaling):
        scaling = replace(scaling, scale=float(F(rng.choice([1.0, 3.7, 2.0**-5, 448 / 3.0, 1e-3, 2.0**40]))))
    if isinstance(scaling, refops.NVFP4Scaling) and scaling.stochastic_rounding:
        scaling = replace(scaling, seed=int(rng.integers(1 << 40)))
    gated = operation.activation is not None and PARTS[operation.activation][2] is not None
    m, k = draw_shape(rng, scaling, gated)
    params = {}
    if operation.activation == "clamped_swiglu" and rng.random() < 0.5:
        params = {
            "limit": float(F(rng.choice([1.0, 7.0, 30.0]))),
            "alpha": 1.702,
            "glu_linear_offset": float(rng.choice([0.0, 1.0])),
        }
    if operation.activation == "situglu" and rng.random() < 0.5:
        params = {"beta1": float(rng.choice([1.0, 4.0, 3.3])), "beta2": float(rng.choice([25.0, 0.7]))}
    if operation.kind.startswith("scaled") and gated and rng.random() < 0.5:
        params["glu_interleave_size"] = 32
        k = 32 * int(rng.integers(1, 5))
    rowwise, columnwise = [(True, True), (True, False), (False, True)][int(rng.integers(3))]
    task = Task(op, {}, scaling, params, dtype, rowwise, columnwise, label=label)
    if operation.kind == "dequantize":
        task.out_dtype = DTYPES[str(rng.choice(list(DTYPES)))]
        x = draw_tensor(rng, tensor_class, (m, k), dtype)
        arrays = Quantizer(x.astype(F), x.astype(F), dtype, (m, k), scaling, Arithmetic(Variant(), rng)).run(
            rowwise, columnwise
        )
        task.inputs = {"q": refops.Quantized(**arrays, scaling=scaling, shape=(m, k), dtype=dtype)}
        return task
    width = 2 * k if gated else k
    x = draw_tensor(rng, tensor_class, (m, width), dtype)
    if gated and tensor_class == "ties":  # silu(2^k) is 2^k, sigmoid(0) one half: products are ties then
        x[:, :k] = rng.choice([0.0, 32.0, 64.0], (m, k))
    if gated and tensor_class == "corners":  # the activated half there, ordinary gates
        x[:, k:] = draw_tensor(rng, "normal", (m, k), dtype)
    leading = {1: (), 2: (1,), 3: (m, 1)}.get(int(rng.integers(1, 12)))
    task.inputs = {"x": x}
    if operation.kind.endswith("grad"):
        other = str(rng.choice(["normal", tensor_class, "ties"]))
        dy = draw_tensor(rng, other, (m, k), dtype)
        task.inputs = {"dy": dy, "x": x}
        task.dbias = operation.kind == "activation_grad" and bool(rng.random() < 0.6)
    if operation.kind == "quantize":
        task.dbias = bool(rng.random() < 0.5)
    if operation.kind.startswith("scaled"):
        row_dtype = DTYPES[str(rng.choice(list(DTYPES)))]
        task.inputs["row_scales"] = draw_tensor(rng, str(rng.choice(["normal", "ties", "zeros"])), (m, 1), row_dtype)[
            :, 0
        ]
        task.out_dtype = DTYPES[str(rng.choice(list(DTYPES)))]
    elif scaling is None and rng.random() < 0.4:
        task.out_dtype = DTYPES[str(rng.choice(list(DTYPES)))]
    if leading is not None and len(leading) == 1 and scaling is None:  # a leading dimension more
        task.inputs = {n: v if n == "row_scales" else v.reshape(*leading, *v.shape) for n, v in task.inputs.items()}
    if scaling is not None and scaling_name == "nvfp4-rht":
        task.columnwise = True
    return task


def _draw_update(rng, label):
    length, columns = int(rng.choice([1, 2, 16, 1024])), int(rng.integers(1, 200))
    history = np.abs(
        draw_tensor(
            rng, str(rng.choice(["normal", "log-normal", "tiny", "huge", "zeros", "special"])), (length, columns), FP32
        )
    )
    history[0, rng.random(columns) < 0.2] = 0
    scale = np.exp2(rng.uniform(-20, 20, columns)).astype(F)
    params = {
        "fmt": refops.E4M3 if rng.random() < 0.5 else refops.E5M2,
        "margin": int(rng.integers(-2, 4)),
        "algorithm": str(rng.choice(["max", "most_recent"])),
        "keep_unused": bool(rng.random() < 0.5),
    }
    return Task("update_delayed_scale", {"amax_history": history, "scale": scale}, None, params, FP32, label=label)


# --- counting -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rejection:
    """A right output that the oracle rejected; `case(seed, index)` makes it again."""

    seed: int
    index: int
    label: str
    variant: Variant
    wrong: dict
    report: str

    def __str__(self):
        return f"case(seed={self.seed}, index={self.index}): {self.label}, {self.variant}: {self.wrong}\n{self.report}"


def case(seed, index):
    """Return (task, variant, outputs) number `index`: operations and scalings in turn, everything else drawn."""
    rows = combinations()
    rng = np.random.default_rng([seed, index])
    op, scaling_name = rows[np.random.default_rng(seed).permutation(len(rows))[index % len(rows)]]
    variant = Variant.draw(rng)
    task = draw_task(rng, op, scaling_name)
    return task, variant, run(task, variant, rng)


def judge(seed, index):
    """Return (number of checks, the Rejection or None): the whole output, and once in a while a single array of it."""
    task, variant, outputs = case(seed, index)
    asked = [outputs]
    if len(outputs) > 1 and index % 3 == 0:
        name = sorted(outputs)[index // 3 % len(outputs)]
        if "dx" not in outputs or name == "dx":  # a lone dbias does not say in which dtype dx was stored
            asked.append({name: outputs[name]})
    for number, part in enumerate(asked, 1):
        report = task.check(part, variant.ulp, diagnose=False)
        if not report.ok:
            wrong = {array.name: int(array.wrong) for array in report.arrays if array.wrong}
            return number, Rejection(seed, index, task.label, variant, wrong, str(report)[:1500])
    return len(asked), None


def count_false_alarms(progress=None, tensors=1000, seed=0):
    """Judge `tensors` right outputs; return (tensors, checks, rejections). `progress(done, total)` follows each.

    Every operation under every scaling of `refops.survey.SCALINGS` comes in turn.
    """
    checks, rejected = 0, []
    for index in range(tensors):
        number, rejection = judge(seed, index)
        checks += number
        if rejection:
            rejected.append(rejection)
        if progress:
            progress(index + 1, tensors)
    return tensors, checks, rejected


def widths(activation, *, gradient=False, ulp=2, count=1 << 14, seed=0):
    """How wide the oracle's intervals are beside what permitted variants do, in float32 ulp of the truth.

    Returns:
        (ratio, share): the median over elements of interval width / spread of the variants' results (at least 1 ulp
        each), where nothing cancels; and the share of elements that count as such.
    """
    from refops.oracle.enclosure import FormulaBounds
    from refops.oracle.operation import Case

    rng = np.random.default_rng([seed, 1])
    gated = PARTS[activation][2] is not None
    side = math.isqrt(count)
    inputs = {"x": draw_tensor(rng, "normal", (side, side * (1 + gated)), FP32)}
    op = activation
    if gradient:
        op = f"d{activation}"
        inputs["dy"] = draw_tensor(rng, "normal", (side, side), FP32)
    bounds = FormulaBounds(Case(op, inputs), ulp)
    bounds = bounds.read(*(slice(0, n) for n in bounds.shape))
    results = [evaluate(activation, inputs, Variant(formula="exact"), rng, gradient=gradient)[0].f]
    truth = results[0].astype(D)
    for elementary in ELEMENTARY:
        for contract in CONTRACTIONS:
            variant = Variant(ulp, elementary, contract)
            results.append(evaluate(activation, inputs, variant, rng, gradient=gradient)[0].f)
    results = np.stack(results).astype(D)
    unit = binade_ulp(truth)
    made = (results.max(0) - results.min(0)) / unit
    permitted = (bounds.hi.astype(D) - bounds.lo.astype(D)) / unit
    plain = (made <= 16) & (truth != 0)
    return float(np.median(permitted[plain] / np.maximum(made[plain], 1.0))), float(plain.mean())
