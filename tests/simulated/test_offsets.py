"""Offsets of tensors beyond 2^31 elements, and grids: exact 64-bit indices, every element covered once, limits kept."""

from dataclasses import replace

import numpy as np
import pytest
from simulated_cases import F

from cuda_kernels import epilogues, kernels, launch, prologues, tiles
from cuda_kernels.directions import direction_of
from cuda_kernels.families import dequantize
from cuda_kernels.operands import Coded, Inputs, Outputs, Stored
from cuda_kernels.simt import I32
from refops import E4M3, BlockScaling, CurrentScaling, MXFP8Scaling, NVFP4Scaling

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


def indices(make, column=WIDTH - 8, row=LAST, width=WIDTH, interleave=0):
    """(indices into x, into dy) of a prologue at a place."""
    x, dy = Recorder(NOTHING), Recorder(NOTHING)
    scalars = [F(1)] * 5 + [I32(LAST + 1), I32(width), I32(interleave)]
    with np.errstate(all="ignore"):  # casts wrap on purpose; an index that wraps is seen
        make(Inputs(x, dy, Recorder(F(1)), *scalars), I32(row), I32(column), I32(8))
    return x.seen, dy.seen


@pytest.mark.parametrize("whole", [True, False])
def test_prologues(whole):
    steps = [0] if whole else list(range(8))
    width = launch.LARGEST_DIMENSION // 2 - 8  # of gated ones: x has 2 * width columns
    column = width - 8
    at, first = LAST * WIDTH + WIDTH - 8, LAST * 2 * width + column
    one, two = [at + k for k in steps], [first + k for k in steps] + [first + width + k for k in steps]
    bf16 = ("bfloat16", whole)
    assert indices(prologues.identity(*bf16)) == (one, [])
    assert indices(prologues.unary("relu", *bf16, False)) == (one, [])
    assert indices(prologues.unary_gradient("relu", *bf16, False)) == (one, one)
    place = {"column": column, "width": width}
    assert indices(prologues.gated("reglu", *bf16, False), **place) == (two, [])
    dy = [LAST * width + column + k for k in steps]
    assert indices(prologues.pair_of_gradients("reglu", *bf16, False), **place) == (two, dy)
    for half in (column, column + width):
        got = indices(prologues.both_gradients("reglu", *bf16, False), column=half, width=width)
        assert [sorted(i) for i in got] == [sorted(two), sorted(dy)]
    g = 32
    first = LAST * 2 * width + column // g * 2 * g + column % g
    alternating = [first + k for k in steps] + [first + g + k for k in steps]
    gated = prologues.gated("reglu", *bf16, False, True)
    assert indices(gated, interleave=g, **place) == (alternating, [])


def decoded(monkeypatch, spec, column, stride):
    """Indices of the codes, of the scales and of the values that a thread of the last row touches, 16 columns."""
    kind = spec.direction.scale_type
    codes, scales, amax, values = Recorder(np.uint8(0)), Recorder(kind(1)), Recorder(F(1)), Recorder(NOTHING)
    monkeypatch.setattr(dequantize, "place", lambda n: (I32(LAST), I32(column)))
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


def stored(epilogue, outer=LAST, inner=WIDTH - 16, stride=2**27):
    """field -> indices that an epilogue stores at, in the last row."""
    fields = {name: 0 for name in Outputs._fields}
    seen = {name: Recorder(F(1)) for name in ("data", "scales", "given", "random_bits")}
    seen["random_bits"].value = np.uint8(0)
    fields |= seen | {"seed": np.uint64(1), "offset": np.uint64(0), "first_block": np.int64(0), "epsilon": F(1)}
    fields |= {"largest_scale": F(1), "outer": I32(LAST + 1), "inner": I32(WIDTH), "scale_stride": I32(stride)}
    with np.errstate(all="ignore"):
        epilogue.store(VALUES, F(1), Outputs(**fields), I32(outer), I32(inner), I32(8))
    return {name: recorder.seen for name, recorder in seen.items()}


def _blocks(scaling, whole, **changes):
    return epilogues.blocks(replace(direction_of(scaling, False), **changes), whole, None)


@pytest.mark.parametrize("whole", [True, False])
def test_epilogues(whole):
    inner, stride = WIDTH // 128 * 128 - 128, 2**27
    at = LAST * WIDTH + inner
    bytes_at = [at] if whole else [at + k for k in range(8)]
    halves_at = [at // 2] if whole else [at // 2 + k for k in range(4)]
    row = direction_of(MXFP8, False)
    tile = (LAST // 128 * (stride // 4) + inner // 32 // 4) * 512 + LAST % 32 * 16 + LAST % 128 // 32 * 4
    given = NVFP4Scaling(row_scaled=True)
    cases = (
        (epilogues.plain("bfloat16", whole, None), bytes_at, []),
        (epilogues.codes("e4m3", whole, None), bytes_at, []),
        (epilogues.per_tensor(direction_of(CurrentScaling(E4M3), False), whole, None), bytes_at, []),
        (_blocks(BlockScaling(E4M3, 1), whole), bytes_at, [inner // 128 * stride + LAST]),
        (_blocks(MXFP8, whole), bytes_at, [LAST * stride + inner // 32]),
        (epilogues.blocks(replace(row, columnwise=True), whole, None), bytes_at, [inner // 32 * stride + LAST]),
        (epilogues.blocks(replace(row, swizzled=True), whole, None), bytes_at, [tile + inner // 32 % 4]),
        (_blocks(NVFP4, whole), halves_at, [LAST * stride + inner // 16]),
        (_blocks(given, False, random="given"), None, [LAST * stride + inner // 16]),
    )
    for epilogue, data, scales in cases:
        got = stored(epilogue, inner=inner, stride=stride)
        assert got["data"] == (data if data is not None else [at // 2 + k for k in range(4)])
        assert got["scales"] == scales
    assert got["given"] == [2 * LAST] and got["random_bits"] == [at + k for k in range(8)]


@pytest.mark.parametrize("swizzled", [True, False])
def test_whole_blocks(swizzled):
    inner, stride = WIDTH // 128 * 128 - 64, 2**27
    direction = replace(direction_of(NVFP4Scaling(row_scaled=True), False, swizzled), random="philox")
    block, at = inner // 16, LAST * WIDTH + inner
    tile = (LAST // 128 * (stride // 4) + block // 4) * 512 + LAST % 32 * 16 + LAST % 128 // 32 * 4 + block % 4
    first = tile if swizzled else LAST * stride + block
    for blocks, store in zip((1, 2), epilogues.whole_blocks(direction, None), strict=True):
        call = lambda v, amax, out, outer, inner, valid, store=store: store((v,) * 4, out, outer, inner)  # noqa: E731
        got = stored(epilogues.Epilogue(call, 1, 1), inner=inner, stride=stride)
        assert (got["data"], got["scales"]) == ([at // 2], [first + k for k in range(blocks)])
        assert got["given"] == [2 * LAST] * blocks  # both scales in one access


# --- grids ------------------------------------------------------------------------------------------

SIZES = [1, 2, 7, 8, 9, 31, 33, 127, 128, 129, 1024, 1025, 65535 * 2 + 1, 65535 * 128 + 1, 2**27 + 5, LAST]
GRIDS = {
    "row": (lambda m, k: launch.row_shape(m, k, 16), lambda b: (b[1], b[0] * 8)),
    "row, warps": (lambda m, k: launch.row_shape(m, k, 32), lambda b: (b[1], b[0] * 8)),
    "wide row": (lambda m, k: launch.row_shape(m, k, 2, 16), lambda b: (b[1], b[0] * 16)),
    "two block row": (lambda m, k: launch.row_shape(m, k, 1, 32), lambda b: (b[1], b[0] * 32)),
    "band": (launch.band_shape, lambda b: (kernels.BAND, b[0] * 8)),
    "tile 64": (lambda m, k: launch.tile_grid(m, k, 64), lambda b: (tiles.TILE_ROWS, 64)),
    "tile 128": (lambda m, k: launch.tile_grid(m, k, 128), lambda b: (tiles.TILE_ROWS, 128)),
    "columns 16": (lambda m, k: launch.column_grid(m, k, 16), lambda b: (16, kernels.COLUMNS)),
    "columns 128": (lambda m, k: launch.column_grid(m, k, 128), lambda b: (128, kernels.COLUMNS)),
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
