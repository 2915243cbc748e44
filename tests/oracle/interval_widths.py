"""How wide the oracle's intervals of an activation and of its gradient are."""

import numpy as np

import refops
from refops.activations import ACTIVATIONS
from refops.oracle import enclosure
from refops.oracle.interval import ulp_of
from refops.oracle.operation import Case

F = np.float32


def widths(name):
    """Median width at ulp=2, in float32 ulp, over normal inputs: of the value and of the gradient."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((1, 40000 * (1 + ACTIVATIONS[name].gated))).astype(F)
    dy = rng.standard_normal((1, 40000)).astype(F)
    found = []
    for op, inputs, reference in (
        (name, {"x": x}, refops.activation(name, x)),
        (f"d{name}", {"dy": dy, "x": x}, refops.activation_grad(name, dy, x)),
    ):
        case = Case(op, inputs)
        b = enclosure.bounds_of(case, 2, stored_float32=True).read(slice(0, 1), slice(0, case.result_shape[-1]))
        width = (b.hi.astype(np.float64) - b.lo) / ulp_of(reference.astype(np.float64))
        found.append(float(np.median(width)))
    return found
