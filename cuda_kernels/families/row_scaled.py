"""Gradients of activations whose rows are multiplied by scales: y = scale of the row * f(x).

    dx             dy' * f'(x), dy' = dy * scale of the row; of rows [act | gate], where f(x) is f(act) * h(gate),
                   the act half dy' * (f'(act) * h(gate)), the gate half dy' * (f(act) * h'(gate)), multiplied in this
                   order, TransformerEngine's (TE's)
    drow_scales    the sum of dy * f(x) over the row, summed in float32, rounded to its dtype

h is the activation's gate function, the identity for swiglu. Values are rounded once, to the dtype that they are stored
in. The scaled activations themselves are computed in `elementwise`, since they have no sum over a row. Arguments,
results and errors are those of `refops.scaled_activation_grad`.
"""

# --- 1. what it computes: above ---------------------------------------------------------------------

from dataclasses import dataclass

from cuda_kernels import casts
from cuda_kernels.formulas import scale_gradient_of, scaled_gradients_of
from cuda_kernels.launch import row_shape
from cuda_kernels.operands import Cost, Kind, Spec, Stored, Values, described, pointer
from cuda_kernels.reads import described_source, make_columns, make_halves, make_zeros_outside, zeros_stay
from cuda_kernels.simt import I32, F, cuda, device, first_row, kernel, offset, thread_number
from cuda_kernels.vectors import VECTOR, make_load, make_map3, make_store, multiply, sum_of, warp_sum

#: Lanes of a warp.
LANES = 32
ZERO = F(0)
widen, narrow = casts.widen_bf16, casts.narrow_bf16
#: Functions of (act, gate, dy, parameters). The last argument holds the activation's parameters; swiglu has none.
d_swiglu_act, d_swiglu_gate = scaled_gradients_of("swiglu")
dy_times_swiglu = scale_gradient_of("swiglu")

# --- 2. naive ---------------------------------------------------------------------------------------


@kernel
def scaled_gradient_naive(dy, x, row_scales, dx, drow_scales, rows, columns):
    """dy (M, columns), x (M, 2 columns) = [act | gate], row_scales (M,) -> dx, drow_scales: one thread one row.

    Neighbouring threads read addresses that are whole rows apart, and there are only as many threads as rows.
    """
    row = thread_number()
    if row < rows:
        scale, total = row_scales[row], ZERO
        for column in range(columns):
            at = offset(row, 2 * columns, column)
            act, gate, dy_here = widen(x[at]), widen(x[at + columns]), widen(dy[offset(row, columns, column)])
            dx[at] = narrow(d_swiglu_act(act, gate, dy_here * scale, ZERO))
            dx[at + columns] = narrow(d_swiglu_gate(act, gate, dy_here * scale, ZERO))
            total = total + dy_times_swiglu(act, gate, dy_here, ZERO)
        drow_scales[row] = total


# --- 3. coalesced -----------------------------------------------------------------------------------


@kernel
def scaled_gradient_coalesced(dy, x, row_scales, dx, drow_scales, rows, columns):
    """As `scaled_gradient_naive`, but a warp one row: its lanes have neighbouring elements, and add their sums at last.

    All lanes of a warp are in the same row, so all take part in the shuffles of `warp_sum`.
    """
    row, lane = I32(first_row(cuda.blockDim.y) + cuda.threadIdx.y), cuda.threadIdx.x
    if row < rows:
        scale, total = row_scales[row], ZERO
        for column in range(lane, columns, LANES):
            at = offset(row, 2 * columns, column)
            act, gate, dy_here = widen(x[at]), widen(x[at + columns]), widen(dy[offset(row, columns, column)])
            dx[at] = narrow(d_swiglu_act(act, gate, dy_here * scale, ZERO))
            dx[at + columns] = narrow(d_swiglu_gate(act, gate, dy_here * scale, ZERO))
            total = total + dy_times_swiglu(act, gate, dy_here, ZERO)
        total = warp_sum(total)
        if lane == 0:
            drow_scales[row] = total


# --- 4. fused ---------------------------------------------------------------------------------------

# A warp owns a row and goes along it in steps of 256 columns, eight a lane; a block is 8 warps, so 8 rows. A lane holds
# its eight neighbours in registers, as vectors of float32. Five functions, in which `inputs` are the vectors
# (act, gates, dy), without gates (x, dy):
#
#   load_inputs(source, row, column, left)            the `inputs`; zeros from the `left`-th element on
#   gradients(inputs, scale, source)                  the vectors (act half, gate half) of dx, without gates one vector
#   store(vectors, source, out, row, column, left)    rounds them and stores each half where its values lie in x
#   dot(inputs, source, left)                         the sum of the eight dy * f(x)
#   store_sum(total, sums, row)                       adds the totals of the 32 lanes; lane 0 rounds and stores the sum
#
# left: the number of elements from here to the end of the row. It may exceed the elements of the thread; beyond the end
# it is 0 or negative: `load_inputs` gives zeros there and nothing is stored, but the thread goes on, for the warp
# shuffles in `store_sum`.


def make_load_inputs(values, whole):
    """Return `load_inputs` of the table above."""
    load, halves = make_load(values.storage, whole), make_halves(values.storage, whole, values.interleaved)

    @device
    def unary(source, row, column, left):
        return load(source.x, (row, source.width, column), left), load(source.dy, (row, source.width, column), left)

    @device
    def gated(source, row, column, left):
        act, gates = halves(source, row, column, left)
        return act, gates, load(source.dy, (row, source.width, column), left)

    return gated if values.gated else unary


def make_gradients(values):
    """Return `gradients` of the table above."""
    of_act, of_gate = scaled_gradients_of(values.activation, values.arithmetic)
    d_act, d_gates = make_map3(of_act), make_map3(of_gate)

    @device
    def unary(inputs, scale, p):
        x, dy = inputs
        return (d_act(x, x, multiply(dy, scale), p),)  # the second argument is a gate, which does not matter here

    @device
    def gated(inputs, scale, p):
        act, gates, dy = inputs
        scaled = multiply(dy, scale)
        return d_act(act, gates, scaled, p), d_gates(act, gates, scaled, p)

    return gated if values.gated else unary


def make_store_gradients(values, storage, whole, target):
    """Return `store` of the table above."""
    store, columns = make_store(storage, whole, target), make_columns(values.interleaved)

    @device
    def unary(vectors, source, out, row, column, left):
        store(vectors[0], out.data, offset(row, out.inner, column), left)

    @device
    def gated(vectors, source, out, row, column, left):
        act, gate = columns(source, column)
        store(vectors[0], out.data, offset(row, out.inner, act), left)
        store(vectors[1], out.data, offset(row, out.inner, gate), left)

    return gated if values.gated else unary


def make_dot(values, whole):
    """Return `dot` of the table above.

    What lies beyond the row's end adds nothing, even if the activation makes another number than 0 of zeros.
    """
    products = make_map3(scale_gradient_of(values.activation, values.arithmetic))
    zeros_outside = device(lambda v, left: v) if zeros_stay(values.activation) else make_zeros_outside(whole)

    @device
    def unary(inputs, p, left):
        x, dy = inputs
        return sum_of(zeros_outside(products(x, x, dy, p), left))

    @device
    def gated(inputs, p, left):
        act, gates, dy = inputs
        return sum_of(zeros_outside(products(act, gates, dy, p), left))

    return gated if values.gated else unary


def make_store_sum(storage):
    """Return `store_sum` of the table above; all lanes of a warp call it."""
    narrow = casts.STORAGES[storage].narrow

    @device
    def store_sum(total, sums, row):
        total = warp_sum(total)
        if cuda.threadIdx.x == 0:
            sums[row] = narrow(total)

    return store_sum


@dataclass(frozen=True)
class ScaledGradient(Spec):
    """Both gradients from one read.

    Attributes:
        values: what is computed. storage, scales_storage: dtypes of dx and drow_scales.
        whole: rows are a multiple of 8 elements (what a lane owns of a step) and every array is aligned to 16 bytes: a
            thread has all of its elements or none, in wide accesses. Else each element is an access of its own.
    """

    values: Values
    storage: str
    scales_storage: str
    whole: bool

    title = "scaled gradient"

    def __str__(self):
        return f"{self.title}: {self.values} -> {self.storage}"

    def operands(self):
        dx = described(Stored, data=casts.carrier(self.storage))
        return described_source(self.values), dx, pointer(casts.carrier(self.scales_storage))

    def grid(self, outer, inner):
        return row_shape(outer, LANES * VECTOR, LANES)  # one block across, however long rows are

    def must_read(self, field):
        return True

    def build(self, target):
        load_inputs, gradients = make_load_inputs(self.values, self.whole), make_gradients(self.values)
        store = make_store_gradients(self.values, self.storage, self.whole, target)
        dot, store_sum = make_dot(self.values, self.whole), make_store_sum(self.scales_storage)

        @kernel
        def scaled_gradient(source, out, drow_scales):
            row = I32(first_row(cuda.blockDim.y) + cuda.threadIdx.y)
            if row < out.outer:  # all lanes of a warp are in one row
                scale, total = source.row_scales[row], ZERO
                for start in range(0, source.width, LANES * VECTOR):
                    column = I32(start + cuda.threadIdx.x * VECTOR)
                    left = I32(source.width - column)
                    inputs = load_inputs(source, row, column, left)
                    store(gradients(inputs, scale, source), source, out, row, column, left)
                    total = total + dot(inputs, source, left)
                store_sum(total, drow_scales, row)

        return scaled_gradient


# --- 5. its launch ----------------------------------------------------------------------------------

# `gpu` is the backend (`gpu.GPU`): `gpu.launch(spec, (rows, columns), *operands)` starts a kernel, and
# `gpu.whole(front, n, *stored)` is `whole` of what is read and stored, n elements a thread.


def scaled_gradient(gpu, front, dx, drow_scales):
    """Fill `dx`, of the shape of x, and `drow_scales` (M,), arrays of any dtype of values, from an `operands.Front`."""
    rows, columns = front.matrix_shape[0], dx.shape[-1]
    if not rows:
        return
    values, whole = front.values(), gpu.whole(front, VECTOR, dx)
    spec = ScaledGradient(values, dx.dtype, drow_scales.dtype, whole)
    gpu.launch(spec, (rows, columns), front.source(), Stored(dx, rows, columns), (drow_scales,))


# --- 6. its cost ------------------------------------------------------------------------------------


def costs():
    """The `operands.Cost` of each kernel, in bfloat16.

    Bytes are those that a thread with all of its elements reads and writes in one step along the row; then
    16-byte loads and stores. There is no budget, for the steps are a loop, and instructions of a loop are counted once.
    """
    for name, read, stored in (("swiglu", 2 + 2 + 2, 2 + 2), ("srelu", 2 + 2, 2)):
        spec = ScaledGradient(Values(Kind.BACKWARD, name, "bfloat16", row_scaled=True), "bfloat16", "float32", True)
        yield Cost(f"scaled d{name} bf16", spec, 8 * (read + stored), wide_loads=read // 2, wide_stores=stored // 2)
