"""What goes into a kernel and what it fills: the tuples of prologues and epilogues, and the front half of an operation.

The same field names serve GPU kernels (fields are pointers), the simulator (checked pointers) and CPU code (arrays).
"""

import math
from collections import namedtuple
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from refops.activations import DEFAULT_PARAMETERS
from refops.formats import E2M1, E2M3, E3M2, E4M3, E5M2, INT8

#: Names of the activations' parameters.
PARAMETERS = tuple(DEFAULT_PARAMETERS)
NO_PARAMETERS = (np.float32(0),) * len(PARAMETERS)
#: What a prologue reads. Field, meaning:
#:   x, dy             the input (M, width, or 2 * width for gated activations), the output's gradient (M, width)
#:   row_scales        float32 (M,), or unused
#:   limit ... beta2   the activations' parameters, float32: `PARAMETERS`
#:   rows, width       M, and the columns of the activation's output
#:   interleave        0, or g: rows are [act 0:g | gate 0:g | act g:2g | ...]
#: To dequantize, the same fields hold: x the codes, dy the scales as stored, row_scales the amax, rows and width the
#: matrix as it is stored, interleave the scales in a row.
INPUTS = ("x", "dy", "row_scales", *PARAMETERS, "rows", "width", "interleave")
Inputs: Any = namedtuple("Inputs", INPUTS)  # type: ignore[misc]

#: What an epilogue reads and fills, for one direction: rowwise copies have M as the outer dimension, transposed
#: columnwise ones K. Field, meaning:
#:   data              codes, or values of the output dtype
#:   scales            the scales as stored: codes of their format, or float32
#:   amax              float32 as int32 bits, the running maximum: (1,), or one for each outer index or square
#:   given             float32, computed before: the tensor's scale, what its blocks (or a row's) share, or amaxes
#:   random_bits       one byte an element, or unused
#:   seed, offset      Philox key and counter; of the CPU's Hadamard stages `seed` is the sign mask
#:   first_block       the number of the direction's first 16-element block; under given maxima of squares, their row
#:                     stride
#:   epsilon, largest_scale     float32, the scaling's `Numbers`; on a GPU, of a known scale that and its
#:                     reciprocal
#:   outer, inner      the matrix as this direction sees it
#:   scale_stride      stored scales in a row of `scales`
Outputs = namedtuple(
    "Outputs",
    "data scales amax given random_bits seed offset first_block epsilon largest_scale outer inner scale_stride",
)

#: Formats of elements that kernels cast to.
ELEMENT_FORMATS = (E4M3, E5M2, E2M1, E3M2, E2M3, INT8)


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

    @cached_property
    def matrix_shape(self):
        """(M, K) of the result."""
        *leading, k = self.tensor_shape
        return math.prod(leading), k
