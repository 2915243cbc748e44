"""One direction of a scaling as code is compiled for it, and where its data and scales lie.

`Direction` is what kernels, loops and caches know of a scaling: everything about places follows from its `Layout`.
Seen along a direction the inner dimension is the one that blocks run along; data that are stored transposed have their
rows there, others their columns.
"""

from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache

import numpy as np

from cuda_kernels import casts
from cuda_kernels.scale_rules import content_of, rules_of
from cuda_kernels.simt import I32, I64, F, as_f32, device, load_two_words, offset, ptx
from refops.scalings import Scaling

ZERO = F(0)


@dataclass(frozen=True)
class Direction:
    """One direction of a scaling.

    Attributes:
        scaling: the settings that code is compiled for.
        columnwise, swizzled: which direction; scales in GEMM order.
        random: where the bits of stochastic rounding come from: "philox", "given" or None.
        content: of the rules (`scale_rules.content_of`).
    """

    scaling: Scaling
    columnwise: bool
    swizzled: bool = False
    random: str | None = None
    content: str = ""

    @property
    def other(self):
        """The other direction of the same scaling."""
        return replace(self, columnwise=not self.columnwise)

    @property
    def name(self):
        """What tables and messages call the scaling."""
        return type(self.scaling).__name__.removesuffix("Scaling").lower()

    @property
    def fmt(self):
        """Name of the element format."""
        return self.scaling.fmt.name

    @cached_property
    def layout(self):
        """The scaling's `Layout`."""
        return self.scaling.layout

    @property
    def packed(self):
        """Whether two codes lie in a byte."""
        return self.layout.packed == 2

    @property
    def transposed(self):
        """Whether data are stored (K, M)."""
        return self.layout.data_transposed(self.columnwise)

    @property
    def along_columns(self):
        """Whether blocks run down the columns of data that are stored as rowwise ones are."""
        return self.columnwise and not self.transposed

    @property
    def block(self):
        """(outer, inner) elements of a block."""
        return self.layout.block

    @property
    def square(self):
        """Whether blocks are squares."""
        return self.block is not None and self.block[0] > 1

    @property
    def known(self):
        """Whether the tensor's scale is known before the tensor is seen."""
        return self.scaling.given is not None

    @property
    def by_outer(self):
        """Whether every outer index has an amax of its own."""
        return self.layout.amax == "rows"

    @property
    def powers_of_two(self):
        """Whether what elements are multiplied with is a power of two, whatever the tensor holds."""
        fmt = self.layout.scale_format
        return fmt is not None and fmt.mantissa_bits == 0 and not self.layout.two_level

    @property
    def scale_type(self):
        """NumPy scalar type of stored scales."""
        return self.layout.scale_dtype.type

    @property
    def register_type(self):
        """NumPy scalar type of scales that rules see: codes are uint32."""
        return np.float32 if self.layout.scale_format is None else np.uint32

    @property
    def scale_index(self):
        """index(stride, outer, block) of a stored scale."""
        if self.swizzled:
            return scale_swizzled
        return scale_block_major if self.layout.scales_inner_first[self.columnwise] else scale_row_major

    def scale_stride(self, shape):
        """The stride of `scale_index` in stored scales of a shape."""
        return shape[0] if self.swizzled and self.layout.scales_inner_first[self.columnwise] else shape[-1]

    def rules(self, target=None):
        """The `scale_rules.Rules` for a target."""
        return rules_of(self.scaling, target)

    def factor(self, target=None):
        """f(coded, outer, inner) -> what the value of an element's code is multiplied with; see `operands.Coded`."""
        return _factor(self, target)

    def scale_block(self, target=None):
        """f(block_amax, out, outer, inner, left) -> what elements of the block are multiplied with.

        What the rule stores of it is stored by the thread that owns the block's first element. Arguments are those of
        `block_scale` and `put_scale`.
        """
        return _scale_block(self, target)

    def block_scale(self, target=None):
        """f(block_amax, out, outer, left) -> (what is stored for a block, what its elements are multiplied with).

        `out` is an `operands.Blocks` or `TwoLevel`; `left` is positive where `outer` is a row of the matrix.
        """
        return _block_scale(self, target)

    def put_scale(self):
        """f(stored, out, outer, inner, left): store a scale where (outer, inner) begins a block, if `left` > 0."""
        return _put_scale(self)

    def put_scales_of_columns(self):
        """f(stored, out, row, column, left): the scale of a square of data that lie along the rows, by a thread that
        owns eight neighbours of a row; it is stored for each column, if the layout repeats it, else once."""
        return _put_scales_of_columns(self)

    def candidates(self, target=None):
        """f(block_amax, amax, out) -> ((stored, multiplier), (stored, multiplier)) that a block can be cast with.

        `amax` is that of the tensor, or of the row, that the block lies in.
        """
        return _candidates(self, target)

    def error(self, target=None):
        """f(x, candidate, amax) -> the error of an element under a candidate, to be added in the order of `Choice`."""
        return _error(self, target)

    def value_of_scale(self, target=None):
        """f(stored) -> the value of a stored scale."""
        fmt = self.layout.scale_format
        return device(lambda stored: stored) if fmt is None else casts.one_for(fmt, target)[1]


def direction_of(scaling, columnwise, swizzled=False):
    """Return the `Direction` of settings."""
    random = scaling.random
    return _direction(scaling, columnwise, swizzled, random and ("philox" if random.bits is None else "given"))


@lru_cache(maxsize=512)
def _direction(scaling, columnwise, swizzled, random):
    compiled = scaling.compiled_as
    return Direction(compiled, columnwise, swizzled, random, content_of(compiled))


# --- the factor of dequantization -------------------------------------------------------------------


@cache
def _factor(direction, target):
    """The declared rule `decode_factor` of the scale, and the amax if it needs one, of an element's block."""
    rule, widened, index = direction.rules(target).decode_factor, direction.register_type, direction.scale_index
    two_level, by_outer = direction.layout.two_level, direction.by_outer

    @device
    def of_tensor(coded, outer, inner):
        return rule(coded.scales[0], ZERO)

    if direction.block is None:
        return of_tensor
    rows, columns = direction.layout.run
    row_bits, column_bits = rows.bit_length() - 1, columns.bit_length() - 1

    @device
    def of_block(coded, outer, inner):
        amax = coded.amax[outer if by_outer else 0] if two_level else ZERO
        block_row = outer >> row_bits if row_bits else outer
        return rule(widened(coded.scales[index(coded.scale_stride, block_row, inner >> column_bits)]), amax)

    return of_block


# --- the scale of a block ---------------------------------------------------------------------------


@cache
def _scale_block(direction, target):
    block_scale, put_scale = direction.block_scale(target), direction.put_scale()

    @device
    def scale_block(block_amax, out, outer, inner, left):
        stored, multiplier = block_scale(block_amax, out, outer, left)
        put_scale(stored, out, outer, inner, left)
        return multiplier

    return scale_block


@cache
def _block_scale(direction, target):
    """The declared rule `block_scale`, under what it shares with the other blocks of a tensor or a row."""
    rules = direction.rules(target)
    rule, parts, by_outer = rules.block_scale, rules.parts, direction.by_outer

    @device
    def alone(block_amax, out, outer, left):
        return rule(block_amax, ZERO, out)

    @device
    def under_one(block_amax, out, outer, left):
        i = I64(outer) if by_outer and left > 0 else I64(0)
        return rule(block_amax, out.tensor_scales[i], out)

    @device
    def under_two(block_amax, out, outer, left):
        i = offset(outer, I32(2), I32(0)) if by_outer and left > 0 else I64(0)
        first, second = load_two_words(out.tensor_scales, i)
        return rule(block_amax, (as_f32(first), as_f32(second)), out)

    return {0: alone, 1: under_one, 2: under_two}[parts]


@cache
def _put_scale(direction):
    (rows, columns), index, kind = direction.layout.run, direction.scale_index, direction.scale_type
    row_bits, column_bits = rows.bit_length() - 1, columns.bit_length() - 1

    @device
    def put(stored, out, outer, inner, left):
        if left > 0 and (inner & (columns - 1)) == 0 and (outer & (rows - 1)) == 0:
            out.scales[index(out.scale_stride, outer >> row_bits, inner >> column_bits)] = kind(stored)

    @device
    def put_of_row(stored, out, outer, inner, left):
        if left > 0 and (inner & (columns - 1)) == 0:
            out.scales[index(out.scale_stride, outer, inner >> column_bits)] = kind(stored)

    return put if rows > 1 else put_of_row


@cache
def _put_scales_of_columns(direction):
    (repeated, _), (_, edge) = direction.layout.run, direction.block
    index, kind, bits = direction.scale_index, direction.scale_type, edge.bit_length() - 1

    @device
    def put_each(stored, out, row, column, left):
        if (row & (edge - 1)) == 0:
            for k in range(8):
                if k < left:
                    out.scales[index(out.scale_stride, column + k, row >> bits)] = kind(stored)

    @device
    def put_once(stored, out, row, column, left):
        if left > 0 and (row & (edge - 1)) == 0 and (column & (edge - 1)) == 0:
            out.scales[index(out.scale_stride, column >> bits, row >> bits)] = kind(stored)

    return put_each if repeated == 1 else put_once


# --- a choice of two scales -------------------------------------------------------------------------


@cache
def _candidates(direction, target):
    rules = direction.rules(target)
    tensor_scale, (first, second) = rules.tensor_scale, rules.choice.candidates

    @device
    def candidates(block_amax, amax, out):
        shared = tensor_scale(amax)
        return first(block_amax, shared, out), second(block_amax, shared, out)

    return candidates


@ptx("mov.b32 $0, $1;", "=f,f", F, F)
def settled(x):
    """x, whose product no addition is contracted with."""
    return x


@cache
def _error(direction, target):
    error_of, value_of = direction.rules(target).choice.error, direction.value_of_scale(target)
    encode, decode = casts.ENCODERS[direction.fmt], casts.DECODERS[direction.fmt]

    @device
    def error(x, candidate, amax):
        stored, multiplier = candidate
        return settled(error_of(decode(encode(x * multiplier)), value_of(stored), amax, x))

    return error


# --- where a scale is stored ------------------------------------------------------------------------


@device
def scale_row_major(stride, outer, block):
    """Index of the scale of a row's `block`: [outer, block]."""
    return offset(outer, stride, block)


@device
def scale_block_major(stride, outer, block):
    """Index of the scale in an array [block, outer]."""
    return offset(block, stride, outer)


@device
def scale_swizzled(stride, outer, block):
    """Index in the order that tensor-core GEMMs read: 512-byte tiles of 128 rows x 4 blocks."""
    tile = I64(outer >> 7) * (stride >> 2) + (block >> 2)
    return tile * 512 + ((outer & 31) << 4) + ((outer & 127) >> 5 << 2) + (block & 3)
