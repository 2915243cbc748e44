"""Properties that must hold for every tensor, tried on tensors that hypothesis makes (the same ones every run).

"Spec" and its sections are those of docs/spec/quantization.md.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from independent import BF16, DTYPES, FP32, SCALINGS, F, random_tensor
from rule_calls import nvfp4, scale_byte, scale_from_amax

import refops
from arrays import assert_same_bits, assert_same_quantized
from refops import E2M1, E8M0, decode, dequantize, encode, quantize
from refops.tiles import tile_elements
from tiers import sampled

#: Same examples on every run; no time limits, since a busy machine is no fault.
profile = settings(
    derandomize=True, deadline=None, max_examples=40, database=None, suppress_health_check=[HealthCheck.too_slow]
)
NEAREST = [name for name in SCALINGS if "-sr" not in name and "rht" not in name]

dtypes = st.sampled_from(list(DTYPES.values()))
sixteens = st.tuples(st.integers(1, 9).map(lambda n: 32 * n), st.integers(1, 9).map(lambda n: 32 * n))
ragged = st.tuples(st.integers(1, 300), st.integers(1, 300))
seeds = st.integers(0, 2**32 - 1)


def shapes_for(name):
    """Shapes that a scaling takes."""
    return sixteens if SCALINGS[name].layout.shape_multiple > 1 else ragged


@st.composite
def tensors(draw, name="mxfp8", spread=None):
    """A finite tensor for a scaling: dense random values, or sparse ones with any bit patterns."""
    shape, dtype, seed = draw(shapes_for(name)), draw(dtypes), draw(seeds)
    spread = draw(st.sampled_from([0.0, 3.0, 12.0])) if spread is None else spread
    x = random_tensor(shape, dtype, seed, min(spread, 8.0) if dtype == DTYPES["fp16"] else spread)
    if draw(st.booleans()):  # some elements of any magnitude
        pattern = draw(hnp.arrays(np.uint16, min(8, x.size), elements=st.integers(0, 0x7F7F)))
        places = np.random.default_rng(seed).choice(x.size, len(pattern), replace=False)
        x.reshape(-1)[places] = np.clip(pattern.view(BF16).astype(F), -65504, 65504).astype(dtype)
    return x


def scales_by_element(q, columnwise=False):
    """The float64 decode scale of every element of the (M, K) matrix, found by the declared layout."""
    scaling, (m, k) = q.scaling, q.matrix_shape
    row, column = np.indices((m, k))
    stored = q.columnwise_scale_inv if columnwise else q.rowwise_scale_inv
    outer, inner = (column, row) if columnwise else (row, column)
    layout = scaling.layout
    if layout.block is None:
        return np.full((m, k), float(stored[0]))
    index = outer // (1 if layout.repeated else layout.block[0]), inner // layout.block[1]
    found = stored[index[::-1] if layout.scales_inner_first[columnwise] else index]
    found = (found if layout.scale_format is None else decode(found, layout.scale_format)).astype(np.float64)
    if not layout.two_level:
        return found
    amax = (q.amax_columnwise if columnwise else q.amax_rowwise).astype(np.float64)
    return found * (amax[outer] if layout.amax == "rows" else amax[0]) / (6 * scaling.e4m3_max)


def roundings(scaling):
    """How many float32 operations between x and its dequantized value are inexact."""
    if scaling.layout.scale_format is E8M0 or scaling.power_2_scale:
        return 0  # every factor is a power of two
    if scaling.layout.two_level:
        # Encode: S_enc, 1 / S_enc, times the block's scale, reciprocal, times x.
        # Decode: scale * amax, 1 / (6 e4m3_max), their product, times the code's value.
        return 5 + 4
    return 3  # x * scale, 1 / scale, times the code's value


@sampled("name", NEAREST, 7)
@profile
@given(data=st.data())
def test_dequantized_is_within_half_a_step(name, data):
    """|x - dequantize(quantize(x))| <= half the format's step at x / scale, times scale; beyond the range |x| - max.

    Each float32 operation on the way errs by 2^-24 of |x|: by it x * scale falls on the other side of a tie, or the
    result is off (`roundings`). The last 2^-149 is a subnormal result's.
    """
    x = data.draw(tensors(name))
    scaling = SCALINGS[name]
    q = quantize(x, scaling, columnwise=True)
    fmt = scaling.fmt
    x64 = x.astype(np.float64)
    for columnwise in (False, True):
        view = replace(q, rowwise_data=None) if columnwise else q
        back = dequantize(view).astype(np.float64)
        scale = scales_by_element(q, columnwise)
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = np.where(scale > 0, np.abs(x64) / scale, 0)
        binade = np.floor(np.log2(np.maximum(scaled, float(fmt.smallest_normal))))
        half_step = np.exp2(binade - fmt.mantissa_bits - 1)
        beyond = np.maximum(scaled - float(fmt.max), 0)
        slack = roundings(scaling) * 2.0**-24 * np.abs(x64) + 2.0**-149
        allowed = np.maximum(half_step, beyond) * scale + slack
        # NVFP4: a block whose scale amax * (S_enc * 1/6), four roundings, is below 2^-10 and becomes 0 (spec 6.3).
        lost = scale == 0
        if lost.any():
            amax = (
                np.abs(x64).max()
                if not scaling.row_scaled
                else np.abs(x64).max(axis=int(not columnwise), keepdims=True)
            )
            largest = 2.0**-10 * 6 / np.where(amax > 0, 6 * scaling.e4m3_max / np.where(amax > 0, amax, 1), 1)
            allowed = np.where(lost, largest * (1 + 4 * 2.0**-24), allowed)
        assert (np.abs(back - x64) <= allowed).all()


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8-e5m2", "mxfp8-2d", "mxfp6-e3m2", "mxfp6-e2m3"])
@profile
@given(data=st.data())
def test_mxfp8_keeps_what_it_made(name, data):
    """Spec 7: a dequantized tensor quantizes to itself."""
    once = dequantize(quantize(data.draw(tensors(name)), SCALINGS[name]))
    assume(np.isfinite(once).all())
    again = dequantize(quantize(once, SCALINGS[name]))
    assert_same_bits(np.where(once == 0, F(0), again), np.where(once == 0, F(0), once))


@profile
@given(amax=hnp.arrays(np.uint32, 50, elements=st.integers(1, 0x7F7FFFFF)))
@pytest.mark.parametrize("fmt", [refops.E4M3, refops.E5M2], ids=repr)
@pytest.mark.parametrize("power_2", [False, True])
def test_scale_falls_as_amax_grows(fmt, power_2, amax):
    amax = np.sort(amax.view(F))
    scale = scale_from_amax(amax, fmt, power_2=power_2)
    assert (np.diff(scale) <= 0).all()
    # Nothing saturates by more than a rounding: amax * scale <= max (1 + 2^-24).
    finite = float(fmt.max) / amax.astype(np.float64) < np.finfo(F).max  # the others got the largest scale
    product = amax.astype(np.float64) * scale.astype(np.float64)
    assert (product[finite] <= float(fmt.max) * (1 + 2.0**-24)).all()
    if power_2:
        fraction, _ = np.frexp(scale)
        assert (fraction == 0.5).all()
        normal = (scale >= 2.0**-126) & (scale <= 2.0**126)
        assert (scale[normal] * (F(1) / scale[normal]) == 1).all()
        assert (product[finite] * 2 > float(fmt.max) * (1 - 2.0**-23)).all()


@profile
@given(amax=hnp.arrays(np.uint32, 50, elements=st.integers(0, 0x7F800000)))
@sampled(
    ("fmt", "rounding"),
    product([refops.E4M3, refops.E5M2, refops.E3M2, refops.E2M3], ["up", "floor", "even", "ceil_ocp"]),
    3,
    ids=str,
)
def test_mx_scale_byte_grows_with_amax(fmt, rounding, amax):
    amax = np.sort(amax.view(F))
    byte = scale_byte(amax, fmt, rounding).astype(int)
    assert (np.diff(byte) >= 0).all() and byte.max() <= 254
    steps = {r: scale_byte(amax, fmt, r).astype(int) for r in ("floor", "even", "ceil_ocp")}
    assert (steps["floor"] <= steps["even"]).all() and (steps["even"] <= steps["ceil_ocp"]).all()
    assert (steps["ceil_ocp"] - steps["floor"] <= 1).all()


@profile
@given(
    amax=hnp.arrays(np.uint32, 50, elements=st.integers(0, 0x7F800000)),
    tensor_amax=st.integers(0, 0x7F800000),
    e4m3_max=st.sampled_from([448, 256]),
)
def test_nvfp4_block_scale_grows_with_the_block(amax, tensor_amax, e4m3_max):
    amax = np.sort(amax.view(F))
    with np.errstate(all="ignore"):
        rule = nvfp4(e4m3_max)
        s_enc, _ = both = rule.tensor(np.array([tensor_amax], np.uint32).view(F))
        assert np.isfinite(s_enc).all() and s_enc > 0
        byte = rule.byte(amax, both).astype(int)
    assert (np.diff(byte) >= 0).all() and byte.max() <= 0x7E


@sampled(
    ("fmt", "rounding"),
    product(refops.FORMATS.values(), ["nearest_even", "nearest_away", "toward_zero", "up", "down"]),
    3,
    ids=str,
)
@profile
@given(patterns=hnp.arrays(np.uint32, 200, elements=st.integers(0, 2**32 - 1)))
def test_encode_is_monotone_and_idempotent(fmt, rounding, patterns):
    x = patterns.view(F)
    x = np.sort(x[~np.isnan(x)])
    x = x if fmt.signed else np.abs(x)[np.argsort(np.abs(x))]
    codes = encode(x, fmt, rounding=rounding)
    values = decode(codes, fmt)
    assert (np.diff(values) >= 0).all()
    assert_same_bits(encode(values, fmt, rounding=rounding), codes)


# --- symmetries -----------------------------------------------------------------------------------------


# 4over6 of a tile chooses by a sum of errors in the tensor's own order: the transposed tile's may round otherwise.
@sampled("name", [n for n in SCALINGS if n not in ("nvfp4-row", "nvfp4-mse-2d")], 7)
@profile
@given(data=st.data())
def test_columnwise_of_x_is_rowwise_of_its_transpose(name, data):
    """True wherever TE says so: per tensor, blocks, MXFP8 (up to its orientation), NVFP4 without RHT.

    Stochastic rounding: with the same random bytes. RHT: the transposed tensor must go through the transform first.
    """
    x = data.draw(tensors(name))
    scaling = SCALINGS[name]
    transposed = np.ascontiguousarray(x.T)
    if scaling.random is not None:
        drawn = np.random.default_rng(1).integers(0, 256, transposed.shape, dtype=np.uint8)
        scaling = replace(scaling, random_bits=drawn)
    column = quantize(x, scaling, rowwise=False, columnwise=True)
    if scaling.hadamard is not None:
        transposed = refops.hadamard_transform(transposed, scaling.hadamard)
    row = quantize(transposed, scaling)
    data_, scales, layout = column.columnwise_data, column.columnwise_scale_inv, scaling.layout
    turned = layout.scales_inner_first[0] != layout.scales_inner_first[1]
    assert_same_bits(data_ if layout.columnwise_transposed else np.ascontiguousarray(data_.T), row.rowwise_data)
    assert_same_bits(np.ascontiguousarray(scales.T) if turned else scales, row.rowwise_scale_inv)
    assert_same_bits(column.amax_columnwise, row.amax_rowwise)


@pytest.mark.parametrize("name", ["block-2d", "mxfp8-2d", "mxfp6-e2m3", "nvfp4-2d", "nvfp4-mse-2d"])
@profile
@given(data=st.data())
def test_two_d_scales_give_one_set_of_codes(name, data):
    """Rowwise and columnwise codes of 2-D scalings are each other's transposes."""
    q = quantize(data.draw(tensors(name)), SCALINGS[name], columnwise=True)
    row, column = q.rowwise_data, q.columnwise_data
    if q.scaling.layout.packed == 2:
        row, column = refops.unpack_fp4(row), refops.unpack_fp4(column)
    assert_same_bits(row, np.ascontiguousarray(column.T) if q.scaling.layout.columnwise_transposed else column)


def rows_of(q, index):
    """Codes and valid scales of some rows of a rowwise result."""
    scales = q.rowwise_scale_inv
    inner_first, _ = q.scaling.layout.scales_inner_first
    return q.rowwise_data[index], scales[:, index] if inner_first else scales[index]


ROW_LOCAL = ["block-1d", "block-1d-f32", "mxfp8", "mxfp8-even", "mxfp6-e3m2", "nvfp4-row", "nvfp4-mae-256", "nvfp4"]


@pytest.mark.parametrize("name", ROW_LOCAL)
@profile
@given(data=st.data())
def test_permuting_rows_permutes_the_result(name, data):
    """Rowwise blocks lie within a row, so their order does not matter (the tensor's amax has none)."""
    x = data.draw(tensors(name))
    order = np.random.default_rng(data.draw(seeds)).permutation(len(x))
    original, permuted = quantize(x, SCALINGS[name]), quantize(x[order], SCALINGS[name])
    m = len(x)
    for actual, expected in zip(rows_of(permuted, slice(0, m)), rows_of(original, order), strict=True):
        assert_same_bits(actual, np.ascontiguousarray(expected))


BLOCK_WIDTH = {"block-1d": 128, "block-2d": 128, "mxfp8": 32, "mxfp8-2d": 32, "nvfp4": 16, "nvfp4-2d": 16}


@pytest.mark.parametrize("name", BLOCK_WIDTH)
@profile
@given(seed=seeds, dtype=dtypes)
def test_permuting_blocks_along_k_permutes_codes_and_scales(name, seed, dtype):
    width = BLOCK_WIDTH[name]
    x = random_tensor((128, 8 * width), dtype, seed)
    order = np.random.default_rng(seed).permutation(8)
    shuffled = x.reshape(128, 8, width)[:, order].reshape(x.shape)
    original, permuted = quantize(x, SCALINGS[name]), quantize(shuffled, SCALINGS[name])
    codes = original.rowwise_data.reshape(128, 8, -1)[:, order].reshape(original.rowwise_data.shape)
    assert_same_bits(permuted.rowwise_data, np.ascontiguousarray(codes))
    axis = 0 if name == "block-1d" else 1
    scales = np.take(original.rowwise_scale_inv, order, axis=axis)
    assert_same_bits(np.take(permuted.rowwise_scale_inv, np.arange(8), axis=axis), scales)


@pytest.mark.parametrize("name", ["block-1d", "mxfp8", "mxfp8-e5m2", "nvfp4-row"])
@profile
@given(data=st.data())
def test_a_column_never_depends_on_its_neighbours(name, data):
    """Columnwise results of some columns are the same when the others are replaced, with NaN and inf even."""
    x = data.draw(tensors(name))
    k = x.shape[1]
    keep = np.random.default_rng(data.draw(seeds)).random(k) < 0.5
    other = x.copy()
    other[:, ~keep] = np.array([np.nan, np.inf, -1e4, 0], F).astype(x.dtype)[np.arange((~keep).sum()) % 4]
    a, b = (quantize(t, SCALINGS[name], rowwise=False, columnwise=True) for t in (x, other))
    columns = np.flatnonzero(keep)
    if name.startswith("mxfp8"):
        pairs = [(q.columnwise_data[:, columns], q.columnwise_scale_inv[:, columns]) for q in (a, b)]
    elif name == "block-1d":
        pairs = [(q.columnwise_data[columns], q.columnwise_scale_inv[:, columns]) for q in (a, b)]
    else:
        pairs = [
            (q.columnwise_data[columns], q.columnwise_scale_inv[columns], q.amax_columnwise[columns]) for q in (a, b)
        ]
    for p, r in zip(*pairs, strict=True):
        assert np.array_equal(p, r)


@profile
@given(seed=seeds, dtype=dtypes, rows=st.integers(1, 300))
def test_a_columns_bias_gradient_never_depends_on_its_neighbours(seed, dtype, rows):
    x = random_tensor((rows, 40), dtype, seed)
    other = x.copy()
    other[:, ::2] = np.array(np.nan, F).astype(dtype)
    _, dbias = quantize(x, SCALINGS["mxfp8"], dbias=True)
    _, changed = quantize(other, SCALINGS["mxfp8"], dbias=True)
    _, alone = quantize(np.ascontiguousarray(x[:, 1::2]), SCALINGS["mxfp8"], dbias=True)
    assert_same_bits(dbias[1::2].copy(), changed[1::2].copy())
    assert_same_bits(dbias[1::2].copy(), alone)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-rht", "nvfp4-mse-448"])
@profile
@given(seed=seeds, dtype=dtypes)
def test_nvfp4_blocks_depend_on_others_through_the_amax_only(name, seed, dtype):
    """With the maximum kept in place, every other block may change without a trace in the rest."""
    x = np.clip(random_tensor((64, 96), dtype, seed).astype(F), -50, 50).astype(dtype)
    x[:16, 0] = np.array(64.0, F).astype(dtype)
    x[:16, 1:16] = 0
    other = x.copy()
    other[32:, 48:] = random_tensor((32, 48), dtype, seed + 1, spread=0)
    a, b = (quantize(t, SCALINGS[name], columnwise=True) for t in (x, other))
    assume(a.amax_columnwise[0] == b.amax_columnwise[0] and a.amax_rowwise[0] == b.amax_rowwise[0])
    assert np.array_equal(a.rowwise_data[:32], b.rowwise_data[:32])
    assert np.array_equal(a.rowwise_data[:, :24], b.rowwise_data[:, :24])
    assert np.array_equal(a.rowwise_scale_inv[:32], b.rowwise_scale_inv[:32])
    assert np.array_equal(a.columnwise_data[:48], b.columnwise_data[:48])
    assert np.array_equal(a.columnwise_data[:, :16], b.columnwise_data[:, :16])
    assert np.array_equal(a.columnwise_scale_inv[:, :2], b.columnwise_scale_inv[:, :2])


@sampled("name", [n for n in NEAREST if "delayed" not in n and "alone" not in n], 5)
@profile
@given(data=st.data(), shift=st.integers(-12, 12))
def test_a_power_of_two_moves_the_scales_and_no_code(name, data, shift):
    """All arithmetic is relative to the amax, so codes stay and dequantized values scale exactly (epsilon aside)."""
    shape = data.draw(shapes_for(name))
    x = np.clip(random_tensor(shape, FP32, data.draw(seeds), spread=2.0), -1e3, 1e3)
    scaling = SCALINGS[name]
    if "amax_epsilon" in scaling.at_run_time:
        scaling = replace(scaling, amax_epsilon=0.0)
    a, b = quantize(x, scaling, columnwise=True), quantize(np.ldexp(x, shift).astype(F), scaling, columnwise=True)
    assert_same_bits(a.rowwise_data, b.rowwise_data)
    assert_same_bits(a.columnwise_data, b.columnwise_data)
    assert_same_bits(np.ldexp(dequantize(a), shift).astype(F), dequantize(b))


@sampled("name", SCALINGS, 7)
@profile
@given(data=st.data())
def test_negation_flips_the_sign_bits(name, data):
    """Nearest rounding and truncating dither are symmetric; scales and amaxes do not see signs."""
    x = data.draw(tensors(name))
    scaling = SCALINGS[name]
    a, b = quantize(x, scaling), quantize(-x, scaling)
    flip = {1: 1 << (scaling.fmt.bits - 1), 2: 0x88}[scaling.layout.packed]
    complement = scaling.fmt == refops.INT8
    assert_same_bits(np.uint8(0) - a.rowwise_data if complement else a.rowwise_data ^ np.uint8(flip), b.rowwise_data)
    assert_same_bits(a.rowwise_scale_inv, b.rowwise_scale_inv)
    assert_same_bits(a.amax_rowwise, b.amax_rowwise)


@profile
@given(seed=seeds, dtype=dtypes)
def test_row_scaled_is_each_row_alone(seed, dtype):
    """A row under `row_scaled` is what it would be in a tensor of nothing but itself."""
    x = random_tensor((32, 64), dtype, seed)
    q = quantize(x, SCALINGS["nvfp4-row"])
    for i in (0, 13, 31):
        alone = quantize(np.repeat(x[i : i + 1], 16, axis=0), SCALINGS["nvfp4"])
        assert np.array_equal(q.rowwise_data[i], alone.rowwise_data[0])
        assert np.array_equal(q.rowwise_scale_inv[i], alone.rowwise_scale_inv[0])
        assert q.amax_rowwise[i] == alone.amax_rowwise[0]


@pytest.mark.parametrize("name", ["nvfp4-sr", "nvfp4-sr-2d"])
@profile
@given(data=st.data())
def test_stochastic_codes_are_neighbours_of_the_scaled_value(name, data):
    """Scales are those of nearest rounding; each code is the lower or the upper neighbour; the bytes decide."""
    x = data.draw(tensors(name))
    scaling = SCALINGS[name]
    q = quantize(x, scaling, columnwise=True)
    plain = quantize(x, replace(scaling, stochastic_rounding=False), columnwise=True)
    assert_same_bits(q.rowwise_scale_inv, plain.rowwise_scale_inv)
    assert_same_bits(q.columnwise_scale_inv, plain.columnwise_scale_inv)
    zeros = np.zeros(x.shape, np.uint8)
    low = quantize(x, replace(scaling, random_bits=(zeros, zeros.T)), columnwise=True)
    high = quantize(x, replace(scaling, random_bits=(~zeros, ~zeros.T)), columnwise=True)
    for direction in ("rowwise_data", "columnwise_data"):
        magnitude, least, most = (refops.unpack_fp4(getattr(r, direction)) & 7 for r in (q, low, high))
        nearest = refops.unpack_fp4(getattr(plain, direction)) & 7
        assert ((least <= magnitude) & (magnitude <= most) & (most <= least + 1)).all()
        assert ((least <= nearest) & (nearest <= least + 1)).all()


@profile
@given(seed=seeds, philox_seed=st.integers(0, 2**64 - 1), offset=st.integers(0, 2**64 - 1))
def test_philox_seed_and_offset_decide_everything(seed, philox_seed, offset):
    """Same key, same codes; another offset or seed, others (with 4096 coin flips)."""
    x = random_tensor((64, 64), BF16, seed)

    def codes(**key):
        return quantize(x, refops.NVFP4Scaling(stochastic_rounding=True, **key)).rowwise_data

    first = codes(seed=philox_seed, offset=offset)
    assert np.array_equal(first, codes(seed=philox_seed, offset=offset))
    assert not np.array_equal(first, codes(seed=philox_seed ^ 1, offset=offset))
    assert not np.array_equal(first, codes(seed=philox_seed, offset=offset ^ (1 << 63)))


@profile
@given(data=st.data(), size=st.sampled_from([1, 1 << 14, 1 << 15, 1 << 16, 1 << 20]))
@pytest.mark.parametrize("name", ["block-1d", "mxfp8-2d", "current", "nvfp4-sr-rht", "nvfp4-row"])
def test_tile_size_never_changes_a_bit(name, data, size):
    """Shapes that hypothesis likes, any tile size (`test_tiles.py` has every operation)."""
    x = data.draw(tensors(name))
    expected = quantize(x, SCALINGS[name], columnwise=True)
    with tile_elements(size):
        assert_same_quantized(quantize(x, SCALINGS[name], columnwise=True), expected)


# --- layout ----------------------------------------------------------------------------------------------


@profile
@given(rows=st.integers(0, 4), columns=st.integers(0, 6), seed=seeds)
def test_swizzle_is_a_permutation_with_an_inverse(rows, columns, seed):
    scales = np.random.default_rng(seed).integers(0, 256, (128 * rows, 4 * columns), dtype=np.uint8)
    assert_same_bits(refops.unswizzle(refops.swizzle(scales)), scales)
    assert_same_bits(refops.swizzle(refops.unswizzle(scales)), scales)
    assert sorted(refops.swizzle(scales).reshape(-1)) == sorted(scales.reshape(-1))


@profile
@given(codes=hnp.arrays(np.uint8, hnp.array_shapes(max_dims=4, max_side=6), elements=st.integers(0, 15)))
def test_pack_and_unpack_are_inverse(codes):
    codes = np.concatenate([codes, codes[..., ::-1]], axis=-1)
    packed = refops.pack_fp4(codes)
    assert packed.shape == (*codes.shape[:-1], codes.shape[-1] // 2)
    assert_same_bits(refops.unpack_fp4(packed), codes)
    assert np.array_equal(decode(refops.unpack_fp4(packed), E2M1), decode(codes, E2M1))


@profile
@given(seed=seeds, mask=st.integers(0, 0xFFFF))
def test_hadamard_is_orthogonal(seed, mask):
    """On integers, whose sums are exact: it keeps dot products, its inverse undoes it, mask 0 is its own inverse."""
    rng = np.random.default_rng(seed)
    a, b = rng.integers(-64, 65, (2, 5, 48)).astype(F)
    ta, tb = refops.hadamard_transform(a, mask), refops.hadamard_transform(b, mask)
    assert np.array_equal((ta * tb).sum(axis=1), (a * b).sum(axis=1))
    assert np.array_equal(refops.hadamard_transform(ta, mask, inverse=True), a)
    twice = refops.hadamard_transform(refops.hadamard_transform(a, 0), 0)
    assert np.array_equal(twice, a)


@profile
@given(seed=seeds, dtype=dtypes, name=st.sampled_from(list(refops.ACTIVATIONS)))
def test_activations_are_elementwise(seed, dtype, name):
    """A row's result is the same alone, in another order, and among other rows."""
    x, dy = random_tensor((37, 90), dtype, seed), random_tensor((37, 90), dtype, seed + 1)
    dy = dy[:, :45] if refops.ACTIVATIONS[name].gated else dy
    order = np.random.default_rng(seed).permutation(37)
    y, dx = refops.activation(name, x), refops.activation_grad(name, dy, x)
    assert_same_bits(refops.activation(name, x[order]), y[order])
    assert_same_bits(refops.activation_grad(name, dy[order], x[order]), dx[order])
    assert_same_bits(refops.activation(name, x[5]), y[5])
    assert_same_bits(refops.activation_grad(name, dy[5], x[5]), dx[5])
