"""The random Hadamard transform of rows, 16 neighbours at a time, and back: values in, values of the same dtype out.

    sum        output j of 16 is (sum over k of +-s(k) x(k)) / 4, with - where j & k has an odd number of set bits
    signs      s(k) is -1 where bit k of the sign mask is set
    inverse    the same sums of the outputs without s, each times its s(j) at the end: gives x again, up to rounding

Sums are of float32 and rounded once, to the dtype. Arguments, results and errors are those of
`refops.hadamard_transform`. (`nvfp4` transforms columns in the kernel that casts them.)
"""

# --- 1. what it computes: above ---------------------------------------------------------------------

from dataclasses import dataclass

from cuda_kernels import casts
from cuda_kernels.hadamard import make_hadamard
from cuda_kernels.launch import row_shape
from cuda_kernels.operands import Cost, Spec, Stored, as_it_is, described
from cuda_kernels.reads import described_source, make_read
from cuda_kernels.simt import F, kernel, offset, select, thread_number
from cuda_kernels.vectors import VECTOR, make_store, place

ZERO, QUARTER = F(0), F(0.25)

# --- 2. naive ---------------------------------------------------------------------------------------

#: TE's signs.
SIGN_MASK = 0xD7E8


@kernel
def hadamard_naive(x, y, rows, columns):
    """x (M, columns) -> y (M, columns), bfloat16, with TE's signs: one thread one output, by the formula.

    The 16 threads of a group load the same 16 values and each adds 15 times; a butterfly needs four additions an
    output.
    """
    i = thread_number()
    row, column = i // columns, i % columns
    if row < rows:
        j, first, total = column % 16, offset(row, columns, column // 16 * 16), ZERO
        for k in range(16):
            odd = (j & k) ^ ((j & k) >> 2)  # of four bits, the lowest of odd ^ (odd >> 1) says if an odd number is set
            minus = ((odd ^ (odd >> 1)) ^ (SIGN_MASK >> k)) & 1
            value = casts.widen_bf16(x[first + k])
            total = total + select(minus == 1, -value, value)
        y[first + j] = casts.narrow_bf16(total * QUARTER)


# --- 3. coalesced -----------------------------------------------------------------------------------

# The naive kernel already is coalesced: the threads of a warp read and store 64 neighbouring bytes, two groups.

# --- 4. fused ---------------------------------------------------------------------------------------

# A thread owns eight neighbours of a row, in registers; two neighbouring threads hold a group of 16. Four functions:
#
#   place(8, rows, columns)           (row, column, left) of the first
#   read(source, row, column, left)   their values
#   transform(v, upper)               the outputs of the group that replace them: three of its four stages of additions
#                                     are within a thread, the last one adds across the two by a shuffle; `upper` says
#                                     that v are elements 8 to 15
#   store(v, data, i, left)           rounds and stores them, from element i of the array on
#
# left: the number of elements from here to the end of the row. It may exceed the elements of the thread; outside the
# matrix it is 0 or negative: a read gives zeros there and nothing is stored, but the thread goes on, for the shuffle in
# `transform`.


@dataclass(frozen=True)
class HadamardRows(Spec):
    """The transform of rows.

    Attributes:
        storage: dtype of the values.
        sign_mask: bit i set means sign i is -1. inverse: undo the transform.
        whole: rows are a multiple of 8 elements (what a thread owns) and every array is aligned to 16 bytes: a thread
            has all of its elements or none, in wide accesses. Else each element is an access of its own.
    """

    storage: str
    sign_mask: int
    inverse: bool
    whole: bool

    title = "Hadamard transform of rows"

    def __str__(self):
        return f"{self.title}: {self.storage}"

    def operands(self):
        return described_source(as_it_is(self.storage)), described(Stored, data=casts.carrier(self.storage))

    def grid(self, outer, inner):
        return row_shape(outer, inner, lanes=2)

    def build(self, target):
        read = make_read(as_it_is(self.storage), self.whole, target)
        transform = make_hadamard(self.sign_mask, self.inverse)
        store = make_store(self.storage, self.whole, target)

        @kernel
        def hadamard_rows(source, out):
            row, column, left = place(VECTOR, out.outer, out.inner)
            v = transform(read(source, row, column, left), (column & 15) == 8)
            store(v, out.data, offset(row, out.inner, column), left)

        return hadamard_rows


# --- 5. its launch ----------------------------------------------------------------------------------


def transform(gpu, front, sign_mask, inverse, out):
    """Fill `out`, an array of the dtype of `front`, a tensor as it is that is not empty; `gpu` is a `gpu.GPU`."""
    spec = HadamardRows(front.storage, sign_mask, inverse, gpu.whole(front, VECTOR, out))
    gpu.launch(spec, front.matrix_shape, front.source(), Stored(out, *front.matrix_shape))


# --- 6. its cost ------------------------------------------------------------------------------------


def costs():
    """The `operands.Cost` of the kernel: bytes are those of a thread that has all of its elements."""
    spec = HadamardRows("bfloat16", SIGN_MASK, False, True)
    yield Cost("Hadamard of bf16", spec, VECTOR * (2 + 2), wide_loads=1, wide_stores=1)
