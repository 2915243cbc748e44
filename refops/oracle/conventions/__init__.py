"""The known ways in which kernels differ from TE: for each a small function, a name and a sentence for the user.

`registry` says what makes a function a convention; the other modules hold them by subject. To add one, add a function
to the module of its subject. The list goes by module as below, then by place in the module; the earlier of two equally
good explanations is named first; `last` puts a convention behind all others.
"""

from refops.oracle.conventions import (
    amaxes,
    butterflies,
    carried,
    casts,
    derivatives,
    factors,
    formulas,
    functions,
    hooks,
    integers,
    intermediates,
    operands,
    placements,
    reading,
    reads,
    registry,
    scales,
    sums,
    updates,
)
from refops.oracle.conventions.registry import Convention

_ORDER = (
    *(reading, formulas, derivatives, functions, operands, amaxes, scales, carried, placements, casts, intermediates),
    *(integers, hooks, butterflies, sums, reads, updates, factors),
)
_MODULES = [module.__name__ for module in _ORDER]
#: Every convention by name.
CONVENTIONS = dict(
    sorted(registry.CONVENTIONS.items(), key=lambda item: (item[1].last, _MODULES.index(item[1].function.__module__)))
)


__all__ = ["CONVENTIONS", "Convention"]
