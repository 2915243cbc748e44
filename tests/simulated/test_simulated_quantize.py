"""`quantize` in the simulator has the bits of `refops`: scalings, directions, dtypes, shapes, special values."""

import numpy as np
import pytest
from simulated_cases import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    RHT,
    SCALINGS,
    F,
    check_quantize,
    directions_of,
    granularity,
    integers,
    judge,
    misaligned,
    strided,
    transposed,
)

import cuda_kernels
import refops
from arrays import coarse, heavy_tailed
from tiers import sampled

pytestmark = pytest.mark.sweep

#: Shapes in units of what the scaling's rows and columns must divide by: with 1 (any shape), 16 and 32.
SHAPES = {
    "one row": {1: (1, 200), 16: (16, 144), 32: (32, 160)},
    "one column": {1: (70, 1), 16: (80, 16), 32: (64, 32)},
    "1-D": {1: (37,)},
    "3-D": {1: (3, 5, 24), 16: (2, 8, 48), 32: (2, 16, 64)},
    "aligned": {1: (32, 64), 16: (32, 64), 32: (32, 64)},
    "ragged": {1: (35, 70), 16: (48, 80), 32: (96, 96)},
}
#: Just over the edges of tiles: 128 rows x 64 or 128 columns, 32 x 256 of MXFP8.
OVER_AN_EDGE = {1: ((130, 136), (33, 264)), 16: ((144, 80),), 32: ((160, 96),)}


def shapes(scaling):
    """The shapes that a scaling allows."""
    unit = granularity(scaling)
    return [by_unit[unit] for by_unit in SHAPES.values() if unit in by_unit]


@sampled("name", SCALINGS, 8)
def test_every_shape(name):
    """Shapes, dtypes and directions take turns among the settings of a scaling."""
    scaling, number = SCALINGS[name], list(SCALINGS).index(name)
    directions = directions_of(scaling)
    for i, shape in list(enumerate(shapes(scaling)))[number % 2 :: 2]:
        x = heavy_tailed(shape, DTYPES[(number + i) % 3], seed=i)
        check_quantize(x, scaling, *directions[(number + i + i // 3) % len(directions)])


@pytest.mark.parametrize("name", ["delayed-e5m2", "current", "block-1x128", "block-128x128", "mxfp8", "nvfp4-1x16"])
@sampled("dtype", DTYPES, 3, ids=str)
def test_every_dtype_and_direction(name, dtype):
    for directions in directions_of(SCALINGS[name]):
        check_quantize(heavy_tailed((16, 48), dtype), SCALINGS[name], *directions)


@sampled("name", SCALINGS, 15)
def test_just_over_the_edges_of_tiles(name):
    scaling, number = SCALINGS[name], list(SCALINGS).index(name)
    directions = directions_of(scaling)
    shapes = OVER_AN_EDGE[granularity(scaling)]
    shape = shapes[isinstance(scaling, refops.MXFP8Scaling)] if len(shapes) > 1 else shapes[0]
    check_quantize(heavy_tailed(shape, DTYPES[number % 3]), scaling, *directions[-1])


@sampled("name", SCALINGS, 5)
def test_misaligned_input(name):
    x = misaligned(heavy_tailed((32, 64), DTYPES[list(SCALINGS).index(name) % 3]))
    assert x.ctypes.data % 16 and x.flags.c_contiguous
    check_quantize(x, SCALINGS[name], *directions_of(SCALINGS[name])[-1])


@pytest.mark.parametrize("change", [strided, transposed])
@pytest.mark.parametrize("name", ["delayed-e5m2", "block-1x128", "mxfp8", "nvfp4-1x16"])
def test_input_that_is_not_contiguous(name, change):
    x = change(heavy_tailed((32, 64), FP16))
    assert not x.flags.c_contiguous
    check_quantize(x, SCALINGS[name], *directions_of(SCALINGS[name])[0])


@sampled("shape", [(0, 64), (32, 0), (0,), (2, 0, 32), (0, 0)], 3, ids=str)
def test_empty_tensors(shape):
    some = ("delayed-e5m2", "current-epsilon", "block-1x128", "block-128x128", "mxfp8", "mxfp8-2d", "nvfp4-mae-2d")
    some += ("nvfp4-1x16", "nvfp4-row-scaled", "nvfp4-rht")
    for number, scaling in enumerate((SCALINGS | RHT)[name] for name in some):
        x = np.zeros(shape, DTYPES[number % 3])
        for directions in directions_of(scaling)[::2]:
            try:
                refops.quantize(x, scaling, rowwise=directions[0], columnwise=directions[1])
            except ValueError as refused:
                with pytest.raises(ValueError) as caught:
                    cuda_kernels.quantize(x, scaling, rowwise=directions[0], columnwise=directions[1])
                assert str(caught.value) == str(refused)
            else:
                check_quantize(x, scaling, *directions, dbias=True)


@sampled("name", SCALINGS | RHT, 5)
def test_column_sums_of_exact_inputs(name):
    scaling = (SCALINGS | RHT)[name]
    number, directions = list(SCALINGS | RHT).index(name), directions_of(scaling)
    shape = (35, 70) if granularity(scaling) == 1 else (32, 32)
    check_quantize(integers(shape, DTYPES[number % 3]), scaling, *directions[number % len(directions)], dbias=True)


@sampled("name", ["delayed-scale-1", "current", "mxfp8", "mxfp8-2d", "block-1x128", "nvfp4-1x16"], 3)
def test_column_sums_of_any_input(name):
    """130 rows: more than one band and one tile; the oracle judges any order."""
    x = heavy_tailed((130 if granularity(SCALINGS[name]) == 1 else 144, 48))
    for rowwise, columnwise in directions_of(SCALINGS[name])[:2]:
        q, dbias = cuda_kernels.quantize(x, SCALINGS[name], rowwise=rowwise, columnwise=columnwise, dbias=True)
        judge("quantize", x, q.arrays | {"dbias": dbias}, scaling=SCALINGS[name])


@pytest.mark.full
@pytest.mark.parametrize("name", RHT)
def test_hadamard_transformed(name):
    """Bit for bit where the transform's sums are exact, judged by the oracle elsewhere."""
    for dtype, directions, shape in zip(DTYPES, directions_of(RHT[name]), ((144, 48), (32, 64), (16, 80)), strict=True):
        check_quantize(integers(shape, dtype), RHT[name], *directions)
    for change in (np.asarray, misaligned):
        x = change(heavy_tailed((48, 32), BF16))
        q = cuda_kernels.quantize(x, RHT[name], rowwise=False, columnwise=True)
        judge("quantize", x, q.arrays, scaling=RHT[name])


@pytest.mark.full
@pytest.mark.parametrize("two_d", [False, True])
@pytest.mark.parametrize("change", [np.asarray, misaligned], ids=["aligned", "misaligned"])
def test_given_random_bits(two_d, change):
    """One array for one direction, a pair for both."""
    x, random = change(heavy_tailed((32, 96), FP32)), np.random.default_rng(3)
    rows, columns = (random.integers(0, 256, shape).astype(np.uint8) for shape in ((32, 96), (96, 32)))
    for bits, directions in ((rows, (True, False)), (columns, (False, True)), ((rows, columns[:, ::-1]), (True, True))):
        scaling = refops.NVFP4Scaling(stochastic_rounding=True, two_d=two_d, random_bits=bits)
        check_quantize(x, scaling, *directions)
    scaling = refops.NVFP4Scaling(stochastic_rounding=True, two_d=two_d, random_bits=(rows[::-1], columns))
    check_quantize(x, scaling, True, True)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
@sampled("offset", [0, 2**32 - 1, 2**64 - 1], 3)
def test_philox_keys_and_counters(seed, offset):
    scaling = refops.NVFP4Scaling(stochastic_rounding=True, seed=seed, offset=offset)
    check_quantize(heavy_tailed((16, 32), FP16), scaling, True, True)


# --- special values ---------------------------------------------------------------------------------

NANS = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFBFFFFF, 0x7FFFFFFF, 0x7F80DEAD], np.uint32).view(F)
ENDS = np.array([0x7F7FFFFF, 0xFF7FFFFF, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000], np.uint32).view(F)


def halves(*bits):
    """Bits of 16-bit floats."""
    return np.array(bits, np.uint16)


def specials(dtype):
    """NaNs with payloads, signalling ones too, infinities, zeros, subnormals and the ends of a dtype."""
    if dtype == FP32:
        return np.concatenate([NANS, ENDS, F([np.inf, -np.inf, 0, -0.0, 448, -464, 6, 0.25, 1e-30])])
    if dtype == FP16:
        bits = halves(0x7E00, 0xFE00, 0x7C01, 0xFD55, 0x7C00, 0xFC00, 0, 0x8000, 1, 0x83FF, 0x400, 0x7BFF, 0xFBFF)
    else:
        bits = halves(0x7FC0, 0xFFC0, 0x7F81, 0xFFBF, 0x7F80, 0xFF80, 0, 0x8000, 1, 0x807F, 0x80, 0x7F7F, 0xFF7F, 0xC0)
    return bits.view(dtype)


def filled(dtype, what):
    """(32, 64) of a dtype: blocks of 16 whose contents are `what`."""
    x, values = heavy_tailed((32, 64), dtype, seed=4), specials(dtype)
    if what == "mixed":
        x.reshape(-1)[3 : 3 + 11 * values.size : 11] = values
        x[20, 16 : 16 + values.size] = values
        x[5:, 33][: values.size] = values
    elif what == "no infinities":  # so that amaxes are finite: the ends matter
        keep = values[~np.isinf(values.astype(F)) & (np.abs(values.astype(F)) < 3)]
        x[9, 16 : 16 + keep.size], x[:, 40] = keep, np.resize(keep, 32)
    elif what == "huge and tiny":
        info = np.finfo(np.float32) if dtype != FP16 else np.finfo(np.float16)
        x[:, ::3], x[:, 1::3], x[16:, 48:] = float(info.max) * 0.99, float(info.tiny), float(info.tiny) / 4
    elif what == "tiny":
        x[...] = (np.arange(x.size) % 5).astype(np.uint32 if dtype == FP32 else np.uint16).view(dtype).reshape(x.shape)
    elif what == "all NaN":
        x[...] = np.nan
        x[:16, :16] = 1
    elif what == "all infinite":
        x[...], x[3, 3] = np.inf, -np.inf
    else:
        x[...], x[::2] = 0, -0.0
    return x


SPECIALS = ("mixed", "no infinities", "huge and tiny", "tiny", "all NaN", "all infinite", "zero")


#: Each scaling with "mixed" and with a third of the others.
PAIRS = [(n, w) for i, n in enumerate(SCALINGS) for j, w in enumerate(SPECIALS) if not j or (i + j) % 3 == 0]


@sampled(("name", "what"), PAIRS, 6)
def test_special_values(name, what):
    scaling, number = SCALINGS[name], list(SCALINGS).index(name)
    directions = directions_of(scaling)
    turn = number + list(SPECIALS).index(what)
    check_quantize(filled(DTYPES[turn % 3], what), scaling, *directions[(number + turn // 3) % len(directions)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@sampled("what", SPECIALS, 2)
def test_special_values_of_every_dtype(dtype, what):
    for name in ("current", "block-1x128", "mxfp8"):
        check_quantize(filled(dtype, what), SCALINGS[name])


@pytest.mark.parametrize("what", SPECIALS)
@pytest.mark.parametrize("name", ["nvfp4-1x16", "nvfp4-row-scaled", "nvfp4-stochastic"])
def test_special_values_of_a_block_in_one_thread(name, what):
    """A power of two of threads along a row, and fewer (row scaling has whole 32)."""
    x = filled(BF16, what)
    for width in (64, 48) if granularity(SCALINGS[name]) == 16 else (64,):
        check_quantize(np.ascontiguousarray(x[:, :width]), SCALINGS[name])


@pytest.mark.parametrize("what", ["all NaN", "all infinite", "zero"])
@sampled("dtype", DTYPES, 3, ids=str)
def test_special_values_transformed(dtype, what):
    check_quantize(filled(dtype, what), RHT["nvfp4-rht"], True, True)


# --- the order of threads ---------------------------------------------------------------------------


@sampled("name", SCALINGS | RHT, 5)
def test_threads_in_any_order(name, backward):
    """From the last thread to the first: a missing barrier shows."""
    scaling = (SCALINGS | RHT)[name]
    shape = (33, 72) if granularity(scaling) == 1 else (32, 32)
    directions = directions_of(scaling)[-1]
    check_quantize(integers(shape), scaling, *directions, dbias=True)


@pytest.mark.parametrize("name", ["nvfp4-mae-fast", "nvfp4-mse-fast-2d"])
def test_the_fast_error_near_ties(name):
    check_quantize(coarse((32, 256)), SCALINGS[name], True, True)
