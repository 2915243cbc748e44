"""Results without scales: activations and their gradients, and codes of values as they are, and back.

    activation    f(x); of rows [act | gate], f(act) * gate(gate)
    gradient      f'(x) * dy; of rows [act | gate], (f'(act) * dy) * gate(gate) and (gate'(gate) * dy) * f(act)
    encode        the element format's code of each value, one a byte, to nearest, ties to even, saturated
    decode        the float32 value of each code

A result of float32 arithmetic is rounded once, to the dtype that it is stored in. The largest magnitude before that,
the amax of the tensor, is recorded on the way where a scale is made of it. Arguments and errors are those of
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
from cuda_kernels.simt import I32, F, device, kernel, offset, select, thread_number
from cuda_kernels.stores import make_put, record_amax
from cuda_kernels.vectors import (
    VECTOR,
    make_load_sixteen_codes,
    make_store_sixteen,
    make_store_sixteen_codes,
    place,
)

ZERO = F(0)
widen = casts.widen_bf16

# --- 2. naive ---------------------------------------------------------------------------------------


def make_gated(name):
    """Return the kernel x (M, 2 columns) = [act | gate] -> y (M, columns): one thread one element of y."""
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

# The naive kernel is: the threads of a warp touch neighbouring addresses. Each of its accesses is two bytes.

# --- 4. fused ---------------------------------------------------------------------------------------

# A thread owns eight neighbours of a row of the result; of a 16-bit dtype they are one store of 16 bytes. Three words:
#
#   place(8)                             their (row, column)
#   read(source, row, column, left)      their values, in registers; `left` elements to the end of the row
#   put(v, out, row, column, left)       rounds and stores them, and before that raises the amax, if it is recorded


def make_put_values(storage, records_amax, whole, target):
    """Return `put`: store values in a dtype, in a `Stored`, or a `Recorded`, whose amax is that of unrounded values."""
    put = make_put(storage, whole, target)

    @device
    def put_and_record(v, out, outer, inner, left):
        record_amax(v, out, left)
        put(v, out, outer, inner, left)

    return put_and_record if records_amax else put


@dataclass(frozen=True)
class Elementwise(Spec):
    """Values stored in a dtype.

    Attributes:
        values: what is computed.
        storage: the dtype.
        records_amax: whether the tensor's amax is recorded.
        whole: rows consist of whole 16-byte accesses at aligned addresses. Else every element is an access of its own.
    """

    values: Values
    storage: str
    records_amax: bool
    whole: bool

    title = "elementwise"

    def __str__(self):
        return f"{self.title}: {self.values} -> {self.storage}" + " + amax" * self.records_amax

    def operands(self):
        out = described(Recorded if self.records_amax else Stored, data=casts.carrier(self.storage))
        return described_source(self.values), out

    def must_read(self, field):
        return self.values.must_read(field)

    def grid(self, outer, inner):
        return row_shape(outer, inner, lanes=32 if self.records_amax else 1)

    def build(self, target):
        read = make_read(self.values, self.whole, target)
        put = make_put_values(self.storage, self.records_amax, self.whole, target)

        @kernel
        def elementwise(source, out):
            row, column = place(VECTOR)
            left = select(row < out.outer, I32(out.inner - column), I32(0))
            put(read(source, row, column, left), out, row, column, left)

        return elementwise


@dataclass(frozen=True)
class ElementwiseGradient(Elementwise):
    """A gated gradient: a thread owns eight of each half of a row, from one read of dy, act and gate.

    Fields are those of `Elementwise`.
    """

    title = "elementwise gradient"

    def grid(self, outer, inner):
        return super().grid(outer, inner // 2)

    def build(self, target):
        read = make_read_halves(self.values, self.whole, target)
        put = make_put_values(self.storage, self.records_amax, self.whole, target)

        @kernel
        def elementwise_gradient(source, out):
            row, column = place(VECTOR)
            left = select(row < out.outer, I32(source.width - column), I32(0))
            act, gate = read(source, row, column, left)
            put(act, out, row, column, left)
            put(gate, out, row, I32(source.width + column), left)

        return elementwise_gradient


@dataclass(frozen=True)
class Encode(Spec):
    """Codes of a tensor's values: a thread owns sixteen neighbours, which are one store.

    Attributes:
        storage: dtype of the values.
        fmt: name of the element format.
        whole: as above.
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
        store = make_store_sixteen_codes(self.fmt, False, self.whole, target)

        @kernel
        def encode(source, out):
            row, column = place(16)
            left = select(row < out.outer, I32(out.inner - column), I32(0))
            store(read(source, row, column, left), out.data, (row, out.inner, column), left)

        return encode


@dataclass(frozen=True)
class Decode(Spec):
    """Values of codes, one a byte, in float32: a thread owns sixteen neighbours, which are one load.

    Attributes:
        fmt: name of the element format.
        whole: as above.
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
        load = make_load_sixteen_codes(self.fmt, False, self.whole, target)
        store = make_store_sixteen("float32", self.whole, target)

        @kernel
        def decode(codes, out):
            row, column = place(16)
            if row < out.outer and column < out.inner:
                at, left = offset(row, out.inner, column), I32(out.inner - column)
                store(load(codes.data, at, left), out.data, at, left)

        return decode


# --- 5. their launch --------------------------------------------------------------------------------


def store(gpu, front, out, storage, amax=None):
    """Fill `out`, an array of a dtype, with the values of a front, and `amax` with the largest unrounded magnitude.

    `amax` is an array of one float32, zero at the start, or None.
    """
    if not out.size:
        return
    values, whole = front.values(gpu.fast_math), gpu.whole(front, VECTOR, out)
    of_halves = values.kind is Kind.BACKWARD and values.gated
    spec = (ElementwiseGradient if of_halves else Elementwise)(values, storage, amax is not None, whole)
    m, k = front.matrix_shape
    stored = Stored(out, m, k) if amax is None else Recorded(out, amax, m, k)
    gpu.launch(spec, (m, k), front.source(), stored)


def encode(gpu, front, out, fmt):
    """Fill `out`, an array of bytes, with the codes of a tensor as it is."""
    if out.size:
        spec = Encode(front.storage, fmt.name, gpu.whole(front, 16, out))
        gpu.launch(spec, front.matrix_shape, front.source(), Stored(out, *front.matrix_shape))


def decode(gpu, codes, out, fmt):
    """Fill `out`, an array of float32, with the values of an array of codes."""
    if out.size:
        k = out.shape[-1] if out.shape else 1
        m, whole = out.size // k, k % 16 == 0 and codes.aligned and out.aligned
        gpu.launch(Decode(fmt.name, whole), (m, k), Stored(codes, m, k), Stored(out, m, k))


# --- 6. their cost ----------------------------------------------------------------------------------


def costs():
    """The `operands.Cost` of each kernel: bytes are eight results and what they are computed from, or sixteen codes."""
    gelu, swiglu = (Values(Kind.FORWARD, name, "bfloat16") for name in ("gelu", "swiglu"))
    scaled = replace(swiglu, row_scaled=True)
    for name, values, records_amax, loads, budget, fast_budget in (
        ("gelu bf16 -> bf16", gelu, False, 1, (6.65, 6.65), (3.35, 2.7)),
        ("gelu bf16 -> bf16 + amax", gelu, True, 1, (7.6, 7.5), (4.3, 3.55)),
        ("swiglu bf16 -> bf16", swiglu, False, 2, (4.55, 4.55), (2.85, 2.45)),
        ("swiglu bf16 -> bf16 + amax", swiglu, True, 2, (5.2, 5.15), (3.5, 3)),
        ("scaled swiglu bf16 -> bf16", scaled, False, 2, (4.75, 4.7), (3.1, 2.6)),
    ):
        spec, size = Elementwise(values, "bfloat16", records_amax, True), 16 * loads + 16 + 0.5 * values.row_scaled
        yield Cost(name, spec, size, budget, loads, 1, fast_budget)
    spec = ElementwiseGradient(Values(Kind.BACKWARD, "swiglu", "bfloat16"), "bfloat16", False, True)
    yield Cost("dswiglu bf16 -> bf16", spec, 80, (3.65, 3.65), 3, 2, (2.5, 2.05))
    yield Cost("bf16 -> codes of E4M3", Encode("bfloat16", "e4m3", True), 48, (1.35, 1.35), 2, 1)
    yield Cost("codes of E4M3 -> float32", Decode("e4m3", True), 80, (1.15, 1.15), 1, 4)
