"""What a kernel reads and fills: tuples of operands, the front half of an operation, and `Spec`, a kernel.

The same field names serve GPU kernels (fields are pointers), the simulator (checked pointers) and CPU code (arrays).
"""

import math
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache, cached_property
from typing import Any, ClassVar

import numpy as np

from refops.activations import ACTIVATIONS, DEFAULT_PARAMETERS
from refops.formats import E2M1, E2M3, E3M2, E4M3, E5M2, INT8

#: Names of the activations' parameters.
PARAMETERS = tuple(DEFAULT_PARAMETERS)
NO_PARAMETERS = (np.float32(0),) * len(PARAMETERS)

#: What a kernel computes from. Field, meaning:
#:   x, dy             the input (M, width, or 2 * width for gated activations), the output's gradient (M, width)
#:   row_scales        float32 (M,), or unused
#:   limit ... beta2   the activations' parameters, float32: `PARAMETERS`
#:   rows, width       M, and the columns of the activation's output
#:   interleave        0, or g: rows are [act 0:g | gate 0:g | act g:2g | ...]
INPUTS = ("x", "dy", "row_scales", *PARAMETERS, "rows", "width", "interleave")
Inputs: Any = namedtuple("Inputs", INPUTS)  # type: ignore[misc]

# What kernels fill. In all of them `outer` and `inner` are rows and columns of the matrix as the copy sees it: a
# transposed copy has K rows.

#: Values of a dtype, or codes as they are. Field, meaning:
#:   data              the values
Stored = namedtuple("Stored", "data outer inner")

#: `Stored` values with the largest magnitude that they had before they were rounded. Field, meaning:
#:   amax              float32 (1,) as int32 bits, zero at the start: it is recorded here
Recorded = namedtuple("Recorded", "data amax outer inner")

#: Codes under one scale that is known before the tensor is seen. Field, meaning:
#:   data              codes
#:   scale_inv         float32 (1,): gets `stored`
#:   amax              float32 (1,) as int32 bits, zero at the start: the largest magnitude is recorded here
#:   multiplier        float32, what elements are multiplied by
#:   stored            float32, what is stored of it
KnownScale = namedtuple("KnownScale", "data scale_inv amax multiplier stored outer inner")

#: Codes under one scale that an earlier kernel computed. Field, meaning:
#:   data              codes
#:   scale             float32 (1,): what elements are multiplied by
InMemory = namedtuple("InMemory", "data scale outer inner")

#: Codes with a scale for each block. Field, meaning:
#:   data              codes, one or two in a byte
#:   scales            the scales as stored: codes of their format, or float32
#:   scale_stride      stored scales in a row of `scales`
#:   epsilon, largest_scale     float32, the scaling's `Numbers`: `p` of the declared rules
Blocks = namedtuple("Blocks", "data scales scale_stride epsilon largest_scale outer inner")

#: `Blocks` whose scales stand under one of the tensor, or of each row. Field, meaning:
#:   tensor_scales     float32 (1 or outer, numbers): what the declared rule makes of an amax
TwoLevel = namedtuple("TwoLevel", "data scales scale_stride epsilon largest_scale outer inner tensor_scales")

#: `Blocks` with a choice of scales, whose errors are measured against the amax. Field, meaning:
#:   amax              float32 (1,), or one for each outer index
Chosen = namedtuple("Chosen", "data scales scale_stride epsilon largest_scale outer inner amax")

#: Where stochastic rounding takes its bits from. Field, meaning:
#:   bits              uint8 (outer, inner), one an element, or null: Philox
#:   seed, offset      Philox key and counter
#:   first_block       the number of the copy's first block of 16
Random = namedtuple("Random", "bits seed offset first_block")

#: `TwoLevel` whose codes are rounded stochastically: with the fields of `Random`; of one level `tensor_scales` is null.
Stochastic = namedtuple("Stochastic", TwoLevel._fields + Random._fields)  # type: ignore[misc]

#: Running maxima. Field, meaning:
#:   amax              float32 as int32 bits, zero at the start: (1,), one for each row, or [row block, column block];
#:                     on a CPU of each piece, as `host.stages.maxima` says
#:   stride            column blocks, or pieces, in a row of it
Maxima = namedtuple("Maxima", "amax stride outer inner")

#: What is decoded, one direction of a quantized tensor. Field, meaning:
#:   codes             codes of the element format, or two in a byte
#:   scales            the scales as stored: codes of their format, or float32
#:   scale_stride      stored scales in a row of `scales`
#:   amax              float32: of the tensor (1,), or of each outer index; null where decoding needs none
#:   outer, inner      rows and columns of the matrix as it is stored
Coded = namedtuple("Coded", "codes scales scale_stride amax outer inner")

#: A float32 matrix as it lies in memory, in whatever order. Field, meaning:
#:   data              memory, from the lowest address of an element on
#:   start             place of the element [0, 0]
#:   outer_stride, inner_stride     elements from one row, and one column, to the next
Strided = namedtuple("Strided", "data start outer_stride inner_stride outer inner")

#: What a unit of a tensor core does with products. Field, meaning:
#:   group             products that are added at once
#:   fraction_bits     bits that summands keep below the largest exponent
#:   zero_exponent     exponent of zeros
#:   kept_bits, smallest_exponent, nearest, infinity     accumulator: fraction bits, the exponent of subnormal numbers,
#:                     whether it rounds to nearest even, float32 from which on it is infinite
#:   a_smallest, b_smallest, scale_smallest     the exponent of the formats' subnormal numbers
#:   block             products of a scale
#:   promotion         products of a partial sum, 0 where there is one sum alone
#:   down, across      squares of 64 results in a tile
UnitNumbers = namedtuple(
    "UnitNumbers",
    "group fraction_bits zero_exponent kept_bits smallest_exponent nearest infinity a_smallest b_smallest"
    " scale_smallest block promotion down across",
)

#: Formats of elements that kernels cast to.
ELEMENT_FORMATS = (E4M3, E5M2, E2M1, E3M2, E2M3, INT8)


class Kind(str, Enum):
    """What the front half of an operation computes."""

    IDENTITY = "identity"
    FORWARD = "forward"
    BACKWARD = "backward"


#: What activations are computed in. accurate: TE's default build; fast: approximate exp and reciprocal, on a GPU;
#: exact: correctly rounded exp, tanh and division, the bits of `refops`.
ACCURATE, FAST, EXACT = ARITHMETICS = "accurate", "fast", "exact"


class Bits(str, Enum):
    """Where the bits of stochastic rounding come from: a generator, or the caller's array."""

    PHILOX = "philox"
    GIVEN = "given"


@dataclass(frozen=True)
class Values:
    """What code that reads values is compiled for.

    Attributes:
        kind: identity, an activation, or its gradient.
        activation: its name, None for identity.
        storage: dtype of what is read.
        row_scaled: every row is multiplied by a scale of its own.
        interleaved: rows of gated activations are [act 0:g | gate 0:g | act g:2g | ...].
        arithmetic: one of `ARITHMETICS`.
    """

    kind: Kind
    activation: str | None
    storage: str
    row_scaled: bool = False
    interleaved: bool = False
    arithmetic: str = ACCURATE

    @property
    def gated(self):
        """Whether rows are [act | gate]."""
        return self.activation is not None and ACTIVATIONS[self.activation].gated

    def must_read(self, field):
        """Whether a kernel that reads them is wrong if it never uses a pointer of that name."""
        return {"dy": self.kind is Kind.BACKWARD, "row_scales": self.row_scaled}.get(field, True)

    def __str__(self):
        text = self.storage if self.activation is None else f"{self.activation} {self.storage}"
        return f"d{text}" if self.kind is Kind.BACKWARD else text


def as_it_is(storage):
    """The `Values` of a tensor of a dtype."""
    return Values(Kind.IDENTITY, None, storage)


@dataclass(eq=False)
class Front:
    """The front half of an operation: what is computed before anything is cast or stored.

    Attributes:
        kind: "identity", "forward" (an activation) or "backward" (its gradient).
        name: the activation, None for identity.
        parameters: float32 of each of `PARAMETERS`.
        x, dy: the backend's contiguous arrays; dy None unless backward.
        row_scales: float32 (M,) array, or None.
        interleave: glu_interleave_size.
        gated: whether x has rows [act | gate].
        width: columns of the activation's output (H for gated ones).
        tensor_shape: shape of the result; `matrix_shape` is it with leading dimensions flattened.
        storage: name of the nominal dtype, "float32", "float16" or "bfloat16".
        arithmetic: one of `ARITHMETICS`, "accurate" for identity.
    """

    kind: str
    name: str | None
    parameters: tuple
    x: Any
    dy: Any
    row_scales: Any
    interleave: int
    gated: bool
    width: int
    tensor_shape: tuple
    storage: str
    arithmetic: str = ACCURATE

    @cached_property
    def matrix_shape(self):
        """(M, K) of the result."""
        *leading, k = self.tensor_shape
        return math.prod(leading), k

    def values(self):
        """The `Values` that code for it is compiled for."""
        scaled, interleaved = self.row_scales is not None, self.interleave > 0
        return Values(Kind(self.kind), self.name, self.storage, scaled, interleaved, self.arithmetic)

    def source(self):
        """The `Inputs` of a kernel: the backend's arrays, and numbers."""
        numbers = map(float, self.parameters)
        return Inputs(self.x, self.dy, self.row_scales, *numbers, self.matrix_shape[0], self.width, self.interleave)


# --- types of arguments -----------------------------------------------------------------------------


def pointer(dtype):
    """The description of a pointer argument."""
    return ("pointer", np.dtype(dtype).type)


def scalar(dtype):
    """The description of a number passed by value."""
    return ("scalar", np.dtype(dtype).type)


#: Tuple -> descriptions of the fields that are of one type in every kernel.
_SIZES = {"outer": scalar(np.int32), "inner": scalar(np.int32)}
_BLOCKS = {
    "data": pointer(np.uint8),
    "scale_stride": scalar(np.int32),
    "epsilon": scalar(np.float32),
    "largest_scale": scalar(np.float32),
    **_SIZES,
}
_TWO_LEVEL = {**_BLOCKS, "tensor_scales": pointer(np.float32)}
_RANDOM = {
    "bits": pointer(np.uint8),
    "seed": scalar(np.uint64),
    "offset": scalar(np.uint64),
    "first_block": scalar(np.int64),
}
FIXED: dict[Any, dict[str, tuple]] = {
    Inputs: {
        "row_scales": pointer(np.float32),
        **dict.fromkeys(PARAMETERS, scalar(np.float32)),
        **dict.fromkeys(("rows", "width", "interleave"), scalar(np.int32)),
    },
    Coded: {
        "codes": pointer(np.uint8),
        "scale_stride": scalar(np.int32),
        "amax": pointer(np.float32),
        **_SIZES,
    },
    Stored: _SIZES,
    Recorded: {"amax": pointer(np.int32), **_SIZES},
    KnownScale: {
        "data": pointer(np.uint8),
        "scale_inv": pointer(np.float32),
        "amax": pointer(np.int32),
        "multiplier": scalar(np.float32),
        "stored": scalar(np.float32),
        **_SIZES,
    },
    InMemory: {"data": pointer(np.uint8), "scale": pointer(np.float32), **_SIZES},
    Blocks: _BLOCKS,
    TwoLevel: _TWO_LEVEL,
    Chosen: {**_BLOCKS, "amax": pointer(np.float32)},
    Random: _RANDOM,
    Stochastic: {**_TWO_LEVEL, **_RANDOM},
    Maxima: {"amax": pointer(np.int32), "stride": scalar(np.int32), **_SIZES},
    Strided: {
        "data": pointer(np.float32),
        **dict.fromkeys(("start", "outer_stride", "inner_stride"), scalar(np.int64)),
        **_SIZES,
    },
    UnitNumbers: {**dict.fromkeys(UnitNumbers._fields, scalar(np.int32)), "infinity": scalar(np.float32)},
}


def described(kind, **pointers):
    """The description of a tuple as an argument, (tuple, field -> description).

    Args:
        kind: one of the tuples above. pointers: dtype of each field that is not in `FIXED`.
    """
    return kind, {name: FIXED[kind].get(name) or pointer(pointers[name]) for name in kind._fields}


# --- a kernel ---------------------------------------------------------------------------------------


class Spec:
    """A kernel: what it is built from, what it takes, on which grid it runs. Equal ones are one compiled kernel.

    Derived classes are frozen dataclasses, whose fields say everything that the code depends on. Launcher, plans, PTX
    on disk, catalogue and profile know the kernel by its `Spec`.

    Class attributes:
        title: what tables call the kernel.
    """

    title: ClassVar[str]

    def __init_subclass__(cls) -> None:
        # `dataclass` keeps a `__repr__` that is there. Its own would leave out the module, and with it the difference
        # between two families' classes of one name: PTX on disk is named by it.
        cls.__repr__ = Spec.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        values = ", ".join(f"{one.name}={getattr(self, one.name)!r}" for one in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__module__}.{type(self).__qualname__}({values})"

    def __str__(self) -> str:
        return self.title

    def build(self, target: tuple | None) -> Callable:
        """Make the Python function of the kernel for a compute capability, (major, minor[, "a"]), or None (simulator).

        Use `function`, which keeps it.
        """
        raise NotImplementedError

    def operands(self) -> tuple:
        """The descriptions of the kernel's arguments: of `described`, `pointer` or `scalar`."""
        raise NotImplementedError

    def grid(self, outer: int, inner: int) -> tuple:
        """Return (grid, block) for a matrix of so many rows and columns."""
        raise NotImplementedError

    def must_read(self, field: str) -> bool:
        """Whether the kernel is wrong if it never uses a pointer of that name; the default is of a tensor as it is."""
        return field not in ("dy", "row_scales")

    @property
    def contracted(self) -> bool:
        """Whether a compiler may make a multiply-add of a product and a sum: anywhere but in exact arithmetic."""
        values = getattr(self, "values", None)
        return values is None or values.arithmetic != EXACT

    def function(self, target: tuple | None) -> Callable:
        """The Python function of the kernel for a target: equal specs share it."""
        return _built(self, target)


@cache
def _built(spec, target):
    return spec.build(target)


#: What a kernel costs, by count. Field, meaning:
#:   name              of the entry in tables
#:   spec              the `Spec`
#:   bytes_per_thread  what a thread with all of its elements reads and writes in global memory
#:   budget            instructions for each of these bytes, compiled for (H100, B200), or None: no claim
#:   wide_loads, wide_stores     128-bit accesses, or None: no claim
#:   fast_budget       `budget` under fast_math, or None: the same
Cost = namedtuple(
    "Cost", "name spec bytes_per_thread budget wide_loads wide_stores fast_budget", defaults=(None, None, None, None)
)
