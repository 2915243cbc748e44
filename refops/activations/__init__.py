"""Every activation of TE and its derivative: one file of this folder declares it, and everything else derives.

From a declaration come the NumPy reference and the float64 truth (`bound`), the functions of CPU and GPU
(`cuda_kernels.formulas`), the oracle's intervals and its other conventions, the fuser's operation, functional and JAX
names, the documents' tables and the parameters of the tests. To add an activation, add a file; `declaration` says what
it holds, `arithmetic` in which words.

A unary activation maps x to f(x). A gated one takes a row [act | gate] of width 2H to f(act) * g(gate) of width H.
What a formula does at NaN and infinity is part of TE's definition and is kept: gelu(-inf) is NaN, relu(NaN) is 0, a
large finite x gives dgelu(x) = NaN.
"""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from refops.activations.arithmetic import REFERENCE, TRUTH, Arithmetic
from refops.activations.bound import BoundActivation
from refops.activations.declaration import Activation, Function, Parameter, gated, unary
from refops.arguments import require_number, shown

__all__ = [
    "ACTIVATIONS",
    "DEFAULT_PARAMETERS",
    "REFERENCE",
    "ROW_SCALED",
    "TRUTH",
    "Activation",
    "Arithmetic",
    "BoundActivation",
    "Function",
    "Parameter",
    "bind_activation",
    "gated",
    "unary",
]


def _declared():
    """The rows of all files of this folder: those with a place in their order, then the others by name."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    rows = [row for module in modules for row in getattr(module, "ROWS", ())]
    return sorted(rows, key=lambda row: (row.order is None, row.order or 0, row.name))


def _by_name(rows):
    table = {row.name: row for row in rows}
    for attribute in ("name", "order", "number", "op", "jax"):
        given = [value for row in rows if (value := getattr(row, attribute)) is not None]
        if len(set(given)) < len(given):
            raise ValueError(f"two activations have the same {attribute}: {given}")
    return table


#: Every activation by TE's name.
ACTIVATIONS = _by_name(_declared())

#: Parameter name -> TE's default.
DEFAULT_PARAMETERS = {p.name: p.default for activation in ACTIVATIONS.values() for p in activation.declared}
#: Activations that have a kernel with a scale for each row (token probabilities in mixtures of experts).
ROW_SCALED = tuple(name for name, activation in ACTIVATIONS.items() if activation.row_scaled)


def bind_activation(name, params):
    """Return the `BoundActivation` for `name` with `params` over TE's defaults.

    Raises:
        ValueError: unknown name; a parameter that is NaN, or a beta that is not positive and finite.
        TypeError: a parameter that `name` does not take, or that is not a number.
    """
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"name must be one of {', '.join(ACTIVATIONS)}; got {shown(name)}")
    if not params:
        return _with_defaults(name)
    return _bound(ACTIVATIONS[name], params)


@cache
def _with_defaults(name):
    return _bound(ACTIVATIONS[name], {})


def _bound(activation, params):
    name = activation.name
    unknown = sorted(set(params) - set(activation.parameters))
    if unknown:
        takes = ", ".join(activation.parameters) or "none"
        raise TypeError(
            f"{name} takes no parameter {unknown[0]!r} (it takes: {takes}); got {shown(params[unknown[0]])}"
        )
    values = {
        p.name: require_number(params.get(p.name, p.default), p.name, positive=p.positive, finite=p.positive)
        for p in activation.declared
    }
    return BoundActivation(activation, values)
