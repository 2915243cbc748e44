"""Results without scales: activations, their gradients, values as codes of a format, and codes as values.

    activation    f(x); of rows [act | gate], f(act) * h(gate), h the activation's gate function (identity for swiglu)
    gradient      f'(x) * dy; of rows [act | gate], (f'(act) * dy) * h(gate) and (h'(gate) * dy) * f(act)
    encode        a tensor's values to codes, without scale: one per byte, to nearest, ties to even, saturated
    decode        back: the float32 value of each code

A result of float32 arithmetic is rounded once, to the dtype that it is stored in. Where a scale will be made of the
tensor's amax, its largest magnitude before this rounding, the same kernel records it. Arguments and errors are those of
`refops.activation`, `activation_grad`, `encode` and `decode`.
"""

# --- 1. what it computes: above ---------------------------------------------------------------------

from dataclasses import dataclass, replace

import numpy as np

from cuda_kernels import casts
from cuda_kernels.formulas import functions_of
from cuda_kernels.launch import row_shape
from cuda_kernels.operands import Cost, Kind, Recorded, Spec, Stored, Values, as_it_is, described
from cuda_kernels.reads import described_source, make_read, make_read_halves, make_read_sixteen
from cuda_kernels.simt import I32, F, device, kernel, offset, thread_number
from cuda_kernels.stores import make_put, record_largest
from cuda_kernels.vectors import (
    VECTOR,
    amax,
    amax_with,
    make_load_sixteen_codes,
    make_store_sixteen,
    make_store_sixteen_codes,
    place,
)

ZERO = F(0)
widen = casts.widen_bf16

# --- 2. naive ---------------------------------------------------------------------------------------


def make_gated(name):
    """Return the kernel x (M, 2 columns) = [act | gate] -> y (M, columns): one thread one element of y.

    The last argument of `value` holds the activation's parameters; those that this kernel is made of have none.
    """
    value = functions_of(name).value

    @kernel
    def gated_naive(x, y, rows, columns):
        i = thread_number()
        row, column = i // columns, i % columns
        if row < rows:
            act = widen(x[offset(row, 2 * columns, column)])
            gate = widen(x[offset(row, 2 * columns, column + columns)])
            y[offset(row, columns, column)] = casts.narrow_bf16(value(act, ZERO) * gate)

    return gated_naive


# --- 3. coalesced -----------------------------------------------------------------------------------

# The naive kernel is coalesced already: the threads of a warp touch neighbouring addresses. Each access is two bytes.

# --- 4. fused ---------------------------------------------------------------------------------------

# A thread owns eight neighbours of a row of the result; of a 16-bit dtype they are one store of 16 bytes. In a block,
# threadIdx.x goes along the row, threadIdx.y down the rows. Four functions:
#
#   place(8, rows, columns)              (row, column, left) of the first
#   read(source, row, column, left)      their values, in registers
#   record(largest, out, left)           raises the tensor's amax to the largest of a warp's threads, if it is recorded
#   put(v, out, row, column, left)       rounds and stores them
#
# left: the number of elements from here to the end of the row. It may exceed the elements of the thread; outside the
# matrix it is 0 or negative: a read gives zeros there and nothing is stored, but the thread goes on, for its warp
# shuffles in `record`.


@device
def record_nothing(largest, out, left):
    """The `record` of a kernel that records no amax."""


@dataclass(frozen=True)
class Elementwise(Spec):
    """Values stored in a dtype.

    Attributes:
        values: what is computed.
        storage: the dtype.
        records_amax: whether the tensor's amax, of unrounded values, is recorded.
        whole: rows are a multiple of 8 elements (what a thread owns) and every array is aligned to 16 bytes: a thread
            has all of its elements or none, in wide accesses. Else each element is an access of its own.
    """

    values: Values
    storage: str
    records_amax: bool
    whole: bool

    title = "elementwise"

    def __str__(self):
        return f"{self.title}: {self.values} -> {self.storage}" + " + amax" * self.records_amax

    def operands(self):
        # A carrier is the NumPy dtype that a kernel reads and stores a dtype as: uint16 for bfloat16.
        out = described(Recorded if self.records_amax else Stored, data=casts.carrier(self.storage))
        return described_source(self.values), out

    def must_read(self, field):
        return self.values.must_read(field)

    def grid(self, outer, inner):
        # So many lanes lie in one row. For an amax a warp does: its first lane, which records, is in the matrix if any
        # of its lanes is.
        return row_shape(outer, inner, lanes=32 if self.records_amax else 1)

    @property
    def record(self):
        """The function `record` of the kernel."""
        return record_largest if self.records_amax else record_nothing

    def build(self, target):
        read, put = make_read(self.values, self.whole, target), make_put(self.storage, self.whole, target)
        record = self.record

        @kernel
        def elementwise(source, out):
            row, column, left = place(VECTOR, out.outer, out.inner)
            v = read(source, row, column, left)
            record(amax(v), out, left)
            put(v, out, row, column, left)

        return elementwise


@dataclass(frozen=True)
class ElementwiseGradient(Elementwise):
    """A gated gradient: a thread owns eight of each half of a row, from one read of dy, act and gate.

    Attributes are those of `Elementwise`.
    """

    title = "elementwise gradient"

    def grid(self, outer, inner):
        return super().grid(outer, inner // 2)

    def build(self, target):
        read, put = make_read_halves(self.values, self.whole, target), make_put(self.storage, self.whole, target)
        record = self.record

        @kernel
        def elementwise_gradient(source, out):
            row, column, left = place(VECTOR, out.outer, source.width)
            act, gate = read(source, row, column, left)
            record(amax_with(amax(act), gate), out, left)
            put(act, out, row, column, left)
            put(gate, out, row, I32(source.width + column), left)

        return elementwise_gradient


@dataclass(frozen=True)
class Encode(Spec):
    """Codes of a tensor's values: a thread owns sixteen neighbours, whose codes are one store of 16 bytes.

    Attributes:
        storage: dtype of the values.
        fmt: name of the element format.
        whole: as above, of 16 elements.
    """

    storage: str
    fmt: str
    whole: bool

    title = "encode"

    def __str__(self):
        return f"{self.title}: {self.storage} -> {self.fmt}"

    def operands(self):
        return described_source(as_it_is(self.storage)), described(Stored, data=np.uint8)

    def grid(self, outer, inner):
        return row_shape(outer, inner, lanes=1, owned=16)

    def build(self, target):
        read = make_read_sixteen(as_it_is(self.storage), self.whole, target)
        store_codes = make_store_sixteen_codes(self.fmt, False, self.whole, target)

        @kernel
        def encode(source, out):
            row, column, left = place(16, out.outer, out.inner)
            store_codes(read(source, row, column, left), out.data, (row, out.inner, column), left)

        return encode


@dataclass(frozen=True)
class Decode(Spec):
    """Values of codes, one per byte, in float32: a thread owns sixteen neighbours, whose codes are one 16-byte load.

    Attributes:
        fmt: name of the element format.
        whole: as above, of 16 elements.
    """

    fmt: str
    whole: bool

    title = "decode"

    def __str__(self):
        return f"{self.title}: {self.fmt} -> float32"

    def operands(self):
        return described(Stored, data=np.uint8), described(Stored, data=np.float32)

    def grid(self, outer, inner):
        return row_shape(outer, inner, lanes=1, owned=16)

    def build(self, target):
        load_codes = make_load_sixteen_codes(self.fmt, False, self.whole, target)
        store_values = make_store_sixteen("float32", self.whole, target)

        @kernel
        def decode(codes, out):
            row, column, left = place(16, out.outer, out.inner)
            if left > 0:  # these two are for threads in the matrix alone
                at = offset(row, out.inner, column)
                store_values(load_codes(codes.data, at, left), out.data, at, left)

        return decode


# --- 5. their launch --------------------------------------------------------------------------------

# `gpu` is the backend (`gpu.GPU`): `gpu.launch(spec, (rows, columns), *operands)` starts a kernel, and
# `gpu.whole(front, n, *stored)` is `whole` of what is read and stored, n elements a thread. A front (`operands.Front`)
# is what is computed before anything is stored: a tensor as it is, an activation or a gradient.


def store(gpu, front, out, storage, amax=None):
    """Fill `out`, an array of a dtype, with the values of a front, and `amax` with the largest unrounded magnitude.

    `amax` is an array of one float32, zero at the start, or None.
    """
    if not out.size:
        return
    values, whole = front.values(), gpu.whole(front, VECTOR, out)
    of_halves = values.kind is Kind.BACKWARD and values.gated
    spec = (ElementwiseGradient if of_halves else Elementwise)(values, storage, amax is not None, whole)
    rows, columns = front.matrix_shape
    stored = Stored(out, rows, columns) if amax is None else Recorded(out, amax, rows, columns)
    gpu.launch(spec, (rows, columns), front.source(), stored)


def encode(gpu, front, out, fmt):
    """Fill `out`, an array of bytes, with the codes of a front that is a tensor as it is."""
    if out.size:
        spec = Encode(front.storage, fmt.name, gpu.whole(front, 16, out))
        gpu.launch(spec, front.matrix_shape, front.source(), Stored(out, *front.matrix_shape))


def decode(gpu, codes, out, fmt):
    """Fill `out`, an array of float32, with the values of an array of codes. There is no front."""
    if out.size:
        columns = out.shape[-1] if out.shape else 1
        rows, whole = out.size // columns, columns % 16 == 0 and codes.aligned and out.aligned
        gpu.launch(Decode(fmt.name, whole), (rows, columns), Stored(codes, rows, columns), Stored(out, rows, columns))


# --- 6. their cost ----------------------------------------------------------------------------------


def costs():
    """The `operands.Cost` of each kernel.

    Bytes are those that a thread with all of its elements reads and writes; budgets are instructions for each of
    them, compiled for (H100, B200), `fast_budget` under fast_math; then 16-byte loads and stores.
    """
    bf16 = "bfloat16"
    gelu, swiglu = (Values(Kind.FORWARD, name, bf16) for name in ("gelu", "swiglu"))
    scaled, dswiglu = replace(swiglu, row_scaled=True), replace(swiglu, kind=Kind.BACKWARD)
    scale = 4 / 8  # 4 bytes of each row, counted as if eight threads shared them
    for name, spec, read, budget, fast_budget in (
        ("gelu bf16 -> bf16", Elementwise(gelu, bf16, False, True), 2, (6.65, 6.65), (3.35, 2.7)),
        ("gelu bf16 -> bf16 + amax", Elementwise(gelu, bf16, True, True), 2, (7.6, 7.5), (4.3, 3.55)),
        ("swiglu bf16 -> bf16", Elementwise(swiglu, bf16, False, True), 2 + 2, (4.55, 4.55), (2.85, 2.45)),
        ("swiglu bf16 -> bf16 + amax", Elementwise(swiglu, bf16, True, True), 2 + 2, (5.2, 5.15), (3.5, 3)),
        ("scaled swiglu bf16 -> bf16", Elementwise(scaled, bf16, False, True), 2 + 2, (4.75, 4.7), (3.1, 2.6)),
    ):
        size = 8 * (read + 2) + scale * spec.values.row_scaled
        wide = {"wide_loads": read // 2, "wide_stores": 1}
        yield Cost(name, spec, size, budget=budget, fast_budget=fast_budget, **wide)
    spec, size = ElementwiseGradient(dswiglu, bf16, False, True), 8 * (2 + 2 + 2 + 2 + 2)
    budgets = {"budget": (3.65, 3.65), "fast_budget": (2.5, 2.05)}
    yield Cost("dswiglu bf16 -> bf16", spec, size, wide_loads=3, wide_stores=2, **budgets)
    spec, size = Encode(bf16, "e4m3", True), 16 * (2 + 1)
    yield Cost("bf16 -> codes of E4M3", spec, size, budget=(1.35, 1.35), wide_loads=2, wide_stores=1)
    spec, size = Decode("e4m3", True), 16 * (1 + 4)
    yield Cost("codes of E4M3 -> float32", spec, size, budget=(1.15, 1.15), wide_loads=1, wide_stores=4)
