"""The random Hadamard transform of rows, 16 neighbours at a time, and back: values in, values of the same dtype out.

    sum        output j of 16 is (sum over i of +-s(i) x(i)) / 4; the sign is - where i & j has an odd number of bits
    signs      s(i) is -1 where bit i of the sign mask is set
    inverse    the same sums of the outputs, and the signs last; applied to what it made of x it gives x again

Sums are of float32 and rounded once. Arguments, results and errors are those of `refops.hadamard_transform`. (The
transform of columns before a cast is a hook of `nvfp4`.)
"""

# --- 1. what it computes: above ---------------------------------------------------------------------

from dataclasses import dataclass

from cuda_kernels import casts
from cuda_kernels.hadamard import make_hadamard
from cuda_kernels.launch import row_shape
from cuda_kernels.operands import Cost, Spec, Stored, as_it_is, described
from cuda_kernels.reads import described_source, make_read
from cuda_kernels.simt import I32, F, kernel, offset, select, thread_number
from cuda_kernels.vectors import VECTOR, make_store, place

ZERO, QUARTER = F(0), F(0.25)

# --- 2. naive ---------------------------------------------------------------------------------------

SIGN_MASK = 0xD7E8


@kernel
def hadamard_naive(x, y, rows, columns):
    """x (M, columns) -> y (M, columns), with TE's signs: one thread one output, by the formula.

    Its 16 loads and 15 additions are those of the 15 threads beside it too: a butterfly needs four additions an output.
    """
    i = thread_number()
    row, column = i // columns, i % columns
    if row < rows:
        j, first, total = column % 16, offset(row, columns, column // 16 * 16), ZERO
        for k in range(16):
            odd = (j & k) ^ ((j & k) >> 2)
            minus = ((odd ^ (odd >> 1)) ^ (SIGN_MASK >> k)) & 1
            value = casts.widen_bf16(x[first + k])
            total = total + select(minus == 1, -value, value)
        y[first + j] = casts.narrow_bf16(total * QUARTER)


# --- 3. coalesced -----------------------------------------------------------------------------------

# The naive kernel is: the threads of a warp touch 64 neighbouring bytes, each of which 16 of them want.

# --- 4. fused ---------------------------------------------------------------------------------------

# A thread owns eight neighbours of a row, in registers; two threads hold a group of 16. Four words:
#
#   place(8)                          their (row, column)
#   read(source, row, column, left)   their values; `left` elements to the end of the row
#   transform(v, upper)               the outputs of the group that replace them: three of its four stages are within
#                                     a thread, the last one is a shuffle; `upper` holds elements 8 to 15
#   store(v, data, at, left)          rounds and stores them, from element `at` on


@dataclass(frozen=True)
class HadamardRows(Spec):
    """The transform of rows.

    Attributes:
        storage: dtype of the values.
        sign_mask: bit i set means sign i is -1. inverse: undo the transform.
        whole: rows consist of whole 16-byte accesses at aligned addresses. Else every element is an access of its own.
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
            row, column = place(VECTOR)
            left = select(row < out.outer, I32(out.inner - column), I32(0))
            v = transform(read(source, row, column, left), (column & 15) == 8)
            store(v, out.data, offset(row, out.inner, column), left)

        return hadamard_rows


# --- 5. its launch ----------------------------------------------------------------------------------


def transform(gpu, front, sign_mask, inverse, out):
    """Fill `out`, an array of the dtype of `front`, a tensor as it is that is not empty."""
    spec = HadamardRows(front.storage, sign_mask, inverse, gpu.whole(front, VECTOR, out))
    gpu.launch(spec, front.matrix_shape, front.source(), Stored(out, *front.matrix_shape))


# --- 6. its cost ------------------------------------------------------------------------------------


def costs():
    """The `operands.Cost` of the kernel: bytes are eight values of two bytes, read and written."""
    yield Cost("Hadamard of bf16", HadamardRows("bfloat16", SIGN_MASK, False, True), 32, None, 1, 1)
