"""Gradients of activations whose rows are multiplied with scales: y = scale of the row * f(x).

    dx             dy * scale * f'(x); of gated activations both halves, in the order of TE's scaled kernels
    drow_scales    the row's sum of dy * f(x), in float32

Values are rounded once, to the dtype that they are stored in. Activations themselves are another family's: they have no
sums. Arguments, results and errors are those of `refops.scaled_activation_grad`.
"""

# --- 1. what it computes: above ---------------------------------------------------------------------

from dataclasses import dataclass

from cuda_kernels import casts
from cuda_kernels.formulas import scale_gradient_of, scaled_gradients_of
from cuda_kernels.launch import row_shape
from cuda_kernels.operands import Cost, Kind, Spec, Stored, Values, described, pointer
from cuda_kernels.reads import described_source, make_columns, make_halves
from cuda_kernels.simt import I32, F, cuda, device, first_row, kernel, offset, select, thread_number
from cuda_kernels.vectors import VECTOR, make_load, make_map3, make_store, multiply, sum_of, warp_sum

#: Lanes of a warp.
LANES = 32
ZERO = F(0)
widen, narrow = casts.widen_bf16, casts.narrow_bf16
d_swiglu_act, d_swiglu_gate = scaled_gradients_of("swiglu")
dy_times_swiglu = scale_gradient_of("swiglu")

# --- 2. naive ---------------------------------------------------------------------------------------


@kernel
def scaled_gradient_naive(dy, x, row_scales, dx, drow_scales, rows, columns):
    """dy (M, columns), x (M, 2 columns) = [act | gate], row_scales (M,) -> dx, drow_scales: one thread one row.

    Neighbouring threads read whole rows apart, and there are only as many threads as rows.
    """
    row = thread_number()
    if row < rows:
        scale, total = row_scales[row], ZERO
        for column in range(columns):
            at = offset(row, 2 * columns, column)
            act, gate, g = widen(x[at]), widen(x[at + columns]), widen(dy[offset(row, columns, column)])
            dx[at] = narrow(d_swiglu_act(act, gate, g * scale, ZERO))
            dx[at + columns] = narrow(d_swiglu_gate(act, gate, g * scale, ZERO))
            total = total + dy_times_swiglu(act, gate, g, ZERO)
        drow_scales[row] = total


# --- 3. coalesced -----------------------------------------------------------------------------------


@kernel
def scaled_gradient_coalesced(dy, x, row_scales, dx, drow_scales, rows, columns):
    """As `scaled_gradient_naive`: a warp one row, whose lanes have neighbouring elements and add their sums at the end.

    All lanes of a warp are in the same row, so all take part in the shuffles of `warp_sum`.
    """
    row, lane = I32(first_row(cuda.blockDim.y) + cuda.threadIdx.y), cuda.threadIdx.x
    if row < rows:
        scale, total = row_scales[row], ZERO
        for column in range(lane, columns, LANES):
            at = offset(row, 2 * columns, column)
            act, gate, g = widen(x[at]), widen(x[at + columns]), widen(dy[offset(row, columns, column)])
            dx[at] = narrow(d_swiglu_act(act, gate, g * scale, ZERO))
            dx[at + columns] = narrow(d_swiglu_gate(act, gate, g * scale, ZERO))
            total = total + dy_times_swiglu(act, gate, g, ZERO)
        total = warp_sum(total)
        if lane == 0:
            drow_scales[row] = total


# --- 4. fused ---------------------------------------------------------------------------------------

# A warp owns a row, and goes along it in steps of 256 columns: a thread has eight neighbours of each, in registers as
# vectors of float32. Five words; v is (activated values, gates, dy), without gates (activated values, dy):
#
#   read(source, row, column, left)                  v; zeros from the `left`-th on
#   gradients(v, scale, source)                      of the activated values (, of the gates)
#   store(vectors, source, out, row, column, left)   rounds and stores them where x has the values that they are of
#   dot(v, source)                                   the sum of the eight dy * f(x)
#   store_sum(total, sums, row, inside)              adds the lanes' totals; one lane stores the row's sum, rounded


def make_read(values, whole):
    """Return `read` of the table above."""
    load, halves = make_load(values.storage, whole), make_halves(values.storage, whole, values.interleaved)

    @device
    def unary(source, row, column, left):
        place = row, source.width, column
        return load(source.x, place, left), load(source.dy, place, left)

    @device
    def gated(source, row, column, left):
        act, gates = halves(source, row, column, left)
        return act, gates, load(source.dy, (row, source.width, column), left)

    return gated if values.gated else unary


def make_gradients(values):
    """Return `gradients` of the table above."""
    of_act, of_gate = scaled_gradients_of(values.activation, fast_math=values.fast_math)
    d_act, d_gates = make_map3(of_act), make_map3(of_gate)

    @device
    def unary(v, scale, p):
        return (d_act(v[0], v[0], multiply(v[1], scale), p),)

    @device
    def gated(v, scale, p):
        act, gates, dy = v[0], v[1], multiply(v[2], scale)
        return d_act(act, gates, dy, p), d_gates(act, gates, dy, p)

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


def make_dot(values):
    """Return `dot` of the table above."""
    products = make_map3(scale_gradient_of(values.activation, fast_math=values.fast_math))
    unary = device(lambda v, p: sum_of(products(v[0], v[0], v[1], p)))
    return device(lambda v, p: sum_of(products(v[0], v[1], v[2], p))) if values.gated else unary


def make_store_sum(storage):
    """Return `store_sum` of the table above, of rows that are `inside` the matrix; all lanes of a warp call it."""
    narrow = casts.STORAGES[storage].narrow

    @device
    def store_sum(total, sums, row, inside):
        total = warp_sum(total)
        if inside and cuda.threadIdx.x == 0:
            sums[row] = narrow(total)

    return store_sum


@dataclass(frozen=True)
class ScaledGradient(Spec):
    """Both gradients from one read.

    Attributes:
        values: what is computed. storage, scales_storage: dtypes of dx and drow_scales.
        whole: rows consist of whole 16-byte accesses at aligned addresses. Else every element is an access of its own.
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
        return row_shape(outer, LANES * VECTOR, LANES)

    def must_read(self, field):
        return True

    def build(self, target):
        read, gradients, dot = make_read(self.values, self.whole), make_gradients(self.values), make_dot(self.values)
        store = make_store_gradients(self.values, self.storage, self.whole, target)
        store_sum = make_store_sum(self.scales_storage)

        @kernel
        def scaled_gradient(source, out, drow_scales):
            row = I32(first_row(cuda.blockDim.y) + cuda.threadIdx.y)
            inside = row < out.outer
            scale, total = source.row_scales[row] if inside else ZERO, ZERO
            for start in range(0, source.width, LANES * VECTOR):
                column = I32(start + cuda.threadIdx.x * VECTOR)
                left = select(inside, I32(source.width - column), I32(0))
                v = read(source, row, column, left)
                store(gradients(v, scale, source), source, out, row, column, left)
                total = total + dot(v, source)
            store_sum(total, drow_scales, row, inside)

        return scaled_gradient


# --- 5. its launch ----------------------------------------------------------------------------------


def scaled_gradient(gpu, front, dx, drow_scales):
    """Fill `dx`, of the shape of x, and `drow_scales` (M,), arrays of any dtype of values, from a `Front`."""
    rows, columns = front.matrix_shape[0], dx.shape[-1]
    if not rows:
        return
    values, whole = front.values(gpu.fast_math), gpu.whole(front, VECTOR, dx)
    spec = ScaledGradient(values, dx.dtype, drow_scales.dtype, whole)
    gpu.launch(spec, (rows, columns), front.source(), Stored(dx, rows, columns), (drow_scales,))


# --- 6. its cost ------------------------------------------------------------------------------------


def costs():
    """The `operands.Cost` of each kernel, in bfloat16: bytes are those of one step along a row."""
    for name, loads, stores in (("swiglu", 3, 2), ("srelu", 2, 1)):
        spec = ScaledGradient(Values(Kind.BACKWARD, name, "bfloat16", row_scaled=True), "bfloat16", "float32", True)
        yield Cost(f"scaled d{name} bf16", spec, 16 * (loads + stores), None, loads, stores)
