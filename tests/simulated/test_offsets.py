"""Offsets of tensors beyond 2^31 elements, and grids: exact 64-bit indices, every element covered once, limits kept."""

import inspect
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from simulated_cases import F

from cuda_kernels import launch, reads, stores, tiles, vectors
from cuda_kernels.directions import direction_of
from cuda_kernels.families import (
    dequantize,
    elementwise,
    four_over_six,
    hadamard_transform,
    mxfp8,
    nvfp4,
    per_tensor,
    squares,
    sums,
)
from cuda_kernels.operands import (
    Bits,
    Blocks,
    Chosen,
    Coded,
    InMemory,
    Inputs,
    Kind,
    KnownScale,
    Maxima,
    Random,
    Stochastic,
    Stored,
    TwoLevel,
    Values,
    as_it_is,
    described,
)
from cuda_kernels.simt import I32
from cuda_kernels.stores import make_cast_under
from refops import E4M3, BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, NVFP4Scaling

MXFP8, NVFP4 = MXFP8Scaling(E4M3), NVFP4Scaling()

#: The last row that a tensor may have, and a width that is legal beside it.
LAST, WIDTH = launch.LARGEST_DIMENSION - 1, launch.LARGEST_DIMENSION - 8
VALUES, NOTHING = (F(1),) * 8, np.uint16(0)


class Recorder:
    """A pointer that notes the indices of its accesses and holds the same value everywhere."""

    def __init__(self, value):
        self.value, self.seen = value, []

    def note(self, i):
        self.seen.append(int(i))

    def __getitem__(self, i):
        self.note(i)
        return self.value

    def __setitem__(self, i, value):
        self.note(i)

    def read(self, i, size):
        self.note(i)
        return np.zeros(size, np.uint8)

    def write(self, i, words):
        self.note(i)


def inputs(x, dy=None, width=WIDTH, interleave=0):
    """An `Inputs` of recorders, of a tensor of `LAST` + 1 rows."""
    return Inputs(x, dy, Recorder(F(1)), *[F(1)] * 5, I32(LAST + 1), I32(width), I32(interleave))


def indices(values, whole, column=WIDTH - 8, width=WIDTH, interleave=0, make=reads.make_read):
    """(indices into x, into dy) of a read at a place of the last row."""
    x, dy = Recorder(NOTHING), Recorder(NOTHING)
    with np.errstate(all="ignore"):  # casts wrap on purpose; an index that wraps is seen
        make(values, whole, None)(inputs(x, dy, width, interleave), I32(LAST), I32(column), I32(16))
    return x.seen, dy.seen


def of(name, kind=Kind.FORWARD, **changes):
    """`Values` of an activation of bfloat16."""
    return Values(kind, name, "bfloat16", **changes)


@pytest.mark.parametrize("whole", [True, False])
def test_reads(whole):
    steps = [0] if whole else list(range(8))
    width = launch.LARGEST_DIMENSION // 2 - 8  # of gated ones: x has 2 * width columns
    column = width - 8
    at, first = LAST * WIDTH + WIDTH - 8, LAST * 2 * width + column
    one, two = [at + k for k in steps], [first + k for k in steps] + [first + width + k for k in steps]
    assert indices(as_it_is("bfloat16"), whole) == (one, [])
    assert indices(of("relu"), whole) == (one, [])
    assert indices(of("relu", Kind.BACKWARD), whole) == (one, one)
    place = {"column": column, "width": width}
    assert indices(of("reglu"), whole, **place) == (two, [])
    dy, gradient = [LAST * width + column + k for k in steps], of("reglu", Kind.BACKWARD)
    assert indices(gradient, whole, **place, make=reads.make_read_halves) == (two, dy)
    for half in (column, column + width):
        assert [sorted(i) for i in indices(gradient, whole, half, width)] == [sorted(two), sorted(dy)]
    g = 32
    first = LAST * 2 * width + column // g * 2 * g + column % g
    alternating = [first + k for k in steps] + [first + g + k for k in steps]
    assert indices(of("reglu", interleaved=True), whole, interleave=g, **place) == (alternating, [])
    sixteen = [at - 8, at] if whole else [at - 8 + k for k in range(16)]
    assert indices(as_it_is("bfloat16"), whole, WIDTH - 16, make=reads.make_read_sixteen) == (sixteen, [])


@pytest.mark.parametrize("whole", [True, False])
def test_bands(whole, monkeypatch):
    """The last row of the last band: what is read, stored and summed of eight columns."""
    x, stored, partial, column = Recorder(NOTHING), Recorder(NOTHING), Recorder(F(0)), WIDTH - 16
    number, one_thread = LAST // launch.BAND, SimpleNamespace(x=I32(0))
    monkeypatch.setattr(sums, "first_row", lambda rows: I32(number))
    monkeypatch.setattr(sums, "first_column", lambda columns: I32(column // 8))
    monkeypatch.setattr(sums, "cuda", SimpleNamespace(threadIdx=one_thread, blockDim=one_thread))
    spec = sums.Band(as_it_is("bfloat16"), "bfloat16", "float32", False, whole)
    with np.errstate(all="ignore"):
        spec.function(None)(inputs(x), Stored(stored, I32(LAST + 1), I32(WIDTH)), partial)
    steps, words = ([0], [0, 4]) if whole else (range(8), range(8))
    in_last_row = [LAST * WIDTH + column + k for k in steps]
    assert x.seen[-len(in_last_row) :] == stored.seen[-len(in_last_row) :] == in_last_row
    assert len(x.seen) == len(stored.seen) == launch.BAND * len(in_last_row)
    assert partial.seen == [number * WIDTH + column + k for k in words]


@pytest.mark.parametrize("whole", [True, False])
def test_elementwise(whole, monkeypatch):
    """What threads of the last row read and store: eight of a result, of both halves of a gradient; sixteen codes."""

    def seen(spec, source, inner, column):
        monkeypatch.setattr(elementwise, "place", lambda n, *size: (I32(LAST), I32(column), I32(16)))
        out = Recorder(NOTHING)
        with np.errstate(all="ignore"):
            spec.function(None)(source, Stored(out, I32(LAST + 1), I32(inner)))
        return out.seen

    steps, column, x = ([0] if whole else range(8)), WIDTH - 16, Recorder(NOTHING)
    at = LAST * WIDTH + column
    plain = elementwise.Elementwise(as_it_is("bfloat16"), "bfloat16", False, whole)
    assert seen(plain, inputs(x), WIDTH, column) == x.seen == [at + k for k in steps]
    width = launch.LARGEST_DIMENSION // 2 - 8
    gradient = elementwise.ElementwiseGradient(of("reglu", Kind.BACKWARD), "bfloat16", False, whole)
    first = LAST * 2 * width + width - 8
    both = [first + k for k in steps] + [first + width + k for k in steps]
    source = inputs(Recorder(NOTHING), Recorder(NOTHING), width)
    assert seen(gradient, source, 2 * width, width - 8) == source.x.seen == both
    sixteen, x = [at + k for k in range(16)], Recorder(NOTHING)
    encode = elementwise.Encode("bfloat16", "e4m3", whole)
    assert seen(encode, inputs(x), WIDTH, column) == ([at] if whole else sixteen)
    assert x.seen == ([at, at + 8] if whole else sixteen)
    codes, decode = Recorder(np.uint8(0)), elementwise.Decode("e4m3", whole)
    source = Stored(codes, I32(LAST + 1), I32(WIDTH))
    assert seen(decode, source, WIDTH, column) == (sixteen[::4] if whole else sixteen)
    assert codes.seen == ([at] if whole else sixteen)


def decoded(monkeypatch, spec, column, stride):
    """Indices of the codes, of the scales and of the values that a thread of the last row touches, 16 columns."""
    kind = spec.direction.scale_type
    codes, scales, amax, values = Recorder(np.uint8(0)), Recorder(kind(1)), Recorder(F(1)), Recorder(NOTHING)
    monkeypatch.setattr(dequantize, "place", lambda n, *size: (I32(LAST), I32(column), I32(16)))
    with np.errstate(all="ignore"):
        coded = Coded(codes, scales, I32(stride), amax, I32(LAST + 1), I32(WIDTH))
        spec.function(None)(coded, Stored(values, I32(LAST + 1), I32(WIDTH)))
    assert set(amax.seen) == ({LAST if spec.direction.by_outer else 0} if spec.must_read("amax") else set())
    return codes.seen, scales.seen, values.seen


@pytest.mark.parametrize("whole", [True, False])
def test_dequantization(whole, monkeypatch):
    """Whole rows: an access for 16 codes, two for their values, one for their scale or for the scales of 16 columns."""
    stride, column = 2**26 + 16, WIDTH // 128 * 128 - 128
    at = LAST * WIDTH + column
    sixteen = [at + k for k in range(16)]
    for scaling, scale in (
        (CurrentScaling(E4M3), 0),
        (BlockScaling(E4M3, 1), column // 128 * stride + LAST),
        (BlockScaling(E4M3, 2), LAST // 128 * stride + column // 128),
        (MXFP8, LAST * stride + column // 32),
        (NVFP4, LAST * stride + column // 16),
        (NVFP4Scaling(row_scaled=True), LAST * stride + column // 16),
    ):
        direction = direction_of(scaling, False)
        spec = dequantize.DequantizeRows(direction, "bfloat16", whole)
        codes = [i // direction.layout.packed for i in ([at] if whole else sixteen)]
        values = [at, at + 8] if whole else sixteen
        assert decoded(monkeypatch, spec, column, stride) == (codes, [scale], values)
    spec = dequantize.DequantizeColumns(direction_of(MXFP8, True), "bfloat16", whole)
    first = LAST // 32 * stride + column
    scales = [first] if whole else [first + k for k in range(16)]
    codes, values = ([at], [at, at + 8]) if whole else (sixteen, sixteen)
    assert decoded(monkeypatch, spec, column, stride) == (codes, scales, values)


class Thread:
    """What kernels ask `cuda` for, of one thread of a block whose other threads have the same values."""

    def __init__(self, number):
        self.threadIdx = type("Index", (), {"x": number})
        self.shared = type("Shared", (), {"array": staticmethod(np.zeros)})

    def shfl_xor_sync(self, mask, x, lanes):
        return x

    def syncthreads(self):
        pass


def source_of(width, interleave=0):
    """The `Inputs` of recorders."""
    scalars = [F(1)] * 5 + [I32(LAST + 1), I32(width), I32(interleave)]
    return Inputs(Recorder(NOTHING), Recorder(NOTHING), Recorder(F(1)), *scalars)


def blocks_of(stride, columns):
    """The `Blocks` of recorders."""
    return Blocks(Recorder(0), Recorder(0), I32(stride), F(0), F(1), I32(LAST + 1), I32(columns))


@pytest.mark.parametrize("whole", [True, False])
def test_fused_rows(whole, monkeypatch):
    """Whole rows: two reads and one store of 16 bytes."""
    monkeypatch.setattr(vectors, "cuda", Thread(0))
    stride, column, direction = 2**27, WIDTH // 128 * 128 - 128, direction_of(MXFP8, False)
    monkeypatch.setattr(mxfp8, "place", lambda n, *size: (I32(LAST), I32(column), I32(16)))
    at, scale = LAST * WIDTH + column, LAST * stride + column // 32
    source, out = source_of(WIDTH), blocks_of(stride, WIDTH)
    spec = mxfp8.MXFP8Rows(as_it_is("bfloat16"), direction, "float32", whole)
    with np.errstate(all="ignore"):
        spec.function(None)(source, out)
    sixteen = [at + k for k in range(16)]
    assert source.x.seen == ([at, at + 8] if whole else sixteen)
    assert (out.data.seen, out.scales.seen) == ([at] if whole else sixteen, [scale])


def test_fused_halves(monkeypatch):
    monkeypatch.setattr(vectors, "cuda", Thread(0))
    stride, width = 2**27, WIDTH // 2 // 32 * 32
    column = width - 32
    monkeypatch.setattr(mxfp8, "place", lambda n, *size: (I32(LAST), I32(column), I32(16)))
    values = Values(Kind.BACKWARD, "reglu", "bfloat16")
    spec = mxfp8.MXFP8GradientRows(values, direction_of(MXFP8, False), "bfloat16")
    source, out = source_of(width), blocks_of(stride, 2 * width)
    with np.errstate(all="ignore"):
        spec.function(None)(source, out)
    act, dy, scale = LAST * 2 * width + column, LAST * width + column, LAST * stride + column // 32
    assert sorted(source.x.seen) == [act, act + 8, act + width, act + width + 8]
    assert source.dy.seen == [dy, dy + 8]
    assert (out.data.seen, out.scales.seen) == ([act, act + width], [scale, scale + width // 32])


def test_fused_columns(monkeypatch):
    """The last block of rows, and the columns of the thread whose own one is the first of its eight."""
    thread = Thread(7)
    monkeypatch.setattr(vectors, "cuda", thread)
    monkeypatch.setattr(mxfp8, "cuda", thread)
    row0, stride, column0 = LAST // 32 * 32, 2**26 + 16, WIDTH // 256 * 256 - 256
    monkeypatch.setattr(mxfp8, "first_row", lambda rows: I32(row0))
    monkeypatch.setattr(mxfp8, "first_column", lambda columns: I32(column0))
    spec = mxfp8.MXFP8Columns(as_it_is("bfloat16"), direction_of(MXFP8, False), "float32", True, True, True)
    source, row_out, column_out = source_of(WIDTH), blocks_of(2**27, WIDTH), blocks_of(stride, WIDTH)
    partial, column = Recorder(F(0)), column0 + 7 * 8
    with np.errstate(all="ignore"):
        spec.function(None)(source, row_out, column_out, partial)
    rows = [row for row in range(row0, LAST + 1, 8)]
    at = [row * WIDTH + column for row in rows]
    assert source.x.seen == row_out.data.seen == column_out.data.seen == at
    assert row_out.scales.seen == ([row * 2**27 + column // 32 for row in rows] if column % 32 == 0 else [])
    assert column_out.scales.seen == [row0 // 32 * stride + column]
    assert partial.seen == [row0 // 32 * WIDTH + column]


def known(data, scale_inv, width=WIDTH):
    """A `KnownScale`, the amax of which nobody looks at."""
    return KnownScale(data, scale_inv, None, F(1), F(1), I32(LAST + 1), I32(width))


def cast_with_one_scale(monkeypatch, spec, column, width):
    """Indices into x, dy, the codes and the scale that a thread of the last row touches, 16 columns."""
    x, dy, data, scale = Recorder(NOTHING), Recorder(NOTHING), Recorder(np.uint8(0)), Recorder(F(1))
    monkeypatch.setattr(per_tensor, "place", lambda n, *size: (I32(LAST), I32(column), I32(16)))
    monkeypatch.setattr(per_tensor, "record_largest", lambda amax, out, left: None)
    halves = 2 if spec.values.gated else 1
    out = known(data, scale, halves * width)
    if not spec.direction.known:
        out = InMemory(data, scale, I32(LAST + 1), I32(halves * width))
    source = Inputs(x, dy, Recorder(F(1)), *[F(1)] * 5, I32(LAST + 1), I32(width), I32(0))
    with np.errstate(all="ignore"):
        spec.function(None)(source, out)
    return x.seen, dy.seen, data.seen, scale.seen


@pytest.mark.parametrize("whole", [True, False])
def test_one_scale_along_rows(whole, monkeypatch):
    """Whole rows: two accesses for 16 values, one for their codes."""
    delayed, current = direction_of(DelayedScaling(E4M3), False), direction_of(CurrentScaling(E4M3), False)
    column = WIDTH - 16
    at, steps = LAST * WIDTH + column, range(16)
    eights, codes = ([at, at + 8], [at]) if whole else ([at + k for k in steps],) * 2
    for spec, scale in (
        (per_tensor.KnownRows(as_it_is("bfloat16"), delayed, whole), []),
        (per_tensor.InMemoryRows(as_it_is("bfloat16"), current, whole), [0]),
    ):
        assert cast_with_one_scale(monkeypatch, spec, column, WIDTH) == (eights, [], codes, scale)
    gradient = per_tensor.KnownRows(Values(Kind.BACKWARD, "relu", "bfloat16"), delayed, whole)
    assert cast_with_one_scale(monkeypatch, gradient, column, WIDTH) == (eights, eights, codes, [])


def test_one_scale_of_both_halves(monkeypatch):
    width = launch.LARGEST_DIMENSION // 2 - 8
    column = width - 16
    dreglu = Values(Kind.BACKWARD, "reglu", "bfloat16")
    spec = per_tensor.KnownGradientRows(dreglu, direction_of(DelayedScaling(E4M3), False))
    first, dy = LAST * 2 * width + column, LAST * width + column
    x = [first, first + width, first + 8, first + width + 8]
    assert cast_with_one_scale(monkeypatch, spec, column, width) == (x, [dy, dy + 8], [first, first + width], [])


@pytest.mark.parametrize("whole", [True, False])
def test_one_scale_of_eight(whole, monkeypatch):
    """Of a tile: the scale is stored with the first element alone."""
    monkeypatch.setattr(stores, "record_amax", lambda v, out, left: None)
    at = LAST * WIDTH + WIDTH - 8
    codes = [at] if whole else [at + k for k in range(8)]
    for make, scaling, scale in (
        (stores.make_cast_known, DelayedScaling(E4M3), []),
        (stores.make_cast_in_memory, CurrentScaling(E4M3), [0]),
    ):
        data, numbers = Recorder(np.uint8(0)), Recorder(F(1))
        out = known(data, numbers) if scale == [] else InMemory(data, numbers, I32(LAST + 1), I32(WIDTH))
        with np.errstate(all="ignore"):
            make(direction_of(scaling, False), whole, None)(VALUES, out, I32(LAST), I32(WIDTH - 8), I32(8))
        assert (data.seen, numbers.seen) == (codes, scale)
    numbers = Recorder(F(1))
    put = stores.make_cast_known(direction_of(DelayedScaling(E4M3), False), whole, None)
    put(VALUES, known(Recorder(np.uint8(0)), numbers), I32(0), I32(0), I32(0))
    assert numbers.seen == [0]


def filled(monkeypatch, spec, kind, column, stride, *more, **values):
    """field -> indices that a thread of the last row touches in the operand of a kind that a row kernel fills."""
    fields = {
        name: I32(1) if what == "scalar" else Recorder(of(1))
        for name, (what, of) in described(kind, **values)[1].items()
    }
    fields |= {"scale_stride": I32(stride), "outer": I32(LAST + 1), "inner": I32(WIDTH)}
    source = Inputs(Recorder(NOTHING), None, None, *[F(1)] * 5, I32(LAST + 1), I32(WIDTH), I32(0))
    monkeypatch.setattr(inspect.getmodule(type(spec)), "place", lambda n, *size: (I32(LAST), I32(column), I32(16)))
    with np.errstate(all="ignore"):
        spec.function(None)(source, kind(**fields), *more)
    return {name: field.seen for name, field in fields.items() if isinstance(field, Recorder)}


@pytest.mark.parametrize("whole", [True, False])
def test_squares_of_the_last_row(whole, monkeypatch):
    """Eight neighbours under a maximum that lies in memory; rowwise scales, and one for each column along rows."""
    stride, column = 2**26 + 16, WIDTH // 128 * 128 - 128
    at, block, across = LAST * WIDTH + column, column // 128, 2**24 + 1
    largest = Recorder(np.int32(1))
    for scaling, columnwise, scales in (
        (BlockScaling(E4M3, 2), False, [] if LAST % 128 else [LAST // 128 * stride + block]),
        (MXFP8Scaling(E4M3, two_d=True), False, [LAST * stride + column // 32]),
        (
            MXFP8Scaling(E4M3, two_d=True),
            True,
            [] if LAST % 32 else [LAST // 32 * stride + column + k for k in range(8)],
        ),
    ):
        direction = direction_of(scaling, columnwise)
        spec = squares.GivenRows(as_it_is("bfloat16"), direction, whole)
        maxima = Maxima(largest, I32(across), I32(LAST + 1), I32(WIDTH))
        got = filled(monkeypatch, spec, Blocks, column, stride, maxima, scales=direction.scale_type)
        assert got == {"data": [at] if whole else [at + k for k in range(8)], "scales": scales}
    assert largest.seen == [LAST // edge * across + column // edge for edge in (128, 32, 32)]


@pytest.mark.parametrize("whole", [True, False])
def test_a_choice_in_the_last_row(whole, monkeypatch):
    """Sixteen neighbours: one scale, eight bytes, the amax of the tensor or of the row."""
    stride, column = 2**27, WIDTH // 128 * 128 - 128
    at = (LAST * WIDTH + column) // 2
    for row_scaled, amax in ((False, 0), (True, LAST)):
        direction = direction_of(NVFP4Scaling(four_over_six="mae", row_scaled=row_scaled), False)
        spec = four_over_six.ChosenRows("bfloat16", direction, whole)
        got = filled(monkeypatch, spec, Chosen, column, stride, scales=np.uint8)
        data = [at] if whole else [at + k for k in range(8)]
        assert got == {"data": data, "scales": [LAST * stride + column // 16], "amax": [amax]}


@pytest.mark.parametrize(("source", "bits"), [(Bits.PHILOX, 0), (Bits.GIVEN, 8)])
def test_stochastic_squares_of_the_last_row(source, bits):
    inner, stride = WIDTH // 128 * 128 - 128, 2**27
    direction = replace(direction_of(NVFP4Scaling(two_d=True), False), random=source)
    at, seen = LAST * WIDTH + inner, {name: Recorder(F(1)) for name in ("data", "scales", "tensor_scales")}
    seen["bits"] = Recorder(np.uint8(0))
    numbers = dict.fromkeys(Stochastic._fields, 1) | {"scale_stride": I32(stride), "inner": I32(WIDTH)}
    out = Stochastic(**numbers | seen)
    with np.errstate(all="ignore"):
        make_cast_under(direction, True, None)(VALUES, F(1), out, I32(LAST), I32(inner), I32(8))
    assert seen["data"].seen == [at // 2] and seen["scales"].seen == [LAST * stride + inner // 16]
    assert seen["bits"].seen == [at + k for k in range(bits)]


@pytest.mark.parametrize("whole", [True, False])
def test_blocks_of_eight(whole):
    inner, stride = WIDTH // 128 * 128 - 128, 2**27
    at, row = LAST * WIDTH + inner, direction_of(MXFP8, False)
    tile = (LAST // 128 * (stride // 4) + inner // 32 // 4) * 512 + LAST % 32 * 16 + LAST % 128 // 32 * 4
    for direction, place in (
        (direction_of(BlockScaling(E4M3, 1), False), inner // 128 * stride + LAST),
        (row, LAST * stride + inner // 32),
        (replace(row, columnwise=True), inner // 32 * stride + LAST),
        (replace(row, swizzled=True), tile + inner // 32 % 4),
    ):
        data, scales = Recorder(NOTHING), Recorder(F(1))
        out = Blocks(data, scales, I32(stride), F(0), F(1), I32(LAST + 1), I32(WIDTH))
        with np.errstate(all="ignore"):
            make_cast_under(direction, whole, None)(VALUES, F(1), out, I32(LAST), I32(inner), I32(8))
        assert data.seen == ([at] if whole else [at + k for k in range(8)]) and scales.seen == [place]


NUMBERS = [F(1)] * 5  # of activations, which none of these have


def cast_nvfp4(monkeypatch, spec, column, stride):
    """field -> indices that a thread of the last row touches, 16 columns."""
    monkeypatch.setattr(nvfp4, "place", lambda n, *size: (I32(LAST), I32(column), I32(16)))
    source = Inputs(Recorder(NOTHING), Recorder(NOTHING), Recorder(F(1)), *NUMBERS, I32(LAST + 1), I32(WIDTH), I32(0))
    codes, scales, of_rows = Recorder(np.uint8(0)), Recorder(np.uint8(0)), Recorder(F(1))
    random = Random(Recorder(np.uint8(0)), np.uint64(1), np.uint64(0), np.int64(0))
    kind, more = (Stochastic, random) if spec.direction.random else (TwoLevel, ())
    out = kind(codes, scales, I32(stride), F(0), F(1), I32(LAST + 1), I32(WIDTH), of_rows, *more)
    with np.errstate(all="ignore"):
        spec.function(None)(source, out)
    arrays = {"x": source.x, "data": codes, "scales": scales, "tensor_scales": of_rows, "bits": random.bits}
    return {name: recorder.seen for name, recorder in arrays.items()}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize("random", [None, *Bits])
def test_nvfp4(monkeypatch, random, swizzled, whole):
    column, stride = WIDTH // 128 * 128 - 64, 2**27
    direction = replace(direction_of(NVFP4Scaling(row_scaled=True), False, swizzled), random=random)
    spec = nvfp4.NVFP4Rows("bfloat16", direction, whole)
    block, at = column // 16, LAST * WIDTH + column
    tile = (LAST // 128 * (stride // 4) + block // 4) * 512 + LAST % 32 * 16 + LAST % 128 // 32 * 4 + block % 4
    sixteen, halves = [at + k for k in range(16)], [at // 2 + k for k in range(8)]
    assert cast_nvfp4(monkeypatch, spec, column, stride) == {
        "x": [at, at + 8] if whole else sixteen,
        "data": ([at // 2, at // 2 + 4] if random is Bits.GIVEN else [at // 2]) if whole else halves,
        "scales": [tile if swizzled else LAST * stride + block],
        "tensor_scales": [2 * LAST],  # both numbers of the row in one access
        "bits": sixteen if random is Bits.GIVEN else [],
    }


@pytest.mark.parametrize("whole", [True, False])
def test_hadamard(monkeypatch, whole):
    column = WIDTH // 16 * 16 - 16
    monkeypatch.setattr(hadamard_transform, "place", lambda n, *size: (I32(LAST), I32(column), I32(16)))
    monkeypatch.setattr(hadamard_transform, "make_hadamard", lambda mask, inverse: lambda v, upper: v)
    x, y = Recorder(NOTHING), Recorder(NOTHING)
    source = Inputs(x, x, Recorder(F(1)), *NUMBERS, I32(LAST + 1), I32(WIDTH), I32(0))
    spec = hadamard_transform.HadamardRows("bfloat16", 0, False, whole)
    spec.build(None)(source, Stored(y, I32(LAST + 1), I32(WIDTH)))
    at = LAST * WIDTH + column
    assert x.seen == y.seen == ([at] if whole else [at + k for k in range(8)])


# --- grids ------------------------------------------------------------------------------------------

SIZES = [1, 2, 7, 8, 9, 31, 33, 127, 128, 129, 1024, 1025, 65535 * 2 + 1, 65535 * 128 + 1, 2**27 + 5, LAST]
GRIDS = {
    "row": (lambda m, k: launch.row_shape(m, k, 16), lambda b: (b[1], b[0] * 8)),
    "row, no lanes": (lambda m, k: launch.row_shape(m, k, 1), lambda b: (b[1], b[0] * 8)),
    "row, warps": (lambda m, k: launch.row_shape(m, k, 32), lambda b: (b[1], b[0] * 8)),
    "rows of sixteen": (lambda m, k: launch.row_shape(m, k, 2, 16), lambda b: (b[1], b[0] * 16)),
    "rows of sixteen, warps": (lambda m, k: launch.row_shape(m, k, 32, 16), lambda b: (b[1], b[0] * 16)),
    "sixteen alone": (lambda m, k: launch.row_shape(m, k, 1, 16), lambda b: (b[1], b[0] * 16)),
    "band": (launch.band_shape, lambda b: (launch.BAND, b[0] * 8)),
    "tile 64": (lambda m, k: launch.tile_grid(m, k, 64), lambda b: (tiles.TILE_ROWS, 64)),
    "tile 128": (lambda m, k: launch.tile_grid(m, k, 128), lambda b: (tiles.TILE_ROWS, 128)),
    "columns 16": (lambda m, k: launch.column_grid(m, k, 16), lambda b: (16, launch.COLUMNS)),
    "columns 128": (lambda m, k: launch.column_grid(m, k, 128), lambda b: (128, launch.COLUMNS)),
}


@pytest.mark.parametrize("kind", GRIDS)
def test_grids_cover_every_element_within_the_limits(kind):
    """Row r is that of block r // rows, so one block a step and no block less covers each row once."""
    make, owned_by = GRIDS[kind]
    for m in SIZES:
        for k in SIZES:
            (x, y, z), block = make(m, k)
            rows, columns = owned_by(block)
            assert block[0] * block[1] * block[2] <= 1024 and block[0] * block[1] % 32 == 0
            assert 1 <= x < 2**31 and 1 <= y <= 65535 and 1 <= z <= 65535
            assert (x - 1) * columns < k <= x * columns
            assert m <= y * z * rows < m + z * rows, "at most one surplus block for each z"
            assert y * z * rows + 128 < 2**31 and x * columns + 256 < 2**31, "row and column numbers fit int32"


def test_fold():
    for blocks in (0, 1, 65535, 65536, 65537, 2**24 - 1, 2**31):
        y, z = launch.fold(blocks)
        assert blocks <= y * z < blocks + z + 1 and y <= 65535 and z >= 1
