"""What is made of amaxes and scales alone: a few numbers, before a tensor is cast or after.

    shared scales    what all blocks of a tensor, or of one of its rows, share: the rule that the scaling declares
                     (`refops.scalings`) makes it of the amax
    delayed scale    scale' = min((fmt.max / 2^margin) / amax, FLT_MAX), of an amax of a history; then the history is
                     rolled by one step: new[i] = old[i + 1], new[last] = old[0] (the newest), new[0] = 0
    GEMM order       scales of a byte as tensor-core GEMMs read them: tiles of 128 rows x 4 blocks, 512 bytes; or back

Arguments, results and errors are those of `refops.update_delayed_scale` and `refops.swizzle`.
"""

# --- 1. what it computes: above ---------------------------------------------------------------------

from dataclasses import dataclass

import numpy as np

from cuda_kernels.directions import Direction, direction_of, scale_block_major, scale_row_major, scale_swizzled
from cuda_kernels.launch import row_shape, thread_shape
from cuda_kernels.operands import Cost, Spec, pointer, scalar
from cuda_kernels.simt import I64, F, device, kernel, select, thread_number
from cuda_kernels.vectors import place
from refops.scalings import NVFP4Scaling
from refops.scalings.declaration import FLT_MAX

ZERO = F(0)

# --- 2. naive ---------------------------------------------------------------------------------------


@kernel
def swizzle_naive(source, target, rows, columns, transposed, undo):
    """Move scales (rows, columns) into GEMM order, or (`undo`) back: one thread one scale.

    A row has the scales of an outer index, a column those of a block. Plain scales lie [outer, block], or, if
    `transposed`, [block, outer]; the GEMM order is the same for both. `rows` is a multiple of 128, `columns` one of 4.
    """
    outer, block, left = place(1, rows, columns)
    if left > 0:
        swizzled = scale_swizzled(columns, outer, block)
        plain = scale_block_major(rows, outer, block) if transposed else scale_row_major(columns, outer, block)
        if undo:
            target[plain] = source[swizzled]
        else:
            target[swizzled] = source[plain]


# --- 3. coalesced -----------------------------------------------------------------------------------

# The package runs the naive kernel. It moves one byte, where the cast before it moved a block of 40 bytes or more, so
# more code is not worth it. Neighbouring threads have neighbouring blocks of a row: in an array [outer, block] they
# touch neighbouring bytes, in GEMM order only four of them.

# --- 4. fused ---------------------------------------------------------------------------------------

# Nothing is fused: a thread makes one result, by itself. Two functions:
#
#   thread_number()       the number of this thread, from 0, and of its result
#   tensor_scale(amax)    the declared rule: one number, or a pair of them


@dataclass(frozen=True)
class TensorScales(Spec):
    """What all blocks share, from the amax of the tensor or of each of `count` rows: one thread for each amax.

    Attributes:
        direction: that of either copy.
    """

    direction: Direction

    title = "scales that blocks share"

    def operands(self):
        amax, scales, count = pointer(np.float32), pointer(np.float32), scalar(np.int32)
        return amax, scales, count

    def grid(self, outer, inner):
        return thread_shape(outer)

    def build(self, target):
        rules = self.direction.rules(target)
        tensor_scale = rules.tensor_scale

        @kernel
        def tensor_scales(amax, scales, count):
            i = thread_number()
            if i < count:
                scales[i] = tensor_scale(amax[i])

        @kernel
        def pairs_of_tensor_scales(amax, scales, count):
            i = thread_number()
            if i < count:
                scales[I64(i) * 2], scales[I64(i) * 2 + 1] = tensor_scale(amax[i])

        return {1: tensor_scales, 2: pairs_of_tensor_scales}[rules.parts]


#: Which amax of a column of the history a delayed scale is of: the largest, that of the last step, or one that the
#: caller computed.
LARGEST, NEWEST, GIVEN = range(3)


@device
def largest_of(history, column, length, columns):
    """The largest entry of a column, NaN ignored (NaN if there is nothing else)."""
    largest = history[column]
    for i in range(1, length):
        entry = history[i * columns + column]
        largest = entry if (entry > largest or largest != largest) else largest
    return largest


@dataclass(frozen=True)
class DelayedScale(Spec):
    """The next delayed scale of each column of a history (length, columns), and the next history: a thread for each.

    Row 0 has the newest amax. The scale is numerator / amax, at most FLT_MAX; it stays as it is where the amax is no
    finite number above 0. The history is rolled: new[i] = old[i + 1], new[last] = old[0], new[0] = 0. But with
    `keep_unused` a column whose newest amax is 0 stays as it is, and so does its scale, unless the amax is `GIVEN`.
    """

    title = "delayed scale"

    def operands(self):
        history, scale, given, new_history, new_scale = (pointer(np.float32),) * 5
        numerator, (length, columns, taken, keep_unused) = scalar(np.float32), (scalar(np.int32),) * 4
        arrays = history, scale, given, new_history, new_scale
        return *arrays, numerator, length, columns, taken, keep_unused

    def grid(self, outer, inner):
        return thread_shape(inner)

    def build(self, target):
        @kernel
        def delayed_scale(
            history, scale, given, new_history, new_scale, numerator, length, columns, taken, keep_unused
        ):
            column = thread_number()
            if column < columns:
                newest = history[column]
                if taken == LARGEST:
                    amax = largest_of(history, column, length, columns)
                else:
                    amax = newest if taken == NEWEST else given[column]
                unused = keep_unused != 0 and taken != GIVEN and newest == ZERO
                fresh = numerator / amax
                fresh = select(fresh > FLT_MAX, FLT_MAX, fresh)
                usable = amax > ZERO and amax <= FLT_MAX and not unused
                new_scale[column] = fresh if usable else scale[column]
                for i in range(length):
                    following = i + 1 if i + 1 < length else 0
                    source = i if unused else following
                    cleared = i == 0 and not unused
                    new_history[i * columns + column] = ZERO if cleared else history[source * columns + column]

        return delayed_scale


@dataclass(frozen=True)
class Swizzle(Spec):
    """Scales of a byte into the order that GEMMs read, or back; with the arguments of `swizzle_naive`."""

    title = "scales in GEMM order"

    def operands(self):
        source, target = (pointer(np.uint8),) * 2
        rows, columns, transposed, undo = (scalar(np.int32),) * 4
        return source, target, rows, columns, transposed, undo

    def grid(self, outer, inner):
        return row_shape(outer, inner, lanes=1, owned=1)

    def build(self, target):
        return swizzle_naive


# --- 5. their launch --------------------------------------------------------------------------------


def tensor_scales(gpu, scaling, amax):
    """Return what the blocks of a tensor, or of each of its rows, share: float32 (amaxes, numbers of the rule).

    `gpu` is the backend (`gpu.GPU`): `gpu.launch(spec, (rows, columns), *operands)` starts a kernel.
    """
    direction = direction_of(scaling, False)
    made = gpu.empty((amax.size, direction.rules().parts), "float32")
    gpu.launch(TensorScales(direction), made.shape, (amax, made, amax.size))
    return made


def next_delayed_scale(gpu, history, scale, given, numerator, taken, keep_unused):
    """Return (new history, new scale) of float32 arrays, (length, columns) and (columns,), or (length,) and one number.

    Args:
        given: amaxes (columns,), which only `GIVEN` reads.
        numerator: fmt.max / 2^margin.
        taken: `LARGEST`, `NEWEST` or `GIVEN`.
        keep_unused: whether a column whose newest amax is 0 stays as it is.
    """
    new_history, new_scale = gpu.empty(history.shape, "float32"), gpu.empty(scale.shape, "float32")
    length, columns = history.shape[0], scale.size
    arrays = history, scale, given, new_history, new_scale
    gpu.launch(DelayedScale(), (length, columns), (*arrays, numerator, length, columns, taken, int(keep_unused)))
    return new_history, new_scale


def swizzle(gpu, scales, undo, transposed):
    """Return scales in GEMM order, or back; plain ones are [outer, block], `transposed` ones [block, outer]."""
    rows, columns = scales.shape[::-1] if transposed else scales.shape
    moved = gpu.empty(scales.shape, scales.dtype)
    gpu.launch(Swizzle(), (rows, columns), (scales, moved, rows, columns, int(transposed), int(undo)))
    return moved


# --- 6. their cost ----------------------------------------------------------------------------------


def costs():
    """The `operands.Cost` of each kernel: bytes are those that one thread reads and writes.

    NVFP4's blocks share two numbers, made of an amax. The delayed scale is of a history of one step: one float32 of
    each of the kernel's five arrays. There are no budgets, for these kernels move few bytes.
    """
    shared = TensorScales(direction_of(NVFP4Scaling(), False))
    yield Cost("scales that blocks share", shared, 4 + 2 * 4)
    yield Cost("delayed scale", DelayedScale(), 5 * 4)
    yield Cost("scales in GEMM order", Swizzle(), 1 + 1)
