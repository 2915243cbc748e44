"""One direction of a scaling as code is compiled for it, and where its data and scales lie.

`Direction` is what kernels, loops and caches know of a scaling: everything about places follows from its `Layout`.
Seen along a direction the inner dimension is the one that blocks run along; data that are stored transposed have their
rows there, others their columns.
"""

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import numpy as np

from cuda_kernels import casts
from cuda_kernels.scale_rules import content_of, rules_of
from cuda_kernels.simt import I64, F, device, offset
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
