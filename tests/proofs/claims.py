"""What is proved: each claim asks whether two texts give the same for all inputs, and each has a fault that must show.

The first text is the project's own function, run on terms (`tracing`); the second is the definition (`definitions`) or
another of the project's functions. `query(seeded)` is the question, of a function in which one constant is wrong if
`seeded`. What the solver then finds is computed again by `reference`, the function that `refops` offers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from definitions import encoded
from solvers import Query
from terms import COMPILED, CONTRACTED, NUMPY, arithmetic, variable
from tracing import Tracer

import refops
from cuda_kernels import casts
from refops import formats
from refops.rounding import ROUNDING_MODES

#: Targets whose casts differ: none of the instructions, min.xorsign.abs, casts to FP8, all of them.
TARGETS = (None, (8, 0), (8, 6), (8, 9), (9, 0), (10, 0, "a"), (12, 0, "a"))


@dataclass(frozen=True)
class Claim:
    """One row of the table.

    Attributes:
        name: what is claimed. domain: for which inputs.
        queries: name of a part -> f(seeded) -> `Query`.
        reference: f(part, **inputs as NumPy scalars) -> what `refops` gives there, one for each thing compared.
        quick: whether `make test` asks it too.
    """

    name: str
    domain: str
    queries: dict[str, Callable[[bool], Query]]
    reference: Callable[..., list[Any]]
    quick: bool = False


def traced(function, *given, rule=COMPILED, fault=None, replaced=None, **named):
    """What a function gives of terms. `fault` is (name, f): constants of that name are f of them."""
    tracer = Tracer(replaced, fault)
    with arithmetic(rule), np.errstate(all="ignore"):
        found = tracer.run(function, *given, **named)
    assert fault is None or tracer.changed, f"no constant is named {fault[0]}"
    return found


def one_more(value):
    """A wrong constant: the next one."""
    return value + type(value)(1)


# --- casts ------------------------------------------------------------------------------------------


def with_wrong_constant(fmt):
    """A format in which one number of its row is wrong."""
    if isinstance(fmt, formats.IntegerFormat):
        return replace(fmt, fraction_bits=fmt.fraction_bits - 1)
    return replace(fmt, largest_code=fmt.largest_code - 1)


def encode_claim(name):
    """`refops.encode` in every rounding, saturating or not."""

    def asked(rounding, saturate):
        def query(seeded):
            x, fmt = variable("x", np.float32), refops.FORMATS[name]
            fmt = with_wrong_constant(fmt) if seeded else fmt
            got = traced(formats.encode_tile, x, fmt, saturate=saturate, rounding=rounding, rule=NUMPY)
            return Query({"x": x}, got, encoded(x, name, rounding, saturate))

        return query

    def reference(part, x):
        rounding, _, overflow = part.partition(", ")
        return [refops.encode(x, refops.FORMATS[name], rounding=rounding, saturate=not overflow)[()]]

    queries = {
        rounding + ("" if saturate else ", overflow not saturated"): asked(rounding, saturate)
        for rounding in ROUNDING_MODES
        for saturate in (True, False)
    }
    text = f"refops.encode, {name.upper()}: {len(ROUNDING_MODES)} roundings, saturating or not = definition"
    return Claim(text, "all float32 x", queries, reference)


def encoder_claim(name):
    """The kernels' encoder, as NumPy, the CPU's compiler and a GPU's compiler compute it."""

    def asked(rule):
        def query(seeded):
            x = variable("x", np.float32)
            fault = ("odd", one_more) if seeded else None
            return Query({"x": x}, traced(casts.ENCODERS[name], x, rule=rule, fault=fault), encoded(x, name))

        return query

    queries, text = {rule: asked(rule) for rule in (NUMPY, COMPILED, CONTRACTED)}, f"kernels' encoder, {name.upper()}"
    return Claim(f"{text} = definition", "all float32 x", queries, encoded_by(name), quick=True)


def encoded_by(name):
    """The reference of a cast."""
    return lambda part, x: [refops.encode(x, refops.FORMATS[name])[()]]


CLAIMS = [
    *map(encode_claim, refops.FORMATS),
    *map(encoder_claim, casts.ENCODERS),
]
