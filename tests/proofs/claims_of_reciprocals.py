"""Reciprocals without a division: 1 / x correctly rounded, for every seed that the GPU's unit may give.

Two claims are a solver's. What a Newton step gives neither solver decides in a minute, for it is three products of 24
bits in a row; `ENUMERATED` has it for all mantissas instead. One binade stands for all where nothing is subnormal: of x
times 2^k and a seed times 2^-k the remainder 1 - x * seed is the same real number, and all else has another exponent.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import z3
from claims import Claim, traced
from solvers import Query
from terms import COMPILED, CONTRACTED, NUMPY, constant, variable
from tracing import Tracer

from cuda_kernels import elementary, scale_rules, simt
from refops.scalings.arithmetic import REFERENCE

F = np.float32
ONE = constant(F(1))
LARGEST = np.finfo(F).max
MANTISSAS = np.arange(1 << 23, dtype=np.uint32)


def inverse_claim():
    """1 / x of a power of two is a difference of bits."""

    def asked(rule):
        def query(seeded):
            x = variable("x", F)
            fault = {0x7F000000: lambda value: value + 1} if seeded else None
            got = traced(scale_rules.power_of_two_inverse, x, rule=rule, fault=fault)
            normal = [x.bits & 0x7FFFFF == 0, z3.UGE(x.bits, 0x00800000), z3.ULE(x.bits, 0x7F000000)]
            return Query({"x": x}, got, ONE / x, normal)

        return query

    queries = {rule: asked(rule) for rule in (NUMPY, COMPILED, CONTRACTED)}
    reference = lambda part, x: [REFERENCE.reciprocal(True)(x)]  # noqa: E731
    return Claim("power_of_two_inverse = 1 / x", "powers of two, 2^-126 to 2^127", queries, reference)


def to_scale_claim(of_nan=False):
    """What a CPU divides, NumPy divides: the bound is the same."""

    def query(seeded):
        x = variable("x", F)
        fault = {"LARGEST": lambda value: value / F(2)} if seeded else None
        got = traced(elementary.reciprocal_to_scale, x, rule=COMPILED, fault=fault)
        known = z3.fpIsNaN(x.node) if of_nan else z3.ULT(x.bits, 0x7E800000)
        return Query({"x": x}, got, traced(REFERENCE.reciprocal_to_scale, x, rule=NUMPY), [known])

    reference = lambda part, x: [REFERENCE.reciprocal_to_scale(x)]  # noqa: E731
    domain = "NaN" if of_nan else "0 <= x < 2^126"
    return Claim("reciprocal_to_scale: CPU = NumPy", domain, {"CPU": query}, reference)


CLAIMS = [inverse_claim(), to_scale_claim()]
#: Has a counterexample: see docs/guide/proofs.md.
BROKEN = [to_scale_claim(of_nan=True)]


# --- by enumeration ---------------------------------------------------------------------------------


class Enumerated(NamedTuple):
    """A function of numbers, and all numbers that it is asked about.

    Attributes:
        name: of the function and the numbers. function, numbers: these. largest: results are at most that.
    """

    name: str
    function: Callable[..., Any]
    numbers: Callable[[], Any]
    largest: Any = np.inf


def binade(exponent):
    """Every float32 from 2^exponent to the next power of two."""
    return (MANTISSAS | np.uint32(127 + exponent << 23)).view(F)


ENUMERATED = (
    Enumerated("newton_reciprocal, 1 to 2, for all binades to 2^126", elementary.newton_reciprocal, lambda: binade(0)),
    Enumerated("newton_reciprocal, 2^126 to 2^127", elementary.newton_reciprocal, lambda: binade(126)),
    Enumerated("newton_reciprocal, 2^127 to 2^128", elementary.newton_reciprocal, lambda: binade(127)),
    Enumerated(
        "reciprocal_of_small, 1 to 2, for all binades from 2^-126 to 2^126",
        elementary.reciprocal_of_small,
        lambda: binade(0),
        LARGEST,
    ),
    Enumerated(
        "reciprocal_of_small, 0 and subnormal numbers",
        elementary.reciprocal_of_small,
        lambda: MANTISSAS.view(F),
        LARGEST,
    ),
)
#: Seeds: so many float32 from the nearest.
PLACES = (-1, 0, 1)
#: A wrong constant of both functions.
WRONG = {"ONE": lambda value: value + F(1)}
#: Numbers at a time: their arrays stay in a cache.
CHUNK = 1 << 16


def exact_fma(a, b, c):
    """a * b + c of float32 arrays, rounded once: in float64, whose product is exact and whose sum is rounded to odd."""
    a, b, c = (np.asarray(one, np.float64) for one in (a, b, c))
    product = a * b
    total = np.atleast_1d(product + c)
    part = total - product
    lost = (product - (total - part)) + (c - part)
    bits = total.view(np.int64)
    towards = np.where((lost > 0) == (total > 0), 1, -1)
    return np.where((lost != 0) & (bits & 1 == 0), bits + towards, bits).view(np.float64).astype(F)


class Seeds:
    """The unit's results that are so many float32 from the nearest, and which of them are within 1 ulp of 1 / x.

    The mantissa of all ones with a seed below 1 / x counts as none: CUDA's division rounds it as a Newton step does.
    """

    def __init__(self, places):
        self._places, self.possible = places, None

    def __call__(self, x):
        nearest, true = F(1) / x, 1 / x.astype(np.float64)
        seed = (nearest.view(np.uint32) + np.uint32(self._places & 0xFFFFFFFF)).view(F)
        ulp = np.exp2(np.floor(np.log2(true)) - 23)
        exception = (x.view(np.uint32) & 0x7FFFFF == 0x7FFFFF) & (seed < true)
        self.possible = (x == 0) | (np.abs(seed - true) <= ulp) & ~exception
        return seed


def wrong_results(case, places, fault=None):
    """x of which the result is not 1 / x, rounded once, for a seed that the unit may give."""
    seeds = Seeds(places)
    meanings = {simt.select: np.where, elementary.fma: exact_fma, elementary.reciprocal_seed: seeds}
    function, wrong = Tracer(meanings, fault).bind(case.function), []
    with np.errstate(all="ignore"):
        for x in case.numbers().reshape(-1, CHUNK):
            different = np.asarray(function(x), F) != np.minimum(F(1) / x, F(case.largest))
            wrong.append(x[different & seeds.possible])
    return np.concatenate(wrong)
