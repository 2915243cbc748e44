"""Blocks that begin elsewhere, and scales at wrong offsets: named, placed, and nothing else gets their names.

test_mutants.py has kernels with these faults; here are all forms of them, at ragged shapes, and what they say.
"""

import ml_dtypes
import numpy as np
import pytest
from two_faults import dump_of

import refops
from refops import oracle
from refops.oracle.conventions.operands import InvertedLayout
from refops.oracle.conventions.placements import GRIDS
from refops.oracle.operation import arrays_of
from refops.tiles import RowLayout
from tiers import sampled

F = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
MXFP8, NVFP4 = refops.MXFP8Scaling(refops.E4M3), refops.NVFP4Scaling()
M, K = 96, 160
ROWS = 160  # of two rows of tiles
NAMES = {"displaced-blocks", "scale-offsets", "interleave-inverted"}


def normal(shape=(M, K), seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(BF16)


def quantized(scaling=MXFP8, shape=(M, K), swizzled=False):
    """(x, arrays of both copies)."""
    x = normal(shape)
    q = refops.quantize(x, scaling, columnwise=True)
    return x, {name: array.copy() for name, array in arrays_of(q.swizzled() if swizzled else q).items()}


def first(x, outputs, scaling=MXFP8, op="quantize", **options):
    report = oracle.check(op, x, outputs, scaling=scaling, **options)
    assert not report.ok
    return report.diagnosis[0] if report.diagnosis else None


# --- where blocks begin -----------------------------------------------------------------------------------------------


def lines_of(block, by, grid, size):
    """Lines whose amax block n has, and those that are cast with it, where blocks begin `by` lines late."""
    line, last = np.arange(size), size // 32 - 1
    number = (line - by) // 32
    if grid == "wrapped":
        number = (line - by) % size // 32
    if grid == "joined":
        number = np.clip(number, 0, last)
    return number == block, (line // 32 if grid == "amax alone" else number) == block


def displaced(x, by, grid):
    """(codes (M, K), scales [block, column]) of such columnwise blocks; x float32 (M, K)."""
    codes, scales = np.zeros(x.shape, np.uint8), np.zeros((M // 32, K), np.uint8)
    for block in range(-1, M // 32 + 1):
        taken, cast = lines_of(block, by, grid, M)
        amax = np.abs(x[taken]).max(axis=0, initial=0)
        byte = refops.encode(amax * F(1 / 448), refops.E8M0, rounding="up")
        codes[cast] = refops.encode(x[cast] * np.exp2(F(127) - byte.astype(F)), refops.E4M3)
        if 0 <= block < len(scales):
            scales[block] = byte
    return codes, scales


CASES = [(by, grid, copy) for by in (16, -16, 8, -8) for grid in GRIDS for copy in ("columnwise", "rowwise")]


@sampled(("by", "grid", "copy"), CASES, 9)
def test_a_displaced_grid_has_its_name_and_copy(by, grid, copy):
    x, outputs = quantized()
    if copy == "rowwise":
        x = np.ascontiguousarray(x.T)
        outputs = arrays_of(refops.quantize(x, MXFP8, columnwise=True))
    codes, scales = displaced((x if copy == "columnwise" else x.T).astype(F), by, grid)
    if copy == "rowwise":
        codes, scales = np.ascontiguousarray(codes.T), scales.T
    padded = outputs[f"{copy}_scale_inv"]
    padded[: scales.shape[0], : scales.shape[1]] = scales
    answer = first(x, outputs | {f"{copy}_data": codes})
    assert answer.names == ("displaced-blocks",) and answer.exact and answer.explained == 1
    assert str(answer.place) == f"the {copy} copy"
    begins = f"begin {abs(by)} line{'s' * (abs(by) > 1)} {'late' if by > 0 else 'early'}"
    assert begins in answer.sentence and answer.sentence.endswith(f"begins at 32 n{GRIDS[grid]}.")


def other_blocks(outputs):
    outputs["columnwise_scale_inv"][: M // 32] = outputs["columnwise_scale_inv"][[1, 2, 0]]


def scales_too_large(outputs):
    outputs["columnwise_scale_inv"][: M // 32] += 1


def random_scales(outputs):
    scales = outputs["columnwise_scale_inv"]
    scales[:3, ::2] = np.random.default_rng(1).permuted(scales[:3, ::2], axis=0)


def larger_blocks(outputs):
    scales = outputs["columnwise_scale_inv"]
    scales[:2] = scales[:2].max(axis=0)


def codes_16_rows_late(outputs):
    outputs["columnwise_data"] = np.roll(outputs["columnwise_data"], 16, axis=0)


@sampled("fault", [other_blocks, codes_16_rows_late, scales_too_large, random_scales, larger_blocks], 3)
def test_other_faults_of_blocks_get_other_names(fault):
    x, outputs = quantized()
    fault(outputs)
    answer = first(x, outputs)
    assert answer is None or not NAMES & set(answer.names), str(answer)


# --- whose scale a block is cast with ---------------------------------------------------------------------------------

BLOCKS_2D = refops.BlockScaling(refops.E4M3, 2)
FLOAT_2D = refops.BlockScaling(refops.E5M2, 2, power_2_scale=False)
MX_2D = refops.MXFP8Scaling(refops.E4M3, two_d=True)
NV_2D = refops.NVFP4Scaling(two_d=True)
LARGEST = np.finfo(F).max


def uneven(shape, seed=4, dtype=BF16):
    """Values whose blocks have amaxes far apart, blocks of 16, of 32 and of 128."""
    rng, sizes = np.random.default_rng(seed), np.ones(shape)
    for edge in (16, 32, 128):
        own = np.exp2(rng.uniform(-2.5, 2.5, tuple(-(-size // edge) for size in shape)))
        sizes *= own.repeat(edge, axis=0).repeat(edge, axis=1)[: shape[0], : shape[1]]
    return (rng.standard_normal(shape) * sizes).astype(dtype)


def of_blocks(values, edges):
    """Each block's entry, repeated over its elements."""
    return values.repeat(edges[0], axis=0).repeat(edges[1], axis=1)


def multipliers(x, scaling):
    """(what each block of the rowwise copy is multiplied by, edges of a block), from float32 x."""
    edges = scaling.layout.block
    padded = np.pad(x, [(0, -size % edge) for size, edge in zip(x.shape, edges, strict=True)])
    rows, columns = (size // edge for size, edge in zip(padded.shape, edges, strict=True))
    amax = np.abs(padded).reshape(rows, edges[0], columns, edges[1]).max(axis=(1, 3))
    if isinstance(scaling, refops.BlockScaling):
        encode = (F(scaling.fmt.max) / amax).astype(F)
        return np.exp2(np.floor(np.log2(encode))) if scaling.power_2_scale else encode, edges
    if isinstance(scaling, refops.MXFP8Scaling):
        return np.exp2(F(127) - refops.encode(amax * F(1 / 448), refops.E8M0, rounding="up").astype(F)), edges
    encode = F(448 * 6) / amax.max()
    scales = refops.decode(refops.encode(amax * (encode * (F(1) / F(6))), refops.E4M3), refops.E4M3)
    return np.minimum(F(1) / (scales * (F(1) / encode)), LARGEST).astype(F), edges


def cast(x, factor, scaling):
    """The codes of x times a factor for each element, packed where the format is."""
    with np.errstate(over="ignore"):
        codes = refops.encode((x * factor).astype(F), scaling.fmt)
    packed = scaling.layout.packed == 2 and codes.shape == x.shape
    return codes[:, 0::2] | codes[:, 1::2] << 4 if packed else codes


def with_codes_of(x, scaling, change):
    """The rowwise copy, its codes cast with changed multipliers of the blocks, which are (rows, columns)."""
    wide, (factor, edges) = x.astype(F), multipliers(x.astype(F), scaling)
    outputs = arrays_of(refops.quantize(x, scaling))
    own = cast(wide, of_blocks(factor, edges)[: x.shape[0], : x.shape[1]], scaling)
    assert np.array_equal(own, outputs["rowwise_data"])
    moved = of_blocks(np.ascontiguousarray(change(factor)), edges)[: x.shape[0], : x.shape[1]]
    return outputs | {"rowwise_data": cast(wide, moved, scaling)}


def exchanged(blocks):
    return blocks.T


def in_squares_of(edge, of_zeros):
    """`of_zeros`: the multiplier of a block of zeros, which those beyond the tensor are."""

    def change(blocks):
        made = blocks.copy()
        for i, j in np.ndindex(blocks.shape):
            there = i // edge * edge + j % edge, j // edge * edge + i % edge
            inside = all(n < size for n, size in zip(there, blocks.shape, strict=True))
            made[i, j] = blocks[there] if inside else of_zeros
        return made

    return change


def counted_along_rows(blocks):
    rows, columns = blocks.shape
    return np.array([[blocks.flat[j * columns + i] for j in range(columns)] for i in range(rows)])


def counted_as_if_transposed(blocks):
    rows, columns = blocks.shape
    return np.array([[blocks.flat[j * rows + i] for j in range(columns)] for i in range(rows)])


def lying_transposed(blocks):
    return blocks.T.reshape(blocks.shape)


TRANSPOSED = {
    "squares of 128": (BLOCKS_2D, (512, 512), exchanged, "block [j, i],", BF16),
    "ragged squares": (BLOCKS_2D, (450, 400), exchanged, "block [j, i],", F),
    "float32 scales": (FLOAT_2D, (256, 256), exchanged, "block [j, i],", BF16),
    "32 x 32": (MX_2D, (224, 224), exchanged, "block [j, i],", np.dtype(np.float16)),
    "16 x 16": (NV_2D, (160, 160), exchanged, "block [j, i],", BF16),
    "16 x 16 in tiles": (NV_2D, (160, 352), in_squares_of(8, LARGEST), "of its tile of 128 x 128 elements", BF16),
    "16 x 16 in small tiles": (NV_2D, (160, 352), in_squares_of(4, LARGEST), "of its tile of 64 x 64 elements", F),
    "32 x 32 in tiles": (MX_2D, (224, 384), in_squares_of(4, F(2.0**127)), "of its tile of 128 x 128 elements", BF16),
    "more rows": (BLOCKS_2D, (512, 384), counted_along_rows, "the block at place 3 j + i, counted along rows:", BF16),
    "other stride": (
        BLOCKS_2D,
        (384, 640),
        counted_as_if_transposed,
        "the block at place 3 j + i, counted along rows,",
        BF16,
    ),
    "rows of 32": (MXFP8, (M, K), counted_along_rows, "the block at place 5 j + i, counted along rows:", BF16),
    "rows of 16": (NVFP4, (M, K), counted_as_if_transposed, "the block at place 96 j + i, counted along rows,", F),
    "rows of 32, stored transposed": (
        MXFP8,
        (M, K),
        lying_transposed,
        "the block at place 5 i + j, counted along columns,",
        BF16,
    ),
}


@sampled("case", TRANSPOSED, 3)
def test_codes_cast_with_the_scale_of_the_transposed_block(case):
    scaling, shape, change, said, dtype = TRANSPOSED[case]
    x = uneven(shape, dtype=dtype)
    answer = first(x, with_codes_of(x, scaling, change), scaling)
    assert answer.names == ("multiplier-of-transposed-block",) and answer.explained > 0.99, str(answer)
    assert said in answer.sentence and "though the stored scales are right" in answer.sentence


def test_one_copy_cast_with_transposed_scales():
    x = uneven((512, 512))
    q = refops.quantize(x, BLOCKS_2D, columnwise=True)
    answer = first(x, arrays_of(q) | with_codes_of(x, BLOCKS_2D, exchanged), BLOCKS_2D)
    assert answer.names == ("multiplier-of-transposed-block",) and str(answer.place) == "the rowwise copy"


def one_block_on(blocks):
    return np.roll(blocks, 1, axis=1)


def shuffled(blocks):
    return np.random.default_rng(6).permuted(blocks, axis=1)


def reversed_blocks(blocks):
    return blocks[::-1, ::-1]


def twice(blocks):
    return blocks * 2


def two_exchanged(blocks):
    made = blocks.copy()
    made[0, 1], made[1, 0] = blocks[1, 0], blocks[0, 1]
    return made


OTHERS = [one_block_on, shuffled, reversed_blocks, twice, two_exchanged]


@sampled(("change", "scaling"), [(change, scaling) for change in OTHERS for scaling in (BLOCKS_2D, MX_2D, NV_2D)], 6)
def test_codes_cast_with_other_scales_are_not_called_transposed(change, scaling):
    x = uneven((512, 512) if scaling is BLOCKS_2D else (160, 160))
    answer = first(x, with_codes_of(x, scaling, change), scaling)
    assert answer is None or "multiplier-of-transposed-block" not in answer.names, str(answer)


def test_two_powers_of_two_that_are_exchanged_are_no_evidence_of_a_transposition():
    x = uneven((256, 256))
    answer = first(x, with_codes_of(x, BLOCKS_2D, exchanged), BLOCKS_2D)
    assert answer is None or "multiplier-of-transposed-block" not in answer.names, str(answer)


# --- where scales are written -----------------------------------------------------------------------------------------


def offsets(rows, columns, tiles):
    """Offsets in the order of GEMMs, of which `tiles` tiles make a row."""
    i, j = np.indices((rows, columns))
    return (i // 128 * tiles + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4


def written(scales, offset, shape, filler, *, first_stays=False):
    """Bytes of an array with scales at offsets; `filler` elsewhere, and what lies beyond its end is lost."""
    memory = np.full(shape, filler, np.uint8).reshape(-1)
    at, values = offset.reshape(-1), scales.reshape(-1)
    for place, value in zip(*(v[::-1] if first_stays else v for v in (at.tolist(), values.tolist())), strict=True):
        if place < len(memory):
            memory[place] = value
    return memory.reshape(shape)


@sampled(
    ("scaling", "filler", "first_stays"),
    [(MXFP8, 0, False), (NVFP4, 0xAB, False), (MXFP8, 0, True), (NVFP4, 0, True)],
    2,
)
def test_tiles_of_a_row_that_are_floored(scaling, filler, first_stays):
    shape = (ROWS, 352)
    x, outputs = quantized(scaling, shape, swizzled=True)
    plain = refops.quantize(x, scaling).rowwise_scale_inv
    blocks = 352 // scaling.layout.block[1]
    offset = offsets(ROWS, blocks, blocks // 4)
    scales = written(plain[:ROWS, :blocks], offset, plain.shape, filler, first_stays=first_stays)
    answer = first(x, outputs | {"rowwise_scale_inv": scales}, scaling, swizzled_scales=True)
    assert answer.names == ("scale-offsets",) and answer.exact
    said = f"{blocks // 4} tiles count as a row of tiles, where its {blocks} blocks of scales fill {blocks // 4 + 1}"
    assert said in answer.sentence


def test_columnwise_scales_at_offsets_of_their_stored_order():
    x, outputs = quantized(swizzled=True)
    plain = refops.quantize(x, MXFP8, rowwise=False, columnwise=True).columnwise_scale_inv
    offset = offsets(3, K, plain.shape[1] // 4)
    wrong = written(plain[:3, :K], offset, plain.shape, 0)
    answer = first(x, outputs | {"columnwise_scale_inv": wrong}, swizzled_scales=True)
    assert answer.names == ("scale-offsets",) and answer.exact and "as stored" not in str(answer.place)
    assert "stored order [block, column]" in answer.sentence
    viewed = refops.swizzle(plain.reshape(plain.shape[::-1])).reshape(plain.shape)
    answer = first(x, outputs | {"columnwise_scale_inv": viewed}, swizzled_scales=True)
    assert answer.names == ("scales-swizzled-as-stored",) and answer.exact
    assert "as if their array [block, column] were [column, block]" in answer.sentence


@sampled(("shape", "said"), [((M, K), True), ((M, K), False), ((256, 512), False), ((256, 512), True)], 2)
def test_rows_of_a_tile_in_the_inverse_order(shape, said):
    x, outputs = quantized(shape=shape, swizzled=said)
    for name, plain in arrays_of(refops.quantize(x, MXFP8, columnwise=True)).items():
        if name.endswith("_scale_inv"):
            outer = plain.T if name.startswith("columnwise") else plain
            rows, columns = outer.shape
            tiles = np.ascontiguousarray(outer).reshape(rows // 128, 32, 4, columns // 4, 4)
            outputs[name] = np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(plain.shape)
    answer = first(x, outputs, swizzled_scales=said)
    assert answer.names == ("scales-swizzled-otherwise",) and answer.exact and answer.place is None
    assert "the inverse of the order" in answer.sentence


@sampled("fault", ["zeros", "one tile lost", "random"], 3)
def test_other_faults_of_scales_get_other_names(fault):
    x, outputs = quantized(shape=(ROWS, 352), swizzled=True)
    for name in ("rowwise_scale_inv", "columnwise_scale_inv"):
        memory = outputs[name].reshape(-1)
        if fault == "zeros":
            memory[:] = 0
        elif fault == "one tile lost":
            memory[512:1024] = 0
        else:
            memory[:] = np.random.default_rng(2).permutation(memory)
    answer = first(x, outputs, swizzled_scales=True)
    assert answer is None or not NAMES & set(answer.names), str(answer)


# --- E8M0 in NVFP4 ----------------------------------------------------------------------------------------------------


@sampled(("rounded", "words", "zero"), [(np.ceil, ", rounded up", 28), (np.floor, ", cut", 0)], 2)
def test_exponents_where_e4m3_scales_belong(rounded, words, zero):
    x = normal()
    x[:40] = 0
    outputs = arrays_of(refops.quantize(x, NVFP4, columnwise=True))
    for name in ("rowwise_scale_inv", "columnwise_scale_inv"):
        scale = refops.decode(outputs[name], refops.E4M3)
        with np.errstate(divide="ignore"):
            outputs[name] = np.where(scale == 0, zero, rounded(np.log2(scale)) + 127).astype(np.uint8)
    answer = first(x, outputs, NVFP4)
    assert answer.names == ("other-scale-format",) and answer.exact
    assert f"The scales are E8M0{words}, where E4M3 was asked for" in answer.sentence
    assert ("one of 0 becomes 0x1C" in answer.sentence) == (zero == 28)


# --- the interleave of gates ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("run", "tile"), [(32, 256), (32, 768), (64, 512)])
def test_an_inverted_layout_is_the_inverse_of_the_interleave(run, tile):
    layout, half = InvertedLayout(run, tile), tile // 2
    h = np.arange(2 * half)  # of two tiles
    own = np.concatenate([RowLayout(run).columns(np.arange(half), gate) for gate in (False, True)])
    inverse = np.argsort(own)
    for gate in (False, True):
        columns = layout.columns(h, np.full(h.shape, gate))
        assert np.array_equal(columns, np.concatenate([inverse[gate * half :][:half] + start for start in (0, tile)]))
        is_gate, place = layout.locate(columns)
        assert (is_gate == gate).all() and np.array_equal(place, h)
    small = InvertedLayout(run, 4 * run)  # its own inverse
    assert np.array_equal(small.columns(h[:run], np.bool_(True)), RowLayout(run).columns(h[:run], True))


@pytest.mark.parametrize("side", ["x", "dx alone"])
def test_an_inverted_interleave_has_its_name(side):
    run, tile, width = 32, 256, 768
    x, dy = normal((96, width)), normal((96, width // 2), 1)
    parts = {"run": x.reshape(96, -1, 2, run), "tile": x.reshape(96, -1, 2, 4, run).swapaxes(2, 3)}
    taken = parts["tile" if side == "x" else "run"].reshape(96, -1, 2, 128 if side == "x" else run)
    act_and_gate = np.concatenate([taken[:, :, 0].reshape(96, -1), taken[:, :, 1].reshape(96, -1)], axis=1)
    scales, params = np.ones(96, F), {"glu_interleave_size": run}
    if side == "x":
        outputs = {"y": refops.activation("swiglu", act_and_gate)}
        answer = first({"x": x, "row_scales": scales}, outputs, None, "scaled_swiglu", params=params)
    else:
        right = refops.activation_grad("swiglu", dy, act_and_gate)
        halves = np.concatenate([half.reshape(96, -1, 1, 128) for half in np.split(right, 2, axis=1)], axis=2)
        dx = halves.reshape(96, -1, 4, 2, run).swapaxes(2, 3).reshape(96, width)
        inputs = {"dy": dy, "x": x, "row_scales": scales}
        answer = first(inputs, {"dx": dx}, None, "scaled_dswiglu", params=params)
    assert answer.names == ("interleave-inverted",) and answer.explained == 1
    assert answer.sentence.startswith(f"Each {tile} columns of {side} are permuted")


def test_scales_of_another_format_are_cut_with_the_codes():
    """Two faults of one kernel, in either order: the other format takes over how the scale's cast rounds."""
    other, cut = ("other-scale-format", (refops.UE5M3, "both", "nearest_even")), ("truncation", "cast and scales")
    (_, nearest), (_, one), (_, two) = (
        dump_of("quantize", NVFP4, False, *faults) for faults in ((other,), (other, cut), (cut, other))
    )
    below = nearest["rowwise_scale_inv"].astype(int) - one["rowwise_scale_inv"]
    assert set(np.unique(below)) == {0, 1}
    assert all(np.array_equal(array, two[name]) for name, array in one.items())
