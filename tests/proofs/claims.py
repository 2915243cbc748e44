"""What is proved: each claim asks whether two texts give the same for all inputs, and each has a fault that must show.

The first text is the project's own function, run on terms (`tracing`); the second is the definition (`definitions`) or
another of the project's functions. `query(seeded)` is the question, of a function in which one constant is wrong if
`seeded`. What the solver then finds is computed again by `reference`, the function that `refops` offers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from solvers import Query
from terms import COMPILED, arithmetic
from tracing import Tracer

from refops import formats


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


def traced(function, *given, rule=COMPILED, fault=None, replaced=None, uninterpreted=(), **named):
    """What a function gives of terms, in `terms.arithmetic`; `fault` and `replaced` are `Tracer`'s."""
    tracer = Tracer(replaced, fault)
    with arithmetic(rule, uninterpreted), np.errstate(all="ignore"):
        found = tracer.run(function, *given, **named)
    assert fault is None or tracer.changed, f"nothing has one of the constants {list(fault)}"
    return found


def one_more(value):
    """A wrong constant: the next one."""
    return value + type(value)(1)


def with_wrong_constant(fmt):
    """A format in which one number of its row is wrong."""
    if isinstance(fmt, formats.IntegerFormat):
        return replace(fmt, fraction_bits=fmt.fraction_bits - 1)
    return replace(fmt, largest_code=fmt.largest_code - 1)
