"""The known ways in which kernels differ from TE: one small function each, a name, a sentence for the user.

`registry` says what makes a function a convention; the other modules hold them by subject. To add one, add a function
to the module of its subject. The list goes by module as below, then by place in the module; the earlier of two equally
good explanations is named first; `last` puts a convention behind all others.
"""

from refops.oracle.conventions import (
    amaxes,
    casts,
    derivatives,
    factors,
    formulas,
    hooks,
    integers,
    reading,
    reads,
    registry,
    scales,
    sums,
    updates,
)
from refops.oracle.conventions.registry import Convention

_ORDER = (
    *(reading, formulas, derivatives, amaxes, scales, casts),
    *(integers, hooks, sums, reads, updates, factors),
)
_MODULES = [module.__name__ for module in _ORDER]
#: Every convention by name.
CONVENTIONS = dict(
    sorted(registry.CONVENTIONS.items(), key=lambda item: (item[1].last, _MODULES.index(item[1].function.__module__)))
)


__all__ = ["CONVENTIONS", "Convention"]
