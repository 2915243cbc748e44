"""Tables of functions of a 16-bit number: f(x) in float32 of all 65,536 bfloat16, or float16.

An accurate exp or tanh takes a core some forty instructions an element, an entry of a table a few. The bits are those
of the function, because the table is filled by that function; and of most tensors a few thousand entries are read,
which stay in the nearest cache.
"""

from enum import Enum
from functools import cache, lru_cache

import numpy as np

from cuda_kernels.formulas import functions_of
from cuda_kernels.host.arrays import DTYPES
from cuda_kernels.host.calls import Doing
from cuda_kernels.host.compile import compiled
from cuda_kernels.host.tiles import LOOP, append_words, make_array_at, reader, size
from cuda_kernels.operands import ACCURATE, Inputs
from refops.activations import ACTIVATIONS
from refops.activations.arithmetic import REFERENCE

F = np.float32
CODES = 1 << 16
#: Tables of 256 KiB that are kept, the ones that were used last.
MOST_TABLES = 64
#: Words of formulas that cost more than reading an entry.
COSTLY = {"exp", "tanh", "tanh_pair", "sigmoid", "sigmoid_pair", "quotient"}


class Part(Enum):
    """A function of an activation, a field of `formulas.Functions`."""

    VALUE = "value"
    DERIVATIVE = "derivative"
    GATE = "gate"
    GATE_SLOPE = "gate_slope"

    def declared(self, name):
        """The `refops.activations.Function` that it is of."""
        row = ACTIVATIONS[name]
        return row.act if self in (Part.VALUE, Part.DERIVATIVE) else row.gate


class _Noting:
    """The words of formulas, and a note of those that were asked for."""

    def __init__(self):
        self.asked = set()

    def __getattr__(self, word):
        self.asked.add(word)
        return getattr(REFERENCE, word)


@cache
def is_tabulated(name, part, storage):
    """Whether a part of an activation is read from a table where x is of a dtype."""
    if storage == "float32":
        return False
    words = _Noting()
    part.declared(name).body(words)
    return bool(words.asked & COSTLY)


@cache
def _tabulating(name, part, arithmetic):
    """Return the loop that computes a part of float32 `x` into an array whose words follow those of the `Inputs`."""
    function, read, array_at = (
        getattr(functions_of(name, arithmetic), part.value),
        reader(Inputs, x=F, dy=F),
        make_array_at(F),
    )
    at_out = size(Inputs)

    def loop(words, first, last):
        inputs, out = read(words, 0), array_at(words, at_out)
        for i in range(first, last):
            out[i] = function(inputs.x[i], inputs)

    return compiled(f"table-{in_arithmetic(name, part, arithmetic)}-{part.value.replace('_', '-')}", loop, LOOP)


def in_arithmetic(name, part, arithmetic):
    """What tells apart loops of a part of an activation: its name, and the arithmetic where it has exponentials."""
    return name if arithmetic == ACCURATE or not part.declared(name).elementary else f"{name}-{arithmetic}"


def table_of(name, part, storage, parameters, arithmetic=ACCURATE):
    """Return float32 (65536,): a part of an activation, of x with each 16-bit pattern.

    Args:
        parameters: float32 of each of `operands.PARAMETERS`.
    """
    return _table_of(name, part, storage, np.array(parameters, F).tobytes(), arithmetic)


@lru_cache(maxsize=MOST_TABLES)
def _table_of(name, part, storage, parameters, arithmetic):
    x, table = _all_numbers(storage), np.empty(CODES, F)
    words: list[int] = []
    arrays: list[tuple] = []
    inputs = Inputs(x, None, None, *np.frombuffer(parameters, F), 1, CODES, 0)
    append_words((*inputs, table), words, arrays)
    Doing().loop(_tabulating(name, part, arithmetic), words, arrays, CODES, True)
    table.flags.writeable = False
    return table


@cache
def _all_numbers(storage):
    """The float32 of each 16-bit pattern."""
    with np.errstate(all="ignore"):
        return np.arange(CODES, dtype=np.uint16).view(DTYPES[storage]).astype(F)
