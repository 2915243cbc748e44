"""What determines what a call does, and the plans kept under it: on a GPU (`plans`) and on the CPU (`host.calls`).

A call is described by its settings and by what its arrays are, never by the numbers in them.
"""

import math
from dataclasses import fields
from functools import cache

import numpy as np

from refops.formats import ElementFormat
from refops.scalings import Scaling

#: When so many keys are new or were used since the last time, those that were not are thrown away: where every step
#: of a training has other scales, what old steps left is dropped, and the other plans stay.
MOST_PLANS = 512
#: Types whose values are compared by what they are.
PLAIN = {str, bool, int, float, type(None), type}


def describe(values, key, arrays, kinds, quantized, arrays_of):
    """Add arguments to the key or to the arrays; False if one of them can be neither.

    Args:
        kinds: type of arrays -> what the key says of it.
        quantized: class of quantized tensors. arrays_of: function of one that returns name -> array.
    """
    for value in values:
        kind = type(value)
        if kind in kinds:
            arrays.append(value)
            key.append(kinds[kind])
        elif kind in PLAIN or issubclass(kind, ElementFormat):
            if kind is float and not value:
                key.append(math.copysign(1, value))  # zeros of both signs are equal
            key += kind, value
        elif issubclass(kind, Scaling):
            # What is random takes bits that are no part of a scaling's equality.
            random = None if kind.random is Scaling.random else value.random
            if random is not None and random.bits is not None:
                return False
            key += kind, value
        elif kind is quantized:
            named = arrays_of(value)
            if not kinds.keys() >= set(map(type, named.values())):
                return False
            key += named
            parts = (*named.values(), value.scaling)
            if not describe(parts, key, arrays, kinds, quantized, arrays_of):
                return False
            key += value.shape, value.dtype, value.with_gemm_swizzled_scales
        else:
            key.append(value)
            if not isinstance(value, np.dtype) and f"{kind.__module__}.{kind.__name__}" != "torch.dtype":
                return False
    return True


def which_are_one(arrays):
    """For each array, the number of the first array that is the same object."""
    first: dict[int, int] = {}
    return [first.setdefault(id(array), number) for number, array in enumerate(arrays)]


@cache
def _defaults_at_run_time(kind):
    """(name, default) of the fields of a class of scalings on which no compiled code depends."""
    return tuple((one.name, one.default) for one in fields(kind) if one.name in kind.at_run_time)


def _holds_numbers_of_a_step(scaling):
    """Whether a field that no compiled code depends on is not at its default."""
    return any(getattr(scaling, name) != default for name, default in _defaults_at_run_time(type(scaling)))


class Plans:
    """Plans by the keys of calls.

    Attributes:
        recent: those that are new or were used since `MOST_PLANS` were, last; None where a key came once (`wanted`).
        older: others, which go then.
    """

    def __init__(self):
        self.recent, self.older = {}, {}

    def get(self, key):
        """The plan of a key, or None."""
        try:
            plan = self.recent.get(key)
        except TypeError:  # something in the key that cannot be hashed
            return None
        if plan is None:
            plan = self.older.get(key)
            if plan is not None:
                self.keep(key, plan)
        return plan

    def wanted(self, key):
        """Whether a call that has no plan is to be recorded: at once, unless its settings hold numbers that may be
        others in every step of a training (a delayed scale, a seed); then from the second time on that it comes."""
        if not any(isinstance(one, Scaling) and _holds_numbers_of_a_step(one) for one in key):
            return True
        try:
            came = key in self.recent or key in self.older
        except TypeError:  # as in `get`
            return False
        if not came:
            self.keep(key, None)
        return came

    def keep(self, key, plan):
        """Keep a plan; one whose key cannot be hashed is not kept."""
        if len(self.recent) >= MOST_PLANS:
            self.recent, self.older = {}, self.recent
        try:
            self.recent[key] = plan
        except TypeError:
            return

    def forget(self):
        """Forget all plans."""
        self.recent.clear()
        self.older.clear()
