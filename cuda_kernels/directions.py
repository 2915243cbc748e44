"""One direction of a scaling, as code is compiled for it, and where its data and scales lie.

`Direction` is what kernels, loops and caches know of a scaling: everything about places follows from its `Layout`.
Seen along a direction the inner dimension is the one that blocks run along; data that are stored transposed have their
rows there, others their columns.
"""

from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache

import numpy as np

from cuda_kernels import casts
from cuda_kernels.operands import Bits
from cuda_kernels.scale_rules import content_of, rules_of, settled
from cuda_kernels.simt import I32, I64, U64, F, as_f32, device, load_two_words, offset
from refops.scalings import Scaling

ZERO = F(0)


@dataclass(frozen=True)
class Direction:
    """One direction of a scaling.

    Attributes:
        scaling: the settings that code is compiled for.
        columnwise, swizzled: which direction; scales in GEMM order.
        random: the `operands.Bits` of stochastic rounding, or None.
        content: of the rules (`scale_rules.content_of`).
    """

    scaling: Scaling
    columnwise: bool
    swizzled: bool = False
    random: Bits | None = None
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
        """Whether the multiplier of elements is a power of two, whatever the tensor holds."""
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
        """f(coded, outer, inner) -> what the value of an element's code is multiplied by; see `operands.Coded`."""
        return _factor(self, target)

    def load_scale(self):
        """f(coded, outer, block) -> the stored scale of a run, by its numbers; see `Layout.run`."""
        return _load_scale(self)

    def amax(self):
        """f(out, outer) -> the amax that decoding, or a choice of scales, needs: of the tensor, or of an outer index.

        `out` is an `operands.Coded` or `Chosen`.
        """
        return _amax(self.by_outer)

    def scale_block(self, target=None):
        """f(block_amax, out, outer, inner, left) -> what elements of the block are multiplied by.

        What the rule stores of it is stored by the thread that owns the block's first element (of squares in columns of
        data that lie along the rows: as `put_scales_of_columns` says). Arguments are those of `block_scale` and
        `put_scale`.
        """
        return _scale_block(self, target)

    def block_scale(self, target=None):
        """f(block_amax, out, outer, left) -> (what is stored for a block, what its elements are multiplied by).

        `out` is an `operands.Blocks` or `TwoLevel`; `left` is positive where `outer` is a row of the matrix.
        """
        return _block_scale(self, target)

    def shared_scale(self):
        """f(out, outer, left) -> what the rule of a block shares with other blocks: 0, or what the declared rule
        `tensor_scale` gave, a number or a pair. Arguments are those of `block_scale`."""
        return _shared_scale(self)

    def put_scale(self):
        """f(stored, out, outer, inner, left): store a scale where (outer, inner) begins a block, if `left` > 0."""
        return _put_scale(self)

    def store_scale(self):
        """f(stored, out, outer, block): store the scale of a run, by its numbers; see `Layout.run`."""
        return _store_scale(self)

    def put_scales_of_columns(self):
        """f(stored, out, row, column, left): the scale of a square of data that lie along the rows, by a thread that
        owns eight neighbours of a row; it is stored for each column, if the layout repeats it, else once."""
        return _put_scales_of_columns(self)

    def candidates(self, target=None):
        """f(block_amax, amax, out) -> two candidates that a block can be cast with, (stored, multiplier, value).

        What is stored of a scale, what elements are multiplied by, the value of what is stored. `amax` is that of the
        tensor, or of the row, that the block lies in.
        """
        return _candidates(self, target)

    def error(self, target=None):
        """f(x, candidate, amax) -> the error of an element under a candidate, to be added in the order of `Choice`."""
        return _error(self, target)

    def error_of_value(self, decode, target=None):
        """f(x, multiplier, scale, amax) -> the same, if the value of the stored scale is known already.

        `decode` gives the value of an element's code.
        """
        return _error_of_value(self, decode, target)

    def value_of_scale(self, target=None):
        """f(stored) -> the value of a stored scale."""
        fmt = self.layout.scale_format
        return device(lambda stored: stored) if fmt is None else casts.one_for(fmt, target)[1]


def direction_of(scaling, columnwise, swizzled=False):
    """Return the `Direction` of settings."""
    random = scaling.random
    bits = random and (Bits.PHILOX if random.bits is None else Bits.GIVEN)
    return _direction(scaling, columnwise, swizzled, bits)


@lru_cache(maxsize=512)
def _direction(scaling, columnwise, swizzled, random):
    compiled = scaling.compiled_as
    return Direction(compiled, columnwise, swizzled, random, content_of(compiled))


# --- the factor of dequantization -------------------------------------------------------------------


@cache
def _factor(direction, target):
    """The declared rule `decode_factor` of the scale, and the amax if it needs one, of an element's block."""
    rule, widened, load_scale = direction.rules(target).decode_factor, direction.register_type, direction.load_scale()
    two_level, amax_of = direction.layout.two_level, direction.amax()

    @device
    def of_tensor(coded, outer, inner):
        return rule(coded.scales[0], ZERO)

    if direction.block is None:
        return of_tensor
    rows, columns = direction.layout.run
    row_bits, column_bits = rows.bit_length() - 1, columns.bit_length() - 1

    @device
    def of_block(coded, outer, inner):
        amax = amax_of(coded, outer) if two_level else ZERO
        block_row = outer >> row_bits if row_bits else outer
        return rule(widened(load_scale(coded, block_row, inner >> column_bits)), amax)

    return of_block


@cache
def _load_scale(direction):
    index = direction.scale_index

    @device
    def load_scale(coded, outer, block):
        return coded.scales[U64(index(coded.scale_stride, outer, block))]

    return load_scale


@cache
def _amax(by_outer):
    @device
    def amax(out, outer):
        return out.amax[U64(outer) if by_outer else U64(0)]

    return amax


# --- the scale of a block ---------------------------------------------------------------------------


@cache
def _scale_block(direction, target):
    of_columns = direction.square and direction.along_columns
    block_scale = direction.block_scale(target)
    put_scale = direction.put_scales_of_columns() if of_columns else direction.put_scale()

    @device
    def scale_block(block_amax, out, outer, inner, left):
        stored, multiplier = block_scale(block_amax, out, outer, left)
        put_scale(stored, out, outer, inner, left)
        return multiplier

    return scale_block


@cache
def _block_scale(direction, target):
    """The declared rule `block_scale`, under what it shares with the other blocks of a tensor or a row."""
    rule, shared_scale = direction.rules(target).block_scale, direction.shared_scale()

    @device
    def block_scale(block_amax, out, outer, left):
        return rule(block_amax, shared_scale(out, outer, left), out)

    return block_scale


@cache
def _shared_scale(direction):
    by_outer = direction.by_outer

    @device
    def nothing(out, outer, left):
        return ZERO

    @device
    def one(out, outer, left):
        return out.tensor_scales[U64(outer) if by_outer and left > 0 else U64(0)]

    @device
    def two(out, outer, left):
        i = offset(outer, I32(2), I32(0)) if by_outer and left > 0 else I64(0)
        first, second = load_two_words(out.tensor_scales, i)
        return as_f32(first), as_f32(second)

    return {0: nothing, 1: one, 2: two}[direction.rules().parts]


@cache
def _store_scale(direction):
    """Store a scale. The index is unsigned: a signed one could be counted from the end."""
    index, kind = direction.scale_index, direction.scale_type

    @device
    def store_scale(stored, out, outer, block):
        out.scales[U64(index(out.scale_stride, outer, block))] = kind(stored)

    return store_scale


@cache
def _put_scale(direction):
    (rows, columns), store_scale = direction.layout.run, direction.store_scale()
    row_bits, column_bits = rows.bit_length() - 1, columns.bit_length() - 1

    @device
    def put(stored, out, outer, inner, left):
        if left > 0 and (inner & (columns - 1)) == 0 and (outer & (rows - 1)) == 0:
            store_scale(stored, out, outer >> row_bits, inner >> column_bits)

    @device
    def put_of_row(stored, out, outer, inner, left):
        if left > 0 and (inner & (columns - 1)) == 0:
            store_scale(stored, out, outer, inner >> column_bits)

    return put if rows > 1 else put_of_row


@cache
def _put_scales_of_columns(direction):
    (repeated, _), (_, edge) = direction.layout.run, direction.block
    store_scale, bits = direction.store_scale(), edge.bit_length() - 1

    @device
    def put_each(stored, out, row, column, left):
        if (row & (edge - 1)) == 0:
            for k in range(8):
                if k < left:
                    store_scale(stored, out, column + k, row >> bits)

    @device
    def put_once(stored, out, row, column, left):
        if left > 0 and (row & (edge - 1)) == 0 and (column & (edge - 1)) == 0:
            store_scale(stored, out, column >> bits, row >> bits)

    return put_each if repeated == 1 else put_once


# --- a choice of two scales -------------------------------------------------------------------------


@cache
def _candidates(direction, target):
    rules = direction.rules(target)
    tensor_scale, (first, second) = rules.tensor_scale, rules.choice.candidates
    value_of = direction.value_of_scale(target)

    @device
    def candidates(block_amax, amax, out):
        shared = tensor_scale(amax)
        (a, b), (c, d) = first(block_amax, shared, out), second(block_amax, shared, out)
        return (a, b, value_of(a)), (c, d, value_of(c))

    return candidates


@cache
def _error(direction, target):
    error_of_value = direction.error_of_value(casts.DECODERS[direction.fmt], target)

    @device
    def error(x, candidate, amax):
        _, multiplier, value = candidate
        return error_of_value(x, multiplier, value, amax)

    return error


@cache
def _error_of_value(direction, decode, target):
    error, encode = direction.rules(target).choice.error, casts.ENCODERS[direction.fmt]

    @device
    def error_of_value(x, multiplier, scale, amax):
        return settled(error(decode(encode(x * multiplier)), scale, amax, x))

    return error_of_value


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
