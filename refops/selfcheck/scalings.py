"""Scalings: `quantize` and `dequantize`, both directions, checked against the rules for codes and scales in float64."""

from dataclasses import dataclass, replace
from functools import partial

import ml_dtypes
import numpy as np

from refops.formats import E2M1, encode_by_definition
from refops.scaling import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, NVFP4Scaling, Scaling
from refops.selfcheck.inputs import in_every_dtype, synthetic_tensors
from refops.selfcheck.settings import CHECKED
from refops.selfcheck.tally import Task, U
from refops.survey import as_matrix, cast_dequantized_source, cast_source, decode_scale_source, element_codes
from refops.tiles import tile_elements


def scaling_tasks(ops, real):
    """Return the tasks of every scaling."""
    tasks = []
    for named in CHECKED.values():
        task = partial(Task, "scalings", named.name)
        tasks += [
            task(
                "codes: |x| / decode scale lies in the code's rounding interval, float64",
                partial(_check_directions, ops, named, real, _check_rounding),
            ),
            task(
                "scales: amax / decode scale lies where the scale rule puts it, float64",
                partial(_check_directions, ops, named, real, _check_scale),
            ),
            task(
                "signs are kept, NaN gives NaN (E2M1: +6), infinity the largest value",
                partial(_check_directions, ops, named, {}, _check_specials),
            ),
            task("columnwise = rowwise of the transpose, bit for bit", partial(_check_transpose, ops, named, real)),
            task("smaller tiles, and each direction made alone, bit for bit", partial(_check_tiles, ops, named, real)),
        ]
        if isinstance(named.scaling, NVFP4Scaling) and named.scaling.four_over_six == "mae":
            tasks.append(
                task(
                    "choice of 4 or 6: the error of both, float64",
                    partial(_check_directions, ops, named, real, _check_four_over_six),
                )
            )
    return tasks


def _allowed(named, x):
    """Whether a scaling takes a shape: NVFP4 needs multiples of 16, row-scaled columnwise 32."""
    if not isinstance(named.scaling, NVFP4Scaling):
        return True
    multiple = 32 if named.scaling.row_scaled else 16
    m, k = int(np.prod(x.shape[:-1])), x.shape[-1]
    return m % multiple == 0 and k % multiple == 0


def _scaling_inputs(named, real):
    """Yield (label, tensor): synthetic tensors in every dtype, real ones in their own."""
    for label, x in (*in_every_dtype(synthetic_tensors()), *real.items()):
        if _allowed(named, x):
            yield f"{named.name} {label}", x


# --- one direction of a Quantized, against the scaling's rules -------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """One direction of a `Quantized` and what it was made from, all as (outer, inner): blocks run along the inner axis.

    Attributes:
        scaling: its settings.
        values: float64, what was cast.
        codes: uint8.
        decode: float64, each element's decode scale.
        restored: float64, code value times decode scale.
        amax: the amax that the `Quantized` carries, or None.
    """

    scaling: Scaling
    values: np.ndarray
    codes: np.ndarray
    decode: np.ndarray
    restored: np.ndarray
    amax: np.ndarray | None


def _check_directions(ops, named, real, check, tally):
    """Run check(tally, label, stored) on each input in each direction."""
    for label, x in _scaling_inputs(named, real):
        for columnwise in (False, True):
            q = ops.quantize(x, named.scaling, rowwise=not columnwise, columnwise=columnwise)
            check(tally, f"{label} {'columnwise' if columnwise else 'rowwise'} ", _stored(x, q, columnwise))


def _stored(x, q, columnwise):
    def oriented(matrix):
        return matrix.T if columnwise else matrix

    return Stored(
        q.scaling,
        values=oriented(as_matrix(cast_source(x, q))).astype(np.float64),
        codes=oriented(element_codes(q)),
        decode=oriented(as_matrix(decode_scale_source(q))).astype(np.float64),
        restored=oriented(as_matrix(cast_dequantized_source(q))).astype(np.float64),
        amax=q.amax_columnwise if columnwise else q.amax_rowwise,
    )


def _split_sign(codes, fmt):
    """(magnitude code, negative?)."""
    sign = np.uint8(1 << (fmt.bits - 1))
    return codes & ~sign, codes & sign != 0


def _check_rounding(tally, label, stored):
    """|x| / decode scale lies where elements with this code come from: between the midpoints to the code's neighbours.

    Stochastic rounding: between the neighbours themselves. The float32 roundings on the way are allowed for. Left out:
    infinite scales, and those so small that float32 holds them with few bits or the kernel clamps them.
    """
    fmt = stored.scaling.fmt
    magnitude, _ = _split_sign(stored.codes, fmt)
    smallest = 2.0**-127 if isinstance(stored.scaling, MXFP8Scaling) else 2.0**-110
    judged = np.isfinite(stored.values) & np.isfinite(stored.decode) & (stored.decode >= smallest)
    middle = (fmt.grid[1:] + fmt.grid[:-1]) / 2
    low, high = np.append(0, middle), np.append(middle, np.inf)
    if getattr(stored.scaling, "stochastic_rounding", False):
        low, high = np.append(0, fmt.grid[:-1]), np.append(fmt.grid[1:], np.inf)
    code = np.minimum(magnitude, fmt.largest_code)
    scaled = np.abs(stored.values) / stored.decode
    slack = 2.0**-20
    inside = (
        (scaled >= low[code] * (1 - slack)) & (scaled <= high[code] * (1 + slack)) & (magnitude <= fmt.largest_code)
    )
    tally.holds(
        label,
        inside[judged],
        lambda i: f"code 0x{stored.codes[judged][i]:02X} for scaled magnitude {scaled[judged][i]:.9g}",
    )
    product = fmt.values[stored.codes].astype(np.float64) * stored.decode
    off = np.abs(stored.restored - product) > np.abs(product) * 2.0**-22
    off &= np.abs(product) < np.finfo(np.float32).max
    tally.holds(f"{label}dequantized", ~off[judged], lambda i: f"got {stored.restored[judged][i]:.9g}")


def _check_specials(tally, label, stored):
    """Signs are kept, NaN becomes NaN (E2M1: +6), infinity the largest value."""
    fmt = stored.scaling.fmt
    magnitude, negative = _split_sign(stored.codes, fmt)
    is_nan = np.isnan(stored.values)
    expected_nan = fmt.largest_code if fmt.nan_code is None else fmt.nan_code
    tally.holds(f"{label}sign", (negative == np.signbit(stored.values))[~is_nan])
    tally.holds(f"{label}NaN", stored.codes[is_nan] == expected_nan)
    tally.holds(f"{label}inf", magnitude[np.isinf(stored.values)] == fmt.largest_code)
    tally.holds(f"{label}NaN only from NaN", magnitude[~is_nan] <= fmt.largest_code)


def _block_shape(stored):
    """(rows, elements along a row) that share one scale."""
    scaling = stored.scaling
    if isinstance(scaling, CurrentScaling):
        return stored.values.shape
    two_d = scaling.block_dim == 2 if isinstance(scaling, BlockScaling) else scaling.two_d
    return (scaling.block_size if two_d else 1), scaling.block_size


def _block_maxima(stored, rows, length):
    """(finite amax, has an infinity?) of each block, by float64 reductions of their own."""
    outer, inner = stored.values.shape

    def block_maximum(array):
        along_rows = np.maximum.reduceat(array, np.arange(0, inner, length), axis=1)
        return np.maximum.reduceat(along_rows, np.arange(0, outer, rows), axis=0)

    magnitude = np.abs(stored.values)
    return block_maximum(np.where(np.isfinite(magnitude), magnitude, 0)), block_maximum(np.isinf(magnitude))


def _check_scale(tally, label, stored):
    """Each block's amax over its decode scale lands where the scaling puts it (the interval of its rounding rule)."""
    scaling = stored.scaling
    if isinstance(scaling, DelayedScaling):
        tally.holds(label, np.abs(stored.decode * float(np.float32(scaling.scale)) - 1) <= 2.0**-23)
        return
    if isinstance(scaling, NVFP4Scaling):
        _check_nvfp4_scale(tally, label, stored)
        return
    rows, length = _block_shape(stored)
    amax, infinite = _block_maxima(stored, rows, length)
    amax = np.maximum(amax, float(np.float32(getattr(scaling, "amax_epsilon", 0))))
    rule = getattr(scaling, "scale_rounding", "up")
    if rule == "even":  # the floor rule for an amax rounded half up to the element's mantissa
        step = 2.0 ** (np.floor(np.log2(np.where(amax > 0, amax, 1))) - scaling.fmt.mantissa_bits)
        amax = np.floor(amax / step + 0.5) * step
    top = amax / stored.decode[::rows, ::length]
    largest = float(scaling.fmt.max)
    power = 2.0 ** np.floor(np.log2(largest))
    if rule in ("floor", "even"):
        ok = (top >= power) & (top < 2 * power)
    elif rule == "ceil_ocp":
        ok = (top > power / 2) & (top <= power)
    elif isinstance(scaling, MXFP8Scaling) or scaling.power_2_scale:
        ok = (top > largest / 2) & (top <= largest * (1 + 2.0**-22))
    else:
        ok = np.abs(top / largest - 1) <= 2.0**-22
    judged = ~infinite & (amax > 2.0**-100)
    tally.holds(label, ok[judged], lambda i: f"amax over decode scale is {top[judged][i]:.9g}")


def _check_nvfp4_scale(tally, label, stored):
    """Block maxima land on 6 (4over6: or 4) up to half a step of the E4M3 scale; the stored amax is the tensor's."""
    scaling = stored.scaling
    rows, length = _block_shape(stored)
    amax, infinite = _block_maxima(stored, rows, length)
    axis = 1 if scaling.row_scaled else None
    tensor_amax = np.where(infinite.any(axis, keepdims=True), np.inf, amax.max(axis, keepdims=True))
    tally.equal(f"{label}amax", stored.amax, tensor_amax.ravel().astype(np.float32))
    decode = stored.decode[::rows, ::length]
    # Beyond FLT_MAX / 448 the decode scale itself overflows, as TE's does.
    judged = np.isfinite(decode) & (tensor_amax > 2.0**-100) & (amax > 0)
    scale = decode * 6 * scaling.e4m3_max / tensor_amax  # the E4M3 value, to a few float32 roundings
    half_step = np.maximum(2.0**-4, 2.0**-10 / scale) + 2.0**-18
    top = amax / decode
    ok = np.abs(top / 6 - 1) <= half_step
    if scaling.four_over_six:
        capped = scale >= 448 * (1 - 2.0**-18)  # the scale that maps to 4 is cut off at 448
        ok |= (np.abs(top / 4 - 1) <= half_step) | (capped & (top > 4 * (1 - half_step)) & (top < 6))
    flushed = amax / tensor_amax * scaling.e4m3_max <= 2.0**-10 * (1 + 2.0**-18)
    ok = np.where(decode == 0, flushed, ok)
    tally.holds(label, ok[judged], lambda i: f"block amax over decode scale is {top[judged][i]:.9g}")


def _check_four_over_six(tally, label, stored):
    """No block has more error than the better of its two candidates, made here in float64."""
    scaling = stored.scaling
    rows, length = _block_shape(stored)
    blocks = stored.values.reshape(len(stored.values) // rows, rows, -1, length)
    amax, tensor_amax = np.abs(blocks).max(axis=(1, 3)), np.abs(blocks).max()
    power = {"mae": 1, "mse": 2}[scaling.four_over_six]
    unit = tensor_amax / (6 * scaling.e4m3_max)
    if not 2.0**-100 < tensor_amax < np.inf:
        return
    errors, judged = [], np.ones(amax.shape, bool)
    for factor in (1.0, 1.5):
        base = amax / 6 / unit * factor
        scale = _nearest_e4m3(base)
        on_a_tie = _nearest_e4m3(base * (1 - 2.0**-20)) != _nearest_e4m3(base * (1 + 2.0**-20))
        judged &= ~on_a_tie & (scale > 0)  # float32 may round a scale that lies on a tie either way
        step = (scale * unit)[:, None, :, None]
        codes = encode_by_definition(blocks / step, E2M1, True, "nearest_even")
        errors.append((np.abs(E2M1.values[codes] * step - blocks) ** power).sum(axis=(1, 3)))
    got = (np.abs(stored.restored.reshape(blocks.shape) - blocks) ** power).sum(axis=(1, 3))
    best = np.minimum(*errors)
    # The kernel compares float32 sums of float32 differences.
    ok = got <= best + 16 * power * U * (np.abs(blocks) ** power).sum(axis=(1, 3))
    tally.holds(
        label, ok[judged], lambda i: f"error {got[judged][i]:.9g}, the better candidate's {best[judged][i]:.9g}"
    )


def _nearest_e4m3(values):
    return np.minimum(values, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


# --- whole results, bit for bit --------------------------------------------------------------------------------------


def _check_transpose(ops, named, real, tally):
    """The columnwise copy is the rowwise copy of the transpose (RHT: of the transformed transpose)."""
    for label, x in _scaling_inputs(named, real):
        if x.ndim != 2:
            continue
        scaling, transposed = named.scaling, np.ascontiguousarray(x.T)
        row_scaling = scaling
        if isinstance(scaling, NVFP4Scaling) and scaling.rht:
            transposed = ops.hadamard_transform(transposed, scaling.sign_mask)
            row_scaling = replace(scaling, rht=False)
        elif isinstance(scaling, NVFP4Scaling) and scaling.stochastic_rounding:
            bits = np.random.default_rng(3).integers(0, 256, transposed.shape, dtype=np.uint8)
            scaling = row_scaling = replace(scaling, random_bits=bits)
        column = ops.quantize(x, scaling, rowwise=False, columnwise=True)
        row = ops.quantize(transposed, row_scaling)
        data, scales = column.columnwise_data, column.columnwise_scale_inv
        if isinstance(scaling, MXFP8Scaling):  # stored in the tensor's orientation, not transposed
            data, scales = data.T, scales.T
        tally.equal(f"{label} data", data, row.rowwise_data)
        tally.equal(f"{label} scales", scales, row.rowwise_scale_inv)
        tally.equal(f"{label} amax", column.amax_columnwise, row.amax_rowwise)


def _check_tiles(ops, named, real, tally):
    """Smaller tiles, and each direction made alone, give the same bits."""
    for label, x in _scaling_inputs(named, real):
        both = ops.quantize(x, named.scaling, columnwise=True)
        with tile_elements(1):
            small = ops.quantize(x, named.scaling, columnwise=True)
            values = ops.dequantize(small)
        tally.quantized(label, small, both)
        tally.equal(f"{label} dequantized", values, ops.dequantize(both))
        row = ops.quantize(x, named.scaling)
        column = ops.quantize(x, named.scaling, rowwise=False, columnwise=True)
        apart = replace(
            row,
            columnwise_data=column.columnwise_data,
            columnwise_scale_inv=column.columnwise_scale_inv,
            amax_columnwise=column.amax_columnwise,
        )
        tally.quantized(label, apart, both)
        tally.amaxes(label, apart, both)
