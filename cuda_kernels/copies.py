"""The copies of a quantized tensor that are made by blocks, as families of kernels see them.

Everything that an earlier kernel must compute, amaxes and what they become for all blocks, is there.
"""

from dataclasses import dataclass
from typing import Any

from cuda_kernels.directions import Direction
from cuda_kernels.operands import Blocks, Chosen, Front, Random, Stochastic, TwoLevel
from refops.scalings.declaration import Numbers


@dataclass(eq=False)
class Copy:
    """One copy, rowwise or columnwise.

    Attributes:
        direction: how it is cast and where it lies.
        data, scales: arrays to fill; scales are zero, for the padding.
        outer, inner: rows and columns of the matrix as the copy is stored, (K, M) of a transposed one.
        numbers: the scaling's `Numbers`.
        amax: float32 array: of the tensor (1,), or of each outer index; None where the scaling has none.
        tensor_scales: float32 array (1 or outer, numbers), what the declared rule makes of the amax for all blocks; or
            None.
        random: the `Random` of stochastic rounding, or None.
    """

    direction: Direction
    data: Any
    scales: Any
    outer: int
    inner: int
    numbers: Numbers
    amax: Any = None
    tensor_scales: Any = None
    random: Random | None = None

    def _fields(self):
        stride, numbers = self.direction.scale_stride(self.scales.shape), map(float, self.numbers)
        return self.data, self.scales, stride, *numbers, self.outer, self.inner

    def blocks(self):
        """The operand of kernels that cast it: of the kind that `stores.described_blocks` says."""
        if self.random is not None:
            return Stochastic(*self._fields(), self.tensor_scales, *self.random)
        if self.direction.rules().parts:
            return TwoLevel(*self._fields(), self.tensor_scales)
        return Blocks(*self._fields())

    def chosen(self):
        """The operand of kernels that choose scales."""
        return Chosen(*self._fields(), self.amax)


@dataclass(eq=False)
class BlockJob:
    """A quantization by blocks.

    Attributes:
        front: what is computed. Neither it nor a copy is empty.
        rounded: whether its values are rounded to `front.storage` before the cast. A stored tensor's are.
        rowwise, columnwise: `Copy` of each direction that is made, or None.
        hadamard: sign mask of the random Hadamard transform of columns, or None.
        dbias: array (K,) to fill with column sums, or None; of the rounded values if `dbias_rounded`.
    """

    front: Front
    rounded: bool
    rowwise: Copy | None
    columnwise: Copy | None
    hadamard: int | None = None
    dbias: Any = None
    dbias_rounded: bool = False

    @property
    def direction(self):
        """The `Direction` of a copy that is made."""
        return (self.rowwise or self.columnwise).direction


def shared_amax(fields):
    """Let both copies share one amax array, of `interface.Job.fields`, and return it."""
    names = [name for name in ("amax_rowwise", "amax_columnwise") if name in fields]
    for name in names[1:]:
        fields[name] = fields[names[0]]
    return fields[names[0]]
